"""
Sixty strengths of regularization at once
=========================================

Grid search finds one hyperparameter, perhaps two. The gradient of the validation loss finds sixty:
it takes the derivative of the trained weights with respect to all strengths, which is one linear
system with the Hessian, whatever their number. Here sixty groups of features have a penalty each,
and ten of the groups matter.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import hvp

GROUPS, OF_GROUP, RELEVANT, STEPS = 60, 3, 10, 40

# %%
# Data that ten groups explain
# ----------------------------

rng = np.random.default_rng(0)
truth = np.zeros(GROUPS * OF_GROUP)
truth[: RELEVANT * OF_GROUP] = rng.standard_normal(RELEVANT * OF_GROUP)


def draw(count):
    """Return inputs and targets with errors."""
    x = rng.standard_normal((count, len(truth)))
    return x, x @ truth + rng.standard_normal(count)


(x, y), (x_new, y_new), (x_test, y_test) = draw(200), draw(200), draw(2000)

# %%
# The loss of training, and what training leads to
# ------------------------------------------------

w = tf.Variable(np.zeros(len(truth)))
strengths = tf.Variable(np.zeros(GROUPS))  # logarithms, so that penalties stay positive


def loss(x, y):
    """Return the penalized mean square error."""
    penalty = tf.repeat(tf.exp(strengths), OF_GROUP) * w**2
    return tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2) + tf.reduce_sum(penalty)


def error(weights, x, y):
    """Return the mean square error for other data."""
    return tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)


H = hvp.HessianOperator(loss, [w, strengths], (x, y))

# %%
# One strength for all, by search
# -------------------------------

single = []
for value in np.linspace(-6, 1, 15):
    strengths.assign(np.full(GROUPS, value))
    best = hvp.argmin(H, w, strengths)
    single.append([float(error(best, x_new, y_new)), float(error(best, x_test, y_test)), value])
chosen = min(single)
print(f"one strength for all: test error {chosen[1]:.2f}, after {len(single)} searches")

# %%
# All of them, by gradient
# ------------------------
#
# `argmin` trains the weights and returns them. The tape finds its way through: 60 derivatives for
# the price of one linear system.

strengths.assign(np.full(GROUPS, chosen[2]))
first, second, steps = np.zeros(GROUPS), np.zeros(GROUPS), []
for step in range(1, STEPS + 1):
    with tf.GradientTape() as tape:
        best = hvp.argmin(H, w, strengths)
        validation = error(best, x_new, y_new)
    slope = tape.gradient(validation, strengths).numpy()
    first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
    mean, square = first / (1 - 0.9**step), second / (1 - 0.99**step)
    strengths.assign_sub(0.2 * mean / np.sqrt(square + 1e-12))  # Adam
    steps.append([float(validation), float(error(best, x_test, y_test))])
print(f"a strength for each group: test error {steps[-1][1]:.2f}, after {STEPS} searches")

# %%
# What was found
# --------------

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for label, values in zip(("validation", "test"), np.transpose(steps)):
    left.plot(values, label=label)
left.axhline(1.0, color="grey", linestyle=":", label="variance of the errors")
left.axhline(chosen[1], color="C1", linestyle="--", label="test, one strength for all")
left.set(xlabel="step", ylabel="mean square error", title="Gradient steps in 60 strengths")
left.legend()
relevant = np.arange(GROUPS) < RELEVANT
for is_relevant, label in ((True, "groups that matter"), (False, "the others")):
    places = np.flatnonzero(relevant == is_relevant)
    right.bar(places, strengths.numpy()[places], label=label)
right.set(xlabel="group of features", ylabel="logarithm of the strength", title="Strengths found")
right.legend()
figure.savefig("hyperparameters.png", dpi=120)
