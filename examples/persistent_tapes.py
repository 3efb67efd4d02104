r"""
Reusing the inner gradient in nested tapes
==========================================

Nested ``GradientTape``\ s compute a Hessian-vector product, but they evaluate the gradient again
for every vector. How can you evaluate it only once?
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import matplotlib.pyplot as plt
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
# The same with hvp
# -----------------
#
# The operator does the same in compiled functions. It also distinguishes derivatives that are zero
# from derivatives that TensorFlow does not have, and notices when a variable changes.


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
# Time against the number of vectors
# ----------------------------------
#
# Building the operator includes tracing the loss, which takes most of the time for a few vectors.
# An operator that is built once and refreshed at each new point does not trace again. It is the
# fastest way for any number of vectors.

operator = hvp.HessianOperator(loss, variables)


def refreshed(vectors):
    operator.refresh()
    return [operator.product(v) for v in vectors]


ways = {
    "nested tapes": nested,
    "persistent outer tape": persistent,
    "hvp, built each time": library,
    "hvp, refreshed": refreshed,
}
counts = [1, 5, 10, 20, 40]
vectors = vectors * 2
seconds = {(name, count): [] for name in ways for count in counts}
for _ in range(7):
    for count in counts:
        for name, way in ways.items():
            start = time.perf_counter()
            way(vectors[:count])
            seconds[name, count].append(time.perf_counter() - start)

fig, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name in ways:
    medians = [1e3 * np.median(seconds[name, count]) for count in counts]
    print(f"{name:>22}: {medians[-1]:6.1f} ms for {counts[-1]} products")
    ax.plot(counts, medians, "o-", label=name)
ax.set_title("Products with many vectors", loc="left")
ax.set(xlabel="vectors", ylabel="milliseconds in all", xlim=(0, None), ylim=(0, None))
ax.legend(frameon=False)
plt.show()
