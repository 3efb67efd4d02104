"""Solve many right-hand sides exactly, or block by block and method by method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvp._engines.linear_map import TensorFunction
from hvp._operators.matrix import Matrix
from hvp._operators.operator import Operator
from hvp._runtime.checkpoint import Checkpoint
from hvp._runtime.interrupts import deliver_interrupt
from hvp._runtime.progress import progress_bar
from hvp._solve.block_progress import BlockProgress, Solution
from hvp._solve.inverses import ExactInverse
from hvp._solve.krylov import ACCEPTABLE, Krylov
from hvp._solve.method import Method
from hvp._solve.outcome import SolveOutcome
from hvp._solve.preconditioners import NO_PRECONDITION
from hvp._solve.recycled import RecycledSpace
from hvp._solve.rows import norms, system_residual
from hvp._solve.sparse import SparseInverse

# Upper bounds on the columns of a block and on the memory of its vectors, and the number of vectors
# that an iteration needs for each column.
_MAX_COLUMNS, _MAX_BYTES, _VECTORS = 128, 2**30, 10


@dataclass(frozen=True)
class Equations:
    """A linear system without its right-hand sides.

    `damping` is added to the undamped operator. A column has converged when the norm of its
    residual is at most its entry of `tolerance`; `maxiter` bounds the iterations of each column.
    Most iterations use `low`, the operator in low precision, unless it is None. The directions of
    the first iterations are added to `recycled`, if there is one.
    """

    matrix: Matrix
    damping: float
    tolerance: np.ndarray
    maxiter: int
    low: Matrix | None = None
    recycled: RecycledSpace | None = None

    def residual(self, b: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the residual of the system, computed by a product."""
        return system_residual(self.matrix, b, x, self.damping)


def solve_directly(
    equations: Equations, b: np.ndarray, inverse: ExactInverse | SparseInverse
) -> Solution:
    """Solve by an inverse `G`, with a step of refinement: `x_1 = G b`, `x_2 = x_1 + G (b - A x_1)`.

    All eigenvalues, if it has them, tell of a singular matrix and of negative curvature.
    """
    solution = Solution.begin(np.zeros_like(b))
    solution.x = _multiply_rows(inverse, b)
    solution.x += _multiply_rows(inverse, equations.residual(b, solution.x))
    solution.residual_norms = norms(equations.residual(b, solution.x))
    solution.products = 2 * len(b)
    otherwise = SolveOutcome.STALLED
    if isinstance(inverse, ExactInverse):
        solution.products += len(inverse.eigenvalues)
        if inverse.rank < len(inverse.eigenvalues):
            otherwise = SolveOutcome.LEAST_SQUARES
        if inverse.eigenvalues[0] < 0 and inverse.is_nonzero[0]:
            solution.directions[:] = inverse.eigenvectors[:, 0]
    converged = solution.residual_norms <= equations.tolerance
    solution.outcome = np.where(converged, int(SolveOutcome.CONVERGED), int(otherwise))
    return solution


