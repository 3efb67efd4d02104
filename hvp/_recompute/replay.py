"""The part of a traced function that can be repeated: the same inputs give the same results.

A function that runs again must see the variables as they were, must draw the same random numbers,
and must not update anything a second time. In its graph, reads of variables therefore become inputs
(`variable_reads`), and random draws become functions of a seed (`seeded_draws`). Any other stateful
operation runs once, and its results are inputs of every later run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvp._errors import RecomputeError
from hvp._graphs.dataflow import CONTROL_FLOW, is_stateful
from hvp._graphs.graph import Graph, data_inputs, node_of
from hvp._graphs.split import has_effects


def replay(graph: Graph, results: Sequence[str], inputs: Sequence[str]) -> tuple[Graph, list[str]]:
    """Find the repeatable part of a graph, which computes `results` from `inputs`.

    The graph has no calls, and has passed through `read_from_inputs` and `draw_from_seeds`. A
    result that depends on a stateful loop or branch is refused.

    Return the part, which has no stateful operation, and the results of stateful operations that it
    takes as further inputs.
    """
    nodes, starts = graph.nodes, {*map(node_of, inputs)}
    stateful = {name for name, node in nodes.items() if is_stateful(node, graph.functions)} - starts
    part = graph.ancestors(results, lambda name: name not in stateful and name not in starts)
    used = [*results, *(tensor for name in part for tensor in data_inputs(nodes[name]))]
    stateful_results = sorted({tensor for tensor in used if node_of(tensor) in stateful})
    for tensor in stateful_results:
        _refuse_stateful_control_flow(nodes[node_of(tensor)])
    return graph.part(part), stateful_results


def with_effects(graph: Graph, results: Sequence[str], inputs: Sequence[str]) -> Graph:
    """Return the part of a graph that runs in the first call, with all of its side effects."""
    starts = {*map(node_of, inputs)}
    effects = [
        f"{name}:0"
        for name, node in graph.nodes.items()
        if has_effects(node, graph.functions) and name not in starts
    ]
    first = graph.ancestors([*results, *effects], lambda name: name not in starts, controls=True)
    return graph.part(first, keep_controls=True)


def _refuse_stateful_control_flow(node: Any) -> None:
    # A loop or branch that is differentiated is rewritten and gets more results, so that its
    # results may differ between orders of derivative.
    if node.op in CONTROL_FLOW:
        raise RecomputeError(
            f"the function has a loop or branch with a state in it: {node.op} at {node.name!r}",
            "stateful operations (random draws, updates of variables) outside of loops and "
            "branches only",
            "draw the random numbers before the loop, or use stateless draws",
        )
