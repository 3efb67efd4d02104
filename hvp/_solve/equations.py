"""Many right-hand sides: solved densely, or block after block and method after method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from hvp._runtime.checkpoint import Checkpoint
from hvp._runtime.progress import progress_bar
from hvp._solve.inverses import ExactInverse
from hvp._solve.krylov import Krylov, Progress
from hvp._solve.method import Method
from hvp._solve.outcome import Outcome
from hvp._solve.preconditioners import NO_PRECONDITION, Precondition
from hvp._solve.rows import Rows, norms, residuals

# Columns solved together: so many at most, and with so many bytes in all vectors of the iteration.
_WIDEST, _BYTES, _VECTORS = 128, 2**30, 10
# By how much a method may be worse than the one before and still be believed.
_WORSE = 1.01


@dataclass(frozen=True)
class Equations:
    """A system, but for its right-hand sides.

    Attributes
    ----------
    rows : Rows
        The operator.
    damping : float
        All that is added to it.
    tolerance : ndarray
        Of shape `(k,)`: norms of residuals that are small enough.
    maxiter : int
        Iterations for each.
    """

    rows: Rows
    damping: float
    tolerance: np.ndarray
    maxiter: int

    def residual(self, b: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the residuals, by a product."""
        return residuals(self.rows, b, x, self.damping)


