"""Matrix products and convolutions in low precision, in a graph that otherwise stays the same.

Each large matrix product takes its factors rounded to a type of 16 bits, and returns its result in
the type of the graph::

    matmul(a, b)  ->  cast(matmul(cast(a, bfloat16), cast(b, bfloat16)), float32)

Processors add up the terms of such a product in float32. Everything between the products stays in
the type of the graph.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional

import tensorflow as tf

from hvp._graphs.graph import Graph, Sizes, data_inputs, node_of, with_index
from hvp._graphs.sizes import VIEWS, is_small, size_of
from hvp._runtime.context import assigned

# The operations, and which of their inputs are factors; None stands for all inputs.
_PRODUCTS: dict[str, tuple[int, ...] | None] = {
    "BatchMatMul": (0, 1),
    "BatchMatMulV2": (0, 1),
    "Conv2D": (0, 1),
    "Conv2DBackpropFilter": (0, 2),
    "Conv2DBackpropInput": (1, 2),
    "Conv3D": (0, 1),
    "Conv3DBackpropFilterV2": (0, 2),
    "Conv3DBackpropInputV2": (1, 2),
    "Einsum": None,
    "MatMul": (0, 1),
}
# Operations of one input that compute nothing.
_ARRANGEMENTS = VIEWS | {"Transpose"}
_WIDE = (tf.float32, tf.float64)
_recomputed_in = contextvars.ContextVar[Optional[tf.DType]]("hvp_recomputed_in", default=None)
# The least number of multiplications for each entry that is read or written: with fewer, rounding
# the factors takes longer than it saves.
_LEAST_INTENSITY = 24
# What is timed to find out whether a device has a fast path: the order of the matrices, the number
# of rounds, and the share of the time in float32 that low precision may take.
_ORDER, _ROUNDS, _FAST = 1024, 4, 0.85


def in_low_precision(
    graph: Graph, dtype: tf.DType, inputs: Mapping[str, tf.DType], results: Sequence[str]
) -> tuple[Graph, set[str], int]:
    """Compute the large matrix products and convolutions of a graph in low precision.

    Functions that the graph calls stay as they are, and results keep their types. `inputs` that are
    large and of a wider type are rounded.

    Return the graph, the names of the rounded inputs, and the number of products.
    """
    sizes, part = dict(graph.sizes), graph.graph_def
    rounded = {
        name: wide
        for name, wide in inputs.items()
        if wide in _WIDE and not is_small(size_of(name, sizes))
    }
    products = {n.name for n in part.node if _is_product(n) and _is_worthwhile(n, sizes)}
    lowered = type(part)(versions=part.versions, library=part.library)
    lowered.node.extend(_Lowering(dtype, sizes, rounded).run(part.node, products))
    return Graph(lowered, sizes).without_unused(results), set(rounded), len(products)


def recomputed_in(dtype: tf.DType | None) -> contextlib.AbstractContextManager[None]:
    """Let recomputed functions traced in this context multiply vectors in low precision.

    Their results and gradients are computed as before.
    """
    return assigned(_recomputed_in, dtype)


def dtype_of_recomputed() -> tf.DType | None:
    """Return the type of `recomputed_in`; None outside of it."""
    return _recomputed_in.get()


@functools.cache
def is_fast(dtype: tf.DType) -> bool:
    """Measure whether the device multiplies matrices faster in low precision than in float32.

    This takes about a tenth of a second.
    """
    ones = tf.ones([_ORDER, _ORDER])
    best = {tf.float32: math.inf, dtype: math.inf}
    try:
        for turn in range(_ROUNDS):
            for kind in best:
                factor = tf.cast(ones, kind)
                start = time.perf_counter()
                _ = tf.cast(tf.matmul(factor, factor)[0, 0], tf.float32).numpy()
                if turn:  # the first one prepares the kernel
                    best[kind] = min(best[kind], time.perf_counter() - start)
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError, tf.errors.UnimplementedError):
        return False  # the device has no such kernel
    return best[dtype] < _FAST * best[tf.float32]


class _Lowering:
    """Rewrites the nodes of a graph with products of type `dtype`.

    The sizes of new operations are added to `sizes`. `rounded` are the inputs given in low
    precision, with the types that operations expect.
    """

    def __init__(self, dtype: tf.DType, sizes: Sizes, rounded: Mapping[str, tf.DType]) -> None:
        self._dtype, self._sizes, self._rounded = dtype, sizes, rounded
        self._given: dict[str, Any] = {}
        self._products: Collection[str] = ()
        self._nodes: list[Any] = []
        self._casts: dict[Any, str] = {}
        self._arranged: set[str] = set()

    def run(self, nodes: Sequence[Any], products: Collection[str]) -> list[Any]:
        """Return the nodes, with the named products in low precision."""
        self._given, self._products = {node.name: node for node in nodes}, products
        for node in nodes:
            copy = type(node)()
            copy.CopyFrom(node)
            if node.name in products:
                self._add_product(copy)
            else:
                self._widen(copy, range(len(data_inputs(copy))))
                self._nodes.append(copy)
        return self._nodes

    def _add_product(self, node: Any) -> None:
        name, wide = node.name, tf.as_dtype(node.attr["T"].type)
        inputs, factors = data_inputs(node), set(_factors(node))
        # A factor is rounded when the product may run, so that it need not wait in memory.
        waits = node.input[len(inputs) :]
        for i in factors:
            node.input[i] = self._rounded_factor(inputs[i], wide, waits)
        self._widen(node, set(range(len(inputs))) - factors)
        node.name, node.attr["T"].type = self._low(name), self._dtype.as_datatype_enum
        self._nodes.append(node)
        self._note_size(node.name, size_of(name, self._sizes) * self._dtype.size // wide.size)
        self._nodes.append(_cast_node(name, node.name, self._dtype, wide))

    def _rounded_factor(self, tensor: str, wide: tf.DType, waits: Sequence[str]) -> str:
        """Return the name of a tensor in low precision, adding what computes it."""
        name, key = node_of(tensor), with_index(tensor)
        if key in self._rounded:
            return tensor
        node = self._given.get(name)
        if node is None:
            return self._cast(tensor, wide, self._dtype, waits)
        if name in self._products:
            return self._low(name)
        if node.op not in _ARRANGEMENTS:
            return self._cast(tensor, wide, self._dtype, waits)
        if key not in self._arranged:
            # An arrangement of numbers that are rounded, in place of rounding what is arranged.
            copy = type(node)()
            copy.CopyFrom(node)
            copy.name, copy.attr["T"].type = self._low(name), self._dtype.as_datatype_enum
            copy.input[0] = self._rounded_factor(node.input[0], wide, ())
            self._arranged.add(key)
            self._nodes.append(copy)
            nbytes = size_of(tensor, self._sizes)
            self._note_size(copy.name, nbytes * self._dtype.size // wide.size)
        return self._low(name)

    def _low(self, name: str) -> str:
        return f"{name}/{self._dtype.name}"

    def _widen(self, node: Any, places: Collection[int]) -> None:
        """Let a node take rounded inputs in the type that it expects."""
        for i in places:
            expected = self._rounded.get(with_index(node.input[i]))
            if expected is not None:
                node.input[i] = self._cast(node.input[i], self._dtype, expected)

    def _cast(
        self, tensor: str, source: tf.DType, target: tf.DType, waits: Sequence[str] = ()
    ) -> str:
        """Return the name of a tensor in another type."""
        key = (with_index(tensor), target, *waits)
        if key not in self._casts:
            name = f"{key[0].replace(':', '_')}/{target.name}_{len(self._casts)}"
            self._nodes.append(_cast_node(name, tensor, source, target, waits))
            # Sizes are those of tensors before they are rounded.
            ratio = 1 if target in _WIDE else target.size / source.size
            self._note_size(name, int(size_of(tensor, self._sizes) * ratio))
            self._casts[key] = name
        return self._casts[key]

    def _note_size(self, name: str, nbytes: int) -> None:
        self._sizes[name] = [nbytes]


def _cast_node(
    name: str, tensor: str, source: tf.DType, target: tf.DType, waits: Sequence[str] = ()
) -> Any:
    node = tf.compat.v1.NodeDef(name=name, op="Cast", input=[tensor, *waits])
    node.attr["SrcT"].type = source.as_datatype_enum
    node.attr["DstT"].type = target.as_datatype_enum
    return node


def _is_product(node: Any) -> bool:
    return node.op in _PRODUCTS and tf.as_dtype(node.attr["T"].type) in _WIDE


def _factors(node: Any) -> Sequence[int]:
    factors = _PRODUCTS[node.op]
    return range(len(data_inputs(node))) if factors is None else factors


def _is_worthwhile(node: Any, sizes: Sizes) -> bool:
    """Return whether a product has many multiplications for each entry that it reads or writes.

    An `m x k` times a `k x n` matrix takes `m k n` multiplications: the square root of the product
    of the numbers of entries of the three matrices.
    """
    size = tf.as_dtype(node.attr["T"].type).size
    inputs = data_inputs(node)
    tensors = [*(inputs[i] for i in _factors(node)), node.name]
    entries = [size_of(tensor, sizes) / size for tensor in tensors]
    return math.sqrt(math.prod(entries)) >= _LEAST_INTENSITY * sum(entries)
