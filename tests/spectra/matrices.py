"""Symmetric matrices with known eigenvalues, and a network with its dense Hessian."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases import Problem, dense_hessian, random

SIZE = 300


def spectra():
    """Eigenvalues of each kind: clusters, multiplicities, zeros, a wide spread, both signs."""
    rng = np.random.default_rng(0)
    return {
        "decaying": np.exp(-np.arange(SIZE) / 10),
        "flat": 1 + rng.random(SIZE),
        "indefinite": rng.standard_normal(SIZE) + 0.5,
        "multiple": np.r_[np.full(7, 5.0), np.full(5, 3.0), rng.random(SIZE - 12)],
        "rank one": np.r_[4.0, np.zeros(SIZE - 1)],
        "wide": 10.0 ** np.linspace(-12, 0, SIZE),
        "zero": np.zeros(SIZE),
        "clusters": np.repeat([-1.0, 0.5, 2.0], SIZE // 3) + 1e-6 * rng.standard_normal(SIZE),
        "negative": -rng.random(SIZE) - 0.1,
    }


SPECTRA = spectra()


def matrix_of(eigenvalues, seed=1, dtype="float64"):
    """Return a dense matrix with these eigenvalues and random eigenvectors."""
    size = len(eigenvalues)
    Q = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]
    A = (Q * eigenvalues) @ Q.T
    return ((A + A.T) / 2).astype(dtype)


def network():
    """Return a model, its loss and data, and the Hessian by differences, of 96 variables."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((5,), dtype="float64"),
            layers.Dense(8, "tanh", name="first", dtype="float64"),
            layers.Dense(4, "tanh", name="second", dtype="float64"),
            layers.Dense(2, name="third", dtype="float64"),
        ]
    )
    for index, weight in enumerate(model.trainable_variables):
        weight.assign(random(index, *weight.shape, dtype="float64", scale=0.6))
    data = random(7, 11, 5, dtype="float64"), random(8, 11, 2, dtype="float64")

    def loss(x, y):
        return tf.reduce_mean(tf.reduce_sum((model(x) - y) ** 2, axis=1))

    variables = [v.value for v in model.trainable_variables]
    return model, loss, data, dense_hessian(Problem(lambda: loss(*data), variables))
