"""The gradient of convolutions with explicit padding, for which TensorFlow has a slow kernel only.

On the CPU, ``Conv2DBackpropInput`` reaches oneDNN with the paddings ``"SAME"`` and ``"VALID"``.
With ``"EXPLICIT"`` it falls to a kernel that takes up to twenty times as long (TensorFlow 2.16 to
2.21). The gradient by the image is the one by the padded image, without the border::

    conv(x, w, padding)   =  conv(pad(x), w, "VALID")
    gradient by x         =  unpad(gradient by pad(x))

The convolution itself and the gradient by the kernel reach oneDNN as they are, and depthwise
convolutions would gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# The name of the operation's output argument.
OUTPUT = "output"


def is_replaced(node: Any) -> bool:
    """Whether a node is the gradient, by the image, of a convolution with explicit padding."""
    return node.op == "Conv2DBackpropInput" and node.attr["padding"].s == b"EXPLICIT"


def replacement(
    node: Any,
) -> tuple[Any, Callable[..., tf.Tensor], list[tf.TensorSpec]]:
    """Return a key, the function that replaces the operation, and its arguments' types."""
    attributes = node.attr
    dtype = tf.as_dtype(attributes["T"].type)
    strides, dilations, paddings = (
        tuple(attributes[name].list.i) for name in ("strides", "dilations", "explicit_paddings")
    )
    layout = attributes["data_format"].s.decode()
    before, after = paddings[::2], paddings[1::2]

    def gradient(shape: tf.Tensor, kernel: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        padded = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=shape + tf.add(before, after),
            filter=kernel,
            out_backprop=upstream,
            strides=strides,
            padding="VALID",
            data_format=layout,
            dilations=dilations,
        )
        return tf.slice(padded, before, shape)

    tensor, shape = tf.TensorSpec([None] * 4, dtype), tf.TensorSpec([4], tf.int32)
    key = (node.op, dtype, strides, dilations, paddings, layout)
    return key, gradient, [shape, tensor, tensor]
