"""Max pooling whose second derivative TensorFlow computes wrong, put right.

In a graph the operation `MaxPoolGradGrad` writes its result over its input, if nothing else needs
that and the two are of one size, and clears it before it has read it all (TensorFlow 2.16 to 2.21,
on the CPU): the second derivative is wrong, or zero. They are of one size where windows move by one
and the padding is ``"SAME"``, where a window is one entry, and where an image is. Here the padding
is made explicit, so that they are of two sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_GRADIENTS = frozenset({"MaxPoolGrad", "MaxPool3DGrad"})
_SECOND = frozenset({"MaxPoolGradGrad", "MaxPool3DGradGrad"})


def has_risky_pools(nodes: Iterable[Any]) -> bool:
    """Whether some of the nodes are gradients of pools that may be differentiated wrong."""
    return any(node.op in _GRADIENTS and _is_risky(node) for node in nodes)


def separate_pools(graph_def: Any) -> Any:
    """Return a graph in which no second derivative of a pool can be written over its input.

    Parameters
    ----------
    graph_def : GraphDef
        Of a traced function.

    Returns
    -------
    GraphDef
        With calls of functions in place of such operations; the same one if there are none.
    """
    if not any(_is_risky(node) for node in _all_nodes(graph_def)):
        return graph_def
    made = tf.compat.v1.GraphDef()
    made.CopyFrom(graph_def)
    known = {function.signature.name for function in made.library.function}
    for node in list(_all_nodes(made)):
        if not _is_risky(node):
            continue
        function, dtype = _safe(node), node.attr["T"].type
        if function.signature.name not in known:
            made.library.function.add().CopyFrom(function)
            known.add(function.signature.name)
        name, inputs = node.name, list(node.input)
        node.Clear()
        node.name, node.op = name, "PartitionedCall"
        node.input.extend(inputs)
        node.attr["Tin"].list.type.extend([dtype] * 3)
        node.attr["Tout"].list.type.append(dtype)
        node.attr["f"].func.name = function.signature.name
    return made


def _all_nodes(graph_def: Any) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _is_risky(node: Any) -> bool:
    if node.op not in _GRADIENTS and node.op not in _SECOND:
        return False
    return node.attr["padding"].s == b"SAME" or max(node.attr["ksize"].list.i) == 1


def _safe(node: Any) -> Any:
    attributes = node.attr
    return _function(
        node.op,
        tf.as_dtype(attributes["T"].type),
        tuple(attributes["ksize"].list.i),
        tuple(attributes["strides"].list.i),
        attributes["data_format"].s.decode(),
    )


@functools.cache
def _function(
    kind: str, dtype: tf.DType, ksize: tuple[int, ...], strides: tuple[int, ...], layout: str
) -> Any:
    """Make the definition of a function of the same inputs and result."""
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

    def ranked(function: Any) -> Any:
        return lambda *tensors: tf.ensure_shape(tf.identity(function(*tensors)), spec.shape)

    safe = tf.function(ranked(gradient if kind in _GRADIENTS else second), autograph=False)

    @tf.function(autograph=False)
    def caller(x: tf.Tensor, y: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        return safe(x, y, grad)

    library = caller.get_concrete_function(spec, spec, spec).graph.as_graph_def().library
    (definition,) = library.function
    (made,) = definition.signature.output_arg
    return _renamed(definition, made.name)


def _spread(grad: tf.Tensor, shape: tf.Tensor, strides: tuple[int, ...]) -> tf.Tensor:
    """Put entries back where strides took them from, and zeros between."""
    zeros = np.zeros(len(strides), np.int32)
    return tf.raw_ops.StridedSliceGrad(
        shape=shape, begin=zeros, end=shape, strides=strides, dy=grad
    )


def _renamed(definition: Any, output: str) -> Any:
    """Call the result of a function as that of the operation is called."""
    function = type(definition)()
    function.CopyFrom(definition)
    function.signature.output_arg[0].name = "output"
    function.ret.clear()
    function.ret["output"] = definition.ret[output]
    return function
