"""Real architectures at the smallest inputs they accept, with seeded random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.cases import Problem, cross_entropy, random


def perturb(variables: list[Any]) -> None:
    """Add noise to what an initializer gave: a zero bias would put units right on their kinks."""
    for index, variable in enumerate(variables):
        value = keras.ops.convert_to_numpy(variable)
        variable.assign(value + random(index, *value.shape, scale=0.05).astype(value.dtype))


def calibrate(model: keras.Model, x: np.ndarray) -> None:
    """Set the moving averages of batch normalization to the statistics of `x`."""
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.0
    model(x, training=True)


def classifier(model: keras.Model, data: Any, **call: Any) -> Problem:
    """The mean cross-entropy of a model's logits; every logit has a label of its own."""
    perturb(model.trainable_variables)
    return Problem(cross_entropy(model, **call), model, data)


def application(name: str, size: int, scale: float = 1.0) -> Callable[[str], Problem]:
    """Return the builder of one of `keras.applications`, with five classes and two images."""

    def build(dtype: str) -> Problem:
        options = {"weights": None, "classes": 5, "classifier_activation": None}
        model = getattr(keras.applications, name)(input_shape=(size, size, 3), **options)
        x = random(1, 8, size, size, 3, dtype=dtype, scale=scale)
        problem = classifier(model, (x[:2], np.array([0, 3])))
        calibrate(model, x)
        return problem

    return build


def pre_norm(x: Any, dropout: float = 0.0, causal: bool = False, memory: Any = None) -> Any:
    """Attention, to another sequence too if there is a memory, and a feed-forward layer."""
    normal = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(2, 4)(normal, normal, use_causal_mask=causal)
    x = x + layers.Dropout(dropout, seed=1)(attention)
    if memory is not None:
        x = x + layers.MultiHeadAttention(2, 4)(layers.LayerNormalization()(x), memory)
    hidden = layers.Dense(16, "gelu")(layers.LayerNormalization()(x))
    hidden = layers.Dropout(dropout, seed=2)(hidden)
    return x + layers.Dense(8)(hidden)


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    """Tokens from 1 to 10."""
    return np.random.default_rng(seed).integers(1, 11, shape)


def encoder_decoder(dtype: str) -> Problem:
    source, target = layers.Input((5,), dtype="int32"), layers.Input((4,), dtype="int32")
    memory = pre_norm(layers.Embedding(11, 8, mask_zero=True)(source))
    h = pre_norm(layers.Embedding(11, 8)(target), causal=True, memory=memory)
    model = keras.Model([source, target], layers.Dense(11)(layers.LayerNormalization()(h)))
    perturb(model.trainable_variables)
    x, y = tokens(2, 5), tokens(2, 5, seed=1)
    x[1, 3:] = 0  # padding

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        logits = model([x, y[:, :-1]])
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y[:, 1:], logits=logits)
        return tf.reduce_mean(each)

    return Problem(loss, model, (x, y))


def language_model(dtype: str, dropout: float = 0.0) -> Problem:
    embedding = layers.ReversibleEmbedding(11, 8)
    inputs = layers.Input((6,), dtype="int32")
    h = embedding(inputs) + layers.Embedding(6, 8)(keras.ops.arange(6))
    for _ in range(2):
        h = pre_norm(h, dropout, causal=True)
    model = keras.Model(inputs, embedding(layers.LayerNormalization()(h), reverse=True))
    text = tokens(2, 7)
    return classifier(model, (text[:, :-1], text[:, 1:]), training=dropout > 0)


def vision_transformer(dtype: str) -> Problem:
    inputs = layers.Input((8, 8, 3))
    h = layers.Reshape((4, 8))(layers.Conv2D(8, 4, strides=4)(inputs))
    h = pre_norm(pre_norm(h + layers.Embedding(4, 8)(keras.ops.arange(4))))
    h = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(h))
    model = keras.Model(inputs, layers.Dense(5)(h))
    return classifier(model, (random(1, 2, 8, 8, 3, dtype=dtype), np.array([0, 3])))


