"""The smallest and largest entries of rows that arrive piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np


class Extremes:
    """The `k` smallest and the `k` largest scores of each row so far, in increasing order.

    The scores are `values`, and `numbers` are their columns, both of shape `(rows, up to 2 k)`.
    """

    def __init__(self, rows: int, k: int, dtype: Any) -> None:
        self._k = k
        self.numbers = np.empty((rows, 0), np.int64)
        self.values = np.empty((rows, 0), dtype)

    def add(self, start: int, scores: np.ndarray) -> None:
        """Add the scores of the columns from `start` on."""
        columns = np.broadcast_to(np.arange(start, start + scores.shape[1]), scores.shape)
        numbers = np.concatenate([self.numbers, columns], axis=1)
        values = np.concatenate([self.values, scores], axis=1)
        # Of equal scores the first column comes first, whatever the pieces.
        order = np.lexsort((numbers, values), axis=1)
        if order.shape[1] > 2 * self._k:
            order = np.concatenate([order[:, : self._k], order[:, -self._k :]], axis=1)
        self.numbers = np.take_along_axis(numbers, order, axis=1)
        self.values = np.take_along_axis(values, order, axis=1)
