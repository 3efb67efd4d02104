"""Random draws as functions of a seed, so that a later run draws the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.sizes import note_shapes, shapes_of

# Draws whose state is hidden in the operation, and the operations that draw from a given seed.
_STATELESS = {
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomUniformInt": "StatelessRandomUniformIntV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
}
_PHILOX = 1


def draw_from_seeds(flat: Any) -> None:
    """Replace each stateful draw by a draw of a seed and a stateless draw from it, in place.

    The seed is the only result of a stateful operation that remains. It is three integers, whereas
    the random numbers may be many: a later run gets the seed and draws the same numbers.
    """
    for node in list(flat.node):
        if node.op in _STATELESS:
            _draw_from_seed(flat, node)


def _draw_from_seed(flat: Any, node: Any) -> None:
    # TensorFlow builds the new operations in a graph of their own, which are then copied.
    parameters = {"shape": tf.as_dtype(node.attr["T"].type)}
    if node.op == "RandomUniformInt":
        parameters.update(dict.fromkeys(["minval", "maxval"], tf.as_dtype(node.attr["Tout"].type)))
    with tf.Graph().as_default() as graph:
        arguments = {n: tf.compat.v1.placeholder(dtype, name=n) for n, dtype in parameters.items()}
        seed = tf.raw_ops.RandomUniformInt(
            shape=[3],
            minval=tf.int64.min,
            maxval=tf.int64.max,
            seed=node.attr["seed"].i,
            seed2=node.attr["seed2"].i,
        )
        bits = tf.bitcast(tf.identity(seed, "seed"), tf.uint64)
        if "dtype" in node.attr:
            arguments["dtype"] = tf.as_dtype(node.attr["dtype"].type)
        draw = getattr(tf.raw_ops, _STATELESS[node.op])
        # Philox takes one integer as the key and two as the counter.
        draw(key=bits[:1], counter=bits[1:], alg=_PHILOX, name="draw", **arguments)
    outside = dict(zip(parameters, node.input))
    waits = [name for name in node.input if name.startswith("^")]

    def renamed(tensor: str) -> str:
        name, _, index = tensor.lstrip("^").partition(":")
        return outside.get(name) or f"{node.name}/{name}:{index or 0}"

    for inner in graph.as_graph_def().node:
        if inner.name in parameters:
            continue
        inputs = [renamed(tensor) for tensor in inner.input]
        if inner.name == "draw":  # takes the place of the stateful draw
            shapes = shapes_of(node)
            node.CopyFrom(_copy_of(inner, node.name, [*inputs, *waits]))
            note_shapes(node, shapes)
        else:
            flat.node.add().CopyFrom(_copy_of(inner, f"{node.name}/{inner.name}", inputs))


def _copy_of(node: Any, name: str, inputs: Sequence[str]) -> Any:
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    copy.name = name
    del copy.input[:]
    copy.input.extend(inputs)
    return copy
