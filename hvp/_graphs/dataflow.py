"""How values depend on each other in a traced graph, in called functions and loops too."""

from __future__ import annotations

import functools
import re
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._graphs.private import GRADIENT_SCOPE, GRADIENT_TYPE, TAPE_PREFIX, op_def_registry
from hvp._graphs.source_lines import source_line

# An operation is (scope, name), and a port of a called function is (scope, name, "arg" or "ret",
# index). The scope is the tuple of calls that lead to the operation, () in the outermost graph.
Vertex = tuple[Any, ...]
# An input or output argument in the definition of an operation; see `_arguments`.
_Argument = tuple[str, str, str, int, str]

LOOPS = frozenset({"While", "StatelessWhile"})
BRANCHES = frozenset({"Case", "If", "StatelessCase", "StatelessIf"})
CONTROL_FLOW = LOOPS | BRANCHES
# Prefix of the names of the gradient functions that `hvp.recompute` registers.
RECOMPUTED_GRADIENT = "HvpRecomputed"
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# Part of the names of functions whose calls are not inlined.
KEPT_WHOLE = "hvp_recomputed"
# The name that TensorFlow gives to the gradient of an operation in a function, loop or branch.
_IN_A_FUNCTION = re.compile(rf"(?:.*gradients?(?:_\d+)?/)?(.+){GRADIENT_SCOPE}([^/]+)")
# Operations whose functions run on their inputs. Others that have functions among their attributes
# (datasets) are treated as ordinary operations.
_WITH_BODIES = CONTROL_FLOW | CALLS


@dataclass(frozen=True)
class Edge:
    """A tensor that passes from the vertex that computes it to one that uses it.

    `input_index` is its place among the inputs of the target. `dtype` is None at the boundary of a
    function, where it is not known. If `decides` is set, the tensor only decides which branch runs
    or how often a loop runs, and no derivative flows along the edge.
    """

    source: Vertex
    target: Vertex
    input_index: int
    dtype: tf.DType | None = None
    decides: bool = False


