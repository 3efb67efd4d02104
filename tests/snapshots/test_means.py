"""Losses that are no means over examples, and what is done where that cannot be known."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import random

X, Y = random(0, 12, 3, dtype="float64"), random(1, 12, 1, dtype="float64")
W = tf.Variable(random(2, 3, 1, dtype="float64"))
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def squares(x, y):
    return (x @ W - y) ** 2


def by_softmax(x, y):
    return tf.reduce_sum(tf.nn.softmax(x @ W, axis=0) * y)


STEPS = tf.Variable(0, trainable=False)


def counted(x, y):
    STEPS.assign_add(1)
    return by_softmax(x, y)


@pytest.mark.parametrize(
    ("loss", "data", "options", "said"),
    [
        (
            lambda x, y: tf.reduce_mean(squares(x, y)) * x.shape[0],
            (X, Y),
            {"reduction": "sum"},
            "is a sum",
        ),
        (
            # A mean over outputs, whose number happens to be that of the examples.
            lambda x, y: tf.reduce_mean(tf.reduce_sum((x @ tf.tile(W, [1, 4]) - y) ** 2, axis=0)),
            BATCHES,
            {},
            "is a sum",
        ),
        (by_softmax, (X, Y), {"batch_size": 4}, "depends on several"),
        (counted, (X, Y), {"batch_size": 4}, "depends on several"),
        # One batch of the caller's own, which is cut.
        (by_softmax, [(np.tile(X, (40, 1)), np.tile(Y, (40, 1)))], {"memory_limit": 20_000}, "sev"),
        (
            # Some parts of the examples have none that count.
            lambda x, y, m: tf.reduce_sum(m * squares(x, y)[:, 0]) / tf.reduce_sum(m),
            (X, Y, np.r_[0.0, 0, 1, 0, np.ones(8)]),
            {"batch_size": 4},
            "depends on several",
        ),
    ],
    ids=["times a length", "another axis", "softmax", "counter", "cut", "masked"],
)
def test_what_is_no_mean_is_refused(loss, data, options, said):
    with pytest.raises(hvp.InvalidLossError, match=said):
        hvp.HessianOperator(loss, W, data, **options)


@pytest.mark.parametrize("data", [BATCHES, [(X, Y)]], ids=["batches", "one"])
def test_the_callers_batches_are_averaged_if_they_are_not_cut(data):
    H = hvp.HessianOperator(by_softmax, W, data, memory_limit="100 MB")
    means = [float(by_softmax(*batch)) for batch in data]
    assert H.value == pytest.approx(np.mean(means), rel=1e-12)


def of_four(x, y):
    return tf.reduce_mean(squares(tf.reshape(x, [4, 3]), tf.reshape(y, [4, 1])))


def of_multiples_of_four(x, y):
    assert x.shape[0] % 4 == 0
    return tf.reduce_mean(squares(x, y))


@pytest.mark.parametrize("loss", [of_four, of_multiples_of_four])
def test_a_loss_that_needs_its_batches_is_warned_of(loss):
    with pytest.warns(RuntimeWarning, match=r"cannot be evaluated on \d+ examples"):
        H = hvp.HessianOperator(loss, W, (X, Y), batch_size=4)
    np.testing.assert_allclose(H.to_dense(), X.T @ X / 6, rtol=1e-12)


def test_batch_normalization_in_training_mode_is_refused_or_warned_of():
    layers = keras.layers
    for dropout in (False, True):
        between = [layers.BatchNormalization(), *[layers.Dropout(0.3)] * dropout]
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4), *between, layers.Dense(1)])
        model.compile(loss="mse")
        arguments = {"training": True, "batch_size": 3}
        if dropout:
            with pytest.warns(RuntimeWarning, match="draws.*moving_mean.*not known"):
                hvp.HessianOperator.from_keras(model, (X, Y), **arguments)
        else:
            with pytest.raises(hvp.InvalidLossError, match="depends on several"):
                hvp.HessianOperator.from_keras(model, (X, Y), **arguments)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_in_half_precision_is_no_dependence(dtype):
    shapes = (6, 3), (9, 6), (9, 3)
    w, x, y = (tf.cast(random(i, *shape), dtype) for i, shape in enumerate(shapes))
    w = tf.Variable(w)

    def loss(x, y):
        return tf.reduce_mean((tf.tanh(x @ w) - y) ** 2)

    H = hvp.HessianOperator(loss, w, (x, y), batch_size=2)
    dense = hvp.HessianOperator(loss, w, (x, y)).to_dense()
    assert np.linalg.norm(H.to_dense() - dense) < 0.05 * np.linalg.norm(dense)
    sparse = hvp.HessianOperator(loss, w, (x, y)).to_sparse()
    np.testing.assert_allclose(sparse.toarray(), dense, atol=0.02 * np.abs(dense).max())
