"""Inner products, norms and residuals of rows."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvp._operators.matrix import Matrix


def dots(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the inner products of corresponding rows, of shape `(k,)`."""
    return tf.reduce_sum(one * other, axis=-1)


def scaled(factors: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Multiply each row by its own factor."""
    return factors[:, tf.newaxis] * rows


def norms(rows: tf.Tensor) -> np.ndarray:
    """Return the Euclidean norms of rows, in float64 to avoid overflow."""
    array = rows.numpy() if tf.is_tensor(rows) else rows
    return np.array([float(np.linalg.norm(row.astype(np.float64))) for row in array])


def system_residual(matrix: Matrix, b: np.ndarray, x: np.ndarray, damping: float) -> np.ndarray:
    """Return `b - (A + damping I) x` row by row, at the cost of one product for each row.

    The terms, which cancel, are added in float64.
    """
    product = matrix.multiply(tf.constant(x)).numpy().astype(np.float64)
    return (b - product - damping * x.astype(np.float64)).astype(x.dtype)
