"""Random projections, which keep products of long vectors in few numbers."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


class Projection:
    """A sparse random projection: each entry is added, with a random sign, to one of `size` sums.

    The product of two projected vectors is an unbiased estimate of their product `u . v`, whose
    standard error is at most ``|u| |v| sqrt(2 / size)`` (M. Charikar, K. Chen, M. Farach-Colton,
    "Finding frequent items in data streams", ICALP 2002, https://doi.org/10.1007/3-540-45465-9_59).
    """

    def __init__(self, length: int, size: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.size, self.seed = size, seed
        self._places = tf.constant(random.integers(0, size, length, dtype=np.int32))
        self._signs = random.integers(0, 2, length, dtype=np.int8) * 2 - 1

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Project each row, of shape `(k, length)`."""
        signed = tf.transpose(tf.constant(rows * self._signs.astype(rows.dtype)))
        sums = tf.math.unsorted_segment_sum(signed, self._places, self.size)
        return tf.transpose(sums).numpy()
