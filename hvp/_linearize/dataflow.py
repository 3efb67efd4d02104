"""What depends on what in a traced graph, nested functions and control flow included."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

# (scope, name), or a port: (scope, name, "arg" or "ret", index) of a called function.
Vertex = tuple[Any, ...]

# Functions among the attributes of these take all inputs but the leading ones (a predicate or
# branch index); the others take all of them.
_LOOPS = {"While", "StatelessWhile"}


@dataclass(frozen=True)
class Edge:
    """One input of one operation: from the vertex that makes it to the vertex that takes it."""

    source: Vertex
    target: Vertex
    input_index: int


class Dataflow:
    """Vertices are operations; edges carry tensors from one to the next.

    Calls (`PartitionedCall`, `If`, `While`, ...) are dissolved: the body's operations stand in
    place of the call, once for each call, so that one input of a call is never mistaken for
    another. Conditions of loops are left out: they decide how often, not what.

    Parameters
    ----------
    graph_def : GraphDef
        Of a traced function.
    """

    def __init__(self, graph_def: Any) -> None:
        self.types: dict[Vertex, str] = {}
        self.names: dict[Vertex, str] = {}
        self.dtypes: dict[Vertex, tf.DType] = {}
        self.outgoing: dict[Vertex, list[Edge]] = defaultdict(list)
        self.incoming: dict[Vertex, list[Edge]] = defaultdict(list)
        self._functions = {f.signature.name: f for f in graph_def.library.function}
        # For operations with a gradient function of their own: which outputs are used.
        self._overridden: set[Vertex] = set()
        self._used_outputs: dict[Vertex, set[int]] = defaultdict(set)
        self._add_nodes((), graph_def.node, {})

    def vertex(self, tensor_name: str) -> Vertex:
        """Return the vertex of a tensor of the outermost graph, named `operation:index`."""
        return ((), tensor_name.partition(":")[0])

    def reachable(
        self,
        starts: Iterable[Vertex],
        *,
        passes: Callable[[Edge], bool] = lambda edge: True,
        backward: bool = False,
    ) -> set[Vertex]:
        """Return the vertices reached from `starts`, these included.

        Parameters
        ----------
        starts : iterable of Vertex
            Where to begin.
        passes : callable, optional
            Which edges may be followed; all by default.
        backward : bool, optional
            Follow edges from where a tensor is taken to where it is made.
        """
        seen = set(starts)
        queue = deque(seen)
        while queue:
            here = queue.popleft()
            for edge in (self.incoming if backward else self.outgoing)[here]:
                there = edge.source if backward else edge.target
                if there not in seen and passes(edge):
                    seen.add(there)
                    queue.append(there)
        return seen

    def users(self, start: Vertex) -> set[Vertex]:
        """Return the operations that take what `start` makes as an input.

        Passing through calls and identities counts as taking it directly: this is how a
        variable's handle is followed to the operations that read or write it.
        """
        transparent = self.reachable([start], passes=lambda edge: self._is_transparent(edge.target))
        found = {edge.target for vertex in transparent for edge in self.outgoing[vertex]}
        return found - transparent

    def producers(self, target: Vertex) -> set[Vertex]:
        """Return the operations that make the inputs of `target`, calls and identities aside."""
        transparent = self.reachable(
            [target], passes=lambda edge: self._is_transparent(edge.source), backward=True
        )
        found = {edge.source for vertex in transparent for edge in self.incoming[vertex]}
        return found - transparent

    def _is_transparent(self, vertex: Vertex) -> bool:
        return self.types.get(vertex, "Identity") == "Identity"

    def differentiable(self, edge: Edge) -> bool:
        """Whether a derivative may flow along an edge at all.

        A `tf.custom_gradient` ends in an `IdentityN` over its results and its arguments, whose
        gradient goes from the results straight to the arguments: what the function did inside to
        get the results does not matter. Its arguments are those whose outputs nobody takes.
        """
        if edge.target in self._overridden:
            return edge.input_index not in self._used_outputs[edge.target]
        return True

    def _add_nodes(
        self, scope: tuple[str, ...], nodes: Iterable[Any], arguments: dict[str, Vertex]
    ) -> Callable[[str], Vertex]:
        """Add a graph's or function's nodes; return what finds the vertex that makes a tensor."""
        by_name = {node.name: node for node in nodes}

        def producer(tensor: str) -> Vertex:
            name, _, rest = tensor.partition(":")
            if name in arguments:
                return arguments[name]
            index = int(rest.rpartition(":")[2] or 0)
            if self._called(by_name[name]):
                return (scope, name, "ret", index)
            self._used_outputs[(scope, name)].add(index)
            return (scope, name)

        for node in by_name.values():
            inputs = [producer(name) for name in node.input if not name.startswith("^")]
            called = self._called(node)
            if called:
                self._add_call(scope, node, called, inputs)
                continue
            vertex = (scope, node.name)
            self.types[vertex] = node.op
            self.names[vertex] = node.name
            if "dtype" in node.attr:
                self.dtypes[vertex] = tf.as_dtype(node.attr["dtype"].type)
            gradient = node.attr["_gradient_op_type"].s if "_gradient_op_type" in node.attr else b""
            if gradient.startswith(b"CustomGradient"):
                self._overridden.add(vertex)
            for index, source in enumerate(inputs):
                self._connect(source, vertex, index)
        return producer

    def _add_call(
        self, scope: tuple[str, ...], node: Any, called: list[str], inputs: list[Vertex]
    ) -> None:
        loop = node.op in _LOOPS
        for name in called:
            function = self._functions[name]
            inner = (*scope, f"{node.name}/{name}")
            names = [argument.name for argument in function.signature.input_arg]
            ports = {arg: (inner, "", "arg", i) for i, arg in enumerate(names)}
            skipped = len(inputs) - len(names)
            for index, port in enumerate(ports.values()):
                self._connect(inputs[skipped + index], port, 0)
            producer = self._add_nodes(inner, function.node_def, ports)
            for index, output in enumerate(function.signature.output_arg):
                result = (scope, node.name, "ret", index)
                self._connect(producer(function.ret[output.name]), result, 0)
                if loop:
                    self._connect(result, (inner, "", "arg", index), 0)
                    self._connect(inputs[index], result, 0)

    def _called(self, node: Any) -> list[str]:
        """Names of the functions a node calls with its inputs as arguments."""
        found = []
        for key, value in node.attr.items():
            if key == "cond" and node.op in _LOOPS:
                continue
            functions = [value.func] if value.HasField("func") else value.list.func
            found += [f.name for f in functions if f.name in self._functions]
        return found

    def _connect(self, source: Vertex, target: Vertex, index: int) -> None:
        edge = Edge(source, target, index)
        self.outgoing[source].append(edge)
        self.incoming[target].append(edge)


def layer_of(operation_name: str) -> str:
    """Return an operation's name without what TensorFlow's gradient machinery put in front.

    Examples
    --------
    >>> layer_of("gradient_tape/model/up/resize/ResizeBilinearGrad")
    'model/up/resize/ResizeBilinearGrad'
    """
    return re.sub(r"^(gradient_tape/|gradients?(_\d+)?/)+", "", operation_name)
