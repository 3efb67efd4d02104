"""Influence functions with another matrix than the Hessian."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import relative_error
from tests.operators.test_gauss_newton import (
    dense_gauss_newton,
    make,
    softmax_curvature,
    softmax_loss,
)


def gradients(model, x, y, loss=softmax_loss):
    rows = []
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            value = loss(model(x[i : i + 1]), y[i : i + 1])
        parts = tape.gradient(value, model.trainable_variables)
        rows.append(np.concatenate([part.numpy().ravel() for part in parts]))
    return np.array(rows)


WAYS = {
    "exact": {},
    "cg": {"solver": "cg", "rtol": 1e-12},
    "batches": {"batch_size": 3},
    "tape": {"engine": "tape"},
    "limited": {"memory_limit": "200MiB"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_gauss_newton(way):
    model, x, y = make("dense")
    G = dense_gauss_newton(model, x, softmax_curvature) + 0.1 * np.eye(43)
    g = gradients(model, x, y)
    influence = hvp.InfluenceFunctions(
        (model, softmax_loss), model, (x, y), curvature="gauss-newton", damping=0.1, **WAYS[way]
    )
    want = g[:4] @ np.linalg.inv(G) @ g.T / 7
    assert relative_error(influence.scores((x[:4], y[:4])), want) < 1e-8
    assert isinstance(influence.operator, hvp.GaussNewtonOperator)


def test_an_operator():
    model, x, y = make("dense")
    g = gradients(model, x, y)
    F = g.T @ g / 7 + 0.1 * np.eye(43)

    def loss(x, y):
        return softmax_loss(model(x), y)

    with hvp.FisherOperator(model, softmax_loss, model, (x, y), kind="empirical") as operator:
        influence = hvp.InfluenceFunctions(loss, model, (x, y), curvature=operator, damping=0.1)
        want = g @ np.linalg.inv(F) @ g.T / 7
        assert relative_error(influence.scores((x, y)), want) < 1e-8
        with pytest.raises(hvp.HvpError, match="batch_size is given together with an operator"):
            hvp.InfluenceFunctions(loss, model, (x, y), curvature=operator, batch_size=3)
        with pytest.raises(hvp.HvpError, match="has other variables"):
            hvp.InfluenceFunctions(loss, model.layers[-1], (x, y), curvature=operator)


@pytest.mark.long
def test_compiled_models():
    x = np.random.default_rng(0).standard_normal((30, 4)).astype("float32")
    y = np.argmax(x[:, :3], axis=1)
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(3, "softmax", kernel_regularizer="l2")]
    )
    model.compile(loss="sparse_categorical_crossentropy")
    hvp.minimize.from_keras(model, (x, y), gtol=1e-5)
    # The model is linear in the weights, so that the matrices are the same.
    want = hvp.InfluenceFunctions.from_keras(model, (x, y)).scores((x[:3], y[:3]))
    for options in ({}, {"batch_size": 8}):
        by_gauss_newton = hvp.InfluenceFunctions.from_keras(
            model, (x, y), curvature="gauss-newton", **options
        )
        scores = by_gauss_newton.scores((x[:3], y[:3]))
        np.testing.assert_allclose(scores, want, rtol=2e-3, atol=2e-4 * np.abs(want).max())


def test_bad_arguments_are_refused():
    model, x, y = make("dense")
    with pytest.raises(hvp.HvpError, match="curvature is 'kfac'"):
        hvp.InfluenceFunctions((model, softmax_loss), model, (x, y), curvature="kfac")
    with pytest.raises(hvp.InvalidLossError, match="is a pair"):
        hvp.InfluenceFunctions((model, softmax_loss), model, (x, y))
