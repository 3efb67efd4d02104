"""Exact diagonals without a product for each entry, against those of dense matrices."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import hvp
from tests.cases import crossed

CLASSES, EXAMPLES = 6, 70


def cross_entropy(logits, y):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def network(*layers):
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((EXAMPLES, 12)).astype("float32")
    y = rng.integers(0, CLASSES, EXAMPLES)
    hidden = keras.layers.Dense(20, activation="tanh", name="hidden")
    last = keras.layers.Dense(CLASSES, name="last")
    return keras.Sequential([keras.Input((12,)), hidden, *layers, last]), (x, y)


def close(found, dense):
    expected = np.diagonal(dense)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


class Counted:
    """How many products an operator has computed since."""

    def __init__(self, operator):
        self._operator = operator
        self._before = operator.stats.products

    def __call__(self):
        return self._operator.stats.products - self._before


WAYS = {
    "plain": {},
    "batches": {"batch_size": 32},
    "sum": {"reduction": "sum"},
    "damping": {"damping": 0.25},
    "tape": {"engine": "tape"},
    "compiled": {"jit_compile": True},
}
KINDS = {
    "gauss-newton": lambda *a, **o: hvp.GaussNewtonOperator(*a, **o),
    "empirical": lambda *a, **o: hvp.FisherOperator(*a, kind="empirical", **o),
    "type-2": lambda *a, **o: hvp.FisherOperator(*a, likelihood="categorical", **o),
}


@pytest.mark.parametrize(("kind", "way"), crossed(KINDS, WAYS))
@pytest.mark.few(1)
def test_gauss_newton_and_fisher_matrices(kind, way):
    model, data = network()
    A = KINDS[kind](model, cross_entropy, model, data, **WAYS[way])
    dense = A.to_dense()
    products = Counted(A)
    close(A.diagonal(), dense)
    close(A.damped(0.5).diagonal(), dense + 0.5 * np.eye(len(dense)))
    close(A.block("hidden").diagonal(), dense[:260, :260])
    result = hvp.diagonal(A)
    close(result.estimate, dense)
    assert (result.products, result.method, result.standard_error.any()) == (1, "exact", False)
    assert products() == 4  # one comparison each
    for variable in model.trainable_variables:
        variable.assign(variable * 1.5)
    A.refresh()
    found = A.diagonal()
    assert products() == 5
    close(found, A.to_dense())


@pytest.mark.long
def test_weights_and_regularization():
    model, (x, y) = network()
    w = np.random.default_rng(1).uniform(0, 2, EXAMPLES).astype("float32")

    def loss(logits, y, w):
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        return tf.reduce_sum(w * each) / tf.reduce_sum(w)

    def penalty():
        return 0.1 * tf.add_n([tf.reduce_sum(v**4) for v in model.trainable_variables])

    A = hvp.GaussNewtonOperator(
        model,
        loss,
        model,
        [(x[:30], y[:30], w[:30]), (x[30:], y[30:], w[30:])],
        weight=lambda x, y, w: tf.reduce_sum(w),
        regularization=penalty,
    )
    dense = A.to_dense()
    products = Counted(A)
    close(A.diagonal(), dense)
    assert products() == 1


def test_several_inputs_and_predictions():
    a, b = tf.Variable(tf.ones([280])), tf.Variable(tf.range(10.0) / 10)
    rng = np.random.default_rng(0)
    data = (rng.random((80, 280)).astype("f"), rng.random((80, 10)).astype("f")), np.ones(80, "f")

    def model(x, z):
        return {"sum": tf.linalg.matvec(x, tf.sin(a)), "wide": z * b[0] * tf.reduce_sum(b)}

    def loss(p, y):
        wide = tf.reduce_sum(tf.cosh(p["wide"]), axis=1)
        return tf.reduce_mean((p["sum"] - y) ** 2 * 0.01 + wide)

    A = hvp.GaussNewtonOperator(model, loss, [a, b], data)
    dense = A.to_dense()
    products = Counted(A)
    close(A.diagonal(), dense)
    assert products() == 1


# What the predictions of single examples do not tell is multiplied out.
@pytest.mark.parametrize("case", ["mixed", "drawn", "recurrent"])
@pytest.mark.few(1)
def test_examples_that_do_not_tell(case):
    model, (x, y) = network(keras.layers.BatchNormalization())
    options, predict = {"likelihood": "categorical"}, lambda x: model(x, training=True)
    if case == "drawn":
        options |= {"kind": "monte-carlo", "samples": 2}
        predict = model
    if case == "recurrent":
        keras.utils.set_random_seed(0)
        model = predict = keras.Sequential(
            [keras.Input((4, 3)), keras.layers.LSTM(8), keras.layers.Dense(CLASSES)]
        )
        x = x.reshape(-1, 4, 3)
    A = hvp.FisherOperator(predict, cross_entropy, model, (x, y), **options)
    dense = A.to_dense()
    products = Counted(A)
    close(A.diagonal(), dense)
    assert products() >= len(dense)
    close(hvp.diagonal(A).estimate, dense)


def test_sparse_matrices_take_a_few_products():
    w = tf.Variable(np.linspace(0, 1, 10_000))
    H = hvp.HessianOperator(lambda: tf.reduce_sum((w[1:] - w[:-1] ** 2) ** 2), w)
    result = hvp.diagonal(H)
    assert result.products == 4
    x = w.numpy()
    expected = np.r_[0, np.full(9_999, 2.0)]
    expected[:-1] += 12 * x[:-1] ** 2 - 4 * x[1:]
    np.testing.assert_allclose(result.estimate, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(H.diagonal(), result.estimate)


def test_matrices_that_show_their_diagonal():
    model, data = network()
    K = hvp.KFAC(model, cross_entropy, model, data, likelihood="categorical")
    close(hvp.diagonal(K).estimate, K.to_dense())
    assert hvp.diagonal(K).products == 0
    A = np.random.default_rng(0).standard_normal((300, 300))
    for matrix in (A + A.T, scipy.sparse.csr_array(A + A.T)):
        np.testing.assert_array_equal(hvp.diagonal(matrix).estimate, 2 * np.diagonal(A))
