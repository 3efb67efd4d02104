"""What runs once and what runs for each product."""

import logging
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._engines import graph_program
from hvp._graphs import compiled
from hvp._graphs.graph import Graph
from hvp._graphs.split import UnsplittableError
from hvp._vectors.packing import Packing
from tests import inside
from tests.cases import random


def product_operations(loss, variables):
    H = hvp.HessianOperator(loss, variables)
    assert H.stats.note == ""
    return Counter(node.op for node in inside.program(H).product_part.graph_def.node)


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


def imported_graphs(monkeypatch):
    """A list to which every graph that is imported is added."""
    imported, original = [], Graph.imported

    def add(graph, *arguments):
        imported.append(graph)
        return original(graph, *arguments)

    monkeypatch.setattr(Graph, "imported", add)
    return imported


def test_a_form_of_the_product_is_imported_when_it_is_needed(monkeypatch):
    loss, weights = dense_layers(3)
    imported = imported_graphs(monkeypatch)
    with hvp.HessianOperator(loss, weights) as H:
        v = random(3, H.shape[0])
        flat = H @ v
        H @ v
        assert imported == [inside.program(H).once_part, inside.program(H).product_part]
        assert "parts" not in vars(inside.program(H).product)
        np.testing.assert_array_equal(flat, H.flatten(H.product(H.unflatten(v))))
        np.testing.assert_array_equal(flat, H.product(tf.constant(v)))


@pytest.mark.parametrize("batch_size", [None, 2])
def test_residuals_are_not_packed_where_packing_loses_some(batch_size, monkeypatch):
    """As TensorFlow 2.16 does when it folds constants."""
    w, x = tf.Variable(random(0, 6)), random(1, 4, 6)

    def loss(x):
        return tf.reduce_mean(tf.tanh(x @ w[:, None]) ** 2)

    def build():
        return hvp.HessianOperator(loss, w, data=(x,), batch_size=batch_size)

    with build() as H:
        packed = 0 if batch_size else len(inside.held(H).residuals)
        want = H.to_dense()
    original = Packing.pack

    def pack(self, tensors):
        first, *rest = original(self, tensors)
        short = tf.numpy_function(lambda array: array[:-1], [first], first.dtype)
        short.set_shape(first.shape)  # what it was before the graph was optimized
        return [short, *rest]

    monkeypatch.setattr(Packing, "pack", pack)
    with build() as H:
        np.testing.assert_allclose(H.to_dense(), want, rtol=1e-5)
        assert batch_size or len(inside.held(H).residuals) > packed


@pytest.mark.parametrize("loops", [False, True])
def test_what_has_no_loops_is_optimized_briefly(loops, monkeypatch):
    w, brief = tf.Variable(random(0, 5)), []
    original = compiled.call_flat

    def call_flat(function, tensors, captured, *, light_optimization):
        brief.append(light_optimization)
        return original(function, tensors, captured, light_optimization=light_optimization)

    def loss():
        if loops:
            x = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x * w), (0, w))[1]
        else:
            x = w * w * w
        return tf.reduce_sum(x)

    monkeypatch.setattr(compiled, "call_flat", call_flat)
    monkeypatch.setattr(compiled, "has_cpus_only", lambda: True)
    with hvp.HessianOperator(loss, w) as H:
        assert brief == [not loops]
        np.testing.assert_allclose(H @ np.ones(5), 6 * w.numpy(), rtol=1e-5)
        assert brief == [not loops, not loops]


def test_tensorflow_looks_for_effects_only_where_there_are_some(monkeypatch):
    """It adds control dependencies to what assigns, and takes long to look for that."""
    pure, original = [], graph_program.Compiled

    def make(*arguments, **options):
        pure.append(options.get("pure", False))
        return original(*arguments, **options)

    monkeypatch.setattr(graph_program, "Compiled", make)
    w, counter = tf.Variable(random(0, 5)), tf.Variable(0)

    def counting():
        counter.assign_add(1)
        with tf.control_dependencies([tf.debugging.assert_positive(counter)]):
            return tf.reduce_sum(w**3)

    for loss in (counting, lambda: tf.reduce_sum(tf.nn.dropout(w, 0.5) ** 3), lambda: w[0] ** 3):
        hvp.HessianOperator(loss, w).close()
    assert pure == [False, False, True]


