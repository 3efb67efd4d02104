"""Parts of a graph: which nodes make some tensors, cutting them out, importing them elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import functions_of

# Taken for the size of an axis whose size is not known.
_UNKNOWN = 32


def node_of(tensor: str) -> str:
    """Return the name of the node that makes a tensor, or that a control input waits for."""
    return tensor.lstrip("^").partition(":")[0]


def data_inputs(node: Any) -> list[str]:
    """Return a node's inputs without those that it only waits for."""
    return [tensor for tensor in node.input if not tensor.startswith("^")]


def ancestors(
    nodes: dict[str, Any],
    tensors: Iterable[str],
    inside: Callable[[str], bool] = lambda name: True,
    *,
    controls: bool = False,
) -> set[str]:
    """Return the nodes that are needed to make some tensors.

    Parameters
    ----------
    nodes : dict
        All nodes, by name.
    tensors : iterable of str
        What is wanted.
    inside : callable, optional
        Which nodes to go to; all by default.
    controls : bool, optional
        Whether to count nodes that are only waited for.
    """
    found: set[str] = set()
    queue = [node_of(tensor) for tensor in tensors]
    while queue:
        name = queue.pop()
        if name in found or not inside(name):
            continue
        found.add(name)
        inputs = nodes[name].input if controls else data_inputs(nodes[name])
        queue += [node_of(tensor) for tensor in inputs]
    return found


def cut_out(graph_def: Any, names: set[str], *, keep_controls: bool) -> Any:
    """Return a GraphDef of the named nodes, and of the functions they call.

    Parameters
    ----------
    graph_def : GraphDef
        The whole.
    names : set of str
        The nodes.
    keep_controls : bool
        Whether they wait for each other as they did.
    """
    part = tf.compat.v1.GraphDef(versions=graph_def.versions)
    for node in graph_def.node:
        if node.name in names:
            copy = part.node.add()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(
                tensor
                for tensor in node.input
                if not tensor.startswith("^") or (keep_controls and node_of(tensor) in names)
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


def import_part(part: Any, known: dict[str, tf.Tensor], wanted: Sequence[str]) -> list[tf.Tensor]:
    """Import a part into the graph being traced, given some of its tensors; return the wanted."""
    taken = {
        tensor if ":" in tensor else f"{tensor}:0" for node in part.node for tensor in node.input
    }
    # An identity brings here what belongs to a graph further out.
    inputs = {name: tf.identity(tensor) for name, tensor in known.items() if name in taken}
    made = [name for name in wanted if name not in known]
    tensors = tf.graph_util.import_graph_def(part, inputs, made, name="")
    found = {**known, **dict(zip(made, tensors))}
    return [found[name] for name in wanted]


def without_names(part: Any, inputs: Sequence[str], wanted: Sequence[str]) -> tuple[Any, ...]:
    """Return what is the same for parts that differ in the names of their tensors only."""
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
    return copy.SerializeToString(deterministic=True), tuple(map(renamed, wanted))


def nbytes(tensor: Any) -> int:
    """Return the bytes of a tensor; an unknown size counts as if it were small."""
    shape, dtype = tf.TensorShape(tensor.shape), tf.as_dtype(tensor.dtype)
    if shape.rank is None or not dtype.size:
        return 0
    total = dtype.size
    for size in shape:
        total *= _UNKNOWN if size is None else size
    return int(total)


def digest_of_graph(graph_def: Any) -> str:
    """Return a short text that is another for other operations or constants.

    Names are left out, which number what was traced before in the same process.
    """
    found = []
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            value = node.attr["value"].tensor.SerializeToString() if node.op == "Const" else b""
            found.append(node.op.encode() + hashlib.blake2b(value, digest_size=16).digest())
    return hashlib.blake2b(b"".join(sorted(found)), digest_size=16).hexdigest()
