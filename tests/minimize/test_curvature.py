"""Optimizers with a Gauss-Newton matrix in place of the Hessian."""

import keras
import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import hvp
from tests.cases import relative_error

T = np.linspace(0, 3, 40)
Y = 2.5 * np.exp(-1.3 * T) + 0.7 + 0.02 * np.sin(37 * T)


def curve(t, w):
    return w[0] * tf.exp(-w[1] * t) + w[2]


def half_squares(predictions, y):
    return tf.reduce_mean((predictions - y) ** 2) / 2


def problem(start=(1.0, 0.3, 0.0)):
    w = tf.Variable(start, dtype=tf.float64)
    return w, (lambda t: curve(t, w), half_squares)


def jacobian(w):
    e = np.exp(-w[1] * T)
    return np.stack([e, -w[0] * T * e, np.ones_like(T)], axis=1)


def residuals(w):
    return w[0] * np.exp(-w[1] * T) + w[2] - Y


WAYS = {
    "one batch": {},
    "batches": {"batch_size": 12},
    "tape": {"engine": "tape"},
    "sampled": {"hessian_batch_size": 40},
    "sampled gradients": {"hessian_batch_size": 40, "gradient_batch_size": 40},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_a_step_is_that_of_levenberg_and_marquardt(way):
    w, pair = problem()
    start, lam = w.numpy(), 0.05
    J, r = jacobian(start), residuals(start)
    want = -np.linalg.solve(J.T @ J / 40 + lam * np.eye(3), J.T @ r / 40)
    newton = hvp.NewtonCG(
        pair,
        w,
        (T, Y),
        curvature="gauss-newton",
        damping=lam,
        radius=1e3,
        forcing=1e-12,
        **WAYS[way],
    )
    step = newton.step()
    assert step.accepted
    assert step.outcome == "converged"
    assert relative_error(w.numpy() - start, want) < 1e-9
    assert newton.damping != lam


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_it_ends_where_least_squares_ends(way):
    w, pair = problem()
    want = scipy.optimize.least_squares(residuals, w.numpy(), jacobian, xtol=1e-15, gtol=1e-14)
    newton = hvp.NewtonCG(pair, w, (T, Y), curvature="gauss-newton", damping=1e-3, **WAYS[way])
    result = newton.minimize(gtol=1e-10)
    assert result.success
    assert relative_error(w.numpy(), want.x) < 1e-7
    assert relative_error(result.fun, want.cost / 40) < 1e-9
    # No curvature but the Hessian's tells about saddles.
    assert "negative curvature" not in result.message


def test_an_operator_is_its_own_curvature():
    w, pair = problem()
    with hvp.GaussNewtonOperator(*pair, w, (T, Y)) as G:
        by_operator = hvp.NewtonCG(G, damping=1e-3).minimize(gtol=1e-10)
        w.assign([1.0, 0.3, 0.0])
        named = hvp.NewtonCG(pair, w, (T, Y), curvature="gauss-newton", damping=1e-3)
        assert named.minimize(gtol=1e-10).nit == by_operator.nit
        with pytest.raises(hvp.HvpError, match="curvature='gauss-newton' beside it"):
            hvp.NewtonCG(G, curvature="gauss-newton")


@pytest.mark.parametrize("method", ["trust-ncg", "trust-exact", "L-BFGS-B"])
def test_scipys_methods(method):
    w, pair = problem()
    want = scipy.optimize.least_squares(residuals, w.numpy(), jacobian, xtol=1e-15, gtol=1e-14)
    tolerance = {"gtol": 1e-9} if method != "L-BFGS-B" else {"gtol": 1e-9, "ftol": 0}
    result = hvp.minimize(pair, w, (T, Y), method, curvature="gauss-newton", **tolerance)
    assert relative_error(result.x, want.x) < 1e-5


def compiled():
    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(4, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(3, "softmax", kernel_regularizer="l2"),
        ]
    )
    model.compile(loss="sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    for weight in model.trainable_variables:
        weight.assign(rng.standard_normal(weight.shape) / 2)
    x = rng.standard_normal((60, 3)).astype("float32")
    return model, (x, np.argmax(x, axis=1))


@pytest.mark.parametrize("options", [{}, {"batch_size": 25}, {"hessian_batch_size": 30}])
@pytest.mark.few(1)
@pytest.mark.long
def test_compiled_models(options):
    model, data = compiled()
    before = float(model.compute_loss(*data, model(data[0])))
    newton = hvp.NewtonCG.from_keras(model, data, curvature="gauss-newton", damping=1e-3, **options)
    result = newton.minimize(gtol=1e-4, maxiter=100)
    after = float(model.compute_loss(*data, model(data[0])))
    assert result.fun == pytest.approx(after, rel=1e-5)  # with the regularizers
    assert result.success
    assert after < before / 2
    again, _ = compiled()
    scipys = hvp.minimize.from_keras(again, data, curvature="gauss-newton", gtol=1e-4)
    assert scipys.fun == pytest.approx(after, rel=1e-2)


def test_bad_arguments_are_refused():
    w, pair = problem()
    with pytest.raises(hvp.InvalidLossError, match="does not tell the model"):
        hvp.NewtonCG(lambda t, y: half_squares(curve(t, w), y), w, (T, Y), curvature="gauss-newton")
    with pytest.raises(hvp.InvalidLossError, match="is a pair"):
        hvp.NewtonCG(pair, w, (T, Y))
    with pytest.raises(hvp.InvalidLossError, match="is a pair"):
        hvp.minimize(pair, w, (T, Y))
    for function in (hvp.NewtonCG, hvp.minimize):
        with pytest.raises(hvp.HvpError, match="curvature is 'fisher'"):
            function(pair, w, (T, Y), curvature="fisher")
    with pytest.raises(hvp.InvalidDataError, match="dict"):
        hvp.NewtonCG(pair, w, {"t": T, "y": Y}, curvature="gauss-newton")
    summed = pair[0], lambda p, y: tf.reduce_sum((p - y) ** 2)
    with pytest.raises(hvp.InvalidLossError, match="sum over examples"):
        hvp.NewtonCG(summed, w, (T, Y), curvature="gauss-newton")
    with pytest.raises(hvp.InvalidLossError, match="not a mean"):
        hvp.NewtonCG(summed, w, (T, Y), curvature="gauss-newton", batch_size=8)
