"""Eigenvalues and eigenvectors at the ends of a spectrum, with residuals from true products.

The method is block Lanczos with thick restarts. It differs from the textbook in three ways:

1. Every new block is orthogonalized against the whole basis, twice. The coefficients form the
   projected matrix, whatever the basis was restarted from.
2. Once the wanted Ritz values have converged, the basis is restarted with them and a block of new
   random vectors, and has to converge again to the same values, the next best ones included. A
   Krylov space has only as many vectors of a multiple eigenvalue as a block has columns; the random
   block brings in others.
3. The residuals that are returned come from products with the eigenvectors themselves.

References: K. Wu and H. Simon, "Thick-restart Lanczos method for large symmetric eigenvalue
problems", SIAM Journal on Matrix Analysis and Applications 22(2), 2000,
https://doi.org/10.1137/S0895479898334605; Y. Zhou and Y. Saad, "Block Krylov-Schur method for large
symmetric eigenvalue problems", Numerical Algorithms 47, 2008,
https://doi.org/10.1007/s11075-008-9192-9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from hvp._spectra.basis import combined, orthogonalized, orthonormal
from hvp._spectra.probes import Probes

# A vector is exhausted where this many rounding units of the largest eigenvalue are left of it.
_ROUNDING = 32
# Columns of a block. More would need more products, which blocks do not make much cheaper.
_WIDTH = 2
# A Ritz value is known not to be another one if its residual is this part of the distance.
_CLEAR = 0.1
# Values that were confirmed may differ from those before by this part of the tolerance.
_SAME = 2.0


@dataclass(frozen=True)
class EigenPairs:
    """Ritz values in the wanted order, with their vectors as rows.

    `residual_norms` are the norms of `A x - value * x`, and `scale` is the largest absolute Ritz
    value that occurred, wanted or not.
    """

    values: np.ndarray
    vectors: np.ndarray
    residual_norms: np.ndarray
    scale: float


# Takes increasing Ritz values; returns the places of the wanted ones, best first.
Choose = Callable[[np.ndarray], np.ndarray]


class BlockLanczos:
    """One run of the method on a matrix, damping included.

    `choose` ranks the Ritz values, and `by_size` says that it does so by absolute value. `tol`
    bounds residuals relative to the largest absolute Ritz value.
    """

    def __init__(
        self, probes: Probes, count: int, choose: Choose, by_size: bool, tol: float
    ) -> None:
        self._probes, self._count, self._choose = probes, count, choose
        self._by_size, self._tol, self._size = by_size, tol, probes.matrix.size
        self._dtype = probes.matrix.dtype.as_numpy_dtype
        self._width = min(_WIDTH, self._size)
        self._largest = min(self._size, 2 * count + 32)
        self._scale = 0.0

    def run(self, starts: np.ndarray | None, at_most: int) -> EigenPairs:
        """Iterate until the wanted values are confirmed, or `at_most` products have been used.

        The rows of `starts` are vectors to begin with.
        """
        self._begin(starts)
        confirmed: np.ndarray | None = None
        while True:
            self._extend()
            values, mixing, bounds = self._ritz()
            wanted = self._choose(values)[: self._count]
            # Restarts forget large values that are not wanted.
            self._scale = scale = max(self._scale, float(np.abs(values).max()))
            enough = len(wanted) == self._count
            is_whole = len(self._basis) == self._size
            settled = enough and bool((bounds[wanted] <= self._tol * scale).all())
            settled = settled and (confirmed is None or self._no_other(values, bounds, scale))
            if is_whole or self._probes.products + self._width + self._count > at_most:
                break
            if settled:
                current = np.sort(values[wanted])
                if confirmed is not None and self._is_same(current, confirmed, scale):
                    break
                confirmed = current
                self._restart(values, mixing, np.sort(wanted), self._random_block())
            elif len(self._basis) + len(self._next) > self._largest:
                # Some more than are wanted, as these converge next.
                more = self._choose(values)[: self._count + self._width]
                self._restart(values, mixing, np.sort(more), self._next)
        return pairs_of(self._probes, mixing[:, wanted].T, self._basis, self._scale)

    def _no_other(self, values: np.ndarray, bounds: np.ndarray, scale: float) -> bool:
        """Whether the next best Ritz values, of new vectors, are known not to be wanted.

        Their residuals have to be small compared with the distances to the wanted ones, or within
        the tolerance.
        """
        order = self._choose(values)
        wanted, others = order[: self._count], order[self._count : self._count + 2]
        ranks = np.abs(values) if self._by_size else values
        apart = np.abs(ranks[others, np.newaxis] - ranks[wanted]).min(axis=1)
        allowed = np.maximum(_CLEAR * apart, self._tol * scale)
        return len(others) > 0 and bool((bounds[others] <= allowed).all())

    def _begin(self, starts: np.ndarray | None) -> None:
        size = self._size
        self._basis = np.zeros((0, size), self._dtype)
        self._projected = np.zeros((0, 0))
        first = self._probes.random.standard_normal((self._width, size))
        if starts is not None:
            if len(starts) > self._width:
                # Each of them is in the Krylov space of a combination of all.
                starts = self._probes.random.standard_normal((self._width, len(starts))) @ starts
            first[: len(starts)] = starts
        self._next = orthonormal(first.astype(self._dtype), self._basis)

    def _extend(self) -> None:
        """Multiply the next block, and add it to the basis."""
        block = self._next
        before, count = len(self._basis), len(block)
        products = self._probes.multiply(block)
        self._basis = np.concatenate([self._basis, block])
        rest, coefficients = orthogonalized(products, self._basis)
        projected = np.zeros((before + count, before + count))
        projected[:before, :before] = self._projected
        projected[:, before:] = coefficients.T
        projected[before:, :before] = coefficients[:, :before]
        corner = projected[before:, before:]
        projected[before:, before:] = (corner + corner.T) / 2
        self._projected = projected
        self._coupled = slice(before, before + count)
        scale = np.abs(projected).max(initial=0)
        triangle, basis = self._factored(rest, scale)
        self._coupling, self._next = triangle, basis
        if not len(self._next) and len(self._basis) < self._size:
            self._next = self._random_block()
            self._coupling = np.zeros((len(self._next), count))

    def _factored(self, rest: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Return `C` and orthonormal rows `Q` with `rest = C.T Q`, without exhausted directions."""
        Q, R, order = scipy.linalg.qr(rest.T.astype(np.float64), mode="economic", pivoting=True)
        small = _ROUNDING * np.finfo(self._dtype).eps * scale
        rank = min(int(np.sum(np.abs(np.diag(R)) > small)), self._size - len(self._basis))
        coupling = np.zeros((rank, len(rest)))
        coupling[:, order] = R[:rank]
        basis = Q[:, :rank].T.astype(self._dtype)
        return coupling, orthonormal(basis, self._basis) if rank else basis

    def _ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return Ritz values, their coefficients, and the norms of their residuals."""
        values, mixing = scipy.linalg.eigh(self._projected)
        return values, mixing, np.linalg.norm(self._coupling @ mixing[self._coupled], axis=0)

    def _restart(
        self, values: np.ndarray, mixing: np.ndarray, places: np.ndarray, block: np.ndarray
    ) -> None:
        self._basis = combined(mixing[:, places].T, self._basis)
        self._projected = np.diag(values[places])
        self._next = orthonormal(block, self._basis)

    def _random_block(self) -> np.ndarray:
        room = self._size - len(self._basis)
        shape = (min(self._width, room), self._size)
        return orthonormal(
            self._probes.random.standard_normal(shape).astype(self._dtype), self._basis
        )

    def _is_same(self, current: np.ndarray, before: np.ndarray, scale: float) -> bool:
        return bool((np.abs(current - before) <= _SAME * self._tol * scale).all())


def pairs_of(
    probes: Probes, coefficients: np.ndarray, basis: np.ndarray, scale: float
) -> EigenPairs:
    """Return the Rayleigh quotients of combinations of a basis, which are normalized.

    The residuals are from a product with each of them.
    """
    vectors = combined(coefficients, basis)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    products = probes.multiply(vectors)
    values = np.einsum("ij,ij->i", vectors, products, dtype=np.float64)
    residuals = products.astype(np.float64) - values[:, np.newaxis] * vectors
    return EigenPairs(values, vectors, np.linalg.norm(residuals, axis=1), scale)


def _both_ends(values: np.ndarray) -> np.ndarray:
    """Return places from both ends alternately, beginning with the largest value."""
    order = np.argsort(values)
    turns = np.empty_like(order)
    half = (len(order) + 1) // 2
    turns[0::2], turns[1::2] = order[::-1][:half], order[: len(order) - half]
    return turns


# Which values are wanted, best first.
CHOICES: dict[str, Choose] = {
    "LA": lambda values: np.argsort(-values, kind="stable"),
    "SA": lambda values: np.argsort(values, kind="stable"),
    "LM": lambda values: np.argsort(-np.abs(values), kind="stable"),
    "BE": _both_ends,
    "near 0": lambda values: np.argsort(np.abs(values), kind="stable"),
}