@dataclass
class Solution:
    """What has come of each right-hand side; all arrays, to be saved.

    Attributes
    ----------
    x, directions : ndarray
        Of shape `(k, n)`.
    outcome, iterations, residual_norms : ndarray
        Of shape `(k,)`.
    products : int
        Of the operator with vectors.
    """

    x: np.ndarray
    directions: np.ndarray
    outcome: np.ndarray
    iterations: np.ndarray
    residual_norms: np.ndarray
    products: int = 0

    @classmethod
    def begin(cls, b: np.ndarray) -> Solution:
        """Return one of which nothing is known."""
        count = len(b)
        return cls(
            np.zeros_like(b),
            np.zeros_like(b),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.full(count, np.inf),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything, to be saved."""
        return {name: np.asarray(value) for name, value in vars(self).items()}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> Solution:
        """Return what was saved."""
        given = dict(arrays)
        products = int(given.pop("products"))
        return cls(**cast(Any, given), products=products)

    def replace(self, which: np.ndarray, other: Solution) -> None:
        """Take another solution of some right-hand sides, but for directions that were met here."""
        for name in ("x", "outcome", "residual_norms"):
            getattr(self, name)[which] = getattr(other, name)
        self.iterations[which] += other.iterations
        self.products += other.products


def solve_exactly(equations: Equations, b: np.ndarray) -> Solution:
    """Solve by all eigenvalues, and correct the solution once."""
    found = Solution.begin(b)
    rows = equations.rows
    inverse = ExactInverse(rows.operator, damping=equations.damping - rows.damping)
    found.x = _rows(inverse, b)
    found.x += _rows(inverse, equations.residual(b, found.x))
    found.residual_norms = norms(equations.residual(b, found.x))
    found.products = rows.size + 2 * len(b)
    converged = found.residual_norms <= equations.tolerance
    otherwise = Outcome.LEAST_SQUARES if inverse.rank < rows.size else Outcome.STALLED
    found.outcome = np.where(converged, int(Outcome.CONVERGED), int(otherwise))
    if inverse.eigenvalues[0] < 0 and inverse.is_nonzero[0]:
        found.directions[:] = inverse.eigenvectors[:, 0]
    return found


def solve_iteratively(
    equations: Equations,
    b: np.ndarray,
    x0: np.ndarray | None,
    methods: Sequence[Method],
    precondition: Precondition,
    progress: Any,
    checkpoint: Checkpoint | None,
) -> tuple[Solution, list[str]]:
    """Solve by Krylov methods; each later one for what the one before could not.

    Parameters
    ----------
    equations : Equations
        The system.
    b : ndarray
        Of shape `(k, n)`.
    x0 : ndarray or None
        Where the first method begins.
    methods : sequence of Method
        In this order.
    precondition : Precondition
        For those that take one.
    progress : bool or "always"
        Whether to show a bar.
    checkpoint : Checkpoint or None
        Where to save, and go on from.

    Returns
    -------
    solution : Solution
        Of all right-hand sides.
    used : list of str
        Names of the methods that were used.
    """
    run = _Run(equations, b, x0, methods, precondition, checkpoint)
    with progress_bar(progress, total=len(b), unit="column", done=run.start) as bar:
        run.all(bar)
    used = [m.name for i, m in enumerate(methods) if i == 0 or run.second]
    return run.found, used


class _Run:
    """One call of `solve_iteratively`."""

    def __init__(
        self,
        equations: Equations,
        b: np.ndarray,
        x0: np.ndarray | None,
        methods: Sequence[Method],
        precondition: Precondition,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._equations, self._b, self._x0, self._checkpoint = equations, b, x0, checkpoint
        self._methods = methods
        self._precondition = precondition
        self.second = self._changing = False
        self.found = Solution.begin(b)
        # Where it stands: the first column of the block, the method, and that method's progress.
        self.start, self._stage = 0, 0
        self._progress: Progress | None = None
        saved = {} if checkpoint is None else checkpoint.load()
        if saved:
            self._restore(saved)

    def all(self, bar: Any) -> None:
        """Solve whatever is not solved yet."""
        width = self._width()
        try:
            while self.start < len(self._b):
                which = np.arange(self.start, min(self.start + width, len(self._b)))
                self._block(which, bar)
                self._changing = True
                self.start, self._stage = self.start + len(which), 0
                self._changing = False
                bar.update(self.start - bar.n)
                self._save_if_due()
        except KeyboardInterrupt:
            # In the middle of a change there is nothing to save: what was saved before stays.
            if not (self._changing or (self._progress and self._progress.changing)):
                self._save()
            raise
        self._save()

    def _width(self) -> int:
        each = self._b.shape[1] * self._b.itemsize * _VECTORS
        # No more than n vectors can be orthonormal.
        width = max(1, min(_WIDEST, self._b.shape[1], _BYTES // max(1, each)))
        return -(-len(self._b) // -(-len(self._b) // width)) if len(self._b) else 1

    def _block(self, which: np.ndarray, bar: Any) -> None:
        """Solve some right-hand sides together."""
        while self._stage < len(self._methods):
            if self._stage:
                which = which[self.found.outcome[which] == Outcome.NEGATIVE_CURVATURE]
            if len(which):
                self._solve(which, bar)
            self._stage += 1
            self._changing = False

    def _solve(self, which: np.ndarray, bar: Any) -> None:
        """Solve by the method whose turn it is, and note what has come of it."""
        equations, method = self._equations, self._methods[self._stage]
        self.second |= self._stage > 0
        b = self._b[which]
        if self._progress is None:
            first = np.zeros_like(b)
            if self._x0 is not None and not self._stage:
                first = self._x0[which]
            self._progress = Progress.begin(first)
        progress = self._progress
        solver = Krylov(
            equations.rows, method, self._precondition if method.preconditioned else NO_PRECONDITION
        )

        def report(progress: Progress) -> None:
            bar.set_postfix_str(self._shown(progress, which))
            self._save_if_due()

        solver.run(
            b,
            progress,
            tolerance=equations.tolerance[which],
            damping=equations.damping,
            maxiter=equations.maxiter,
            report=report,
        )
        self._changing = True
        if self._x0 is None:
            self._shorten(b, progress)
        self._merge(which, progress)
        self._progress = None

    def _shown(self, progress: Progress, which: np.ndarray) -> str:
        iterations, worst = progress.standing()
        tolerance = self._equations.tolerance[which].max()
        return f"iteration {iterations}, residual {worst:.1e} (to {tolerance:.1e})"

    def _shorten(self, b: np.ndarray, progress: Progress) -> None:
        """Take out what the operator makes zero (Liu, Milzarek and Roosta 2023)."""
        least = progress.outcome == Outcome.LEAST_SQUARES
        if not least.any():
            return
        residual = self._equations.residual(b, progress.x).astype(np.float64)
        squares = np.where(least, np.sum(residual**2, axis=1), 1)
        part = np.sum(residual * progress.x, axis=1) / squares
        x = progress.x - (np.where(least, part, 0)[:, np.newaxis] * residual).astype(b.dtype)
        found = norms(self._equations.residual(b, x))
        progress.products += 2 * len(b)
        better = least & (found <= _WORSE * progress.residual_norms)
        progress.x[better] = x[better]
        progress.residual_norms[better] = found[better]

    def _merge(self, which: np.ndarray, progress: Progress) -> None:
        found = self.found
        found.products += progress.products
        found.iterations[which] += progress.iterations
        met = progress.directions.any(axis=1)
        found.directions[which[met]] = progress.directions[met]
        better = progress.residual_norms <= _WORSE * found.residual_norms[which]
        into = which[better]
        found.x[into] = progress.x[better]
        found.residual_norms[into] = progress.residual_norms[better]
        found.outcome[into] = progress.outcome[better]

    def _save_if_due(self) -> None:
        if self._checkpoint is not None and self._checkpoint.due:
            self._save()

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        arrays = {f"found_{name}": array for name, array in self.found.arrays().items()}
        arrays["standing"] = np.array([self.start, self._stage, self.second])
        if self._progress is not None:
            arrays.update({f"at_{k}": array for k, array in self._progress.arrays().items()})
        self._checkpoint.save(arrays)

    def _restore(self, saved: dict[str, np.ndarray]) -> None:
        def part(prefix: str) -> dict[str, np.ndarray]:
            return {k[len(prefix) :]: v for k, v in saved.items() if k.startswith(prefix)}

        found = part("found_")
        self.found = Solution.of_arrays(found)
        self.start, self._stage, second = (int(number) for number in saved["standing"])
        self.second = bool(second)
        at = part("at_")
        self._progress = Progress.of_arrays(at) if at else None


def _rows(inverse: ExactInverse, b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(inverse.matmat(b.T).T)
