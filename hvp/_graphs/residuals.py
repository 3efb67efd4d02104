"""Which values to keep of what runs once, and which to compute again for each product.

A product needs values that do not depend on the vector. It computes them again from others, the
*residuals*, which are kept in memory. What to keep is a minimum cut through the graph: between the
operations that must not run again, such as matrix products, and those that depend on the vector, it
is the set of values that has the fewest bytes.

Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost (2016), arXiv:1604.06174,
recompute cheap values in this way; that the best choice is a minimum cut is the idea of the
partitioner of PyTorch's AOTAutograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from hvp._graphs.graph import Sizes, data_inputs, node_of, with_index
from hvp._graphs.sizes import BORROWED, ENTRYWISE, EXPENSIVE, are_few, is_small, size_of

# Operations that run again in any case. Their inputs are smaller than the result or share its
# buffer: constants, views and repetitions.
_FREE = frozenset(
    """
    BroadcastTo Const EnsureShape ExpandDims Fill Identity OnesLike Reshape Squeeze Tile ZerosLike
    """.split()
)
# What it costs to run an operation again, as the share of its result's bytes that this must save.
_ENTRYWISE_COST = 0.2
_EXPENSIVE_COST = 0.5
# The unit of capacities, which are 32-bit integers, and what stands for infinity.
_UNITS_IN_TOTAL = 2**28
_INFINITE = 2**30


def choose_residuals(
    nodes: Mapping[str, Any], wanted: Iterable[str], sizes: Sizes
) -> tuple[set[str], list[str]]:
    """Choose what to keep so that some tensors can be computed.

    `nodes` are the operations that do not depend on the vector, and `wanted` the tensors that the
    others use. Return the operations to run again, and the tensors to keep.
    """
    wanted = {with_index(tensor) for tensor in wanted}
    again, residuals = _remade(nodes, wanted, lambda t: nodes[node_of(t)].op not in _FREE)
    owned = (tensor for tensor in residuals if nodes[node_of(tensor)].op not in BORROWED)
    if are_few(sum(size_of(tensor, sizes) for tensor in owned)):
        return again, residuals
    kept = _Network(nodes, wanted, sizes).cut()
    return _remade(nodes, wanted, lambda tensor: tensor in kept)


def _remade(
    nodes: Mapping[str, Any], wanted: Iterable[str], is_kept: Callable[[str], bool]
) -> tuple[set[str], list[str]]:
    """Return the operations that compute `wanted` from kept tensors, and these tensors."""
    again: set[str] = set()
    residuals: set[str] = set()
    queue = list(wanted)
    while queue:
        tensor = queue.pop()
        name = node_of(tensor)
        if is_kept(tensor):
            residuals.add(tensor)
        elif name not in again:
            again.add(name)
            queue += map(with_index, data_inputs(nodes[name]))
    return again, sorted(residuals)


class _Network:
    """A flow network, in which a cut is a choice of tensors to keep.

    A tensor is an edge, whose capacity is its size in bytes: to keep the tensor is to cut the edge.
    Each tensor leads to the tensors that are computed from it, and the wanted ones to the sink. The
    source leads to what must not run again. It also leads to what may, by an edge of the cost of
    running it.
    """

    _SOURCE, _SINK = 0, 1

    def __init__(self, nodes: Mapping[str, Any], wanted: set[str], sizes: Sizes) -> None:
        self._nodes, self._wanted, self._sizes = nodes, sorted(wanted), sizes
        # The tensors that wanted ones depend on, numbered.
        self._tensors: dict[str, int] = {}

    def cut(self) -> set[str]:
        """Return the tensors of the minimum cut that is nearest to the wanted tensors."""
        tails, heads, capacities = self._edges()
        tensors = self._tensors
        count = 2 + 2 * len(tensors)
        scale = max(1.0, capacities[np.isfinite(capacities)].sum() / _UNITS_IN_TOTAL)
        units = np.where(np.isfinite(capacities), np.ceil(capacities / scale), _INFINITE).astype(
            np.int32
        )
        network = csr_matrix((units, (tails, heads)), shape=(count, count))
        flow = maximum_flow(network, self._SOURCE, self._SINK).flow
        left = (network - flow).T.tocsr()
        left.eliminate_zeros()
        behind = np.zeros(count, bool)
        behind[breadth_first_order(left, self._SINK, return_predecessors=False)] = True
        return {
            t for t, i in tensors.items() if behind[self._end(i)] and not behind[self._start(i)]
        }

    def _edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tails, heads and capacities of the edges, and number the tensors."""
        queue: list[str] = []
        edges: list[tuple[int, int, float]] = []

        def number(tensor: str) -> int:
            if tensor not in self._tensors:
                self._tensors[tensor] = len(self._tensors)
                queue.append(tensor)
            return self._tensors[tensor]

        for tensor in self._wanted:
            edges.append((self._end(number(tensor)), self._SINK, np.inf))
        while queue:
            tensor = queue.pop()
            i, node = self._tensors[tensor], self._nodes[node_of(tensor)]
            size = size_of(tensor, self._sizes)
            kept = 1 if node.op in BORROWED else 1 + size
            edges.append((self._start(i), self._end(i), kept))
            cost = self._cost(node, size)
            if cost:
                edges.append((self._SOURCE, self._start(i), cost))
            if cost < np.inf:
                for source in sorted({*map(with_index, data_inputs(node))}):
                    edges.append((self._end(number(source)), self._start(i), np.inf))
        tails, heads, capacities = zip(*edges)
        return np.array(tails), np.array(heads), np.array(capacities)

    @staticmethod
    def _cost(node: Any, size: int) -> float:
        if node.op in _FREE:
            return 0
        if node.op not in ENTRYWISE or is_small(size):
            return np.inf
        return size * (_EXPENSIVE_COST if node.op in EXPENSIVE else _ENTRYWISE_COST)

    @staticmethod
    def _start(i: int) -> int:
        return 2 + 2 * i

    @staticmethod
    def _end(i: int) -> int:
        return 3 + 2 * i
