"""Any function's value, and its derivative as a linear map."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import tensorflow as tf

from hvp._engines.rule import PullbackRule
from hvp._engines.settings import Engine, Settings
from hvp._engines.single_plan import SinglePlan
from hvp._errors import InvalidLossError, InvalidVectorError, OutOfMemoryError, line_of
from hvp._graphs.compiled import JitCompile
from hvp._runtime.guard import OneProcess
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.space import as_tensor, check_numeric, outline
from hvp._vectors.variables import collect_variables


class Linearization(OneProcess):
    """The derivative of a function at one point, applied as often as wanted.

    Made by `hvp.linearize`. Uses some memory, the *residuals*, so that an application need not
    evaluate the function again. A context manager: leaving it releases the residuals.

    Attributes
    ----------
    value : nest of tf.Tensor
        What the function returned.
    engine : str
        What holds the derivative.
    nbytes : int or None
        An upper bound of the residuals' size, None where it cannot be told.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.value = snapshot.value()
        stats = snapshot.statistics
        self.engine, self.nbytes = stats.engine, stats.residual_bytes
        self._pullback = snapshot.map()
        self._pushforward = self._pullback.transpose()

    def jvp(self, v: Any) -> Any:
        """Multiply the derivative by a tangent: `J v`, the directional derivative.

        Parameters
        ----------
        v : nest of tensors or arrays, or array
            Shaped like the variables, or one flat vector of shape `(n,)`; cast to their dtypes.

        Returns
        -------
        nest of tf.Tensor
            Like `value`.

        Raises
        ------
        InvalidVectorError
            If `v` does not fit the variables.
        ClosedOperatorError
            After `close`.

        Notes
        -----
        Costs one backward pass over the residuals. The first call also records the transposed
        derivative, and keeps it.
        """
        space = self._pullback.codomain
        if space.is_flat(v):
            parts = space.split(as_tensor(v, space.dtype))
        else:
            parts = space.parts_of_nest(v)
        tangents = [as_tensor(part, dtype) for part, dtype in zip(parts, space.dtypes)]
        return tf.nest.pack_sequence_as(self.value, self._pushforward.apply(tangents))

    def vjp(self, u: Any) -> Any:
        """Multiply the transposed derivative by a cotangent: `J^T u`.

        Parameters
        ----------
        u : nest of tensors or arrays
            Shaped like `value`; cast to its dtypes.

        Returns
        -------
        nest of tf.Tensor
            Like the variables.

        Raises
        ------
        InvalidVectorError
            If `u` does not fit the value.
        ClosedOperatorError
            After `close`.

        Notes
        -----
        Costs one backward pass over the residuals.
        """
        self.snapshot.make_sure()
        domain, codomain = self._pullback.domain, self._pullback.codomain
        try:
            tf.nest.assert_same_structure(self.value, u)
        except (TypeError, ValueError) as error:
            raise InvalidVectorError(
                f"u has the structure {outline(u)}", f"that of the value, {outline(self.value)}"
            ) from error
        parts = tf.nest.flatten(u)
        for part in parts:
            check_numeric(part, "u")
        if [tuple(part.shape) for part in parts] != domain.shapes:
            raise InvalidVectorError(
                f"u has parts of shapes {[tuple(part.shape) for part in parts]}",
                f"the shapes of the value, {domain.shapes}",
            )
        cotangents = [as_tensor(part, dtype) for part, dtype in zip(parts, domain.dtypes)]
        return codomain.nest_of_parts(self._pullback.apply(cotangents))

    def __repr__(self) -> str:
        domain, codomain = self._pullback.domain, self._pullback.codomain
        standing = self.snapshot.standing
        return (
            f"Linearization({domain.size} values of {codomain.size} variables, "
            f"engine {self.engine!r}{standing and f', {standing}'})"
        )

    def close(self) -> None:
        """Release the residuals; `value` stays. Closing twice does nothing."""
        self.snapshot.close()

    def __enter__(self) -> Linearization:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Release the residuals."""
        self.close()


@outside_strategies
def linearize(
    f: Callable[[], Any],
    variables: Any,
    *,
    engine: Engine = "graph",
    jit_compile: JitCompile = False,
) -> Linearization:
    """Evaluate a function, and keep its derivative as a linear map.

    Uses some memory to make each application of the derivative cheaper: the function is
    evaluated once, however many vectors its derivative is then applied to.

    Parameters
    ----------
    f : callable
        Takes nothing, returns a nest of floating-point tensors; reads the variables.
    variables : nest
        Of `tf.Variable`, `keras.Variable`, modules, Keras layers or models (which stand for their
        trainable variables).
    engine : {"graph", "tape"}, optional
        What holds the derivative: compiled functions, or a persistent tape. Where a function cannot
        be traced, or not be split into the former (effects that depend on the cotangent), the tape
        serves, and a line in the log says why.
    jit_compile : bool or "auto", optional
        Whether XLA compiles the graph engine's functions; as for `HessianOperator`.

    Returns
    -------
    Linearization
        With `value`, `jvp`, `vjp`, `nbytes`, `close`. It belongs to the values the variables have
        now: changing them later does not change it.

    Raises
    ------
    InvalidVariablesError
        If `variables` hold something else.
    InvalidLossError
        If `f` does not return floating-point tensors.
    SecondDerivativeError
        If TensorFlow lacks the derivative of an operation in `f`.

    Notes
    -----
    `f` is traced once, and what was traced runs once; with the tape engine its Python code runs
    instead, a second time. State that it updates (moving averages, seeds) is put back.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0])
    >>> with hvp.linearize(lambda: w**3, w) as derivative:
    ...     derivative.value.numpy(), derivative.jvp(tf.constant([1.0, 1.0])).numpy()
    (array([1., 8.], dtype=float32), array([ 3., 12.], dtype=float32))
    """
    if not callable(f):
        raise InvalidLossError(
            f"the function to linearize is {type(f).__name__}, which cannot be called",
            "a function of no arguments",
            "pass lambda: ...",
        )
    settings = Settings(engine=engine, jit_compile=jit_compile, on_stale="ignore")
    nest, rule = collect_variables(variables), PullbackRule(lambda: _checked(f()))
    return Linearization(
        Snapshot(
            lambda: SinglePlan(rule, nest, settings),
            "ignore",
            what="linearization",
            remedy="call hvp.linearize again",
            out_of_memory=_out_of_memory,
        )
    )


def _out_of_memory(error: Exception) -> OutOfMemoryError:
    reason = line_of(error, about="OOM")
    return OutOfMemoryError(
        f"there was not enough memory for a linearization (TensorFlow: {reason})",
        "a function whose intermediate values fit",
        "let some of them be recomputed, by hvp.recompute; or use hvp.HessianOperator, which "
        "divides data by memory_limit",
    )


def _checked(value: Any) -> Any:
    return tf.nest.map_structure(_checked_output, value)


def _checked_output(leaf: Any) -> tf.Tensor:
    is_tensor = isinstance(leaf, (tf.Tensor, tf.Variable))
    if not is_tensor or not leaf.dtype.is_floating:
        given = leaf.dtype.name if is_tensor else type(leaf).__name__
        raise InvalidLossError(
            f"the function to linearize returned a {given}", "floating-point tensors"
        )
    return tf.convert_to_tensor(leaf)