def test_each_variable_is_read_once():
    weights = [tf.Variable(random(i, 5)) for i in range(4)]
    frozen = tf.Variable(random(9, 5))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(frozen * tf.add_n(weights) ** 3), weights)
    kinds = Counter(operation.type for operation in inside.evaluation(H).get_operations())
    assert kinds["ReadVariableOp"] == 5
    frozen.assign_add(np.ones(5, np.float32))
    with pytest.raises(hvp.StaleOperatorError, match=frozen.name.partition(":")[0]):
        H @ np.ones(20)


def test_products_that_are_never_stale_do_not_compare_variables():
    for on_stale, compares in [("raise", True), ("refresh", True), ("ignore", False)]:
        w = tf.Variable(random(0, 5))
        H = hvp.HessianOperator(lambda: tf.reduce_sum(w**3), w, on_stale=on_stale)  # noqa: B023
        assert inside.program(H).product.tells_changes is compares
        np.testing.assert_allclose(H @ np.ones(5), 6 * w.numpy(), rtol=1e-5)
        before = w.numpy()
        w.assign(2 * before)
        if on_stale == "raise":
            with pytest.raises(hvp.StaleOperatorError):
                H @ np.ones(5)
        else:
            factor = 12 if on_stale == "refresh" else 6
            np.testing.assert_allclose(H @ np.ones(5), factor * before, rtol=1e-5)


def test_nothing_with_an_effect_is_in_the_product():
    w = tf.Variable(random(0, 5))
    counter = tf.Variable(0)

    def loss():
        counter.assign_add(1)
        return tf.reduce_sum(tf.nn.dropout(w, 0.5) ** 3)

    program = inside.program(hvp.HessianOperator(loss, [w]))
    kinds = {node.op for node in program.product_part.graph_def.node}
    assert not kinds & {"RandomUniform", "AssignAddVariableOp", "ReadVariableOp"}
    once = {node.op for node in program.once_part.graph_def.node}
    assert once >= {"RandomUniform", "AssignAddVariableOp", "ReadVariableOp"}


def test_what_is_cheap_to_remake_is_not_kept():
    """The mean's gradient, one number repeated over the batch, is no residual."""
    w = tf.Variable(random(0, 3, 2))
    x = random(1, 1000, 3)
    H = hvp.HessianOperator(lambda: tf.reduce_mean(tf.exp(x @ w)), [w])
    # x itself is captured data; exp(x @ w) is needed; nothing else of the batch's size is.
    assert H.stats.residual_bytes <= 1000 * (3 + 2 * 2) * 4 + 100


def test_values_of_variables_cost_nothing_to_keep():
    w = tf.Variable(random(0, 300, 300))
    x = random(1, 2, 300)
    H = hvp.HessianOperator(lambda: tf.reduce_mean(tf.tanh(x @ w) @ w), [w])
    assert H.stats.residual_bytes < 300 * 300


def test_sums_are_made_of_pairs():
    """A sum of three terms begins with whichever is free, and so would round differently."""
    w = tf.Variable(random(0, 4, 4))
    x = random(1, 2, 3, 4)

    def loss():
        def body(i, h):
            return i + 1, tf.tanh(h @ w + tf.constant(x)[:, i] @ w) * (h @ w)

        _, h = tf.while_loop(lambda i, h: i < 3, body, (tf.constant(0), tf.ones((2, 4))))
        return tf.reduce_mean(h**2) + tf.reduce_mean((w @ w) * w * tf.tanh(w))

    H = hvp.HessianOperator(loss, [w])
    part = inside.program(H).product_part
    adding = (node for node in part.all_nodes if node.op == "AddN")
    sums = [sum(not name.startswith("^") for name in node.input) for node in adding]
    assert sums
    assert set(sums) == {2}
    v = random(2, 16)
    first = H @ v
    for _ in range(100):
        assert np.array_equal(H @ v, first)


