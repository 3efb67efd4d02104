"""Directions of earlier solves and their products, used to precondition later ones.

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

from hvp._engines.linear_map import TensorFunction
from hvp._solve.nystrom import nystrom_eigen, nystrom_factors
from hvp._solve.preconditioners import NO_PRECONDITION, nystrom_precondition

# Directions of which others leave less than this part, squared, are left out, as that would raise
# the errors of their products: rounding, and the change of an operator since they were computed.
_DEPENDENT, _DEPENDENT_OF_BEFORE = 1e-5, 0.1
# So many directions are kept of one solve at most, or those of so many iterations, which may be
# more: later ones of a single column are not orthogonal to rounding. As many are kept in all when
# the operator has changed.
_FEW, _ITERATIONS = 128, 8


class RecycledSpace:
    """A space of at most `capacity` directions with their products.

    `is_current` tells whether the products are those of the present operator.
    """

    def __init__(self, size: int, dtype: np.dtype, capacity: int) -> None:
        self._capacity = min(capacity, size)
        self._basis = self._images = np.zeros((0, size), dtype)
        # Directions of the solve that is running.
        self._new: list[tuple[np.ndarray, np.ndarray]] = []
        self._eigen: tuple[np.ndarray, np.ndarray] | None = None
        self.is_current = True
        # Whether the operator has changed since the products of the basis were computed.
        self._has_changed = False

    def __len__(self) -> int:
        """Return the number of directions, at most the capacity."""
        count = len(self._basis) + sum(len(part) for part, _ in self._new)
        return min(count, self._capacity)

    def wants(self, count: int) -> bool:
        """Return whether there is room for `count` more directions of the running solve.

        A full space of the present operator stays as it is, since others would add little to it.
        """
        if self.is_current and len(self._basis) == self._capacity:
            return False
        most = min(self._capacity, max(_FEW, _ITERATIONS * count))
        return sum(len(part) for part, _ in self._new) + count <= most

    def add(self, directions: np.ndarray, images: np.ndarray) -> None:
        """Add directions of the running solve, with their products, as rows."""
        self._new.append((directions, images))

    def end_solve(self) -> None:
        """Record that the added directions are those of the present operator.

        Older ones are kept, and their products become approximations. Where these are wrong, later
        iterations search such directions again and replace them.
        """
        if self._new and not self.is_current:
            self.is_current, self._has_changed = True, True

    def clear(self) -> None:
        """Forget all directions."""
        self._basis, self._images = self._basis[:0], self._images[:0]
        self._new, self._eigen = [], None
        self.is_current, self._has_changed = True, False

    def precondition(self, damping: float) -> TensorFunction:
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
        """Make an orthonormal basis of all directions; called only when another solve needs it."""
        if not self._new:
            return
        directions, images = (np.concatenate(parts) for parts in zip(*self._new))
        self._new = []
        self._basis, self._images = merged(
            (self._basis, self._images),
            (directions, images),
            self._capacity,
            has_changed=self._has_changed,
        )
        self._eigen, self._has_changed = None, False


def merged(
    before: tuple[np.ndarray, np.ndarray],
    new: tuple[np.ndarray, np.ndarray],
    capacity: int,
    *,
    has_changed: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return an orthonormal basis of old and new directions, and its products, as rows.

    `before` is an orthonormal basis with its products, and `new` are any directions with theirs. If
    there are too many, those of the largest eigenvalues remain. `has_changed` tells whether the
    operator has changed since the old products were computed.
    """
    basis, images = _orthonormal(*new, _DEPENDENT)
    along = before[0] @ basis.T
    least = _DEPENDENT_OF_BEFORE if has_changed else _DEPENDENT
    rest = before[0] - along @ basis, before[1] - along @ images
    parts = (basis, images), _orthonormal(*rest, least, of_units=True)
    basis, images = (np.concatenate(pair) for pair in zip(*parts))
    most = min(capacity, max(_FEW, len(parts[0][0]))) if has_changed else capacity
    if len(basis) > most:
        projected = (basis @ images.T).astype(np.float64)
        values, mixing = scipy.linalg.eigh((projected + projected.T) / 2)
        best = mixing[:, np.argsort(-np.abs(values))[:most]].T.astype(basis.dtype)
        basis, images = best @ basis, best @ images
    return basis, images


def _orthonormal(
    directions: np.ndarray, images: np.ndarray, least: float, *, of_units: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return orthonormal combinations of directions, and the same combinations of their products.

    Combinations with coefficients of norm 1 are left out if their squared length is below `least`
    times the largest. With `of_units`, the directions are what is left of unit vectors after a
    projection, and `least` is absolute.
    """
    if not len(directions):
        return directions, images
    lengths = np.linalg.norm(directions, axis=1)
    used = lengths > 0
    scale = 1.0 if of_units else 1 / lengths[used, np.newaxis]
    directions, images = directions[used] * scale, images[used] * scale
    values, vectors = scipy.linalg.eigh((directions @ directions.T).astype(np.float64))
    independent = values > least * (1.0 if of_units else values.max(initial=0))
    mixing = (vectors[:, independent] / np.sqrt(values[independent])).T.astype(directions.dtype)
    return mixing @ directions, mixing @ images
