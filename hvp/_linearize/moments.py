"""`tf.nn.moments` with right derivatives of every order.

TensorFlow computes a variance about `stop_gradient(mean)`. That leaves the first derivative as it
is, because the derivative by the mean is zero there; it leaves the *second* derivative wrong, by
the derivative of that zero. Layer and group normalization, and batch normalization in training
mode, go through it, so every Hessian of a loss with one of them would be wrong in silence.

The name is replaced where Keras and users look it up, only while a function is traced or run to be
linearized. Values and first derivatives are the same to the bit, so a thread that meets the
replacement meanwhile notices nothing. A copy bound earlier (`from tensorflow.nn import moments`, or
an older trace of a `tf.function`) escapes, and is found by `second_derivatives` instead.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
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


def _moments_of_version_1(
    x: Any,
    axes: Any,
    shift: Any = None,
    name: str | None = None,
    keep_dims: bool | None = None,
    keepdims: bool | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    return moments(x, axes, shift, bool(keep_dims or keepdims), name)


_lock = threading.Lock()
_users = 0
_replaced: list[tuple[Any, Any]] = []


@contextlib.contextmanager
def exact_moments() -> Iterator[None]:
    """Replace TensorFlow's `moments` in its public namespaces, in this context."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _replaced[:] = [(namespace, namespace.moments) for namespace in _namespaces()]
            for namespace, _ in _replaced:
                version_1 = namespace is tf.compat.v1.nn
                namespace.moments = _moments_of_version_1 if version_1 else moments
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for namespace, original in _replaced:
                    namespace.moments = original


def _namespaces() -> list[Any]:
    """Return the modules that have the name; an `import tensorflow.nn` makes a further one."""
    modules = [tf.nn, sys.modules.get("tensorflow.nn", tf.nn), tf.compat.v2.nn, tf.compat.v1.nn]
    return list({id(module): module for module in modules}.values())
