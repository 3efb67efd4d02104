"""The graphs of a Krylov method: its initial state, and a given number of iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvp._engines.linear_map import TensorFunction
from hvp._graphs.compiled import Compiled
from hvp._operators.matrix import Matrix
from hvp._solve.block_progress import COUNTERS
from hvp._solve.method import Method, System
from hvp._solve.outcome import SolveOutcome

# Ended rows are removed once they are this part of the active rows.
ENDED_PART = 0.25
# A row has stalled when neither its residual has fallen, by the factor _FALL, nor its quadratic
# model, by more than rounding, in the last iterations: at least _PATIENCE of them (for a method
# that is not separable, divided by the number of rows, but at least _MIN_PATIENCE), and at least
# the part _STALLED_PART of all its iterations.
_PATIENCE, _MIN_PATIENCE, _STALLED_PART, _FALL = 300, 20, 0.5, 0.99


class CompiledMethod(NamedTuple):
    """The compiled graphs of a method for one operator.

    All take the tolerance, the damping and the preconditioner's tensors as their last arguments.
    `initial_state` takes the residual of the system before these, and returns the state.
    `continued_state` takes the state and the residual, and returns the state of the next cycle; it
    is None if each cycle starts afresh. `advance` takes a number of iterations, the counters and
    the state; it returns the counters, the state, and the number of products as the last tensor.
    """

    initial_state: Compiled
    continued_state: Compiled | None
    advance: Compiled


def compiled_method(
    matrix: Matrix,
    method: Method,
    precondition: TensorFunction,
    *,
    continues: bool,
    eager: bool,
) -> CompiledMethod:
    """Trace the graphs of a method.

    If `continues` is set, each cycle continues in the directions of the previous one, provided that
    the method can do that. `eager` tells whether the method runs without graphs, because these
    could not call Python. The compiled functions forget the matrix, because they are cached with
    the operator and must not keep it alive.
    """
    dtype, size = matrix.dtype, matrix.size
    numbers, number = tf.TensorSpec([None], dtype), tf.TensorSpec([], dtype)
    integers, integer = tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)
    counters = [integers, integers, numbers, integers, numbers]
    state = [tf.TensorSpec(shape, dtype) for shape in method.state_shapes(size)]
    tensors = [tf.TensorSpec(t.shape, t.dtype) for t in precondition.tensors]
    parameters = [numbers, number, *tensors]

    def system(parameters: Sequence[tf.Tensor]) -> System:
        tolerance, damping, *tensors = parameters
        return System(
            multiply=lambda rows: matrix.multiply(rows) + damping * rows,
            precondition=lambda rows: precondition.apply(rows, tensors),
            tolerance=tolerance,
        )

    def initial_state(residual: tf.Tensor, *parameters: tf.Tensor) -> list[tf.Tensor]:
        return method.initial_state(residual, system(parameters))

    def continued_state(*tensors: tf.Tensor) -> list[tf.Tensor]:
        before, residual = tensors[: len(state)], tensors[len(state)]
        assert method.continued_state is not None
        return method.continued_state(before, residual, system(tensors[len(state) + 1 :]))

    def advance(count: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
        split = COUNTERS + len(state)
        return _advance(method, count, list(tensors[:split]), system(tensors[split:]))

    def compiled(function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Compiled:
        return Compiled(function, specs, False, forgets=True, eager=eager)

    residual = tf.TensorSpec([None, size], dtype)
    continued = None
    if continues and method.continued_state is not None:
        continued = compiled(continued_state, [*state, residual, *parameters])
    return CompiledMethod(
        compiled(initial_state, [residual, *parameters]),
        continued,
        compiled(advance, [integer, *counters, *state, *parameters]),
    )


def _advance(
    method: Method, count: tf.Tensor, variables: list[tf.Tensor], system: System
) -> list[tf.Tensor]:
    """Return counters and state after up to `count` iterations, and the number of products."""
    separable = method.separable
    rows = tf.shape(variables[0])[0]
    eps = float(np.finfo(system.tolerance.dtype.as_numpy_dtype).eps)
    patience = _PATIENCE if separable else tf.maximum(_MIN_PATIENCE, _PATIENCE // rows)
    # Rows cannot be removed inside the graph: it returns when enough of them have ended.
    enough = tf.cast(rows, tf.float64) * (1 - ENDED_PART) if separable else 0.0

    def is_unfinished(done: tf.Tensor, outcome: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
        del rest
        running = tf.reduce_sum(tf.cast(tf.equal(outcome, SolveOutcome.RUNNING), tf.int32))
        return (done < count) & (running > 0) & (tf.cast(running, tf.float64) > enough)

    def iterate(
        done: tf.Tensor,
        outcome: tf.Tensor,
        iterations: tf.Tensor,
        smallest: tf.Tensor,
        since: tf.Tensor,
        gained: tf.Tensor,
        *state: tf.Tensor,
    ) -> list[tf.Tensor]:
        running = tf.equal(outcome, SolveOutcome.RUNNING)
        step = method.iterate(state, running, system)
        iterations += tf.cast(running, tf.int32)
        fell, gained = step.norm < _FALL * smallest, gained + step.gain
        since = tf.where(fell | (step.gain > eps * gained), 0, since + 1)
        smallest = tf.where(fell, step.norm, smallest)
        part = tf.cast(_STALLED_PART * tf.cast(iterations, tf.float32), tf.int32)
        stalled = tf.equal(step.outcome, SolveOutcome.RUNNING)
        stalled &= since >= tf.maximum(patience, part)
        new_outcome = tf.where(stalled, int(SolveOutcome.STALLED), step.outcome)
        outcome = tf.where(running, new_outcome, outcome)
        return [done + 1, outcome, iterations, smallest, since, gained, *step.state]

    shapes = [tensor.shape for tensor in variables]
    done, *results = tf.while_loop(
        is_unfinished,
        iterate,
        [tf.constant(0), *variables],
        shape_invariants=[tf.TensorShape([]), *shapes],
        parallel_iterations=1,
    )
    return [*results, done * rows]
