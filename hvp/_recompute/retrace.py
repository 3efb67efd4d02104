"""Matches a later trace of a function with its first trace.

The function is traced again for each order of derivative. The graph of its first trace cannot be
differentiated instead: the gradient of a `tf.custom_gradient`, such as that of `tf.nn.silu`, refers
to tensors of the graph in which it was traced, and TensorFlow refuses these in any other. Results
of stateful operations in the first run replace those of the same operations in a later trace. To
find these, `match_traces` walks through both traces from the function's results towards its inputs.
It refuses a function whose Python code did something else the second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hvp._errors import RecomputeError
from hvp._graphs.dataflow import CONTROL_FLOW, functions_of
from hvp._graphs.graph import Graph, TensorName, data_inputs, node_of


def match_traces(
    first: Graph,
    first_results: Sequence[str],
    later: Graph,
    later_results: Sequence[str],
    inputs: dict[str, str],
) -> dict[str, str]:
    """Return the first trace's name of each operation in a later trace of one function.

    Both graphs have passed through `read_from_inputs` and `draw_from_seeds`. `first_results` and
    `later_results` are the tensors that the function returned, and `inputs` maps names of inputs in
    the later trace to those in the first. Traces that differ are refused.
    """
    first_nodes, later_nodes = first.nodes, later.nodes
    library = {**first.functions, **later.functions}
    pairs: dict[str, str] = {}
    queue = list(zip(first_results, later_results))
    if len(first_results) != len(later_results):
        _refuse_other_function("its number of results", len(first_results), len(later_results))
    while queue:
        first_tensor, later_tensor = queue.pop()
        first_tensor = _through_identities(first_tensor, first_nodes, inputs.values())
        later_tensor = _through_identities(later_tensor, later_nodes, inputs)
        if later_tensor in inputs or first_tensor in inputs.values():
            if inputs.get(later_tensor) != first_tensor:
                _refuse_other_function("an input", first_tensor, later_tensor)
            continue
        first_name, later_name = node_of(first_tensor), node_of(later_tensor)
        if later_name in pairs:
            if pairs[later_name] != first_name:
                _refuse_other_function("an operation", pairs[later_name], first_name)
            continue
        pairs[later_name] = first_name
        first_node, later_node = first_nodes.get(first_name), later_nodes.get(later_name)
        if first_node is None or later_node is None:
            _refuse_other_function("a tensor from outside", first_name, later_name)
            continue
        if not _same_computation(
            _computation(first_node, library), _computation(later_node, library)
        ):
            _refuse_other_function(
                "an operation",
                f"{first_node.op} {first_name!r}",
                f"{later_node.op} {later_name!r}",
            )
        first_inputs, later_inputs = data_inputs(first_node), data_inputs(later_node)
        is_control_flow = first_node.op in CONTROL_FLOW
        # TensorFlow adds inputs to a loop that is differentiated, and may reorder them.
        if is_control_flow and set(first_inputs) <= set(later_inputs):
            later_inputs = first_inputs
        queue += zip(first_inputs, later_inputs)
        if len(data_inputs(first_node)) != len(data_inputs(later_node)) and not is_control_flow:
            _refuse_other_function("an operation", first_name, later_name)
    return pairs


def names_of_state(
    later: Graph, stateful: Sequence[str], first_names: Sequence[str], pairs: Mapping[str, str]
) -> list[str]:
    """Find the names in a later trace of the stateful results `first_names` of the first run.

    `stateful` are those of the later trace; `pairs` is what `match_traces` returned. A result that
    the later trace does not use gets the name of no tensor. A derivative that uses a stateful
    result of its own is refused.
    """
    later_name_of = {first_name: later_name for later_name, first_name in pairs.items()}
    names = []
    for i, tensor in enumerate(first_names):
        first_name, place = TensorName.of(tensor)
        name = later_name_of.get(first_name)
        names.append(f"{name}:{place}" if name else f"unused_state_{i}:0")
    for tensor in stateful:
        if tensor not in names:
            node = later.nodes[node_of(tensor)]
            raise RecomputeError(
                "the derivative of the function has a stateful operation of its own, which cannot "
                f"be replayed: {node.op} at {node.name!r}",
                "a derivative that depends on its inputs alone",
                "write that part with TensorFlow operations, or leave it outside of recompute",
            )
    return names


def _through_identities(tensor: str, nodes: dict[str, Any], inputs: Collection[str]) -> str:
    """Follow a tensor back through identities, which remain where a call was inlined."""
    while tensor not in inputs:
        node = nodes.get(node_of(tensor))
        if node is None or node.op != "Identity":
            break
        tensor = data_inputs(node)[0]
    return tensor


# The type of an operation, and its attributes (for a loop or branch, the constants in it).
_Computation = tuple[str, Counter[object]]


def _computation(node: Any, library: dict[str, Any]) -> _Computation:
    """Describe what an operation computes, for comparison with another one."""
    if node.op in CONTROL_FLOW:
        # TensorFlow rewrites loops and branches when it differentiates them: they get more results
        # and other names. Their constants remain.
        constants: Counter[object] = Counter(
            inner.attr["value"].SerializeToString()
            for function in functions_of(node)
            if function.name in library
            for inner in library[function.name].node_def
            if inner.op == "Const"
        )
        return node.op.replace("Stateless", ""), constants
    attributes: Counter[object] = Counter(
        (name, value.SerializeToString(deterministic=True))
        for name, value in node.attr.items()
        # A Python function (`tf.py_function`) has another token in each trace.
        if not name.startswith("_") and name not in ("seed", "seed2", "token")
    )
    return node.op, attributes


def _same_computation(first: _Computation, later: _Computation) -> bool:
    """Whether an operation of the later trace computes the same as one of the first."""
    (first_type, first_attributes), (later_type, later_attributes) = first, later
    if {first_type, f"Stateless{first_type}"} & CONTROL_FLOW:
        # Its derivative may have added constants.
        return first_type == later_type and not first_attributes - later_attributes
    return first_type == later_type and first_attributes == later_attributes


def _refuse_other_function(subject: str, first: Any, later: Any) -> None:
    raise RecomputeError(
        f"the function did something else when it was traced for a derivative: {subject} was "
        f"{first}, and is now {later}",
        "Python code that does the same each time, with the same variables and tensors",
        "pass whatever changes as an argument (NumPy random numbers, counters, flags); if you "
        "define functions in a loop, bind the loop's variable: lambda x, w=w: ...",
    )
