"""Gradients of complex reciprocals and roots, which XLA computes without the conjugates.

With XLA they are wrong on the CPU in TensorFlow 2.16 to 2.21, and so are those of `tf.math.angle`
and of quotients, which use them. With the result `y` and the upstream gradient `dy`, these formulas
are right with XLA too::

    y = 1 / x          -dy conj(y)**2
    y = sqrt(x)         dy / (2 conj(y))
    y = 1 / sqrt(x)    -dy conj(y)**3 / 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Functions of the result and of the upstream gradient.
_FORMULAS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "ReciprocalGrad": lambda y, dy: -dy * tf.math.conj(y) ** 2,
    "InvGrad": lambda y, dy: -dy * tf.math.conj(y) ** 2,
    "SqrtGrad": lambda y, dy: dy / (2 * tf.math.conj(y)),
    "RsqrtGrad": lambda y, dy: -dy * tf.math.conj(y) ** 3 / 2,
}
# The name of the operations' output argument.
OUTPUT = "z"


def is_replaced(node: Any) -> bool:
    """Whether XLA computes the operation incorrectly."""
    return node.op in _FORMULAS and tf.as_dtype(node.attr["T"].type).is_complex


def replacement(
    node: Any,
) -> tuple[Any, Callable[..., tf.Tensor], list[tf.TensorSpec]]:
    """Return a key, the function that replaces the operation, and its arguments' specs."""
    dtype = tf.as_dtype(node.attr["T"].type)
    spec = tf.TensorSpec(None, dtype)
    return (node.op, dtype), _FORMULAS[node.op], [spec, spec]
