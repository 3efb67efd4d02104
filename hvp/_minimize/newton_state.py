"""The state of `NewtonCG`, as saved by `tf.train.Checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._minimize.forcing import MAX_FORCING


class NewtonState(tf.Module):
    """Everything that the next step depends on, in variables.

    `trained` are the variables that are minimized over. `shapes` and `dtype` are those of the
    preconditioner's tensors. `forcing` belongs to the last accepted step, and `gradient_norm` is
    the norm before that step, or zero if there was none. `preconditioner_iterations` counts the
    iterations of conjugate gradients that used the current preconditioner; it is -1 if there is
    none.
    """

    def __init__(
        self,
        trained: Sequence[tf.Variable],
        radius: float,
        damping: float,
        shapes: list[list[int]],
        dtype: Any,
    ) -> None:
        super().__init__(name="newton_state")
        self.trained = trained  # saved too
        self.radius = _number(radius)
        self.damping = _number(damping)
        self.forcing = _number(MAX_FORCING)
        self.gradient_norm = _number(0.0)
        self.iterations = _count(0)
        self.preconditioner_iterations = _count(-1)
        self.preconditioner = [
            tf.Variable(tf.zeros(shape, dtype), trainable=False) for shape in shapes
        ]
        self._initial_values = tuple(variable.numpy().item() for variable in self._numbers)

    @property
    def _numbers(self) -> tuple[tf.Variable, ...]:
        return (
            *(self.radius, self.damping, self.forcing, self.gradient_norm),
            *(self.iterations, self.preconditioner_iterations),
        )

    def reset(self) -> None:
        """Restore the initial state, except for the variables that are minimized over.

        The preconditioner is rebuilt when it is next needed, or starts empty.
        """
        for variable, value in zip(self._numbers, self._initial_values):
            variable.assign(value)
        for tensor in self.preconditioner:
            tensor.assign(tf.zeros_like(tensor))


def _number(value: float) -> tf.Variable:
    return tf.Variable(value, dtype=tf.float64, trainable=False)


def _count(value: int) -> tf.Variable:
    return tf.Variable(value, dtype=tf.int64, trainable=False)
