"""Splitting a traced graph into what depends on a vector and what does not.

The part that does not runs once for each point; what it hands over are the *residuals*. The part
that does runs for each product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvp._graphs.dataflow import is_stateful
from hvp._graphs.parts import ancestors, cut_out, data_inputs, node_of

# Not kept but made again for each product, from inputs that are smaller than the result or share
# its buffer: constants of a product's graph, or views and repetitions of what is kept anyway.
_REMADE = frozenset(
    """
    BroadcastTo Const EnsureShape ExpandDims Fill Identity OnesLike Reshape Squeeze Tile ZerosLike
    """.split()
)


@dataclass(frozen=True)
class Split:
    """The two parts of a graph, and what passes between them.

    Attributes
    ----------
    once, product : GraphDef
        The parts.
    residuals : list of str
        Names of the tensors that pass from the first to the second.
    """

    once: Any
    product: Any
    residuals: list[str]


class UnsplittableError(Exception):
    """The graph cannot be split; the message says because of what."""


def split(
    flat: Any, vectors: Sequence[str], results: Sequence[str], once_results: Sequence[str]
) -> Split:
    """Split a graph without calls.

    Parameters
    ----------
    flat : GraphDef
        As `inline_calls` makes it.
    vectors : sequence of str
        Names of the placeholders for the vector's parts.
    results : sequence of str
        Names of the product's tensors.
    once_results : sequence of str
        Names of the tensors wanted from the first part, besides residuals.

    Returns
    -------
    Split

    Raises
    ------
    UnsplittableError
        If a stateful operation depends on the vector.
    """
    nodes = {node.name: node for node in flat.node}
    dependent = _dependent(nodes, {node_of(name) for name in vectors})
    needed = ancestors(nodes, results, lambda name: name in dependent)
    functions = {f.signature.name: f for f in flat.library.function}
    for name in needed:
        if is_stateful(nodes[name], functions):
            raise UnsplittableError(
                f"{nodes[name].op} at {name!r} has effects and depends on the vector"
            )
    product, residuals = _with_remade(nodes, needed, results)
    effects = [
        f"{name}:0"
        for name, node in nodes.items()
        if name not in dependent and has_effects(node, functions) and name not in product
    ]
    # A control edge from what depends on the vector is only TensorFlow's order of tracing.
    wanted = [*once_results, *residuals, *effects]
    once = ancestors(nodes, wanted, lambda name: name not in dependent, controls=True)
    vector_nodes = {node_of(name) for name in vectors}
    return Split(
        once=cut_out(flat, once, keep_controls=True),
        product=cut_out(flat, product - vector_nodes, keep_controls=False),
        residuals=residuals,
    )


def _dependent(nodes: dict[str, Any], starts: set[str]) -> set[str]:
    takers: dict[str, list[str]] = {name: [] for name in nodes}
    for name, node in nodes.items():
        for tensor in data_inputs(node):
            takers[node_of(tensor)].append(name)
    seen, queue = set(starts), deque(starts)
    while queue:
        for taker in takers[queue.popleft()]:
            if taker not in seen:
                seen.add(taker)
                queue.append(taker)
    return seen


def _with_remade(
    nodes: dict[str, Any], needed: set[str], results: Sequence[str]
) -> tuple[set[str], list[str]]:
    """Add to the product's part what is remade; return it, and what is left to be kept."""
    product, residuals = set(needed), dict[str, None]()
    queue = [t for name in needed for t in data_inputs(nodes[name])]
    queue += [t for t in results if node_of(t) not in needed]
    while queue:
        tensor = queue.pop()
        name = node_of(tensor)
        if name in product:
            continue
        if nodes[name].op in _REMADE:
            product.add(name)
            queue += data_inputs(nodes[name])
        else:
            residuals[tensor] = None
    return product, sorted(residuals)


def has_effects(node: Any, functions: Mapping[str, Any]) -> bool:
    return is_stateful(node, functions) and not node.op.startswith(
        ("ReadVariable", "ResourceGather")
    )
