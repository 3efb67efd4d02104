"""The workloads' networks in JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from workloads import HEADS, Workload, resnet_blocks


def mlp(parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Dense layers with tanh between them."""
    *hidden, kernel, bias = parameters
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = jnp.tanh(x @ w + b)
    return x @ kernel + bias


def _convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    pad = (kernel.shape[0] // 2,) * 2
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), (pad, pad), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pool(x: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4


def cnn(parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Convolutions with tanh and average pooling, and a dense layer."""
    *hidden, kernel, bias = parameters
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = _pool(jnp.tanh(_convolve(x, w) + b))
    return x.reshape(x.shape[0], -1) @ kernel + bias


def _normalize(
    x: jax.Array, scale: jax.Array, offset: jax.Array, axes: int | tuple[int, ...]
) -> jax.Array:
    centred = x - jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean(centred**2, axes, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + offset


def _attend(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    batch, tokens, width = x.shape
    heads = (x @ kernel + bias).reshape(batch, tokens, 3, HEADS, width // HEADS)
    query, key, value = heads.transpose(2, 0, 3, 1, 4)
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(width // HEADS).astype(np.float32)
    mixed = jax.nn.softmax(scores) @ value
    return mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, width)


def transformer(parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Pre-norm blocks of attention and a feed-forward layer."""
    *blocks, scale, offset, kernel, bias = parameters
    for start in range(0, len(blocks), 12):
        s1, o1, w_qkv, b_qkv, w_out, b_out, s2, o2, w_up, b_up, w_down, b_down = blocks[
            start : start + 12
        ]
        x = x + _attend(_normalize(x, s1, o1, -1), w_qkv, b_qkv) @ w_out + b_out
        x = x + jnp.tanh(_normalize(x, s2, o2, -1) @ w_up + b_up) @ w_down + b_down
    return jnp.mean(_normalize(x, scale, offset, -1), 1) @ kernel + bias


def resnet18(parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """ResNet-18 with the batch's statistics."""
    rest = iter(parameters)

    def convolve(x: jax.Array, stride: int = 1) -> jax.Array:
        kernel, scale, offset = next(rest), next(rest), next(rest)
        return _normalize(_convolve(x, kernel, stride), scale, offset, (0, 1, 2))

    x = _pool(jax.nn.relu(convolve(x, 2)))
    for _, _, stride in resnet_blocks():
        y = convolve(jax.nn.relu(convolve(x, stride)))
        x = jax.nn.relu(y + (convolve(x, stride) if stride > 1 else x))
    return jnp.mean(x, (1, 2)) @ next(rest) + next(rest)


def lstm(parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Scan over the steps; a dense layer on the last state."""
    w_input, w_state, b, kernel, bias = parameters
    zeros = jnp.zeros((x.shape[0], w_state.shape[0]), x.dtype)

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple:
        state, cell = carry
        i, f, c, o = jnp.split(x @ w_input + state @ w_state + b, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(c)
        return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

    (state, _), _ = jax.lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))
    return state @ kernel + bias


def loss(
    workload: Workload, parameters: Sequence[jax.Array], x: jax.Array, y: jax.Array
) -> jax.Array:
    """Mean softmax cross-entropy of a workload's network."""
    return cross_entropy(logits(workload, parameters, x), y)


def logits(workload: Workload, parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Logits of a workload's network."""
    return globals()[workload.network](parameters, x)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, y[:, None], 1))


def arrays(workload: Workload) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Parameters and batch."""
    return list(map(jnp.asarray, workload.parameters)), tuple(map(jnp.asarray, workload.batch))


def split(workload: Workload, flat: jax.Array) -> list[jax.Array]:
    """Cut a flat vector into the parameters' shapes."""
    parts = jnp.split(flat, np.cumsum(workload.sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, workload.shapes)]


def join(parts: Sequence[jax.Array]) -> jax.Array:
    """Concatenate arrays to one flat vector."""
    return jnp.concatenate([part.reshape(-1) for part in parts])


def evaluate(workload: Workload, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss, gradient and Hessian-vector product, forward over reverse."""
    parameters, batch = arrays(workload)

    @jax.jit
    def run(parameters: list[jax.Array], batch: tuple[jax.Array, ...], v: jax.Array) -> tuple:
        def value_and_gradient(parameters: list[jax.Array]) -> tuple:
            return jax.value_and_grad(lambda p: loss(workload, p, *batch))(parameters)

        (value, gradient), (_, product) = jax.jvp(
            value_and_gradient, (parameters,), (split(workload, v),)
        )
        return value, join(gradient), join(product)

    return tuple(map(np.asarray, run(parameters, batch, v)))
