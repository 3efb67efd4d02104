"""Inverses of sparse matrices, by factorization."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import LinearOperator, spilu, splu

from hvp._engines.array_map import ArrayMap
from hvp._errors import HvpError, NonFiniteError
from hvp._operators.damping import check_damping
from hvp._operators.operator import Operator, sparsity_of_few
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.arguments import check_flag, check_number
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._vectors.selection import entries_of

# The first shift, relative to the largest diagonal entry, and the factor of the next ones.
_SHIFT, _NEXT_SHIFT = 1e-4, 10.0
# Right-hand sides of one solution.
_BLOCK = 64
# Incomplete factors have at most so many times the entries of the matrix.
_FILL = 30
# Factors are accurate if solutions with them have no larger componentwise backward error.
_BACKWARD_ERROR = 1e-8
# Matrices with no more columns are not sparse. Others are, if they take so few products, or no more
# than one for so many columns.
_SMALL, _FEW, _SHARE = 256, 32, 100


class SparseInverse(Operator):
    """The inverse of a sparse symmetric matrix, from a factorization.

    The matrix is found from a few products, as by ``H.to_sparse()``, and factorized by SuperLU with
    a symmetric ordering. A product with the inverse is a solution of two triangular systems.

    Parameters
    ----------
    H : HessianOperator, or scipy sparse matrix
        The symmetric matrix, with its damping.
    damping : float, optional
        Multiple of the identity that is added.
    positive : bool, optional
        Whether to add a further multiple of the identity, the `shift`, if the matrix is not
        positive definite. The inverse is then a preconditioner.
    drop : float, optional
        If it is not zero, entries of the factors that are smaller, relative to their column, are
        left out. Such incomplete factors take far less time and memory, as for grids in three
        dimensions, and give a symmetric approximation of the inverse, a preconditioner.

    Attributes
    ----------
    negative : int or None
        The number of negative eigenvalues of the matrix that was factorized; None if pivots on the
        diagonal did not suffice, or the factors are incomplete.
    shift : float
        The multiple of the identity that was added to make it positive definite.
    products : int
        The number of products that the matrix took, the last of which checks it.
    log_determinant : float
        The logarithm of the absolute value of the determinant; NaN if the factors are incomplete.

    Raises
    ------
    HvpError
        If the matrix is singular, or its pattern is not known.
    StaleOperatorError
        At a product, if the operator was evaluated again meanwhile. A preconditioner, with
        `positive` or `drop`, may be that of another point.

    Notes
    -----
    `NewtonCG` with ``preconditioner="sparse"`` is Newton's method with this factorization of a
    matrix that is made positive definite; for incomplete factors pass
    ``preconditioner=lambda H: hvp.SparseInverse(H, positive=True, drop=0.01)``.

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable(np.zeros(100_000))
    >>> loss = lambda: tf.reduce_sum((w[1:] - w[:-1]) ** 2) + tf.reduce_sum((w - 1) ** 2)
    >>> H = hvp.HessianOperator(loss, w)
    >>> inverse = hvp.SparseInverse(H)
    >>> step = -(inverse @ H.gradient)
    >>> step[:3].round(9), inverse.negative
    (array([1., 1., 1.]), 0)
    """

    is_symmetric = True

    @Uninterrupted()
    def __init__(
        self, H: Any, damping: float = 0.0, *, positive: bool = False, drop: float = 0.0
    ) -> None:
        damping, positive = check_damping(damping), check_flag(positive, "positive")
        drop = check_number(drop, "drop", below=1)
        evaluated = symmetric_matrix(H, "SparseInverse")
        space = evaluated.space
        # It is the inverse of this evaluation of the operator, unless it is a preconditioner.
        is_exact = not (positive or drop)
        make_sure = functools.partial(evaluated.make_sure_evaluated, evaluated.evaluations)
        if isinstance(H, LinearOperator) and not isinstance(H, Operator):
            raise HvpError(
                f"the operator is {type(H).__name__}, whose pattern is not known",
                "an operator of this package, or a matrix",
                "pass H.to_sparse() of the operators that it is made of, as a matrix; or use "
                "another method",
            )
        plain = H.to_sparse() if isinstance(H, Operator) else H
        matrix = scipy.sparse.csc_array(
            plain if scipy.sparse.issparse(plain) else np.asarray(plain, np.float64)
        )
        wrong = int(np.sum(~np.isfinite(matrix.data)))
        if wrong:
            raise NonFiniteError(f"the matrix has {wrong} entries that are not finite", "numbers")
        if not isinstance(H, Operator) and abs(matrix - matrix.T).max() > 1e-6 * abs(matrix).max():
            raise HvpError("the matrix is not symmetric", "a symmetric matrix")
        identity = scipy.sparse.csc_array(scipy.sparse.identity(space.size))
        matrix = matrix.astype(np.float64) + damping * identity
        self.shift, step = 0.0, _SHIFT * float(np.abs(matrix.diagonal()).max(initial=0) or 1)
        factors, pivots, self.negative = _factorized(matrix, drop)
        while positive and (factors is None or self.negative != 0):
            self.shift = step if not self.shift else _NEXT_SHIFT * self.shift
            factors, pivots, self.negative = _factorized(matrix + self.shift * identity, drop)
        if factors is None:
            raise HvpError(
                "the sparse matrix is singular",
                "a matrix that can be inverted",
                "add damping",
            )
        kept = sparsity_of_few(H, space.size)
        self.products = 0 if kept is None else kept.products + 1
        self.log_determinant = float(np.log(np.abs(pivots)).sum())
        if drop:
            self.negative, self.log_determinant = None, np.nan

        def solve(rows: np.ndarray) -> np.ndarray:
            if is_exact:
                make_sure()
            columns = _columns(rows)
            solved = factors.solve(columns)
            # Incomplete factors are not those of a symmetric matrix.
            return ((solved + factors.solve(columns, "T")) / 2 if drop else solved).T

        self._solve = solve
        super().__init__(ArrayMap(self._solve, space, evaluated.linear_map.sources))

    @Uninterrupted()
    def standard_errors(self, which: Any = None) -> np.ndarray:
        """Return standard errors: square roots of entries of the diagonal of the inverse.

        Parameters
        ----------
        which : array of int, optional
            The numbers of the entries of the flat vector whose errors are wanted; all by default.

        Returns
        -------
        ndarray
            The errors, in float64. Each takes a solution with the factors.

        Raises
        ------
        HvpError
            If the matrix is not known to be positive definite, so that the variables are not at a
            minimum; or if `which` has other numbers than those of entries.
        """
        if self.negative != 0 or self.shift:
            raise HvpError(
                f"the matrix has {self.negative} negative eigenvalues"
                if self.negative
                else "the matrix was not found to be positive definite",
                "the Hessian at a minimum of the negative log-likelihood",
                "minimize first, or pass a Gauss-Newton or Fisher matrix",
            )
        size = self.shape[0]
        places = np.arange(size) if which is None else entries_of(which, size)
        variances = []
        for start in range(0, len(places), _BLOCK):
            deliver_interrupt()
            taken = places[start : start + _BLOCK]
            units = np.zeros((len(taken), size))
            units[np.arange(len(taken)), taken] = 1
            solved = self._solve(units)
            variances.append(solved[np.arange(len(taken)), taken])
        return np.sqrt(np.concatenate([np.zeros(0), *variances]))


def sparse_inverse(H: Any) -> SparseInverse | None:
    """Return the inverse of a large matrix from sparse factors, or None if it is not sparse."""
    if not scipy.sparse.issparse(H):
        size = H.shape[0]
        if size <= _SMALL or sparsity_of_few(H, max(_FEW, size // _SHARE)) is None:
            return None
    return SparseInverse(H)


def _columns(rows: np.ndarray) -> np.ndarray:
    return np.asfortranarray(rows.T, np.float64)


def _factorized(matrix: Any, drop: float) -> tuple[Any, np.ndarray, int | None]:
    """Return the factors of a matrix, or None if it is singular, and its pivots.

    If all pivots are on the diagonal, and large enough, as many of them are negative as
    eigenvalues; this number is returned, too.
    """
    factorize = functools.partial(spilu, drop_tol=drop, fill_factor=_FILL) if drop else splu
    matrix = scipy.sparse.csc_array(matrix)
    for threshold in (0.0, 1.0):
        try:
            factors = factorize(
                matrix,
                permc_spec="MMD_AT_PLUS_A",
                diag_pivot_thresh=threshold,
                options={"SymmetricMode": not threshold},
            )
        except RuntimeError as error:
            if "singular" not in str(error):
                raise
            return None, np.zeros(0), None
        pivots = factors.U.diagonal()
        if not (np.isfinite(pivots).all() and pivots.all()):
            return None, pivots, None
        # Tiny pivots on the diagonal, as an indefinite matrix may have, spoil the factors; then
        # pivots are chosen among all entries of a column.
        if drop or _are_accurate(factors, matrix):
            break
    symmetric = np.array_equal(factors.perm_r, factors.perm_c)
    return factors, pivots, int((pivots < 0).sum()) if symmetric else None


def _are_accurate(factors: Any, matrix: Any) -> bool:
    """Return whether a solution with the factors has a small backward error."""
    b = np.random.default_rng(0).standard_normal(matrix.shape[0])
    x = factors.solve(b)
    residual, scale = np.abs(matrix @ x - b), abs(matrix) @ np.abs(x) + np.abs(b)
    return bool((residual <= _BACKWARD_ERROR * scale).all())
