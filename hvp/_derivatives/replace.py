"""Operations that TensorFlow or XLA computes wrong, replaced in traced graphs by others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives import complex_gradients, pools

# Each tells whether it is about a node, and gives a function of the same inputs and result.
_KINDS = (pools, complex_gradients)


def replace_operations(graph_def: Any) -> Any:
    """Return a graph in which no operation is one that is computed wrong.

    Parameters
    ----------
    graph_def : GraphDef
        Of a traced function.

    Returns
    -------
    GraphDef
        With calls of functions in place of such operations; the same one if there are none.
    """
    if not any(_kind_of(node) for node in _all_nodes(graph_def)):
        return graph_def
    made = tf.compat.v1.GraphDef()
    made.CopyFrom(graph_def)
    known = {function.signature.name for function in made.library.function}
    _replace(made.node, made, known)
    for function in list(made.library.function):
        renamed = _replace(function.node_def, made, known)
        for node in function.node_def:
            for index, name in enumerate(node.input):
                node.input[index] = renamed.get(name, name)
        for output, name in function.ret.items():
            function.ret[output] = renamed.get(name, name)
    return made


def _replace(nodes: Sequence[Any], graph_def: Any, known: set[str]) -> dict[str, str]:
    """Replace nodes by calls; return how results are called in a function, and were."""
    renamed = {}
    for node in nodes:
        kind = _kind_of(node)
        if kind is None:
            continue
        definition, dtype = _definition(*kind.replacement(node)), node.attr["T"].type
        if definition.signature.name not in known:
            graph_def.library.function.add().CopyFrom(definition)
            known.add(definition.signature.name)
        name, inputs = node.name, list(node.input)
        renamed[f"{name}:{kind.OUTPUT}:0"] = f"{name}:output:0"
        node.Clear()
        node.name, node.op = name, "PartitionedCall"
        node.input.extend(inputs)
        node.attr["Tin"].list.type.extend([dtype] * len(definition.signature.input_arg))
        node.attr["Tout"].list.type.append(dtype)
        node.attr["f"].func.name = definition.signature.name
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


def _kind_of(node: Any) -> Any:
    return next((kind for kind in _KINDS if kind.is_wrong(node)), None)


def _all_nodes(graph_def: Any) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
