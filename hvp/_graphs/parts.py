"""Parts of a graph: finding the nodes that compute tensors, cutting them out, importing them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import functions_of

# Stands for the size of an axis whose size is not known.
_UNKNOWN_SIZE = 32


def node_of(tensor: str) -> str:
    """Return the name of the node that computes a tensor, or of a control input's node."""
    return tensor.lstrip("^").partition(":")[0]


def with_index(tensor: str) -> str:
    """Return the full name of a tensor, with the index that the first result may lack."""
    return tensor if ":" in tensor else f"{tensor}:0"


def data_inputs(node: Any) -> list[str]:
    """Return a node's inputs without its control inputs."""
    return [tensor for tensor in node.input if not tensor.startswith("^")]


def ancestors(
    nodes: dict[str, Any],
    tensors: Iterable[str],
    inside: Callable[[str], bool] = lambda name: True,
    *,
    controls: bool = False,
) -> set[str]:
    """Return the names of the nodes that are needed to compute tensors.

    Parameters
    ----------
    nodes : dict
        All nodes, by name.
    tensors : iterable of str
        Names of the tensors.
    inside : callable, optional
        Whether to visit a node; by default all are visited.
    controls : bool, optional
        Whether to follow control inputs.
    """
    needed: set[str] = set()
    queue = [node_of(tensor) for tensor in tensors]
    while queue:
        name = queue.pop()
        if name in needed or not inside(name):
            continue
        needed.add(name)
        inputs = nodes[name].input if controls else data_inputs(nodes[name])
        queue += [node_of(tensor) for tensor in inputs]
    return needed


def cut_out(graph_def: Any, names: set[str], *, keep_controls: bool) -> Any:
    """Return a GraphDef with the named nodes and the functions that they call.

    Parameters
    ----------
    graph_def : GraphDef
        The whole graph.
    names : set of str
        Names of the nodes.
    keep_controls : bool
        Whether to keep the control edges between them.
    """
    part = tf.compat.v1.GraphDef(versions=graph_def.versions)
    # Nested loops wait for placeholders of variables, in whose place tensors are imported.
    fed = {node.name for node in graph_def.node if node.op == "Placeholder"}
    waits_for = names - fed if keep_controls else set()
    for node in graph_def.node:
        if node.name in names:
            copy = part.node.add()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(
                tensor
                for tensor in node.input
                if not tensor.startswith("^") or node_of(tensor) in waits_for
            )
    functions = {f.signature.name: f for f in graph_def.library.function}
    called: dict[str, None] = {}
    queue = list(part.node)
    while queue:
        for function in functions_of(queue.pop()):
            if function.name in functions and function.name not in called:
                called[function.name] = None
                queue += functions[function.name].node_def
    part.library.function.extend(functions[name] for name in called)
    return part


def without_unused(part: Any, results: Sequence[str]) -> Any:
    """Return a graph without operations that no result depends on."""
    nodes = {node.name: node for node in part.node}
    needed = ancestors(nodes, results, nodes.__contains__, controls=True)
    return cut_out(part, needed, keep_controls=True)


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


def import_part(
    part: Any, known: dict[str, tf.Tensor], results: Sequence[str], *, scope: str = ""
) -> list[tf.Tensor]:
    """Import a part of a graph into the graph being traced.

    Parameters
    ----------
    part : GraphDef
        The part.
    known : dict of str to tf.Tensor
        Its inputs, by name.
    results : sequence of str
        Names of the tensors to return. They may be inputs.
    scope : str, optional
        What the names of the operations begin with in the graph being traced.

    Returns
    -------
    list of tf.Tensor
    """
    used = {with_index(tensor) for node in part.node for tensor in node.input}
    graph = tf.compat.v1.get_default_graph()

    def captured(tensor: tf.Tensor) -> tf.Tensor:
        inside = tf.is_symbolic_tensor(tensor) and tensor.graph is graph
        return tensor if inside else tf.identity(tensor)

    inputs = {name: captured(tensor) for name, tensor in known.items() if name in used}
    computed = [name for name in results if name not in known]
    tensors = tf.graph_util.import_graph_def(part, inputs, computed, name=scope)
    values = {**known, **dict(zip(computed, tensors))}
    return [values[name] for name in results]


def without_names(part: Any, inputs: Sequence[str], results: Sequence[str]) -> tuple[Any, ...]:
    """Return a key that is equal for parts which differ in the names of their tensors only."""
    names = {node_of(tensor): f"input_{i}" for i, tensor in enumerate(inputs)}
    names.update({node.name: f"node_{i}" for i, node in enumerate(part.node)})

    def renamed(tensor: str) -> str:
        wait = "^" if tensor.startswith("^") else ""
        return f"{wait}{names.get(node_of(tensor), tensor)}:{tensor.partition(':')[2] or 0}"

    copy = type(part)()
    copy.CopyFrom(part)
    for node in copy.node:
        node.name = names[node.name]
        for i, tensor in enumerate(node.input):
            node.input[i] = renamed(tensor)
    return copy.SerializeToString(deterministic=True), tuple(map(renamed, results))


def nbytes(tensor: Any) -> int:
    """Return the bytes of a tensor. Axes of unknown size count as small."""
    shape, dtype = tf.TensorShape(tensor.shape), tf.as_dtype(tensor.dtype)
    if shape.rank is None or not dtype.size:
        return 0
    total = dtype.size
    for size in shape:
        total *= _UNKNOWN_SIZE if size is None else size
    return int(total)


def digest_of_graph(graph_def: Any) -> str:
    """Return a hash of the operations and constants of a graph.

    Names do not enter, because they depend on what the process has traced before.
    """
    digests = []
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            value = node.attr["value"].tensor.SerializeToString() if node.op == "Const" else b""
            digests.append(node.op.encode() + hashlib.blake2b(value, digest_size=16).digest())
    return hashlib.blake2b(b"".join(sorted(digests)), digest_size=16).hexdigest()
