"""Entrywise operations on repeated values, rewritten to take the values before they are repeated.

The derivative of a sum repeats a cotangent along the axes of the sum, and so do those of means and
biases. TensorFlow writes the repeated tensor to memory (`Tile`, `BroadcastTo`, `Fill`), and reads
it again in the product or sum that uses it. These operations broadcast their arguments anyway, and
here they take the small tensor itself. Results are the same to the last bit.

Likewise, a sum with the negative of a tensor becomes a difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import output_dtypes
from hvp._graphs.graph import (
    Graph,
    TensorName,
    data_inputs,
    in_topological_order,
    node_of,
    with_index,
)
from hvp._graphs.sizes import (
    ENTRYWISE,
    add_shape,
    is_small,
    nbytes,
    note_shapes,
    shape_of,
    shapes_of,
)

# Operations that broadcast their arguments, besides sums of two.
_BROADCASTING = frozenset(
    """
    Add AddV2 Div DivNoNan Equal Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr Maximum
    Minimum Mul MulNoNan NotEqual Pow RealDiv SelectV2 SquaredDifference Sub Xdivy Xlog1py Xlogy
    """.split()
)
_REPEATING = frozenset(["BroadcastTo", "Fill", "Tile"])

Shape = tuple[int, ...]


def broadcast_instead_of_repeating(
    graph_def: Any, inputs: Mapping[str, tf.TensorSpec] | None = None
) -> None:
    """Rewrite a graph, in place, so that entrywise operations repeat values on their own.

    The graph has no calls, and notes the shapes of results. `inputs` are tensors that it uses and
    that none of its operations computes. Operations that are no longer used stay in it.
    """
    _BroadcastRewriting(graph_def, inputs or {}).run()


class _BroadcastRewriting:
    """Rewrites the nodes of a graph in topological order."""

    def __init__(self, graph_def: Any, inputs: Mapping[str, tf.TensorSpec]) -> None:
        self._graph_def = graph_def
        self._inputs = {with_index(name): spec.shape for name, spec in inputs.items()}
        self._nodes = Graph(graph_def).nodes
        # For tensors that repeat smaller ones, the names of these.
        self._repeated: dict[str, str] = {}

    def run(self) -> None:
        if not any(node.op in _REPEATING or node.op == "Neg" for node in self._graph_def.node):
            return
        for node in in_topological_order(self._nodes):
            if node.op in _REPEATING:
                self._note(node)
            elif node.op == "AddN" and not self._is_small(node):
                self._subtract(node)
            is_unary = node.op in ENTRYWISE and len(data_inputs(node)) == 1
            if is_unary or node.op in _BROADCASTING or _is_pair(node):
                self._rewrite(node)

    def _note(self, node: Any) -> None:
        """Note what a tensor repeats, if its shape is known and it does nothing else."""
        source = data_inputs(node)[1 if node.op == "Fill" else 0]
        before, after = self._shape(source), self._shape(node.name)
        if before is None or after is None or self._is_small(node):
            return
        if node.op != "Tile" or all(a in (1, b) for a, b in zip(before, after)):
            self._repeated[node.name] = self._repeated.get(_key(source), source)

    def _subtract(self, node: Any) -> None:
        """Turn the sum of a tensor and the negative of another into a difference."""
        terms = data_inputs(node)
        if len(terms) != 2:
            return
        for place in (1, 0):
            negative = self._nodes.get(node_of(terms[place]))
            if negative is not None and negative.op == "Neg":
                waits = node.input[2:]
                pair = [terms[1 - place], data_inputs(negative)[0]]
                _replace(node, "Sub", [*pair, *waits])
                return

    def _rewrite(self, node: Any) -> None:
        """Let an operation take what its arguments repeat."""
        inputs, shape = data_inputs(node), self._shape(node.name)
        if shape is None or self._is_small(node):
            return
        small = [self._repeated.get(_key(tensor), tensor) for tensor in inputs]
        if small == inputs:
            return
        shapes = [self._shape(tensor) for tensor in small]
        if None in shapes:
            return
        result = _broadcast(shapes)
        waits = node.input[len(inputs) :]
        kind = "AddV2" if node.op == "AddN" else node.op
        if result == shape:
            _replace(node, kind, [*small, *waits])
        elif math.prod(result) < math.prod(shape):
            self._repeat_result(node, kind, small, result, waits)

    def _repeat_result(
        self, node: Any, kind: str, small: Sequence[str], result: Shape, waits: Sequence[str]
    ) -> None:
        """Compute a small tensor, and repeat it in place of an operation's result."""
        dtype, noted = output_dtypes(node)[0], shapes_of(node)
        before = self._graph_def.node.add()
        before.CopyFrom(node)
        before.name = f"{node.name}/before_repeating"
        _replace(before, kind, [*small, *waits])
        note_shapes(before, [tf.TensorShape(result).as_proto()])
        shape = self._shape(node.name)
        assert shape is not None
        sizes = add_shape(self._graph_def, f"{node.name}/shape", shape)
        node.attr.clear()
        node.op = "BroadcastTo"
        node.attr["T"].type = dtype.as_datatype_enum
        node.attr["Tidx"].type = tf.int32.as_datatype_enum
        del node.input[:]
        node.input.extend([before.name, sizes.name])
        note_shapes(node, noted)
        self._nodes[before.name], self._nodes[sizes.name] = before, sizes
        self._repeated[node.name] = before.name

    def _shape(self, tensor: str) -> Shape | None:
        """Return the shape of a tensor; None if it is not fully known."""
        known = self._inputs.get(with_index(tensor))
        shape = shape_of(tensor, self._nodes) if known is None else known
        return tuple(shape) if shape.is_fully_defined() else None

    def _is_small(self, node: Any) -> bool:
        shape = self._shape(node.name)
        dtype = output_dtypes(node)[0]
        return shape is None or is_small(nbytes(tf.TensorSpec(shape, dtype)))


def _key(tensor: str) -> str:
    """Return the name under which a first result is noted, with or without its index."""
    name, place = TensorName.of(tensor)
    return tensor if place else name


def _is_pair(node: Any) -> bool:
    return node.op == "AddN" and len(data_inputs(node)) == 2


def _replace(node: Any, kind: str, inputs: Sequence[str]) -> None:
    """Change the type of an operation and its inputs."""
    if node.op == "AddN" and kind != "AddN":
        node.attr.pop("N", None)
    node.op = kind
    inputs = list(inputs)
    del node.input[:]
    node.input.extend(inputs)


def _broadcast(shapes: Sequence[Any]) -> Shape:
    """Return the shape of the result of an operation on tensors of these shapes."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded))
