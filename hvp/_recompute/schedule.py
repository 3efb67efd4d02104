"""An order of operations in which few values are in memory at once.

TensorFlow runs every operation as soon as its inputs are available. In a derivative, many values
are then computed long before they are used: a term of a sum, for example, or a cotangent. They wait
in memory and multiply its use by two or three. `in_order` therefore lets operations wait for each
other. It also computes cheap values late, or a second time, so that they need not wait in memory
between their uses.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._graphs.parts import cut_out, data_inputs, nbytes, node_of

# Values of fewer bytes are not scheduled: they use little memory, and can run in parallel.
_SMALL = 2**16
# Entrywise operations, which are cheap next to a matrix product or convolution.
_ENTRYWISE = frozenset(
    """
    Abs Add AddN AddV2 Cast Cos Div DivNoNan Elu EluGrad Equal Erf Exp Greater GreaterEqual
    LeakyRelu LeakyReluGrad Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum
    Minimum Mul MulNoNan Neg NotEqual OnesLike RealDiv Reciprocal Relu Relu6 Relu6Grad ReluGrad
    Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softplus
    SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub Tanh TanhGrad
    ZerosLike
    """.split()
)
# A value is computed late only if more than this many large values are computed while it waits.
_WORTH_IT = 4
# Operations whose results share the memory of their first input.
_VIEWS = frozenset(["ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"])


def in_order(part: Any, inputs: dict[str, tf.TensorSpec], results: Sequence[str]) -> Any:
    """Compute large values one after another, in an order that needs little memory.

    Parameters
    ----------
    part : GraphDef
        A graph without effects.
    inputs : dict of str to tf.TensorSpec
        Its inputs by name, which stay in memory.
    results : sequence of str
        Its results, which stay in memory too.

    Returns
    -------
    GraphDef
        The same operations with control edges between them; some operations occur more than once.

    Notes
    -----
    The order is greedy: among the operations that are ready, the next is the one that increases the
    memory in use the least. An operation increases it by the size of its results, minus the size
    of the inputs that it is the last to use.
    """
    ordered = cut_out(part, {node.name for node in part.node}, keep_controls=True)
    sizes = _sizes(part, inputs)
    order = _order(ordered.node, sizes, set(results))
    order = _Rematerialization(ordered, order, sizes, set(results)).run()
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
    """Return the bytes of each operation's results."""
    with tf.Graph().as_default() as graph:
        used = {tensor for node in part.node for tensor in data_inputs(node)}
        placeholders = {
            name: tf.compat.v1.placeholder(spec.dtype, spec.shape)
            for name, spec in inputs.items()
            if name in used
        }
        tf.graph_util.import_graph_def(part, placeholders, name="part")
        operations = {n.name: graph.get_operation_by_name(f"part/{n.name}") for n in part.node}
        return {name: [nbytes(t) for t in op.outputs] for name, op in operations.items()}


def _order(nodes: Any, sizes: dict[str, list[int]], results: set[str]) -> list[str]:
    """Return the names of the operations in an order that needs little memory."""
    by_name = {node.name: node for node in nodes}
    buffers = {node.name: _buffers(node, by_name) for node in nodes}
    # How many operations still need a buffer.
    uses = Counter(buffer for inputs in buffers.values() for buffer in inputs)
    result_buffers = {_root(tensor, by_name) for tensor in results}
    # How many inputs of an operation have not been computed.
    missing = {n.name: len({node_of(t) for t in n.input if node_of(t) in by_name}) for n in nodes}
    consumers: dict[str, list[str]] = {name: [] for name in by_name}
    for node in nodes:
        for producer in {node_of(t) for t in node.input}:
            if producer in consumers:
                consumers[producer].append(node.name)
    place = {name: i for i, name in enumerate(by_name)}

    def growth(name: str) -> int:
        allocated = 0 if by_name[name].op in _VIEWS else sum(sizes[name])
        freed = [b for b in buffers[name] if uses[b] == 1 and b not in result_buffers]
        return allocated - sum(sizes[node_of(b)][int(b.rpartition(":")[2])] for b in freed)

    ready = [name for name, count in missing.items() if count == 0]
    order = []
    while ready:
        name = min(ready, key=lambda name: (growth(name), place[name]))
        ready.remove(name)
        order.append(name)
        uses.subtract(buffers[name])
        for consumer in consumers[name]:
            missing[consumer] -= 1
            if missing[consumer] == 0:
                ready.append(consumer)
    return order


@dataclass(frozen=True)
class _Wait:
    """A value that waits in memory although it could be computed when it is used.

    Attributes
    ----------
    name : str
        The operation that computes it.
    since, until : int
        Places in the order: where it is computed or was last used, and where it is used next.
    consumers : list of str
        The operations that use it, from `until` on.
    missing : frozenset of str
        Its inputs that are no longer in memory at `until`.
    """

    name: str
    since: int
    until: int
    consumers: list[str]
    missing: frozenset[str]


