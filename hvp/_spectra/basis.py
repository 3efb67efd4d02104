"""Orthonormal bases of Krylov spaces, block by block."""

from __future__ import annotations

import numpy as np
import scipy.linalg
import tensorflow as tf


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
