"""Merging the operations of a graph that compute the same.

Derivatives of derivatives repeat much of what was there already: a third of all operations, most of
them constants and shapes. TensorFlow merges them too, but only when the function that they end up
in is first called. What is merged here need not be analysed, imported and optimized.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hvp._graphs.dataflow import is_stateful
from hvp._graphs.graph import Graph, in_topological_order, node_of, with_index
from hvp._graphs.private import SHAPES

# Operations that are not merged: places of inputs, and what only orders others.
_APART = frozenset(["NoOp", "Placeholder"])
# Constants of more bytes are not compared.
_LARGE = 2**16


def merge_equal_operations(graph_def: Any, kept: Collection[str]) -> None:
    """Merge operations of the same type, with the same attributes and inputs, in place.

    The graph has no calls, and its inputs may be missing in it. Operations named in `kept` remain.
    """
    graph = Graph(graph_def)
    nodes, functions = graph.nodes, graph.functions
    first: dict[Any, str] = {}
    merged: dict[str, str] = {}
    for node in in_topological_order(nodes):
        name = node.name
        if merged:
            _refer(node, merged)
        if node.op in _APART or node.ByteSize() > _LARGE or is_stateful(node, functions):
            continue
        key = _key(node)
        other = first.setdefault(key, name)
        if other == name:
            continue
        if name not in kept:
            merged[name] = other
        elif other not in kept:
            first[key] = name  # later ones are merged with the one that remains
    if merged:
        remaining = [node for node in graph_def.node if node.name not in merged]
        del graph_def.node[:]
        graph_def.node.extend(remaining)


def _key(node: Any) -> Any:
    """Return a key that is equal for operations that compute the same."""
    attributes = sorted(
        (name, value.SerializeToString(deterministic=True))
        for name, value in node.attr.items()
        if name != SHAPES
    )
    # A constant is the same whatever it waits for.
    inputs = [] if node.op == "Const" else map(with_index, node.input)
    return node.op, node.device, tuple(inputs), tuple(attributes)


def _refer(node: Any, merged: Mapping[str, str]) -> None:
    """Let a node take its inputs from the operations that remain."""
    for i, tensor in enumerate(node.input):
        name = node_of(tensor)
        if name in merged:
            wait = "^" if tensor.startswith("^") else ""
            node.input[i] = f"{wait}{merged[name]}{tensor.removeprefix(wait).removeprefix(name)}"
