"""Orthonormal bases of Krylov spaces, block by block."""

from __future__ import annotations

import tensorflow as tf


class Basis:
    """A growing set of orthonormal vectors, for each of several spaces at once.

    Parameters
    ----------
    first : tf.Tensor
        The first vectors, of shape `(spaces, vectors, n)`.
    """

    # Vectors of one tensor. More would be copied too often, fewer multiplied one by one.
    _CHUNK = 16

    def __init__(self, first: tf.Tensor) -> None:
        self._chunks = [first]

    def append(self, vectors: tf.Tensor) -> None:
        """Add vectors, of shape `(spaces, vectors, n)`."""
        last = self._chunks[-1]
        if last.shape[1] + vectors.shape[1] <= self._CHUNK:
            self._chunks[-1] = tf.concat([last, vectors], axis=1)
        else:
            self._chunks.append(vectors)

    def orthogonalized(self, vectors: tf.Tensor) -> tf.Tensor:
        """Subtract the parts of vectors along the basis.

        Rounding makes a second pass necessary.
        """
        for _ in range(2):
            vectors = vectors - tf.add_n([_projected(vectors, chunk) for chunk in self._chunks])
        return vectors


def _projected(vectors: tf.Tensor, chunk: tf.Tensor) -> tf.Tensor:
    return tf.matmul(tf.matmul(vectors, chunk, transpose_b=True), chunk)
