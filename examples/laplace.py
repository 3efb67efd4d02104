"""
How sure is a network? The Laplace approximation
================================================

Around a minimum of the loss, the weights that explain the data nearly as well form a Gaussian whose
precision matrix is the curvature. What it implies for the predictions tells where the data do not
determine them. Here that is computed for a network with one input, with three curvatures: the exact
Gauss-Newton matrix, K-FAC, and K-FAC of the last layer.
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
# The prior of the weights is normal with the precision `PRIOR`, which is a penalty of the loss.

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


def posterior_loss(x, y):
    """Return the negative logarithm of the density of the posterior, up to a constant."""
    squares = tf.add_n([tf.reduce_sum(v**2) for v in variables])
    return tf.reduce_sum((network(x) - y) ** 2) / (2 * NOISE**2) + PRIOR / 2 * squares


options = {"gtol": 1e-3, "maxiter": 5000}
result = hvp.minimize(posterior_loss, variables, (x, y), method="trust-ncg", options=options)
print(f"{result.message} Root mean square error: {np.sqrt(np.mean((network(x) - y) ** 2)):.3f}")

# %%
# Three posteriors
# ----------------
#
# `function` returns the mean and the variance of the network itself, without the errors of data.

grid = np.linspace(-4, 4, 161)[:, np.newaxis]
kinds = {
    "exact curvature": {"curvature": "full", "subset": variables},
    "K-FAC": {"curvature": "kfac", "subset": variables},
    "last layer": {"curvature": "full", "subset": variables[-2:]},
}
posteriors = {
    name: hvp.Laplace(network, "gaussian", (x, y), noise=NOISE, prior_precision=PRIOR, **options)
    for name, options in kinds.items()
}
where = {
    "among the data": (np.abs(grid) > 1) & (np.abs(grid) < 3),
    "in the gap": np.abs(grid) < 0.7,
}
for name, la in posteriors.items():
    mean, variance = la.function(grid)
    parts = [f"{place} {np.sqrt(variance[mask]).mean():.3f}" for place, mask in where.items()]
    evidence = la.log_marginal_likelihood()
    print(f"{name:16} standard deviation {', '.join(parts)}; log evidence {evidence:.1f}")

# %%
# The evidence chooses the noise and the precision of the prior; both were known here.

la = posteriors["exact curvature"]
la.tune_prior_precision(noise=True)
print(f"the evidence asks for noise {la.noise:.3f} and prior precision {la.prior_precision:.2f}")
la.noise, la.prior_precision = NOISE, PRIOR

# %%
# Where the network is unsure
# ---------------------------
#
# The bands are two standard deviations. Lines are networks whose weights were drawn from the
# posterior, to first order in the weights.

with hvp.JacobianOperator(network, variables, (grid,)) as J:
    drawn = J @ (posteriors["K-FAC"].sample(3, seed=1) - la.mean[:, np.newaxis])
fig, axes = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True, layout="constrained")
for ax, (name, posterior) in zip(axes, posteriors.items()):
    mean, variance = (values.ravel() for values in posterior.function(grid))
    deviation = 2 * np.sqrt(variance)
    ax.fill_between(grid.ravel(), mean - deviation, mean + deviation, alpha=0.25, lw=0)
    if name == "K-FAC":
        ax.plot(grid, mean[:, np.newaxis] + drawn, color="C0", lw=0.6)
    ax.plot(grid, mean, "C0")
    ax.plot(x, y, "k.", ms=3)
    ax.set(title=name, xlabel="x", ylim=(-3, 3))
plt.show()

# %%
# K-FAC takes layers for independent of each other. It misses that the layers together are
# determined better than each by itself, so that its band is wider among the data; and that they
# may change together where there are no data, so that in the gap it is too narrow. The last
# layer alone knows nothing of the gap. Where that matters, and there is room, take the exact
# curvature.