def _multiply_rows(inverse: Operator, b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(inverse.matmat(b.T).T)


def solve_iteratively(
    equations: Equations,
    b: np.ndarray,
    x0: np.ndarray | None,
    methods: Sequence[Method],
    precondition: TensorFunction,
    progress: Any,
    checkpoint: Checkpoint | None,
) -> tuple[Solution, list[str]]:
    """Solve by Krylov methods; return the solutions and the names of the methods that were used.

    Each further method solves the columns in which the previous one met negative curvature. The
    initial guess `x0` is for the first method only, and `precondition` for the methods that accept
    a preconditioner. Progress is saved in `checkpoint`, if there is one, and resumed from it.
    """
    solver = _BlockwiseSolver(equations, b, x0, methods, precondition, checkpoint)
    with progress_bar(progress, total=len(b), unit="column", done=solver.start) as bar:
        solver.run(bar)
    used = [m.name for i, m in enumerate(methods) if i == 0 or solver.used_second]
    return solver.solution, used


class _BlockwiseSolver:
    """Solves one block of columns after the other, and saves checkpoints.

    `start` is the first column of the current block.
    """

    def __init__(
        self,
        equations: Equations,
        b: np.ndarray,
        x0: np.ndarray | None,
        methods: Sequence[Method],
        precondition: TensorFunction,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._equations, self._b, self._x0, self._checkpoint = equations, b, x0, checkpoint
        self._methods = methods
        self._precondition = precondition
        self.used_second = self._changing = False
        self.solution = Solution.begin(np.zeros_like(b))
        # The position: the first column of the block, the index of the method, and its progress.
        self.start, self._stage = 0, 0
        self._progress: BlockProgress | None = None
        saved_state = {} if checkpoint is None else checkpoint.load()
        if saved_state:
            self._restore(saved_state)

    def run(self, bar: Any) -> None:
        """Solve all columns from `start` on."""
        width = self._width()
        try:
            while self.start < len(self._b):
                columns = np.arange(self.start, min(self.start + width, len(self._b)))
                self._solve_block(columns, bar)
                self._changing = True
                self.start, self._stage = self.start + len(columns), 0
                self._changing = False
                bar.update(self.start - bar.n)
                self._save_if_due()
        except KeyboardInterrupt:
            # The state is inconsistent during an update: then the last checkpoint stays.
            if not (self._changing or (self._progress and self._progress.changing)):
                self._save()
            raise
        self._save()

    def _width(self) -> int:
        """Return the number of columns in a block, chosen so that blocks have about equal size."""
        count, size = self._b.shape
        bytes_per_column = size * self._b.itemsize * _VECTORS
        # At most n vectors can be orthonormal.
        largest = max(1, min(_MAX_COLUMNS, size, _MAX_BYTES // max(1, bytes_per_column)))
        blocks = -(-count // largest)
        return -(-count // blocks) if count else 1

    def _solve_block(self, columns: np.ndarray, bar: Any) -> None:
        """Solve some columns together, with one method after the other."""
        while self._stage < len(self._methods):
            if self._stage:
                negative = self.solution.outcome[columns] == SolveOutcome.NEGATIVE_CURVATURE
                columns = columns[negative]
            if len(columns):
                self._solve(columns, bar)
            self._stage += 1
            self._changing = False

    def _solve(self, columns: np.ndarray, bar: Any) -> None:
        """Solve some columns together with the current method."""
        equations, method = self._equations, self._methods[self._stage]
        self.used_second |= self._stage > 0
        b = self._b[columns]
        if self._progress is None:
            guess = np.zeros_like(b)
            if self._x0 is not None and not self._stage:
                guess = self._x0[columns]
            self._progress = BlockProgress.begin(guess, is_low=equations.low is not None)
        progress = self._progress
        precondition = self._precondition if method.preconditioned else NO_PRECONDITION

        def report(progress: BlockProgress) -> None:
            iterations, largest = progress.summary()
            target = equations.tolerance[columns].max()
            bar.set_postfix_str(f"iteration {iterations}, residual {largest:.1e} (to {target:.1e})")
            self._save_if_due()
            deliver_interrupt()

        exact = equations.matrix
        refines = exact.may_be_wide

        def run(matrix: Matrix, wide: Matrix | None = None, **more: Any) -> None:
            Krylov(
                matrix,
                method,
                precondition,
                wide,
                b=b,
                progress=progress,
                tolerance=equations.tolerance[columns],
                damping=equations.damping,
                maxiter=equations.maxiter,
                report=report,
                **more,
            ).run()

        if progress.is_low and equations.low is not None:
            run(equations.low, exact)
            progress.go_on_in_full_precision(equations.maxiter)
        if (progress.outcome == SolveOutcome.RUNNING).any() and not progress.is_refining:
            run(exact, recycled=equations.recycled, stops_at_rounding=refines)
        if progress.is_refining or (refines and (progress.outcome == SolveOutcome.STALLED).any()):
            with exact.in_float64() as wide:
                if not progress.is_refining:
                    progress.refine(equations.maxiter)
                # Without float64 after all, cycles in float32 go on for as long as they help.
                run(exact, wide)
        # From here until the method's index is advanced, an interrupt must not save anything.
        self._changing = True
        if self._x0 is None:
            self._minimize_norm(b, progress)
        self._merge(columns, progress)
        self._progress = None

    def _minimize_norm(self, b: np.ndarray, progress: BlockProgress) -> None:
        """Replace least-squares solutions by those of smallest norm.

        The residual `r` of a least-squares solution is in the null space of the operator. The
        component of the solution along it is removed, `x - (r, x) / (r, r) r`, as in Y. Liu,
        A. Milzarek and F. Roosta, "Obtaining pseudo-inverse solutions with MINRES", 2023,
        arXiv:2309.17096.
        """
        least = progress.outcome == SolveOutcome.LEAST_SQUARES
        if not least.any():
            return
        residual = self._equations.residual(b, progress.x).astype(np.float64)
        squares = np.where(least, np.sum(residual**2, axis=1), 1)
        factors = np.where(least, np.sum(residual * progress.x, axis=1) / squares, 0)
        x = progress.x - (factors[:, np.newaxis] * residual).astype(b.dtype)
        residual_norms = norms(self._equations.residual(b, x))
        progress.products += 2 * len(b)
        better = least & (residual_norms <= ACCEPTABLE * progress.residual_norms)
        progress.x[better] = x[better]
        progress.residual_norms[better] = residual_norms[better]

    def _merge(self, columns: np.ndarray, progress: BlockProgress) -> None:
        """Copy the results of a method into the solution."""
        solution = self.solution
        solution.products += progress.products
        solution.iterations[columns] += progress.iterations
        has_direction = progress.directions.any(axis=1)
        solution.directions[columns[has_direction]] = progress.directions[has_direction]
        better = progress.residual_norms <= ACCEPTABLE * solution.residual_norms[columns]
        improved = columns[better]
        solution.x[improved] = progress.x[better]
        solution.residual_norms[improved] = progress.residual_norms[better]
        solution.outcome[improved] = progress.outcome[better]

    def _save_if_due(self) -> None:
        if self._checkpoint is not None and self._checkpoint.due:
            self._save()

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        arrays = {f"found_{name}": array for name, array in self.solution.arrays().items()}
        arrays["standing"] = np.array([self.start, self._stage, self.used_second])
        if self._progress is not None:
            arrays.update({f"at_{k}": array for k, array in self._progress.arrays().items()})
        self._checkpoint.save(arrays)

    def _restore(self, saved_state: dict[str, np.ndarray]) -> None:
        def without(prefix: str) -> dict[str, np.ndarray]:
            """Return the arrays whose names have this prefix, and strip it."""
            return {
                name[len(prefix) :]: array
                for name, array in saved_state.items()
                if name.startswith(prefix)
            }

        self.solution = Solution.of_arrays(without("found_"))
        self.start, self._stage, used_second = (int(number) for number in saved_state["standing"])
        self.used_second = bool(used_second)
        progress = without("at_")
        self._progress = BlockProgress.of_arrays(progress) if progress else None
