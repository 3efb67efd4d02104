"""Conjugate gradients in a trust region (Steihaug 1983), many iterations in one call of a graph.

Where it differs from the usual method:

1. It ends where the region does, or where curvature is not positive: there it goes along that
   direction to the boundary.
2. With a preconditioner the region is a ball in its norm; the norms of the iterates come from
   recurrences, so that only its inverse is ever applied.
3. What the quadratic model promises is known from the residual, without another product.

Neither scipy's `cg`, which knows no negative curvature, nor its trust-region methods, which compute
in NumPy, nor TensorFlow's, which needs a positive definite operator, do this.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._graphs.compiled import Compiled
from hvp._operators.operator import SymmetricOperator

# Iterations in one call, between which Python sees interrupts; fewer where each product goes
# through Python, and may take long.
_CALL, _CALL_OF_PYTHON = 32, 4
# Tensors of a state.
_STATE = 9


class Outcome(enum.IntEnum):
    """Why the iteration ended."""

    RUNNING = 0
    CONVERGED = 1
    NEGATIVE_CURVATURE = 2
    BOUNDARY = 3
    MAXITER = 4
    NOT_FINITE = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class SteihaugResult:
    """A step.

    Attributes
    ----------
    step : tf.Tensor
        Of shape `(n,)`.
    outcome : Outcome
        Why it ended.
    iterations : int
        Products that were needed.
    norm : float
        Of the step, in the preconditioner's norm.
    predicted : float
        By how much the model decreases.
    """

    step: tf.Tensor
    outcome: Outcome
    iterations: int
    norm: float
    predicted: float


class Steihaug:
    """Minimizes quadratic models of one operator, wherever that is.

    Parameters
    ----------
    operator : SymmetricOperator
        The Hessian; it may be refreshed between solutions.
    precondition : callable, optional
        Takes a vector and tensors; returns the preconditioner's inverse times the vector.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        precondition: Callable[[tf.Tensor, Sequence[tf.Tensor]], tf.Tensor] | None = None,
    ) -> None:
        self._operator = operator
        self._precondition = precondition
        stats = operator.stats
        in_python = stats.engine == "tape" or stats.batches is not None
        self._call = _CALL_OF_PYTHON if in_python else _CALL
        self._in_python = in_python
        self._functions: dict[bool, tuple[Compiled, Compiled]] = {}

    def solve(
        self,
        gradient: tf.Tensor,
        *,
        radius: float,
        tolerance: float,
        damping: float = 0.0,
        maxiter: int,
        tensors: Sequence[tf.Tensor] = (),
    ) -> SteihaugResult:
        """Minimize the model, approximately.

        Parameters
        ----------
        gradient : tf.Tensor
            Of shape `(n,)`; not zero.
        radius : float
            Of the region.
        tolerance : float
            Norm of the model's gradient that is small enough.
        damping : float
            Multiple of the identity to add to the operator.
        maxiter : int
            How many products may be computed.
        tensors : sequence of tf.Tensor
            Of the preconditioner.

        Returns
        -------
        SteihaugResult
        """
        limits = tf.constant([radius, tolerance, damping], gradient.dtype)
        rest, done = [limits, gradient, *tensors], min(self._call, maxiter)
        begin, go_on = self._compiled(gradient, tensors, damping != 0)
        told, *state = begin(tf.constant(done), *rest)
        said = told.numpy()
        while int(said[0]) == Outcome.RUNNING and done < maxiter:
            done = min(done + self._call, maxiter)
            told, *state = go_on(*state, tf.constant(done), *rest)
            said = told.numpy()
        outcome = Outcome(int(said[0])) or Outcome.MAXITER
        norm, predicted = math.sqrt(max(said[2], 0.0)), float(said[3])
        return SteihaugResult(state[2], outcome, int(said[1]), norm, predicted)

    def _compiled(
        self, vector: tf.Tensor, tensors: Sequence[tf.Tensor], damped: bool
    ) -> tuple[Compiled, Compiled]:
        """Return what begins and what goes on; by XLA where it computes the operator's products."""
        found = self._functions.get(damped)
        if found is None:
            if not self._in_python and self._operator.stats.jit_compile is None:
                self._operator.product(vector)  # the first product settles it
            with_xla = not self._in_python and bool(self._operator.stats.jit_compile)

            def begin(last: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
                return self._further(self._first(rest[1], rest[2:]), last, rest, damped)

            def go_on(*given: tf.Tensor) -> list[tf.Tensor]:
                state, last, rest = given[:_STATE], given[_STATE], given[_STATE + 1 :]
                return self._further(state, last, rest, damped)

            count, number = tf.TensorSpec([], tf.int32), tf.TensorSpec([], vector.dtype)
            like = tf.TensorSpec(vector.shape, vector.dtype)
            state = [count, count, like, like, like, number, number, number, number]
            rest = [tf.TensorSpec([3], vector.dtype), like]
            rest += [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
            found = self._functions[damped] = (
                Compiled(begin, [count, *rest], with_xla),
                Compiled(go_on, [*state, count, *rest], with_xla),
            )
        return found

    def _inverse(self, vector: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        return vector if self._precondition is None else self._precondition(vector, tensors)

    def _first(self, gradient: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the state at the middle of the region.

        Outcome, iterations, step, model's gradient, direction, and inner products: of the model's
        gradient with itself, of step with step, step with direction, direction with direction.
        """
        descent = self._inverse(gradient, tensors)
        squared = _dot(gradient, descent)
        zero = tf.zeros([], gradient.dtype)
        start = [tf.zeros_like(gradient), tf.identity(gradient), -descent]
        return [tf.constant(0), tf.constant(0), *start, squared, zero, zero, squared]

    def _further(
        self, state: Sequence[tf.Tensor], last: tf.Tensor, rest: Sequence[tf.Tensor], damped: bool
    ) -> list[tf.Tensor]:
        """Return what Python has to know of the state after some iterations, and the state."""
        limits, gradient, *tensors = rest
        state = list(self._more(list(state), limits, tensors, last, damped))
        step, both = (tf.cast(t, tf.float64) for t in (state[2], gradient + state[3]))
        told = [state[0], state[1], state[6], -_dot(step, both) / 2]
        return [tf.stack([tf.cast(number, tf.float64) for number in told]), *state]

    def _more(
        self,
        state: list[tf.Tensor],
        limits: tf.Tensor,
        tensors: list[tf.Tensor],
        last: tf.Tensor,
        damped: bool,
    ) -> Any:
        radius, tolerance, damping = tf.unstack(limits, 3)

        def running(outcome: tf.Tensor, iterations: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
            del rest
            return tf.equal(outcome, Outcome.RUNNING) & (iterations < last)

        def iterate(
            outcome: tf.Tensor,
            iterations: tf.Tensor,
            step: tf.Tensor,
            residual: tf.Tensor,
            direction: tf.Tensor,
            squared: tf.Tensor,
            step_step: tf.Tensor,
            step_direction: tf.Tensor,
            direction_direction: tf.Tensor,
        ) -> list[tf.Tensor]:
            image = self._operator.product(direction)
            if damped:
                image += damping * direction
            curvature = _dot(direction, image)
            length = squared / curvature
            reached = (
                step_step + 2 * length * step_direction + tf.square(length) * direction_direction
            )
            negative = curvature <= 0
            outside = negative | (reached >= tf.square(radius))
            room = direction_direction * (tf.square(radius) - step_step)
            root = tf.sqrt(tf.maximum(tf.square(step_direction) + room, 0))
            # Of two expressions for one number, the one that does not cancel.
            to_boundary = tf.where(
                step_direction > 0,
                (tf.square(radius) - step_step) / (step_direction + root),
                (root - step_direction) / direction_direction,
            )
            length = tf.where(outside, to_boundary, length)
            step = step + length * direction
            residual = residual + length * image
            descent = self._inverse(residual, tensors)
            before, squared = squared, _dot(residual, descent)
            ratio = squared / before
            step_step += length * (2 * step_direction + length * direction_direction)
            step_direction = ratio * (step_direction + length * direction_direction)
            direction_direction = squared + tf.square(ratio) * direction_direction
            # With no preconditioner it is known.
            norm = squared if self._precondition is None else _dot(residual, residual)
            small = norm <= tf.square(tolerance)
            finite = tf.math.is_finite(curvature) & tf.math.is_finite(squared)
            outcome = tf.where(small, int(Outcome.CONVERGED), int(Outcome.RUNNING))
            outcome = tf.where(outside, int(Outcome.BOUNDARY), outcome)
            outcome = tf.where(negative, int(Outcome.NEGATIVE_CURVATURE), outcome)
            outcome = tf.where(finite, outcome, int(Outcome.NOT_FINITE))
            return [
                outcome,
                iterations + 1,
                step,
                residual,
                ratio * direction - descent,
                squared,
                step_step,
                step_direction,
                direction_direction,
            ]

        return tf.while_loop(running, iterate, state, parallel_iterations=1)


def _dot(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    # `tf.tensordot` would make a product of matrices of it, which takes several times as long.
    return 2 * tf.nn.l2_loss(one) if one is other else tf.reduce_sum(one * other)
