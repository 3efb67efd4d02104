"""`check` of Gauss-Newton and Fisher matrices, right ones and wrong ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.operators.test_gauss_newton import make, softmax_loss

KINDS = {
    "gauss-newton": lambda *a, **o: hvp.GaussNewtonOperator(*a, **o),
    "convex": lambda *a, **o: hvp.GaussNewtonOperator(*a, convex=True, **o),
    "type-2": lambda *a, **o: hvp.FisherOperator(*a, likelihood="categorical", **o),
    "empirical": lambda *a, **o: hvp.FisherOperator(*a, kind="empirical", **o),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 3}, {"engine": "tape"}, {"regularization": lambda: 0.0, "damping": 1.0}],
)
@pytest.mark.few(1)
def test_right_ones_pass(kind, options):
    model, x, y = make("dense")
    before = [weight.numpy() for weight in model.trainable_variables]
    with KINDS[kind](model, softmax_loss, model, (x, y), **options) as G:
        for operator in (G, G.block("bias")):
            report = hvp.check(operator)
            assert report.ok, report
            assert report["differences"].outcome == "ok"
        known = kind != "gauss-newton" and "regularization" not in options
        assert G.is_positive_semidefinite == known
    for weight, was in zip(model.trainable_variables, before):
        np.testing.assert_array_equal(weight, was)


@tf.custom_gradient
def half_the_gradient(x):
    return x, lambda upstream: upstream / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(1)
def test_a_wrong_gradient_of_the_model_is_found(kind):
    model, x, y = make("dense")

    def wrong(x):
        return model.layers[1](half_the_gradient(model.layers[0](x)))

    with KINDS[kind](wrong, softmax_loss, model, (x, y)) as G:
        assert hvp.check(G)["differences"].outcome == "failed"


@pytest.mark.parametrize("kind", ["gauss-newton", "empirical"])
@pytest.mark.few(1)
def test_a_wrong_gradient_of_the_loss_is_found(kind):
    model, x, y = make("dense")

    @tf.custom_gradient
    def wrong(p):
        def gradient(upstream):
            # Its derivative by p is left out.
            return upstream * tf.stop_gradient(tf.cos(p))

        return tf.sin(p), gradient

    with KINDS[kind](model, lambda p, y: softmax_loss(wrong(p), y), model, (x, y)) as G:
        # The empirical matrix needs first derivatives only, which are right.
        expected = "failed" if kind == "gauss-newton" else "ok"
        assert hvp.check(G)["differences"].outcome == expected


def test_random_estimates_and_compiled_models():
    model, x, y = make("dense")
    drawn = hvp.FisherOperator(
        model, softmax_loss, model, (x, y), likelihood="categorical", kind="monte-carlo"
    )
    report = hvp.check(drawn)
    assert report.ok
    assert "random estimate" in report["differences"].message
    ended = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")])
    ended.compile(loss="sparse_categorical_crossentropy")
    G = hvp.GaussNewtonOperator.from_keras(ended, (x.astype("float32"), y))
    assert hvp.check(G)["differences"].outcome == "ok"


def test_a_negative_eigenvalue_is_a_failure_where_there_should_be_none(monkeypatch):
    w = tf.Variable(np.ones(4))

    def loss(p):
        return tf.reduce_sum(p**2) / 2

    with hvp.GaussNewtonOperator(lambda: w * 1, loss, w, convex=True) as G:
        assert hvp.check(G)["curvature"].outcome == "ok"
        monkeypatch.setattr(G, "matvec", lambda x: -x)
        assert hvp.check(G)["curvature"].outcome == "failed"


def test_solvers_know_that_there_is_no_negative_curvature():
    rng = np.random.default_rng(0)
    w = tf.Variable(rng.standard_normal(200))
    J = rng.standard_normal((30, 200))

    def loss(p):
        return tf.reduce_mean(p**2)

    options = {"method": "cg", "rtol": 1e-14, "maxiter": 500}

    def model():
        return tf.linalg.matvec(J, w)

    for convex in (True, False):
        with hvp.GaussNewtonOperator(model, loss, w, convex=convex) as G:
            with pytest.warns(hvp.ConvergenceWarning):
                result = hvp.solve(G, np.ones(200), **options)
            assert (result.outcomes == "negative curvature") == (not convex)
            assert (result.negative_curvature is None) == convex
    with hvp.GaussNewtonOperator(model, loss, w, convex=True) as G:
        assert G.damped(0.1).as_tf_operator().is_positive_definite
        assert G.as_tf_operator().is_positive_definite is None
        assert not G.damped(-1.0).is_positive_semidefinite
