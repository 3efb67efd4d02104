"""Symmetry and linearity, over random networks, nests, shapes and dtypes."""

import numpy as np
import tensorflow as tf
from hypothesis import given, note
from hypothesis import strategies as st

import hvp
from tests.cases import examples, random

ACTIVATIONS = {
    "tanh": tf.tanh,
    "relu": tf.nn.relu,
    "gelu": tf.nn.gelu,
    "softplus": tf.nn.softplus,
    "softmax": tf.nn.softmax,
    "swish": tf.nn.silu,
    "sin": tf.sin,
}
NESTS = {
    "list": lambda layers: [variable for layer in layers for variable in layer],
    "nested list": lambda layers: [list(layer) for layer in layers],
    "dict": lambda layers: {f"layer{i}": {"w": w, "b": b} for i, (w, b) in enumerate(layers)},
    "tuple": lambda layers: tuple(layers),
}


@st.composite
def operators(draw):
    """A network with a random shape, and its operator."""
    widths = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    names = [draw(st.sampled_from(sorted(ACTIVATIONS))) for _ in widths]
    activations = [ACTIVATIONS[name] for name in names]
    nest = NESTS[draw(st.sampled_from(sorted(NESTS)))]
    seed = draw(st.integers(0, 1000))
    batch = draw(st.integers(1, 6))
    layers = [
        (
            tf.Variable(random(seed + i, rows, columns, dtype=dtype)),
            tf.Variable(random(seed + 500 + i, columns, dtype=dtype)),
        )
        for i, (rows, columns) in enumerate(zip(widths, widths[1:]))
    ]
    x = random(seed, batch, widths[0], dtype=dtype)
    y = random(seed + 99, batch, widths[-1], dtype=dtype)

    def loss(x, y):
        for (w, b), activation in zip(layers, activations):
            x = activation(x @ w + b)
        return tf.reduce_mean((x - y) ** 2)

    note(f"{widths=} {names=} {dtype=} {seed=} {batch=}")
    damping = draw(st.sampled_from([0.0, 0.5]))
    return hvp.HessianOperator(loss, nest(layers), (x, y), damping=damping)


@examples(6)
@given(operators(), st.integers(0, 1000), st.floats(-10, 10))
def test_symmetric_and_linear(H, seed, factor):
    epsilon = np.finfo(H.dtype).eps
    with H:
        n = H.shape[0]
        u, v = random(seed, n, dtype=H.dtype), random(seed + 1, n, dtype=H.dtype)
        factor = H.dtype.type(factor)
        Hu, Hv, combined = H @ u, H @ v, H @ (u + factor * v)
        columns = H @ np.stack([u, v], axis=1)
        matrix_norm = np.linalg.norm(H.to_dense())
    # A saturated network has a small Hessian out of intermediate values near one, whose rounding
    # errors stay: they are relative to those, not to what is left of them.
    matrix_norm = max(matrix_norm, 1.0)
    scale = matrix_norm * np.linalg.norm(u) * np.linalg.norm(v)
    assert abs(u @ Hv - v @ Hu) <= 100 * epsilon * scale
    scale = matrix_norm * (np.linalg.norm(u) + abs(factor) * np.linalg.norm(v))
    assert np.linalg.norm(combined - (Hu + factor * Hv)) <= 100 * epsilon * scale
    assert np.linalg.norm(columns - np.stack([Hu, Hv], axis=1)) <= 100 * epsilon * scale
