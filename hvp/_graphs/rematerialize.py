"""Computing cheap values late, or a second time, so that they need not wait in memory."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvp._graphs.graph import Graph, Sizes, data_inputs, node_of, with_index
from hvp._graphs.lifetimes import buffers_of, root_of
from hvp._graphs.sizes import ENTRYWISE, VIEWS, is_small, size_of

# A value is computed late only if more than this many large values are computed while it waits.
_WORTH_IT = 4


@dataclass(frozen=True)
class _Wait:
    """A value that waits in memory although it could be computed when it is used.

    `name` is the operation that computes it. It waits from the place `since` in the order, where it
    is computed or was last used, to the place `until`, where it is used next. `consumers` are the
    operations that use it from there on, and `missing` are its inputs that are no longer in memory.
    """

    name: str
    since: int
    until: int
    consumers: list[str]
    missing: frozenset[str]


class Rematerialization:
    """Computes values late, or a second time, instead of keeping them in memory.

    The graph `part` is changed in place, and the sizes of copies are added to `sizes`. `order` is
    the order of the operations, and `results` are names of tensors. `twice` are the types of
    entrywise operations that may be computed a second time.
    """

    def __init__(
        self,
        part: Any,
        order: list[str],
        sizes: Sizes,
        results: set[str],
        twice: frozenset[str],
    ) -> None:
        self._part, self._twice = part, twice
        self._sizes = sizes
        self._by_name = Graph(part).nodes
        self._result_buffers = {root_of(tensor, self._by_name) for tensor in results}
        self._order = order
        self._place = {name: i for i, name in enumerate(order)}
        large = (not is_small(sum(sizes[name])) for name in order)
        self._large_before = list(itertools.accumulate(large))
        # The places in the order where each buffer is used.
        self._uses: dict[str, set[int]] = defaultdict(set)
        for name in filter(self._is_no_view, order):
            for buffer in buffers_of(self._by_name[name], self._by_name):
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
            saved = sum(size_of(f"{w.name}:0", self._sizes) * (w.until - w.since) for w in group)
            longer = max(w.until for w in group) - self._last(buffer)
            if saved > size_of(buffer, self._sizes) * longer:
                for wait in group:
                    self._compute_late(wait)
        steps = (
            step
            for name in self._order
            for step in (*self._before.get(name, ()), *(() if name in self._moved else (name,)))
        )
        return self._with_late_views(list(steps))

    def _with_late_views(self, order: list[str]) -> list[str]:
        """Put views right before their first use, after moved operations have been placed.

        What waits for a view uses it, too.
        """
        placed: dict[str, None] = {}

        def place(name: str) -> None:
            for producer in map(node_of, self._by_name[name].input):
                known = producer in self._by_name and producer not in placed
                if known and not self._is_no_view(producer):
                    place(producer)
            placed[name] = None

        for name in [*filter(self._is_no_view, order), *order]:
            if name not in placed:
                place(name)
        return list(placed)

    def _waits(self, name: str) -> Iterator[_Wait]:
        """Yield the stretches of the order in which a cheap, large value waits to be used."""
        node, buffer = self._by_name[name], f"{name}:0"
        small = is_small(sum(self._sizes[name]))
        if small or node.op not in ENTRYWISE or buffer in self._result_buffers:
            return
        consumers = [self._order[i] for i in sorted(self._uses[buffer])]
        since = self._place[name]
        for i, consumer in enumerate(consumers):
            until = self._place[consumer]
            if i > 0 and node.op not in self._twice:
                return
            if self._large_before[until - 1] - self._large_before[since] > _WORTH_IT:
                needs = buffers_of(node, self._by_name) - self._result_buffers
                gone = (buffer for buffer in needs if self._last(buffer) < until)
                missing = [b for b in gone if not is_small(size_of(b, self._sizes))]
                yield _Wait(name, since, until, consumers[i:], frozenset(missing))
            since = until

    def _compute_late(self, wait: _Wait) -> None:
        """Move an operation to the end of a wait, or add a copy there if its value was used."""
        node, buffer = self._by_name[wait.name], f"{wait.name}:0"
        needs = buffers_of(node, self._by_name)
        if wait.since == self._place[wait.name]:
            late = wait.name
            self._moved.add(late)
            for need in needs:
                self._uses[need].discard(wait.since)
        else:
            late = self._add_copy(node, f"again_{len(self._part.node)}")
            earlier = self._copies.setdefault(buffer, {buffer})
            for consumer in wait.consumers:
                self._replace_inputs(self._by_name[consumer], earlier, f"{late}:0")
                self._uses[buffer].discard(self._place[consumer])
                self._uses[f"{late}:0"].add(self._place[consumer])
            earlier.add(f"{late}:0")
        self._before.setdefault(wait.consumers[0], []).append(late)
        for need in needs:
            self._uses[need].add(wait.until)

    def _add_copy(self, node: Any, suffix: str) -> str:
        """Add a copy of an operation, and of the views that only it uses; return its name."""
        copy = self._part.node.add()
        copy.CopyFrom(node)
        copy.name = f"{node.name}/{suffix}"
        self._by_name[copy.name], self._sizes[copy.name] = copy, self._sizes[node.name]
        for i, tensor in enumerate(data_inputs(node)):
            view = self._by_name.get(node_of(tensor))
            if view is not None and view.op in VIEWS and _is_cheap(self._by_name, tensor):
                copy.input[i] = f"{self._add_copy(view, f'for_{copy.name}')}:0"
        return str(copy.name)

    def _replace_inputs(self, node: Any, earlier: set[str], later: str) -> None:
        """Let an operation, and the views that only it uses, read another copy of a value."""
        for i, tensor in enumerate(data_inputs(node)):
            if with_index(tensor) in earlier:
                node.input[i] = later
            elif node_of(tensor) in self._by_name and not self._is_no_view(node_of(tensor)):
                self._replace_inputs(self._by_name[node_of(tensor)], earlier, later)

    def _is_no_view(self, name: str) -> bool:
        return self._by_name[name].op not in VIEWS

    def _last(self, buffer: str) -> int:
        return max(self._uses[buffer], default=-1)


def add_own_views(part: Any, sizes: Sizes) -> None:
    """Copy views of cheap values, in place, so that each view has one user.

    An operation can then read another copy of the value without regard to others. The sizes of
    copies are added to `sizes`.
    """
    by_name = Graph(part).nodes
    users = Counter(with_index(tensor) for node in part.node for tensor in set(data_inputs(node)))

    def own(tensor: str, user: str) -> str:
        node = by_name.get(node_of(tensor))
        if node is None or node.op not in VIEWS or not _is_cheap(by_name, tensor):
            return tensor
        if users[with_index(tensor)] > 1:
            users[with_index(tensor)] -= 1
            users[with_index(node.input[0])] += 1
            copy = part.node.add()
            copy.CopyFrom(node)
            copy.name = f"{node.name}/for_{user}"
            sizes[copy.name] = sizes[node.name]
            node = copy
        node.input[0] = own(node.input[0], node.name)
        return f"{node.name}:0"

    for node in list(part.node):
        if node.op not in VIEWS:
            owned = {tensor: own(tensor, node.name) for tensor in dict.fromkeys(data_inputs(node))}
            for i, tensor in enumerate(data_inputs(node)):
                node.input[i] = owned[tensor]


def _is_cheap(by_name: dict[str, Any], tensor: str) -> bool:
    node = by_name.get(node_of(root_of(tensor, by_name)))
    return node is not None and node.op in ENTRYWISE