class Dataflow:
    """The dataflow of a graph: vertices are operations, and edges are tensors between them.

    Calls (`PartitionedCall`, `If`, `While`, ...) have no vertex. The operations of the called
    function stand in their place, once for each call, and ports stand for its arguments and
    results. Dependencies between single inputs and results of a call are therefore exact.

    `graph` is the graph of `graph_def` as TensorFlow traced it, which knows the lines of code that
    made it.
    """

    def __init__(self, graph_def: Any, graph: tf.Graph | None = None) -> None:
        # A weak reference, because a Dataflow may live as long as an operator.
        self._graph = None if graph is None else weakref.ref(graph)
        self.types: dict[Vertex, str] = {}
        self.names: dict[Vertex, str] = {}
        self.dtypes: dict[Vertex, tf.DType] = {}
        self.outgoing: dict[Vertex, list[Edge]] = defaultdict(list)
        self.incoming: dict[Vertex, list[Edge]] = defaultdict(list)
        self._functions = {f.signature.name: f for f in graph_def.library.function}
        # Operations with a gradient function of their own, those among them that come from
        # `tf.custom_gradient`, and for each operation the places of the outputs that are used.
        self._overridden: set[Vertex] = set()
        self.custom_gradients: set[Vertex] = set()
        self._used_outputs: dict[Vertex, set[int]] = defaultdict(set)
        self._add_nodes((), graph_def.node, {})

    def source_line(self, vertex: Vertex) -> str:
        """Return the line of the user's code that made an operation; empty if unknown."""
        graph = self._graph() if self._graph is not None else None
        if graph is None:
            return ""
        # The gradient of a function, loop or branch is a function of its own. The operation that it
        # differentiates is in another function, under a name contained in the gradient's name.
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
        # Calls, loops and branches have no vertex, but a port for each result.
        result = ((), name, "ret", int(index or 0))
        return result if result in self.incoming else ((), name)

    def reachable(
        self,
        starts: Iterable[Vertex],
        *,
        passes: Callable[[Edge], bool] = lambda edge: True,
        backward: bool = False,
    ) -> set[Vertex]:
        """Return the vertices that can be reached from `starts`, including these.

        Only edges for which `passes` is true are followed, `backward` from target to source.
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
        """Return the operations that use a result of `start`, through calls and identities.

        If `start` is a variable's handle, these are the operations that read or write the variable.
        """
        transparent = self.reachable([start], passes=lambda edge: self._is_transparent(edge.target))
        targets = {edge.target for vertex in transparent for edge in self.outgoing[vertex]}
        return targets - transparent

    def producers(self, target: Vertex) -> set[Vertex]:
        """Return the operations that compute inputs of `target`, through calls and identities."""
        transparent = self.reachable(
            [target], passes=lambda edge: self._is_transparent(edge.source), backward=True
        )
        sources = {edge.source for vertex in transparent for edge in self.incoming[vertex]}
        return sources - transparent

    def _is_transparent(self, vertex: Vertex) -> bool:
        return self.types.get(vertex, "Identity") == "Identity"

    def differentiable(self, edge: Edge) -> bool:
        """Return whether a derivative may flow along an edge.

        No derivative flows along integers, booleans and strings, nor along tensors that only
        decide. A `tf.custom_gradient`, like a recomputed function, ends in an `IdentityN` over its
        results and its arguments. The gradient of this operation goes from the results directly to
        the arguments, and does not depend on how the results were computed. Only the edges of the
        arguments are therefore differentiable. They are the inputs whose outputs are not used.
        """
        if edge.decides or (edge.dtype is not None and not _carries_derivatives(edge.dtype)):
            return False
        if edge.target in self._overridden:
            return edge.input_index not in self._used_outputs[edge.target]
        return True

    def _add_nodes(
        self, scope: tuple[str, ...], nodes: Iterable[Any], arguments: dict[str, Vertex]
    ) -> Callable[[str], tuple[Vertex, tf.DType | None]]:
        """Add the nodes of a graph or function.

        Return a function from the name of a tensor to the vertex that computes it and its type.
        """
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
            dtypes = output_dtypes(by_name[name])
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
            gradient = node.attr[GRADIENT_TYPE].s if GRADIENT_TYPE in node.attr else b""
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
        """Add a call, loop or branch: the functions it calls, and edges from and to their ports.

        A call connects its inputs with the function's arguments, and the function's results with
        its own. A branch does so for each of its functions. A loop has the edges::

            input i -> argument i of the condition and of the body
            result i of the body -> result i
            result i -> argument i of both         (the next iteration)
            input i -> result i                    (if no iteration runs)
            condition -> every result              (decides how many iterations run)
        """
        loop = node.op in LOOPS
        results = [(scope, node.name, "ret", index) for index in range(self._result_count(called))]
        for name in called:
            function = self._functions[name]
            inner = (*scope, f"{node.name}/{name}")
            names = [argument.name for argument in function.signature.input_arg]
            ports: dict[str, Vertex] = {arg: (inner, "", "arg", i) for i, arg in enumerate(names)}
            # The predicate of an `If`, or the index of a `Case`, comes before the function's
            # arguments. It decides about all results.
            skipped = len(inputs) - len(names)
            for source, dtype in inputs[:skipped]:
                for result in results:
                    self._connect(Edge(source, result, 0, dtype, decides=True))
            for (source, dtype), port in zip(inputs[skipped:], ports.values()):
                self._connect(Edge(source, port, 0, dtype))
            if loop:
                # The value of one iteration is the argument of the next. This closes a cycle, so
                # that a variable which enters the loop in one place reaches results in other
                # places after enough iterations.
                for result, port in zip(results, ports.values()):
                    self._connect(Edge(result, port, 0))
            producer = self._add_nodes(inner, function.node_def, ports)
            makers = [producer(function.ret[out.name]) for out in function.signature.output_arg]
            # The condition's only result is a boolean, which is not a result of the loop.
            if loop and name == node.attr["cond"].func.name:
                for result in results:
                    self._connect(Edge(makers[0][0], result, 0, decides=True))
                continue
            for (source, dtype), result in zip(makers, results):
                self._connect(Edge(source, result, 0, dtype))
        if loop:  # it may run no iteration, and then returns its inputs
            for (source, dtype), result in zip(inputs, results):
                self._connect(Edge(source, result, 0, dtype))

    def _called(self, node: Any) -> list[str]:
        """Return the names of the functions that a node calls with its inputs."""
        if node.op not in _WITH_BODIES:
            return []
        return [f.name for f in functions_of(node) if f.name in self._functions]

    def _result_count(self, called: list[str]) -> int:
        return max(len(self._functions[name].signature.output_arg) for name in called)

    def _connect(self, edge: Edge) -> None:
        self.outgoing[edge.source].append(edge)
        self.incoming[edge.target].append(edge)


def _carries_derivatives(dtype: tf.DType) -> bool:
    # Derivatives flow to variables through resources, and through lists of tensors as variants;
    # through text they would, if TensorFlow had them.
    return dtype.is_floating or dtype.is_complex or dtype in (tf.resource, tf.variant, tf.string)


def is_stateful(node: Any, functions: Mapping[str, Any]) -> bool:
    """Return whether running a node has a side effect, or depends on more than its inputs.

    `functions` are the bodies of calls, loops and branches, by name. A call is stateful if an
    operation in its body is; TensorFlow's definition of the operation decides if the body is
    unknown.
    """
    bodies = [functions[f.name] for f in functions_of(node) if f.name in functions]
    if bodies and node.op in _WITH_BODIES:
        return any(is_stateful(inner, functions) for body in bodies for inner in body.node_def)
    definition = op_def_registry.get(node.op)
    # TensorFlow counts `VariableShape` as stateful, but the shape of a variable does not change.
    return definition is not None and definition.is_stateful and node.op != "VariableShape"


def functions_of(node: Any) -> Iterator[Any]:
    """Yield the functions among a node's attributes."""
    if _may_take_functions(node.op):
        for value in node.attr.values():
            yield from [value.func] if value.HasField("func") else value.list.func


