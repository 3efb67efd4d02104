"""Functions with correct derivatives at zero, where TensorFlow's are wrong.

TensorFlow's gradients of `xlogy`, `xlog1py` and `xdivy` by `x` are zero where `x` is zero, for any
`y`. Its weighted cross entropy is composed of `abs` and `relu`, whose kinks are where logits are
zero, although the loss has none. Zeros are common as starting values, padding and masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def xlogy(x: Any, y: Any, name: str | None = None) -> tf.Tensor:
    """Return `x * log(y)`, and zero where `x` is zero and the logarithm is not finite."""
    return _function_or_zero(lambda x, y: x * tf.math.log(y), x, y, name or "xlogy")


def xlog1py(x: Any, y: Any, name: str | None = None) -> tf.Tensor:
    """Return `x * log1p(y)`, and zero where `x` is zero and the logarithm is not finite."""
    return _function_or_zero(lambda x, y: x * tf.math.log1p(y), x, y, name or "xlog1py")


def xdivy(x: Any, y: Any, name: str | None = None) -> tf.Tensor:
    """Return `x / y`, and zero where both are zero."""
    return _function_or_zero(lambda x, y: x / y, x, y, name or "xdivy")


def weighted_cross_entropy_with_logits(
    labels: Any = None,
    logits: Any = None,
    pos_weight: Any = None,
    name: str | None = None,
    targets: Any = None,
) -> tf.Tensor:
    """Return the weighted cross entropy, for the arguments of both versions of TensorFlow.

    With labels z, logits x and the weight q of positive labels, it is
    ``(1 - z) x + (1 + (q - 1) z) log(1 + exp(-x))``.
    """
    with tf.name_scope(name or "weighted_cross_entropy_with_logits"):
        logits = tf.convert_to_tensor(logits)
        labels = tf.convert_to_tensor(targets if labels is None else labels, logits.dtype)
        labels.shape.assert_is_compatible_with(logits.shape)
        weight = 1 + (pos_weight - 1) * labels
        return (1 - labels) * logits + weight * tf.nn.softplus(-logits)


def _function_or_zero(
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], x: Any, y: Any, name: str
) -> tf.Tensor:
    """Apply a function proportional to `x`; zero where `x` is zero and its factor not finite."""
    with tf.name_scope(name):
        dtype = next((a.dtype for a in (x, y) if isinstance(a, (tf.Tensor, tf.Variable))), None)
        x = tf.convert_to_tensor(x, dtype)
        y = tf.convert_to_tensor(y, x.dtype)
        one, zero = tf.ones([], x.dtype), tf.zeros([], x.dtype)
        constant = (x == 0) & ~tf.math.is_finite(tf.abs(function(one, y)))
        return function(tf.where(constant, zero, x), tf.where(constant, one, y))
