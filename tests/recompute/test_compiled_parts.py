"""The functions of recomputed segments: shared where they are equal, and without what is no use."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._engines import trace
from hvp._graphs.dataflow import KEPT_WHOLE
from hvp._graphs.graph import node_of
from tests import inside
from tests.cases import Problem, dense_hessian, random, relative_error

MASK = np.tril(np.ones((1, 1, 5), bool))


class Chain:
    """Equal layers, in groups that are segments, each of segments of its own."""

    def __init__(self, groups, dtype="float64"):
        self.x = tf.constant(random(99, 6, 5), dtype)
        self.weights = [
            tf.Variable(random(i, 5, 5, dtype=dtype, scale=0.4)) for i in range(2 * groups)
        ]
        starts = range(0, len(self.weights), 2)
        self.segments = [self.segment(self.weights[i : i + 2]) for i in starts]

    def segment(self, weights):
        parts = [hvp.recompute(lambda x, ws=ws: self.layers(x, ws)) for ws in halves(weights)]
        return hvp.recompute(lambda x: parts[1](parts[0](x)))

    def layers(self, x, weights):
        for w in weights:
            mask = tf.logical_and(tf.fill([4, 6, 5], True), MASK)
            x = tf.tanh(x @ w)
            x = tf.reduce_sum(tf.where(mask, x, tf.zeros_like(x)), axis=0)
        return x

    def loss(self):
        x = self.x
        for segment in self.segments:
            x = segment(x)
        return tf.reduce_mean(x**2)

    def plain_loss(self):
        return tf.reduce_mean(self.layers(self.x, self.weights) ** 2)


def halves(items):
    return items[: len(items) // 2], items[len(items) // 2 :]


def compiled(H):
    """The recomputed functions in the product of an operator, by name."""
    functions = inside.program(H).product_part.functions.values()
    return {f.signature.name: f for f in functions if KEPT_WHOLE in f.signature.name}


@pytest.mark.long
def test_equal_segments_share_their_functions_though_each_has_segments_inside():
    chain = Chain(4)
    with hvp.HessianOperator(chain.loss, chain.weights) as H:
        v = random(1, H.shape[0], dtype="float64")
        with hvp.HessianOperator(chain.plain_loss, chain.weights) as plain:
            assert relative_error(H @ v, plain @ v) < 1e-12
        nodes = inside.program(H).product_part.graph_def.node
    calls = [node.attr["f"].func.name for node in nodes if "f" in node.attr]
    # Two of each segment. Those of the two in the middle are equal.
    assert len(calls) == 8
    assert len(set(calls)) <= 6


@pytest.mark.long
def test_third_derivatives_still_pass_through_segments_inside():
    chain, v = Chain(2), random(1, 100, dtype="float64")

    def third(loss):
        with tf.GradientTape() as tape:
            with hvp.HessianOperator(loss, chain.weights, engine="tape") as H:
                product = H.product([tf.reshape(p, [5, 5]) for p in tf.split(v, 4)])
            norm = tf.add_n([tf.reduce_sum(part**2) for part in product])
        return tf.concat([tf.reshape(g, [-1]) for g in tape.gradient(norm, chain.weights)], 0)

    assert relative_error(third(chain.loss), third(chain.plain_loss)) < 1e-10


def test_segments_repeat_no_mask(monkeypatch):
    inside.set_limit(monkeypatch, "bytes of large values", 1)
    chain, wide = Chain(2, "float32"), Chain(2)
    with hvp.HessianOperator(chain.loss, chain.weights) as H:
        v = random(1, H.shape[0])
        oracle = dense_hessian(Problem(wide.plain_loss, wide.weights))
        assert relative_error(H @ v, oracle @ v) < 1e-4
        functions = compiled(H).values()
    inputs = [kind for function in functions for kind in inputs_of("LogicalAnd", function)]
    assert inputs
    assert "Fill" not in inputs


def inputs_of(kind, function):
    """The kinds of the operations that compute the inputs of those of one kind."""
    nodes = {node.name: node for node in function.node_def}
    makers = {node_of(tensor) for n in nodes.values() if n.op == kind for tensor in n.input}
    return [nodes[name].op for name in makers if name in nodes]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.few(1)
def test_an_operator_does_not_keep_the_graph_that_was_traced(recomputed, monkeypatch):
    chain, graphs = Chain(2), []
    original = trace.concrete_function

    def concrete_function(function):
        concrete = original(function)
        graphs.append(weakref.ref(concrete.graph))
        return concrete

    monkeypatch.setattr(trace, "concrete_function", concrete_function)
    loss = chain.loss if recomputed else chain.plain_loss
    with hvp.HessianOperator(loss, chain.weights) as H:
        H @ np.ones(H.shape[0])
        gc.collect()
        assert graphs
        assert not any(graph() for graph in graphs)
