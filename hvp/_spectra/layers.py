"""Sums of the entries of a vector over each layer of an operator's variables."""

from __future__ import annotations

import numpy as np

from hvp._operators.matrix import Matrix
from hvp._vectors.selection import groups


class Layers:
    """The paths of an operator's layers, and which entries of a vector belong to each.

    An operator that is not of this package has no layers.
    """

    def __init__(self, matrix: Matrix) -> None:
        self.names: list[str] = []
        if not matrix.has_variables:
            return
        places = groups(matrix.space.paths)
        self.names, sizes = list(places), matrix.space.sizes
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._membership = np.zeros((len(sizes), len(places)))
        for number, members in enumerate(places.values()):
            self._membership[members, number] = 1
        # Variables without entries would take those of the next one.
        self._filled = [place for place, size in enumerate(sizes) if size]

    def sums(self, vectors: np.ndarray) -> np.ndarray:
        """Sum the entries of each layer in rows of shape `(k, n)`; returns shape `(k, layers)`."""
        filled = self._filled
        sums = np.add.reduceat(vectors, self._starts[filled], axis=1, dtype=np.float64)
        return sums @ self._membership[filled]
