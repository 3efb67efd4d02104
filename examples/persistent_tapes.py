r"""
Reusing the inner gradient in nested tapes
==========================================

A common question: nested ``GradientTape``\ s give a Hessian-vector product, but they evaluate the
gradient anew for every vector. How is it evaluated once?
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import hvp

rng = np.random.default_rng(0)
x = tf.constant(rng.standard_normal((512, 128)), tf.float32)
y = tf.constant(rng.standard_normal((512, 1)), tf.float32)
hidden = tf.Variable(rng.standard_normal((128, 256)) / 11, dtype=tf.float32)
readout = tf.Variable(rng.standard_normal((256, 1)) / 16, dtype=tf.float32)
variables = [hidden, readout]


def loss():
    return tf.reduce_mean((tf.tanh(x @ hidden) @ readout - y) ** 2)


vectors = [
    [tf.constant(rng.standard_normal(w.shape), tf.float32) for w in variables] for _ in range(20)
]

# %%
# Nested tapes: a gradient for every vector
# -----------------------------------------


def nested(vectors):
    products = []
    for v in vectors:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                value = loss()
            gradient = inner.gradient(value, variables)
        products.append(outer.gradient(gradient, variables, output_gradients=v))
    return products


# %%
# A persistent outer tape: one gradient for all
# ---------------------------------------------
#
# The outer tape must be persistent, the inner one need not be. The products are taken *outside*
# both, or they would be recorded, and memory would grow with each.


def persistent(vectors):
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as inner:
            value = loss()
        gradient = inner.gradient(value, variables)
    return [outer.gradient(gradient, variables, output_gradients=v) for v in vectors]


# %%
# The same from this library
# --------------------------
#
# Which also makes rows gathered from an embedding dense inside the tape, tells a derivative that is
# zero from one that TensorFlow does not have, notices when a variable has changed meanwhile, and
# is a scipy operator.


def library(vectors):
    with hvp.HessianOperator(loss, variables) as H:
        return [H.product(v) for v in vectors]


# %%
# The same numbers
# ----------------

reference = nested(vectors)
for way in (persistent, library):
    for products, expected in zip(way(vectors), reference):
        for product, e in zip(products, expected):
            np.testing.assert_allclose(product, e, rtol=1e-4, atol=1e-6)

# %%
# And the time, taking turns. The library's includes tracing the loss when the operator is built.

seconds = {way.__name__: [] for way in (nested, persistent, library)}
for _ in range(15):
    for way in (nested, persistent, library):
        start = time.perf_counter()
        way(vectors)
        seconds[way.__name__].append(time.perf_counter() - start)
for name, times in seconds.items():
    print(f"{name:>10}: {1e3 * np.median(times):6.1f} ms for {len(vectors)} products")
