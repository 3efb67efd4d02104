"""
Influence without linear solves
===============================

EK-FAC approximates the curvature of a network by Kronecker factors, whose inverse is known. Scores
of influence then need no linear solve, and models with too many weights for one can have them. What
does the approximation cost? Here 60 training digits are left out of the training of a small
convolutional network, one at a time, and the change of test losses is compared with four
predictions: by the inverses of the Hessian, of the Gauss-Newton matrix and of EK-FAC, and by the
products of gradients alone.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import aslinearoperator
from sklearn.datasets import load_digits

import hvp

# %%
# A network at a minimum
# ----------------------
#
# 400 digits and 666 weights in float64, with a penalty on the weights that keeps the minimum where
# it is. A variable holds which examples count, so that one operator serves all trainings.

keras.utils.set_random_seed(0)
images, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images, digits = images[order].reshape(-1, 8, 8, 1) / 16, digits[order]
x, y = tf.constant(images[:400]), tf.constant(digits[:400])
test = images[400:500], digits[400:500]
DECAY = 5e-3

layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((8, 8, 1), dtype="float64"),
        layers.Conv2D(4, 3, strides=2, padding="same", activation="tanh", dtype="float64"),
        layers.Conv2D(8, 3, strides=2, padding="same", activation="tanh", dtype="float64"),
        layers.Flatten(dtype="float64"),
        layers.Dense(10, dtype="float64"),
    ]
)


def losses(x, y):
    """Return the loss of each example."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))


def penalty():
    """Return what keeps the weights small."""
    return DECAY / 2 * tf.add_n([tf.reduce_sum(v**2) for v in model.trainable_variables])


counts = tf.Variable(np.ones(len(y)))
H = hvp.HessianOperator(
    lambda: tf.reduce_sum(counts * losses(x, y)) / tf.reduce_sum(counts) + penalty(),
    model,
    on_stale="refresh",
)


def train():
    """Minimize from the present weights on, and return the losses of the test digits."""
    result = hvp.minimize(H, method="trust-ncg", options={"gtol": 1e-7, "maxiter": 500})
    assert result.success, result.message
    return losses(*test).numpy()


before = train()
trained = [variable.numpy() for variable in model.trainable_variables]
print(f"{H.shape[0]} weights, test accuracy {np.mean(np.argmax(model(test[0]), 1) == test[1]):.2f}")

# %%
# Four predictions
# ----------------
#
# All are of the form ``g_test . M g_train / n``, with the gradients of the losses without the
# penalty. `M` is the inverse of the Hessian, of the Gauss-Newton matrix or of its EK-FAC
# approximation, or the identity. The penalty is the damping.


def mean_loss(logits, y):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def influence(**options):
    return hvp.InfluenceFunctions((model, mean_loss), model, (x, y), damping=DECAY, **options)


predictions = {
    "Hessian": hvp.InfluenceFunctions(
        lambda x, y: mean_loss(model(x), y), model, (x, y), damping=DECAY, solver="exact"
    ).scores(test),
    "Gauss-Newton": influence(curvature="gauss-newton", solver="exact").scores(test),
    "EK-FAC": influence(solver="ekfac").scores(test),
    "gradients alone": influence(
        curvature="gauss-newton", solver=lambda A: aslinearoperator(np.eye(A.shape[0]))
    ).scores(test),
}

# %%
# Leaving out
# -----------
#
# Half of the digits to leave out are those whose predicted effect on any test digit is the largest,
# half are drawn from the others, before any training. Each training starts from the trained
# weights.

strongest = np.argsort(-np.abs(predictions["Hessian"]).max(axis=0))[:30]
others = np.setdiff1d(np.arange(len(y)), strongest)
chosen = np.concatenate([strongest, np.random.default_rng(1).choice(others, 30, replace=False)])
changes = []
for number in chosen:
    for variable, value in zip(model.trainable_variables, trained):
        variable.assign(value)
    counts.assign(np.arange(len(y)) != number)
    changes.append(train() - before)
changes = np.transpose(changes)

# %%
# What each knows
# ---------------
#
# Each point is a training digit that was left out and one of the 100 test digits.

fig, axes = plt.subplots(1, 4, figsize=(11, 3.2), sharey=True, layout="constrained")
for ax, (name, scores) in zip(axes, predictions.items()):
    predicted = scores[:, chosen]
    r = np.corrcoef(predicted.ravel(), changes.ravel())[0, 1]
    print(f"{name}: r = {r:.3f}")
    ax.plot(predicted.ravel(), changes.ravel(), ".", ms=3, alpha=0.4)
    ax.set(title=f"{name}\nr = {r:.3f}", xlabel="predicted change of the test loss")
axes[0].set_ylabel("change, by training again")
plt.show()

# %%
# EK-FAC treats layers as if they were independent of each other, which the exact inverse does not.
# It is nearer to it than the products of gradients are, and costs no more than these.
