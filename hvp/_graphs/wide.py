"""Float32 graphs that are computed in float64.

Inputs and results keep their type, so that such a graph can take the place of the original::

    matmul(a, b)  ->  cast(matmul(cast(a, float64), cast(b, float64)), float32)

Only the results are rounded to float32, not what is computed on the way. The error of a product
`A v` is then a rounding error of the product itself, however much larger the terms are that cancel
in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import (
    CALLS,
    CONTROL_FLOW,
    functions_of,
    input_dtypes,
    is_stateful,
    output_dtypes,
)
from hvp._graphs.graph import Graph, TensorName, in_topological_order, node_of, with_index
from hvp._graphs.private import op_def_registry
from hvp._graphs.sizes import note_shapes, shapes_of

_FLOAT, _DOUBLE = tf.float32.as_datatype_enum, tf.float64.as_datatype_enum
# Operations that stay in float32: what comes from outside, draws of random numbers, which would be
# others in float64, lists that loops also refer to, and what depends on the size of an entry.
_NARROW = (
    "Bitcast",
    "EmptyTensorList",
    "Placeholder",
    "Random",
    "Stateless",
    "TensorArray",
    "TensorList",
)


def in_float64(graph_def: Any, inputs: Iterable[str]) -> tuple[Any, Callable[[str], str]]:
    """Compute a graph in float64 between its inputs and its results.

    Return the new graph, and a function from the name of a tensor to the name of a tensor of the
    same type in it. Functions that the graph calls, loops and branches stay in float32, as do
    operations that do not exist in float64. Those that exist, but have no kernel for the device,
    raise an error when they run.

    `inputs` are tensors that are replaced when the graph is imported, and keep their types. Small
    ones among those that a function captures are constants in its graph.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    outside = {node_of(name) for name in inputs}
    widening = _Widening(type(graph_def)(versions=graph_def.versions, library=graph_def.library))
    for node in in_topological_order(Graph(graph_def).nodes):
        is_wide = node.name not in outside and _can_be_wide(node, functions)
        widening.add(node, is_wide=is_wide)
    return widening.wide, widening.narrow


class _Widening:
    """Copies nodes to a graph, some of them in float64, with the necessary casts."""

    def __init__(self, wide: Any) -> None:
        self.wide = wide
        self._dtypes: dict[str, list[tf.DType]] = {}
        self._shapes: dict[str, list[Any]] = {}
        self._was: dict[str, list[tf.DType]] = {}
        self._casts: dict[tuple[str, tf.DType], str] = {}

    def add(self, node: Any, *, is_wide: bool) -> None:
        """Add a node, in float64 if `is_wide` is set."""
        copy = self.wide.node.add()
        copy.CopyFrom(node)
        if is_wide:
            widen(copy)
        for i, expected in enumerate(input_dtypes(copy)):
            copy.input[i] = self._cast(copy.input[i], expected)
        self._was[node.name], self._dtypes[node.name] = output_dtypes(node), output_dtypes(copy)
        self._shapes[node.name] = shapes_of(node)

    def narrow(self, tensor: str) -> str:
        """Return the name of a tensor in the type that it had before."""
        name, index = TensorName.of(tensor)
        return self._cast(tensor, self._was[name][index])

    def _cast(self, tensor: str, expected: tf.DType) -> str:
        """Return the name of a tensor in a type; it is cast only between float32 and float64."""
        name, index = TensorName.of(tensor)
        dtypes = self._dtypes.get(name, [])
        # The definitions of some operations do not tell the types of all outputs or inputs.
        if index >= len(dtypes) or {dtypes[index], expected} != {tf.float32, tf.float64}:
            return tensor
        key = with_index(tensor), expected
        if key not in self._casts:
            cast = self.wide.node.add(
                name=f"{name}/{expected.name}_{index}", op="Cast", input=[tensor]
            )
            cast.attr["SrcT"].type = dtypes[index].as_datatype_enum
            cast.attr["DstT"].type = expected.as_datatype_enum
            if index < len(self._shapes[name]):
                note_shapes(cast, [self._shapes[name][index]])
            self._casts[key] = f"{cast.name}:0"
        return self._casts[key]


def _can_be_wide(node: Any, functions: Any) -> bool:
    """Return whether a node computes something in float32 that it can compute in float64."""
    if node.op.startswith(_NARROW) or node.op in CALLS or node.op in CONTROL_FLOW:
        return False
    if any(True for _ in functions_of(node)) or is_stateful(node, functions):
        return False
    floats = {name for name, attribute in node.attr.items() if _names_float(attribute)}
    return bool(floats) and floats <= _wide_attributes(node.op)


def _names_float(attribute: Any) -> bool:
    return attribute.type == _FLOAT or _FLOAT in attribute.list.type


@functools.cache
def _wide_attributes(kind: str) -> set[str]:
    """Return the names of an operation's attributes that may be float64."""
    definition = op_def_registry.get(kind)
    return {
        attribute.name
        for attribute in (() if definition is None else definition.attr)
        if not attribute.allowed_values.list.type or _DOUBLE in attribute.allowed_values.list.type
    }


def widen(node: Any) -> None:
    """Let a node compute in float64 what it computes in float32."""
    if node.op == "Const" and node.attr["dtype"].type == _FLOAT:
        value = tf.make_ndarray(node.attr["value"].tensor).astype("float64")
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    for attribute in node.attr.values():
        if attribute.type == _FLOAT:
            attribute.type = _DOUBLE
        for index, kind in enumerate(attribute.list.type):
            if kind == _FLOAT:
                attribute.list.type[index] = _DOUBLE
