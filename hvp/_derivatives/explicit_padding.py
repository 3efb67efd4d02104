"""Gradients of convolutions with explicit padding, for which TensorFlow has slow kernels only.

On the CPU, these gradients reach oneDNN with the paddings ``"SAME"`` and ``"VALID"``. With
``"EXPLICIT"`` they use kernels that take up to twenty times as long (TensorFlow 2.16 to 2.21). They
are replaced by those of a convolution of the padded image::

    conv(x, w, padding)   =  conv(pad(x), w, "VALID")
    gradient by x         =  unpad(gradient by pad(x))
    gradient by w         =  gradient by w, of the image pad(x)

The gradient by the kernel needs no padding where the explicit padding equals ``"SAME"``. The
convolution itself reaches oneDNN as it is, and depthwise convolutions would gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.sizes import shapes_of

# The name of the operations' output argument.
OUTPUT = "output"


def is_replaced(node: Any) -> bool:
    """Whether a node is a gradient of a convolution with explicit padding."""
    gradients = ("Conv2DBackpropInput", "Conv2DBackpropFilter")
    return node.op in gradients and node.attr["padding"].s == b"EXPLICIT"


def replacement(
    node: Any,
) -> tuple[Any, Callable[..., tf.Tensor], list[tf.TensorSpec]]:
    """Return a key, the function that replaces the operation, and its arguments' specs."""
    attributes = node.attr
    dtype = tf.as_dtype(attributes["T"].type)
    strides, dilations, paddings = (
        tuple(attributes[name].list.i) for name in ("strides", "dilations", "explicit_paddings")
    )
    layout = attributes["data_format"].s.decode()
    before, after = paddings[::2], paddings[1::2]
    same = _is_same(node, strides, dilations, before, after)
    options = {"strides": strides, "data_format": layout, "dilations": dilations}

    def gradient_by_image(shape: tf.Tensor, kernel: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        padded = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=shape + tf.add(before, after),
            filter=kernel,
            out_backprop=upstream,
            padding="VALID",
            **options,
        )
        return tf.slice(padded, before, shape)

    def gradient_by_kernel(image: tf.Tensor, shape: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Conv2DBackpropFilter(
            input=image if same else tf.pad(image, list(zip(before, after))),
            filter_sizes=shape,
            out_backprop=upstream,
            padding="SAME" if same else "VALID",
            **options,
        )

    tensor, shape = tf.TensorSpec([None] * 4, dtype), tf.TensorSpec([4], tf.int32)
    key = (node.op, dtype, strides, dilations, paddings, layout, same)
    if node.op == "Conv2DBackpropInput":
        return key, gradient_by_image, [shape, tensor, tensor]
    return key, gradient_by_kernel, [tensor, shape, tensor]


def _is_same(
    node: Any,
    strides: Sequence[int],
    dilations: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
) -> bool:
    """Whether the padding equals ``"SAME"``, whatever the size of the image.

    Without strides, it does if the result has the size of the image, and an odd rest comes after.
    """
    shapes = shapes_of(node)
    if node.op != "Conv2DBackpropFilter" or not shapes or len(shapes[0].dim) != 4:
        return False
    height, width = (shapes[0].dim[i].size for i in (0, 1))
    layout = node.attr["data_format"].s
    expected = {b"NHWC": (0, height - 1, width - 1, 0), b"NCHW": (0, 0, height - 1, width - 1)}
    total = expected.get(layout, ())
    plain = {*strides, *dilations} == {1} and min(height, width) > 0
    return (
        plain
        and tuple(before) == tuple(t // 2 for t in total)
        and tuple(after) == tuple(t - t // 2 for t in total)
    )