def unet(dtype: str) -> Problem:
    def block(x: Any, filters: int) -> Any:
        x = layers.Conv2D(filters, 3, padding="same")(x)
        return layers.Activation("silu")(layers.GroupNormalization(2)(x))

    inputs = layers.Input((8, 8, 2))
    skips, h = [], inputs
    for filters in (4, 6):
        skips.append(block(h, filters))
        h = layers.MaxPooling2D()(skips[-1])
    h = block(h, 8)
    for skip in reversed(skips):
        h = layers.UpSampling2D(interpolation="bilinear")(h)
        h = block(layers.Concatenate()([h, skip]), skip.shape[-1])
    model = keras.Model(inputs, layers.Conv2D(1, 1)(h))
    perturb(model.trainable_variables)

    def loss(x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:  # cross-entropy and Dice
        logits = model(x)
        p = tf.sigmoid(logits)
        overlap = tf.reduce_sum(p * mask, [1, 2, 3]) / tf.reduce_sum(p + mask, [1, 2, 3])
        entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=mask, logits=logits)
        return tf.reduce_mean(entropy) + tf.reduce_mean(1 - 2 * overlap)

    x = random(1, 2, 8, 8, 2, dtype=dtype)
    return Problem(loss, model, (x, (x[..., :1] > 0).astype(dtype)))


class GraphNetwork(keras.Model):
    """Messages along edges, in two graphs of five and two nodes, one of which gets no message."""

    def __init__(self, by_norm: bool) -> None:
        super().__init__()
        self.messages = [layers.Dense(6, "tanh") for _ in range(2)]
        self.updates = [layers.Dense(4, "softplus") for _ in range(2)]
        self.head, self.by_norm = layers.Dense(1), by_norm

    def call(self, h: tf.Tensor) -> tf.Tensor:
        source, target = [0, 1, 2, 3, 4, 1, 5, 6], [1, 2, 0, 4, 0, 0, 6, 5]
        for message, update in zip(self.messages, self.updates):
            ends = tf.concat([tf.gather(h, source), tf.gather(h, target)], 1)
            arrived = tf.math.unsorted_segment_sum(message(ends), target, 7)
            if self.by_norm:
                arrived /= 1 + tf.norm(arrived, axis=1, keepdims=True)
            else:
                arrived = tf.math.l2_normalize(arrived, axis=1)
            h = update(tf.concat([h, arrived], 1))
        graphs = [0, 0, 0, 0, 0, 1, 1]
        return self.head(tf.math.segment_mean(h, graphs) + tf.math.segment_max(h, graphs))


def graph_network(dtype: str, by_norm: bool = False) -> Problem:
    model, nodes = GraphNetwork(by_norm), random(1, 7, 3, dtype=dtype)
    model(nodes)  # builds the layers
    perturb(model.trainable_variables)
    return Problem(lambda x: tf.reduce_mean((model(x) - [[0.5], [-1.0]]) ** 2), model, (nodes,))


def flow(dtype: str) -> Problem:
    """Affine couplings and invertible mixing; the loss is the negative log-likelihood."""
    mixing = [
        tf.Variable(np.eye(4) + random(9 + i, 4, 4, scale=0.2), dtype=dtype) for i in range(3)
    ]
    networks = [
        keras.Sequential([layers.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(4)])
        for _ in mixing
    ]
    for network in networks:
        perturb(network.trainable_variables)

    def loss(z: tf.Tensor) -> tf.Tensor:
        volume = tf.zeros(len(z), dtype)
        for mix, network in zip(mixing, networks):
            z = z @ mix
            fixed, moved = tf.split(z, 2, 1)
            scale, shift = tf.split(network(fixed), 2, 1)
            z = tf.concat([fixed, moved * tf.exp(tf.tanh(scale)) + shift], 1)
            volume += tf.linalg.slogdet(mix)[1] + tf.reduce_sum(tf.tanh(scale), 1)
        return tf.reduce_mean(tf.reduce_sum(z**2, 1) / 2 - volume)

    variables = {"mixing": mixing, "networks": [n.trainable_variables for n in networks]}
    return Problem(loss, variables, (random(1, 5, 4, dtype=dtype),))


