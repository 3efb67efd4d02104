"""What depends on what in a traced graph, nested functions and control flow included."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._graphs.private import op_def_registry
from hvp._graphs.source_lines import source_line

# (scope, name), or a port: (scope, name, "arg" or "ret", index) of a called function.
Vertex = tuple[Any, ...]

_LOOPS = frozenset({"While", "StatelessWhile"})
CONTROL_FLOW = _LOOPS | {"Case", "If", "StatelessCase", "StatelessIf"}
# What the names of gradient functions begin with that `hvp.recompute` registers.
RECOMPUTED_GRADIENT = "HvpRecomputed"
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# What TensorFlow calls the gradient of an operation in a function, loop or branch.
_IN_A_FUNCTION = re.compile(r"(?:.*gradients?(?:_\d+)?/)?(.+)_grad/([^/]+)")
# Others that have functions among their attributes (datasets) are operations like any.
_WITH_BODIES = CONTROL_FLOW | CALLS


@dataclass(frozen=True)
class Edge:
    """One input of one operation: from the vertex that makes it to the vertex that takes it.

    Attributes
    ----------
    source, target : Vertex
        Maker and taker.
    input_index : int
        Which of the taker's inputs.
    dtype : tf.DType or None
        Of the tensor; None where it passes a function's boundary.
    decides : bool
        Whether it only decides which branch runs or how often: a predicate or loop condition.
    """

    source: Vertex
    target: Vertex
    input_index: int
    dtype: tf.DType | None = None
    decides: bool = False


class Dataflow:
    """Vertices are operations; edges carry tensors from one to the next.

    Calls (`PartitionedCall`, `If`, `While`, ...) are dissolved: the body's operations stand in
    place of the call, once for each call, so that one input of a call is never mistaken for
    another.

    Parameters
    ----------
    graph_def : GraphDef
        Of a traced function.
    graph : tf.Graph, optional
        The graph it is of, which knows where its operations were made.
    """

    def __init__(self, graph_def: Any, graph: tf.Graph | None = None) -> None:
        # Not kept alive: a Dataflow may live as long as an operator.
        self._graph = None if graph is None else weakref.ref(graph)
        self.types: dict[Vertex, str] = {}
        self.names: dict[Vertex, str] = {}
        self.dtypes: dict[Vertex, tf.DType] = {}
        self.outgoing: dict[Vertex, list[Edge]] = defaultdict(list)
        self.incoming: dict[Vertex, list[Edge]] = defaultdict(list)
        self._functions = {f.signature.name: f for f in graph_def.library.function}
        # For operations with a gradient function of their own: which outputs are used.
        self._overridden: set[Vertex] = set()
        self.custom_gradients: set[Vertex] = set()
        self._used_outputs: dict[Vertex, set[int]] = defaultdict(set)
        self._add_nodes((), graph_def.node, {})

    def source_line(self, vertex: Vertex) -> str:
        """Return the line of the user's code that made an operation; empty if it is not known."""
        graph = self._graph() if self._graph is not None else None
        if graph is None:
            return ""
        # Of a gradient made inside a function, what it is the gradient of is in another function.
        match = _IN_A_FUNCTION.fullmatch(vertex[1])
        forward = match and match[1]
        alike = [
            other
            for other in (self.types if forward else ())
            if other[1] == forward and self.types[vertex].startswith(self.types[other])
        ]
        lines = (source_line(graph, _outermost(other)) for other in [*alike, vertex])
        return next(filter(None, lines), "")

    def vertex(self, tensor_name: str) -> Vertex:
        """Return the vertex of a tensor of the outermost graph, named `operation:index`."""
        name, _, index = tensor_name.partition(":")
        # Calls, loops and branches have no vertex of their own, but one for each result.
        result = ((), name, "ret", int(index or 0))
        return result if result in self.incoming else ((), name)

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

        Not along integers, booleans and text, nor along what only decides. And a
        `tf.custom_gradient`, as a recomputed function, ends in an `IdentityN` over its results and
        its arguments, whose gradient goes from the results straight to the arguments: what the
        function did inside to get the results does not matter. Its arguments are those whose
        outputs nobody takes.
        """
        if edge.decides or (edge.dtype is not None and not _carries_derivatives(edge.dtype)):
            return False
        if edge.target in self._overridden:
            return edge.input_index not in self._used_outputs[edge.target]
        return True

    def _add_nodes(
        self, scope: tuple[str, ...], nodes: Iterable[Any], arguments: dict[str, Vertex]
    ) -> Callable[[str], tuple[Vertex, tf.DType | None]]:
        """Add a graph's or function's nodes; return what finds a tensor's maker and dtype."""
        by_name = {node.name: node for node in nodes}

        def producer(tensor: str) -> tuple[Vertex, tf.DType | None]:
            name, _, rest = tensor.partition(":")
            if name in arguments:
                return arguments[name], None
            output, _, index = rest.rpartition(":")
            number = output_offset(by_name[name], output) + int(index or 0)
            if self._called(by_name[name]):
                return (scope, name, "ret", number), None
            self._used_outputs[(scope, name)].add(number)
            dtypes = [dtype for _, dtype in _outputs(by_name[name])]
            return (scope, name), dtypes[number] if number < len(dtypes) else None

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
            if gradient.startswith((b"CustomGradient", RECOMPUTED_GRADIENT.encode())):
                self._overridden.add(vertex)
                if gradient.startswith(b"CustomGradient"):
                    self.custom_gradients.add(vertex)
            for index, (source, dtype) in enumerate(inputs):
                self._connect(Edge(source, vertex, index, dtype))
        return producer

    def _add_call(
        self,
        scope: tuple[str, ...],
        node: Any,
        called: list[str],
        inputs: list[tuple[Vertex, tf.DType | None]],
    ) -> None:
        loop = node.op in _LOOPS
        results = [(scope, node.name, "ret", index) for index in range(self._result_count(called))]
        for name in called:
            function = self._functions[name]
            inner = (*scope, f"{node.name}/{name}")
            names = [argument.name for argument in function.signature.input_arg]
            ports: dict[str, Vertex] = {arg: (inner, "", "arg", i) for i, arg in enumerate(names)}
            # What comes before the function's arguments is a predicate or branch index.
            skipped = len(inputs) - len(names)
            for source, dtype in inputs[:skipped]:
                for result in results:
                    self._connect(Edge(source, result, 0, dtype, decides=True))
            for (source, dtype), port in zip(inputs[skipped:], ports.values()):
                self._connect(Edge(source, port, 0, dtype))
            if loop:
                for result, port in zip(results, ports.values()):
                    self._connect(Edge(result, port, 0))
            producer = self._add_nodes(inner, function.node_def, ports)
            makers = [producer(function.ret[out.name]) for out in function.signature.output_arg]
            if loop and name == node.attr["cond"].func.name:
                for result in results:
                    self._connect(Edge(makers[0][0], result, 0, decides=True))
                continue
            for (source, dtype), result in zip(makers, results):
                self._connect(Edge(source, result, 0, dtype))
        if loop:  # which may also not run at all
            for (source, dtype), result in zip(inputs, results):
                self._connect(Edge(source, result, 0, dtype))

    def _called(self, node: Any) -> list[str]:
        """Names of the functions a node calls with its inputs as arguments."""
        if node.op not in _WITH_BODIES:
            return []
        return [f.name for f in functions_of(node) if f.name in self._functions]

    def _result_count(self, called: list[str]) -> int:
        return max(len(self._functions[name].signature.output_arg) for name in called)

    def _connect(self, edge: Edge) -> None:
        self.outgoing[edge.source].append(edge)
        self.incoming[edge.target].append(edge)


