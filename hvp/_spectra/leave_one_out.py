"""Low-rank approximations from random vectors, with each of the vectors left out in turn.

From products `Y = A W` with `k` random vectors, `Q` is an orthonormal basis of the range of `Y`.
Leaving out the vector `i` removes one direction `Q s_i` from the range, so that the range without
it costs no further product. `s_i` is a column of the transposed inverse of the triangular factor of
`Y`, normalized.

Reference: E. N. Epperly, J. A. Tropp and R. J. Webber, "XTrace: Making the most of every sample in
stochastic trace estimation", SIAM Journal on Matrix Analysis and Applications 45(1), 2024.
https://doi.org/10.1137/23M1548323
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from hvp._spectra.probes import Probes

# Directions of this many rounding units of the largest are taken for rounding errors.
ROUNDING = 64


class LeaveOneOut:
    """Random vectors, their products, and the products of a basis of these.

    In all, there are at most two products for each of the `k` vectors.

    Attributes
    ----------
    vectors, basis, images : ndarray
        `W`, `Q` and `A Q` as rows, in float64. Shapes `(k, n)`, `(r, n)` and `(r, n)`.
    coefficients : ndarray
        `R = Q^T Y`, of shape `(r, k)`.
    directions : ndarray
        `s_i` as columns, of shape `(r, k)`. They are zero if the products depend on each other: the
        range is then the same without each of them.
    """

    def __init__(self, probes: Probes, vectors: np.ndarray) -> None:
        count = len(vectors)
        products = probes.multiply(vectors).astype(np.float64)
        Q, R, _ = scipy.linalg.qr(products.T, mode="economic", pivoting=True)
        sizes = np.abs(np.diag(R))
        rank = int(np.sum(sizes > ROUNDING * np.finfo(vectors.dtype).eps * sizes.max(initial=0)))
        basis = np.ascontiguousarray(Q[:, :rank].T)
        self.vectors, self.basis = vectors.astype(np.float64), basis
        self.images = probes.multiply(basis.astype(vectors.dtype)).astype(np.float64)
        self.coefficients = basis @ products.T
        self.directions = np.zeros((rank, count))
        if rank == count:
            inverse = np.linalg.inv(self.coefficients).T
            self.directions = inverse / np.linalg.norm(inverse, axis=0)

    def traces(self) -> np.ndarray:
        """Return one trace estimate per omitted vector, for vectors uniform on a sphere."""
        size, count = self.vectors.shape[1], len(self.vectors)
        H, W = self.basis @ self.images.T, self.basis @ self.vectors.T
        T, S, R = self.images @ self.vectors.T, self.directions, self.coefficients
        H = (H + H.T) / 2
        inside = W - S * np.sum(S * W, axis=0)
        # Vectors of fixed length are the more of one space the less they are of another.
        rest = np.sum(self.vectors**2, axis=1) - np.sum(inside**2, axis=0)
        room = size - len(self.basis) + (len(self.basis) == count)
        scale = np.divide(room, rest, out=np.ones(count), where=rest > 1e-12 * size)
        outside = np.sum(W * R, axis=0) - 2 * np.sum(T * inside, axis=0)
        outside += np.sum(inside * (H @ inside), axis=0)
        return np.trace(H) - np.sum(S * (H @ S), axis=0) + scale * outside

    def diagonals(self) -> np.ndarray:
        """Return one diagonal estimate per omitted vector, as rows, for vectors of random signs."""
        along, S = np.sum(self.basis * self.images, axis=0), self.directions
        omitted, images = S.T @ self.basis, S.T @ self.images
        outside = np.sum(S * self.coefficients, axis=0)[:, np.newaxis] * omitted
        return along - omitted * images + self.vectors * outside
