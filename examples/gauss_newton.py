"""
Gauss-Newton: curve fits and classifiers
========================================

The Gauss-Newton matrix is the Hessian without the second derivatives of the model. For least
squares its inverse has the standard errors. For a classifier it is positive semi-definite, and its
products cost less than those of the Hessian.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from scipy.optimize import curve_fit, least_squares
from sklearn.datasets import load_digits

import hvp

# %%
# A curve and its standard errors
# -------------------------------
#
# 60 noisy points of a decaying oscillation with five parameters. The model is a function of the
# inputs, which reads a variable.

rng = np.random.default_rng(0)
t = np.linspace(0, 6, 60)
truth = np.array([2.0, 0.4, 3.0, 0.5, 0.3])
w = tf.Variable(truth + 0.2)


def curve(t):
    return w[0] * tf.exp(-w[1] * t) * tf.cos(w[2] * t + w[3]) + w[4]


def half_squares(predictions, y):
    return tf.reduce_mean((predictions - y) ** 2) / 2


w.assign(truth)
y = curve(t).numpy() + 0.15 * rng.standard_normal(len(t))
start = truth + 0.2

# %%
# `scipy.optimize.least_squares` with `hvp.JacobianOperator` for its `jac`. It is evaluated anew at
# each point; the solver may multiply by it after having tried another one, which
# ``on_stale="ignore"`` allows.

w.assign(start)
J = hvp.JacobianOperator(curve, w, (t,), on_stale="ignore")


def errors(at):
    w.assign(at)
    return curve(t).numpy() - y


def jacobian(at):
    w.assign(at)
    J.refresh()
    return J


fit = least_squares(errors, start, jacobian, tr_solver="lsmr", x_scale=1.0, xtol=1e-12)
print(f"least_squares: {fit.x.round(4)}, {fit.nfev} evaluations")

# %%
# The same by `hvp.NewtonCG`. With a damping that is not zero it is the method of Levenberg and
# Marquardt.

w.assign(start)
newton = hvp.NewtonCG(
    (curve, half_squares), w, (t, y), curvature="gauss-newton", damping=1e-3, forcing=1e-6
)
result = newton.minimize(gtol=1e-9)
print(f"hvp.NewtonCG:  {result.x.round(4)}, {result.gradient_evaluations} evaluations")

# %%
# The covariance of the estimates is the inverse of the Gauss-Newton matrix of the sum of squares,
# times the variance of the noise. The standard errors are those of scipy's `curve_fit`, which takes
# finite differences for the Jacobian.

with hvp.GaussNewtonOperator(curve, half_squares, w, (t, y), reduction="sum", convex=True) as G:
    variance = 2 * G.value / (len(t) - len(truth))
    covariance = variance * (hvp.ExactInverse(G) @ np.eye(len(truth)))
ours = np.sqrt(np.diag(covariance))


def plain(t, a, b, c, d, e):
    return a * np.exp(-b * t) * np.cos(c * t + d) + e


theirs = np.sqrt(np.diag(curve_fit(plain, t, y, start)[1]))
for name, value, own, other in zip("abcde", result.x, ours, theirs):
    print(f"{name} = {value:7.4f} +- {own:.4f}   curve_fit: +- {other:.4f}")

# %%
# The band of the curve itself needs the Jacobian at the points where it is drawn.

fine = np.linspace(0, 6, 300)
with hvp.JacobianOperator(curve, w, (fine,)) as K:
    dense = K.to_dense()
    center = K.value.numpy()
band = 2 * np.sqrt(np.einsum("ij,jk,ik->i", dense, covariance, dense))

# %%
# A classifier
# ------------
#
# All 1797 digits, and 16 hidden units, which can fit every one of them: the loss goes to zero. The
# run ends at a gradient of 1e-6. What is counted is gradients. A product with the Hessian of a
# dense network takes 20/11 of the arithmetic of a gradient, and one with the Gauss-Newton matrix
# 14/11.

x, labels = load_digits(return_X_y=True)
x = x / 16
COSTS = {"hessian": 20 / 11, "gauss-newton": 14 / 11}
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")


def classifier(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, "tanh"),
            keras.layers.Dense(10, "softmax"),
        ]
    )
    model.compile(loss="sparse_categorical_crossentropy")
    return model


def newton_run(curvature, seed):
    newton = hvp.NewtonCG.from_keras(
        classifier(seed), (x, labels), curvature=curvature, radius=10.0
    )
    result = newton.minimize(gtol=1e-6, maxiter=300, leave_saddles=False)
    spent = np.cumsum([1 + COSTS[curvature] * step.cg_iterations for step in result.history])
    return spent, [step.gradient_norm for step in result.history]


runs = {c: [newton_run(c, seed) for seed in range(5)] for c in COSTS}
for curvature, several in runs.items():
    ends = [spent[-1] for spent, _ in several]
    print(f"{curvature:>12}: {np.median(ends):.0f} gradients in the median of {len(ends)} starts")

# %%
# Adam, whose learning rate falls to zero, with as many gradients as the longest of these runs took.

steps = int(max(spent[-1] for several in runs.values() for spent, _ in several))


def adam_run(seed, rate=0.02):
    model = classifier(seed)
    decay = keras.optimizers.schedules.CosineDecay(rate, steps)
    optimizer = keras.optimizers.Adam(decay)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            value = model.compute_loss(x, labels, model(x))
        gradient = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradient, model.trainable_variables)
        return tf.linalg.global_norm(gradient)

    return np.arange(1, steps + 1), [float(step()) for _ in range(steps)]


adam = [adam_run(seed) for seed in range(5)]
print(f"        Adam: a gradient of {np.median([g[-1] for _, g in adam]):.0e} after {steps}")

# %%
# Gauss-Newton gets there with fewer gradients, as the loss can become zero: the second derivatives
# of the model, which it leaves out, are multiplied by errors that vanish. Where a penalty or noise
# keeps the loss from zero, the Hessian is the better model close to the minimum.

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
left.plot(t, y, ".", color="#64748b", markersize=4, label="data")
left.plot(fine, center, color="#c2410c", linewidth=1.4, label="fit")
left.fill_between(
    fine, center - band, center + band, color="#c2410c", alpha=0.2, lw=0, label="2 standard errors"
)
left.set(xlabel="time", title="A curve fit")
colors = {"gauss-newton": "#c2410c", "hessian": "#0f766e", "Adam": "#64748b"}
for name, several in {**runs, "Adam": adam}.items():
    for number, (spent, norms) in enumerate(several):
        label = {"gauss-newton": "Gauss-Newton", "hessian": "Hessian"}.get(name, name)
        right.semilogy(
            spent,
            norms,
            color=colors[name],
            linewidth=1,
            alpha=0.8,
            label=label if number == 0 else None,
        )
right.axhline(1e-6, color="0.6", linewidth=0.8, linestyle=":")
right.set(xlabel="gradients, or products in units of one", title="Norm of the gradient, digits")
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
plt.show()

# %%
# Later models are to be in float32 again.

keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")
