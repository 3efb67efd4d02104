"""The life cycle of a linearized loss: when it is evaluated, how long that stays true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from hvp._errors import (
    ClosedOperatorError,
    HvpError,
    InvalidVariablesError,
    NonFiniteError,
    StaleOperatorError,
)
from hvp._linearize.gradient import value_and_gradient
from hvp._linearize.graph import GraphEngine
from hvp._linearize.program import Engine, Program
from hvp._linearize.tape import TapeEngine
from hvp._operators.staleness import Watch
from hvp._operators.statistics import Statistics

OnStale = Literal["raise", "refresh", "ignore"]


class Evaluation:
    """A loss, its gradient, and the gradient's derivative, at the variables' values of one moment.

    Parameters
    ----------
    loss : callable
        Takes nothing, returns a real scalar.
    variables : nest
        What to differentiate with respect to.
    on_stale : {"raise", "refresh", "ignore"}
        What to do when something is asked for after a variable the loss reads has changed.
    engine : {"graph", "tape"}
        What is to hold the linearization.

    Attributes
    ----------
    program : Program
        The traced gradient.
    statistics : Statistics
        Counts.
    """

    def __init__(
        self, loss: Callable[[], Any], variables: Any, on_stale: OnStale, engine: Engine
    ) -> None:
        if on_stale not in ("raise", "refresh", "ignore"):
            raise HvpError(
                f"the argument on_stale is {on_stale!r}", "'raise', 'refresh' or 'ignore'"
            )
        self.on_stale = on_stale
        self.statistics = Statistics()
        self._engine: TapeEngine | GraphEngine | None = None
        self._value: tf.Tensor | None = None
        self._absent = "the operator is closed"
        self.program = Program(value_and_gradient(loss), variables, engine)
        self.statistics.traces = self.program.traces
        self.statistics.engine = self.program.engine
        self.statistics.note = self.program.note
        self._watch = Watch(self.program.reads)
        self.refresh()

    def refresh(self) -> None:
        """Evaluate at the values the variables have now.

        What is kept of the point before is released first, so that the two never have to fit in
        memory together. If this raises, the evaluation holds nothing until a `refresh` succeeds.
        """
        self._release("the last refresh failed")
        value, engine = self.program.linearize()
        self.statistics.gradient_evaluations += 1
        self._check(value, engine.outputs)
        self._watch.set()
        self._value, self._engine = value, engine
        self.statistics.residual_bytes = self.program.nbytes(engine)

    def close(self) -> None:
        """Release what is kept."""
        self._release("the operator is closed")

    def value(self) -> tf.Tensor:
        """Return the loss, a scalar."""
        self._current()
        return self._value

    def gradient(self) -> list[tf.Tensor]:
        """Return the gradient, a tensor for each variable."""
        variables = self.program.nest.variables
        return [
            tf.zeros(v.shape, v.dtype) if g is None else g
            for g, v in zip(self._current().outputs, variables)
        ]

    def product(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply the Hessian by one vector, in parts shaped and typed like the variables."""
        result = self._current().vjp(parts)
        self.statistics.products += 1
        return result

    def product_flat(self, flat: tf.Tensor) -> tf.Tensor:
        """Multiply by one flat vector, of shape `(n,)`."""
        result = self._current().vjp_flat(flat, self.program.flattener)
        self.statistics.products += 1
        return result

    def product_block(self, block: tf.Tensor) -> tf.Tensor:
        """Multiply by the columns of a block, of shape `(n, k)`."""
        result = self._current().vjp_flat_columns(block, self.program.flattener)
        self.statistics.products += int(block.shape[1])
        return result

    def _current(self) -> TapeEngine | GraphEngine:
        """Return the engine, having made sure that it is there and true."""
        if self._engine is None:
            raise ClosedOperatorError(
                self._absent, "an operator that is open", "call refresh() or make a new one"
            )
        if self.on_stale != "ignore":
            changed = self._watch.changed()
            if changed and self.on_stale == "raise":
                raise StaleOperatorError(
                    f"variables that the loss reads have changed: {_list(changed)}",
                    "the values at which the operator was evaluated",
                    "call refresh(), or pass on_stale='refresh'",
                )
            if changed:
                self.refresh()
        return self._engine

    def _release(self, reason: str) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._value = None
        self._watch.release()
        self._absent = reason
        self.statistics.residual_bytes = 0

    def _check(self, value: tf.Tensor, gradient: Sequence[tf.Tensor | None]) -> None:
        names = self.program.nest.names
        if all(g is None for g in gradient):
            raise InvalidVariablesError(
                f"the loss depends on none of the variables {_list(names)}",
                "a loss that reads at least one of them",
                "check that the loss uses these very variables, through TensorFlow operations",
            )
        if not tf.math.is_finite(value):
            raise NonFiniteError(f"the loss is {float(value)}", "a finite loss")
        broken = [
            name
            for name, g in zip(names, gradient)
            if g is not None and not tf.reduce_all(tf.math.is_finite(g))
        ]
        if broken:
            raise NonFiniteError(
                f"the gradient is not finite for {_list(broken)}",
                "a loss that is differentiable at this point",
                "look for square roots, norms or logarithms of zero",
            )


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
