"""Drives a Krylov method: some iterations in each call of a graph, and Python in between.

Between calls there is room for progress, checkpoints and interrupts. What a method believes of its
residuals is checked by a product at the end; where rounding has made the two differ, it begins
again from there, for as long as that helps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError, NonFiniteError
from hvp._graphs.compiled import Compiled
from hvp._solve.method import Method, System
from hvp._solve.outcome import Outcome
from hvp._solve.preconditioners import UNKNOWN, Precondition
from hvp._solve.rows import Rows, norms, residuals

# Iterations in one call, and the seconds it should take.
_LONGEST, _SECONDS = 32, 1.0
# Rows that have ended are taken out when they are so many.
_ENDED = 0.25
# A row has stalled when in so many iterations, counted for one column, and in so large a part of
# all, its residual has not fallen by a hundredth, nor its quadratic model by more than rounding.
_PATIENCE, _LEAST_PATIENCE, _PART, _FALL = 300, 20, 0.5, 0.99
# Against rounding: the method is to reach a little less than what is checked.
_MARGIN = 0.95
# Tensors of a call before those of the method's state.
_COUNTERS = 5


@dataclass
class Progress:
    """How far the solution of a block has come; all of it arrays, to be saved.

    Attributes
    ----------
    x : ndarray
        Of shape `(k, n)`: the best solutions so far.
    residual_norms : ndarray
        Of these, as a product tells.
    outcome, iterations : ndarray
        Of each row.
    directions : ndarray
        Of shape `(k, n)`: those of negative curvature, zero where there is none.
    products : int
        How many were computed.
    active : ndarray
        The rows at work, as they are in `counters` and `state`; empty between cycles.
    counters, state : list of tf.Tensor
        Of the method.
    moved : ndarray
        Of shape `(k, n)`: what rows that have ended this cycle add to the solution.
    changing : bool
        Whether it is just being changed, so that an interrupt leaves it of no use.
    """

    x: np.ndarray
    residual_norms: np.ndarray
    outcome: np.ndarray
    iterations: np.ndarray
    directions: np.ndarray
    products: int = 0
    active: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    counters: list[Any] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    moved: np.ndarray | None = None
    changing: bool = False

    @classmethod
    def begin(cls, x: np.ndarray) -> Progress:
        """Return the progress of a block of which nothing was done, from a first guess."""
        none = np.zeros(len(x), np.int64)
        return cls(x.copy(), np.full(len(x), np.inf), none, none.copy(), np.zeros_like(x))

    def standing(self) -> tuple[int, float]:
        """Return how many iterations there were, and the largest residual of those at work."""
        if not len(self.active):
            return int(self.iterations.max(initial=0)), float(self.residual_norms.max(initial=0))
        return int(self.counters[1].numpy().max()), float(self.counters[2].numpy().max())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything, to be saved."""
        found = {
            "x": self.x,
            "residual_norms": self.residual_norms,
            "outcome": self.outcome,
            "iterations": self.iterations,
            "directions": self.directions,
            "products": np.array(self.products),
            "active": self.active,
        }
        if self.moved is not None:
            found["moved"] = self.moved
        found.update({f"counter{i}": tensor.numpy() for i, tensor in enumerate(self.counters)})
        found.update({f"state{i}": tensor.numpy() for i, tensor in enumerate(self.state)})
        return found

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> Progress:
        """Return what was saved."""

        def numbered(name: str) -> list[tf.Tensor]:
            count = sum(key.startswith(name) for key in arrays)
            return [tf.constant(arrays[f"{name}{i}"]) for i in range(count)]

        x, norms, outcome, iterations, directions = (
            arrays[name] for name in ("x", "residual_norms", "outcome", "iterations", "directions")
        )
        products = int(arrays["products"])
        made = cls(x, norms, outcome, iterations, directions, products)
        made.active, made.moved = arrays["active"], arrays.get("moved")
        made.counters, made.state = numbered("counter"), numbered("state")
        return made


