"""An order of operations in which few values are alive at once.

TensorFlow runs whatever is ready. In a derivative that is much that will be needed late only: half
of a sum, or a cotangent far ahead of what is to be made with it. Such values wait in memory, two
or three for each that is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._linearize.graph_parts import cut_out, data_inputs, node_of

# Smaller values are let alone: they cost no memory, and run side by side.
_SMALL = 2**16
# Taken for the size of an axis whose size is not known.
_UNKNOWN = 32
# Their results share the memory of their first input.
_VIEWS = frozenset(["ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"])


def in_order(part: Any, inputs: dict[str, tf.TensorSpec], wanted: Sequence[str]) -> Any:
    """Let large values be computed one after another, each when it adds least to what is alive.

    Parameters
    ----------
    part : GraphDef
        A graph without effects.
    inputs : dict of str to tf.TensorSpec
        Its inputs, by name; they stay alive.
    wanted : sequence of str
        Its results; they stay alive too.

    Returns
    -------
    GraphDef
        The same operations, which wait for each other.
    """
    ordered = cut_out(part, {node.name for node in part.node}, keep_controls=True)
    sizes = _sizes(part, inputs)
    order = _order(ordered.node, sizes, set(wanted))
    by_name = {node.name: node for node in ordered.node}
    before = None
    for name in order:
        if sum(sizes[name]) < _SMALL:
            continue
        node = by_name[name]
        if before is not None and f"^{before}" not in node.input:
            node.input.append(f"^{before}")
        before = name
    return ordered


def _sizes(part: Any, inputs: dict[str, tf.TensorSpec]) -> dict[str, list[int]]:
    """Find the bytes of each operation's results."""
    with tf.Graph().as_default() as graph:
        taken = {tensor for node in part.node for tensor in data_inputs(node)}
        given = {
            name: tf.compat.v1.placeholder(spec.dtype, spec.shape)
            for name, spec in inputs.items()
            if name in taken
        }
        tf.graph_util.import_graph_def(part, given, name="part")
        operations = {n.name: graph.get_operation_by_name(f"part/{n.name}") for n in part.node}
        return {name: [nbytes(t) for t in op.outputs] for name, op in operations.items()}


def nbytes(tensor: Any) -> int:
    """Return the bytes of a tensor; an unknown size counts as if it were small."""
    shape, dtype = tf.TensorShape(tensor.shape), tf.as_dtype(tensor.dtype)
    if shape.rank is None or not dtype.size:
        return 0
    total = dtype.size
    for size in shape:
        total *= _UNKNOWN if size is None else size
    return int(total)


def _order(nodes: Any, sizes: dict[str, list[int]], wanted: set[str]) -> list[str]:
    by_name = {node.name: node for node in nodes}
    buffers = {node.name: _buffers(node, by_name) for node in nodes}
    # How many operations still need a buffer.
    uses = Counter(buffer for taken in buffers.values() for buffer in taken)
    kept = {_root(tensor, by_name) for tensor in wanted}
    missing = {n.name: len({node_of(t) for t in n.input if node_of(t) in by_name}) for n in nodes}
    takers: dict[str, list[str]] = {name: [] for name in by_name}
    for node in nodes:
        for maker in {node_of(t) for t in node.input}:
            if maker in takers:
                takers[maker].append(node.name)
    place = {name: i for i, name in enumerate(by_name)}

    def growth(name: str) -> int:
        made = 0 if by_name[name].op in _VIEWS else sum(sizes[name])
        freed = [b for b in buffers[name] if uses[b] == 1 and b not in kept]
        return made - sum(sizes[node_of(b)][int(b.rpartition(":")[2])] for b in freed)

    ready = [name for name, count in missing.items() if count == 0]
    order = []
    while ready:
        name = min(ready, key=lambda name: (growth(name), place[name]))
        ready.remove(name)
        order.append(name)
        uses.subtract(buffers[name])
        for taker in takers[name]:
            missing[taker] -= 1
            if missing[taker] == 0:
                ready.append(taker)
    return order


def _buffers(node: Any, by_name: dict[str, Any]) -> set[str]:
    """Return the buffers in the graph that an operation reads, whatever they are called."""
    roots = {_root(tensor, by_name) for tensor in data_inputs(node)}
    return {root for root in roots if node_of(root) in by_name}


def _root(tensor: str, by_name: dict[str, Any]) -> str:
    while (node := by_name.get(node_of(tensor))) is not None and node.op in _VIEWS:
        tensor = data_inputs(node)[0]
    return tensor if ":" in tensor else f"{tensor}:0"
