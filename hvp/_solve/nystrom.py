"""Randomized Nystrom approximations of a symmetric operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import tensorflow as tf

from hvp._operators.matrix import Matrix
from hvp._runtime.interrupts import deliver_interrupt

# Eigenvalues of a sketch are taken for zero below this many rounding units for each column.
_ROUNDING = 8
# Shift that makes an indefinite operator positive definite, in units of the most negative
# eigenvalue of its sketch.
_SHIFT = 4
# The largest rank of a sketch that grows, in units of `n`.
_MAX_PART = 0.5


class NystromSketch:
    """A randomized Nystrom approximation of the positive part of an operator.

    With an orthonormal block of random columns `Q`, the approximation is
    `(A Q) (Q^T A Q)^{-1} (A Q)^T = U diag(e) U^T`. The rows of `basis` and `images`, of shape
    `(rank, n)`, are `Q^T` and `(A Q)^T`. `seed` is a pair of integers. See `NystromPreconditioner`
    for the reference.
    """

    def __init__(self, matrix: Matrix, seed: Any) -> None:
        self._matrix, self._seed = matrix, seed
        # Rows rather than columns: the basis is Q^T, the images are (A Q)^T.
        self.basis = np.zeros((0, matrix.size), matrix.dtype.as_numpy_dtype)
        self.images = self.basis.copy()
        self._eigen: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def rank(self) -> int:
        """The number of basis vectors, and of products."""
        return len(self.basis)

    @property
    def eigenvalues(self) -> np.ndarray:
        """The eigenvalues of the approximation, nonnegative and decreasing."""
        return self._eigenpairs()[0]

    @property
    def eigenvectors(self) -> np.ndarray:
        """Its eigenvectors as columns; zero where nothing but rounding errors is left."""
        return self._eigenpairs()[1]

    def grow(self, first_rank: int, suffices: Callable[[], bool]) -> None:
        """Double the rank until it suffices, or is half of `n`."""
        max_rank = max(1, int(_MAX_PART * self._matrix.size))
        self.extend(min(first_rank, max_rank))
        while self.rank < max_rank and not suffices():
            deliver_interrupt()
            self.extend(min(2 * self.rank, max_rank))

    def extend(self, rank: int) -> None:
        """Add random vectors to the basis, with their products, until it has `rank` vectors."""
        size, self._eigen = self.rank, None
        seed = [int(self._seed[0]), int(self._seed[1]) + size]
        shape = (rank - size, self._matrix.size)
        draws = tf.random.stateless_normal(shape, seed, dtype=self._matrix.dtype).numpy()
        for _ in range(2):  # rounding makes a second pass of orthogonalization necessary
            draws -= (draws @ self.basis.T) @ self.basis
        draws = np.ascontiguousarray(scipy.linalg.qr(draws.T, mode="economic")[0].T)
        self.basis = np.concatenate([self.basis, draws])
        images = self._matrix.multiply(tf.constant(draws)).numpy()
        self.images = np.concatenate([self.images, images])

    def _eigenpairs(self) -> tuple[np.ndarray, np.ndarray]:
        if self._eigen is None:
            self._eigen = nystrom_eigen(self.basis, self.images)
        return self._eigen


def nystrom_eigen(basis: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eigenvalues and eigenvectors of the Nystrom approximation of a sketch.

    The eigenvalues are nonnegative and decreasing. The eigenvectors are columns, which are zero
    where nothing but rounding errors is left.
    """
    core = (basis @ images.T).astype(np.float64)
    values, vectors = scipy.linalg.eigh((core + core.T) / 2)
    eps = np.finfo(images.dtype).eps
    rounding = np.abs(values).max(initial=0) * len(values) * _ROUNDING * eps
    # For an indefinite operator the approximation would have eigenvalues that are far too
    # large. A shift makes the operator positive definite, approximately; it is subtracted from
    # the eigenvalues afterwards.
    shift = -_SHIFT * values[0] if values[0] < -rounding else 0.0
    images = images + np.asarray(shift, images.dtype) * basis
    values = values + shift
    usable = values > rounding
    # With F = (Q^T A Q)^{-1/2} (A Q)^T the approximation is F^T F, whose eigenvectors are the
    # right singular vectors of F.
    roots = np.where(usable, 1 / np.sqrt(np.where(usable, values, 1)), 0)
    factor = (vectors * roots).T.astype(images.dtype) @ images
    squares, mixing = scipy.linalg.eigh((factor @ factor.T).astype(np.float64))
    squares, mixing = squares[::-1], mixing[:, ::-1]
    positive = squares > 0
    scale = np.where(positive, 1 / np.sqrt(np.where(positive, squares, 1)), 0)
    eigenvectors = ((mixing * scale).T.astype(factor.dtype) @ factor).T
    eigenvalues = np.where(positive, squares - shift, 0)
    return np.maximum(eigenvalues, 0), np.ascontiguousarray(eigenvectors)


def nystrom_factors(eigenvalues: np.ndarray, damping: float) -> np.ndarray:
    """Return `f` such that the Nystrom preconditioner is `I + U diag(f) U^T`.

    For the eigenvalues `e` and the damping `mu`, `f_i = (e_min + mu) / (e_i + mu) - 1`, where
    `e_min` is the smallest positive eigenvalue, and `f_i = 0` if `e_i` is zero.
    """
    damped = eigenvalues + max(damping, 0.0)
    positive = eigenvalues > 0
    smallest = damped[positive].min(initial=np.inf)
    return np.where(positive, smallest / np.where(positive, damped, 1) - 1, 0)
