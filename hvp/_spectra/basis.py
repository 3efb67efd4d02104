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

    def coefficients(self, vectors: tf.Tensor) -> tf.Tensor:
        """Return the inner products with the basis, of shape `(spaces, vectors, basis)`."""
        products = [tf.matmul(vectors, chunk, transpose_b=True) for chunk in self._chunks]
        return tf.concat(products, axis=2)

    def orthogonalized(self, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Subtract the parts of vectors along the basis; return these parts' coefficients too.

        Rounding makes a second pass necessary.
        """
        total = None
        for _ in range(2):
            coefficients = self.coefficients(vectors)
            vectors = vectors - self.combine(coefficients)
            total = coefficients if total is None else total + coefficients
        return vectors, total

    def combine(self, coefficients: tf.Tensor) -> tf.Tensor:
        """Return linear combinations of the basis; the coefficients are rows."""
        sizes = [chunk.shape[1] for chunk in self._chunks]
        parts = tf.split(coefficients, sizes, axis=2)
        return tf.add_n([tf.matmul(part, chunk) for part, chunk in zip(parts, self._chunks)])
