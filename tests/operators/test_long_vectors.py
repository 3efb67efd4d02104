"""Vectors that are multiplied part by part, because copies of them would not fit."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import Problem, dense_hessian, mlp, random


@pytest.fixture(autouse=True)
def _every_vector_is_long(monkeypatch):
    inside.set_limit(monkeypatch, "bytes of a long vector", 0)


def operator(problem, **options):
    return hvp.HessianOperator(problem.loss, problem.variables, problem.data, **options)


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 3}, {"batch_size": 3, "memory_limit": "4KiB"}]
)
@pytest.mark.few(3)
def test_products_are_those_of_the_dense_hessian(engine, options):
    problem = mlp("float64")
    dense = dense_hessian(problem)
    with operator(problem, engine=engine, **options) as H:
        v = random(0, H.shape[0], dtype="float64")
        np.testing.assert_allclose(H @ v, dense @ v, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(
            H.damped(2.0) @ v[:, np.newaxis], (dense @ v + 2 * v)[:, np.newaxis], rtol=1e-7
        )
        assert H.stats.products == 2


def test_products_have_the_bits_of_flat_ones(monkeypatch):
    problem = mlp("float32")
    with operator(problem) as H:
        v = random(0, H.shape[0])
        by_parts = H @ v
        inside.set_limit(monkeypatch, "bytes of a long vector", 2**40)
        np.testing.assert_array_equal(by_parts, H @ v)


def test_parts_of_all_shapes_and_types():
    """Scalars, empty parts, and lengths that leave the next part unaligned."""
    shapes = [(), (3,), (0, 2), (5, 1), (2, 2, 2)]
    ws = [tf.Variable(random(i, *shape)) for i, shape in enumerate(shapes)]
    ws.append(tf.Variable(tf.cast(random(9, 3), tf.bfloat16)))
    ws.append(tf.Variable(random(10, 2, dtype="float64")))

    def loss():
        return tf.add_n([tf.reduce_sum(tf.cast(w, tf.float64) ** 2) for w in ws])

    with hvp.HessianOperator(loss, ws) as H:
        v = np.round(8 * random(0, H.shape[0], dtype="float64")) / 8  # exact in bfloat16
        for piece in (v, v[::-1][::-1], np.stack([v, v], axis=1)[:, 0]):
            np.testing.assert_array_equal(H @ piece, 2 * v)


def test_the_vector_is_neither_kept_nor_changed():
    w = tf.Variable(random(0, 1000))
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**2) / 2, w) as H:
        v = random(1, 1000)
        before = v.copy()
        product = H @ v
        again = H @ product
        assert not np.shares_memory(product, v)
        gc.collect()
        np.testing.assert_array_equal(v, before)
        np.testing.assert_array_equal(product, before)
        np.testing.assert_array_equal(again, before)
        v.setflags(write=False)
        np.testing.assert_array_equal(H @ v, before)


def test_a_stale_operator_is_refused_all_the_same():
    w = tf.Variable(random(0, 4))
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w) as H:
        H @ np.ones(4)
        w.assign_add(tf.ones(4))
        with pytest.raises(hvp.StaleOperatorError, match="changed"):
            H @ np.ones(4)


def test_a_product_that_is_not_finite_is_refused():
    w = tf.Variable([1e10, 1.0])
    problem = Problem(lambda: tf.reduce_sum(w**3) / 6, w, None)
    with hvp.HessianOperator(problem.loss, w) as H, pytest.raises(hvp.NonFiniteError):
        H @ np.array([1e30, 1.0])


def test_a_gradient_that_is_released_is_there_again_after_a_refresh():
    w = tf.Variable([1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**3), w) as H:
        H.release_gradient()
        H.release_gradient()
        np.testing.assert_allclose(H @ np.ones(2), [6, 12])
        assert H.value == 9
        with pytest.raises(hvp.HvpError, match=r"released.*call refresh\(\)"):
            _ = H.gradient
        with pytest.raises(hvp.HvpError, match="released"):
            hvp.check(H)
        H.refresh()
        np.testing.assert_allclose(H.gradient, [3, 12])
