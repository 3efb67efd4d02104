"""The state of `NewtonCG` that `tf.train.Checkpoint` saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._minimize.forcing import MAX_FORCING


class NewtonState(tf.Module):
    """Everything that the next step depends on, in variables.

    Parameters
    ----------
    trained : sequence of tf.Variable
        The variables that are minimized over.
    radius, damping : float
        Their initial values.
    shapes : list of list of int
        Shapes of the preconditioner's tensors.
    dtype : numpy.dtype
        Type of the preconditioner's tensors.

    Attributes
    ----------
    radius, damping : tf.Variable
        Radius of the trust region, and damping.
    forcing, gradient_norm : tf.Variable
        Forcing term of the last accepted step, and norm of the gradient before it; the norm is zero
        if there was none.
    iterations : tf.Variable
        Number of steps.
    preconditioner_iterations : tf.Variable
        Number of iterations of conjugate gradients that used the current preconditioner; -1 if
        there is none.
    preconditioner : list of tf.Variable
        Tensors of the preconditioner.
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

        The preconditioner is built again when it is needed next, or begins anew.
        """
        for variable, value in zip(self._numbers, self._initial_values):
            variable.assign(value)
        for tensor in self.preconditioner:
            tensor.assign(tf.zeros_like(tensor))


def _number(value: float) -> tf.Variable:
    return tf.Variable(value, dtype=tf.float64, trainable=False)


def _count(value: int) -> tf.Variable:
    return tf.Variable(value, dtype=tf.int64, trainable=False)
