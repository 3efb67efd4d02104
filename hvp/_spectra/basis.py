"""Orthonormal bases of Krylov spaces, block by block."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import tensorflow as tf


class Basis:
    """A growing set of orthonormal vectors, for each of several spaces at once.

    Vectors have the shape `(spaces, vectors, n)`.
    """

    # Vectors of one tensor. More would be copied too often, fewer multiplied one by one.
    _CHUNK = 16

    def __init__(self, first: tf.Tensor) -> None:
        self._chunks = [first]

    def append(self, vectors: tf.Tensor) -> None:
        """Add vectors."""
        last = self._chunks[-1]
        if last.shape[1] + vectors.shape[1] <= self._CHUNK:
            self._chunks[-1] = tf.concat([last, vectors], axis=1)
        else:
            self._chunks.append(vectors)

    def orthogonalized(self, vectors: tf.Tensor) -> tf.Tensor:
        """Subtract the components along the basis, in two passes because of rounding."""
        for _ in range(2):
            vectors = vectors - tf.add_n([_projected(vectors, chunk) for chunk in self._chunks])
        return vectors


def _projected(vectors: tf.Tensor, chunk: tf.Tensor) -> tf.Tensor:
    return tf.matmul(tf.matmul(vectors, chunk, transpose_b=True), chunk)


def orthogonalized(vectors: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Subtract the components of rows along an orthonormal basis.

    Returns the remainders, of shape `(k, n)`, and the coefficients, of shape `(k, m)`, in float64.
    """
    total = np.zeros((len(vectors), len(basis)))
    directions, rest = tf.constant(basis), tf.constant(vectors)
    for _ in range(2):  # rounding makes a second pass necessary
        coefficients = tf.matmul(rest, directions, transpose_b=True)
        rest = rest - tf.matmul(coefficients, directions)
        total += coefficients.numpy()
    return rest.numpy(), total


def orthonormal(vectors: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Orthonormalize rows against a basis and against each other."""
    for _ in range(2):
        if len(basis):
            vectors = orthogonalized(vectors, basis)[0]
        Q = scipy.linalg.qr(vectors.T.astype(np.float64), mode="economic")[0]
        vectors = np.ascontiguousarray(Q.T).astype(basis.dtype)
    return vectors


def combined(coefficients: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Return linear combinations of the rows of a basis, one for each row of coefficients."""
    return tf.matmul(tf.constant(coefficients.astype(basis.dtype)), tf.constant(basis)).numpy()
