"""Splitting a traced graph into the part that depends on a vector and the part that does not.

The part that does not depend on the vector runs once for each point. Its results that the other
part uses are the *residuals*. The part that depends on the vector runs for each product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvp._graphs.dataflow import is_stateful
from hvp._graphs.graph import Graph, data_inputs, node_of
from hvp._graphs.residuals import choose_residuals


class UnsplittableError(Exception):
    """The graph cannot be split; the message names the operation that prevents it."""


def split(
    graph: Graph, vectors: Sequence[str], results: Sequence[str], once_results: Sequence[str]
) -> tuple[Graph, Graph, list[str], set[str]]:
    """Split a graph without calls, with the sizes of all results.

    `vectors` are the placeholders for the parts of the vector, and `results` the tensors that make
    up the product. The first part returns `once_results` besides the residuals. A stateful
    operation that depends on the vector raises UnsplittableError.

    Return the part that runs once, the part that runs for each product, the residuals, which pass
    from the first to the second, and the names of the nodes that depend on the vector.
    """
    nodes, functions, vector_nodes = graph.nodes, graph.functions, {*map(node_of, vectors)}
    dependent = graph.descendants(vector_nodes)
    needed = graph.ancestors(results, dependent.__contains__)
    for name in needed:
        if is_stateful(nodes[name], functions):
            raise UnsplittableError(
                f"{nodes[name].op} at {name!r} has effects and depends on the vector"
            )
    wanted = [tensor for name in needed for tensor in data_inputs(nodes[name])]
    wanted = [tensor for tensor in [*wanted, *results] if node_of(tensor) not in needed]
    again, residuals = choose_residuals(nodes, wanted, graph.sizes)
    product = needed | again
    effects = [
        f"{name}:0"
        for name, node in nodes.items()
        if name not in dependent and has_effects(node, functions) and name not in product
    ]
    # Control edges from operations that depend on the vector only reflect the order of tracing, and
    # are dropped.
    targets = [*once_results, *residuals, *effects]
    once = graph.ancestors(targets, lambda name: name not in dependent, controls=True)
    parts = graph.part(once, keep_controls=True), graph.part(product - vector_nodes)
    return *parts, residuals, dependent


def has_effects(node: Any, functions: Mapping[str, Any]) -> bool:
    """Return whether a node is stateful, and does not merely read a variable."""
    return is_stateful(node, functions) and not node.op.startswith(
        ("ReadVariable", "ResourceGather")
    )
