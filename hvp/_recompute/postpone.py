"""Postponing the use of some inputs of a graph until other tensors have been computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from hvp._graphs.graph import Graph, data_inputs, node_of
from hvp._graphs.sizes import note_shapes


def postpone(part: Graph, inputs: Mapping[str, tf.TensorSpec], first: Sequence[str]) -> Graph:
    """Return a graph in which operations that take any of `inputs` wait for the tensors `first`.

    It is `part` itself if one of `first` depends on one of `inputs`, because the wait would never
    end.
    """
    nodes = part.nodes
    awaited = [tensor for tensor in first if node_of(tensor) in nodes]
    before = part.ancestors(awaited, nodes.__contains__)
    if not awaited or any(t in inputs for name in before for t in data_inputs(nodes[name])):
        return part
    ordered = part.copy().graph_def
    late = {tensor: f"{node_of(tensor)}/late" for tensor in inputs}
    for node in ordered.node:
        for i, tensor in enumerate(node.input):
            if tensor in late:
                node.input[i] = f"{late[tensor]}:0"
    for tensor, spec in inputs.items():
        node = ordered.node.add(name=late[tensor], op="Identity")
        node.input.extend([tensor, *dict.fromkeys(f"^{node_of(t)}" for t in awaited)])
        node.attr["T"].type = spec.dtype.as_datatype_enum
        note_shapes(node, [spec.shape.as_proto()])
    return Graph(ordered)
