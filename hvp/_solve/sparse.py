"""Inverses of sparse matrices, by factorization."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import splu

from hvp._engines.array_map import ArrayMap
from hvp._errors import HvpError
from hvp._operators.damping import check_damping
from hvp._operators.operator import Operator
from hvp._operators.symmetric import matrix_of
from hvp._runtime.arguments import check_flag
from hvp._runtime.interrupts import Uninterrupted

# The first shift, relative to the largest diagonal entry, and the factor of the next ones.
_SHIFT, _NEXT_SHIFT = 1e-4, 10.0


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

    Attributes
    ----------
    negative : int or None
        The number of negative eigenvalues of the matrix that was factorized; None if pivots on the
        diagonal did not suffice.
    shift : float
        The multiple of the identity that was added to make it positive definite.
    log_determinant : float
        The logarithm of the absolute value of the determinant.

    Raises
    ------
    HvpError
        If the matrix is singular, or its pattern is not known.

    Notes
    -----
    As a function of an operator, this class is a preconditioner for `NewtonCG`, with which it
    becomes Newton's method with a sparse factorization:
    ``preconditioner=lambda H: hvp.SparseInverse(H, positive=True)``.

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
    def __init__(self, H: Any, damping: float = 0.0, *, positive: bool = False) -> None:
        damping, positive = check_damping(damping), check_flag(positive, "positive")
        space = matrix_of(H).space
        matrix = scipy.sparse.csc_array(H.to_sparse() if isinstance(H, Operator) else H)
        identity = scipy.sparse.csc_array(scipy.sparse.identity(space.size))
        matrix = matrix.astype(np.float64) + damping * identity
        self.shift, step = 0.0, _SHIFT * float(np.abs(matrix.diagonal()).max(initial=0) or 1)
        factors, pivots, self.negative = _factorized(matrix)
        while positive and (factors is None or self.negative != 0):
            self.shift = step if not self.shift else _NEXT_SHIFT * self.shift
            factors, pivots, self.negative = _factorized(matrix + self.shift * identity)
        if factors is None:
            raise HvpError(
                "the sparse matrix is singular",
                "a matrix that can be inverted",
                "add damping",
            )
        self.log_determinant = float(np.log(np.abs(pivots)).sum())
        super().__init__(ArrayMap(lambda rows: factors.solve(_columns(rows)).T, space))


def _columns(rows: np.ndarray) -> np.ndarray:
    return np.asfortranarray(rows.T, np.float64)


def _factorized(matrix: Any) -> tuple[Any, np.ndarray, int | None]:
    """Return the factors of a matrix, or None if it is singular, and its pivots.

    If all pivots are on the diagonal, as many of them are negative as eigenvalues; this number is
    returned, too.
    """
    try:
        factors = splu(
            scipy.sparse.csc_array(matrix),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
    except RuntimeError as error:
        if "singular" not in str(error):
            raise
        return None, np.zeros(0), None
    pivots = factors.U.diagonal()
    if not (np.isfinite(pivots).all() and pivots.all()):
        return None, pivots, None
    symmetric = np.array_equal(factors.perm_r, factors.perm_c)
    return factors, pivots, int((pivots < 0).sum()) if symmetric else None
