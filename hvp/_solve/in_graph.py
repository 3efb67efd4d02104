"""Krylov methods inside a graph that is being traced, or one operation after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from hvp._solve.method import Method, System
from hvp._solve.outcome import SolveOutcome

# A residual by recurrence drifts away from the true one, from which the second pass begins.
_PASSES = 2


class RowSolution(NamedTuple):
    """Solutions as rows, and for each an outcome, iterations and the norm of the true residual."""

    rows: tf.Tensor
    outcome: tf.Tensor
    iterations: tf.Tensor
    residual_norms: tf.Tensor


def solve_in_graph(
    method: Method,
    multiply: Callable[[tf.Tensor], tf.Tensor],
    right: tf.Tensor,
    tolerance: tf.Tensor,
    maxiter: int | tf.Tensor,
) -> RowSolution:
    """Solve for the rows of `right`, with a loop that XLA can compile.

    `multiply` multiplies rows by the symmetric matrix. `tolerance` has the norms that the residuals
    of the rows may have at the end.
    """
    system = System(multiply, lambda rows: rows, tolerance)

    def is_unfinished(done: tf.Tensor, outcome: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
        del rest
        return (done < maxiter) & tf.reduce_any(tf.equal(outcome, SolveOutcome.RUNNING))

    def iterate(
        done: tf.Tensor, outcome: tf.Tensor, iterations: tf.Tensor, *state: tf.Tensor
    ) -> list[tf.Tensor]:
        running = tf.equal(outcome, SolveOutcome.RUNNING)
        step = method.iterate(state, running, system)
        outcome = tf.where(running, step.outcome, outcome)
        return [done + 1, outcome, iterations + tf.cast(running, tf.int32), *step.state]

    x, residual = tf.zeros_like(right), right
    iterations = tf.zeros_like(right[:, 0], tf.int32)
    outcome = iterations + int(SolveOutcome.RUNNING)
    done = tf.constant(0)
    for _ in range(_PASSES):
        small = tf.norm(residual, axis=1) <= tolerance
        is_over = outcome > int(SolveOutcome.CONVERGED)
        outcome = tf.where(is_over, outcome, tf.where(small, int(SolveOutcome.CONVERGED), 0))
        begun = [done, outcome, iterations, *method.initial_state(residual, system)]
        done, outcome, iterations, change, *_ = tf.while_loop(
            is_unfinished, iterate, begun, parallel_iterations=1
        )
        x += change
        residual = right - multiply(x)
    length = tf.norm(residual, axis=1)
    found = tf.where(length <= tolerance, int(SolveOutcome.CONVERGED), int(SolveOutcome.MAXITER))
    is_other = outcome > int(SolveOutcome.CONVERGED)
    return RowSolution(x, tf.where(is_other, outcome, found), iterations, length)
