"""The order of operations: the same results, from fewer values alive at once."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from hvp._graphs.graph import Graph, data_inputs, node_of
from hvp._graphs.inline import inline_calls
from hvp._graphs.schedule import in_order
from hvp._graphs.sizes import graph_def_with_shapes, take_sizes
from hvp._recompute.replay import replay
from tests.cases import random

ROWS, WIDTH, DEPTH = 512, 64, 16


@pytest.fixture(scope="module")
def product():
    """The graph of a chain's Hessian-vector product, its inputs, and the product itself."""
    rng = np.random.default_rng(0)
    x = tf.constant(random(0, ROWS, WIDTH, dtype="float32"))
    w, v = (tf.constant(rng.normal(size=(DEPTH, WIDTH, WIDTH)) / 8, tf.float32) for _ in "wv")

    def function(x, w, v):
        with tf.GradientTape() as outer:
            outer.watch(w)
            with tf.GradientTape() as inner:
                inner.watch(w)
                y = x
                for layer in tf.unstack(w):
                    y = tf.tanh(y @ layer)
                loss = tf.reduce_sum(tf.square(y))
            gradient = inner.gradient(loss, w)
        return outer.gradient(gradient, w, v)

    concrete = tf.function(function, autograph=False).get_concrete_function(x, w, v)
    flat, rename = inline_calls(graph_def_with_shapes(concrete.graph))
    given = {rename(inside.name): value for inside, value in zip(concrete.inputs, (x, w, v))}
    wanted = rename(concrete.outputs[0].name)
    part = replay(Graph(flat), [wanted], list(given))[0].graph_def
    return Graph(part, take_sizes(part, given)), given, wanted, function(x, w, v)


def run(part, given, wanted):
    return tf.function(lambda: part.imported(given, [wanted])[0], autograph=False)()


def chain(part):
    """The operations in the order which the waits between them leave."""
    nodes = part.nodes
    missing = {n: {node_of(t.lstrip("^")) for t in nodes[n].input} & set(nodes) for n in nodes}
    order = []
    while missing:
        ready = [name for name, waits in missing.items() if not waits]
        assert ready, "operations wait for each other"
        for name in ready:
            del missing[name]
            order.append(nodes[name])
        for waits in missing.values():
            waits.difference_update(ready)
    return order


def most_alive(order, large):
    """How many large values are alive at once when each is freed after its last use."""
    uses = Counter(node_of(t) for node in order for t in set(data_inputs(node)))
    alive = most = 0
    for node in order:
        alive += node.name in large
        most = max(most, alive)
        for name in {node_of(tensor) for tensor in data_inputs(node)}:
            uses[name] -= 1
            alive -= name in large and uses[name] == 0
    return most


def large_values(part, given):
    with tf.Graph().as_default() as graph:
        inputs = {name: tf.compat.v1.placeholder(t.dtype, t.shape) for name, t in given.items()}
        tf.graph_util.import_graph_def(part.graph_def, inputs, name="")
        return {
            op.name
            for op in graph.get_operations()
            if op.outputs and op.outputs[0].shape.num_elements() == ROWS * WIDTH
            if op.type not in ("Identity", "Placeholder")
        }


@pytest.mark.parametrize(("strict", "more"), [(True, 4), (False, 8)])
def test_same_results_from_two_values_a_layer(product, strict, more):
    part, given, wanted, expected = product
    ordered = in_order(part, [wanted], strict=strict)
    np.testing.assert_allclose(run(ordered, given, wanted), expected, rtol=1e-5, atol=1e-5)
    # The value of each layer and its tangent, and a few on the way.
    most = most_alive(chain(ordered), large_values(ordered, given))
    assert most <= 2 * DEPTH + more
