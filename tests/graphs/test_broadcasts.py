"""Operations on repeated values take the values themselves, with the same bits."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._graphs.broadcasts import broadcast_instead_of_repeating
from hvp._graphs.graph import Graph, node_of
from hvp._graphs.sizes import graph_def_with_shapes, take_sizes
from tests import inside
from tests.cases import dense_hessian, random, relative_error
from tests.cases import mlp as network

X = random(0, 6, 5)
ROW = random(1, 1, 5)


def repeated(row):
    return tf.tile(row, [6, 1])


def broadcast(row):
    return tf.broadcast_to(row[0], [6, 5])


PATTERNS = {
    "product with tile": lambda x, row: x * repeated(row),
    "product with broadcast": lambda x, row: broadcast(row) * x,
    "quotient": lambda x, row: x / broadcast(row),
    "sum of tensors": lambda x, row: tf.raw_ops.AddN(inputs=[x, repeated(row)]),
    "fill": lambda x, row: x * tf.fill([6, 5], row[0, 0]),
    "function of repeated": lambda x, row: x - tf.exp(-repeated(row)),
    "mean": lambda x, row: x + repeated(row) / 6.0,
    "logic": lambda x, row: tf.where(tf.logical_and(tf.fill([6, 5], True), row > 0), x, -x),
    "comparison": lambda x, row: tf.where(x > repeated(row), x, 0.0),
    "two repeated": lambda x, row: x * (repeated(row) * broadcast(row)),
    "repeated is the result": lambda x, row: tf.square(repeated(row)),
    "choice": lambda x, row: tf.where(x > 0, repeated(row), x),
    "negative second": lambda x, row: tf.raw_ops.AddN(inputs=[x, -x * 3.0]),
    "sum with a negative": lambda x, row: tf.raw_ops.AddN(inputs=[x**2, tf.negative(x)]),
    "negative with a sum": lambda x, row: tf.raw_ops.AddN(inputs=[tf.negative(x), x**2]),
    "negative of repeated": lambda x, row: tf.raw_ops.AddN(inputs=[x, tf.negative(repeated(row))]),
}
# What is left as it is: copies of more than one entry, and where the result would lack rows.
LEFT = {
    "copies of rows": lambda x, row: tf.tile(x, [2, 1]) * 3.0,
    "matrix product": lambda x, row: x @ tf.transpose(repeated(row)),
    "sum over repeated": lambda x, row: tf.reduce_sum(repeated(row), axis=0),
}


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch):
    inside.set_limit(monkeypatch, "bytes of large values", 1)


def rewritten(pattern):
    """Return a pattern before and after, as functions, and the operations that it needs after."""
    function = tf.function(pattern, autograph=False).get_concrete_function(
        tf.TensorSpec([6, 5]), tf.TensorSpec([1, 5])
    )
    graph_def = graph_def_with_shapes(function.graph)
    broadcast_instead_of_repeating(graph_def)
    take_sizes(graph_def)
    names = [tensor.name for tensor in function.inputs]
    (result,) = (tensor.name for tensor in function.outputs)
    places = [node for node in graph_def.node if node.op == "Placeholder"]
    for node in places:
        graph_def.node.remove(node)

    @tf.function(autograph=False)
    def after(*tensors):
        return Graph(graph_def).imported(dict(zip(names, tensors)), [result])[0]

    graph = after.get_concrete_function(*map(tf.constant, (X, ROW))).graph
    return function, after, needed(graph)


def needed(graph):
    """Return the kinds of the operations that the results of a graph depend on."""
    queue, seen = [tensor.op for tensor in graph.outputs], {}
    while queue:
        operation = queue.pop()
        if operation.name not in seen:
            seen[operation.name] = operation.type
            queue += [tensor.op for tensor in operation.inputs]
    return set(seen.values())


@pytest.mark.parametrize("name", [*PATTERNS, *LEFT])
def test_results_are_the_same_to_the_last_bit(name):
    before, after, kinds = rewritten({**PATTERNS, **LEFT}[name])
    np.testing.assert_array_equal(
        after(tf.constant(X), tf.constant(ROW)), before(tf.constant(X), tf.constant(ROW))
    )
    if name in LEFT:
        assert kinds & {"Tile", "BroadcastTo"}
    elif name == "repeated is the result":
        assert "Tile" not in kinds  # but squared before
    else:
        assert not kinds & {"Tile", "BroadcastTo", "Fill"}
    if name in ("sum with a negative", "negative with a sum"):
        assert "Sub" in kinds
        assert not kinds & {"AddN", "Neg"}


@pytest.mark.parametrize("shape", [[None, 5], None])
def test_unknown_shapes_are_left_alone(shape):
    @tf.function(autograph=False, input_signature=[tf.TensorSpec(shape)])
    def function(x):
        return x * tf.broadcast_to([2.0], tf.shape(x))

    graph_def = graph_def_with_shapes(function.get_concrete_function().graph)
    before = graph_def.SerializeToString(deterministic=True)
    broadcast_instead_of_repeating(graph_def)
    assert graph_def.SerializeToString(deterministic=True) == before


def test_products_repeat_nothing_that_is_large():
    """Biases and means repeat their tangents and cotangents."""
    problem, wide = network("float32"), network("float64")
    with hvp.HessianOperator(problem.loss, problem.variables, problem.data) as H:
        v = random(3, H.shape[0])
        assert relative_error(H @ v, dense_hessian(wide) @ v) < 1e-4
        nodes = inside.program(H).product_part.nodes
        users = {
            node.op
            for node in nodes.values()
            for tensor in node.input
            if node_of(tensor) in nodes and nodes[node_of(tensor)].op in ("Tile", "BroadcastTo")
        }
        assert "AddV2" in {node.op for node in nodes.values()}
        assert not users & {"AddN", "AddV2", "Mul", "RealDiv", "Sub"}
