"""Inlining function calls in a traced graph, so that it can be split anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import CALLS, KEPT_WHOLE, functions_of, kept_whole, output_offset
from hvp._graphs.graph import Graph, TensorName, in_topological_order, node_of
from hvp._graphs.private import COLOCATED_WITH
from hvp._graphs.sizes import note_shapes, shapes_of

_serials = itertools.count()


def inline_calls(graph_def: Any) -> tuple[Any, Callable[[str], str]]:
    """Replace calls by the bodies of the called functions.

    Return the flat graph, and a function from the name of a tensor to its name in that graph.
    Loops, branches and calls of recomputed functions remain. The nodes of a body are named
    `call/node`. The control inputs of a call are passed on to all of them, and a control edge from
    the call becomes one from each of its results.
    """
    functions = Graph(graph_def).functions
    flat = tf.compat.v1.GraphDef(versions=graph_def.versions)
    outermost = _Inliner(functions, flat.node).add("", graph_def.node, {}, [])
    _rename_functions(flat, functions, kept_whole(graph_def))
    _add_in_pairs(flat.node, ":0")
    for function in flat.library.function:
        if KEPT_WHOLE not in function.signature.name:
            _add_in_pairs(function.node_def, ":sum:0")
    register_functions(flat)
    return flat, outermost.tensor


def _rename_functions(flat: Any, functions: dict[str, Any], kept: set[str]) -> None:
    """Add the functions of the remaining loops and branches, under new names.

    TensorFlow already knows functions of the old names, and may have changed them since. It does
    not change recomputed functions and those that they call, which therefore keep their names.
    """
    serial = next(_serials)
    names: dict[str, str] = {}
    bodies: dict[str, Any] = {}
    queue = list(flat.node)
    while queue:
        for function in functions_of(queue.pop()):
            name = function.name
            if name in functions and name not in names:
                names[name] = name if name in kept else f"{name}_hvp_{serial}"
                body = functions[name]
                bodies[name] = body if name in kept else _without_calls(body, functions)
                queue += bodies[name].node_def
    for name, new_name in names.items():
        function = flat.library.function.add()
        function.CopyFrom(bodies[name])
        function.signature.name = new_name
        _refer(function.node_def, names)
    _refer(flat.node, names)


def _without_calls(function: Any, functions: dict[str, Any]) -> Any:
    """Return a function with the bodies of called functions in place of the calls.

    TensorFlow cannot differentiate an imported loop whose body calls functions: it would leave that
    to its runtime, which has derivatives of few operations.
    """
    body = type(function)()
    body.CopyFrom(function)
    del body.node_def[:]
    own = {argument.name: argument.name for argument in function.signature.input_arg}
    scope = _Inliner(functions, body.node_def, in_function=True).add("", function.node_def, own, [])
    for name, tensor in function.ret.items():
        body.ret[name] = scope.tensor(tensor)
    return body


def register_functions(graph_def: Any) -> None:
    """Make the functions of a graph known to the runtime.

    Importing the graph does not. A loop over a function that the runtime does not know crashes the
    process (TensorFlow 2.16 to 2.21).
    """
    if not graph_def.library.function:
        return
    library = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
    tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(library, name=""), [])


def _add_in_pairs(nodes: Any, output: str) -> None:
    """Replace each sum of three or more terms by sums of two, in place.

    `AddN` starts with a term whose memory it can reuse. Which one that is depends on the order in
    which operations ran, and so does rounding. Sums of two are reproducible. `output` is the suffix
    that turns the name of a sum into the name of its result.
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
    """Copies nodes, and the bodies of functions in place of their calls.

    Copies are added to `nodes`, which belong to a function if `in_function` is set: tensors have
    other names there.
    """

    def __init__(self, functions: dict[str, Any], nodes: Any, *, in_function: bool = False) -> None:
        self._functions = functions
        self._nodes, self._in_function = nodes, in_function
        self._added: dict[str, Any] = {}

    def add(
        self, prefix: str, nodes: Any, arguments: dict[str, str], controls: list[str]
    ) -> _Scope:
        """Add the nodes of a graph or function in topological order."""
        scope = _Scope(prefix, {node.name: node for node in nodes}, arguments, self._in_function)
        for node in in_topological_order(scope.nodes):
            inputs = [scope.tensor(name) for name in node.input if not name.startswith("^")]
            waits = [c for name in node.input if name.startswith("^") for c in scope.control(name)]
            waits += controls
            if self._is_inlined(node):
                self._add_call(scope, node, inputs, waits)
                continue
            copy = self._nodes.add()
            copy.CopyFrom(node)
            copy.name = prefix + node.name
            del copy.input[:]
            copy.input.extend([*inputs, *dict.fromkeys(waits)])
            # This attribute names nodes to be colocated with, which may no longer exist.
            copy.attr.pop(COLOCATED_WITH, None)
            self._added[copy.name] = copy
        return scope

    def _is_inlined(self, node: Any) -> bool:
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
        if not self._in_function:
            self._pass_on_shapes(node, scope.results[node.name])
        effects = [c for name in function.control_ret.values() for c in inner.control("^" + name)]
        results = [f"^{tensor.partition(':')[0]}" for tensor in scope.results[node.name]]
        scope.effects[node.name] = effects + results + waits
        if self._in_function:  # whose own results may name the call
            done = self._nodes.add(name=scope.prefix + node.name, op="NoOp")
            done.input.extend(dict.fromkeys(scope.effects[node.name]))

    def _pass_on_shapes(self, call: Any, results: list[str]) -> None:
        """Note the shapes of a call's results, which the function may know less well."""
        for tensor, shape in zip(results, shapes_of(call)):
            node = self._added.get(node_of(tensor))
            shapes = [] if node is None else shapes_of(node)
            if shapes:
                shapes[TensorName.of(tensor).place] = shape
                note_shapes(node, shapes)


class _Scope:
    """Maps names inside one graph or function body to names in the flat graph."""

    def __init__(
        self, prefix: str, nodes: dict[str, Any], arguments: dict[str, str], in_function: bool
    ) -> None:
        self.prefix, self._in_function = prefix, in_function
        self.nodes = nodes
        self.results: dict[str, list[str]] = {}
        self.effects: dict[str, list[str]] = {}
        self._arguments = arguments

    def tensor(self, name: str) -> str:
        """Return the flat name, `node:index`, of a tensor of the graph or function."""
        node, _, rest = name.partition(":")
        if node in self._arguments:
            return self._arguments[node]
        output, _, index = rest.rpartition(":")
        number = output_offset(self.nodes[node], output) + int(index or 0)
        if node in self.results:
            return self.results[node][number]
        return f"{self.prefix}{node}:{rest if self._in_function else number}"

    def control(self, name: str) -> list[str]:
        """Return the control inputs of the flat graph that replace a control input."""
        node = name[1:]
        if node in self._arguments:
            return [f"^{self._arguments[node].partition(':')[0]}"]
        return self.effects.get(node, [f"^{self.prefix}{node}"])
