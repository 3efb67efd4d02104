"""Run a Krylov method in cycles: each call of a graph runs several iterations.

Progress, checkpoints and interrupts are handled between the calls. A cycle solves `A d = r` from
`d = 0`, where `r = b - A x` is the residual of the system, and adds `d` to `x`. At its end the
residual is computed by a product. If rounding has made it differ from that of the method's
recurrence, another cycle begins from there, as long as that helps.

If products are in low precision, that residual is computed in full precision, and each cycle aims
at a reduction that low precision can reach: the iterations refine the solution.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvp._engines.linear_map import TensorFunction
from hvp._errors import HvpError, NonFiniteError
from hvp._graphs.python_calls import can_wait_for_python
from hvp._operators.matrix import Matrix
from hvp._solve.block_progress import COUNTERS, BlockProgress
from hvp._solve.krylov_graph import ENDED_PART, compiled_method
from hvp._solve.method import Method
from hvp._solve.outcome import SolveOutcome
from hvp._solve.preconditioners import UNKNOWN
from hvp._solve.recycled import RecycledSpace
from hvp._solve.rows import norms, system_residual

# Upper bound on the iterations in one call of the graph, and the seconds that a call should take.
_MAX_ITERATIONS, _SECONDS = 32, 1.0
# The method aims at this part of the tolerance, because its recurrence differs by rounding from the
# residual that is checked against the tolerance.
_MARGIN = 0.95
# The part to which a cycle reduces the residual in low precision, and in float32. With less to a
# cycle, more products in the wider precision are needed; with more, the directions lose their
# conjugacy.
_REDUCTION, _REDUCTION_IN_FLOAT32 = 0.06, 1e-3
# A cycle in low precision is trusted if the true residual is at most this many times its target;
# otherwise full precision goes on.
_TRUSTED = 4
# Another cycle of this many iterations takes less time than two residuals in float64, which
# refinement needs at least.
_CHEAP = 4
# A solution is no worse than another one if its residual is at most this many times as large.
ACCEPTABLE = 1.01


class Krylov:
    """Solves the systems `A x = b` of one operator by one Krylov method, changing `progress`.

    `exact` is the operator in a wider precision, in which residuals are computed: in full precision
    if `matrix` multiplies in low precision, or in float64. `recycled` receives the directions of
    the first iterations, if the method keeps their products. With `stops_at_rounding`, a row counts
    as stalled as soon as rounding has made its residual larger than the recurrence says, unless
    another cycle would need only a few iterations.

    A row has converged when the norm of its residual is at most its entry of `tolerance`. `report`
    is called with the progress after each call of the graph.
    """

    def __init__(
        self,
        matrix: Matrix,
        method: Method,
        precondition: TensorFunction,
        exact: Matrix | None = None,
        recycled: RecycledSpace | None = None,
        *,
        b: np.ndarray,
        progress: BlockProgress,
        tolerance: np.ndarray,
        damping: float,
        maxiter: int,
        report: Callable[[BlockProgress], None],
        stops_at_rounding: bool = False,
    ) -> None:
        self._stops = stops_at_rounding
        self._reduction = _REDUCTION if matrix.is_low else _REDUCTION_IN_FLOAT32
        self._matrix, self._method, self._precondition = matrix, method, precondition
        self._exact, self._is_low = exact or matrix, exact is not None
        self._b, self._progress, self._report = b, progress, report
        self._tolerance, self._damping, self._maxiter = tolerance, damping, maxiter
        # The rows that a cycle has ended for, and its state, to go on from.
        self._ended: tuple[np.ndarray, list[tf.Tensor]] | None = None
        self._recycled = recycled if method.product is not None else None
        calls_python = matrix.in_python or precondition.key is UNKNOWN
        eager = calls_python and not can_wait_for_python()
        make = functools.partial(
            compiled_method, matrix, method, precondition, continues=self._is_low, eager=eager
        )
        if precondition.key is UNKNOWN or eager:
            self._compiled = make()
        else:
            key = method.name, precondition.key, self._is_low
            self._compiled = matrix.cached(key, make)

    def run(self) -> None:
        """Iterate until every row has ended.

        Raise `NonFiniteError` if a product is not finite, and `HvpError` if the preconditioner is
        not positive definite.
        """
        residual, progress = None, self._progress
        while True:
            if not len(progress.active):
                if residual is None:
                    residual = self._residual()
                    progress.residual_norms = norms(residual)
                converged = progress.residual_norms <= self._tolerance
                progress.outcome[converged] = SolveOutcome.CONVERGED
                pending = np.flatnonzero(progress.outcome == SolveOutcome.RUNNING)
                if not len(pending):
                    return
                progress.changing = True
                state = self._begin(pending, tf.constant(residual[pending]))
                progress.begin_cycle(pending, state)
                progress.changing = False
            self._cycle()
            progress.changing = True
            residual = self._finish()
            progress.changing = False
            self._report(progress)

    def _begin(self, rows: np.ndarray, residual: tf.Tensor) -> list[tf.Tensor]:
        """Return the state at the beginning of a cycle."""
        ended, self._ended = self._ended, None
        parameters = self._parameters(rows)
        if ended is not None and np.array_equal(ended[0], rows):
            assert self._compiled.continued_state is not None
            return list(self._compiled.continued_state(*ended[1], residual, *parameters))
        return list(self._compiled.initial_state(residual, *parameters))

    def _cycle(self) -> None:
        """Call the graph until no row is running or the iterations are used up."""
        progress, maxiter = self._progress, self._maxiter
        # The number of iterations in a call grows until a call takes about `_SECONDS`.
        per_call = 1 if self._matrix.in_python else 4
        while True:
            running = progress.active_outcome == SolveOutcome.RUNNING
            used = int(progress.active_iterations[running].max(initial=0))
            if not running.any() or used >= maxiter:
                return
            if self._method.separable and running.mean() <= 1 - ENDED_PART:
                self._remove_ended(running)
            parameters = self._parameters(progress.active)
            started = time.perf_counter()
            directions = self._directions_to_recycle()
            count = tf.constant(1 if directions is not None else min(per_call, maxiter - used))
            *results, products = self._compiled.advance(
                count, *progress.counters, *progress.state, *parameters
            )
            product_count = int(products.numpy())
            progress.changing = True
            progress.products += product_count
            progress.counters, progress.state = results[:COUNTERS], results[COUNTERS:]
            progress.changing = False
            if directions is not None:
                self._recycle(directions)
            done = int(progress.active_iterations.max()) - used
            seconds = (time.perf_counter() - started) / max(1, done)
            longest = min(_MAX_ITERATIONS, 4 * per_call)
            per_call = int(np.clip(_SECONDS / max(seconds, 1e-9), 1, longest))
            self._report(progress)

    def _directions_to_recycle(self) -> np.ndarray | None:
        """Return the directions of the next iteration; None if there is no room for them."""
        if self._recycled is None or not self._recycled.wants(len(self._progress.active)):
            return None
        assert self._method.direction is not None
        return self._progress.state[self._method.direction].numpy()

    def _recycle(self, directions: np.ndarray) -> None:
        """Add directions to the recycled space, with their undamped products."""
        assert self._recycled is not None
        assert self._method.product is not None
        product = self._progress.state[self._method.product].numpy()
        product -= np.asarray(self._damping, product.dtype) * directions
        if np.isfinite(product).all():
            self._recycled.add(directions, product)

    def _remove_ended(self, running: np.ndarray) -> None:
        """Store the results of the rows that have ended, and make them inactive."""
        progress = self._progress
        progress.changing = True
        self._store(~running)
        rows = tf.constant(np.flatnonzero(running))
        progress.counters = [tf.gather(tensor, rows) for tensor in progress.counters]
        progress.state = [tf.gather(tensor, rows) for tensor in progress.state]
        progress.active = progress.active[running]
        progress.changing = False

    def _store(self, mask: np.ndarray) -> None:
        """Copy the results of some active rows from the state to the arrays."""
        progress = self._progress
        rows, columns = np.flatnonzero(mask), progress.active[mask]
        outcome = progress.active_outcome[rows]
        progress.outcome[columns] = outcome
        progress.iterations[columns] = progress.active_iterations[rows]
        assert progress.correction is not None
        progress.correction[columns] = tf.gather(progress.state[0], rows).numpy()
        if self._method.direction is not None:
            negative = rows[outcome == SolveOutcome.NEGATIVE_CURVATURE]
            directions = tf.gather(progress.state[self._method.direction], negative).numpy()
            progress.directions[progress.active[negative]] = directions

    def _finish(self) -> np.ndarray:
        """End a cycle: update the solutions and decide which rows need another cycle.

        Return the residual of the system, computed by a product; zero for the rows that got worse.
        """
        progress = self._progress
        self._store(np.ones(len(progress.active), bool))
        outcome = progress.outcome
        if self._is_low:  # full precision goes on from there
            outcome[outcome == SolveOutcome.NOT_FINITE] = SolveOutcome.STALLED
        if (outcome == SolveOutcome.NOT_FINITE).any():
            raise NonFiniteError(
                "a product is not finite",
                "a loss that is twice differentiable at this point, and no overflow",
                "look for norms and square roots near zero",
            )
        if (outcome == SolveOutcome.INDEFINITE_PRECONDITIONER).any():
            raise HvpError(
                "the preconditioner M is not positive definite",
                "a positive definite preconditioner",
                "pass M='nystrom', or leave M out",
            )
        assert progress.correction is not None
        x_before = progress.x
        progress.x = x_before + progress.correction
        residual = self._residual()
        residual_norms = norms(residual)
        # Both are False for a row that has overflowed, because its norm is not a number.
        better = residual_norms <= progress.residual_norms
        no_worse = residual_norms <= ACCEPTABLE * progress.residual_norms
        helped = residual_norms <= progress.residual_norms / 2
        if self._is_low:
            trusted = _TRUSTED * self._targets()
            helped = (residual_norms <= trusted) & (residual_norms < progress.residual_norms)
        progress.x[~better] = x_before[~better]
        progress.residual_norms = np.where(better, residual_norms, progress.residual_norms)
        # Another cycle is worthwhile if this one has at least halved the residual, or, in low
        # precision, has come near its target; not if the residual is all that the operator cannot
        # reach, whose products are rounding errors.
        ended = (SolveOutcome.NEGATIVE_CURVATURE, SolveOutcome.LEAST_SQUARES)
        worthwhile = helped & ~np.isin(outcome, ended)
        used_up = progress.iterations >= self._maxiter
        # Rows may still be running if another row of the block has used up its iterations.
        unfinished = outcome == SolveOutcome.RUNNING
        by_recurrence = outcome == SolveOutcome.CONVERGED
        lost = by_recurrence & (residual_norms > self._tolerance)
        if self._stops and self._iterations_left(lost) > _CHEAP:
            worthwhile[lost] = False
        by_recurrence |= (outcome == SolveOutcome.LEAST_SQUARES) & ~no_worse
        outcome[by_recurrence & ~worthwhile] = SolveOutcome.STALLED
        outcome[(by_recurrence & worthwhile & used_up) | unfinished] = SolveOutcome.MAXITER
        outcome[worthwhile & ~used_up] = SolveOutcome.RUNNING
        if self._compiled.continued_state is not None:
            self._ended = progress.active, list(progress.state)
        progress.end_cycle()
        if not better.all():
            residual = np.where(better[:, np.newaxis], residual, 0)  # these rows have ended
        return residual

    def _iterations_left(self, rows: np.ndarray) -> float:
        """Estimate the iterations that rows need in another cycle, at the rate so far."""
        target = self._tolerance[rows] * _MARGIN
        done = np.log(np.maximum(norms(self._b[rows]) / target, 2))
        left = np.log(self._progress.residual_norms[rows] / target)
        return float((self._progress.iterations[rows] * left / done).max(initial=0))

    def _residual(self) -> np.ndarray:
        b, progress = self._b, self._progress
        if not progress.x.any():
            return b
        progress.products += len(b)
        return system_residual(self._exact, b, progress.x, self._damping)

    def _parameters(self, rows: np.ndarray) -> list[tf.Tensor]:
        """Return the arguments of the graphs besides counters and state."""
        dtype = self._progress.x.dtype
        target = tf.constant(self._targets()[rows], dtype)
        return [target, tf.constant(self._damping, dtype), *self._precondition.tensors]

    def _targets(self) -> np.ndarray:
        """Return the residual norm at which each row ends this cycle."""
        target = self._tolerance * _MARGIN
        if not self._is_low:
            return target
        return np.maximum(target, self._reduction * self._progress.residual_norms)
