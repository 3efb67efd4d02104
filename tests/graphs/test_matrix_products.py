"""Products of matrices for many vectors: right in every form, and one operation each."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from hvp._graphs.graph import Graph
from hvp._graphs.matrix_products import for_many_vectors
from hvp._graphs.vectorized import vectorized
from tests.cases import random

M, P, Q, K = 3, 4, 2, 5


def part(dtype, transposed):
    """A graph that multiplies two placeholders."""
    with tf.Graph().as_default() as graph:
        left, right = (tf.raw_ops.Placeholder(dtype=dtype, shape=[None, None]) for _ in range(2))
        a, b = transposed
        product = tf.raw_ops.MatMul(a=left, b=right, transpose_a=a, transpose_b=b)
    definition = graph.as_graph_def()
    for node in list(definition.node):
        if node.op == "Placeholder":
            definition.node.remove(node)
    return Graph(definition), left.name, right.name, product.name


@pytest.mark.parametrize("transposed", [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("depends", ["left", "right"])
def test_they_are_right_and_one_operation(depends, dtype, transposed):
    def numbers(seed, *shape):
        real = random(seed, *shape, dtype="float64")
        return (real + 1j * real[::-1] if dtype == "complex128" else real).astype(dtype)

    definition, *names, product = part(dtype, transposed)
    rewritten = for_many_vectors(definition, {names[depends == "right"].partition(":")[0]})
    shapes = [(M, P), (P, Q)]
    operands = [
        numbers(i, *([K] if which == depends else []), *(s[::-1] if t else s))
        for i, (which, s, t) in enumerate(zip(("left", "right"), shapes, transposed))
    ]
    each, other = operands if depends == "left" else operands[::-1]

    @tf.function
    def products(each, other):
        def multiply(one):
            values = (one, other) if depends == "left" else (other, one)
            return rewritten.imported(dict(zip(names, values)), [product])[0]

        return vectorized(multiply, each)

    left, right = (
        np.swapaxes(operand, -1, -2) if t else operand for operand, t in zip(operands, transposed)
    )
    close = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(products(each, other), left @ right, rtol=close, atol=close)
    operations = products.get_concrete_function(each, other).graph.get_operations()
    assert not {"MatMul", "Transpose", "Reshape"} & {operation.type for operation in operations}
    of_all = [
        o
        for o in operations
        if o.type in ("Einsum", "BatchMatMulV2") and o.outputs[0].shape.rank == 3
    ]
    assert len(of_all) == 1


def test_what_depends_on_no_vector_or_twice_stays():
    definition, left, right, _ = part("float32", (False, False))
    for dependent in (set(), {left.partition(":")[0], right.partition(":")[0]}):
        assert [node.op for node in for_many_vectors(definition, dependent).all_nodes] == ["MatMul"]
