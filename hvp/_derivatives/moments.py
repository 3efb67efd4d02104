"""`tf.nn.moments` with right derivatives of every order.

TensorFlow computes a variance about `stop_gradient(mean)`. That leaves the first derivative as it
is, because the derivative by the mean is zero there; it leaves the *second* derivative wrong, by
the derivative of that zero. Layer and group normalization, and batch normalization in training
mode, go through it, so every Hessian of a loss with one of them would be wrong in silence.

The function here has the same values and first derivatives to the bit. TensorFlow's own, where it
escapes the replacement (see the module `exact`), is found by `second_derivatives` instead.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def moments(
    x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance, as `tf.nn.moments` gives them.

    Parameters
    ----------
    x, axes, shift, keepdims, name
        As in `tf.nn.moments`; `shift` is not used there either.

    Returns
    -------
    mean, variance : tf.Tensor
        In the dtype of `x`; computed in float32 for float16.
    """
    del shift
    with tf.name_scope(name or "moments"):
        x = tf.convert_to_tensor(x)
        wide = tf.cast(x, tf.float32) if x.dtype == tf.float16 else x
        mean = tf.reduce_mean(wide, axes, keepdims=True)
        variance = tf.reduce_mean(tf.math.squared_difference(wide, mean), axes, keepdims=True)
        if not keepdims:
            mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
        return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


def moments_of_version_1(
    x: Any,
    axes: Any,
    shift: Any = None,
    name: str | None = None,
    keep_dims: bool | None = None,
    keepdims: bool | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance, by the arguments of `tf.compat.v1.nn.moments`."""
    return moments(x, axes, shift, bool(keep_dims or keepdims), name)
