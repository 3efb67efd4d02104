"""Eigenvalues nearest to zero, from linear systems.

The method is shift-invert residual Arnoldi with the shift zero. The basis grows by solutions `t` of
`A t = r`, where `r` are residuals of Ritz vectors. These systems need not be solved accurately, as
the residuals themselves become smaller. Three details differ from the literature:

1. The Ritz vectors are those of `A^2`: combinations `x` of the basis with the smallest norms of
   `A x`. These norms are never less than the eigenvalues they approach, so that there are no
   spurious ones in the interior of the spectrum. Opposite eigenvalues are told apart within the few
   best.
2. What a solution leaves of its right-hand side is added to the basis, too. If the matrix is
   singular, that is where the null vectors are.
3. Once the wanted values have converged, the basis grows from new random vectors until the next
   best value is known not to be a wanted one, since a Krylov space has only one vector of a
   multiple eigenvalue.

References: C. Lee and G. W. Stewart, "Analysis of the residual Arnoldi method", Technical Report
TR-4890, University of Maryland, 2007; Z. Jia and C. Li, "Inner iterations in the shift-invert
residual Arnoldi method and the Jacobi-Davidson method", Science China Mathematics 57, 2014,
https://doi.org/10.1007/s11425-014-4791-5.
"""

from __future__ import annotations

import warnings

import numpy as np
import scipy.linalg

from hvp._errors import ConvergenceWarning
from hvp._solve.solve import solve
from hvp._spectra.basis import combined, orthonormal
from hvp._spectra.eigenvalues import CHOICES, BlockLanczos, EigenPairs, pairs_of
from hvp._spectra.probes import Probes

# Columns of a block.
_WIDTH = 2
# How accurately systems are solved, and the iterations of the first ones. They are doubled
# whenever they do not suffice: of a matrix that is nearly singular they never do, and what is left
# of the right-hand side is then an eigenvector.
_SYSTEM_RTOL, _ITERATIONS = 1e-2, 32
# How accurately the largest absolute eigenvalue is computed, which tolerances are relative to.
_SCALE_TOL = 0.1
# A value is known not to be another one if its residual is this part of the distance.
_CLEAR = 0.1


class NearZero:
    """One run of the method on a matrix, damping included.

    `tol` bounds residuals relative to the largest absolute eigenvalue.
    """

    def __init__(self, probes: Probes, count: int, tol: float) -> None:
        matrix = self._matrix = probes.matrix
        self._probes, self._count, self._tol = probes, count, tol
        self._dtype = matrix.dtype.as_numpy_dtype
        self._largest = min(matrix.size, 2 * count + 32)
        self._basis = self._images = np.zeros((0, matrix.size), self._dtype)
        self._iterations = _ITERATIONS

    def run(self, starts: np.ndarray | None, at_most: int) -> EigenPairs:
        """Iterate until the wanted values are confirmed, or `at_most` products have been used.

        The rows of `starts` are vectors to begin with.
        """
        # The largest absolute eigenvalue.
        lanczos = BlockLanczos(self._probes, 1, CHOICES["LM"], True, _SCALE_TOL)
        scale = lanczos.run(None, at_most).scale
        allowed = self._tol * scale
        self._grow(self._random_block(self._count + _WIDTH) if starts is None else starts)
        self._grow(self._random_block(self._count + _WIDTH - len(self._basis)))
        confirmed: np.ndarray | None = None
        while True:
            values, mixing, residuals = self._ritz()
            bounds = np.linalg.norm(residuals, axis=1)
            ranks = np.abs(values)
            best, others = ranks[: self._count], ranks[self._count :]
            is_needed = bounds > allowed
            if not is_needed[: self._count].any():
                if confirmed is None or (np.abs(best - confirmed) > 2 * allowed).any():
                    confirmed = best
                    residuals, is_needed = self._random_block(_WIDTH), np.full(_WIDTH, True)
                else:  # whether the next best values, of new vectors, are wanted ones
                    is_needed[: self._count] = False
                    is_needed[self._count :] &= bounds[self._count :] > _CLEAR * (
                        others - best.max()
                    )
            remaining = at_most - self._probes.products - self._count
            is_whole = len(self._basis) == self._matrix.size
            if is_whole or not is_needed.any() or remaining < 4 * _WIDTH:
                break
            if len(self._basis) + 2 * _WIDTH > self._largest:
                self._restart()
            self._solve(residuals[is_needed][:_WIDTH], remaining)
        return pairs_of(self._probes, mixing[: self._count], self._basis, scale)

    def _random_block(self, count: int) -> np.ndarray:
        """Return orthonormal random vectors outside of the basis, as many as there can be."""
        room = max(0, min(count, self._matrix.size - len(self._basis)))
        block = self._probes.random.standard_normal((room, self._matrix.size)).astype(self._dtype)
        return orthonormal(block, self._basis) if room else block

    def _grow(self, vectors: np.ndarray) -> None:
        """Add vectors and their products to the basis."""
        vectors = vectors[: self._matrix.size - len(self._basis)]
        if not len(vectors):
            return
        vectors = orthonormal(vectors.astype(self._dtype), self._basis)
        products = self._probes.multiply(vectors)
        self._basis = np.concatenate([self._basis, vectors])
        self._images = np.concatenate([self._images, products])

    def _ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the best Ritz values, two more than wanted, their coefficients and residuals."""
        triangle = scipy.linalg.qr(self._images.T.astype(np.float64), mode="r")[0]
        # The smallest norms of images are the last singular values.
        few = min(len(self._basis), self._count + _WIDTH)
        smallest = scipy.linalg.svd(triangle[: len(self._basis)])[2][::-1][:few]
        vectors, images = combined(smallest, self._basis), combined(smallest, self._images)
        projected = vectors.astype(np.float64) @ images.T
        values, rotation = scipy.linalg.eigh((projected + projected.T) / 2)
        order = CHOICES["near 0"](values)
        values, rotation = values[order], rotation[:, order].T
        residuals = rotation @ images - values[:, np.newaxis] * (rotation @ vectors)
        return values, rotation @ smallest, residuals.astype(self._dtype)

    def _restart(self) -> None:
        """Restrict the basis to its best directions."""
        triangle = scipy.linalg.qr(self._images.T.astype(np.float64), mode="r")[0]
        few = self._count + 2 * _WIDTH
        best = scipy.linalg.svd(triangle[: len(self._basis)])[2][::-1][:few]
        self._basis, self._images = combined(best, self._basis), combined(best, self._images)

    def _solve(self, residuals: np.ndarray, remaining: int) -> None:
        """Add solutions of systems to the basis, and what they leave of the right-hand sides."""
        residuals = residuals / np.linalg.norm(residuals, axis=1, keepdims=True)
        at_most = max(1, remaining // (2 * len(residuals)) - 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            result = solve(
                self._matrix,
                np.ascontiguousarray(residuals.T),
                method="minres",
                rtol=_SYSTEM_RTOL,
                maxiter=min(self._iterations, at_most),
            )
        self._probes.count(result.products)
        solutions = np.ascontiguousarray(result.x.T).astype(self._dtype)
        norms = np.linalg.norm(solutions, axis=1, keepdims=True)
        solutions = np.divide(solutions, norms, out=residuals.copy(), where=norms > 0)
        is_open = ~result.converged
        self._iterations *= 2 if is_open.any() else 1
        rest = residuals[is_open]
        if len(rest):
            rest = rest - self._probes.multiply(solutions[is_open]) * norms[is_open]
        self._grow(np.concatenate([solutions, rest]))
