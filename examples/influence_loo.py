"""
Predicting what leaving one out does
====================================

Influence functions predict how a test loss would change if one training example had not been there.
Here the prediction is compared with the change itself: for softmax regression and for a small
network, 100 training examples are left out one at a time, and the model is trained again, from the
weights it had, to convergence.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvp

# %%
# Data and training
# -----------------
#
# 500 digits to train with, 200 to test. Which examples count is held in a variable, so that one
# operator, traced once, serves for every training: ``on_stale="refresh"`` evaluates it again where
# that, or the weights, have changed.

images, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images, digits = images[order] / 16, digits[order]
train, test = slice(0, 500), slice(500, 700)
x, y = tf.constant(images[train]), tf.constant(digits[train])
test_data = images[test], digits[test]


def normal(*shape):
    return np.random.default_rng(1).standard_normal(shape) / np.sqrt(shape[0])


class Model(tf.Module):
    """Softmax regression, or with hidden units a network."""

    def __init__(self, hidden, decay):
        sizes = [64, hidden, 10] if hidden else [64, 10]
        self.weights = [tf.Variable(normal(a, b)) for a, b in zip(sizes, sizes[1:])]
        self.biases = [tf.Variable(np.zeros(b)) for b in sizes[1:]]
        self.decay = decay

    def losses(self, x, y):
        """Return the loss of each example."""
        for number, (W, b) in enumerate(zip(self.weights, self.biases)):
            x = (x if number == 0 else tf.tanh(x)) @ W + b
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, x)

    def mean(self, x, y):
        """Return the mean over the examples."""
        return tf.reduce_mean(self.losses(x, y))

    def penalty(self):
        """Return what keeps the weights small."""
        return self.decay * sum(tf.reduce_sum(v**2) for v in self.trainable_variables)


# %%
# Leaving out
# -----------
#
# One test example is looked at for each model: the one with the largest loss. Half of the training
# examples to leave out are those of largest predicted effect on it, half are drawn from the others;
# both before any training.


def leave_out(model):
    kept = tf.Variable(np.ones(len(y)))
    H = hvp.HessianOperator(
        lambda: tf.reduce_sum(kept * model.losses(x, y)) / tf.reduce_sum(kept) + model.penalty(),
        model,
        on_stale="refresh",
    )

    def train_again():
        result = hvp.minimize(H, method="trust-ncg", options={"gtol": 1e-8})
        assert result.success, result.message

    train_again()
    trained = H.flatten(list(model.trainable_variables))
    influence = hvp.InfluenceFunctions(
        lambda x, y: model.mean(x, y) + model.penalty(), model, (x, y), test_loss=model.mean
    )
    before = model.losses(*test_data).numpy()
    looked_at = int(np.argmax(before))
    predicted = influence.scores(test_data)[looked_at]

    most = np.argsort(-np.abs(predicted))[:50]
    others = np.setdiff1d(np.arange(len(y)), most)
    chosen = np.concatenate([most, np.random.default_rng(2).choice(others, 50, replace=False)])
    actual = []
    for number in chosen:
        for variable, value in zip(model.trainable_variables, H.unflatten(trained)):
            variable.assign(value)
        kept.assign(np.arange(len(y)) != number)
        train_again()
        actual.append(model.losses(*test_data).numpy()[looked_at] - before[looked_at])
    return predicted[chosen], np.array(actual)


names = ["softmax regression", "network, 16 hidden units"]
models = [Model(0, decay=1e-2), Model(16, decay=6e-3)]
found = [leave_out(model) for model in models]

# %%
# Predicted and actual change
# ---------------------------
#
# Each point is one training example; on the line the prediction is exact. Positive: the loss of the
# test example rises without it, so it was helpful.

fig, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
for ax, name, (predicted, actual) in zip(axes, names, found):
    r = np.corrcoef(predicted, actual)[0, 1]
    print(f"{name}: Pearson r = {r:.4f} over {len(actual)} training examples")
    ax.axline((0, 0), slope=1, color="0.8", zorder=0)
    ax.plot(predicted[50:], actual[50:], "o", color="C0", alpha=0.7, label="drawn at random")
    ax.plot(predicted[:50], actual[:50], "o", color="C1", alpha=0.7, label="largest predicted")
    ax.set(title=f"{name}\nr = {r:.3f}", xlabel="predicted change of the test loss")
axes[0].set_ylabel("actual change, by training again")
axes[0].legend(frameon=False)
plt.show()

# %%
# The predictions rank examples as training does. They are somewhat too small for those that count
# most: a first order prediction knows the curvature with the example, not without it. With less
# decay the network has more than one minimum nearby, and training again ends at another one for
# some examples, which no prediction from the first can know.
