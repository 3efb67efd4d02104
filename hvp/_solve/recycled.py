"""Directions of earlier solves and their products, from which later ones are preconditioned.

The first iterations of a block method search the directions of the largest eigenvalues. These
directions and their products make a Nystrom approximation that costs no further product. It is of
no use to the solve that it comes from, whose iterations know these directions already. It
preconditions every later solve with the same operator, or with one that has changed a little.

Related: M. L. Parks, E. de Sturler, G. Mackey, D. D. Johnson and S. Maiti, "Recycling Krylov
subspaces for sequences of linear systems", SIAM Journal on Scientific Computing 28(5), 2006,
https://doi.org/10.1137/040607277; the preconditioner is that of Z. Frangella, J. A. Tropp and
M. Udell, "Randomized Nystrom preconditioning", SIAM Journal on Matrix Analysis and Applications
44(2), 2023, https://doi.org/10.1137/21M1466244.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg
import tensorflow as tf

from hvp._solve.nystrom import nystrom_eigen, nystrom_factors
from hvp._solve.preconditioners import NO_PRECONDITION, Precondition, nystrom_precondition

# Directions that depend on others up to this part are left out: their products would be inaccurate.
_DEPENDENT = 1e-5


class RecycledSpace:
    """A space of directions with their products.

    Parameters
    ----------
    size : int
        The length of a vector.
    dtype : numpy dtype
        Of the vectors.
    capacity : int
        The largest number of directions.

    Attributes
    ----------
    is_current : bool
        Whether the products are those of the present operator.
    """

    def __init__(self, size: int, dtype: np.dtype, capacity: int) -> None:
        self._capacity = min(capacity, size)
        self._basis = self._images = np.zeros((0, size), dtype)
        # Directions of the solve that is running.
        self._new: list[tuple[np.ndarray, np.ndarray]] = []
        self._eigen: tuple[np.ndarray, np.ndarray] | None = None
        self.is_current = True

    def __len__(self) -> int:
        """Return the number of directions, at most the capacity."""
        count = len(self._basis) + sum(len(part) for part, _ in self._new)
        return min(count, self._capacity)

    def wants(self, count: int) -> bool:
        """Return whether so many more directions of the running solve have a place.

        A full space of the present operator stays as it is: others would add little to it.
        """
        if self.is_current and len(self._basis) == self._capacity:
            return False
        return sum(len(part) for part, _ in self._new) + count <= self._capacity

    def add(self, directions: np.ndarray, images: np.ndarray) -> None:
        """Add directions of the running solve, with their products, as rows."""
        self._new.append((directions, images))

    def end_solve(self) -> None:
        """Note that the directions that were added are those of the present operator."""
        if self._new and not self.is_current:
            self._basis, self._images = self._basis[:0], self._images[:0]
            self._eigen, self.is_current = None, True

    def precondition(self, damping: float) -> Precondition:
        """Return the preconditioner of the damped operator."""
        self._merge()
        if not len(self._basis):
            return NO_PRECONDITION
        if self._eigen is None:
            self._eigen = nystrom_eigen(self._basis, self._images)
        eigenvalues, vectors = self._eigen
        factors = nystrom_factors(eigenvalues, damping).astype(self._basis.dtype)
        # Always of the same shape: another one would be another graph.
        room = self._capacity - len(factors)
        vectors, factors = np.pad(vectors, [(0, 0), (0, room)]), np.pad(factors, (0, room))
        return nystrom_precondition(tf.constant(vectors), tf.constant(factors))

    def _merge(self) -> None:
        """Make an orthonormal basis of all directions; only once there is another solve."""
        if not self._new:
            return
        directions, images = (np.concatenate(parts) for parts in zip(*self._new))
        self._new = []
        directions = np.concatenate([self._basis, directions])
        images = np.concatenate([self._images, images])
        basis, images = _orthonormal(directions, images)
        if len(basis) > self._capacity:  # those of the largest eigenvalues
            projected = (basis @ images.T).astype(np.float64)
            values, mixing = scipy.linalg.eigh((projected + projected.T) / 2)
            best = mixing[:, np.argsort(-np.abs(values))[: self._capacity]].T.astype(basis.dtype)
            basis, images = best @ basis, best @ images
        self._basis, self._images, self._eigen = basis, images, None


def _orthonormal(directions: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return orthonormal combinations of directions, and the same ones of their products."""
    lengths = np.linalg.norm(directions, axis=1)
    used = lengths > 0
    scale = 1 / lengths[used, np.newaxis]
    directions, images = directions[used] * scale, images[used] * scale
    values, vectors = scipy.linalg.eigh((directions @ directions.T).astype(np.float64))
    independent = values > _DEPENDENT * values.max(initial=0)
    mixing = (vectors[:, independent] / np.sqrt(values[independent])).T.astype(directions.dtype)
    return mixing @ directions, mixing @ images
