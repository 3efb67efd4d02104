"""`tf.math.reduce_euclidean_norm` with right derivatives of every order.

TensorFlow's gradient of it is `x / (norm / dy)`, with the upstream gradient, `dy`, in a
denominator. That is right to first order. To second order it is NaN wherever `dy` is zero, whatever
the norm: in every row of a matrix of norms that the loss does not use.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_original = tf.math.reduce_euclidean_norm


def reduce_euclidean_norm(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> tf.Tensor:
    """Root of the sum of squares, as `tf.math.reduce_euclidean_norm` gives it but for rounding.

    Parameters
    ----------
    input_tensor, axis, keepdims, name
        As there.

    Returns
    -------
    tf.Tensor
        In the dtype of `input_tensor`.
    """
    x = tf.convert_to_tensor(input_tensor)
    if not (x.dtype.is_floating or x.dtype.is_complex):
        return _original(x, axis, bool(keepdims), name)
    with tf.name_scope(name or "EuclideanNorm"):
        return tf.sqrt(tf.reduce_sum(x * tf.math.conj(x), axis, keepdims=bool(keepdims)))
