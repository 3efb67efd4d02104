"""Products of matrices, written so that TensorFlow applies them well to many vectors at once.

In a product with a vector, one operand of each `MatMul` depends on the vector and the other does
not. For `k` vectors, `tf.vectorized_map` writes it as a product of two large matrices, for which it
transposes arrays of `k` matrices and adds up to thirty small operations to find shapes. There are
two better ways, of one operation each:

- If the common index is the last one of the operand that depends on the vector, the `k` matrices of
  that operand are one large matrix as they stand. `Einsum` sees that: `zab,bc->zac`.
- Otherwise `BatchMatMulV2` multiplies `k` times, and nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import tensorflow as tf

from hvp._graphs.graph import Graph, data_inputs, node_of


def for_many_vectors(graph: Graph, dependent: Container[str]) -> Graph:
    """Return a graph in which products of two matrices are written for many vectors.

    `graph` computes a product with one vector, on which the operations in `dependent` depend.
    """
    copy = graph.copy()
    for node in copy.graph_def.node:
        if node.op == "MatMul":
            left_depends, right_depends = (node_of(x) in dependent for x in data_inputs(node))
            if left_depends != right_depends:
                _rewrite(node, left_depends)
    return copy


def _rewrite(node: Any, left_depends: bool) -> None:
    dtype = node.attr["T"].type
    transposed = node.attr["transpose_a"].b, node.attr["transpose_b"].b
    common_is_last = not transposed[0] if left_depends else transposed[1]
    node.attr.clear()
    node.attr["T"].type = dtype
    # BatchMatMulV2 transposes complex matrices to their conjugates.
    if common_is_last or tf.as_dtype(dtype).is_complex:
        left, right = "ba" if transposed[0] else "ab", "cb" if transposed[1] else "bc"
        node.op = "Einsum"
        node.attr["N"].i = 2
        node.attr["equation"].s = f"{left},{right}->ac".encode()
    else:
        node.op = "BatchMatMulV2"
        node.attr["adj_x"].b, node.attr["adj_y"].b = transposed
