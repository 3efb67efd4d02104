"""What is kept between products is a minimum cut: counted in bytes, by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import cross_entropy, random, relative_error, set_random_weights

ROWS, WIDTH, DEPTH = 512, 32, 6
# Of one float64 tensor of the batch's size.
TENSOR = 8 * ROWS * WIDTH


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch):
    inside.set_limit(monkeypatch, "bytes of large values", 4 * ROWS)
    inside.set_limit(monkeypatch, "bytes of many values", 0)


def chain(activation):
    weights = [tf.Variable(random(i, WIDTH, WIDTH, dtype="float64") / 6) for i in range(DEPTH)]
    x = tf.constant(random(9, ROWS, WIDTH, dtype="float64"))

    def loss():
        y = x
        for w in weights:
            y = activation(y @ w)
        return tf.reduce_mean(y**2)

    return loss, weights, None


def transformer(layers):
    x = keras.Input((8, 16))
    h = x
    for _ in range(2):
        a = layers.LayerNormalization()(h)
        h = h + layers.MultiHeadAttention(2, 8)(a, a)
        h = h + layers.Dense(16)(layers.Dense(32, "gelu")(layers.LayerNormalization()(h)))
    model = keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
    set_random_weights(model)
    return cross_entropy(model), model, (random(1, 64, 8, 16, dtype="float64"), np.arange(64) % 3)


def cnn(layers):
    model = keras.Sequential(
        [
            layers.Input((8, 8, 4)),
            *(layers.Conv2D(16, 3, padding="same", activation="swish") for _ in range(4)),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    set_random_weights(model)
    return cross_entropy(model), model, (random(1, 32, 8, 8, 4, dtype="float64"), np.arange(32) % 3)


def difference(loss, weights, data, v, step=1e-6):
    """The product, by central differences of the gradient in float64."""
    model = isinstance(weights, keras.Model)
    variables = [w.value for w in weights.trainable_variables] if model else weights
    parts = tf.split(v, [int(tf.size(variable)) for variable in variables])
    moves = [tf.reshape(part, like.shape) for part, like in zip(parts, variables)]

    def gradient(shift):
        for variable, move in zip(variables, moves):
            variable.assign_add(shift * move)
        with tf.GradientTape() as tape:
            value = loss(*(data or ()))
        return np.concatenate([np.ravel(part) for part in tape.gradient(value, variables)])

    ahead, behind = gradient(step), gradient(-2 * step)
    gradient(step)  # back to where they were
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize("activation", [tf.tanh, tf.sigmoid], ids=["tanh", "sigmoid"])
def test_a_chain_keeps_two_tensors_a_layer(activation):
    problem = chain(activation)
    with hvp.HessianOperator(*problem) as H:
        # The value of each layer and its cotangent; the last layer's is remade from the value.
        assert H.stats.residual_bytes == pytest.approx((2 * DEPTH - 1) * TENSOR, rel=0.02)
        v = random(3, H.shape[0], dtype="float64")
        assert relative_error(H @ v, difference(*problem, v)) < 1e-6


@pytest.mark.parametrize(("make", "ratio"), [(transformer, 0.55), (cnn, 0.55)])
@pytest.mark.few(1)
def test_models_keep_far_less_than_all_that_products_use(make, ratio, monkeypatch):
    keras.backend.set_floatx("float64")
    try:
        problem = make(keras.layers)
    finally:
        keras.backend.set_floatx("float32")
    with hvp.HessianOperator(*problem) as H:
        few, v = H.stats.residual_bytes, random(3, H.shape[0], dtype="float64")
        assert relative_error(H @ v, difference(*problem, v)) < 1e-6
    inside.set_limit(monkeypatch, "bytes of many values", 2**40)
    with hvp.HessianOperator(*problem) as H:
        assert few < ratio * H.stats.residual_bytes
