"""`Solver`: a sequence of solves that reuses earlier search directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from hvp._operators.damping import check_damping
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.arguments import check_choice, check_count
from hvp._runtime.interrupts import Uninterrupted
from hvp._solve.recycled import RecycledSpace
from hvp._solve.solve import SolveResult, on_tapes, solve_with

# The default capacity, and the bytes that directions and their products may take.
_CAPACITY, _BYTES = 512, 2**30
# Number of recycled solves with a changing operator before the cost without recycling is measured
# again.
_PATIENCE = 3


@dataclass
class _Costs:
    """The costs, in products, of solves of one kind; they decide whether recycling pays.

    For the same operator it pays as long as it takes fewer products than the first solve did. When
    the operator changes, so does the cost of a solve without recycling, and it has to be measured
    again: after a number of solves that doubles each time recycling has turned out to pay, and as
    soon as the cost with recycling is nearer to the last such measurement than to its own best, as
    a ratio. `recycling_pays` is the decision for the next solve.
    """

    recycling_pays: bool = True
    _without: int | None = None
    _recycled: int | None = None
    _best: int | None = None
    _age: int = 0
    _patience: int = _PATIENCE

    def add(self, products: int, *, recycled: bool, has_changed: bool) -> None:
        """Record the cost of a solve, and decide about the next one."""
        if not recycled:
            self.recycling_pays = self._recycled is None or self._recycled < products
            if self.recycling_pays and self._recycled is not None:
                self._patience *= 2
            self._without, self._best, self._age = products, self._recycled, 0
            return
        self._recycled, self._age = products, self._age + 1
        self._best = products if self._best is None else min(products, self._best)
        if self._without is None:  # the directions are those of solves of another kind
            self.recycling_pays = not has_changed or self._age < self._patience
        elif has_changed:
            is_dear = products > math.sqrt(self._without * self._best)
            self.recycling_pays = self._age < self._patience and not is_dear
        else:
            self.recycling_pays = products <= self._without


class Solver:
    """Solves systems with one operator, and reuses what earlier solves have learned about it.

    The directions of the first iterations of a solve are kept with their products. They make a
    preconditioner for the next solve, without any further product. That solve then needs about half
    of the products, or fewer. The first solve with a positive damping begins with a sketch of the
    operator, as `solve` does with ``M="auto"``. After `refresh` of the operator, as between Newton
    steps, the products from the point before serve as approximations. Some solves then go without
    them, to measure whether they still help.

    Parameters
    ----------
    H : HessianOperator, or scipy LinearOperator or matrix
        Real and symmetric, as for `solve`.
    capacity : int, optional
        Number of directions to keep. By default 512, but at most as many as take 1 GiB with their
        products: `2 * capacity` vectors of `n` numbers.

    Attributes
    ----------
    products : int
        Number of products of all solves so far.

    Raises
    ------
    HvpError
        If the operator or the capacity is invalid.

    Notes
    -----
    The method is block conjugate gradients, preconditioned by a Nystrom approximation from the
    recycled directions; the fallbacks are those of `solve` with ``method="auto"``.
    Solutions agree with those of `solve` to the tolerance. Systems that are small enough for
    ``"exact"`` are solved by that method, which keeps no directions.

    Examples
    --------
    >>> import numpy as np
    >>> import hvp
    >>> rng = np.random.default_rng(0)
    >>> A = np.diag(np.r_[np.geomspace(10, 1e4, 100), np.ones(2900)])
    >>> solver = hvp.Solver(A)
    >>> first = solver.solve(rng.standard_normal((3000, 20)))
    >>> second = solver.solve(rng.standard_normal((3000, 20)))
    >>> second.products < 0.6 * first.products, bool(second.converged.all())
    (True, True)
    """

    def __init__(self, H: Any, *, capacity: int | None = None) -> None:
        matrix = symmetric_matrix(H, "Solver")
        if capacity is None:
            fit = _BYTES // (2 * matrix.size * matrix.dtype.size)
            capacity = max(1, min(_CAPACITY, fit))
        check_count(capacity, "capacity")
        self._H, self._matrix = H, matrix
        self._space = RecycledSpace(matrix.size, matrix.dtype.as_numpy_dtype, capacity)
        self._evaluations = self._count_evaluations()
        # What solves with each size of damping, tolerance and shape of right-hand sides have cost.
        self._costs: dict[tuple[int | None, float, tuple[Any, ...]], _Costs] = {}
        self._has_changed = False
        self.products = 0

    @property
    def directions(self) -> int:
        """The number of directions kept."""
        return len(self._space)

    @Uninterrupted()
    def solve(
        self,
        b: Any,
        *,
        method: Literal["auto", "block_cg"] = "auto",
        damping: float = 0.0,
        rtol: float = 1e-5,
        atol: float = 0.0,
        maxiter: int | None = None,
        x0: Any = None,
        progress: Any = False,
    ) -> SolveResult:
        """Solve `(H + damping I) x = b`, and keep the search directions for later solves.

        Parameters
        ----------
        b, damping, rtol, atol, maxiter, x0, progress
            As for `hvp.solve`. The damping may differ from solve to solve.
        method : {"auto", "block_cg"}, optional
            With ``"block_cg"`` there are no fallbacks, nor the dense solver for small systems.

        Returns
        -------
        SolveResult

        Warns
        -----
        ConvergenceWarning
            If a column has not converged.

        Raises
        ------
        HvpError
            As for `hvp.solve`.
        """
        evaluations = self._count_evaluations()
        if evaluations != self._evaluations:
            self._evaluations = evaluations
            self.changed()
        check_choice(method, "method", ("auto", "block_cg"))
        check_damping(damping)
        # Dampings that adapt from solve to solve are alike where they have the same size.
        size = round(math.log10(damping)) if damping > 0 else None
        kind = size, rtol, tuple(getattr(b, "shape", ()))
        costs = self._costs.setdefault(kind, _Costs())

        def solved(right: Any, start: Any = None) -> SolveResult:
            pays, is_used = costs.recycling_pays, len(self._space) > 0 and costs.recycling_pays
            try:
                result = solve_with(
                    self._H,
                    right,
                    self._space,
                    preconditions=pays,
                    method=method,
                    damping=damping,
                    rtol=rtol,
                    atol=atol,
                    maxiter=maxiter,
                    x0=start,
                    progress=progress,
                )
            finally:
                self._space.end_solve()
            self.products += result.products
            costs.add(result.products, recycled=is_used, has_changed=self._has_changed)
            return result

        return on_tapes(self._H, b, solved, x0)

    def changed(self) -> None:
        """Tell the solver that a scipy operator has changed.

        The solver detects changes of this package's operators itself. Solutions are correct even
        without this call. The next solve updates the directions.
        """
        self._space.is_current, self._has_changed = False, True

    def _count_evaluations(self) -> int:
        return self._matrix.evaluations

    def __repr__(self) -> str:
        return (
            f"Solver({self._matrix.size} x {self._matrix.size}, {self.directions} directions kept, "
            f"{self.products} products)"
        )
