"""Every family of layers: scales are those of the matrix itself, and what has which block."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvp
from tests.cases import long

CLASSES = 3


def cross_entropy(logits, y):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def pooled(*parts, shape, pool=layers.Flatten):
    return keras.Sequential([keras.Input(shape), *parts, pool(), layers.Dense(CLASSES)])


def attention():
    tokens = keras.Input((4,), dtype="int32")
    x = layers.Embedding(6, 4)(tokens)
    y = layers.MultiHeadAttention(2, 3)(x, x)
    y = layers.LayerNormalization()(x + y)
    y = layers.Dense(4, activation="gelu")(y)
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(y)))


def grouped_query_attention():
    x = keras.Input((4, 3))
    y = layers.GroupQueryAttention(2, 4, 2)(x, x)
    return keras.Model(x, layers.Dense(CLASSES)(layers.Flatten()(y)))


def shared():
    dense, x = layers.Dense(4, activation="tanh"), keras.Input((4,))
    return keras.Model(x, layers.Dense(CLASSES)(dense(dense(x))))


IMAGE, SERIES, VOLUME = (6, 6, 4), (6, 4), (4, 4, 4, 2)
# The name of the case: the model, and how many blocks of each kind it has.
CASES = {
    "dense": (lambda: pooled(layers.Dense(4, "tanh"), shape=(5,)), {"kronecker": 2}),
    "without bias": (
        lambda: pooled(layers.Dense(4, "tanh", use_bias=False), shape=(5,)),
        {"kronecker": 2},
    ),
    "dense on a sequence": (
        lambda: pooled(layers.Dense(3, "tanh"), shape=SERIES),
        {"kronecker": 2},
    ),
    "einsum": (
        lambda: pooled(
            layers.EinsumDense("abc,cde->abde", (6, 2, 3), bias_axes="de"), shape=SERIES
        ),
        {"kronecker": 2},
    ),
    "einsum with groups": (
        lambda: pooled(layers.EinsumDense("abc,bcd->abd", (6, 3)), shape=SERIES),
        {"kronecker": 2},
    ),
    "convolution": (lambda: pooled(layers.Conv2D(3, 3), shape=IMAGE), {"kronecker": 2}),
    "strides": (
        lambda: pooled(layers.Conv2D(3, 3, strides=2, padding="same"), shape=IMAGE),
        {"kronecker": 2},
    ),
    "dilation": (
        lambda: pooled(layers.Conv2D(3, 2, dilation_rate=2, padding="same"), shape=IMAGE),
        {"kronecker": 2},
    ),
    "groups": (lambda: pooled(layers.Conv2D(4, 3, groups=2), shape=IMAGE), {"kronecker": 2}),
    "even window": (
        lambda: pooled(layers.Conv2D(2, (2, 4), strides=(2, 3), padding="same"), shape=IMAGE),
        {"kronecker": 2},
    ),
    "one dimension": (
        lambda: pooled(layers.Conv1D(3, 3, padding="causal"), shape=SERIES),
        {"kronecker": 2},
    ),
    "dilation in one dimension": (
        lambda: pooled(layers.Conv1D(3, 2, dilation_rate=3, padding="same"), shape=SERIES),
        {"kronecker": 2},
    ),
    "three dimensions": (
        lambda: pooled(layers.Conv3D(2, 2, padding="same"), shape=VOLUME),
        {"kronecker": 2},
    ),
    "depthwise": (
        lambda: pooled(layers.DepthwiseConv2D(3, depth_multiplier=2), shape=IMAGE),
        {"kronecker": 2},
    ),
    "separable": (
        lambda: pooled(layers.SeparableConv2D(3, 3), shape=IMAGE),
        {"kronecker": 3},
    ),
    "transposed": (
        lambda: pooled(layers.Conv2DTranspose(2, 3, strides=2, padding="same"), shape=(3, 3, 2)),
        {"kronecker": 2, "exact": 1},
    ),
    "embedding": (
        lambda: pooled(layers.Embedding(6, 3), shape=(4,)),
        {"kronecker": 2},
    ),
    "attention": (attention, {"kronecker": 7, "exact": 2}),
    "grouped-query attention": (grouped_query_attention, {"kronecker": 5}),
    "additive attention": (
        lambda: pooled(_Attending(layers.AdditiveAttention()), shape=SERIES),
        {"kronecker": 1, "exact": 1},
    ),
    "batch normalization": (
        lambda: pooled(layers.BatchNormalization(), layers.Dense(3, "tanh"), shape=(4,)),
        {"kronecker": 2, "exact": 2},
    ),
    "layer normalization": (
        lambda: pooled(layers.LayerNormalization(), shape=SERIES),
        {"kronecker": 1, "exact": 2},
    ),
    "group normalization": (
        lambda: pooled(layers.GroupNormalization(2), shape=SERIES),
        {"kronecker": 1, "exact": 2},
    ),
    "rectifier with slopes": (
        lambda: pooled(layers.PReLU(), shape=SERIES),
        {"kronecker": 1, "exact": 1},
    ),
    "simple recurrence": (
        lambda: pooled(layers.SimpleRNN(3), shape=(4, 2)),
        {"kronecker": 3},
    ),
    "LSTM": (lambda: pooled(layers.LSTM(2), shape=(4, 2)), {"kronecker": 3, "exact": 1}),
    "GRU": (lambda: pooled(layers.GRU(2), shape=(4, 2)), {"kronecker": 3, "exact": 1}),
    "both directions": (
        lambda: pooled(layers.Bidirectional(layers.SimpleRNN(2)), shape=(3, 2)),
        {"kronecker": 5},
    ),
    "convolutional recurrence": (
        lambda: pooled(layers.ConvLSTM1D(2, 2, padding="same"), shape=(3, 4, 2)),
        {"kronecker": 9},
    ),
    "each step by itself": (
        lambda: pooled(layers.TimeDistributed(layers.Dense(2)), shape=SERIES),
        {"kronecker": 2},
    ),
    "shared": (shared, {"kronecker": 2}),
}


class _Attending(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner([x, x])


def problem(name, seed=0):
    keras.utils.set_random_seed(seed)
    model = CASES[name][0]()
    random = np.random.default_rng(seed)
    for weight in model.weights:  # biases and scales that are neither zero nor one
        noise = random.standard_normal(weight.shape).astype("float32")
        weight.assign(
            weight + 0.2 * np.abs(noise) if "variance" in weight.path else weight + 0.2 * noise
        )
    shape = (7, *model.input_shape[1:])
    is_tokens = model.inputs[0].dtype == "int32" or name == "embedding"
    x = random.integers(0, 6, shape) if is_tokens else random.standard_normal(shape)
    x = x.astype("int32" if is_tokens else "float32")
    return model, (x, random.integers(0, CLASSES, 7).astype("int32"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(1)
@pytest.mark.long
def test_scales_are_those_of_the_matrix_itself(name):
    if name == "grouped-query attention" and not hasattr(layers, "GroupQueryAttention"):
        pytest.skip("this Keras does not have it")
    model, data = problem(name)
    options = {"likelihood": "categorical"}
    E = hvp.EKFAC(model, cross_entropy, model, data, **options)
    F = hvp.FisherOperator(model, cross_entropy, model, data, **options).to_dense()
    basis = E.rotate(tf.eye(E.shape[0])).numpy().astype(np.float64)
    np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-4)
    exact = np.einsum("ij,ik,kj->j", basis, F, basis)
    np.testing.assert_allclose(E.scales(), exact, atol=2e-5 * np.abs(exact).max())
    counts = {}
    for block in E.blocks:
        counts[block.kind] = counts.get(block.kind, 0) + 1
    assert counts == CASES[name][1]


@pytest.mark.parametrize("name", ["dense", "groups", "attention", "LSTM", "embedding"])
@pytest.mark.parametrize("fisher", ["empirical", "monte-carlo"])
@pytest.mark.few(1)
def test_other_targets(name, fisher):
    model, data = problem(name)
    options = {"likelihood": "categorical", "samples": 3} if fisher == "monte-carlo" else {}
    E = hvp.EKFAC(model, cross_entropy, model, data, fisher=fisher, **options)
    own = {"kind": fisher, **options}
    F = hvp.FisherOperator(model, cross_entropy, model, data, **own).to_dense()
    basis = E.rotate(tf.eye(E.shape[0])).numpy().astype(np.float64)
    exact = np.einsum("ij,ik,kj->j", basis, F, basis)
    np.testing.assert_allclose(E.scales(), exact, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("name", "sharing"),
    [
        ("strides", "expand"),
        ("shared", "reduce"),
        *(long("attention", sharing) for sharing in ("expand", "reduce")),
    ],
)
@pytest.mark.few(1)
@pytest.mark.long
def test_ekfac_is_nearer_than_kfac(name, sharing):
    model, data = problem(name)
    options = {"likelihood": "categorical", "sharing": sharing}
    K = hvp.KFAC(model, cross_entropy, model, data, **options)
    E = hvp.EKFAC(model, cross_entropy, model, data, **options)
    F = hvp.FisherOperator(model, cross_entropy, model, data, likelihood="categorical")
    places = 0
    for block in K.blocks:
        size = int(np.prod(block.shape))
        names = [block.names[0].rpartition("/")[0]] if "/" in block.names[0] else []
        own = slice(places, places + size)
        exact, k, e = F.to_dense()[own, own], K.to_dense()[own, own], E.to_dense()[own, own]
        assert np.linalg.norm(e - exact) <= np.linalg.norm(k - exact) * (1 + 1e-5), names
        places += size


def test_a_weight_that_is_used_in_two_ways_is_named():
    table = tf.Variable(np.eye(4, 3, dtype="float32"), name="tied")

    def model(tokens):
        return tf.reduce_mean(tf.gather(table, tokens), 1) @ tf.transpose(table)

    data = np.zeros((2, 3), "int32"), np.zeros(2, "int32")
    with pytest.raises(hvp.HvpError, match="'tied:0' is used in two ways"):
        hvp.KFAC(model, cross_entropy, table, data)


def test_rows_that_do_not_belong_to_one_example_after_the_other_are_refused():
    kernel = tf.Variable(np.ones((2, 3), "float32"), name="kernel")

    def time_major(x):
        flat = tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 2])
        return tf.reduce_mean(tf.reshape(flat @ kernel, [4, -1, 3]), axis=0)

    data = np.random.default_rng(0).standard_normal((5, 4, 2)), np.zeros(5, "int32")
    with pytest.raises(hvp.HvpError, match="one example after the other"):
        hvp.KFAC(time_major, cross_entropy, kernel, (data[0].astype("float32"), data[1]))


def test_scales_of_data_in_another_order_are_refused():
    scale = tf.Variable(np.ones(2, "float32"), name="scale")

    def time_major(x):
        return tf.reduce_mean(tf.transpose(x, [1, 0, 2]) * scale, axis=0)

    data = np.random.default_rng(0).standard_normal((4, 4, 2)), np.zeros(4, "int32")
    with pytest.raises(hvp.HvpError, match="one example after the other"):
        hvp.KFAC(time_major, cross_entropy, scale, (data[0].astype("float32"), data[1]))


def test_weights_behind_a_stopped_gradient_have_no_curvature():
    kernel = tf.Variable(np.ones((2, 3), "float32"), name="kernel")
    offset = tf.Variable(np.ones(3, "float32"), name="offset")

    def model(x):
        return x @ tf.stop_gradient(kernel) + offset

    data = np.ones((4, 2), "float32"), np.zeros(4, "int32")
    K = hvp.EKFAC(model, cross_entropy, [kernel, offset], data)
    G = hvp.GaussNewtonOperator(model, cross_entropy, [kernel, offset], data)
    np.testing.assert_allclose(K.to_dense(), G.to_dense(), atol=1e-6)


def test_what_belongs_to_no_layer_is_exact_while_small_and_named_otherwise():
    w = tf.Variable(np.linspace(0, 1, 6, dtype="float32"), name="w")
    data = np.ones((4, 2), "float32"), np.zeros(4, "int32")

    def model(x):
        return x @ tf.reshape(w**2, [2, 3])

    K = hvp.KFAC(model, cross_entropy, w, data)
    G = hvp.GaussNewtonOperator(model, cross_entropy, w, data)
    np.testing.assert_allclose(K.to_dense(), G.to_dense(), atol=1e-6)
    large = tf.Variable(np.ones(3000, "float32"), name="large")

    def of_large(x):
        return x @ tf.reshape(large**2, [1000, 3])

    with pytest.raises(hvp.HvpError, match="'large:0' enter no operation"):
        hvp.KFAC(of_large, cross_entropy, large, (np.ones((2, 1000), "float32"), data[1][:2]))
