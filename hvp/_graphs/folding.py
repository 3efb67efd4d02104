"""Shapes and permutations that are known before a graph runs, as constants.

TensorFlow computes them when it optimizes a function. Until then they are results of operations,
and a graph that is imported forgets the shapes of whatever depends on them. A derivative of such a
graph asks for these shapes when it runs, and thereby for values that it does not need otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._graphs.graph import Graph, data_inputs, in_topological_order, node_of
from hvp._graphs.sizes import note_shapes, shape_of, shapes_of


def fold_shapes(graph_def: Any) -> None:
    """Replace noted shapes, and what is computed from them and constants, in place.

    The graph has no calls, and notes the shapes of results.
    """
    nodes = Graph(graph_def).nodes
    for node in in_topological_order(nodes):
        value = None
        if node.op == "Shape":
            value = _shape_of(data_inputs(node)[0], nodes)
        elif node.op in _OF_CONSTANTS and node.attr[_OF_CONSTANTS[node.op][0]].type in _INTEGERS:
            sources: list[Any] = [nodes.get(node_of(tensor)) for tensor in data_inputs(node)]
            if all(source is not None and source.op == "Const" for source in sources):
                values = [tf.make_ndarray(source.attr["value"].tensor) for source in sources]
                value = _OF_CONSTANTS[node.op][1](node, *values)
        if value is not None:
            _make_constant(node, value)


_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _slice(node: Any, values: np.ndarray, *bounds: np.ndarray) -> np.ndarray | None:
    """Return a strided slice of a vector of sizes; None for other slices."""
    masks = {name: node.attr[name].i for name in _MASKS}
    if values.ndim != 1 or masks.pop("ellipsis_mask", 0) or masks.pop("new_axis_mask", 0):
        return None
    begin, end, step = (int(bound[0]) for bound in bounds)
    if masks.get("shrink_axis_mask"):
        return values[begin]
    start = None if masks.get("begin_mask") else begin
    return values[start : None if masks.get("end_mask") else end : step]


# What sizes are computed with: the attribute with their type, and the same in NumPy.
_OF_CONSTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ConcatV2": ("T", lambda node, *values: np.concatenate(values[:-1], int(values[-1]))),
    "Fill": ("T", lambda node, dims, value: np.full(dims, value)),
    "InvertPermutation": ("T", lambda node, values: np.argsort(values)),
    "Pack": ("T", lambda node, *values: np.stack(values, node.attr["axis"].i)),
    "StridedSlice": ("T", _slice),
}
_INTEGERS = frozenset({tf.int32.as_datatype_enum, tf.int64.as_datatype_enum})


def _shape_of(tensor: str, nodes: Mapping[str, Any]) -> np.ndarray | None:
    shape = shape_of(tensor, nodes)
    return np.array(shape.as_list()) if shape.is_fully_defined() else None


def _make_constant(node: Any, value: np.ndarray) -> None:
    """Turn a node into a constant of the type of its result."""
    name = "out_type" if node.op == "Shape" else "T"
    dtype = tf.as_dtype(node.attr[name].type or tf.int32.as_datatype_enum)
    tensor = tf.make_tensor_proto(value, dtype, np.shape(value))
    shapes, device, own_name = shapes_of(node), node.device, node.name
    node.Clear()
    node.name, node.op, node.device = own_name, "Const", device
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tensor)
    note_shapes(node, shapes)
