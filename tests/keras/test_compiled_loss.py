"""The loss of a compiled model is what Keras evaluates."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._keras.compiled_loss import CompiledModel, loss_of_outputs
from tests.cases import random, set_random_weights

layers, N = keras.layers, 6
X, Y, LABELS = random(0, N, 3), random(1, N, 2), np.arange(N) % 3
TOKENS = np.array(
    [[1, 2, 0, 0], [3, 0, 0, 0], [4, 1, 2, 3], [2, 2, 2, 0], [1, 0, 0, 0], [3, 4, 0, 0]]
)
WEIGHTS, EACH = np.linspace(0.5, 3, N, dtype="float32"), np.abs(random(3, N, 4))


def two_heads(wrap=list):
    """Of which the first has the later name."""
    x = keras.Input((3,))
    h = layers.Dense(4, "tanh", kernel_regularizer=keras.regularizers.L2(0.1), name="h")(x)
    outputs = {"z": layers.Dense(3, "softmax", name="z")(h), "a": layers.Dense(2, name="a")(h)}
    return keras.Model(x, list(outputs.values()) if wrap is list else outputs)


def one(*more, **options):
    return keras.Sequential([keras.Input((3,)), layers.Dense(2, **options), *more])


def masked():
    embedding = layers.Embedding(5, 3, mask_zero=True)
    return keras.Sequential([keras.Input((4,), dtype="int32"), embedding, layers.Dense(1)])


def powers(y, p, power):
    return tf.reduce_sum(tf.abs(y - p) ** power, axis=-1)


cubes = functools.partial(powers, power=3)
CROSS_ENTROPY, NAMES = "sparse_categorical_crossentropy", {"z": LABELS, "a": Y}
WEIGHTED = {"loss": {"z": CROSS_ENTROPY, "a": "mae"}, "loss_weights": {"z": 0.5, "a": 2.0}}
MODELS = {
    "one": (one, {"loss": "mse"}, X, Y, None),
    "weights": (one, {"loss": keras.losses.Huber(), "loss_weights": 3.0}, X, Y, WEIGHTS),
    "function": (one, {"loss": cubes, "weighted_metrics": ["mae"]}, X, Y, WEIGHTS),
    "list": (two_heads, {"loss": [CROSS_ENTROPY, "mse"]}, X, [LABELS, Y], None),
    "list of names": (two_heads, WEIGHTED, X, [LABELS, Y], [WEIGHTS, WEIGHTS**2]),
    "dict": (lambda: two_heads(dict), WEIGHTED, X, NAMES, {"z": WEIGHTS, "a": 1 / WEIGHTS}),
    "activities": (lambda: one(activity_regularizer="l2"), {"loss": "mse"}, X, Y, WEIGHTS),
    "dropout": (
        lambda: one(layers.Dropout(0.5), bias_regularizer="l1"),
        {"loss": "mse"},
        X,
        Y,
        None,
    ),
    "mask": (masked, {"loss": "mse"}, TOKENS, random(2, N, 4, 1), None),
    "mask and weights": (masked, {"loss": "mae"}, TOKENS, random(2, N, 4, 1), EACH),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.few(1)
def test_is_what_keras_evaluates(kind):
    make, options, x, y, weights = MODELS[kind]
    model = make()
    set_random_weights(model)
    model.compile(**options)
    want = model.evaluate(x, y, sample_weight=weights, batch_size=N, verbose=0)
    want = pytest.approx(np.ravel(want)[0], rel=1e-5)
    data = (x, y) if weights is None else (x, y, weights)
    compiled = CompiledModel(model, data, False, {})
    assert float(compiled.loss(*data)) == want
    outputs = compiled.model(x)
    assert float(loss_of_outputs(model, by_examples=False)(outputs, *data[1:], x=x)) == want
    if kind == "activities":
        with pytest.raises(hvp.InvalidLossError, match=model.layers[0].name):
            compiled.output_loss(outputs, *data[1:])
        return
    penalty = (compiled.regularization or (lambda: 0.0))()
    kernels = [0.1 * np.sum(v.numpy() ** 2) for v in model.variables if v.path == "h/kernel"]
    biases = [
        0.01 * np.abs(v).sum() for v in model.variables if kind == "dropout" and "bias" in v.path
    ]
    assert float(penalty) == pytest.approx(sum(kernels) + sum(biases), rel=1e-5)
    assert float(compiled.output_loss(outputs, *data[1:]) + penalty) == want
    more = CompiledModel(model, data, False, {"regularization": lambda: 7.0})
    assert float(more.regularization() - penalty) == pytest.approx(7)


LIKELIHOODS = {
    "object": (keras.losses.BinaryCrossentropy(), ["bernoulli"]),
    "function": (keras.losses.categorical_crossentropy, ["categorical"]),
    "list": ([CROSS_ENTROPY, "mse"], ["categorical", "gaussian"]),
    "names": ({"a": "mse", "z": CROSS_ENTROPY}, ["categorical", "gaussian"]),
    "one of two": ([CROSS_ENTROPY, "mae"], None),
    "without a name": (cubes, None),
}


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_likelihoods_in_the_order_of_the_outputs(kind):
    loss, want = LIKELIHOODS[kind]
    model = two_heads() if isinstance(loss, (dict, list)) else one()
    model.compile(loss=loss)
    assert CompiledModel(model, (X, Y), False, {}).likelihoods == want
