"""An order of operations in which few values are alive at once.

TensorFlow runs whatever is ready. In a derivative that is much that will be needed late only: half
of a sum, or a cotangent far ahead of what is to be made with it. Such values wait in memory, two
or three for each that is needed. And what is needed early and late, and takes no time to compute
from what is in memory anyway, need not wait there in between.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._graphs.parts import cut_out, data_inputs, nbytes, node_of

# Smaller values are let alone: they cost no memory, and run side by side.
_SMALL = 2**16
# Computed entry by entry: in little time, next to a matrix product or convolution.
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
# A value that waits while fewer than so many others are made may as well wait.
_WORTH_IT = 4
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
        The same operations, which wait for each other; some more than once.
    """
    ordered = cut_out(part, {node.name for node in part.node}, keep_controls=True)
    sizes = _sizes(part, inputs)
    order = _order(ordered.node, sizes, set(wanted))
    order = _Remaking(ordered, order, sizes, set(wanted)).run()
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


@dataclass(frozen=True)
class _Wait:
    """A value that waits in memory, and could be computed when it is needed.

    Attributes
    ----------
    name : str
        Its operation.
    since, until : int
        Places in the order: where it is made or used before, and where it is used again.
    takers : list of str
        The operations that use it again, from there on.
    missing : frozenset of str
        Buffers it is computed from that are gone by then.
    """

    name: str
    since: int
    until: int
    takers: list[str]
    missing: frozenset[str]


class _Remaking:
    """Computes values late, or a second time, that would wait in memory.

    Parameters
    ----------
    part : GraphDef
        Changed in place.
    order : list of str
        The order of its operations.
    sizes : dict of str to list of int
        Of their results; those of copies are added.
    wanted : set of str
        Its results.
    """

    def __init__(
        self, part: Any, order: list[str], sizes: dict[str, list[int]], wanted: set[str]
    ) -> None:
        self._part = part
        self._sizes = sizes
        self._by_name = {node.name: node for node in part.node}
        self._kept = {_root(tensor, self._by_name) for tensor in wanted}
        self._order = order
        self._place = {name: i for i, name in enumerate(order)}
        large = (sum(sizes[name]) >= _SMALL for name in order)
        self._large_before = list(itertools.accumulate(large))
        # Where each buffer is used.
        self._uses: dict[str, set[int]] = defaultdict(set)
        for name in order:
            for buffer in _buffers(self._by_name[name], self._by_name):
                self._uses[buffer].add(self._place[name])
        self._before: dict[str, list[str]] = {}
        self._moved: set[str] = set()
        # What the buffers of an operation and of its copies are called.
        self._copies: dict[str, set[str]] = {}

    def run(self) -> list[str]:
        """Return the new order."""
        waits = [wait for name in self._order for wait in self._waits(name)]
        for wait in waits:
            if not wait.missing:
                self._compute_late(wait)
        # One that is gone may be kept instead of several that are made of it.
        by_missing: dict[str, list[_Wait]] = {}
        for wait in waits:
            if len(wait.missing) == 1:
                by_missing.setdefault(next(iter(wait.missing)), []).append(wait)
        for buffer, group in by_missing.items():
            gained = sum(self._bytes(f"{w.name}:0") * (w.until - w.since) for w in group)
            longer = max(w.until for w in group) - self._last(buffer)
            if gained > self._bytes(buffer) * longer:
                for wait in group:
                    self._compute_late(wait)
        return [
            step
            for name in self._order
            for step in (*self._before.get(name, ()), *(() if name in self._moved else (name,)))
        ]

    def _waits(self, name: str) -> Iterator[_Wait]:
        node, buffer = self._by_name[name], f"{name}:0"
        small = sum(self._sizes[name]) < _SMALL
        if small or node.op not in _ENTRYWISE or buffer in self._kept:
            return
        takers = [self._order[i] for i in sorted(self._uses[buffer])]
        if any(buffer not in _inputs(self._by_name[taker]) for taker in takers):
            return  # something is a view of it
        since = self._place[name]
        for i, taker in enumerate(takers):
            until = self._place[taker]
            if self._large_before[until - 1] - self._large_before[since] > _WORTH_IT:
                needs = _buffers(node, self._by_name)
                missing = [
                    b
                    for b in needs
                    if b not in self._kept and self._last(b) < until and self._bytes(b) >= _SMALL
                ]
                yield _Wait(name, since, until, takers[i:], frozenset(missing))
            since = until

    def _compute_late(self, wait: _Wait) -> None:
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
            for taker in wait.takers:
                inputs = self._by_name[taker].input
                for i, tensor in enumerate(inputs):
                    if _with_index(tensor) in earlier:
                        inputs[i] = f"{late}:0"
                self._uses[buffer].discard(self._place[taker])
                self._uses[f"{late}:0"].add(self._place[taker])
            earlier.add(f"{late}:0")
        self._before.setdefault(wait.takers[0], []).append(late)
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
    """Return the buffers in the graph that an operation reads, whatever they are called."""
    roots = {_root(tensor, by_name) for tensor in data_inputs(node)}
    return {root for root in roots if node_of(root) in by_name}


def _root(tensor: str, by_name: dict[str, Any]) -> str:
    while (node := by_name.get(node_of(tensor))) is not None and node.op in _VIEWS:
        tensor = data_inputs(node)[0]
    return _with_index(tensor)
