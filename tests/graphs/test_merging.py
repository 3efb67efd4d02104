"""Equal operations of a graph are merged, and others are not."""

import numpy as np
import tensorflow as tf

import hvp
from hvp._graphs.graph import Graph, node_of
from hvp._graphs.merging import merge_equal_operations
from tests.cases import random

X = random(0, 4, 3)


def merged(function, kept=()):
    """Return what a function returns after merging, and how many operations of each kind remain."""
    traced = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([4, 3]))
    graph_def = traced.graph.as_graph_def()
    (place,) = (tensor.name for tensor in traced.inputs)
    names = [tensor.name for tensor in traced.outputs]
    merge_equal_operations(graph_def, {*map(node_of, names), *kept})
    kinds = [node.op for node in graph_def.node]
    graph_def.node.remove(next(n for n in graph_def.node if n.name == node_of(place)))

    @tf.function(autograph=False)
    def after(x):
        return Graph(graph_def).imported({place: x}, names)

    return [tensor.numpy() for tensor in after(tf.constant(X))], kinds


def test_equal_operations_are_computed_once():
    (result,), kinds = merged(lambda x: tf.sin(x) * 2.0 + tf.sin(x) * 2.0)
    np.testing.assert_array_equal(result, 4 * np.sin(X))
    assert kinds.count("Sin") == kinds.count("Mul") == kinds.count("Const") == 1


def test_other_attributes_inputs_and_constants_stay_apart():
    def function(x):
        return (
            tf.matmul(x, x, transpose_a=True)[0, 0]
            + tf.matmul(x, x, transpose_b=True)[0, 0]
            + tf.reduce_sum(x - 1.0)
            + tf.reduce_sum(1.0 - x)
            + tf.reduce_sum(x - 2.0)
        )

    (result,), kinds = merged(function)
    want = (X.T @ X)[0, 0] + (X @ X.T)[0, 0] + np.sum(X) - X.size * 2
    np.testing.assert_allclose(result, want, rtol=1e-5)
    assert kinds.count("MatMul") == 2
    assert kinds.count("Sub") == 3


def test_draws_and_reads_stay_apart():
    w = tf.Variable(1.0)

    def function(x):
        before = w.read_value()
        w.assign_add(1.0)
        after = w.read_value()
        draws = [tf.random.uniform([4, 3], seed=1) for _ in range(2)]
        return x + before - after, draws[0], draws[1]

    kinds = [node.op for node in merge(function).node]
    assert kinds.count("ReadVariableOp") == 2
    assert kinds.count("RandomUniform") == 2


def merge(function):
    traced = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([4, 3]))
    graph_def = traced.graph.as_graph_def()
    merge_equal_operations(graph_def, [node_of(tensor.name) for tensor in traced.outputs])
    return graph_def


def test_results_keep_their_names():
    both, kinds = merged(lambda x: [tf.sin(x), tf.sin(x), tf.sin(x) + 1.0])
    np.testing.assert_array_equal(both[0], np.sin(X))
    np.testing.assert_array_equal(both[1], np.sin(X))
    np.testing.assert_array_equal(both[2], np.sin(X) + 1)
    assert kinds.count("Sin") <= 3


def test_two_variables_may_have_the_same_gradient():
    v, w = tf.Variable(random(1, 3)), tf.Variable(random(1, 3))
    with hvp.HessianOperator(lambda: tf.reduce_sum(v * w * (v + w)), [v, w]) as H:
        a = v.numpy().astype(np.float64)
        np.testing.assert_allclose(H.gradient, np.tile(3 * a**2, 2), rtol=1e-5)
        want = np.block([[np.diag(2 * a), np.diag(4 * a)], [np.diag(4 * a), np.diag(2 * a)]])
        np.testing.assert_allclose(H.to_dense(), want, rtol=1e-5)
