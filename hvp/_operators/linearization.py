"""Any function's value, and its derivative as a linear map."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import tensorflow as tf

from hvp._engines.rule import PullbackRule
from hvp._engines.settings import Engine, Precision, Settings
from hvp._engines.single_plan import SinglePlan
from hvp._errors import InvalidLossError, InvalidVectorError, OutOfMemoryError, line_of
from hvp._graphs.compiled import JitCompile
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.space import as_tensor, check_numeric, outline
from hvp._vectors.variables import collect_variables


class Linearization(OneProcess):
    """The derivative of a function at one point: a linear map, the Jacobian `J`.

    Made by `hvp.linearize`. It uses some memory, the *residuals*, so that products need not
    evaluate the function again. It is a context manager, which releases the residuals when it is
    left.

    Attributes
    ----------
    value : nest of tf.Tensor
        The value of the function.
    engine : str
        The engine that computes products: ``"graph"`` or ``"tape"``.
    nbytes : int or None
        An upper bound on the size of the residuals; None if it is not known.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.value = snapshot.value()
        stats = snapshot.statistics
        self.engine, self.nbytes = stats.engine, stats.residual_bytes
        self._pullback = snapshot.map()
        self._pushforward = self._pullback.transpose()

    @Uninterrupted()
    def jvp(self, v: Any) -> Any:
        """Return the directional derivative `J v`.

        Parameters
        ----------
        v : nest of tensors or arrays, or array
            A tangent shaped like the variables, or one flat vector of shape `(n,)`. It is cast to
            their dtypes.

        Returns
        -------
        nest of tf.Tensor
            The product, shaped like `value`.

        Raises
        ------
        InvalidVectorError
            If `v` does not fit the variables.
        ClosedOperatorError
            If the linearization is closed.

        Notes
        -----
        `J^T u` is linear in `u`, and its derivative with respect to `u`, applied to `v`, is `J v`.
        The first call records `J^T u` for this purpose; each call costs one backward pass over the
        residuals.
        """
        space = self._pullback.codomain
        if space.is_flat(v):
            parts = space.split(as_tensor(v, space.dtype))
        else:
            parts = space.parts_of_nest(v)
        tangents = [as_tensor(part, dtype) for part, dtype in zip(parts, space.dtypes)]
        return tf.nest.pack_sequence_as(self.value, self._pushforward.apply(tangents))

    @Uninterrupted()
    def vjp(self, u: Any) -> Any:
        """Return `J^T u`.

        Parameters
        ----------
        u : nest of tensors or arrays
            A cotangent shaped like `value`, which is cast to its dtypes.

        Returns
        -------
        nest of tf.Tensor
            The product, shaped like the variables.

        Raises
        ------
        InvalidVectorError
            If `u` does not fit the value.
        ClosedOperatorError
            If the linearization is closed.

        Notes
        -----
        This costs one backward pass over the residuals.
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
        """Release the residuals, but not `value`. Closing twice does nothing."""
        self.snapshot.close()

    def __enter__(self) -> Linearization:
        """Return the linearization."""
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
@Uninterrupted()
def linearize(
    f: Callable[[], Any],
    variables: Any,
    *,
    engine: Engine = "graph",
    jit_compile: JitCompile = False,
    precision: Precision | None = None,
) -> Linearization:
    """Evaluate a function, and keep its derivative as a linear map.

    The function is evaluated once, however many vectors its derivative is applied to afterwards.
    This uses some memory to make each product cheaper.

    Parameters
    ----------
    f : callable
        A function of no arguments that reads the variables and returns a nest of floating-point
        tensors.
    variables : nest
        `tf.Variable`, `keras.Variable`, modules, Keras layers or models; the latter stand for their
        trainable variables.
    engine : {"graph", "tape"}, optional
        How to compute products: by compiled functions, or operation by operation from a persistent
        tape. If a function cannot be traced, or not be divided because effects depend on the
        cotangent, the tape engine is used instead, and the log says why.
    jit_compile : bool or "auto", optional
        Whether XLA compiles the graph engine's functions; as for `HessianOperator`.
    precision : {"bfloat16", "float16"}, optional
        A lower precision for matrix products, convolutions and residuals; as for `HessianOperator`.

    Returns
    -------
    Linearization
        The derivative at the values the variables have now, with `value`, `jvp`, `vjp`, `nbytes`
        and `close`. It does not change when the variables do.

    Raises
    ------
    InvalidVariablesError
        If `variables` contains anything else.
    InvalidLossError
        If `f` does not return floating-point tensors.
    SecondDerivativeError
        If TensorFlow lacks the derivative of an operation in `f`.

    Notes
    -----
    The function is traced once, and its graph runs once. With the tape engine its Python code runs
    a second time instead. State that it updates (moving averages, seeds) is restored.

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
    settings = Settings(
        engine=engine, jit_compile=jit_compile, on_stale="ignore", precision=precision
    )
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
        kind = leaf.dtype.name if is_tensor else type(leaf).__name__
        raise InvalidLossError(
            f"the function to linearize returned a {kind}", "floating-point tensors"
        )
    return tf.convert_to_tensor(leaf)
