"""
A physics-informed network, polished
====================================

A small network learns the solution of a convection equation from the equation alone. Adam begins;
then `hvp.NewtonCG`, L-BFGS-B through `hvp.minimize` and Adam itself go on from the same weights for
the same number of seconds.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import time

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from threadpoolctl import threadpool_limits

import hvp

# %%
# The equation
# ------------
#
# :math:`u_t + 15\,u_x = 0`, periodic in *x*, with :math:`u(x, 0) = \sin x`. Its solution,
# :math:`\sin(x - 15\,t)`, is what the network is compared with in the end, and learns nothing from.

speed = 15.0
x = np.linspace(0, 2 * np.pi, 25)
t = np.linspace(0, 1, 30)


def grid(x, t):
    return np.stack(np.meshgrid(x, t), axis=-1).reshape(-1, 2)


inside = tf.constant(grid(x, t))
along = tf.constant(np.tile([speed, 1.0], (len(inside), 1)))
beginning = tf.constant(grid(x, 0.0))
left, right = tf.constant(grid(0.0, t)), tf.constant(grid(2 * np.pi, t))

# %%
# The loss
# --------
#
# The left side of the equation is the derivative of *u* in the direction (15, 1): one forward
# accumulator. To its mean square are added those of what is missing at the beginning and at the
# ends. `NewtonCG` differentiates this twice more.

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((2,), dtype="float64"),
        *[keras.layers.Dense(20, "tanh", dtype="float64") for _ in range(3)],
        keras.layers.Dense(1, dtype="float64"),
    ]
)
model_weights = model.trainable_variables


def mean_square(difference):
    return tf.reduce_mean(tf.square(difference))


def loss():
    with tf.autodiff.ForwardAccumulator(inside, along) as accumulator:
        u = model(inside)
    return (
        mean_square(accumulator.jvp(u))
        + mean_square(model(beginning) - tf.sin(beginning[:, :1]))
        + mean_square(model(left) - model(right))
    )


# %%
# Adam begins
# -----------

optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model_weights)


@tf.function
def adam_step():
    with tf.GradientTape() as tape:
        value = loss()
    optimizer.apply_gradients(zip(tape.gradient(value, model_weights), model_weights))
    return value


adam_step.get_concrete_function()  # traced here
start = time.perf_counter()
first = [(time.perf_counter() - start, float(adam_step())) for _ in range(4000)]
weights = model.get_weights()
print(f"{'Adam, first':>14}: loss {first[-1][1]:.1e} after {first[-1][0]:.0f} s")

# %%
# Three ways on
# -------------
#
# What is called with each loss notes the time, and ends the run when that is up.

seconds = 12
runs, errors = {}, {}
times = np.linspace(0, 1, 101)
points = grid(np.linspace(0, 2 * np.pi, 100), times)
exact = np.sin(points[:, 0] - speed * points[:, 1])


def clock(run):
    model.set_weights(weights)
    begin = time.perf_counter()

    def note(value):
        run.append((time.perf_counter() - begin, float(value)))
        if run[-1][0] > seconds:
            raise StopIteration

    return note


def error():
    """Return the root mean square of the error over x, for each time."""
    difference = model(tf.constant(points)).numpy()[:, 0] - exact
    return np.sqrt(np.mean(difference.reshape(101, 100) ** 2, axis=1))


errors["Adam, first"] = error()

# %%
# Newton-CG. The Hessian of such a loss has a few very large eigenvalues and many small ones, which
# the sketch of a Nyström preconditioner is made for. The first steps trace the graphs, which is not
# counted; `reset` forgets them.

H = hvp.HessianOperator(loss, model)
newton = hvp.NewtonCG(H, preconditioner="nystrom", rank=60)
newton.minimize(maxiter=5)
newton.reset()
note = clock(runs.setdefault("hvp.NewtonCG", []))
result = newton.minimize(gtol=0, maxiter=10**6, callback=lambda step: note(step.loss))
errors["hvp.NewtonCG"] = error()
print(f"{'hvp.NewtonCG':>14}: {result.nit} steps, {result.products} products")

# %%
# L-BFGS-B, which has nothing to trace where it is given an operator. The linear algebra inside
# scipy is held to one thread: its threads and those of TensorFlow get in each other's way.

note = clock(runs.setdefault("L-BFGS-B", []))
with threadpool_limits(1, "blas"):
    result = hvp.minimize(
        H,
        method="L-BFGS-B",
        ftol=0,
        gtol=0,
        maxiter=10**6,
        maxfun=10**6,
        callback=lambda intermediate_result: note(intermediate_result.fun),
    )
errors["L-BFGS-B"] = error()
print(f"{'L-BFGS-B':>14}: {result.nit} iterations, {result.gradient_evaluations} gradients")

# %%
# And Adam, with all that it remembers; its rate becomes zero as the time runs out.

run = runs.setdefault("Adam", [])
note = clock(run)
try:
    while True:
        note(adam_step())
        optimizer.learning_rate = 0.01 * max(1 - run[-1][0] / seconds, 0)
except StopIteration:
    errors["Adam"] = error()
    print(f"{'Adam':>14}: {len(run)} steps")

# %%
# The loss and the error
# ----------------------

for name, run in runs.items():
    overall = np.sqrt(np.mean(errors[name] ** 2))
    print(f"{name:>14}: loss {run[-1][1]:.1e}, error {overall:.1e}")

colors = {
    "Adam, first": "#cbd5e1",
    "Adam": "#64748b",
    "L-BFGS-B": "#0f766e",
    "hvp.NewtonCG": "#c2410c",
}
figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
for name, color in colors.items():
    run = np.array(runs.get(name, first))
    begin = first[-1][0] if name in runs else 0
    axes[0].semilogy(begin + run[:, 0], run[:, 1], color=color, label=name, linewidth=1.4)
    axes[1].semilogy(times, errors[name], color=color, linewidth=1.4)
axes[0].set_title("Loss", loc="left")
axes[1].set_title("Error of the solution", loc="left")
axes[0].set(xlabel="seconds", ylabel="loss", xlim=(0, None))
axes[1].set(xlabel="$t$", ylabel="error of $u$, rms over $x$", xlim=(0, 1))
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
names = axes[0].get_legend_handles_labels()
figure.legend(*names, loc="outside upper left", ncols=4, frameon=False)
plt.show()
