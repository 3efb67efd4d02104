"""What runs once and what runs for each product."""

from collections import Counter

import tensorflow as tf

from hvp._linearize.gradient import value_and_gradient
from hvp._linearize.program import Program
from tests.cases import random


def product_operations(loss, variables):
    program = Program(value_and_gradient(loss), variables)
    assert program.note == ""
    return Counter(node.op for node in program._graph.product_part.node)


def dense_layers(count, wrap=lambda f: f):
    weights = [tf.Variable(random(i, 6, 6, scale=0.3)) for i in range(count)]
    x, y = random(99, 5, 6), random(98, 5, 6)

    def loss():
        h = x
        for w in weights:
            h = wrap(lambda h, w: tf.tanh(h @ w))(h, w)
        return tf.reduce_mean((h - y) ** 2)

    return loss, weights


def test_no_matrix_product_that_does_not_depend_on_the_vector_is_repeated():
    """Per layer six, at the first, which needs no derivative by its input, two."""
    for count in (1, 4):
        loss, weights = dense_layers(count)
        assert product_operations(loss, weights)["MatMul"] == 2 + 6 * (count - 1)


def test_nor_inside_nested_functions():
    for wrap in (tf.function, lambda f: tf.function(tf.function(f))):
        loss, weights = dense_layers(4, wrap)
        operations = product_operations(loss, weights)
        assert operations["MatMul"] == 20
        assert not any("Call" in kind for kind in operations)
    loss, weights = dense_layers(4)
    assert product_operations(tf.function(loss), weights)["MatMul"] == 20


def test_nothing_with_an_effect_is_in_the_product():
    w = tf.Variable(random(0, 5))
    counter = tf.Variable(0)

    def loss():
        counter.assign_add(1)
        return tf.reduce_sum(tf.nn.dropout(w, 0.5) ** 3)

    program = Program(value_and_gradient(loss), [w])
    kinds = {node.op for node in program._graph.product_part.node}
    assert not kinds & {"RandomUniform", "AssignAddVariableOp", "ReadVariableOp"}
    once = {node.op for node in program._graph._once_part.node}
    assert once >= {"RandomUniform", "AssignAddVariableOp", "ReadVariableOp"}


def test_what_is_cheap_to_remake_is_not_kept():
    """The mean's gradient, one number repeated over the batch, is no residual."""
    w = tf.Variable(random(0, 3, 2))
    x = random(1, 1000, 3)
    program = Program(value_and_gradient(lambda: tf.reduce_mean(tf.exp(x @ w))), [w])
    _, engine = program.linearize()
    # x itself is captured data; exp(x @ w) is needed; nothing else of the batch's size is.
    assert engine.nbytes <= 1000 * (3 + 2 * 2) * 4 + 100


def test_values_of_variables_cost_nothing_to_keep():
    w = tf.Variable(random(0, 300, 300))
    x = random(1, 2, 300)
    program = Program(value_and_gradient(lambda: tf.reduce_mean(tf.tanh(x @ w) @ w)), [w])
    _, engine = program.linearize()
    assert engine.nbytes < 300 * 300
