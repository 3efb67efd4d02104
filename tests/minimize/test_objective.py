"""`ScipyObjective`, called as scipy does."""

import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

import hvp
from tests.minimize.problems import (
    ridge_logistic,
    rosen,
    rosen_der,
    rosen_hess_prod,
    rosenbrock,
    rosenbrock_start,
    traced,
)


def objective_of(dtype="float64"):
    problem, H = traced(rosenbrock, 5, dtype)
    return hvp.ScipyObjective(H), problem.variables


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_are_scipys(dtype):
    objective, w = objective_of(dtype)
    products = objective.products
    tolerance = {"rtol": 1e-4 if dtype == "float32" else 1e-12}
    rng = np.random.default_rng(0)
    x, p = rng.standard_normal(5).astype("float32"), rng.standard_normal(5).astype("float32")
    x, p = x.astype("float64"), p.astype("float64")
    np.testing.assert_allclose(objective.fun(x), rosen(x), **tolerance)
    np.testing.assert_allclose(objective.jac(x), rosen_der(x), **tolerance)
    np.testing.assert_allclose(objective.hessp(x, p), rosen_hess_prod(x, p), **tolerance)
    np.testing.assert_allclose(objective.hess(x) @ p, rosen_hess_prod(x, p), **tolerance)
    np.testing.assert_allclose(
        objective.hess_dense(x), scipy.optimize.rosen_hess(x), **tolerance, atol=1e-4
    )
    value, gradient = objective.fun_and_jac(x)
    assert value == objective.fun(x)
    np.testing.assert_array_equal(gradient, objective.jac(x))
    assert objective.gradient_evaluations == 2  # at the start, and at x
    assert objective.products - products == 2 + 5
    for array in (objective.x0, gradient, objective.hessp(x, p), objective.hess_dense(x)):
        assert array.dtype == np.float64
    np.testing.assert_array_equal(w.numpy(), rosenbrock_start(5).astype(dtype))  # unchanged
    objective.assign(x)
    np.testing.assert_array_equal(w.numpy(), x.astype(dtype))


def test_two_points_are_cached_and_a_third_replaces_the_least_recently_used():
    objective, _ = objective_of()
    one, two, three = np.zeros(5), np.ones(5), np.full(5, 2.0)
    objective.fun(one), objective.fun(two), objective.fun(one)
    assert objective.gradient_evaluations == 3
    objective.fun(three)  # replaces `two`
    objective.hessp(one, one + 1)
    assert objective.gradient_evaluations == 4
    objective.jac(two)
    assert objective.gradient_evaluations == 5


def test_hessian_stays_at_its_point():
    objective, _ = objective_of()
    x, p = np.full(5, 0.3), np.arange(5.0)
    hessian = objective.hess(x)
    assert isinstance(hessian, LinearOperator)
    assert hessian.dtype == np.float64
    for k in range(4):
        objective.fun(np.full(5, float(k)))
    np.testing.assert_allclose(hessian @ p, rosen_hess_prod(x, p))
    np.testing.assert_allclose(hessian.T @ p, rosen_hess_prod(x, p))


@pytest.mark.parametrize("method", ["trust-krylov", "trust-ncg"])
def test_scipy_accepts_the_functions(method):
    objective, w = objective_of()
    result = scipy.optimize.minimize(
        objective.fun_and_jac,
        objective.x0,
        jac=True,
        hessp=objective.hessp,
        method=method,
        options={"gtol": 1e-8},
    )
    assert np.abs(rosen_der(result.x)).max() < 1e-7
    assert objective.gradient_evaluations <= result.nfev + 1
    np.testing.assert_array_equal(w.numpy(), rosenbrock_start(5))


def test_streamed_batches():
    (whole, H), parts = traced(ridge_logistic), ridge_logistic()
    one = hvp.ScipyObjective(H)
    other = hvp.ScipyObjective(
        parts.loss, parts.variables, parts.data, batch_size=16, memory_limit=2000
    )
    x, p = np.array([0.1, 0.2, 0.3, 0.4]), np.array([1.0, -1.0, 2.0, 0.5])
    for _ in range(2):
        assert other.fun(x) == pytest.approx(one.fun(x), rel=1e-12)
        np.testing.assert_allclose(other.hessp(x, p), one.hessp(x, p), rtol=1e-10)
        np.testing.assert_allclose(other.hess_dense(x), one.hess_dense(x), rtol=1e-10)
        x = x + 1
    np.testing.assert_array_equal(parts.variables["weights"].numpy(), whole.variables["weights"])


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_recomputed_layers_stay_at_their_point(engine):
    weights = [tf.Variable(np.eye(3) * (k + 1) / 3) for k in range(2)]
    blocks = [hvp.recompute(lambda x, w=w: tf.tanh(x @ w)) for w in weights]
    data = tf.constant(np.random.default_rng(0).standard_normal((4, 3)))

    def loss(recomputed=True):
        x = data
        for block, w in zip(blocks, weights):
            x = block(x) if recomputed else tf.tanh(x @ w)
        return tf.reduce_mean(x**2)

    objective = hvp.ScipyObjective(loss, weights, engine=engine)
    plain = hvp.ScipyObjective(lambda: loss(False), weights)
    x, p = objective.x0 + 0.1, np.arange(18.0)
    expected = plain.hessp(x, p)
    objective.fun(x)
    objective.fun(x + 1)
    np.testing.assert_allclose(objective.hessp(x, p), expected, rtol=1e-10)
    assert objective.gradient_evaluations == 3


def test_non_finite_loss():
    w = tf.Variable([1.0, 2.0])
    objective = hvp.ScipyObjective(lambda: tf.reduce_sum(tf.math.log(w)), w)
    outside = np.array([-1.0, 1.0])
    assert objective.fun(outside) == np.inf
    assert np.isnan(objective.jac(outside)).all()
    assert np.isnan(objective.hessp(outside, outside)).all()
    assert objective.fun(np.array([np.nan, 1.0])) == np.inf
    assert objective.non_finite == 1
    assert objective.fun(np.array([1.0, 1.0])) == 0


def test_a_frozen_variable_that_changes():
    w, scale = tf.Variable([1.0, 2.0]), tf.Variable(1.0, trainable=False)

    def loss():
        return scale * tf.reduce_sum(w**2)

    x = np.array([1.0, 1.0])
    strict = hvp.ScipyObjective(loss, w)
    lenient = hvp.ScipyObjective(loss, w, on_stale="refresh")
    assert strict.fun(x) == lenient.fun(x) == 2
    scale.assign(3.0)
    with pytest.raises(hvp.StaleOperatorError, match="Variable"):
        strict.fun(x)
    assert strict.fun(x) == lenient.fun(x) == 6


def test_bad_arguments():
    objective, w = objective_of()
    with pytest.raises(hvp.InvalidVectorError, match="shape"):
        objective.fun(np.zeros(4))
    with pytest.raises(hvp.InvalidVectorError):
        objective.assign(np.full(5, np.nan))
    with pytest.raises(TypeError, match="dampin"):
        hvp.ScipyObjective(lambda: tf.reduce_sum(w), w, dampin=1)
    with pytest.raises(hvp.HvpError, match="on_stale"):
        hvp.ScipyObjective(lambda: tf.reduce_sum(w**2), w, on_stale="never")
