"""A loss at several points, from one trace."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._data.budget import MemoryFraction
from hvp._minimize.points import Points
from hvp._minimize.position import Position
from hvp._snapshots.problem import evaluate_loss
from hvp._vectors.variables import collect_variables
from tests.cases import random


def problem():
    w = tf.Variable(random(0, 50, 4, dtype="float64"))
    x = random(1, 60, 50, dtype="float64")
    return (lambda x: tf.reduce_mean(tf.math.softplus(x @ w))), w, (x,)


def gradient_at(w, x):
    return (x.T @ (1 / (1 + np.exp(-x @ w)))).ravel() / (len(x) * 4)


@pytest.mark.parametrize("options", [{}, {"batch_size": 7}, {"engine": "tape"}])
@pytest.mark.parametrize("products", [False, True])
def test_points(products, options):
    loss, w, data = problem()
    start = w.numpy()
    points = Points.of(loss, w, data, products=products, **options)
    for scale in (1.0, 2.0, 3.0, 2.0):
        x = scale * start.ravel()
        point = points.at(x)
        np.testing.assert_allclose(point.gradient, gradient_at(scale * start, *data), rtol=1e-10)
        assert point.gradient_norm == pytest.approx(np.linalg.norm(point.gradient))
        np.testing.assert_array_equal(w.numpy(), start)
        if products:
            v = random(2, 200, dtype="float64")
            step = 1e-5
            difference = gradient_at(scale * start + step * v.reshape(50, 4), *data)
            difference -= gradient_at(scale * start - step * v.reshape(50, 4), *data)
            np.testing.assert_allclose(points.product(x, v), difference / (2 * step), atol=1e-8)
    assert points.work.evaluations == 3
    assert points.work.non_finite == 0


def test_without_products_nothing_is_kept():
    loss, w, data = problem()
    for options in ({}, {"batch_size": 7}):
        evaluation = evaluate_loss(loss, w, data, products=False, **options)
        assert evaluation.statistics.residual_bytes == 0


def test_batches_that_are_kept_keep_no_gradients():
    loss, w, data = problem()
    H = hvp.HessianOperator(loss, w, data, batch_size=2)
    assert H.stats.batches_kept == 30
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, tf.__internal__.EagerTensor)]
    shaped = [t.numpy() for t in tensors if t.shape == w.shape]
    # Besides the variable's own value: the gradient over all.
    assert sum(not np.array_equal(array, w.numpy()) for array in shaped) == 1


def test_an_operator_is_left_as_it_is():
    loss, w, data = problem()
    H = hvp.HessianOperator(loss, w, data)
    value, products = H.value, H.stats.products
    points = Points.of(H)
    points.product(np.zeros(200), np.ones(200))
    assert H.value == value
    assert H.stats.gradient_evaluations == 3  # counted together, as of one loss
    assert H.stats.products == products + 1
    assert points.products == 1


def test_a_limit_is_shared():
    loss, w, data = problem()
    options = {"batch_size": 2, "memory_limit": "8 KB"}
    alone = hvp.HessianOperator(loss, w, data, **options).stats.batches_kept
    points = Points.of(loss, w, data, **options)
    each = points.at(w.numpy().ravel()).operator.stats.batches_kept
    assert 0 < each <= alone / 2
    assert MemoryFraction("2GiB", 1 / 2).nbytes == 2**30
    assert MemoryFraction(1000, 1 / 4).nbytes == 250
    with pytest.raises(hvp.HvpError, match="memory_limit"):
        _ = MemoryFraction("much", 1 / 2).nbytes


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_positions_of_few_and_of_many_variables(count):
    variables = [tf.Variable(random(i, 2, 3)) for i in range(count)]
    position = Position(collect_variables(variables))
    before = np.concatenate([v.numpy().ravel() for v in variables])
    np.testing.assert_array_equal(position.read(), before)
    with position.restored():
        position.write(2 * before)
        np.testing.assert_array_equal(variables[-1], 2 * before[-6:].reshape(2, 3))
        np.testing.assert_array_equal(position.read(), 2 * before)
    np.testing.assert_array_equal(position.read(), before)
