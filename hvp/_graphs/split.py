"""Splitting a traced graph into the part that depends on a vector and the part that does not.

The part that does not depend on the vector runs once for each point. Its results that the other
part uses are the *residuals*. The part that depends on the vector runs for each product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvp._graphs.dataflow import is_stateful
from hvp._graphs.parts import ancestors, cut_out, data_inputs, node_of
from hvp._graphs.residuals import choose_residuals
from hvp._graphs.sizes import Sizes


@dataclass(frozen=True)
class Split:
    """The two parts of a graph, and the tensors that pass between them.

    Attributes
    ----------
    once, product : GraphDef
        The part that runs once, and the part that runs for each product.
    residuals : list of str
        Names of the tensors that pass from the first to the second.
    dependent : set of str
        Names of the nodes that depend on the vector.
    """

    once: Any
    product: Any
    residuals: list[str]
    dependent: set[str]


class UnsplittableError(Exception):
    """The graph cannot be split; the message names the operation that prevents it."""


def split(
    flat: Any,
    vectors: Sequence[str],
    results: Sequence[str],
    once_results: Sequence[str],
    sizes: Sizes,
) -> Split:
    """Split a graph without calls.

    Parameters
    ----------
    flat : GraphDef
        A graph that `inline_calls` returned.
    vectors : sequence of str
        Names of the placeholders for the parts of the vector.
    results : sequence of str
        Names of the tensors that make up the product.
    once_results : sequence of str
        Names of the tensors that the first part returns besides residuals.
    sizes : Sizes
        The sizes of the results of all operations.

    Returns
    -------
    Split

    Raises
    ------
    UnsplittableError
        If a stateful operation depends on the vector.
    """
    nodes = {node.name: node for node in flat.node}
    dependent = dependent_on(nodes, {node_of(name) for name in vectors})
    needed = ancestors(nodes, results, lambda name: name in dependent)
    functions = {f.signature.name: f for f in flat.library.function}
    for name in needed:
        if is_stateful(nodes[name], functions):
            raise UnsplittableError(
                f"{nodes[name].op} at {name!r} has effects and depends on the vector"
            )
    wanted = [tensor for name in needed for tensor in data_inputs(nodes[name])]
    wanted = [tensor for tensor in [*wanted, *results] if node_of(tensor) not in needed]
    again, residuals = choose_residuals(nodes, wanted, sizes)
    product = needed | again
    effects = [
        f"{name}:0"
        for name, node in nodes.items()
        if name not in dependent and has_effects(node, functions) and name not in product
    ]
    # Control edges from operations that depend on the vector only reflect the order of tracing, and
    # are dropped.
    targets = [*once_results, *residuals, *effects]
    once = ancestors(nodes, targets, lambda name: name not in dependent, controls=True)
    vector_nodes = {node_of(name) for name in vectors}
    return Split(
        once=cut_out(flat, once, keep_controls=True),
        product=cut_out(flat, product - vector_nodes, keep_controls=False),
        residuals=residuals,
        dependent=dependent,
    )


def dependent_on(nodes: dict[str, Any], starts: set[str]) -> set[str]:
    """Return the nodes that depend on some nodes, including these."""
    consumers: dict[str, list[str]] = {name: [] for name in nodes}
    for name, node in nodes.items():
        for tensor in data_inputs(node):
            consumers[node_of(tensor)].append(name)
    seen, queue = set(starts), deque(starts)
    while queue:
        for consumer in consumers[queue.popleft()]:
            if consumer not in seen:
                seen.add(consumer)
                queue.append(consumer)
    return seen


def has_effects(node: Any, functions: Mapping[str, Any]) -> bool:
    """Whether a node is stateful, and not merely a read of a variable."""
    return is_stateful(node, functions) and not node.op.startswith(
        ("ReadVariable", "ResourceGather")
    )
