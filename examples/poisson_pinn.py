r"""
Poisson's equation in the space of residuals
============================================

A small network solves :math:`\Delta u = f` on the unit square. Its loss takes Laplacians from
`hvp.laplacian`. It is minimized by Gauss-Newton steps in the space of residuals, of which there are
fewer than weights, and for as many seconds by L-BFGS-B and by Adam.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import time

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import hvp

# %%
# The equation
# ------------
#
# The solution is :math:`\sin(\pi x) \sin(\pi y)`, which is zero on the edges of the square. The
# network only sees the right side *f* inside, and the zeros.

rng = np.random.default_rng(0)
inside = rng.uniform(size=(500, 2))
along = rng.uniform(size=(30, 1))
edge = np.concatenate(
    [
        np.hstack(pair)
        for x in (0.0, 1.0)
        for pair in [(along, 0 * along + x), (0 * along + x, along)]
    ]
)


def exact(points):
    return np.prod(np.sin(np.pi * points), axis=-1, keepdims=True)


f = -2 * np.pi**2 * exact(inside)


def network():
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(32, "tanh", dtype="float64") for _ in range(3)]
    last = keras.layers.Dense(1, dtype="float64")
    return keras.Sequential([keras.Input((2,), dtype="float64"), *hidden, last])


# %%
# Two data sets
# -------------
#
# The points inside and those on the edge are data sets of their own. Each has a model, the
# Laplacian or the value, and the same loss of its predictions; the edge counts a hundred times.

u = network()


def laplacian(x):
    return hvp.laplacian(u, x).laplacian


def mean_square(predicted, wanted):
    return tf.reduce_mean((predicted - wanted) ** 2)


models = {"inside": (laplacian, mean_square), "edge": (u, mean_square)}
data = {"inside": (inside, f), "edge": (edge, np.zeros((len(edge), 1)))}
weight = {"edge": 100.0}

# %%
# The runs
# --------
#
# What is called after each step notes the time, which counts everything from the start, tracing
# too, and the error on a grid, which does not count.

seconds = 20
lines = np.linspace(0, 1, 51)
grid = np.stack(np.meshgrid(lines, lines), axis=-1).reshape(-1, 2)
runs = {}


def error():
    difference = u(tf.constant(grid)).numpy() - exact(grid)
    return float(np.linalg.norm(difference) / np.linalg.norm(exact(grid)))


def begin(name, every):
    u.set_weights(network().get_weights())
    run, state = runs.setdefault(name, []), {"steps": 0, "paused": 0.0}
    start = time.perf_counter()

    def note(*_, **__):
        now = time.perf_counter() - start - state["paused"]
        state["steps"] += 1
        if state["steps"] % every == 0 or now > seconds:
            run.append((now, error()))
            state["paused"] += time.perf_counter() - start - state["paused"] - now
        if now > seconds:
            raise StopIteration

    return note


# %%
# Gauss-Newton. Each step solves a system of 620 equations, one for each residual, in a trust
# region. The geodesic acceleration follows the curvature of the path that the step begins.

note = begin("Gauss-Newton", every=1)
newton = hvp.NewtonCG(
    models,
    u,
    data,
    weight=weight,
    curvature="gauss-newton",
    space="residuals",
    geodesic=True,
)
result = newton.minimize(gtol=0, callback=note)

# %%
# L-BFGS-B, with the same loss.

losses = {
    "inside": lambda x, wanted: mean_square(laplacian(x), wanted),
    "edge": lambda x, wanted: mean_square(u(x), wanted),
}
note = begin("L-BFGS-B", every=50)
hvp.minimize(
    losses,
    u,
    data,
    weight=weight,
    method="L-BFGS-B",
    ftol=0,
    gtol=0,
    maxcor=50,
    maxiter=10**6,
    maxfun=10**6,
    callback=lambda intermediate_result: note(),
)

# %%
# And Adam.

note = begin("Adam", every=50)
optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 1000, 0.7))
optimizer.build(u.trainable_variables)


@tf.function
def adam_step():
    with tf.GradientTape() as tape:
        value = losses["inside"](*data["inside"]) + 100 * losses["edge"](*data["edge"])
    optimizer.apply_gradients(
        zip(tape.gradient(value, u.trainable_variables), u.trainable_variables)
    )


try:
    while True:
        adam_step()
        note()
except StopIteration:
    pass

# %%
# The errors
# ----------

for name, run in runs.items():
    print(f"{name:>14}: relative error {run[-1][1]:.1e} after {run[-1][0]:.0f} s")

colors = {"Adam": "#64748b", "L-BFGS-B": "#0f766e", "Gauss-Newton": "#c2410c"}
figure, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
for name, color in colors.items():
    ax.semilogy(*zip(*runs[name]), color=color, label=name, linewidth=1.6)
ax.set_title("Poisson's equation", loc="left")
ax.set(xlabel="seconds", ylabel="relative error of $u$", xlim=(0, seconds))
ax.spines[["top", "right"]].set_visible(False)
ax.grid(alpha=0.25)
ax.legend(frameon=False)
plt.show()
