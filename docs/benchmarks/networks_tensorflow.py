"""The workloads' networks in TensorFlow: the plain operations one would write by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from workloads import HEADS, Workload, resnet_blocks

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def mlp(parameters: Sequence[Any], x: tf.Tensor) -> tf.Tensor:
    """Dense layers with tanh between them."""
    *hidden, kernel, bias = parameters
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = tf.tanh(x @ w + b)
    return x @ kernel + bias


def cnn(parameters: Sequence[Any], x: tf.Tensor) -> tf.Tensor:
    """Convolutions with tanh and average pooling, and a dense layer."""
    *hidden, kernel, bias = parameters
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = tf.nn.avg_pool2d(tf.tanh(tf.nn.conv2d(x, w, 1, "SAME") + b), 2, 2, "VALID")
    return tf.reshape(x, [x.shape[0], -1]) @ kernel + bias


def _normalize(x: tf.Tensor, scale: Any, offset: Any, axes: Sequence[int]) -> tf.Tensor:
    # Written out: the second derivative of tf.nn.moments is wrong.
    centred = x - tf.reduce_mean(x, axes, keepdims=True)
    variance = tf.reduce_mean(centred**2, axes, keepdims=True)
    return centred * tf.math.rsqrt(variance + 1e-5) * scale + offset


def _attend(x: tf.Tensor, kernel: Any, bias: Any) -> tf.Tensor:
    batch, tokens, width = x.shape
    heads = tf.reshape(x @ kernel + bias, [batch, tokens, 3, HEADS, width // HEADS])
    query, key, value = tf.unstack(tf.transpose(heads, [2, 0, 3, 1, 4]))
    scores = tf.matmul(query, key, transpose_b=True) / np.sqrt(width // HEADS).astype(np.float32)
    mixed = tf.nn.softmax(scores) @ value
    return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [batch, tokens, width])


def transformer(parameters: Sequence[Any], x: tf.Tensor) -> tf.Tensor:
    """Pre-norm blocks of attention and a feed-forward layer."""
    *blocks, scale, offset, kernel, bias = parameters
    for start in range(0, len(blocks), 12):
        s1, o1, w_qkv, b_qkv, w_out, b_out, s2, o2, w_up, b_up, w_down, b_down = blocks[
            start : start + 12
        ]
        x += _attend(_normalize(x, s1, o1, [-1]), w_qkv, b_qkv) @ w_out + b_out
        x += tf.tanh(_normalize(x, s2, o2, [-1]) @ w_up + b_up) @ w_down + b_down
    return tf.reduce_mean(_normalize(x, scale, offset, [-1]), 1) @ kernel + bias


def resnet18(parameters: Sequence[Any], x: tf.Tensor) -> tf.Tensor:
    """ResNet-18 with the batch's statistics."""
    rest = iter(parameters)

    def convolve(x: tf.Tensor, stride: int = 1) -> tf.Tensor:
        kernel, scale, offset = next(rest), next(rest), next(rest)
        pad = [kernel.shape[0] // 2] * 2
        x = tf.nn.conv2d(x, kernel, stride, [[0, 0], pad, pad, [0, 0]])
        return _normalize(x, scale, offset, [0, 1, 2])

    x = tf.nn.avg_pool2d(tf.nn.relu(convolve(x, 2)), 2, 2, "VALID")
    for _, _, stride in resnet_blocks():
        y = convolve(tf.nn.relu(convolve(x, stride)))
        x = tf.nn.relu(y + (convolve(x, stride) if stride > 1 else x))
    return tf.reduce_mean(x, [1, 2]) @ next(rest) + next(rest)


def _bind_lstm(workload: Workload) -> tuple[Callable[[tf.Tensor], tf.Tensor], list[tf.Variable]]:
    *recurrent, kernel, bias = workload.parameters
    layer = keras.layers.LSTM(recurrent[1].shape[0], use_cudnn=False)
    layer.build(workload.batch[0].shape)
    layer.set_weights(recurrent)
    kernel, bias = tf.Variable(kernel), tf.Variable(bias)
    weights = [weight.value for weight in layer.trainable_weights]
    return lambda x: layer(x) @ kernel + bias, [*weights, kernel, bias]


def bind_logits(
    workload: Workload,
) -> tuple[Callable[[tf.Tensor], tf.Tensor], list[tf.Variable]]:
    """Make fresh variables, and the function of the inputs that reads them."""
    if workload.network == "lstm":
        return _bind_lstm(workload)
    variables = [tf.Variable(parameter) for parameter in workload.parameters]
    network = globals()[workload.network]

    def logits(x: tf.Tensor) -> tf.Tensor:
        return network(variables, x)

    return logits, variables


def cross_entropy(logits: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Mean softmax cross-entropy."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    return tf.reduce_mean(losses)


def bind(workload: Workload) -> tuple[Loss, list[tf.Variable]]:
    """Make fresh variables, and the loss that reads them."""
    logits, variables = bind_logits(workload)
    return lambda x, y: cross_entropy(logits(x), y), variables


def split(workload: Workload, flat: tf.Tensor) -> list[tf.Tensor]:
    """Cut a flat vector into the parameters' shapes."""
    parts = tf.split(flat, workload.sizes)
    return [tf.reshape(part, shape) for part, shape in zip(parts, workload.shapes)]


def join(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate tensors to one flat vector."""
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def evaluate(workload: Workload, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss, gradient and Hessian-vector product, by eager nested tapes."""
    loss, variables = bind(workload)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            value = loss(*map(tf.constant, workload.batch))
        gradient = inner.gradient(value, variables)
    parts = split(workload, tf.constant(v))
    product = outer.gradient(gradient, variables, output_gradients=parts)
    return value.numpy(), join(gradient).numpy(), join(product).numpy()
