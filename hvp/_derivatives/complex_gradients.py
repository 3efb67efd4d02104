"""Gradients of complex numbers that XLA computes wrong: without the conjugates.

Of reciprocals and roots (TensorFlow 2.16 to 2.21, on the CPU): those of `tf.math.angle` and of
quotients among them. TensorFlow alone has them right; written with the conjugates both do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Of the upstream gradient, and of the result.
_FORMULAS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "ReciprocalGrad": lambda y, dy: -dy * tf.math.conj(y) ** 2,
    "InvGrad": lambda y, dy: -dy * tf.math.conj(y) ** 2,
    "SqrtGrad": lambda y, dy: dy / (2 * tf.math.conj(y)),
    "RsqrtGrad": lambda y, dy: -dy * tf.math.conj(y) ** 3 / 2,
}
# What the operations call their result.
OUTPUT = "z"


def is_wrong(node: Any) -> bool:
    """Whether XLA would compute a node wrong."""
    return node.op in _FORMULAS and tf.as_dtype(node.attr["T"].type).is_complex


def replacement(
    node: Any,
) -> tuple[Any, Callable[..., tf.Tensor], list[tf.TensorSpec]]:
    """Return a key, a function that computes what the node should, and its arguments."""
    dtype = tf.as_dtype(node.attr["T"].type)
    spec = tf.TensorSpec(None, dtype)
    return (node.op, dtype), _FORMULAS[node.op], [spec, spec]
