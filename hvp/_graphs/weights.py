"""Where the weights of a model enter its graph: which operations combine them with the data.

Before a weight meets the data, it may pass through operations that do not depend on them: it is
cast, reshaped, transposed, sliced, or multiplied by other weights, entry by entry. What arrives is
a *view* of the weight, whose entries are entries of the weight in another order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._graphs.graph import Graph, data_inputs, node_of, with_index
from hvp._graphs.sizes import ENTRYWISE, shape_of, shapes_of

_PRODUCTS = frozenset(["MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv3D"])
_UNCHANGED = frozenset(["Identity", "Cast", "EnsureShape"])
_RESHAPED = frozenset(["Reshape", "ExpandDims", "Squeeze"])
_SLICED = frozenset(["Slice", "StridedSlice", "Split", "SplitV", "Unpack", "GatherV2"])


@dataclass(frozen=True)
class Use:
    """An operation that combines a weight, given by its number, with the data.

    Attributes
    ----------
    place
        The place of the weight among the inputs of the operation.
    value
        The tensor that holds the values of the whole weight; empty if the operation reads the
        variable itself.
    view
        For each entry of the tensor that enters the operation, the number of the weight's entry
        that it is; None if entries do not correspond one to one.
    is_scaled
        Whether the entries of the view are functions of the entries of the weight, rather than
        these themselves.
    """

    weight: int
    node: Any
    place: int
    value: str
    view: np.ndarray | None
    is_scaled: bool

    @property
    def tensor(self) -> str:
        """The tensor that enters the operation."""
        return with_index(data_inputs(self.node)[self.place])


class WeightedGraph:
    """A graph of a model, and what in it depends on the data.

    The graph has no calls, and notes the shapes of results. `data` are the tensors that hold the
    data, and `results` the predictions.
    """

    def __init__(self, graph: Graph, data: Iterable[str], results: Sequence[str]) -> None:
        self._graph = graph.part(graph.ancestors(results), keep_controls=True)
        self.nodes = graph.nodes
        self._of_data = self._graph.descendants(map(node_of, data))
        reads = [
            n for n, node in self.nodes.items() if node.op in ("ReadVariableOp", "ResourceGather")
        ]
        self._of_weights = self._graph.descendants(reads)

    def uses(self, weight: int, handle: str, shape: Sequence[int]) -> list[Use]:
        """Return the uses of a weight, given by its number.

        `handle` is the tensor that stands for the variable, and `shape` is that of the weight.
        """
        entries = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
        found = []
        for node, place in self._consumers_of_handle(handle):
            if node.op != "ReadVariableOp":
                is_gather = node.op == "ResourceGather"
                found.append(Use(weight, node, place, "", entries if is_gather else None, False))
                continue
            found += self._uses_of_value(weight, f"{node.name}:0", entries)
        return found

    def shape(self, tensor: str) -> tf.TensorShape:
        """Return the shape of a tensor, as far as it is known."""
        return shape_of(tensor, self.nodes)

    def consumers(self, tensor: str) -> list[tuple[Any, int]]:
        """Return the operations that take a tensor, with its place among their inputs."""
        return self._graph.consumers[with_index(tensor)]

    def producer(self, tensor: str, passed: frozenset[str]) -> Any:
        """Return the operation that a tensor comes from; None for an input.

        Operations of the types `passed` are skipped.
        """
        node = self.nodes.get(node_of(tensor))
        while node is not None and node.op in passed:
            node = self.nodes.get(node_of(data_inputs(node)[0]))
        return node

    def consumer(self, tensor: str, passed: frozenset[str]) -> Any:
        """Return the only operation that takes a tensor; None if there are several, or none.

        Operations of the types `passed` are skipped.
        """
        while True:
            consumers = self.consumers(tensor)
            if len(consumers) != 1:
                return None
            node = consumers[0][0]
            if node.op not in passed:
                return node
            tensor = f"{node.name}:0"

    def _consumers_of_handle(self, handle: str) -> list[tuple[Any, int]]:
        found = []
        for node, place in self._graph.consumers[with_index(handle)]:
            if node.op == "Identity":
                found += self._consumers_of_handle(f"{node.name}:0")
            elif node.op != "VariableShape":
                found.append((node, place))
        return found

    def _uses_of_value(self, weight: int, value: str, entries: np.ndarray) -> list[Use]:
        found = []
        seen: set[str] = {value}
        queue: deque[tuple[str, np.ndarray | None, bool]] = deque([(value, entries, False)])
        while queue:
            tensor, view, is_scaled = queue.popleft()
            for node, place in self._graph.consumers[tensor]:
                if node.name in self._of_data or self._multiplies_constant(node, place):
                    found.append(Use(weight, node, place, value, view, is_scaled))
                    continue
                scaled = is_scaled or node.op not in _UNCHANGED | _RESHAPED | _SLICED | {
                    "Transpose"
                }
                for index in range(max(1, len(shapes_of(node)))):
                    output = f"{node.name}:{index}"
                    if output not in seen:
                        seen.add(output)
                        queue.append((output, self._viewed(node, place, index, view), scaled))
        return found

    def _multiplies_constant(self, node: Any, place: int) -> bool:
        """Return whether a node multiplies by a stand-in for data, such as an initial state."""
        others = [t for i, t in enumerate(data_inputs(node)) if i != place]
        return node.op in _PRODUCTS and not any(node_of(t) in self._of_weights for t in others)

    def _viewed(
        self, node: Any, place: int, index: int, view: np.ndarray | None
    ) -> np.ndarray | None:
        """Return the view of a weight that an operation returns, given the one it takes."""
        shape = self.shape(f"{node.name}:{index}")
        if view is None or not shape.is_fully_defined():
            return None
        if node.op in _UNCHANGED | ENTRYWISE:
            return view if tuple(shape) == view.shape else None
        if node.op in _RESHAPED and place == 0:
            return view.reshape(shape)
        others = [None if i == place else self.constant(t) for i, t in enumerate(data_inputs(node))]
        if any(other is None for i, other in enumerate(others) if i != place):
            return None
        if node.op == "Transpose" and place == 0:
            return view.transpose(others[1])
        if node.op in _SLICED:
            with tf.init_scope():  # evaluated now, also where a graph is being traced
                return self._sliced(node, index, view, others)
        return None

    def _sliced(self, node: Any, index: int, view: np.ndarray, others: list[Any]) -> Any:
        attributes = node.attr
        if node.op == "Slice":
            sliced = tf.slice(view, others[1], others[2])
        elif node.op == "StridedSlice":
            masks = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
            sliced = tf.strided_slice(
                view,
                *others[1:4],
                **{f"{mask}_mask": int(attributes[f"{mask}_mask"].i) for mask in masks},
            )
        elif node.op == "Split":
            sliced = tf.split(view, attributes["num_split"].i, int(others[0]))[index]
        elif node.op == "SplitV":
            sliced = tf.split(view, others[1], int(others[2]))[index]
        elif node.op == "Unpack":
            sliced = tf.unstack(view, axis=attributes["axis"].i)[index]
        elif attributes["batch_dims"].i == 0:
            sliced = tf.gather(view, others[1], axis=int(others[2]))
        else:
            return None
        return sliced.numpy()

    def constant(self, tensor: str) -> np.ndarray | None:
        """Return the value of a tensor that depends on no input; None for any other tensor."""
        part = self._graph.computing([tensor])
        inputs = ("Placeholder", "ReadVariableOp", "VarHandleOp", "Random")
        if any(node.op.startswith(inputs) for node in part.graph_def.node):
            return None
        result = with_index(tensor)
        with tf.init_scope():
            # A call of the function itself would count as one more trace of the same function.
            traced = tf.function(lambda: part.imported({}, [result])).get_concrete_function()
            return traced()[0].numpy()
