"""Replaces operations of traced graphs that TensorFlow computes incorrectly or far too slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives import complex_gradients, explicit_padding, pools
from hvp._graphs.sizes import note_shapes, shapes_of

# Modules with a predicate `is_replaced` of a node, and a `replacement`: a function of the same
# inputs.
_CORRECTIONS = (pools, complex_gradients, explicit_padding)


def replace_operations(graph_def: Any) -> Any:
    """Return a copy with calls in place of such operations, or the graph itself if it has none."""
    if not any(_correction_of(node) for node in _all_nodes(graph_def)):
        return graph_def
    corrected = tf.compat.v1.GraphDef()
    corrected.CopyFrom(graph_def)
    known = {function.signature.name for function in corrected.library.function}
    _replace(corrected.node, corrected, known)
    for function in list(corrected.library.function):
        renamed = _replace(function.node_def, corrected, known)
        for node in function.node_def:
            for index, name in enumerate(node.input):
                node.input[index] = renamed.get(name, name)
        for output, name in function.ret.items():
            function.ret[output] = renamed.get(name, name)
    return corrected


def _replace(nodes: Sequence[Any], graph_def: Any, known: set[str]) -> dict[str, str]:
    """Replace nodes by calls, and return a map from the old names of results to the new ones."""
    renamed = {}
    for node in nodes:
        correction = _correction_of(node)
        if correction is None:
            continue
        definition, dtype = _definition(*correction.replacement(node)), node.attr["T"].type
        if definition.signature.name not in known:
            graph_def.library.function.add().CopyFrom(definition)
            known.add(definition.signature.name)
        name, inputs, shapes = node.name, list(node.input), shapes_of(node)
        renamed[f"{name}:{correction.OUTPUT}:0"] = f"{name}:output:0"
        node.Clear()
        node.name, node.op = name, "PartitionedCall"
        node.input.extend(inputs)
        node.attr["Tin"].list.type.extend(x.type for x in definition.signature.input_arg)
        node.attr["Tout"].list.type.append(dtype)
        node.attr["f"].func.name = definition.signature.name
        note_shapes(node, shapes)
    return renamed


_definitions: dict[Any, Any] = {}


def _definition(
    key: Any, function: Callable[..., tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> Any:
    """Return the definition of a function, traced once for each key."""
    if key not in _definitions:
        traced = tf.function(function, autograph=False)
        caller = tf.function(lambda *tensors: traced(*tensors), autograph=False)
        graph_def = caller.get_concrete_function(*specs).graph.as_graph_def()
        (_definitions[key],) = graph_def.library.function
    return _definitions[key]


def _correction_of(node: Any) -> Any:
    return next((module for module in _CORRECTIONS if module.is_replaced(node)), None)


def _all_nodes(graph_def: Any) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
