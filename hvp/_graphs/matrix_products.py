"""Products of matrices, written in the way that TensorFlow computes fastest.

Where a batch of matrices is multiplied by one matrix, as the tokens of a language model are by the
kernel of a layer, the batch is one large matrix as it stands. `BatchMatMulV2` multiplies its
matrices one after the other.

On CPUs with oneDNN, `MatMul` runs in a single thread if its operands and its result fit in the
second-level cache. The other cores help only if another product can be computed at that time, and
in a derivative many have to wait for each other. `BatchMatMulV2` always runs in all threads, which
is faster for the larger ones of these products.

In a product with a vector, one operand of each `MatMul` depends on the vector and the other does
not. For `k` vectors, `tf.vectorized_map` writes it as a product of two large matrices, for which it
transposes arrays of `k` matrices and adds up to thirty small operations to find shapes. There are
two better ways, of one operation each:

- If the common index is the last one of the operand that depends on the vector, the `k` matrices of
  that operand are one large matrix as they stand. `Einsum` sees that: `zab,bc->zac`. It transposes
  narrow matrices to join them, which costs less than to multiply by each.
- Otherwise `BatchMatMulV2` multiplies `k` times, and nothing is transposed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.graph import Graph, Sizes, data_inputs, node_of
from hvp._graphs.sizes import add_shape, nbytes, note_shapes, shape_of, size_of
from hvp._graphs.target import has_cpus_only

# Products of as many entries as fit in the second-level cache of today's server processors (2 MiB).
_ENTRIES_IN_CACHE = 2**19
# What a product must take to be faster in all threads: multiplications, and entries of two of its
# matrices. Where these are smaller, other operations keep the other threads busy.
_MULTIPLICATIONS = 2**24
_LARGE = 2**17 * 7 // 8
# Matrices of a vector with so few columns are joined, and with so few if the other matrix is larger
# than the cache: it is then read once, and not for each vector.
_NARROW, _NARROW_IF_LARGE = 4, 12


def multiply_batches_as_one(graph_def: Any) -> Sizes:
    """Rewrite batches of matrices that are multiplied by one matrix, in place.

    The graph has no calls, and notes the shapes of results. Return the sizes of new results, which
    these do not tell if the size of one axis is unknown.
    """
    nodes, sizes = Graph(graph_def).nodes, {}
    for node in list(graph_def.node):
        if node.op != "BatchMatMulV2" or node.attr["adj_x"].b:
            continue
        dtype, (left, right) = tf.as_dtype(node.attr["T"].type), data_inputs(node)
        batch, matrix, result = (shape_of(tensor, nodes) for tensor in (left, right, node.name))
        ranks = batch.rank or 0, matrix.rank or 0
        # It transposes complex matrices to their conjugates, and multiplies more types of integers.
        if not dtype.is_floating or ranks[0] < 3 or ranks[1] < 2 or result.rank is None:
            continue
        is_one = all(size == 1 for size in matrix[:-2])
        known = batch[-1] is not None and matrix[-2:].is_fully_defined()
        if is_one and known and sum(size is None for size in result) <= 1:
            rows = [math.prod(batch[:-1]) if batch.is_fully_defined() else None, batch[-1]]
            if matrix.rank > 2:
                right = _add_reshape(graph_def, f"{node.name}/one", right, matrix[-2:], dtype)
            waits = node.input[2:]
            flat = _add_reshape(graph_def, f"{node.name}/rows", left, rows, dtype)
            product = graph_def.node.add(name=f"{node.name}/matrix", op="MatMul")
            product.input.extend([flat, right, *waits])
            product.attr["T"].type = dtype.as_datatype_enum
            product.attr["transpose_b"].b = node.attr["adj_y"].b
            note_shapes(product, [tf.TensorShape([rows[0], result[-1]]).as_proto()])
            _make_reshape(graph_def, node, product.name, result, dtype)
            for name, shape in ((flat, batch), (product.name, result)):
                sizes[name] = [nbytes(tf.TensorSpec(shape, dtype))]
    return sizes


def _add_reshape(
    graph_def: Any, name: str, tensor: str, shape: Sequence[int], dtype: tf.DType
) -> str:
    node = graph_def.node.add(name=name)
    _make_reshape(graph_def, node, tensor, shape, dtype)
    return name


def _make_reshape(
    graph_def: Any, node: Any, tensor: str, shape: Sequence[int], dtype: tf.DType
) -> None:
    """Turn a node into a reshape of a tensor."""
    known = [-1 if size is None else size for size in shape]
    sizes = add_shape(graph_def, f"{node.name}/shape", known)
    name, device = node.name, node.device
    node.Clear()
    node.name, node.op, node.device = name, "Reshape", device
    node.attr["T"].type = dtype.as_datatype_enum
    node.attr["Tshape"].type = tf.int32.as_datatype_enum
    node.input.extend([tensor, sizes.name])
    note_shapes(node, [tf.TensorShape(shape).as_proto()])


def on_all_cores(graph: Graph) -> Graph:
    """Return a graph in which products run in all threads where that is faster than in one."""
    chosen = [node for node in graph.graph_def.node if _is_faster_on_all(node, graph.sizes)]
    if not chosen or not has_cpus_only():
        return graph
    copy = graph.copy()
    for node in chosen:
        _make_batch(copy.graph_def, copy.nodes[node.name], *_entries(node, graph.sizes))
    return copy


def _is_faster_on_all(node: Any, sizes: Sizes) -> bool:
    if node.op != "MatMul" or node.attr["T"].type != tf.float32.as_datatype_enum:
        return False
    entries = _entries(node, sizes)
    # Matrices of m k, k n and m n entries take m k n multiplications.
    enough = math.prod(entries) >= _MULTIPLICATIONS**2 and sorted(entries)[1] >= _LARGE
    return enough and sum(entries) <= _ENTRIES_IN_CACHE


def _entries(node: Any, sizes: Sizes) -> list[int]:
    """Return the numbers of entries of the two operands and the result of a product."""
    item = tf.as_dtype(node.attr["T"].type).size
    return [size_of(x, sizes) // item for x in (*data_inputs(node), node.name)]


def _make_batch(graph_def: Any, node: Any, left: int, right: int, result: int) -> None:
    """Multiply the halves of the left matrix, or its transpose, as a batch.

    A batch of one would do, but if `tf.vectorized_map` adds an axis to it, TensorFlow's kernel is
    not safe (see `hvp._graphs.vectorized`). The numbers are those of the matrices' entries.
    """
    m = math.isqrt(left * result // right)
    k, n = left // m, result // m
    transposed = _transposed(node)
    if (m * k, k * n, m * n) != (left, right, result) or (m % 2 and not transposed[0]):
        return
    batch = [1, k, m] if transposed[0] else [2, m // 2, k]
    tensors, waits = data_inputs(node), node.input[2:]
    matrices = _add_reshape(graph_def, f"{node.name}/matrices", tensors[0], batch, tf.float32)
    product = graph_def.node.add(
        name=f"{node.name}/batch", op="BatchMatMulV2", input=[matrices, tensors[1], *waits]
    )
    product.device = node.device
    product.attr["T"].type = tf.float32.as_datatype_enum
    product.attr["adj_x"].b, product.attr["adj_y"].b = transposed
    _make_reshape(graph_def, node, product.name, [m, n], tf.float32)


def for_many_vectors(graph: Graph, dependent: Container[str]) -> Graph:
    """Return a graph in which products of two matrices are written for many vectors.

    `graph` computes a product with one vector, on which the operations in `dependent` depend.
    """
    copy = graph.copy()
    for node in copy.graph_def.node:
        if node.op == "MatMul":
            left_depends, right_depends = (node_of(x) in dependent for x in data_inputs(node))
            if left_depends != right_depends:
                left, right, result = _entries(node, graph.sizes)
                own, other = (left, right) if left_depends else (right, left)
                _rewrite(node, left_depends, is_narrow=_is_narrow(own, other, result))
    return copy


def _is_narrow(own: int, other: int, result: int) -> bool:
    """Whether matrices with `own` entries are so narrow that many are better joined side by side.

    Of matrices of `m k`, `k n` and `m n` entries, two over the third are the square of a size.
    """
    if not (own and other and result):  # a number is not known
        return False
    width = math.isqrt(own * result // other)
    return width <= _NARROW or (width <= _NARROW_IF_LARGE and other > _ENTRIES_IN_CACHE)


def _rewrite(node: Any, left_depends: bool, *, is_narrow: bool) -> None:
    dtype = node.attr["T"].type
    transposed = _transposed(node)
    common_is_last = not transposed[0] if left_depends else transposed[1]
    node.attr.clear()
    node.attr["T"].type = dtype
    # BatchMatMulV2 transposes complex matrices to their conjugates.
    if common_is_last or is_narrow or tf.as_dtype(dtype).is_complex:
        left, right = "ba" if transposed[0] else "ab", "cb" if transposed[1] else "bc"
        node.op = "Einsum"
        node.attr["N"].i = 2
        node.attr["equation"].s = f"{left},{right}->ac".encode()
    else:
        node.op = "BatchMatMulV2"
        node.attr["adj_x"].b, node.attr["adj_y"].b = transposed


def _transposed(node: Any) -> tuple[bool, bool]:
    return node.attr["transpose_a"].b, node.attr["transpose_b"].b
