"""
Standard errors of a fit
========================

The inverse of the Hessian of a negative log-likelihood, at its minimum, approximates the covariance
of the estimates, and the roots of its diagonal are their standard errors. Two fits are compared
with what statistics programs compute: a logistic regression with its closed form, and a nonlinear
curve with scipy's `curve_fit`.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from scipy.optimize import curve_fit
from sklearn.datasets import load_breast_cancer

import hvp

# %%
# Logistic regression
# -------------------
#
# Six measurements of tumors, standardized. The loss is the sum over all examples.

data = load_breast_cancer()
chosen = [0, 1, 4, 5, 8, 9]
names = [data.feature_names[i].removeprefix("mean ") for i in chosen] + ["intercept"]
x = data.data[:, chosen]
x = np.column_stack([(x - x.mean(0)) / x.std(0), np.ones(len(x))])
y = data.target.astype("float64")
w = tf.Variable(np.zeros(len(names)))


def negative_log_likelihood():
    """Return the sum over all examples."""
    logits = tf.linalg.matvec(x, w)
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))


result = hvp.minimize(negative_log_likelihood, w, method="trust-exact", tol=1e-10)
H = hvp.HessianOperator(negative_log_likelihood, w)

# %%
# For a few parameters, compute the inverse exactly. The closed form of the Hessian is
# ``x.T @ diag(p * (1 - p)) @ x``.

errors = hvp.ExactInverse(H).standard_errors()

p = 1 / (1 + np.exp(-x @ w.numpy()))
closed_form = np.sqrt(np.diag(np.linalg.inv(x.T * (p * (1 - p)) @ x)))
print("largest relative difference from the closed form:", np.abs(errors / closed_form - 1).max())
for name, value, error in zip(names, w.numpy(), errors):
    print(f"{name:>20} {value:8.3f} +- {error:.3f}")

# %%
# A nonlinear curve
# -----------------
#
# A decay with noise of unknown size. The negative log-likelihood is half of the sum of squares,
# divided by the variance of the noise, which the residuals estimate. `curve_fit` uses the
# Gauss-Newton matrix in place of the Hessian, and so does this.

rng = np.random.default_rng(0)
t = np.linspace(0, 5, 60)
observed = 2.5 * np.exp(-1.3 * t) + 0.5 + 0.08 * rng.standard_normal(len(t))
parameters = tf.Variable(np.array([1.0, 1.0, 0.0]))


def curve(t):
    """Return the decay at these times."""
    a, b, c = tf.unstack(parameters)
    return a * tf.exp(-b * t) + c


def half_of_squares(predicted, observed):
    """Return half of the mean of squares."""
    return tf.reduce_mean((predicted - observed) ** 2) / 2


points = (tf.constant(t), tf.constant(observed))
hvp.minimize(
    lambda t, observed: half_of_squares(curve(t), observed),
    parameters,
    points,
    method="trust-exact",
    tol=1e-12,
)
G = hvp.GaussNewtonOperator(curve, half_of_squares, parameters, points, reduction="sum")
variance = np.sum((curve(t).numpy() - observed) ** 2) / (len(t) - 3)
inverse = hvp.ExactInverse(G)
covariance = inverse.to_dense() * variance

fitted, reference = curve_fit(lambda t, a, b, c: a * np.exp(-b * t) + c, t, observed)
standard_errors = inverse.standard_errors() * np.sqrt(variance)
difference = np.abs(standard_errors / np.sqrt(np.diag(reference)) - 1).max()
print("largest relative difference from curve_fit:", difference)

# %%
# Bars of 95 %, and a band of the curve that follows from the covariance by the Jacobian.

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
places = np.arange(len(names))
left.errorbar(w.numpy(), places, xerr=1.96 * errors, fmt="o", color="#0f766e", capsize=3)
left.errorbar(w.numpy(), places - 0.25, xerr=1.96 * closed_form, fmt="none", color="#c2410c")
left.axvline(0, color="0.6", linewidth=0.8)
left.set_yticks(places, names)
left.set(xlabel="coefficient, 95 % (below: closed form)", title="Logistic regression")

J = hvp.JacobianOperator(curve, parameters, (tf.constant(t),)).to_dense()
spread = 1.96 * np.sqrt(np.einsum("ij,jk,ik->i", J, covariance, J))
right.plot(t, observed, ".", color="0.6")
right.plot(t, curve(t), color="#0f766e")
right.fill_between(t, curve(t) - spread, curve(t) + spread, color="#0f766e", alpha=0.3)
right.set(xlabel="time", title="A decay, with the band of 95 %")
plt.show()
