"""Families of models: one small member of each, in the dtype that is asked for.

All of them map a batch of examples to three logits, so that every use of the library can be tried
on every family: matrices of the loss, of the predictions, and of single examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cases import Problem, random, set_random_weights

EXAMPLES = 6
LABELS = np.array([0, 1, 2, 1, 0, 2])


@dataclass
class Family:
    """A model with its variables and data.

    Attributes
    ----------
    model : callable
        From a batch of examples to logits of shape `(examples, 3)`.
    variables : object
        The Keras model, or a list of variables.
    x : ndarray
        The examples.
    couples : bool
        Whether the predictions of an example depend on the others of its batch.
    """

    model: Callable[..., Any]
    variables: Any
    x: np.ndarray
    couples: bool = False

    @staticmethod
    def output_loss(logits: Any, y: Any) -> tf.Tensor:
        """The mean cross-entropy of logits."""
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        return tf.reduce_mean(each)

    def loss(self, x: Any, y: Any) -> tf.Tensor:
        """The mean cross-entropy."""
        return self.output_loss(self.model(x), y)

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """The examples and their labels."""
        return self.x, LABELS

    @property
    def problem(self) -> Problem:
        """The loss as the other tests have it."""
        return Problem(self.loss, self.variables, self.data)


Make = Callable[[str], Family]
FAMILIES: dict[str, Make] = {}


def family(name: str) -> Callable[[Make], Make]:
    """Add a family to the table."""

    def add(make: Make) -> Make:
        FAMILIES[name] = make
        return make

    return add


def of_layers(name: str, shape: tuple[int, ...], *make: Callable[..., Any], **more: Any) -> None:
    """Add the family of a sequential model, from functions that take a dtype."""

    def build(dtype: str) -> Family:
        layers = [one(dtype) for one in make]
        head = [keras.layers.Flatten(dtype=dtype), keras.layers.Dense(3, dtype=dtype)]
        model = keras.Sequential([keras.layers.Input(shape, dtype=dtype), *layers, *head])
        set_random_weights(model)
        training = more.get("training", False)
        x = random(1, EXAMPLES, *shape, dtype=dtype)
        return Family(lambda x: model(x, training=training), model, x, more.get("couples", False))

    FAMILIES[name] = build


def of_tokens(name: str, *make: Callable[..., Any], mask: bool = False) -> None:
    """Add the family of a sequential model on sequences of tokens."""

    def build(dtype: str) -> Family:
        embedding = keras.layers.Embedding(5, 3, mask_zero=mask, dtype=dtype)
        layers = [one(dtype) for one in make]
        model = keras.Sequential(
            [keras.layers.Input((4,), dtype="int32"), embedding, *layers]
            + [keras.layers.Dense(3, dtype=dtype)]
        )
        set_random_weights(model)
        x = np.random.default_rng(0).integers(1, 5, (EXAMPLES, 4))
        x[::2, 3:] = 0
        return Family(model, model, x)

    FAMILIES[name] = build


def layer(kind: str, *arguments: Any, **options: Any) -> Callable[[str], Any]:
    """Return a function that makes a Keras layer of a dtype."""
    return lambda dtype: getattr(keras.layers, kind)(*arguments, **options, dtype=dtype)


tanh = {"activation": "tanh"}
of_layers("dense", (3,), layer("Dense", 3, **tanh))
of_layers("convolution", (4, 4, 2), layer("Conv2D", 2, 3, strides=2, padding="same", **tanh))
of_layers("dilated convolution", (6, 2), layer("Conv1D", 2, 2, dilation_rate=2, **tanh))
of_layers("causal convolution", (4, 2), layer("Conv1D", 2, 2, padding="causal", **tanh))
of_layers("depthwise convolution", (3, 3, 2), layer("DepthwiseConv2D", 2, **tanh))
of_layers("separable convolution", (3, 3, 2), layer("SeparableConv2D", 2, 2, **tanh))
of_layers("transposed convolution", (2, 2, 2), layer("Conv2DTranspose", 1, 2, **tanh))
of_layers("volume convolution", (2, 2, 2, 2), layer("Conv3D", 2, 2, **tanh))
of_layers("max pooling", (4, 4, 1), layer("Conv2D", 2, 2, **tanh), layer("MaxPooling2D", 2))
of_layers("batch normalization", (3,), layer("Dense", 3, **tanh), layer("BatchNormalization"))
of_layers(
    "batch normalization in training",
    (3,),
    layer("Dense", 3, **tanh),
    layer("BatchNormalization"),
    training=True,
    couples=True,
)
of_layers("layer normalization", (3,), layer("Dense", 3, **tanh), layer("LayerNormalization"))
of_layers("group normalization", (4,), layer("Dense", 4, **tanh), layer("GroupNormalization", 2))
of_layers("simple recurrent", (4, 2), layer("SimpleRNN", 3))
of_layers("lstm", (3, 2), layer("LSTM", 2))
of_layers("gru", (3, 2), layer("GRU", 2))
of_layers("stacked lstm", (3, 2), layer("LSTM", 2, return_sequences=True), layer("LSTM", 2))
of_layers("unrolled lstm", (3, 2), layer("LSTM", 2, unroll=True))
of_layers("convolutional lstm", (2, 3, 1), layer("ConvLSTM1D", 1, 2))
of_layers(
    "bidirectional",
    (3, 2),
    lambda dtype: keras.layers.Bidirectional(layer("GRU", 2)(dtype), dtype=dtype),
)
of_tokens("embedding", layer("GlobalAveragePooling1D"))
of_tokens("masked lstm", layer("LSTM", 2), mask=True)
of_tokens(
    "masked bidirectional",
    lambda dtype: keras.layers.Bidirectional(layer("GRU", 2)(dtype), dtype=dtype),
    mask=True,
)


@family("grouped convolution")
def grouped_convolution(dtype: str) -> Family:
    kernel = tf.Variable(random(3, 2, 2, 1, 4, dtype=dtype, scale=0.5), name="kernel")
    head = tf.Variable(random(4, 4, 3, dtype=dtype, scale=0.5), name="head")

    def predict(x: Any) -> Any:
        if dtype == "float32":
            images = tf.nn.conv2d(x, kernel, 1, "VALID")
        else:  # TensorFlow has no gradient of such a convolution in float64
            pairs = zip(tf.split(x, 2, axis=3), tf.split(kernel, 2, axis=3))
            images = tf.concat([tf.nn.conv2d(a, b, 1, "VALID") for a, b in pairs], axis=3)
        return tf.tanh(tf.reduce_mean(images, [1, 2])) @ head

    return Family(predict, [kernel, head], random(1, EXAMPLES, 3, 3, 2, dtype=dtype))


@family("attention")
def attention(dtype: str) -> Family:
    tokens = keras.layers.Input((4,), dtype="int32")
    h = keras.layers.Embedding(5, 4, dtype=dtype)(tokens)
    h = h + keras.layers.MultiHeadAttention(2, 2, dtype=dtype)(h, h)
    h = keras.layers.GlobalAveragePooling1D(dtype=dtype)(h)
    model = keras.Model(tokens, keras.layers.Dense(3, dtype=dtype)(h))
    set_random_weights(model)
    x = np.random.default_rng(0).integers(0, 5, (EXAMPLES, 4))
    return Family(model, model, x)


@family("legacy keras")
def legacy(dtype: str) -> Family:
    tf_keras = __import__("tf_keras")
    layers = [
        tf_keras.layers.Dense(3, "tanh", input_shape=(3,), dtype=dtype),
        tf_keras.layers.Dense(3, dtype=dtype),
    ]
    model = tf_keras.Sequential(layers)
    model.build((None, 3))
    set_random_weights(model)
    return Family(model, model, random(1, EXAMPLES, 3, dtype=dtype))


def of_cells(name: str, autograph: bool = False) -> Callable[[Callable[[Any, Any, Any], Any]], Any]:
    """Add the family of a function of the examples and two weights, `(3, 3)` and `(3,)`."""
    # A function of its own for each member: it refers to the variables of the first call.
    compiled = tf.function if autograph else lambda function: function

    def add(predict: Callable[[Any, Any, Any], Any]) -> Any:
        def build(dtype: str) -> Family:
            kernel = tf.Variable(random(3, 3, 3, dtype=dtype, scale=0.5), name="kernel")
            bias = tf.Variable(random(4, 3, dtype=dtype, scale=0.5), name="bias")
            x = random(1, EXAMPLES, 3, dtype=dtype)
            function = compiled(predict)
            return Family(lambda x: function(x, kernel, bias), [kernel, bias], x)

        FAMILIES[name] = build
        return predict

    return add


@of_cells("while loop")
def while_loop(x: Any, kernel: Any, bias: Any) -> Any:
    def step(i: Any, state: Any) -> Any:
        return i + 1, tf.tanh(state @ kernel + bias)

    return tf.while_loop(lambda i, _: i < 3, step, (0, x))[1]


@of_cells("loop of autograph", autograph=True)
def autograph_loop(x: Any, kernel: Any, bias: Any) -> Any:
    state = x
    for _ in tf.range(3):
        state = tf.tanh(state @ kernel + bias)
    return state


@of_cells("nested loops", autograph=True)
def nested_loops(x: Any, kernel: Any, bias: Any) -> Any:
    state = x
    for _ in tf.range(2):
        for _ in tf.range(2):
            state = tf.tanh(state @ kernel + bias)
    return state


@of_cells("scan")
def scan(x: Any, kernel: Any, bias: Any) -> Any:
    states = tf.scan(lambda state, b: tf.tanh(state @ kernel + b), bias, initializer=x)
    return states[-1] + states[0]


@of_cells("map_fn")
def map_fn(x: Any, kernel: Any, bias: Any) -> Any:
    signature = tf.TensorSpec([3], kernel.dtype)
    one = lambda row: tf.tanh(tf.linalg.matvec(kernel, row)) * bias  # noqa: E731
    return tf.map_fn(one, x, fn_output_signature=signature)


@of_cells("branch")
def branch(x: Any, kernel: Any, bias: Any) -> Any:
    yes, no = lambda: tf.tanh(x @ kernel), lambda: (x @ kernel) ** 2
    return tf.cond(kernel[0, 0] > bias[0], yes, no) * bias


@of_cells("switch")
def switch(x: Any, kernel: Any, bias: Any) -> Any:
    branches = [lambda: x @ kernel, lambda: tf.tanh(x @ kernel), lambda: tf.sin(x) @ kernel]
    return tf.switch_case(tf.cast(bias[0] > 0, tf.int32) + 1, branches) + bias**2


@of_cells("scan in a branch")
def scan_in_a_branch(x: Any, kernel: Any, bias: Any) -> Any:
    yes = lambda: tf.scan(lambda s, b: tf.tanh(s @ kernel + b), bias, initializer=x)[-1]  # noqa: E731
    return tf.cond(kernel[0, 0] > -100, yes, lambda: x @ kernel)


@of_cells("branch in a loop", autograph=True)
def branch_in_a_loop(x: Any, kernel: Any, bias: Any) -> Any:
    state = x
    for i in tf.range(3):
        if i % 2 == 0:  # noqa: SIM108 - for autograph
            state = tf.tanh(state @ kernel)
        else:
            state = state * bias
    return state


@of_cells("list of tensors", autograph=True)
def tensor_array(x: Any, kernel: Any, bias: Any) -> Any:
    steps = tf.TensorArray(kernel.dtype, 3, element_shape=[None, 3], clear_after_read=False)
    state = x
    for i in tf.range(3):
        state = tf.tanh(state @ kernel + bias[i])
        steps = steps.write(i, state)
    return tf.reduce_sum(steps.stack(), 0) + steps.read(1)


@of_cells("list that is gathered")
def gathered_array(x: Any, kernel: Any, bias: Any) -> Any:
    rows = tf.TensorArray(kernel.dtype, 3).unstack(kernel).gather([2, 0, 1])
    return tf.tanh(x @ rows) * bias


@of_cells("ragged")
def ragged(x: Any, kernel: Any, bias: Any) -> Any:
    rows = tf.RaggedTensor.from_uniform_row_length(tf.reshape(x @ kernel, [-1]), 3)
    parts = tf.ragged.map_flat_values(tf.tanh, rows)
    return parts.to_tensor(shape=[None, 3]) * bias + tf.reduce_mean(parts, 1)[:, tf.newaxis]


@of_cells("sparse")
def sparse(x: Any, kernel: Any, bias: Any) -> Any:
    matrix = tf.SparseTensor([[0, 0], [1, 2], [2, 1]], bias**2, [3, 3])
    return tf.tanh(x @ kernel + tf.transpose(tf.sparse.sparse_dense_matmul(matrix, x, False, True)))


@of_cells("custom gradient")
def custom(x: Any, kernel: Any, bias: Any) -> Any:
    @tf.custom_gradient
    def activation(z: Any) -> Any:
        y = tf.tanh(z)
        return y, lambda upstream: upstream * (1 - tf.tanh(z) ** 2)

    return activation(x @ kernel + bias)


@of_cells("recomputed")
def recomputed(x: Any, kernel: Any, bias: Any) -> Any:
    import hvp

    return hvp.recompute(lambda z: tf.tanh(tf.tanh(z @ kernel) @ kernel + bias))(x)


@family("lstm in a loop")
def lstm_in_a_loop(dtype: str) -> Family:
    inner = FAMILIES["lstm"](dtype)

    def predict(x: Any) -> Any:
        def add(i: Any, total: Any) -> Any:
            return i + 1, total + inner.model(x * tf.cast(i + 1, x.dtype))

        total = tf.zeros([tf.shape(x)[0], 3], x.dtype)
        return tf.while_loop(lambda i, total: i < 2, add, [tf.constant(0), total])[1]

    return Family(predict, inner.variables, inner.x)
