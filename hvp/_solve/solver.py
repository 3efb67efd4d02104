"""`hvp.Solver`: solves that remember."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from hvp._errors import HvpError
from hvp._runtime.arguments import check_count
from hvp._runtime.interrupts import Uninterrupted
from hvp._solve.recycled import RecycledSpace
from hvp._solve.rows import Rows
from hvp._solve.solve import Call, SolveResult, solve_with

# The default capacity, and the bytes that directions and their products may take.
_CAPACITY, _BYTES = 512, 2**30


class Solver:
    """Solves systems with one operator, each with what the earlier ones have learned.

    The directions of the first iterations of a solve are kept with their products. They make a
    preconditioner for the next solve, which then needs about half of the products, or fewer, and no
    product is spent on the preconditioner itself. After `refresh` of the operator, as between
    Newton steps, the products from the point before serve as approximations.

    Parameters
    ----------
    H : HessianOperator, or scipy LinearOperator or matrix
        Real and symmetric, as for `solve`.
    capacity : int, optional
        How many directions to keep. By default 512, but at most as many as take 1 GiB with their
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
    recycled directions; the fallbacks are those of `solve` with ``method="auto"``. Solutions agree
    with those of `solve` to the tolerance. Systems that are small enough for ``"exact"`` are solved
    so, which needs no memory.

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
        rows = Rows(H)
        if capacity is None:
            fit = _BYTES // (2 * rows.size * rows.dtype.size)
            capacity = max(1, min(_CAPACITY, fit))
        check_count(capacity, "capacity")
        self._H, self._rows = H, rows
        self._space = RecycledSpace(rows.size, rows.dtype.as_numpy_dtype, capacity)
        self._evaluations = self._count_evaluations()
        # The products of the first solve with each damping, tolerance and number of columns.
        self._first: dict[tuple[float, float, int], int] = {}
        self._has_changed = False
        self.products = 0

    @property
    def directions(self) -> int:
        """How many directions are kept."""
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
        """Solve `(H + damping I) x = b`, and remember.

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
        if method not in ("auto", "block_cg"):
            raise HvpError(f"the method is {method!r}", "'auto' or 'block_cg'")
        call = Call(
            method=method,
            damping=damping,
            rtol=rtol,
            atol=atol,
            maxiter=maxiter,
            x0=x0,
            progress=progress,
        )
        try:
            result = solve_with(self._H, b, call, self._space)
        finally:
            self._space.end_solve()
        self.products += result.products
        self._forget_unless_it_pays(result, damping, rtol)
        return result

    def _forget_unless_it_pays(self, result: SolveResult, damping: float, rtol: float) -> None:
        """Forget all directions if such a solve has taken more products than without them.

        When the operator has changed, that is not known. Twice as many would be a bad sign.
        """
        count = np.size(result.converged)
        first = self._first.setdefault((damping, rtol, count), result.products)
        if result.products > first * (2 if self._has_changed else 1):
            self._space.clear()

    def changed(self) -> None:
        """Say that an operator of scipy has changed; operators of this package tell so themselves.

        The solutions are right in any case. The directions are brought up to date by the next one.
        """
        self._space.is_current, self._has_changed = False, True

    def _count_evaluations(self) -> int:
        return self._H.stats.gradient_evaluations if self._rows.native else 0

    def __repr__(self) -> str:
        return (
            f"Solver({self._rows.size} x {self._rows.size}, {self.directions} directions kept, "
            f"{self.products} products)"
        )