class _Rematerialization:
    """Computes values late, or a second time, instead of keeping them in memory.

    Parameters
    ----------
    part : GraphDef
        The graph, which is changed in place.
    order : list of str
        The order of its operations.
    sizes : dict of str to list of int
        Bytes of their results. The sizes of copies are added.
    results : set of str
        Names of the graph's results.
    """

    def __init__(
        self, part: Any, order: list[str], sizes: dict[str, list[int]], results: set[str]
    ) -> None:
        self._part = part
        self._sizes = sizes
        self._by_name = {node.name: node for node in part.node}
        self._result_buffers = {_root(tensor, self._by_name) for tensor in results}
        self._order = order
        self._place = {name: i for i, name in enumerate(order)}
        large = (sum(sizes[name]) >= _SMALL for name in order)
        self._large_before = list(itertools.accumulate(large))
        # The places in the order where each buffer is used.
        self._uses: dict[str, set[int]] = defaultdict(set)
        for name in order:
            for buffer in _buffers(self._by_name[name], self._by_name):
                self._uses[buffer].add(self._place[name])
        # Operations that are computed right before another one, and those that have moved there.
        self._before: dict[str, list[str]] = {}
        self._moved: set[str] = set()
        # From the buffer of an operation to the buffers of its copies, itself included.
        self._copies: dict[str, set[str]] = {}

    def run(self) -> list[str]:
        """Return the new order."""
        waits = [wait for name in self._order for wait in self._waits(name)]
        for wait in waits:
            if not wait.missing:
                self._compute_late(wait)
        # A value whose input is gone can be computed late if the input stays in memory longer. That
        # is worthwhile if several values are computed from this input: compare the bytes of all
        # values, times the places for which they need not wait, with those of the input.
        by_missing: dict[str, list[_Wait]] = {}
        for wait in waits:
            if len(wait.missing) == 1:
                by_missing.setdefault(next(iter(wait.missing)), []).append(wait)
        for buffer, group in by_missing.items():
            saved = sum(self._bytes(f"{w.name}:0") * (w.until - w.since) for w in group)
            longer = max(w.until for w in group) - self._last(buffer)
            if saved > self._bytes(buffer) * longer:
                for wait in group:
                    self._compute_late(wait)
        return [
            step
            for name in self._order
            for step in (*self._before.get(name, ()), *(() if name in self._moved else (name,)))
        ]

    def _waits(self, name: str) -> Iterator[_Wait]:
        """Yield the stretches of the order in which a cheap, large value waits to be used."""
        node, buffer = self._by_name[name], f"{name}:0"
        small = sum(self._sizes[name]) < _SMALL
        if small or node.op not in _ENTRYWISE or buffer in self._result_buffers:
            return
        consumers = [self._order[i] for i in sorted(self._uses[buffer])]
        if any(buffer not in _inputs(self._by_name[consumer]) for consumer in consumers):
            return  # there is a view of it
        since = self._place[name]
        for i, consumer in enumerate(consumers):
            until = self._place[consumer]
            if self._large_before[until - 1] - self._large_before[since] > _WORTH_IT:
                needs = _buffers(node, self._by_name) - self._result_buffers
                missing = [b for b in needs if self._last(b) < until and self._bytes(b) >= _SMALL]
                yield _Wait(name, since, until, consumers[i:], frozenset(missing))
            since = until

    def _compute_late(self, wait: _Wait) -> None:
        """Move an operation to the end of a wait, or add a copy of it there if it was used."""
        node, buffer = self._by_name[wait.name], f"{wait.name}:0"
        needs = _buffers(node, self._by_name)
        if wait.since == self._place[wait.name]:
            late = wait.name
            self._moved.add(late)
            for need in needs:
                self._uses[need].discard(wait.since)
        else:
            copy = self._part.node.add()
            copy.CopyFrom(node)
            copy.name = late = f"{wait.name}/again_{wait.until}"
            self._by_name[late], self._sizes[late] = copy, self._sizes[wait.name]
            earlier = self._copies.setdefault(buffer, {buffer})
            for consumer in wait.consumers:
                inputs = self._by_name[consumer].input
                for i, tensor in enumerate(inputs):
                    if _with_index(tensor) in earlier:
                        inputs[i] = f"{late}:0"
                self._uses[buffer].discard(self._place[consumer])
                self._uses[f"{late}:0"].add(self._place[consumer])
            earlier.add(f"{late}:0")
        self._before.setdefault(wait.consumers[0], []).append(late)
        for need in needs:
            self._uses[need].add(wait.until)

    def _last(self, buffer: str) -> int:
        return max(self._uses[buffer], default=-1)

    def _bytes(self, buffer: str) -> int:
        return self._sizes[node_of(buffer)][int(buffer.rpartition(":")[2])]


def _inputs(node: Any) -> list[str]:
    return [_with_index(tensor) for tensor in data_inputs(node)]


def _with_index(tensor: str) -> str:
    return tensor if ":" in tensor else f"{tensor}:0"


def _buffers(node: Any, by_name: dict[str, Any]) -> set[str]:
    """Return the buffers of the graph that an operation reads, directly or through views."""
    roots = {_root(tensor, by_name) for tensor in data_inputs(node)}
    return {root for root in roots if node_of(root) in by_name}


def _root(tensor: str, by_name: dict[str, Any]) -> str:
    """Return the tensor that a view shares its memory with."""
    while (node := by_name.get(node_of(tensor))) is not None and node.op in _VIEWS:
        tensor = data_inputs(node)[0]
    return _with_index(tensor)
