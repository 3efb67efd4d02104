"""Shapes and permutations that are known before a graph runs, as constants.

TensorFlow computes them when it optimizes a function. Until then they are results of operations,
and a graph that is imported forgets the shapes of whatever depends on them. A derivative of such a
graph asks for these shapes when it runs, and thereby for values that it does not need otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._graphs.parts import data_inputs, node_of
from hvp._graphs.sizes import note_shapes, shapes_of


def fold_shapes(graph_def: Any) -> None:
    """Replace, in place, shapes that are noted and inverses of constant permutations.

    Parameters
    ----------
    graph_def : GraphDef
        A graph without calls, in which the shapes of results are noted.
    """
    nodes = {node.name: node for node in graph_def.node}
    for node in graph_def.node:
        value = None
        if node.op == "Shape":
            value = _shape_of(data_inputs(node)[0], nodes)
        elif node.op == "InvertPermutation":
            source = nodes.get(node_of(data_inputs(node)[0]))
            if source is not None and source.op == "Const":
                value = np.argsort(tf.make_ndarray(source.attr["value"].tensor))
        if value is not None:
            _make_constant(node, value)


def _shape_of(tensor: str, nodes: Mapping[str, Any]) -> np.ndarray | None:
    node, index = nodes.get(node_of(tensor)), int(tensor.partition(":")[2] or 0)
    shapes = [] if node is None else shapes_of(node)
    if index >= len(shapes):
        return None
    shape = tf.TensorShape(shapes[index])
    return np.array(shape.as_list()) if shape.is_fully_defined() else None


def _make_constant(node: Any, value: np.ndarray) -> None:
    """Turn a node into a constant of the type of its result."""
    name = "out_type" if node.op == "Shape" else "T"
    dtype = tf.as_dtype(node.attr[name].type or tf.int32.as_datatype_enum)
    tensor = tf.make_tensor_proto(value, dtype, value.shape)
    shapes, device, own_name = shapes_of(node), node.device, node.name
    node.Clear()
    node.name, node.op, node.device = own_name, "Const", device
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tensor)
    note_shapes(node, shapes)