def neural_ode(dtype: str) -> Problem:
    field = keras.Sequential([layers.Input((3,)), layers.Dense(8, "tanh"), layers.Dense(3)])
    perturb(field.trainable_variables)
    step = 0.1

    def runge_kutta(i: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        a = field(x)
        b = field(x + step / 2 * a)
        c = field(x + step / 2 * b)
        return i + 1, x + step / 6 * (a + 2 * b + 2 * c + field(x + step * c))

    def loss(start: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
        _, x = tf.while_loop(lambda i, x: i < 10, runge_kutta, (0, start))
        return tf.reduce_mean((x - end) ** 2)

    return Problem(
        loss, field, (random(1, 2, 3, dtype=dtype), random(2, 2, 3, dtype=dtype, scale=2))
    )


def detection(dtype: str, proposals: bool = False) -> Problem:
    """Regions of an image's features, classified and moved; optionally the regions are learned."""
    features = keras.Sequential(
        [
            layers.Input((12, 12, 3)),
            layers.Conv2D(4, 3, padding="same", activation="silu"),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="silu"),
        ]
    )
    head = keras.Sequential([layers.Input((36,)), layers.Dense(8, "silu"), layers.Dense(6)])
    boxes = tf.Variable([[0.1, 0.0, 0.7, 0.8], [0.3, 0.2, 0.9, 1.0], [0.0, 0.4, 0.5, 0.9]])
    variables = [*features.trainable_variables, *head.trainable_variables]
    perturb(variables)

    def loss(image: tf.Tensor, label: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
        where = boxes if proposals else tf.stop_gradient(boxes)
        regions = tf.image.crop_and_resize(features(image), where, [0, 0, 1], [3, 3])
        out = head(tf.reshape(tf.cast(regions, dtype), [3, 36]))
        focal = keras.losses.categorical_focal_crossentropy(label, out[:, :2], from_logits=True)
        smooth_l1 = keras.losses.huber(offset, out[:, 2:], delta=0.5)
        return tf.reduce_mean(focal) + tf.reduce_mean(smooth_l1)

    image = random(1, 2, 12, 12, 3, dtype=dtype)
    label = tf.constant([[1, 0], [0, 1], [0, 1]], dtype)
    offset = tf.constant(random(2, 3, 4, dtype=dtype))
    if proposals:
        variables.append(boxes)
    return Problem(lambda image: loss(image, label, offset), variables, (image,))


def recurrent(layer: str) -> Callable[[str], Problem]:
    """Return the builder of a two-layer recurrent network, one of them bidirectional."""

    def build(dtype: str) -> Problem:
        cell = getattr(layers, layer)
        first = layers.Bidirectional(cell(3, return_sequences=True))
        model = keras.Sequential([layers.Input((4, 3)), first, cell(4), layers.Dense(5)])
        return classifier(model, (random(1, 2, 4, 3, dtype=dtype), np.array([0, 3])))

    return build


def convolutional_lstm(dtype: str) -> Problem:
    inputs = [layers.Input((3, 5, 5, 2)), layers.ConvLSTM2D(3, 3, return_sequences=True)]
    volume = [layers.Conv3D(4, 2, activation="gelu"), layers.GlobalAveragePooling3D()]
    model = keras.Sequential([*inputs, *volume, layers.Dense(5)])
    return classifier(model, (random(1, 2, 3, 5, 5, 2, dtype=dtype), np.array([0, 3])))


def dilated(dtype: str) -> Problem:
    """Gated, causal and dilated convolutions over time."""
    inputs = h = layers.Input((12, 3))
    for dilation in (1, 2, 4):
        gate = layers.Conv1D(4, 2, padding="causal", dilation_rate=dilation, activation="sigmoid")
        signal = layers.Conv1D(4, 2, padding="causal", dilation_rate=dilation, activation="tanh")
        h = layers.Conv1D(4, 1)(h) + layers.Multiply()([gate(h), signal(h)])
    model = keras.Model(inputs, layers.Dense(5)(layers.SeparableConv1D(6, 3, dilation_rate=2)(h)))
    y = np.random.default_rng(0).integers(0, 5, (2, 8))
    return classifier(model, (random(1, 2, 12, 3, dtype=dtype), y))


def siamese(dtype: str) -> Problem:
    """One encoder for both inputs, compared by the cosine of what it makes of them."""
    parts = [layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
    encoder = keras.Sequential([layers.Input((8, 8, 2)), *parts, layers.Dense(6)])
    first, second = layers.Input((8, 8, 2)), layers.Input((8, 8, 2))
    cosine = layers.Dot(1, normalize=True)([encoder(first), encoder(second)])
    model = keras.Model([first, second], layers.Dense(1)(cosine))
    perturb(model.trainable_variables)

    def loss(a: tf.Tensor, b: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(keras.losses.binary_crossentropy(same, model([a, b]), True))

    images = (random(seed, 3, 8, 8, 2, dtype=dtype) for seed in (1, 2))
    return Problem(loss, model, (*images, np.array([[1], [0], [0]], dtype)))


def residual(dtype: str, training: bool = True) -> Problem:
    """Residual blocks with batch normalization by the batch's own statistics."""
    inputs = layers.Input((8, 8, 3))
    h = layers.Conv2D(6, 3, padding="same", use_bias=False)(inputs)
    for _ in range(3):
        skip = h
        for _ in range(2):
            h = layers.Activation("relu")(layers.BatchNormalization()(h))
            h = layers.Conv2D(6, 3, padding="same", use_bias=False)(h)
        h = h + skip
    h = layers.GlobalAveragePooling2D()(layers.BatchNormalization()(h))
    model = keras.Model(inputs, layers.Dense(5)(h))
    x = random(1, 5, 8, 8, 3, dtype=dtype)
    return classifier(model, (x, np.array([0, 3, 1, 2, 4])), training=training)


def dropout(dtype: str) -> Problem:
    parts: list[Any] = [layers.Input((6, 6, 2)), layers.Conv2D(4, 3, activation="gelu")]
    parts += [layers.SpatialDropout2D(0.3, seed=1), layers.Flatten()]
    for seed in range(4):
        parts += [layers.Dense(8, "tanh"), layers.Dropout(0.4, seed=seed)]
    parts += [layers.GaussianNoise(0.1, seed=5), layers.Dense(5)]
    data = (random(1, 2, 6, 6, 2, dtype=dtype), np.array([0, 3]))
    return classifier(keras.Sequential(parts), data, training=True)


class _Sample(layers.Layer):
    """Draw from a normal distribution, by its mean and the logarithm of its variance."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(7)

    def call(self, mean: Any, log_variance: Any) -> Any:
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.generator)
        return mean + keras.ops.exp(log_variance / 2) * noise


def autoencoder(dtype: str) -> Problem:
    inputs = layers.Input((8, 8, 1))
    h = layers.Conv2D(4, 3, strides=2, padding="same", activation="softplus")(inputs)
    h = layers.Flatten()(h)
    mean, log_variance = layers.Dense(2)(h), layers.Dense(2)(h)
    h = layers.Dense(64, "tanh")(_Sample()(mean, log_variance))
    h = layers.Reshape((4, 4, 4))(h)
    out = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(h)
    model = keras.Model(inputs, [out, mean, log_variance])
    perturb(model.trainable_variables)

    def loss(x: tf.Tensor) -> tf.Tensor:  # the negative evidence lower bound
        logits, mean, log_variance = model(x)
        each = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.sigmoid(x), logits=logits)
        divergence = mean**2 + tf.exp(log_variance) - 1 - log_variance
        return tf.reduce_mean(tf.reduce_sum(each, [1, 2, 3]) + tf.reduce_sum(divergence, 1) / 2)

    return Problem(loss, model, (random(1, 2, 8, 8, 1, dtype=dtype),))


def physics_informed(dtype: str) -> Problem:
    """Burgers' equation: two derivatives by the inputs are inside the loss."""
    parts = [layers.Dense(8, "tanh"), layers.Dense(8, "tanh"), layers.Dense(1)]
    model = keras.Sequential([layers.Input((2,)), *parts])
    perturb(model.trainable_variables)

    def loss(points: tf.Tensor) -> tf.Tensor:
        x, t = tf.split(points, 2, 1)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch([x, t])
                u = model(tf.concat([x, t], 1))
            u_x, u_t = inner.gradient(u, x), inner.gradient(u, t)
        equation = u_t + u * u_x - 0.1 * outer.gradient(u_x, x)
        initial = model(tf.concat([x, tf.zeros_like(t)], 1)) + tf.sin(np.pi * x)
        return tf.reduce_mean(equation**2) + tf.reduce_mean(initial**2)

    return Problem(loss, model, (random(1, 7, 2, dtype=dtype),))


def mixed(dtype: str) -> Problem:
    """Convolution, normalization and attention; variables in float32, the rest in half of that."""
    inputs = layers.Input((8, 8, 3))
    h = layers.BatchNormalization()(layers.Conv2D(8, 4, strides=4, activation="silu")(inputs))
    h = layers.Flatten()(pre_norm(layers.Reshape((4, 8))(h)))
    model = keras.Model(inputs, layers.Dense(5, dtype="float32")(h))
    return classifier(model, (random(1, 2, 8, 8, 3), np.array([0, 3])))


MODELS: dict[str, Callable[[str], Problem]] = {
    "ConvNeXtTiny": application("ConvNeXtTiny", 32),
    "DenseNet121": application("DenseNet121", 32),
    "EfficientNetB0": application("EfficientNetB0", 32, scale=127),
    "EfficientNetV2B0": application("EfficientNetV2B0", 32, scale=127),
    "InceptionV3": application("InceptionV3", 75),
    "MobileNet": application("MobileNet", 32),
    "MobileNetV2": application("MobileNetV2", 32),
    "MobileNetV3Small": application("MobileNetV3Small", 32, scale=127),
    "NASNetMobile": application("NASNetMobile", 32),
    "ResNet50": application("ResNet50", 32),
    "ResNet50V2": application("ResNet50V2", 32),
    "VGG16": application("VGG16", 32),
    "Xception": application("Xception", 71),
    "encoder-decoder": encoder_decoder,
    "language model": language_model,
    "language model, dropout": functools.partial(language_model, dropout=0.2),
    "vision transformer": vision_transformer,
    "U-Net": unet,
    "graph network": graph_network,
    "graph network, norm at zero": functools.partial(graph_network, by_norm=True),
    "normalizing flow": flow,
    "neural ODE": neural_ode,
    "detection head": detection,
    "detection head, learned boxes": functools.partial(detection, proposals=True),
    "LSTM": recurrent("LSTM"),
    "GRU": recurrent("GRU"),
    "ConvLSTM": convolutional_lstm,
    "dilated convolutions": dilated,
    "siamese network": siamese,
    "dropout": dropout,
    "batch normalization in training": residual,
    "variational autoencoder": autoencoder,
    "physics-informed network": physics_informed,
    "mixed_float16": mixed,
    "mixed_bfloat16": mixed,
}

# float64 unless listed. On the CPU, TensorFlow has no gradient of grouped convolutions in float64;
# it resizes and crops images in float32 whatever their type.
PARTLY = "float64, partly float32"
DTYPES = {
    "ConvNeXtTiny": "float32",
    "U-Net": PARTLY,
    "detection head": PARTLY,
    "detection head, learned boxes": PARTLY,
    "mixed_float16": "mixed_float16",
    "mixed_bfloat16": "mixed_bfloat16",
}

# What has to be refused, with words of the message.
REFUSED = {
    "detection head, learned boxes": "CropAndResizeGradBoxes",
    "graph network, norm at zero": "not finite",
}
# What recompute=True has to refuse, and what takes minutes with it.
NOT_RECOMPUTED = {"graph network": "subclassed"}
SLOW = {"NASNetMobile"}