@functools.cache
def _may_take_functions(kind: str) -> bool:
    """Return whether an operation has functions among its attributes, or is unknown."""
    definition = op_def_registry.get(kind)
    return definition is None or any("func" in attr.type for attr in definition.attr)


def kept_whole(graph_def: Any) -> set[str]:
    """Return the names of the functions in a graph that keep their bodies and names.

    They are the recomputed ones, and those that they call.
    """
    functions = {f.signature.name: f for f in graph_def.library.function}
    kept: set[str] = set()
    queue = [name for name in functions if KEPT_WHOLE in name]
    while queue:
        name = queue.pop()
        if name in functions and name not in kept:
            kept.add(name)
            queue += [f.name for node in functions[name].node_def for f in functions_of(node)]
    return kept


def input_dtypes(node: Any) -> list[tf.DType]:
    """Return the types that a node takes, without its control inputs."""
    return [dtype for _, dtype in _typed(node, _arguments(node.op)[0])]


def _outputs(node: Any) -> list[tuple[str, tf.DType]]:
    """Return, for each output of a node, the name of its output argument and its type."""
    return _typed(node, _arguments(node.op)[1])


def _typed(node: Any, arguments: Sequence[_Argument]) -> list[tuple[str, tf.DType]]:
    typed: list[tuple[str, tf.DType]] = []
    for name, type_list, number, type_, type_attr in arguments:
        if type_list:
            types = list(node.attr[type_list].list.type)
        else:
            count = node.attr[number].i if number else 1
            types = [type_ or node.attr[type_attr].type] * count
        typed += [(name, tf.as_dtype(type_)) for type_ in types]
    return typed


@functools.cache
def _arguments(kind: str) -> tuple[list[_Argument], list[_Argument]]:
    """Return what determines the inputs, and the outputs, of an operation.

    For each argument this is its name, the names of the attributes with its list of types and with
    its number, its type itself, and the name of the attribute with its type.
    """
    definition = op_def_registry.get(kind)
    both = ((), ()) if definition is None else (definition.input_arg, definition.output_arg)
    inputs, outputs = (
        [(arg.name, arg.type_list_attr, arg.number_attr, arg.type, arg.type_attr) for arg in args]
        for args in both
    )
    return inputs, outputs


def output_offset(node: Any, output: str) -> int:
    """Return the place of the first output of an output argument.

    In functions, tensors are named `node:argument:index`, with the index within the argument.
    """
    names = [name for name, _ in _outputs(node)]
    return names.index(output) if output in names else 0


def output_dtypes(node: Any) -> list[tf.DType]:
    """Return the types of the results of a node."""
    return [dtype for _, dtype in _outputs(node)]


def layer_of(operation_name: str) -> str:
    """Return an operation's name without the prefixes that TensorFlow gives to gradients.

    >>> layer_of("gradient_tape/model/up/resize/ResizeBilinearGrad")
    'model/up/resize/ResizeBilinearGrad'
    >>> layer_of("while_grad/gradients/while/Softsign_grad/SoftsignGrad")
    'while/SoftsignGrad'
    """
    name = _IN_A_FUNCTION.sub(_beside, operation_name)
    return re.sub(rf"^({TAPE_PREFIX}|gradients?(_\d+)?/)+", "", name)


def _beside(match: re.Match[str]) -> str:
    scope, slash, _ = match[1].rpartition("/")
    return scope + slash + match[2]


def _outermost(vertex: Vertex) -> str:
    """Return the operation of the outermost graph that a vertex is, or is inside of."""
    scope, name = vertex[:2]
    return scope[0].rpartition("/")[0] if scope else name
