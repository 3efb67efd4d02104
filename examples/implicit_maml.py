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

WIDTH, TASKS, STEPS, SPRING = 24, 4, 40, 0.3
tf.random.set_seed(0)
rng = np.random.default_rng(0)

# %%
# A network as a function of its weights
# --------------------------------------

shapes = [(1, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH, 1), (1,)]
start = [
    tf.Variable(rng.standard_normal(shape) / shape[0] ** 0.5, dtype=tf.float32, name=f"start_{i}")
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
# Newton's method trains, inside a graph. A weaker spring lets tasks go further, until a minimum is
# no longer a function of where training began: the gradient would be NaN then.


def adapted(begin, x, y):
    """Return the weights that a task leads to."""

    def loss(weights):
        fit = tf.reduce_mean((network(weights, x) - y) ** 2)
        spring = sum(tf.reduce_sum((v - b) ** 2) for v, b in zip(weights, begin))
        return fit + SPRING / 2 * spring

    return hvp.argmin(loss, [tf.convert_to_tensor(b) for b in begin], begin)


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


optimizer = keras.optimizers.Adam(5e-3)
others = [draw(TASKS) for _ in range(5)]  # tasks to judge by
errors = {}
for step in range(STEPS + 1):
    if step % 10 == 0:
        errors[step] = np.mean([float(meta_gradient(*task)[0]) for task in others])
        print(
            f"step {step:2}: error for other points of other tasks {errors[step]:.2f}", flush=True
        )
    _, slopes = meta_gradient(*draw(TASKS))
    optimizer.apply(slopes, start)

# %%
# A new wave, from ten points
# ---------------------------

x, y, x_new, y_new = (part[0] for part in draw(1))
grid = tf.linspace(-5.0, 5.0, 200)[:, tf.newaxis]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot(list(errors), list(errors.values()), marker="o")
left.set(xlabel="meta-step", ylabel="mean square error", title="Other tasks, after training")
left.set_ylim(0)
for label, begin in (("from random weights", random_start), ("from those learned", start)):
    trained = adapted([tf.convert_to_tensor(b) for b in begin], x, y)
    right.plot(grid, network(trained, grid), label=label)
right.scatter(x, y, color="black", label="ten points", zorder=3)
right.scatter(x_new, y_new, color="grey", marker="x", label="others")
right.set(xlabel="x", ylabel="y", title="A new sine wave")
right.legend()
figure.savefig("implicit_maml.png", dpi=120)
