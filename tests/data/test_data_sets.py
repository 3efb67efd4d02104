"""Losses with a data set for each of their terms, against the sum written by hand."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import random

RNG = np.random.default_rng(0)
DATA = {
    "inside": (RNG.standard_normal((7, 3)), RNG.standard_normal(7)),
    "edge": (RNG.standard_normal((4, 3)),),
    "start": {"at": RNG.standard_normal((2, 3)), "value": RNG.standard_normal(2)},
}
FACTORS = {"edge": 10.0, "start": 0.5}


def problem(dtype=tf.float64):
    w = tf.Variable([0.3, -0.2, 0.5], dtype=dtype)

    def predict(x):
        return tf.tanh(tf.linalg.matvec(x, w))

    losses = {
        "inside": lambda x, y: tf.reduce_mean((predict(x) - y) ** 2),
        "edge": lambda x: tf.reduce_mean(tf.exp(predict(x))),
        "start": lambda at, value: tf.reduce_mean(tf.abs(predict(at) - value) ** 3),
    }

    def whole():
        edge, start = losses["edge"](*DATA["edge"]), losses["start"](**DATA["start"])
        return losses["inside"](*DATA["inside"]) + 10.0 * edge + 0.5 * start

    return w, losses, whole


def by_differences(w, whole):
    """Return the Hessian of the whole loss, from differences of its gradient."""
    start, columns = w.numpy(), []

    def gradient(at):
        w.assign(at)
        with tf.GradientTape() as tape:
            value = whole()
        return tape.gradient(value, w).numpy()

    for unit in np.eye(3) * 1e-5:
        columns.append((gradient(start + unit) - gradient(start - unit)) / 2e-5)
    value = gradient(start)
    return np.stack(columns), value, float(whole())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "tape"},
        {"recompute": False, "jit_compile": "auto"},
        {"batch_size": 2},
        {"batch_size": 3, "engine": "tape"},
        {"devices": ["CPU:0"]},
        {"batch_size": 2, "devices": ["CPU:0"]},
    ],
)
@pytest.mark.few(1)
def test_the_sum_of_the_means_over_each_data_set(options):
    w, losses, whole = problem()
    expected, gradient, value = by_differences(w, whole)
    with hvp.HessianOperator(losses, w, DATA, weight=FACTORS, **options) as H:
        np.testing.assert_allclose(H.to_dense(), expected, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(H.gradient, gradient, rtol=1e-12)
        assert H.value == pytest.approx(value, rel=1e-12)
        block = H @ np.eye(3)[:, :2]
        np.testing.assert_allclose(block, expected[:, :2], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_a_regularization_counts_once(options):
    w, losses, whole = problem()
    expected, _, _ = by_differences(w, whole)

    def penalty():
        return 2.0 * tf.reduce_sum(w**2)

    H = hvp.HessianOperator(losses, w, DATA, weight=FACTORS, regularization=penalty, **options)
    np.testing.assert_allclose(H.to_dense(), expected + 4 * np.eye(3), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_a_gauss_newton_matrix(options):
    w, *_ = problem()

    def model(x):
        return tf.linalg.matvec(x, w)

    def squares(p, *y):
        return tf.reduce_mean((p - (y[0] if y else 1.0)) ** 2)

    data = {name: DATA[name] for name in ("inside", "edge")}
    G = hvp.GaussNewtonOperator(
        {"inside": model, "edge": model},
        {"inside": squares, "edge": squares},
        w,
        data,
        weight={"edge": 10.0},
        **options,
    )
    inside, edge = DATA["inside"][0], DATA["edge"][0]
    expected = 2 * inside.T @ inside / 7 + 10 * 2 * edge.T @ edge / 4
    np.testing.assert_allclose(G.to_dense(), expected, rtol=1e-10)


def test_minimizers_take_them():
    w, losses, whole = problem()
    newton = hvp.NewtonCG(losses, w, DATA, weight=FACTORS)
    assert newton.minimize(gtol=1e-9).success
    best = w.numpy()
    w.assign([0.3, -0.2, 0.5])
    result = hvp.minimize(losses, w, DATA, weight=FACTORS, method="trust-ncg", tol=1e-9)
    np.testing.assert_allclose(result.x, best, atol=1e-5)
    assert result.fun == pytest.approx(float(whole()), rel=1e-9)


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ({"inside": DATA["inside"]}, {}, ["'edge'", "'start'"]),
        (DATA["inside"], {}, ["'inside'", "tuple"]),
        (DATA, {"weight": {"egde": 1.0}}, ["weight", "'egde'", "'edge'"]),
        (DATA, {"weight": [1.0]}, ["weight", "list", "dict"]),
        (DATA, {"weight": {"edge": -1.0}}, ["weight['edge']"]),
        (DATA, {"weight": lambda **sets: 1.0}, ["weight"]),
        (DATA, {"reduction": "sum"}, ["reduction"]),
        (DATA, {"memory_limit": 2**20}, ["memory_limit"]),
    ],
)
def test_refuses_what_does_not_fit(data, options, words):
    w, losses, _ = problem()
    with pytest.raises(hvp.HvpError) as error:
        hvp.HessianOperator(losses, w, data, **options)
    assert all(word in str(error.value) for word in words)


def test_refuses_weights_without_terms():
    w, losses, _ = problem()
    with pytest.raises(hvp.HvpError, match="no terms"):
        hvp.HessianOperator(losses["inside"], w, DATA["inside"], weight={"inside": 2.0})


def test_refuses_a_sum_over_batches():
    w, losses, _ = problem()
    sums = {**losses, "edge": lambda x: tf.reduce_sum(tf.linalg.matvec(x, w) ** 2)}
    with pytest.raises(hvp.InvalidLossError, match="sum"):
        hvp.HessianOperator(sums, w, DATA, batch_size=2)


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_tensors_of_other_kinds(kind):
    x, y = random(0, 12, 3, dtype="float64"), random(1, 12, 1, dtype="float64")
    w = tf.Variable(random(2, 3, 1, dtype="float64"))
    if kind == "sparse":
        first = tf.sparse.from_dense(x)
        loss = lambda s, y: tf.reduce_mean((tf.sparse.sparse_dense_matmul(s, w) - y) ** 2)  # noqa: E731
    else:
        first = tf.RaggedTensor.from_tensor(x)
        loss = lambda s, y: tf.reduce_mean((s.to_tensor(shape=[None, 3]) @ w - y) ** 2)  # noqa: E731
    # An element without columns has no values to choose examples by.
    empty = np.zeros((12, 0))
    for data, own in (
        ((first, y), loss),
        ((first, empty, y), lambda s, e, y: loss(s, y)),
        ({"a": (first, y)}, {"a": loss}),
    ):
        H = hvp.HessianOperator(own, w, data, batch_size=4)
        np.testing.assert_allclose(H.to_dense(), x.T @ x / 6, rtol=1e-12)
