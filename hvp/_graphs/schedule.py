"""An order of operations in which few values are in memory at once.

TensorFlow runs every operation as soon as its inputs are available. In a derivative, many values
are then computed long before they are used: a term of a sum, for example, or a cotangent. They wait
in memory, and double or triple its use. `in_order` therefore lets operations wait for each other.
It also computes cheap values late, or a second time, so that they need not wait in memory between
their uses.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hvp._graphs.graph import Graph
from hvp._graphs.lifetimes import Lifetimes
from hvp._graphs.rematerialize import Rematerialization, add_own_views
from hvp._graphs.sizes import ENTRYWISE, EXPENSIVE, VIEWS, are_few, is_small

# Where the order is not strict, large values are computed in groups of this size, each after the
# group before the last one.
_GROUP = 4
# What has been moved makes room for other moves, twice or three times.
_ROUNDS = 4


def in_order_if_large(graph: Graph, results: Sequence[str]) -> Graph:
    """Apply `in_order` to a graph that can take much memory; return any other unchanged."""
    nodes = graph.graph_def.node
    total = sum(sum(graph.sizes[node.name]) for node in nodes if node.op not in VIEWS)
    return graph if are_few(total) else in_order(graph, results, strict=False)


def in_order(graph: Graph, results: Sequence[str], *, strict: bool = True) -> Graph:
    """Compute large values one after another, in an order that needs little memory.

    Return the same operations with control edges between them; some occur more than once. Inputs
    and results stay in memory. With `strict`, memory is worth any time; otherwise a few operations
    can run at the same time, and what takes long is not computed twice.

    The order is first greedy: among the operations that are ready, the next is the one that
    increases the memory in use the least. An operation increases it by the size of its results,
    minus the size of the inputs that it is the last to use. An operation whose inputs are there
    from the beginning is ready long before its result is used. Operations are therefore moved to
    right before their first use where that shortens the total time that values wait.
    """
    ordered = graph.copy().graph_def
    sizes = {node.name: graph.sizes[node.name] for node in ordered.node}
    add_own_views(ordered, sizes)
    lives = Lifetimes(ordered.node, sizes, results)
    order = _late(lives, _greedy(lives))
    twice = ENTRYWISE if strict else ENTRYWISE - EXPENSIVE
    peak = lives.peak(order)
    for _ in range(_ROUNDS):
        order = Rematerialization(ordered, order, sizes, set(results), twice).run()
        lives = Lifetimes(ordered.node, sizes, results)
        order = _late(lives, order)
        before, peak = peak, lives.peak(order)
        if peak >= before:
            break
    free = {
        node.name for node in ordered.node if node.op in VIEWS or is_small(sum(sizes[node.name]))
    }
    _let_wait(ordered, [name for name in order if name not in free], strict)
    return Graph(ordered, sizes)


def _let_wait(part: Any, order: Sequence[str], strict: bool) -> None:
    """Let operations run one after another, or nearly so if not `strict`."""
    by_name = Graph(part).nodes
    if strict:
        for before, name in zip(order, order[1:]):
            by_name[name].input.append(f"^{before}")
        return
    groups = [order[i : i + _GROUP] for i in range(0, len(order), _GROUP)]
    for number, (earlier, later) in enumerate(zip(groups, groups[2:])):
        done = part.node.add(op="NoOp", name=f"hvp_group_{number}")
        done.input.extend(f"^{name}" for name in earlier)
        for name in later:
            by_name[name].input.append(f"^{done.name}")


def _greedy(lives: Lifetimes) -> list[str]:
    """Return an order in which each operation increases the memory in use the least."""
    place = {name: i for i, name in enumerate(lives.names)}
    missing = {name: len(producers) for name, producers in lives.producers.items()}
    # The operations that still have to read a buffer.
    left = {buffer: set(users) for buffer, users in lives.users.items()}
    growth: dict[str, int] = {}
    ready: list[tuple[int, int, str]] = []

    def add(name: str) -> None:
        last = (b for b in lives.buffers[name] if len(left[b]) == 1 and b not in lives.kept)
        growth[name] = lives.allocated[name] - sum(map(lives.size, last))
        heapq.heappush(ready, (growth[name], place[name], name))

    for name, count in missing.items():
        if count == 0:
            add(name)
    order: list[str] = []
    while ready:
        increase, _, name = heapq.heappop(ready)
        if growth.get(name) != increase:
            continue  # it has run, or was added again when it had become better
        del growth[name]
        order.append(name)
        for buffer in lives.buffers[name]:
            left[buffer].discard(name)
            for last in left[buffer] if len(left[buffer]) == 1 else ():
                if last in growth:
                    add(last)
        for consumer in lives.consumers[name]:
            missing[consumer] -= 1
            if missing[consumer] == 0:
                add(consumer)
    return order


def _late(lives: Lifetimes, order: list[str]) -> list[str]:
    """Move operations to right before their first use where values then wait less in total.

    A move saves the bytes of the operation's results, times the number of places moved. It costs
    those of the inputs that have to wait for it instead.
    """
    place = {name: i for i, name in enumerate(order)}
    moved: dict[int, list[str]] = defaultdict(list)
    for name in reversed(order):
        here, allocated = place[name], lives.allocated[name]
        first = min((place[consumer] for consumer in lives.consumers[name]), default=here)
        if first == here or not allocated:
            continue
        lost = 0
        for buffer in lives.buffers[name] - lives.kept:
            last = max((place[user] for user in lives.users[buffer] - {name}), default=here)
            lost += lives.size(buffer) * max(0, first - max(here, last))
        if allocated * (first - here) > lost:
            place[name] = first
            moved[first].append(name)
    return [
        step
        for i, name in enumerate(order)
        for step in (*reversed(moved[i]), *((name,) if place[name] == i else ()))
    ]