def _carries_derivatives(dtype: tf.DType) -> bool:
    # A variable is reached through its resource, a list of tensors through a variant.
    return dtype.is_floating or dtype.is_complex or dtype in (tf.resource, tf.variant)


def is_stateful(node: Any, functions: Mapping[str, Any]) -> bool:
    """Whether running a node has an effect, or depends on more than its inputs.

    Parameters
    ----------
    node : NodeDef
        The node.
    functions : mapping of str to FunctionDef
        Bodies of calls, loops and branches, by name. One of these is as stateful as what is in
        them; without its body, as stateful as TensorFlow's definition of it.
    """
    bodies = [functions[f.name] for f in functions_of(node) if f.name in functions]
    if bodies and node.op in _WITH_BODIES:
        return any(is_stateful(inner, functions) for body in bodies for inner in body.node_def)
    definition = op_def_registry.get(node.op)
    # A variable's shape does not change.
    return definition is not None and definition.is_stateful and node.op != "VariableShape"


def functions_of(node: Any) -> Iterator[Any]:
    """Yield the functions among a node's attributes."""
    for value in node.attr.values():
        yield from [value.func] if value.HasField("func") else value.list.func


def _outputs(node: Any) -> list[tuple[str, tf.DType]]:
    """Name of the output argument, and dtype, of each output of a node."""
    definition = op_def_registry.get(node.op)
    found: list[tuple[str, tf.DType]] = []
    for argument in definition.output_arg if definition is not None else ():
        if argument.type_list_attr:
            types = list(node.attr[argument.type_list_attr].list.type)
        else:
            count = node.attr[argument.number_attr].i if argument.number_attr else 1
            types = [argument.type or node.attr[argument.type_attr].type] * count
        found += [(argument.name, tf.as_dtype(type_)) for type_ in types]
    return found


def output_offset(node: Any, output: str) -> int:
    """Where an output argument begins: in a function, tensors are named `node:argument:index`."""
    names = [name for name, _ in _outputs(node)]
    return names.index(output) if output in names else 0


def layer_of(operation_name: str) -> str:
    """Return an operation's name without what TensorFlow's gradient machinery put in front.

    Examples
    --------
    >>> layer_of("gradient_tape/model/up/resize/ResizeBilinearGrad")
    'model/up/resize/ResizeBilinearGrad'
    >>> layer_of("while_grad/gradients/while/Softsign_grad/SoftsignGrad")
    'while/SoftsignGrad'
    """
    name = _IN_A_FUNCTION.sub(_beside, operation_name)
    return re.sub(r"^(gradient_tape/|gradients?(_\d+)?/)+", "", name)


def _beside(match: re.Match[str]) -> str:
    scope, slash, _ = match[1].rpartition("/")
    return scope + slash + match[2]


def _outermost(vertex: Vertex) -> str:
    """Return the operation of the outermost graph that a vertex is, or is in."""
    scope, name = vertex[:2]
    return scope[0].rpartition("/")[0] if scope else name
