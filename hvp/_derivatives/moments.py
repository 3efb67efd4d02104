"""`tf.nn.moments` with correct derivatives of every order.

TensorFlow computes a variance about `stop_gradient(mean)`. The first derivative is right, because
the derivative of `mean((x - m)**2)` by `m`, which is `-2 mean(x - m)`, is zero at the mean. The
derivative of this zero is not zero, and the *second* derivative lacks it. Layer and group
normalization use this function, and so does batch normalization in training mode: the Hessian of
any loss with one of them would be wrong without an error.

This function has the same values and first derivatives to the bit. If TensorFlow's own function
escapes the replacement (see the module `exact`), the module `suspects` detects it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def moments(
    x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance like `tf.nn.moments`, computed in float32 for float16."""
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
    """Return mean and variance like `tf.compat.v1.nn.moments`."""
    return moments(x, axes, shift, bool(keep_dims or keepdims), name)
