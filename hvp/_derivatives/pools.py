"""Max pooling whose second derivative TensorFlow computes wrong, put right.

In a graph the operation `MaxPoolGradGrad` writes its result over its input, if nothing else needs
that and the two are of one size, and clears it before it has read it all (TensorFlow 2.16 to 2.21,
on the CPU): the second derivative is wrong, or zero. They are of one size where windows move by one
and the padding is ``"SAME"``, where a window is one entry, and where an image is. Here the padding
is made explicit, so that they are of two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

_GRADIENTS = frozenset({"MaxPoolGrad", "MaxPool3DGrad"})
_SECOND = frozenset({"MaxPoolGradGrad", "MaxPool3DGradGrad"})
# What the operations call their result.
OUTPUT = "output"


def has_risky_pools(nodes: Iterable[Any]) -> bool:
    """Whether some of the nodes are gradients of pools that may be differentiated wrong."""
    return any(node.op in _GRADIENTS and is_wrong(node) for node in nodes)


def is_wrong(node: Any) -> bool:
    """Whether a node may be a pool's second derivative, or have one, that is wrong."""
    if node.op not in _GRADIENTS and node.op not in _SECOND:
        return False
    return node.attr["padding"].s == b"SAME" or max(node.attr["ksize"].list.i) == 1


def replacement(
    node: Any,
) -> tuple[Any, Callable[..., tf.Tensor], list[tf.TensorSpec]]:
    """Return a key, a function that computes what the node should, and its arguments."""
    kind, attributes = node.op, node.attr
    dtype = tf.as_dtype(attributes["T"].type)
    ksize, strides = (tuple(attributes[name].list.i) for name in ("ksize", "strides"))
    layout = attributes["data_format"].s.decode()
    key = (kind, dtype, ksize, strides, layout)
    axes = len(ksize)
    spec = tf.TensorSpec([None] * axes, dtype)
    still = max(strides) == 1  # then what is missing does not depend on the image

    def too_few(x: tf.Tensor) -> Any:
        """How many entries are missing, along each axis, for whole windows."""
        if still:
            return np.subtract(ksize, 1)
        shape = tf.shape(x)
        moves = -(-shape // strides)
        return tf.maximum((moves - 1) * strides + ksize - shape, 0)

    def widened(tensor: tf.Tensor, x: tf.Tensor, value: Any) -> tf.Tensor:
        missing = too_few(x)
        ends = [missing // 2, missing - missing // 2]
        paddings = np.stack(ends, axis=1) if still else tf.stack(ends, axis=1)
        return tf.ensure_shape(tf.pad(tensor, paddings, constant_values=value), spec.shape)

    def pool(which: str, x: tf.Tensor, y: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        options = {"orig_input": x, "orig_output": y, "grad": grad, "data_format": layout}
        return getattr(tf.raw_ops, which)(**options, ksize=ksize, strides=strides, padding="VALID")

    def gradient(x: tf.Tensor, y: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        if max(ksize) == 1:
            return grad if still else _spread(grad, tf.shape(x), strides)
        wide = pool(kind, widened(x, x, dtype.min), y, grad)
        missing = too_few(x)
        if still:
            ends = [slice(int(m // 2), int(m // 2 - m) or None) for m in missing]
            return wide[tuple(ends)]
        return tf.slice(wide, missing // 2, tf.shape(x))

    def second(x: tf.Tensor, y: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        if max(ksize) == 1:
            return grad[tuple(slice(None, None, stride) for stride in strides)]
        return pool(kind, widened(x, x, dtype.min), y, widened(grad, x, 0))

    function = gradient if kind in _GRADIENTS else second

    def ranked(*tensors: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.identity(function(*tensors)), spec.shape)

    return key, ranked, [spec, spec, spec]


def _spread(grad: tf.Tensor, shape: tf.Tensor, strides: tuple[int, ...]) -> tf.Tensor:
    """Put entries back where strides took them from, and zeros between."""
    zeros = np.zeros(len(strides), np.int32)
    return tf.raw_ops.StridedSliceGrad(
        shape=shape, begin=zeros, end=shape, strides=strides, dy=grad
    )
