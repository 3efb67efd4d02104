"""The public face of layer 1: a function's value and its derivative as a linear map."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import tensorflow as tf

from hvp._errors import (
    ClosedOperatorError,
    InvalidLossError,
    InvalidVectorError,
    OutOfMemoryError,
    line_of,
)
from hvp._guard import Guard, OneProcess
from hvp._interrupts import Uninterrupted
from hvp._linearize.compiled import JitCompile
from hvp._linearize.flatten import as_tensor, check_numeric, outline
from hvp._linearize.graph import GraphEngine
from hvp._linearize.program import Engine, Program
from hvp._linearize.tape import TapeEngine
from hvp._strategies import outside_strategies


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

    def __init__(
        self, program: Program, engine: TapeEngine | GraphEngine, value: Any, guard: Guard
    ) -> None:
        self.value = value
        self.engine = engine.name
        self.nbytes = program.nbytes(engine)
        self._engine: TapeEngine | GraphEngine | None = engine
        self._guard = guard
        self._primal = program.flattener
        self._dtypes = [output.dtype for output in engine.outputs if output is not None]

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
        if self._primal.is_flat(v):
            parts = self._primal.split(as_tensor(v, self._primal.dtype))
        else:
            parts = self._primal.parts_of_nest(v)
        tangents = [as_tensor(part, dtype) for part, dtype in zip(parts, self._primal.dtypes)]
        with self._guard, self._guard.lock:
            return tf.nest.pack_sequence_as(self.value, self._open().jvp(tangents))

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
        engine = self._open()
        try:
            tf.nest.assert_same_structure(self.value, u)
        except (TypeError, ValueError) as error:
            raise InvalidVectorError(
                f"u has the structure {outline(u)}", f"that of the value, {outline(self.value)}"
            ) from error
        parts = tf.nest.flatten(u)
        shapes = [tuple(output.shape) for output in engine.outputs if output is not None]
        for part in parts:
            check_numeric(part, "u")
        if [tuple(part.shape) for part in parts] != shapes:
            raise InvalidVectorError(
                f"u has parts of shapes {[tuple(part.shape) for part in parts]}",
                f"the shapes of the value, {shapes}",
            )
        cotangents = [as_tensor(part, dtype) for part, dtype in zip(parts, self._dtypes)]
        with self._guard, self._guard.lock:
            return self._primal.nest_of_parts(engine.vjp(cotangents))

    def __repr__(self) -> str:
        size = sum(int(output.shape.num_elements() or 0) for output in tf.nest.flatten(self.value))
        standing = ", closed" if self._engine is None else ""
        return (
            f"Linearization({size} values of {self._primal.size} variables, "
            f"engine {self.engine!r}{standing})"
        )

    def close(self) -> None:
        """Release the residuals; `value` stays. Closing twice does nothing."""
        with self._guard, self._guard.lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

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

    def _open(self) -> TapeEngine | GraphEngine:
        if self._engine is None:
            raise ClosedOperatorError(
                "this linearization is closed", "", "call hvp.linearize again"
            )
        return self._engine


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
    structure: list[Any] = []

    def outputs(_: Any) -> tuple[None, list[tf.Tensor | None]]:
        value = f()
        structure[:] = [tf.nest.map_structure(lambda _: 0, value)]
        return None, [_check_output(leaf) for leaf in tf.nest.flatten(value)]

    guard = Guard(_out_of_memory)
    with guard, Uninterrupted():
        program = Program(outputs, variables, engine, jit_compile)
        _, made = program.linearize()
    value = tf.nest.pack_sequence_as(structure[0], made.outputs)
    return Linearization(program, made, value, guard)


def _out_of_memory(error: Exception) -> OutOfMemoryError:
    reason = line_of(error, about="OOM")
    return OutOfMemoryError(
        f"there was not enough memory for a linearization (TensorFlow: {reason})",
        "a function whose intermediate values fit",
        "let some of them be recomputed, by hvp.recompute; or use hvp.HessianOperator, which "
        "divides data by memory_limit",
    )


def _check_output(leaf: Any) -> tf.Tensor:
    is_tensor = isinstance(leaf, (tf.Tensor, tf.Variable))
    if not is_tensor or not leaf.dtype.is_floating:
        given = leaf.dtype.name if is_tensor else type(leaf).__name__
        raise InvalidLossError(
            f"the function to linearize returned a {given}", "floating-point tensors"
        )
    return tf.convert_to_tensor(leaf)
