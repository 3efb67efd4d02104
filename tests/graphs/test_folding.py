# ruff: noqa: E501 - a table reads better
"""Shapes and permutations become constants, and transposed products do not compute for them."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._graphs.folding import fold_shapes
from hvp._graphs.sizes import graph_def_with_shapes
from tests import inside
from tests.cases import random, relative_error


def test_what_is_known_becomes_a_constant():
    def function(x, y):
        order = tf.math.invert_permutation([2, 0, 1])
        # `tf.shape` itself is a constant where the shape is known.
        return tf.raw_ops.Shape(input=x), tf.raw_ops.Shape(input=y), order

    specs = tf.TensorSpec([4, 3]), tf.TensorSpec([None, 3])
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    graph_def = graph_def_with_shapes(graph)
    fold_shapes(graph_def)
    kinds = [node.op for node in graph_def.node]
    assert kinds.count("Shape") == 1
    assert kinds.count("InvertPermutation") == 0
    values = [tf.make_ndarray(n.attr["value"].tensor) for n in graph_def.node if n.op == "Const"]
    for want in ([4, 3], [1, 2, 0]):
        assert any(np.array_equal(value, want) and value.dtype == np.int32 for value in values)


def test_sizes_that_are_computed_from_constants():
    raw, c = tf.raw_ops, lambda *values: tf.constant(values, tf.int32)

    def function(x):
        shape = raw.Shape(input=x)
        ones = raw.Fill(dims=c(2), value=tf.constant(1))
        cut = {"begin_mask": 0, "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0}
        return [
            raw.ConcatV2(values=[ones, shape], axis=tf.constant(0)),
            raw.StridedSlice(input=shape, begin=c(1), end=c(2), strides=c(1), **cut, shrink_axis_mask=1),
            raw.StridedSlice(input=shape, begin=c(0), end=c(-1), strides=c(1), **cut, shrink_axis_mask=0),
            raw.Pack(values=[raw.StridedSlice(input=shape, begin=c(0), end=c(1), strides=c(1), **cut,
                                              shrink_axis_mask=1), tf.constant(7)], axis=0),
        ]  # fmt: skip

    concrete = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([4, 3]))
    graph_def = graph_def_with_shapes(concrete.graph)
    fold_shapes(graph_def)
    nodes = {node.name: node for node in graph_def.node}
    made = [nodes[nodes[tensor.name.partition(":")[0]].input[0]] for tensor in concrete.outputs]
    want = [[1, 1, 4, 3], 3, [4], [4, 7]]
    for node, value in zip(made, want):
        assert node.op == "Const"
        found = tf.make_ndarray(node.attr["value"].tensor)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.few(1)
def test_transposed_products_of_attention_have_as_few_matrix_products(jit_compile):
    """Each way takes two for the weights, and two for each product of two activations."""
    x = tf.constant(random(0, 3, 5, 4, dtype="float64"))
    q, k = (tf.Variable(random(i, 4, 6, dtype="float64")) for i in (1, 2))

    def attend():
        left, right = (tf.transpose(tf.reshape(x @ w, [3, 5, 2, 3]), [0, 2, 1, 3]) for w in (q, k))
        return tf.matmul(tf.nn.softmax(left), right, transpose_b=True)

    with tf.GradientTape(persistent=True) as tape:
        value = attend()
    parts = tape.jacobian(value, [q, k], experimental_use_pfor=False)
    want = np.concatenate([part.numpy().reshape(150, 24) for part in parts], axis=1)
    with hvp.JacobianOperator(attend, [q, k], jit_compile=jit_compile) as J:
        v, u = random(3, 48, 2, dtype="float64"), random(4, 150, 2, dtype="float64")
        assert relative_error(J @ v, want @ v) < 1e-12
        assert relative_error(J @ v[:, 0], want @ v[:, 0]) < 1e-12
        assert relative_error(J.T @ u, want.T @ u) < 1e-12
        program = inside.program(J)
        for product in (program.product, program.transposed):
            kinds = [o.type for o in product.parts.graph.get_operations()]
            assert sum("MatMul" in kind for kind in kinds) == 4
            assert "Shape" not in kinds
