"""
Newton-CG on a convex problem
=============================

Softmax regression on handwritten digits, minimized by `hvp.NewtonCG`, by L-BFGS-B through
`hvp.minimize` and by Adam: how far each is from the minimum, for the work it did and the time it
took.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import time

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import hvp

# %%
# The loss
# --------
#
# 650 variables, float64, all 1797 digits at once. The penalty makes the minimum unique but for a
# number added to all biases, which changes nothing.

images, digits = load_digits(return_X_y=True)
x = tf.constant(images / 16)
labels = tf.one_hot(digits, 10, dtype=tf.float64)
W = tf.Variable(tf.zeros((64, 10), tf.float64))
b = tf.Variable(tf.zeros(10, tf.float64))


def loss():
    cross_entropy = tf.nn.softmax_cross_entropy_with_logits(labels, x @ W + b)
    return tf.reduce_mean(cross_entropy) + 5e-4 / 2 * tf.reduce_sum(W**2)


def begin():
    W.assign(tf.zeros_like(W))
    b.assign(tf.zeros_like(b))
    return time.perf_counter()


# %%
# The minimum
# -----------
#
# A first run of Newton-CG finds it, until the gradient is smaller than 1e-12. It traces the graphs
# too, so that the second one, timed below, has none of that left to do; `reset` makes it begin with
# the trust region of the first.

H = hvp.HessianOperator(loss, [W, b])
newton = hvp.NewtonCG(H)
found = newton.minimize(gtol=1e-12)
least = found.fun
print(f"minimum {least:.12f}, gradient {np.linalg.norm(found.jac):.0e}")

# %%
# Three ways there
# ----------------
#
# Work is counted in evaluations of loss and gradient, and products with the Hessian: a product
# takes two products of matrices for each layer, as a gradient does, and counts as much. The
# seconds are those of steps alone, from variables that are zero: Newton-CG and Adam were traced
# before, and L-BFGS-B, which is given the operator, has nothing to trace.

newton.reset()
runs = {"hvp.NewtonCG": [(0.0, 1, np.log(10))]}
start = begin()
before = newton.gradient_evaluations + newton.products


def note(step):
    work = newton.gradient_evaluations + newton.products - before
    runs["hvp.NewtonCG"].append((time.perf_counter() - start, work, step.loss))


newton.minimize(gtol=1e-12, callback=note)

# %%
# L-BFGS-B would stop at its default tolerances long before. It does not tell its callback how often
# it evaluated; they are counted at the end, and spread over the iterations. The linear algebra
# inside scipy is held to one thread: its threads and those of TensorFlow get in each other's way.

iterates = [(0.0, np.log(10))]


def note_iterate(intermediate_result):
    iterates.append((time.perf_counter() - start, intermediate_result.fun))


start = begin()
with threadpool_limits(1, "blas"):
    result = hvp.minimize(
        H, method="L-BFGS-B", ftol=0, gtol=1e-9, maxiter=1000, callback=note_iterate
    )
work = np.linspace(1, result.gradient_evaluations, len(iterates))
runs["L-BFGS-B"] = [(seconds, count, f) for (seconds, f), count in zip(iterates, work)]

# %%
# Adam with the best of three learning rates, a compiled step on all digits. Its jumps late in the
# run are its own: it divides by gradients that have become very small.


def adam(rate, steps=900):
    optimizer = keras.optimizers.Adam(rate)
    optimizer.build([W, b])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = loss()
        optimizer.apply_gradients(zip(tape.gradient(value, [W, b]), [W, b]))
        return value

    step.get_concrete_function()  # traced here
    start = begin()
    return [(time.perf_counter() - start, k + 1, float(step())) for k in range(steps)]


tried = {rate: adam(rate) for rate in (0.03, 0.1, 0.3)}
rate = min(tried, key=lambda rate: min(f for *_, f in tried[rate]))
runs[f"Adam, {rate}"] = tried[rate]

# %%
# How far from the minimum
# ------------------------

figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True, layout="constrained")
for (name, run), color in zip(runs.items(), ["#c2410c", "#0f766e", "#64748b"]):
    seconds, work, f = np.array(run).T
    distance = np.where(f - least > 1e-14, f - least, np.nan)
    near = np.argmax(f - least < 1e-8)
    there = f"{work[near]:.0f} evaluations and products, {seconds[near]:.2f} s" if near else "never"
    print(f"{name:>12}: within 1e-8 after {there}")
    marker = {"marker": "o", "markersize": 3.5} if name == "hvp.NewtonCG" else {}
    for ax, amount in zip(axes, (work, seconds)):
        ax.semilogy(amount, distance, color=color, label=name, linewidth=1.4, **marker)
axes[0].set_title("By work", loc="left")
axes[1].set_title("By time", loc="left")
axes[0].set(xlabel="gradients and products", ylabel="loss above its minimum", xlim=(0, 900))
axes[1].set(xlabel="seconds", xlim=(0, None))
names = axes[0].get_legend_handles_labels()
figure.legend(*names, loc="outside upper left", ncols=3, frameon=False)
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
plt.show()
