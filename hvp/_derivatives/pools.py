"""Correct second derivatives of max pooling.

In a graph, the operation `MaxPoolGradGrad` writes its result over its input if the two have the
same size and nothing else uses the input. It clears the memory before it has read all of the input,
so that the second derivative is wrong or zero (TensorFlow 2.16 to 2.21, on the CPU). The sizes are
equal if windows move by one and the padding is ``"SAME"``, or if a window or an image is one entry.
The replacement pads explicitly, which makes the sizes differ. Windows of one entry only pick
entries by strides, and need no pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

_GRADIENTS = frozenset({"MaxPoolGrad", "MaxPool3DGrad"})
_SECOND = frozenset({"MaxPoolGradGrad", "MaxPool3DGradGrad"})
# The name of the operations' output argument.
OUTPUT = "output"


def has_risky_pools(nodes: Iterable[Any]) -> bool:
    """Whether any node is the gradient of a pool that may be differentiated incorrectly."""
    return any(node.op in _GRADIENTS and is_replaced(node) for node in nodes)


def is_replaced(node: Any) -> bool:
    """Whether a node is a pool's gradient or second derivative that may be wrong."""
    if node.op not in _GRADIENTS and node.op not in _SECOND:
        return False
    return may_keep_the_size(node)


def may_keep_the_size(node: Any) -> bool:
    """Whether the result of a pool, or of its gradient, may be as large as the image."""
    return node.attr["padding"].s == b"SAME" or max(node.attr["ksize"].list.i, default=1) == 1


def replacement(
    node: Any,
) -> tuple[Any, Callable[..., tf.Tensor], list[tf.TensorSpec]]:
    """Return a key, the function that replaces the operation, and its arguments' specs."""
    kind, attributes = node.op, node.attr
    dtype = tf.as_dtype(attributes["T"].type)
    ksize, strides = (tuple(attributes[name].list.i) for name in ("ksize", "strides"))
    layout = attributes["data_format"].s.decode()
    key = (kind, dtype, ksize, strides, layout)
    axes = len(ksize)
    spec = tf.TensorSpec([None] * axes, dtype)
    # The padding does not depend on the size of the image if windows move by one.
    constant_padding = max(strides) == 1

    def padding(x: tf.Tensor) -> Any:
        """Return the number of entries to add along each axis for whole windows."""
        if constant_padding:
            return np.subtract(ksize, 1)
        shape = tf.shape(x)
        steps = -(-shape // strides)  # rounded up
        return tf.maximum((steps - 1) * strides + ksize - shape, 0)

    def padded(tensor: tf.Tensor, x: tf.Tensor, value: Any) -> tf.Tensor:
        added = padding(x)
        ends = [added // 2, added - added // 2]
        paddings = np.stack(ends, axis=1) if constant_padding else tf.stack(ends, axis=1)
        return tf.ensure_shape(tf.pad(tensor, paddings, constant_values=value), spec.shape)

    def pool(which: str, x: tf.Tensor, y: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        options = {"orig_input": x, "orig_output": y, "grad": grad, "data_format": layout}
        return getattr(tf.raw_ops, which)(**options, ksize=ksize, strides=strides, padding="VALID")

    def gradient(x: tf.Tensor, y: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        if max(ksize) == 1:
            return grad if constant_padding else _spread(grad, tf.shape(x), strides)
        wide = pool(kind, padded(x, x, dtype.min), y, grad)
        added = padding(x)
        if constant_padding:
            inner = [slice(int(m // 2), int(m // 2 - m) or None) for m in added]
            return wide[tuple(inner)]
        return tf.slice(wide, added // 2, tf.shape(x))

    def second(x: tf.Tensor, y: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        if max(ksize) == 1:
            return grad[tuple(slice(None, None, stride) for stride in strides)]
        return pool(kind, padded(x, x, dtype.min), y, padded(grad, x, 0))

    function = gradient if kind in _GRADIENTS else second

    def ranked(*tensors: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.identity(function(*tensors)), spec.shape)

    return key, ranked, [spec, spec, spec]


def _spread(grad: tf.Tensor, shape: tf.Tensor, strides: tuple[int, ...]) -> tf.Tensor:
    """Put entries back where strides picked them, with zeros in between."""
    zeros = np.zeros(len(strides), np.int32)
    return tf.raw_ops.StridedSliceGrad(
        shape=shape, begin=zeros, end=shape, strides=strides, dy=grad
    )
