"""A program as a value: its operations, how they depend on each other, and parts of them."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvp._graphs.dataflow import functions_of

# From the name of an operation to the bytes of each of its results.
Sizes = dict[str, list[int]]

# Attributes that differ between processes although the operation is the same. Those that begin with
# an underscore do so as well, and do not belong to the operation.
_OF_THE_PROCESS = {"config", "config_proto", "container", "debug_name", "shared_name"}


class TensorName(NamedTuple):
    """A tensor as an output of an operation: its operation and its place."""

    node: str
    place: int

    @classmethod
    def of(cls, tensor: str) -> TensorName:
        """Parse the name of a tensor, `node:index`, whose index may be missing."""
        node, _, index = tensor.lstrip("^").partition(":")
        return cls(node, int(index or 0))

    def __str__(self) -> str:
        return f"{self.node}:{self.place}"


def node_of(tensor: str) -> str:
    """Return the name of the node that computes a tensor, or that a control input names."""
    return tensor.lstrip("^").partition(":")[0]


def with_index(tensor: str) -> str:
    """Return the full name of a tensor, with the index that the first result may lack."""
    return tensor if ":" in tensor else f"{tensor}:0"


def data_inputs(node: Any) -> list[str]:
    """Return a node's inputs without its control inputs."""
    return [tensor for tensor in node.input if not tensor.startswith("^")]


class Graph:
    """The operations of a program, and the functions that they call.

    Methods that change a graph return another one. Tensors are given by their names, `node:index`.
    `sizes` are the bytes of the operations' results, and of the inputs of the program.
    """

    def __init__(self, graph_def: Any, sizes: Sizes | None = None) -> None:
        self.graph_def = graph_def
        self.sizes: Sizes = {} if sizes is None else sizes

    @functools.cached_property
    def nodes(self) -> dict[str, Any]:
        """The operations by name."""
        return {node.name: node for node in self.graph_def.node}

    @functools.cached_property
    def functions(self) -> dict[str, Any]:
        """The functions that loops, branches and calls refer to, by name."""
        return {function.signature.name: function for function in self.graph_def.library.function}

    @property
    def all_nodes(self) -> Iterator[Any]:
        """The operations, and those of all functions."""
        yield from self.graph_def.node
        for function in self.graph_def.library.function:
            yield from function.node_def

    @functools.cached_property
    def consumers(self) -> dict[str, list[tuple[Any, int]]]:
        """For each tensor, the operations that take it, with its place among their inputs."""
        consumers: dict[str, list[tuple[Any, int]]] = defaultdict(list)
        for node in self.graph_def.node:
            for place, tensor in enumerate(data_inputs(node)):
                consumers[with_index(tensor)].append((node, place))
        return consumers

    def ancestors(
        self,
        tensors: Iterable[str],
        inside: Callable[[str], bool] = lambda name: True,
        *,
        controls: bool = False,
    ) -> set[str]:
        """Return the operations that tensors depend on, as far as `inside` is true of them."""
        needed: set[str] = set()
        queue = [node_of(tensor) for tensor in tensors]
        while queue:
            name = queue.pop()
            if name in needed or not inside(name):
                continue
            needed.add(name)
            node = self.nodes[name]
            queue += map(node_of, node.input if controls else data_inputs(node))
        return needed

    def descendants(self, starts: Iterable[str]) -> set[str]:
        """Return the operations that depend on some operations, including these."""
        users: dict[str, set[str]] = defaultdict(set)
        for tensor, consumers in self.consumers.items():
            users[node_of(tensor)].update(node.name for node, _ in consumers)
        found: set[str] = set()
        queue = list(starts)
        while queue:
            name = queue.pop()
            if name not in found:
                found.add(name)
                queue += users.get(name, ())
        return found

    def part(self, names: Container[str], *, keep_controls: bool = False) -> Graph:
        """Return the graph of some operations, with the functions that they call.

        `keep_controls` keeps control edges between them.
        """
        part = tf.compat.v1.GraphDef(versions=self.graph_def.versions)
        for node in self.graph_def.node:
            if node.name not in names:
                continue
            copy = part.node.add()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(
                tensor
                for tensor in node.input
                if not tensor.startswith("^") or (keep_controls and self._waits(names, tensor))
            )
        called: dict[str, None] = {}
        queue = list(part.node)
        while queue:
            for function in functions_of(queue.pop()):
                if function.name in self.functions and function.name not in called:
                    called[function.name] = None
                    queue += self.functions[function.name].node_def
        part.library.function.extend(self.functions[name] for name in called)
        return Graph(part, dict(self.sizes))

    def computing(self, results: Iterable[str], known: Iterable[str] = ()) -> Graph:
        """Return the graph of what some tensors depend on, starting from those that are known."""
        starts = {*map(node_of, known)}
        return self.part(self.ancestors(results, lambda name: name not in starts))

    def without_unused(self, results: Iterable[str]) -> Graph:
        """Return the graph without operations that no result depends on."""
        needed = self.ancestors(results, self.nodes.__contains__, controls=True)
        return self.part(needed, keep_controls=True)

    def copy(self) -> Graph:
        """Return a graph of the same operations."""
        return self.part(self.nodes, keep_controls=True)

    def imported(
        self, known: dict[str, tf.Tensor], results: Sequence[str], *, scope: str = ""
    ) -> list[tf.Tensor]:
        """Add the operations to the graph being traced, and return some tensors.

        `known` are the inputs by name, which may be among the results. The names of the operations
        begin with `scope`.
        """
        used = {with_index(tensor) for node in self.graph_def.node for tensor in node.input}
        traced = tf.compat.v1.get_default_graph()
        inputs = {name: traced.capture(t) for name, t in known.items() if name in used}
        computed = [name for name in results if name not in known]
        tensors = tf.graph_util.import_graph_def(self.graph_def, inputs, computed, name=scope)
        values = {**known, **dict(zip(computed, tensors))}
        return [values[name] for name in results]

    def key(self, inputs: Sequence[str], results: Sequence[str]) -> tuple[Any, ...]:
        """Return a key that is equal for graphs that differ only in the names of their tensors."""
        names = {node_of(tensor): f"input_{i}" for i, tensor in enumerate(inputs)}
        names.update({node.name: f"node_{i}" for i, node in enumerate(self.graph_def.node)})

        def renamed(tensor: str) -> str:
            node, index = TensorName.of(tensor)
            wait = "^" if tensor.startswith("^") else ""
            return f"{wait}{names.get(node, tensor)}:{index}"

        copy = type(self.graph_def)()
        copy.CopyFrom(self.graph_def)
        for node in copy.node:
            node.name = names[node.name]
            for i, tensor in enumerate(node.input):
                node.input[i] = renamed(tensor)
        return copy.SerializeToString(deterministic=True), tuple(map(renamed, results))

    def _waits(self, names: Container[str], control: str) -> bool:
        # Nested loops wait for placeholders of variables, in whose place tensors are imported.
        name = node_of(control)
        return name in names and self.nodes[name].op != "Placeholder"


