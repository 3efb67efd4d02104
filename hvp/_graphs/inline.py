"""Dissolving function calls in a traced graph, so that it can be split anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import CALLS, functions_of, output_offset

_serials = itertools.count()
# In the names of functions that stay as they are, and whose calls are operations like any.
KEPT_WHOLE = "hvp_recomputed"


def inline_calls(graph_def: Any) -> tuple[Any, Callable[[str], str]]:
    """Put the bodies of called functions in place of the calls.

    Parameters
    ----------
    graph_def : GraphDef
        Of a traced function. Loops, branches and calls that recompute stay as they are.

    Returns
    -------
    flat : GraphDef
        Without calls. The nodes of a body are named `call/node`; a call's control inputs go to all
        of them, and a control edge from the call becomes one from each of its results.
    rename : callable
        From a tensor's name in the graph to its name in the flat one.
    """
    functions = {f.signature.name: f for f in graph_def.library.function}
    flat = tf.compat.v1.GraphDef(versions=graph_def.versions)
    outermost = _Inliner(functions, flat).add("", graph_def.node, {}, [])
    _rename_functions(flat, functions)
    _add_in_pairs(flat.node, ":0")
    for function in flat.library.function:
        if KEPT_WHOLE not in function.signature.name:
            _add_in_pairs(function.node_def, ":sum:0")
    register_functions(flat)
    return flat, outermost.tensor


def _rename_functions(flat: Any, functions: dict[str, Any]) -> None:
    """Add the functions that loops and branches still need, under names of their own.

    TensorFlow has functions of the old names already, and changed some of them since; but not those
    that recompute, nor what these call.
    """
    serial = next(_serials)
    names: dict[str, str] = {}
    queue = [(node, False) for node in flat.node]
    while queue:
        node, unchanged = queue.pop()
        for function in functions_of(node):
            if function.name in functions and function.name not in names:
                same = unchanged or KEPT_WHOLE in function.name
                names[function.name] = function.name if same else f"{function.name}_hvp_{serial}"
                queue += [(inner, same) for inner in functions[function.name].node_def]
    for name, new_name in names.items():
        function = flat.library.function.add()
        function.CopyFrom(functions[name])
        function.signature.name = new_name
        _refer(function.node_def, names)
    _refer(flat.node, names)


def register_functions(graph_def: Any) -> None:
    """Make a graph's functions known to the runtime, which importing it does not.

    A loop over a function the runtime does not know ends the process (TensorFlow 2.16 to 2.21).
    """
    if not graph_def.library.function:
        return
    library = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
    tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(library, name=""), [])


def _add_in_pairs(nodes: Any, output: str) -> None:
    """Replace each sum of three terms or more by sums of two.

    `AddN` begins with whichever of its terms is no longer needed elsewhere, so that the order, and
    with it the rounding, depends on what happened to run first. In the graph or function that has
    these nodes, the result of one is named by its own name and `output`.
    """
    for node in list(nodes):
        terms = [name for name in node.input if not name.startswith("^")]
        if node.op != "AddN" or len(terms) < 3:
            continue
        waits = node.input[len(terms) :]
        node.attr["N"].i = 2
        total = terms[0]
        for index, term in enumerate(terms[1:-1]):
            pair = nodes.add()
            pair.CopyFrom(node)
            pair.name = f"{node.name}/pair_{index}"
            del pair.input[:]
            pair.input.extend([total, term, *waits])
            total = pair.name + output
        del node.input[:]
        node.input.extend([total, terms[-1], *waits])


def _refer(nodes: Any, names: dict[str, str]) -> None:
    for node in nodes:
        for function in functions_of(node):
            function.name = names.get(function.name, function.name)


class _Inliner:
    def __init__(self, functions: dict[str, Any], flat: Any) -> None:
        self._functions = functions
        self._flat = flat

    def add(
        self, prefix: str, nodes: Any, arguments: dict[str, str], controls: list[str]
    ) -> _Scope:
        """Add the nodes of a graph or function, in an order that makers come before takers."""
        scope = _Scope(prefix, {node.name: node for node in nodes}, arguments)
        for node in _in_order(scope.nodes):
            inputs = [scope.tensor(name) for name in node.input if not name.startswith("^")]
            waits = [c for name in node.input if name.startswith("^") for c in scope.control(name)]
            waits += controls
            if self._is_dissolved(node):
                self._add_call(scope, node, inputs, waits)
                continue
            copy = self._flat.node.add()
            copy.CopyFrom(node)
            copy.name = prefix + node.name
            del copy.input[:]
            copy.input.extend([*inputs, *dict.fromkeys(waits)])
            # Colocation names nodes that may be gone.
            copy.attr.pop("_class", None)
        return scope

    def _is_dissolved(self, node: Any) -> bool:
        name = node.attr["f"].func.name if node.op in CALLS else ""
        return name in self._functions and KEPT_WHOLE not in name

    def _add_call(self, scope: _Scope, node: Any, inputs: list[str], waits: list[str]) -> None:
        function = self._functions[node.attr["f"].func.name]
        names = [argument.name for argument in function.signature.input_arg]
        inner = self.add(
            f"{scope.prefix}{node.name}/", function.node_def, dict(zip(names, inputs)), waits
        )
        outputs = [function.ret[out.name] for out in function.signature.output_arg]
        scope.results[node.name] = [inner.tensor(name) for name in outputs]
        effects = [c for name in function.control_ret.values() for c in inner.control("^" + name)]
        made = [f"^{tensor.partition(':')[0]}" for tensor in scope.results[node.name]]
        scope.effects[node.name] = effects + made + waits


class _Scope:
    """Names inside one graph or function body, and what they have become outside."""

    def __init__(self, prefix: str, nodes: dict[str, Any], arguments: dict[str, str]) -> None:
        self.prefix = prefix
        self.nodes = nodes
        self.results: dict[str, list[str]] = {}
        self.effects: dict[str, list[str]] = {}
        self._arguments = arguments

    def tensor(self, name: str) -> str:
        """Return the flat name, `node:index`, of a tensor named as in a graph or a function."""
        node, _, rest = name.partition(":")
        if node in self._arguments:
            return self._arguments[node]
        output, _, index = rest.rpartition(":")
        number = output_offset(self.nodes[node], output) + int(index or 0)
        if node in self.results:
            return self.results[node][number]
        return f"{self.prefix}{node}:{number}"

    def control(self, name: str) -> list[str]:
        """Return the control inputs that stand for one."""
        node = name[1:]
        if node in self._arguments:
            return [f"^{self._arguments[node].partition(':')[0]}"]
        return self.effects.get(node, [f"^{self.prefix}{node}"])


def _in_order(nodes: dict[str, Any]) -> list[Any]:
    ordered: list[Any] = []
    done: set[str] = set()
    for start in nodes:
        stack = [(start, False)]
        while stack:
            name, expanded = stack.pop()
            if name in done:
                continue
            if expanded:
                done.add(name)
                ordered.append(nodes[name])
                continue
            stack.append((name, True))
            makers = (maker.lstrip("^").partition(":")[0] for maker in nodes[name].input)
            stack += [(maker, False) for maker in makers if maker in nodes and maker not in done]
    return ordered