class Krylov:
    """Solves with one operator by one method.

    Parameters
    ----------
    rows : Rows
        The operator.
    method : Method
        The iteration.
    precondition : Precondition
        Or the identity.
    """

    def __init__(self, rows: Rows, method: Method, precondition: Precondition) -> None:
        self._rows, self._method, self._precondition = rows, method, precondition
        # What is kept with the operator must not keep the operator itself alive.
        if precondition.key is UNKNOWN:
            self._first, self._further = self._compile()
        else:
            key = (method.name, precondition.key)
            self._first, self._further = rows.kept(key, self._compile)

    def run(
        self,
        b: np.ndarray,
        progress: Progress,
        *,
        tolerance: np.ndarray,
        damping: float,
        maxiter: int,
        report: Callable[[Progress], None],
    ) -> None:
        """Go on until every row has ended.

        Parameters
        ----------
        b : ndarray
            Of shape `(k, n)`.
        progress : Progress
            Changed in place.
        tolerance : ndarray
            Of shape `(k,)`: norms of residuals that are small enough.
        damping : float
            Multiple of the identity to add.
        maxiter : int
            Iterations for each row.
        report : callable
            Called between calls of the graph, with the progress.

        Raises
        ------
        NonFiniteError
            If a product is not finite.
        HvpError
            If the preconditioner is not positive definite.
        """
        residual = None
        while True:
            if not len(progress.active):
                if residual is None:
                    residual = self._residual(b, progress, damping)
                    progress.residual_norms = norms(residual)
                converged = progress.residual_norms <= tolerance
                progress.outcome[converged] = Outcome.CONVERGED
                pending = np.flatnonzero(progress.outcome == Outcome.RUNNING)
                if not len(pending):
                    return
                progress.changing = True
                self._start(progress, residual, pending, tolerance, damping)
                progress.changing = False
            self._cycle(progress, tolerance, damping, maxiter, report)
            progress.changing = True
            residual = self._finish(b, progress, damping, maxiter)
            progress.changing = False
            report(progress)

    def _start(
        self,
        progress: Progress,
        residual: np.ndarray,
        pending: np.ndarray,
        tolerance: np.ndarray,
        damping: float,
    ) -> None:
        """Begin a cycle on the residuals of some rows."""
        dtype = residual.dtype
        told = self._told(pending, tolerance, damping, dtype)
        progress.state = list(self._first(tf.constant(residual[pending]), *told))
        running = tf.fill([len(pending)], int(Outcome.RUNNING))
        best = tf.constant(progress.residual_norms[pending], dtype)
        made = tf.constant(progress.iterations[pending], tf.int32)
        since, gained = tf.zeros([len(pending)], tf.int32), tf.zeros([len(pending)], dtype)
        progress.counters = [running, made, best, since, gained]
        progress.moved = np.zeros_like(progress.x)
        progress.active = pending

    def _cycle(
        self,
        progress: Progress,
        tolerance: np.ndarray,
        damping: float,
        maxiter: int,
        report: Callable[[Progress], None],
    ) -> None:
        """Call the graph until no row runs, or the iterations are used up."""
        dtype = progress.x.dtype
        at_once = 1 if self._rows.in_python else 4
        while True:
            running = progress.counters[0].numpy() == Outcome.RUNNING
            used = int(progress.counters[1].numpy()[running].max(initial=0))
            if not running.any() or used >= maxiter:
                return
            if self._method.separable and running.mean() <= 1 - _ENDED:
                self._take_out(progress, running)
            told = self._told(progress.active, tolerance, damping, dtype)
            started = time.perf_counter()
            count = min(at_once, maxiter - used)
            results = self._further(tf.constant(count), *progress.counters, *progress.state, *told)
            results = list(results)
            products, after = int(results.pop().numpy()), results[1].numpy()
            progress.changing = True
            progress.products += products
            progress.counters, progress.state = results[:_COUNTERS], results[_COUNTERS:]
            progress.changing = False
            each = (time.perf_counter() - started) / max(1, int(after.max()) - used)
            at_once = int(np.clip(_SECONDS / max(each, 1e-9), 1, min(_LONGEST, 4 * at_once)))
            report(progress)

    def _take_out(self, progress: Progress, running: np.ndarray) -> None:
        """Put the rows that have ended aside."""
        progress.changing = True
        self._keep(progress, ~running)
        rows = tf.constant(np.flatnonzero(running))
        progress.counters = [tf.gather(tensor, rows) for tensor in progress.counters]
        progress.state = [tf.gather(tensor, rows) for tensor in progress.state]
        progress.active = progress.active[running]
        progress.changing = False

    def _keep(self, progress: Progress, which: np.ndarray) -> None:
        """Note what some rows of the state have come to."""
        rows, ended = np.flatnonzero(which), progress.active[which]
        outcome = progress.counters[0].numpy()[rows]
        progress.outcome[ended] = outcome
        progress.iterations[ended] = progress.counters[1].numpy()[rows]
        assert progress.moved is not None
        progress.moved[ended] = tf.gather(progress.state[0], rows).numpy()
        if self._method.direction is not None:
            negative = rows[outcome == Outcome.NEGATIVE_CURVATURE]
            found = tf.gather(progress.state[self._method.direction], negative).numpy()
            progress.directions[progress.active[negative]] = found

    def _finish(
        self, b: np.ndarray, progress: Progress, damping: float, maxiter: int
    ) -> np.ndarray:
        """End a cycle: look what the residuals are, and which rows are worth another cycle."""
        self._keep(progress, np.ones(len(progress.active), bool))
        outcome = progress.outcome
        if (outcome == Outcome.NOT_FINITE).any():
            raise NonFiniteError(
                "a product is not finite",
                "a loss that is twice differentiable at this point, and no overflow",
                "look for norms and square roots near zero",
            )
        if (outcome == Outcome.INDEFINITE_PRECONDITIONER).any():
            raise HvpError(
                "the preconditioner M is not positive definite",
                "a positive definite one",
                "pass M='nystrom', or none",
            )
        assert progress.moved is not None
        before = progress.x
        progress.x = before + progress.moved
        residual = self._residual(b, progress, damping)
        found = norms(residual)
        better = found <= progress.residual_norms
        # Overflow on the way makes a row that is not finite, which is not better.
        worth = found <= progress.residual_norms / 2
        progress.x[~better] = before[~better]
        progress.residual_norms = np.where(better, found, progress.residual_norms)
        worth &= outcome != Outcome.NEGATIVE_CURVATURE
        used_up = progress.iterations >= maxiter
        ended = outcome == Outcome.RUNNING  # some column has used up its iterations
        believed = outcome == Outcome.CONVERGED
        outcome[believed & ~worth] = Outcome.STALLED
        outcome[(believed & worth & used_up) | ended] = Outcome.MAXITER
        outcome[worth & ~used_up] = Outcome.RUNNING
        progress.active, progress.state, progress.counters = progress.active[:0], [], []
        progress.moved = None
        if not better.all():
            residual = np.where(better[:, np.newaxis], residual, 0)  # those have ended
        return residual

    def _residual(self, b: np.ndarray, progress: Progress, damping: float) -> np.ndarray:
        if not progress.x.any():
            return b
        progress.products += len(b)
        return residuals(self._rows, b, progress.x, damping)

    def _told(
        self, which: np.ndarray, tolerance: np.ndarray, damping: float, dtype: Any
    ) -> list[tf.Tensor]:
        """Return what the functions are told besides the state."""
        small = tf.constant(tolerance[which] * _MARGIN, dtype)
        return [small, tf.constant(damping, dtype), *self._precondition.tensors]

    def _compile(self) -> tuple[Compiled, Compiled]:
        """Return what begins and what goes on."""
        dtype, size = self._rows.dtype, self._rows.size
        several, number = tf.TensorSpec([None], dtype), tf.TensorSpec([], dtype)
        counts = tf.TensorSpec([None], tf.int32)
        state = [tf.TensorSpec(shape, dtype) for shape in self._method.shapes(size)]
        tensors = [tf.TensorSpec(t.shape, t.dtype) for t in self._precondition.tensors]
        told = [several, number, *tensors]

        def first(residual: tf.Tensor, *told: tf.Tensor) -> list[tf.Tensor]:
            return self._method.first(residual, self._system(told))

        def further(count: tf.Tensor, *given: tf.Tensor) -> list[tf.Tensor]:
            split = _COUNTERS + len(state)
            return self._iterations(count, list(given[:split]), given[split:])

        rows = tf.TensorSpec([None, size], dtype)
        counters = [counts, counts, several, counts, several]
        return (
            Compiled(first, [rows, *told], False, forgets=True),
            Compiled(
                further,
                [tf.TensorSpec([], tf.int32), *counters, *state, *told],
                False,
                forgets=True,
            ),
        )

    def _system(self, told: Sequence[tf.Tensor]) -> System:
        tolerance, damping, *tensors = told
        apply = self._precondition.apply
        return System(
            multiply=lambda rows: self._rows.multiply(rows) + damping * rows,
            precondition=lambda rows: apply(rows, tensors),
            tolerance=tolerance,
        )

    def _iterations(
        self, count: tf.Tensor, given: list[tf.Tensor], told: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the counters and the state after some iterations, and the products they took."""
        system, separable = self._system(told), self._method.separable
        rows = tf.shape(given[0])[0]
        eps = float(np.finfo(self._rows.dtype.as_numpy_dtype).eps)
        patience = _PATIENCE if separable else tf.maximum(_LEAST_PATIENCE, _PATIENCE // rows)
        # In the middle of a call nothing can be taken out: it ends where enough rows have.
        enough = tf.cast(rows, tf.float64) * (1 - _ENDED) if separable else 0.0

        def more(done: tf.Tensor, outcome: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
            del rest
            running = tf.reduce_sum(tf.cast(tf.equal(outcome, Outcome.RUNNING), tf.int32))
            return (done < count) & (running > 0) & (tf.cast(running, tf.float64) > enough)

        def iterate(
            done: tf.Tensor,
            outcome: tf.Tensor,
            iterations: tf.Tensor,
            best: tf.Tensor,
            since: tf.Tensor,
            gained: tf.Tensor,
            *state: tf.Tensor,
        ) -> list[tf.Tensor]:
            running = tf.equal(outcome, Outcome.RUNNING)
            step = self._method.iterate(state, running, system)
            iterations += tf.cast(running, tf.int32)
            smaller, gained = step.norm < _FALL * best, gained + step.gain
            since = tf.where(smaller | (step.gain > eps * gained), 0, since + 1)
            best = tf.where(smaller, step.norm, best)
            part = tf.cast(_PART * tf.cast(iterations, tf.float32), tf.int32)
            stalled = tf.equal(step.outcome, Outcome.RUNNING)
            stalled &= since >= tf.maximum(patience, part)
            found = tf.where(stalled, int(Outcome.STALLED), step.outcome)
            outcome = tf.where(running, found, outcome)
            return [done + 1, outcome, iterations, best, since, gained, *step.state]

        specs = [tensor.shape for tensor in given]
        done, *results = tf.while_loop(
            more,
            iterate,
            [tf.constant(0), *given],
            shape_invariants=[tf.TensorShape([]), *specs],
            parallel_iterations=1,
        )
        return [*results, done * rows]