def in_topological_order(nodes: dict[str, Any]) -> list[Any]:
    """Return nodes in topological order, by inputs and control inputs."""
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
            makers = (node_of(tensor) for tensor in nodes[name].input)
            stack += [(maker, False) for maker in makers if maker in nodes and maker not in done]
    return ordered


def digest_of_graph(graph_def: Any) -> str:
    """Return a hash of the operations of a graph, with their attributes, constants and inputs.

    Names are left out, because they depend on what the process has traced before.
    """
    functions = Graph(graph_def).functions
    known: dict[str, bytes] = {}

    def of_function(name: str) -> bytes:
        if name not in known:
            known[name] = b""  # for a function that calls itself
            function = functions.get(name)
            if function is None:
                return b"unknown"
            arguments = [argument.name for argument in function.signature.input_arg]
            results = [function.ret[one.name] for one in function.signature.output_arg]
            known[name] = _digest_of_nodes(function.node_def, of_function, arguments, results)
        return known[name]

    return _digest_of_nodes(graph_def.node, of_function).hex()


def _digest_of_nodes(
    node_defs: Iterable[Any],
    of_function: Callable[[str], bytes],
    arguments: Sequence[str] = (),
    results: Sequence[str] = (),
) -> bytes:
    """Return a hash of nodes, and of the order of a function's results.

    The hash of a node includes those of its inputs. Placeholders and the arguments of a function
    are hashed by their order.
    """
    nodes = {node.name: node for node in node_defs}
    known = {name: b"%d" % place for place, name in enumerate(arguments)}

    def of_tensor(tensor: str) -> bytes:
        name, _, output = tensor.partition(":")
        # Only loops of the first kind of control flow have inputs that come later.
        return known.get(name, b"later") + (output or "0").encode()

    placeholders = [name for name, node in nodes.items() if node.op == "Placeholder"]
    places = {name: place for place, name in enumerate(placeholders)}
    for node in in_topological_order(nodes):
        attributes = [
            key.encode() + _digest_of_attribute(value, of_function)
            for key, value in sorted(node.attr.items())
            if not key.startswith("_") and key not in _OF_THE_PROCESS
        ]
        place = b"%d" % places.get(node.name, 0)
        inputs = map(of_tensor, data_inputs(node))
        known[node.name] = _hash([node.op.encode(), place, *attributes, b"from", *inputs])
    return _hash([*sorted(known[name] for name in nodes), b"to", *map(of_tensor, results)])


def _digest_of_attribute(value: Any, of_function: Callable[[str], bytes]) -> bytes:
    called = [value.func] if value.HasField("func") else value.list.func
    if called:
        return _hash([of_function(function.name) for function in called])
    return _hash([value.SerializeToString(deterministic=True)])


def _hash(parts: Iterable[bytes]) -> bytes:
    # The length of each part is hashed as well, so that no two lists have the same bytes.
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(b"%d " % len(part))
        whole.update(part)
    return whole.digest()
