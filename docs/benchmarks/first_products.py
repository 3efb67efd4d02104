"""Time the first product of Keras models, and a small fit, everything made afresh each time.

By turns: nested tapes in a `tf.function` and this library, and for the fit scipy's `trust-krylov`
with derivatives from `tf.function`s and `hvp.minimize`.

    python docs/benchmarks/first_products.py [--models ResNet50,EfficientNetB0] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import scipy.optimize
import tensorflow as tf

import hvp

FITS = 15


def tape_product(loss: Callable[[], tf.Tensor], variables: Sequence[Any]) -> Any:
    """Return the product by nested tapes, as a function of a flat vector."""
    sizes = [int(np.prod(variable.shape)) for variable in variables]

    @tf.function
    def multiply(v: tf.Tensor) -> tf.Tensor:
        parts = [tf.reshape(p, w.shape) for p, w in zip(tf.split(v, sizes), variables)]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                value = loss()
            gradient = inner.gradient(value, variables)
        products = outer.gradient(gradient, variables, output_gradients=parts)
        return tf.concat([tf.reshape(part, [-1]) for part in products], 0)

    return multiply


def model_contenders(name: str) -> dict[str, Callable[[], Any]]:
    """Return what computes a first product of one of Keras's architectures, and is kept."""
    rng = np.random.default_rng(0)
    model = getattr(keras.applications, name)(weights=None, classes=10, input_shape=(64, 64, 3))
    x, y = tf.constant(rng.standard_normal((4, 64, 64, 3), np.float32)), tf.range(4)
    variables = [weight.value for weight in model.trainable_weights]
    v = rng.standard_normal(model.count_params(), np.float32)
    v = v[: sum(int(np.prod(variable.shape)) for variable in variables)]

    def loss() -> tf.Tensor:
        losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=False))
        return tf.reduce_mean(losses)

    def by_tapes() -> Any:
        multiply = tape_product(loss, variables)
        multiply(tf.constant(v)).numpy()
        return multiply

    def by_hvp() -> Any:
        H = hvp.HessianOperator(loss, variables)
        H @ v
        return H

    return {"nested tapes": by_tapes, "hvp": by_hvp}


def fit_contenders() -> dict[str, Callable[[], Any]]:
    """Return what fits an exponential with three parameters to fifty points."""
    x = np.linspace(0, 4, 50)
    y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.05 * np.random.default_rng(0).standard_normal(50)
    start = [1.0, 1.0, 0.0]

    def problem() -> tuple[tf.Variable, Callable[[], tf.Tensor]]:
        p = tf.Variable(start, dtype=tf.float64)
        return p, lambda: tf.reduce_sum((p[0] * tf.exp(-p[1] * x) + p[2] - y) ** 2)

    def by_hand() -> None:
        p, loss = problem()
        multiply = tape_product(loss, [p])

        @tf.function
        def value_and_gradient() -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                value = loss()
            return value, tape.gradient(value, p)

        def fun(at: np.ndarray) -> tuple[float, np.ndarray]:
            p.assign(at)
            value, gradient = value_and_gradient()
            return float(value), gradient.numpy()

        def hessp(at: np.ndarray, v: np.ndarray) -> np.ndarray:
            p.assign(at)
            return multiply(tf.constant(v)).numpy()

        scipy.optimize.minimize(fun, start, jac=True, hessp=hessp, method="trust-krylov")

    def by_hvp() -> None:
        p, loss = problem()
        hvp.minimize(loss, p)

    return {"by hand": by_hand, "hvp.minimize": by_hvp}


def run(name: str, contenders: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Time all by turns in a random order, after each ran once, and print medians."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    for turn in range(rounds + 1):
        for label in rng.permutation(list(contenders)):
            begin = time.perf_counter()
            made = contenders[label]()
            if turn:
                seconds[label].append(time.perf_counter() - begin)
            del made  # now, outside of the timing
    first, second = (np.median(times) for times in seconds.values())
    texts = ", ".join(f"{label} {np.median(times):.3g} s" for label, times in seconds.items())
    print(f"{name}: {texts}, ratio {second / first:.2f}", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="ResNet50,EfficientNetB0", help="names, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name in options.models.split(","):
        run(name, model_contenders(name), options.rounds)
    run("fit of three parameters", fit_contenders(), FITS)


if __name__ == "__main__":
    main()
