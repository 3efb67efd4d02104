"""
Weights that matter
===================

Curvature says how much the loss grows if a weight changes. That decides which weights can be
removed, which of two models should have its way where they are merged, and which weights have to
stay if a model learns something new.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import cg
from sklearn.datasets import load_digits

import hvp

# %%
# A network for digits, with weight decay
# ---------------------------------------

images, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images, digits = (images[order] / 16).astype("float32"), digits[order]
x, y, x_test, y_test = images[:1000], digits[:1000], images[1000:], digits[1000:]


def network(decay=1e-3):
    """Return a network that is not trained yet."""
    l2 = keras.regularizers.L2(decay)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(40, "relu", kernel_regularizer=l2),
            keras.layers.Dense(10, "softmax", kernel_regularizer=l2),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    return model


def accuracy(model, x=x_test, y=y_test):
    """Return the accuracy."""
    return np.mean(model.predict(x, verbose=0).argmax(axis=1) == y)


def assign(model, w):
    """Set all weights from one vector."""
    for variable in model.trainable_variables:
        part, w = np.split(w, [variable.shape.num_elements() or 1])
        variable.assign(part.reshape(variable.shape))


keras.utils.set_random_seed(0)
model = network()
model.fit(x, y, batch_size=50, epochs=100, verbose=0)
print(f"accuracy {accuracy(model):.3f} with {model.count_params()} weights")

# %%
# Removing weights
# ----------------
#
# `saliency` is how much the loss grows without a weight: if the others stay ("optimal brain
# damage"), or if they follow ("optimal brain surgeon"). The weights that follow move to the mean of
# the posterior, given that the others are zero.

la = hvp.Laplace.from_keras(model, (x, y))
w, covariance = la.mean, la.covariance().to_dense(max_size=len(la.mean))
scores = {
    "magnitude": np.abs(w),
    "damage": la.saliency(),
    "surgeon": la.saliency("surgeon"),
}
fractions = np.array([0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
curves = {name: [] for name in scores}
for name, score in scores.items():
    for fraction in fractions:
        removed = np.argsort(score)[: int(fraction * len(w))]
        changed = w.copy()
        if name == "surgeon" and len(removed):
            inner = covariance[np.ix_(removed, removed)]
            changed -= covariance[:, removed] @ np.linalg.solve(inner, w[removed])
        changed[removed] = 0
        assign(model, changed)
        curves[name].append(accuracy(model))
    shown = ", ".join(f"{f:.0%} {a:.3f}" for f, a in zip(fractions, curves[name]))
    print(f"removed by {name:9} {shown}")
assign(model, w)

# %%
# Merging two models
# ------------------
#
# Two networks with the same beginning, one trained on the digits 0 to 4 and one on 5 to 9. The mean
# of their weights gives each as much of a say in each weight. Weighted by their curvatures it
# minimizes the sum of both losses, to second order: by the diagonals (Matena and Raffel 2022), or
# by the Kronecker factors, which needs a linear solve.

keras.utils.set_random_seed(1)
model.fit(x, y, batch_size=50, epochs=2, verbose=0)
beginning, posteriors = la.mean, []
for low in (0, 5):
    assign(model, beginning)
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    part = (y >= low) & (y < low + 5)
    model.fit(x[part], y[part], batch_size=50, epochs=20, verbose=0)
    own = hvp.Laplace.from_keras(model, (x[part], y[part]))
    posteriors.append((own.mean, own.precision().frozen()))
    print(f"trained on {low} to {low + 4}: accuracy {accuracy(model):.3f}")
means, precisions = zip(*posteriors)
diagonals = [P.diagonal() for P in precisions]
total = sum(P @ mean for P, mean in zip(precisions, means))
merged = {
    "mean": sum(means) / 2,
    "diagonals": sum(d * mean for d, mean in zip(diagonals, means)) / sum(diagonals),
    "Kronecker factors": cg(precisions[0] + precisions[1], total, sum(means) / 2, rtol=1e-6)[0],
}
for name, weights in merged.items():
    assign(model, weights)
    print(f"merged by {name:17} accuracy {accuracy(model):.3f}")

# %%
# Learning one thing after another
# --------------------------------
#
# A network learns to read digits, and then digits whose pixels are in another order, without seeing
# the first again. It forgets them, unless the posterior of the first task is the prior of the
# second.

order = np.random.default_rng(3).permutation(64)
tasks = [(x, x_test), (x[:, order], x_test[:, order])]


def learn(model, x, penalty=lambda: 0.0, epochs=60):
    """Train on images, with a penalty of the sum over examples."""
    optimizer, loss = keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x, targets):
        with tf.GradientTape() as tape:
            value = loss(targets, model(x)) + penalty() / len(y)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    data = tf.data.Dataset.from_tensor_slices((x, y))
    for batch in data.shuffle(1000, seed=0).repeat(epochs).batch(50):
        step(*batch)


for remembers in (False, True):
    keras.utils.set_random_seed(2)
    model = network(0.0)
    (first, first_test), (second, second_test) = tasks
    learn(model, first)
    before = accuracy(model)
    la = hvp.Laplace.from_keras(model, (first, y))
    learn(model, second, *([la.penalty()] if remembers else []))
    after = accuracy(model, first_test), accuracy(model, second_test)
    print(
        f"{'with' if remembers else 'without'} the penalty: accuracy on the first task "
        f"{before:.3f}, then {after[0]:.3f}; on the second {after[1]:.3f}"
    )

# %%
# The accuracy on test digits, without training again, over the part of the weights that is removed.

fig, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
for name, curve in curves.items():
    ax.plot(fractions, curve, "o-", markersize=4, label=name)
ax.set_title("Accuracy without the least important weights", loc="left")
ax.set(xlabel="part of the weights removed", ylabel="accuracy")
ax.legend(frameon=False)
plt.show()