@pytest.mark.parametrize(
    "error",
    [
        UnsplittableError("for a reason"),
        ValueError("for a reason"),
        tf.errors.InvalidArgumentError(None, None, "for a reason"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_graph_engine_fails_at_the_tape_serves(monkeypatch, caplog, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(graph_program, "split", fail)
    w = tf.Variable([1.0, 2.0])
    with caplog.at_level(logging.WARNING, "hvp"):
        H = hvp.HessianOperator(lambda: tf.reduce_sum(w**3), w)
    np.testing.assert_allclose(H @ np.ones(2), [6, 12])
    assert H.stats.engine == "tape"
    assert "for a reason" in H.stats.note
    assert H.stats.note in caplog.text


def test_small_residuals_are_packed_and_large_ones_are_not():
    for size, packed in ((8, True), (300, False)):
        w = tf.Variable(random(0, size, size))
        H = hvp.HessianOperator(lambda w=w: tf.reduce_mean(tf.tanh(w @ w) @ tf.sin(w)), [w])
        assert inside.program(H).tells_changes is packed
        assert (len(inside.held(H).residuals) == 1) is packed


def test_a_large_product_is_imported_once_for_all_forms(monkeypatch):
    loss, weights = dense_layers(12)
    imported = imported_graphs(monkeypatch)
    with hvp.HessianOperator(loss, weights) as H:
        v = random(3, H.shape[0])
        flat = H @ v
        np.testing.assert_array_equal(flat, H.flatten(H.product(H.unflatten(v))))
        np.testing.assert_array_equal(flat, H.product(tf.constant(v)))
        assert imported == [inside.program(H).once_part, inside.program(H).product_part]


def counting_blocks(monkeypatch, H):
    """A list to which the rows of every block product are added."""
    H @ np.ones((H.shape[0], 4), H.dtype)
    product = inside.program(H).product
    calls, rows = [], product.flat_rows

    def count(block, *residuals, place):
        calls.append(block.shape[0])
        return rows(block, *residuals, place=place)

    monkeypatch.setattr(product, "flat_rows", count)
    return calls


@pytest.mark.parametrize(
    ("function", "pieces"),
    [
        (lambda x: tf.tanh(x @ x), [7]),
        (tf.tanh, [3, 3, 1]),
        (
            lambda x: tf.while_loop(
                lambda _: True, lambda x: (tf.tanh(x @ x),), [x], maximum_iterations=1
            )[0],
            [3, 3, 1],
        ),
    ],
    ids=["matrix products", "entrywise", "a loop"],
)
def test_blocks_of_matrix_products_may_exceed_the_cache(monkeypatch, function, pieces):
    x = tf.Variable(random(0, 6, 6, scale=0.3, dtype="float64"))
    with hvp.HessianOperator(lambda: tf.reduce_sum(function(x) ** 2), x) as H:
        calls, V = counting_blocks(monkeypatch, H), random(1, 36, 7, dtype="float64")
        inside.set_limit(monkeypatch, "bytes of rows times residuals", 3 * H.stats.residual_bytes)
        np.testing.assert_allclose(H @ V, H.to_dense() @ V, atol=1e-12)
        assert calls[: len(pieces)] == pieces


def test_two_or_three_columns_of_a_small_product_are_multiplied_one_by_one(monkeypatch):
    x = tf.Variable(random(0, 50, dtype="float64"))
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.sin(x)), x) as H:
        calls = counting_blocks(monkeypatch, H)
        for count in (2, 3, 4):
            V = random(1, 50, count, dtype="float64")
            np.testing.assert_allclose(H @ V, -np.sin(x.numpy())[:, None] * V, rtol=1e-12)
        assert calls == [4]
