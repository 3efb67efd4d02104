"""The inverse of a damped Kronecker-factored matrix, which needs no linear solve."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.kfac import EKFAC, KFAC
from hvp._runtime.digest import digest

# By default vectors and what they are multiplied by take about this many bytes.
_BYTES, _VECTORS, _MAX_WIDTH = 2**30, 4, 1024


class FactoredInverse:
    """The inverse of `K + damping I` for a Kronecker-factored `matrix` `K`.

    It multiplies `width` vectors at once, which take at most `nbytes` bytes.
    """

    def __init__(self, matrix: KFAC, damping: float, nbytes: int | None) -> None:
        self._matrix, self._damping = matrix, damping
        self.solver = "ekfac" if isinstance(matrix, EKFAC) else "kfac"
        size = matrix.shape[0] * matrix.dtype.itemsize * _VECTORS
        self.width = max(1, min(_MAX_WIDTH, (nbytes or _BYTES) // size))
        self._inverse: FactoredOperator = matrix.inverse(damping)
        # Roots of the inverse and of the matrix, made when they are first needed.
        self._root: FactoredOperator | None = None
        self._root_of_matrix: FactoredOperator | None = None

    def apply(self, rows: np.ndarray, checkpoint: Any = None) -> np.ndarray:
        """Multiply the inverse by each row; there is no progress to keep in a checkpoint."""
        del checkpoint
        return self._inverse.linear_map.apply(tf.constant(rows)).numpy()

    def fingerprint(self) -> dict[str, str]:
        """Return a fingerprint of the matrix and its damping."""
        settings = f"{self._damping!r} {digest(self._matrix.eigenvalues)}"
        return {"solver": self.solver, "settings": settings}

    def whitened(self, rows: np.ndarray) -> np.ndarray:
        """Multiply the square root of the inverse by each row.

        Scores are products of such rows, which have similar lengths in all directions.
        """
        if self._root is None:
            self._root = self._inverse.sqrt()
        return self._root.linear_map.apply(tf.constant(rows)).numpy()

    def whitened_solutions(self, solutions: np.ndarray) -> np.ndarray:
        """Return `whitened` of the vectors for which `apply` returned these solutions."""
        if self._root_of_matrix is None:
            self._root_of_matrix = self._matrix.sqrt(self._damping)
        return self._root_of_matrix.linear_map.apply(tf.constant(solutions)).numpy()

    @property
    def operator(self) -> FactoredOperator:
        """The damped matrix."""
        return self._matrix.damped(self._damping)

    def refresh(self) -> None:
        """Evaluate the matrix again, at the values that variables have now."""
        self._matrix.refresh()
