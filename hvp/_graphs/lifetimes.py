"""When the values of a graph are in memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from hvp._graphs.graph import Sizes, data_inputs, node_of, with_index
from hvp._graphs.sizes import ENTRYWISE, VIEWS, size_of


class Lifetimes:
    """Which operation of a graph allocates how much memory, and which ones use it.

    A *buffer* is the memory of a tensor and of all views of it, named after the tensor. Inputs of
    the graph are in memory in any case, and have no buffer here. The `results` stay in memory once
    they are computed.

    Attributes
    ----------
    names
        The operations, in the given order.
    producers, consumers
        For each operation, those that run before it, and those that run after it.
    buffers
        For each operation, the buffers that it reads.
    users
        For each buffer, the operations that read it.
    allocated
        For each operation, the bytes of its results, zero for views.
    kept
        The buffers of results.
    """

    def __init__(self, nodes: Iterable[Any], sizes: Sizes, results: Iterable[str]) -> None:
        by_name = {node.name: node for node in nodes}
        self._sizes = sizes
        self._entrywise = {name for name, node in by_name.items() if node.op in ENTRYWISE}
        self.names = list(by_name)
        self.buffers = {name: buffers_of(node, by_name) for name, node in by_name.items()}
        self.kept = {root_of(tensor, by_name) for tensor in results}
        self.allocated = {
            name: 0 if node.op in VIEWS else sum(sizes[name]) for name, node in by_name.items()
        }
        self.producers = {
            name: {node_of(tensor) for tensor in node.input} & by_name.keys()
            for name, node in by_name.items()
        }
        self.consumers: dict[str, set[str]] = {name: set() for name in by_name}
        self.users: dict[str, set[str]] = defaultdict(set)
        for name in by_name:
            for producer in self.producers[name]:
                self.consumers[producer].add(name)
            for buffer in self.buffers[name]:
                self.users[buffer].add(name)

    def size(self, buffer: str) -> int:
        """Return the bytes of a buffer."""
        return size_of(buffer, self._sizes)

    def peak(self, order: Sequence[str]) -> int:
        """Return the peak of memory in use, in bytes, if operations run in an order."""
        uses = Counter({buffer: len(users) for buffer, users in self.users.items()})
        now = peak = 0
        for name in order:
            uses.subtract(self.buffers[name])
            last = (b for b in self.buffers[name] if not uses[b] and b not in self.kept)
            freed, allocated = sum(map(self.size, last)), self.allocated[name]
            # An entrywise operation writes its result over an input that it is the last to use.
            over = min(freed, allocated) if name in self._entrywise else 0
            peak = max(peak, now + allocated - over)
            now += allocated - freed
        return peak


def buffers_of(node: Any, by_name: dict[str, Any]) -> set[str]:
    """Return the buffers of the graph that an operation reads, directly or through views."""
    roots = {root_of(tensor, by_name) for tensor in data_inputs(node)}
    return {root for root in roots if node_of(root) in by_name}


def root_of(tensor: str, by_name: dict[str, Any]) -> str:
    """Return the tensor whose memory a view shares."""
    while (node := by_name.get(node_of(tensor))) is not None and node.op in VIEWS:
        tensor = data_inputs(node)[0]
    return with_index(tensor)
