"""Sums over the entries of each layer of an operator's variables."""

from __future__ import annotations

import numpy as np

from hvp._operators.matrix import Matrix
from hvp._vectors.selection import groups


class Layers:
    """The layers of an operator: which entries of a vector belong to each.

    Parameters
    ----------
    matrix : Matrix
        The operator. One that is not of this package has no layers.

    Attributes
    ----------
    names : list of str
        Their paths.
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
        """Add up the entries of each layer, of rows of shape `(k, n)`; returns `(k, layers)`."""
        filled = self._filled
        sums = np.add.reduceat(vectors, self._starts[filled], axis=1, dtype=np.float64)
        return sums @ self._membership[filled]
