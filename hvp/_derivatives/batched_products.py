"""The gradient of a batch of matrices times one matrix, with respect to the one matrix.

For `y[i] = x[i] @ w`, TensorFlow computes the gradient with respect to `w` as a batch of gradients,
which it writes to memory and sums. One product of larger matrices does the same::

    sum_i x[i]^T g[i]  =  reshape(x)^T @ reshape(g)

Derivatives of the sum would repeat a matrix for each `i`; those of the product do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.registry import TENSORFLOWS, gradient_of


@gradient_of("BatchMatMulV2")
def _batch_matmul(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    batch, matrix = operation.inputs
    rank = batch.shape.rank
    if operation.get_attr("adj_x") or matrix.shape.rank != 2 or rank is None or rank < 3:
        return TENSORFLOWS["BatchMatMulV2"](operation, upstream)
    transposed = operation.get_attr("adj_y")
    by_batch = tf.matmul(upstream, matrix, adjoint_b=not transposed)
    factors = [_as_matrix(batch), _as_matrix(upstream)]
    by_matrix = tf.matmul(*(reversed(factors) if transposed else factors), adjoint_a=True)
    return by_batch, by_matrix


def _as_matrix(batch: tf.Tensor) -> tf.Tensor:
    width = batch.shape[-1]
    return tf.reshape(batch, [-1, tf.shape(batch)[-1] if width is None else width])
