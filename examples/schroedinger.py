"""
The ground state of six coupled oscillators
===========================================

The logarithm of a wave function is a small network of six coordinates. Its local energy, which
`hvp.laplacian` computes, is the same everywhere if the wave function is an eigenstate. Gauss-Newton
steps make it so.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import hvp

# %%
# The Hamiltonian
# ---------------
#
# :math:`H = -\Delta / 2 + x^T K x / 2`, with springs between neighbors on a ring. The ground state
# has the energy :math:`\mathrm{tr}(K^{1/2}) / 2`, which the network is compared with in the end.

size = 6
ring = np.roll(np.eye(size), 1, axis=0)
springs = np.eye(size) + 0.5 * (2 * np.eye(size) - ring - ring.T)
exact = np.sqrt(np.linalg.eigvalsh(springs)).sum() / 2

# %%
# The wave function
# -----------------
#
# :math:`\log \psi(x) = -|x|^2 / 2 + u(x)`, with a network *u* that begins as zero.

keras.utils.set_random_seed(0)
u = keras.Sequential(
    [
        keras.Input((size,), dtype="float64"),
        keras.layers.Dense(40, "tanh", dtype="float64"),
        keras.layers.Dense(40, "tanh", dtype="float64"),
        keras.layers.Dense(1, "linear", dtype="float64", kernel_initializer="zeros"),
    ]
)
energy = tf.Variable(size / 2, dtype=tf.float64)


def log_psi(x):
    return u(x)[:, 0] - tf.reduce_sum(x**2, axis=1) / 2


def local_energy(x):
    """Return the local energy at each point: H psi divided by psi."""
    _, gradient, laplacian = hvp.laplacian(log_psi, x)
    kinetic = -(laplacian + tf.reduce_sum(gradient**2, axis=1)) / 2
    return kinetic + tf.reduce_sum((x @ springs) * x, axis=1) / 2


# %%
# Least squares
# -------------
#
# The residuals are the differences of the local energy from one number, the `energy`, at points
# that are drawn from the square of the first wave function. There are fewer points than weights.

points = np.random.default_rng(0).standard_normal((1500, size)) / np.sqrt(2)
before = local_energy(tf.constant(points)).numpy()
energies = []

newton = hvp.NewtonCG(
    (lambda x: local_energy(x) - energy, lambda residuals: tf.reduce_mean(residuals**2)),
    [u.trainable_variables, energy],
    (points,),
    curvature="gauss-newton",
    space="residuals",
)
result = newton.minimize(
    gtol=1e-8, maxiter=40, callback=lambda step: energies.append(float(energy))
)
after = local_energy(tf.constant(points)).numpy()

print(f"exact energy       {exact:.6f}")
print(f"energy             {float(energy):.6f} after {result.nit} steps")
print(f"its spread, before {before.std():.2e}")
print(f"            after  {after.std():.2e}")

# %%
# What the points did not show
# ----------------------------
#
# At other points, the local energy tells how far the wave function is from an eigenstate.

other = np.random.default_rng(1).standard_normal((20_000, size)) / np.sqrt(2)
elsewhere = local_energy(tf.constant(other)).numpy()
print(f"spread elsewhere   {elsewhere.std():.2e}")

figure, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
axes[0].semilogy(np.abs(np.array(energies) - exact), color="#c2410c", linewidth=1.6)
axes[0].set_title("Energy", loc="left")
axes[1].set_title("Local energies", loc="left")
axes[0].set(xlabel="step", ylabel="error of the energy")
bins = np.linspace(exact - 1, exact + 1, 60)
axes[1].hist(before, bins, color="#cbd5e1", label="first")
axes[1].hist(
    elsewhere,
    bins,
    color="#c2410c",
    alpha=0.7,
    label="last, elsewhere",
    weights=np.full(20_000, 0.05),
)
axes[1].axvline(exact, color="k", linewidth=0.8)
axes[1].set(xlabel="local energy", ylabel="points", yscale="log")
axes[1].legend(frameon=False, loc="upper left")
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
plt.show()
