"""
Learning to learn, without the steps
====================================

A network is to learn a new sine wave from ten points. Meta-learning looks for weights to begin
from; the gradient in them leads through the training of each task. Implicit MAML (Rajeswaran et
al., 2019) trains each task to the minimum of its loss plus a spring to where it began. The
derivative of that minimum is one linear system, and no step of training is kept.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import hvp

WIDTH, TASKS, STEPS, SPRING = 24, 4, 120, 0.2
tf.random.set_seed(0)
rng = np.random.default_rng(0)

# %%
# A network as a function of its weights
# --------------------------------------

shapes = [(1, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH, 1), (1,)]
start = [
    tf.Variable(rng.standard_normal(shape).astype("float32") / np.sqrt(shape[0]), name=f"start_{i}")
    for i, shape in enumerate(shapes)
]
random_start = [tf.constant(v) for v in start]


def network(weights, x):
    """Return the outputs for inputs of shape `(points, 1)`."""
    a, b, c, d, e, f = weights
    return tf.tanh(tf.tanh(x @ a + b) @ c + d) @ e + f


def draw(count):
    """Return sine waves with different amplitudes and phases, at ten points and ten others."""
    x = rng.uniform(-5, 5, (count, 20, 1))
    amplitude, phase = rng.uniform(0.5, 3, (count, 1, 1)), rng.uniform(0, np.pi, (count, 1, 1))
    y = amplitude * np.sin(x - phase)
    return [tf.constant(part, tf.float32) for part in (x[:, :10], y[:, :10], x[:, 10:], y[:, 10:])]


# %%
# The weights after training, as a function of those before
# ---------------------------------------------------------
#
# The minimum of a few points and a weak spring need not be a strict one. Some damping makes up for
# that.


def adapted(begin, x, y):
    """Return the weights that a task leads to."""

    def loss(weights):
        fit = tf.reduce_mean((network(weights, x) - y) ** 2)
        spring = sum(tf.reduce_sum((v - b) ** 2) for v, b in zip(weights, begin))
        return fit + SPRING / 2 * spring

    return hvp.argmin(
        loss, [tf.convert_to_tensor(b) for b in begin], begin, solver=descend(loss), damping=0.1
    )


def descend(loss):
    """Return a solver: forty steps of gradient descent."""

    def solver(weights):
        for _ in range(40):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                value = loss(weights)
            slopes = tape.gradient(value, weights)
            weights = [v - 0.03 * slope for v, slope in zip(weights, slopes)]
        return weights

    return solver


@tf.function
def meta_gradient(x, y, x_new, y_new):
    """Return the error for other points after training, and its gradient in the start."""
    with tf.GradientTape() as tape:
        errors = [
            tf.reduce_mean((network(adapted(start, x[i], y[i]), x_new[i]) - y_new[i]) ** 2)
            for i in range(TASKS)
        ]
        value = tf.add_n(errors) / TASKS
    return value, tape.gradient(value, start)


optimizer = keras.optimizers.Adam(1e-2)
errors = []
for _ in range(STEPS):
    value, slopes = meta_gradient(*draw(TASKS))
    optimizer.apply(slopes, start)
    errors.append(float(value))
print(
    f"error after training: first ten {np.mean(errors[:10]):.2f}, last {np.mean(errors[-10:]):.2f}"
)

# %%
# A new wave, from ten points
# ---------------------------

x, y, x_new, y_new = (part[0] for part in draw(1))
grid = tf.linspace(-5.0, 5.0, 200)[:, tf.newaxis]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
smooth = np.convolve(errors, np.ones(10) / 10, mode="valid")
left.plot(errors, alpha=0.3)
left.plot(np.arange(9, len(errors)), smooth, color="C0")
left.set(xlabel="meta-step", ylabel="mean square error for other points", title="Meta-training")
for label, begin in (("from random weights", random_start), ("from those learned", start)):
    trained = adapted([tf.convert_to_tensor(b) for b in begin], x, y)
    right.plot(grid, network(trained, grid), label=label)
right.scatter(x, y, color="black", label="ten points", zorder=3)
right.scatter(x_new, y_new, color="grey", marker="x", label="others")
right.set(xlabel="x", ylabel="y", title="A new sine wave")
right.legend()
figure.savefig("implicit_maml.png", dpi=120)
