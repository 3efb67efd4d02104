"""A small problem whose Hessian is known by hand, for programs of several processes."""

import numpy as np
import tensorflow as tf

N, IN, OUT = 23, 4, 2
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((N, IN)), RNG.standard_normal((N, OUT))
W, B = RNG.standard_normal((IN, OUT)), RNG.standard_normal(OUT)


class Network(tf.Module):
    def __init__(self):
        self.w, self.b = tf.Variable(W), tf.Variable(B)

    def __call__(self, x):
        return tf.tanh(x @ self.w + self.b)


def gradient(flat):
    """By hand, in the order of the operator: biases first."""
    b, w = flat[:OUT], flat[OUT:].reshape(IN, OUT)
    h = np.tanh(X @ w + b)
    inner = 2 * (h - Y) / (N * OUT) * (1 - h**2)
    return np.concatenate([inner.sum(0), (X.T @ inner).ravel()])


AT, STEP = np.concatenate([B, W.ravel()]), 1e-5
DENSE = np.array(
    [(gradient(AT + STEP * e) - gradient(AT - STEP * e)) / (2 * STEP) for e in np.eye(len(AT))]
)
V = RNG.standard_normal((len(AT), 3))


def close(found, want, tolerance=1e-8):
    np.testing.assert_allclose(found, want, atol=tolerance * np.abs(want).max())
