"""
How sure is a network? The Laplace approximation
================================================

Around a minimum of the loss, the weights that explain the data nearly as well form a Gaussian whose
precision matrix is the curvature. What it implies for the predictions tells where the data do not
determine them. Here that is computed for a network with one input, with three precision matrices:
the exact Hessian, K-FAC and EK-FAC, of which only the first needs memory for a dense matrix.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import hvp

# %%
# Data with a gap, and a fitted network
# -------------------------------------
#
# The loss is the mean negative log-likelihood of normal errors with the standard deviation `NOISE`.
# The prior of the weights is normal with the precision `PRIOR`.

NOISE, PRIOR, HIDDEN = 0.1, 1.0, 16
random = np.random.default_rng(0)
x = np.concatenate([random.uniform(-3, -1, 60), random.uniform(1, 3, 60)])[:, np.newaxis]
y = np.sin(2 * x) + NOISE * random.standard_normal(x.shape)

sizes = [(1, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]
weights = [tf.Variable(random.standard_normal(s) / np.sqrt(s[0]), name="kernel") for s in sizes]
biases = [tf.Variable(random.standard_normal(s[1]), name="bias") for s in sizes]
variables = [v for pair in zip(weights, biases) for v in pair]


def network(x):
    for W, b in zip(weights[:-1], biases[:-1]):
        x = tf.tanh(x @ W + b)
    return x @ weights[-1] + biases[-1]


def likelihood(predictions, y):
    return tf.reduce_mean((predictions - y) ** 2) / (2 * NOISE**2)


def prior():
    return PRIOR / (2 * len(x)) * tf.add_n([tf.reduce_sum(v**2) for v in variables])


result = hvp.minimize(
    lambda x, y: likelihood(network(x), y) + prior(),
    variables,
    (x, y),
    method="trust-ncg",
    options={"gtol": 1e-6, "maxiter": 5000},
)
print(f"{result.message} Root mean square error: {np.sqrt(np.mean((network(x) - y) ** 2)):.3f}")

# %%
# Three covariances of the predictions
# ------------------------------------
#
# The precision of the posterior is the number of examples times the curvature of the mean loss,
# plus the prior. Along the Jacobian `J` of the predictions, the covariance of the weights becomes
# that of the predictions: ``J (n K + prior)^-1 J^T``.

grid = np.linspace(-4, 4, 161)[:, np.newaxis]
with hvp.JacobianOperator(network, variables, (grid,)) as jacobian:
    J = jacobian.to_dense()
n, damping = len(x), PRIOR / len(x)
with hvp.HessianOperator(lambda x, y: likelihood(network(x), y), variables, (x, y)) as H:
    exact = np.linalg.inv(H.to_dense() + damping * np.eye(H.shape[0])) / n
factored = {
    "K-FAC": hvp.KFAC(network, likelihood, variables, (x, y)),
    "EK-FAC": hvp.EKFAC(network, likelihood, variables, (x, y)),
}
deviations = {"Hessian": np.sqrt(np.einsum("ti,ij,tj->t", J, exact, J))}
for name, K in factored.items():
    covariances = K.inverse(damping) @ J.T / n
    deviations[name] = np.sqrt(np.einsum("ti,it->t", J, covariances))

# %%
# Where the network is unsure
# ---------------------------
#
# The bands are two standard deviations of the network itself, without the errors of the data. Lines
# are networks whose weights were drawn from the K-FAC Gaussian, to first order in the weights.

mean = network(grid).numpy().ravel()
draws = J @ factored["K-FAC"].sample(3, damping, examples=n, seed=1)
fig, axes = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True, layout="constrained")
for ax, (name, deviation) in zip(axes, deviations.items()):
    band = mean - 2 * deviation, mean + 2 * deviation
    ax.fill_between(grid.ravel(), *band, color="C0", alpha=0.25, lw=0)
    if name == "K-FAC":
        ax.plot(grid, mean[:, np.newaxis] + draws, color="C0", lw=0.6)
    ax.plot(grid, mean, "C0")
    ax.plot(x, y, "k.", ms=3)
    ax.set(title=name, xlabel="x", ylim=(-3, 3))
    where = {"among the data": (np.abs(grid) > 1) & (np.abs(grid) < 3), "gap": np.abs(grid) < 0.7}
    parts = [f"{where_}: {deviation[mask.ravel()].mean():.3f}" for where_, mask in where.items()]
    print(f"{name:8} mean standard deviation {', '.join(parts)}")
plt.show()

# %%
# The factored matrices take layers for independent of each other. They miss that the layers
# together are determined better than each by itself, so that the bands are wider among the data.
# And they miss that the layers together may change where no datum holds them, so that in the gap
# the bands are three times too narrow. Where that matters, and there is room, take the Hessian.
