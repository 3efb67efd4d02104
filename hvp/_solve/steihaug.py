"""Conjugate gradients in a trust region (Steihaug 1983), many iterations in one call of a graph.

The method differs from conjugate gradients for linear systems in three ways:

1. It also ends at the boundary of the trust region, and at the first direction of nonpositive
   curvature, which it follows to the boundary.
2. With a preconditioner `M` the trust region is a ball in the norm of `M`. The norms of the
   iterates come from recurrences, so that only the inverse of `M` is ever applied.
3. The predicted decrease follows from the gradient of the model, without another product.

No existing implementation does all of this: scipy's `cg` assumes positive curvature, scipy's
trust-region methods compute in NumPy, and TensorFlow's solver requires a positive definite
operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvp._graphs.compiled import Compiled
from hvp._graphs.python_calls import can_wait_for_python
from hvp._operators.symmetric import SymmetricOperator
from hvp._runtime.interrupts import deliver_interrupt
from hvp._solve.outcome import SolveOutcome

# Python can handle an interrupt only between calls of the graph. A call is therefore limited to
# this many iterations, and to fewer if each product goes through Python and may take long.
_ITERATIONS_PER_CALL, _ITERATIONS_PER_CALL_IN_PYTHON = 32, 4


@dataclass(frozen=True)
class SteihaugResult:
    """An approximate minimizer of the quadratic model.

    `norm` is the length of the step in the preconditioner's norm, and `predicted` the decrease
    `m(0) - m(p)` of the model. `directions` and `images` hold the directions of the first
    iterations as rows, and their products with the Hessian; they are None if nothing was recorded.
    """

    step: tf.Tensor
    outcome: SolveOutcome
    iterations: int
    norm: float
    predicted: float
    directions: np.ndarray | None = None
    images: np.ndarray | None = None


class _State(NamedTuple):
    """The tensors that one iteration passes to the next.

    In the notation of `Steihaug`: the outcome, the number of iterations, `p`, `r`, `d`, and the
    inner products `r' inv(M) r`, `p' M p`, `p' M d` and `d' M d`.
    """

    outcome: tf.Tensor
    iterations: tf.Tensor
    step: tf.Tensor
    model_gradient: tf.Tensor
    direction: tf.Tensor
    squared: tf.Tensor
    step_step: tf.Tensor
    step_direction: tf.Tensor
    direction_direction: tf.Tensor


class Steihaug:
    """Minimizes quadratic models of a loss in a trust region.

    The model at a point with gradient `g` and Hessian `H` is

        `m(p) = g' p + p' B p / 2`, with `B = H + damping I`,

    and its gradient is `r = g + B p`. From `p = 0` and `d = -inv(M) g`, with the preconditioner
    `M`, each iteration computes

        `alpha = r' inv(M) r / d' B d`

        `p+ = p + alpha d`,  `r+ = r + alpha B d`

        `beta = r+' inv(M) r+ / r' inv(M) r`,  `d+ = -inv(M) r+ + beta d`

    until `norm(r) <= tolerance`. If `d' B d <= 0`, or if `p+` lies outside the trust region
    `p' M p <= radius**2`, the iteration ends with `p + tau d`, where

        `tau = (-p' M d + sqrt((p' M d)**2 + d' M d (radius**2 - p' M p))) / d' M d`

    is the step length to the boundary [1]_. The inner products with `M` follow from recurrences:

        `p+' M p+ = p' M p + alpha (2 p' M d + alpha d' M d)`

        `p+' M d+ = beta (p' M d + alpha d' M d)`

        `d+' M d+ = r+' inv(M) r+ + beta**2 d' M d`

    The decrease of the model is `m(0) - m(p) = -p' (g + r) / 2`.

    The operator may be refreshed between solves. `precondition` takes a vector and the
    preconditioner's tensors, and multiplies the vector by `inv(M)`; `calls_python` says that it
    does so in Python. The directions of the first `recorded` iterations are returned with their
    products. If the method is `masked`, the last of the tensors is a mask of zeros and ones, and
    the step changes only the entries where it is one; so must the gradient.

    References
    ----------
    .. [1] T. Steihaug, "The conjugate gradient method and trust regions in large scale
       optimization", SIAM Journal on Numerical Analysis 20(3), 626-637, 1983.
       https://doi.org/10.1137/0720042
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        precondition: Callable[[tf.Tensor, Sequence[tf.Tensor]], tf.Tensor] | None = None,
        recorded: int = 0,
        *,
        masked: bool = False,
        calls_python: bool = False,
    ) -> None:
        self._operator, self._recorded, self._masked = operator, recorded, masked
        self._precondition = precondition
        stats = operator.stats
        self._in_python = calls_python or stats.engine == "tape" or stats.batches is not None
        self._per_call = _ITERATIONS_PER_CALL_IN_PYTHON if self._in_python else _ITERATIONS_PER_CALL
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
        """Minimize the model approximately; the gradient must not be zero.

        The iteration has converged when the norm of the model's gradient is at most `tolerance`.
        `tensors` are those of the preconditioner.
        """
        limits = tf.constant([radius, tolerance, damping], gradient.dtype)
        inputs, last = [limits, gradient, *tensors], min(self._per_call, maxiter)
        start, resume = self._compiled(gradient, tensors, damping != 0)
        # Directions of the first iterations, and their products, as blocks of rows.
        blocks: list[list[np.ndarray]] = []

        def run(function: Compiled, *arguments: tf.Tensor) -> tuple[Any, list[tf.Tensor]]:
            results = function(*arguments, tf.constant(last), *inputs)
            recorded = results[: 2 if self._recorded else 0]
            report, *state = results[len(recorded) :]
            numbers = report.numpy()
            new = min(int(numbers[1]), self._recorded) - sum(len(block[0]) for block in blocks)
            if new > 0:
                blocks.append([rows.numpy()[:new] for rows in recorded])
            return numbers, state

        numbers, state = run(start)
        while int(numbers[0]) == SolveOutcome.RUNNING and last < maxiter:
            deliver_interrupt()
            last = min(last + self._per_call, maxiter)
            numbers, state = run(resume, *state)
        outcome, iterations, norm_squared, predicted = numbers
        recorded = [np.concatenate(rows) for rows in zip(*blocks)]
        return SteihaugResult(
            _State(*state).step,
            SolveOutcome(int(outcome)) or SolveOutcome.MAXITER,
            int(iterations),
            math.sqrt(max(norm_squared, 0.0)),
            float(predicted),
            *recorded,
        )

    def _compiled(
        self, vector: tf.Tensor, tensors: Sequence[tf.Tensor], damped: bool
    ) -> tuple[Compiled, Compiled]:
        """Return the functions that start and resume the iteration.

        XLA compiles them if it also compiles the operator's products.
        """
        functions = self._functions.get(damped)
        if functions is None:
            if not self._in_python and self._operator.stats.jit_compile is None:
                self._operator.product(vector)  # the first product decides whether XLA is used
            with_xla = not self._in_python and bool(self._operator.stats.jit_compile)
            eager = self._in_python and not can_wait_for_python()
            length = len(_State._fields)

            def start(last: tf.Tensor, *inputs: tf.Tensor) -> list[tf.Tensor]:
                state = self._initial_state(inputs[1], inputs[2:])
                return self._advance(state, last, inputs, damped)

            def resume(*arguments: tf.Tensor) -> list[tf.Tensor]:
                state, last = _State(*arguments[:length]), arguments[length]
                return self._advance(state, last, arguments[length + 1 :], damped)

            count, number = tf.TensorSpec([], tf.int32), tf.TensorSpec([], vector.dtype)
            like = tf.TensorSpec(vector.shape, vector.dtype)
            state = [count, count, like, like, like, number, number, number, number]
            inputs = [tf.TensorSpec([3], vector.dtype), like]
            inputs += [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
            functions = self._functions[damped] = (
                Compiled(start, [count, *inputs], with_xla, eager=eager),
                Compiled(resume, [*state, count, *inputs], with_xla, eager=eager),
            )
        return functions

    def _inverse(self, vector: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        if self._precondition is None:
            return vector
        own = tensors[:-1] if self._masked else tensors
        product = self._precondition(vector, own)
        return product * tensors[-1] if self._masked else product

    def _initial_state(self, gradient: tf.Tensor, tensors: Sequence[tf.Tensor]) -> _State:
        """Return the state at the center of the trust region."""
        descent = self._inverse(gradient, tensors)
        squared = _dot(gradient, descent)
        zero = tf.zeros([], gradient.dtype)
        return _State(
            outcome=tf.constant(0),
            iterations=tf.constant(0),
            step=tf.zeros_like(gradient),
            model_gradient=tf.identity(gradient),
            direction=-descent,
            squared=squared,
            step_step=zero,
            step_direction=zero,
            direction_direction=squared,
        )

    def _advance(
        self, state: _State, last: tf.Tensor, inputs: Sequence[tf.Tensor], damped: bool
    ) -> list[tf.Tensor]:
        """Iterate up to iteration `last`; return a report for Python, followed by the state.

        Recorded directions and their products, if any, come before them. The report is one float64
        vector, so that Python waits for a single transfer: the outcome, the number of iterations,
        the squared norm of the step, and the predicted decrease.
        """
        limits, gradient, *tensors = inputs
        state, recorded = self._iterate(state, limits, tensors, last, damped)
        step = tf.cast(state.step, tf.float64)
        gradients = tf.cast(gradient + state.model_gradient, tf.float64)
        report = [state.outcome, state.iterations, state.step_step, -_dot(step, gradients) / 2]
        stacked = tf.stack([tf.cast(number, tf.float64) for number in report])
        return [*recorded, stacked, *state]

    def _iterate(
        self,
        state: _State,
        limits: tf.Tensor,
        tensors: list[tf.Tensor],
        last: tf.Tensor,
        damped: bool,
    ) -> tuple[_State, list[tf.Tensor]]:
        """Run the loop of the class docstring; return the state and the recorded vectors."""
        radius, tolerance, damping = tf.unstack(limits, 3)
        first, fields = state.iterations, len(_State._fields)
        arrays = [
            tf.TensorArray(state.step.dtype, self._per_call, element_shape=state.step.shape)
            for _ in range(2 if self._recorded else 0)
        ]

        def is_running(*loop_variables: Any) -> tf.Tensor:
            state = _State(*loop_variables[:fields])
            return tf.equal(state.outcome, SolveOutcome.RUNNING) & (state.iterations < last)

        def iteration(*loop_variables: Any) -> list[Any]:
            own, recorded = loop_variables[:fields], loop_variables[fields:]
            _, iterations, step, model_gradient, direction, *inner_products = own
            squared_before, step_step, step_direction, direction_direction = inner_products
            image = self._operator.product(direction)
            vectors = direction, image
            written = [a.write(iterations - first, v) for a, v in zip(recorded, vectors)]
            if self._masked:
                image *= tensors[-1]
            if damped:
                image += damping * direction
            curvature = _dot(direction, image)
            length = squared_before / curvature
            norm_squared = (
                step_step + 2 * length * step_direction + tf.square(length) * direction_direction
            )
            negative = curvature <= 0
            outside = negative | (norm_squared >= tf.square(radius))
            room = direction_direction * (tf.square(radius) - step_step)
            root = tf.sqrt(tf.maximum(tf.square(step_direction) + room, 0))
            # Two expressions for the same root: the one without cancellation is used.
            to_boundary = tf.where(
                step_direction > 0,
                (tf.square(radius) - step_step) / (step_direction + root),
                (root - step_direction) / direction_direction,
            )
            length = tf.where(outside, to_boundary, length)
            step = step + length * direction
            model_gradient = model_gradient + length * image
            descent = self._inverse(model_gradient, tensors)
            squared = _dot(model_gradient, descent)
            ratio = squared / squared_before
            step_step += length * (2 * step_direction + length * direction_direction)
            step_direction = ratio * (step_direction + length * direction_direction)
            direction_direction = squared + tf.square(ratio) * direction_direction
            # Without a preconditioner this norm is already known.
            if self._precondition is None:
                gradient_squared = squared
            else:
                gradient_squared = _dot(model_gradient, model_gradient)
            small = gradient_squared <= tf.square(tolerance)
            finite = tf.math.is_finite(curvature) & tf.math.is_finite(squared)
            outcome = tf.where(small, int(SolveOutcome.CONVERGED), int(SolveOutcome.RUNNING))
            outcome = tf.where(outside, int(SolveOutcome.BOUNDARY), outcome)
            outcome = tf.where(negative, int(SolveOutcome.NEGATIVE_CURVATURE), outcome)
            outcome = tf.where(finite, outcome, int(SolveOutcome.NOT_FINITE))
            return [
                outcome,
                iterations + 1,
                step,
                model_gradient,
                ratio * direction - descent,
                squared,
                step_step,
                step_direction,
                direction_direction,
                *written,
            ]

        start = [*state, *arrays]
        end: Any = tf.while_loop(is_running, iteration, start, parallel_iterations=1)
        return _State(*end[:fields]), [array.stack() for array in end[fields:]]


def _dot(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    # `tf.tensordot` would compute a matrix product, which takes several times as long.
    return 2 * tf.nn.l2_loss(one) if one is other else tf.reduce_sum(one * other)
