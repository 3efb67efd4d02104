"""
Is the network as sure as it should be?
=======================================

A network that was trained until it knows its examples by heart is too sure of others. A Laplace
approximation makes its probabilities honest, without training again. Here it is compared with the
two usual remedies, a temperature and an ensemble of three networks, on handwritten digits, and on
images that are not digits.
"""

import dataclasses
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats
from sklearn.datasets import load_digits

import hvp

# %%
# A small data set, learned by heart
# ----------------------------------
#
# 400 digits to train with, 400 to choose the prior, and the others to judge by.

images, digits = load_digits(return_X_y=True)
images = (images / 16).astype("float32")


def split(seed):
    """Return data for training, for validation and for judging."""
    order = np.random.default_rng(seed).permutation(len(images))
    return [(images[part], digits[part]) for part in np.split(order, [400, 800])]


def train(data, seed):
    """Return a network that fits all examples."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(64, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(*data, batch_size=32, epochs=200, verbose=0)
    return model


train_data, validation, test = split(0)
model = train(train_data, 0)
guesses = model.predict(train_data[0], verbose=0).argmax(axis=1)
print(f"training accuracy {np.mean(guesses == train_data[1]):.3f}")

# %%
# The posterior, and the precision that validation data ask for
# -------------------------------------------------------------
#
# Three lines. The precision of the prior is what the result depends on most.

la = hvp.Laplace.from_keras(model, train_data)
la.tune_prior_precision(validation)
print(la.calibration(test))
print(f"prior precision {la.prior_precision:.3g}")

# %%
# Without validation data, the evidence would choose the precision. It is valid where the weights
# are at the maximum of the posterior, and these are not: they were trained without a prior.

la.prior_precision = 1.0
try:
    la.tune_prior_precision()
except hvp.HvpError as error:
    print(error)

# %%
# The other remedies
# ------------------
#
# A temperature divides the logits, and is chosen by the same validation data. An ensemble averages
# the probabilities of three networks, which takes three times as long to train. All are judged on
# three divisions of the data, because one has so few errors that chance decides.


def temperature_of(logits, y):
    """Return the temperature of the largest likelihood."""

    def loss(log_temperature):
        scaled = scipy.special.log_softmax(logits / np.exp(log_temperature), axis=1)
        return -scaled[np.arange(len(y)), y].mean()

    return np.exp(scipy.optimize.minimize_scalar(loss, bounds=(-3, 3)).x)


def contenders(seed):
    """Return functions from images to probabilities, by name, and data to judge them by."""
    train_data, validation, test = split(seed)
    models = [train(train_data, 3 * seed + number) for number in range(3)]
    la = hvp.Laplace.from_keras(models[0], train_data)
    la.tune_prior_precision(validation)
    temperature = temperature_of(la.function(validation[0])[0], validation[1])
    return {
        "point estimate": lambda x: models[0].predict(x, verbose=0),
        "temperature": lambda x: scipy.special.softmax(la.function(x)[0] / temperature, axis=1),
        "ensemble of 3": lambda x: np.mean([m.predict(x, verbose=0) for m in models], axis=0),
        "Laplace": la.predict,
    }, test


def auroc(inside, outside):
    """Return how often the network is surer of a digit than of something else."""
    ranks = scipy.stats.rankdata(np.concatenate([inside, outside]))[: len(inside)]
    return (ranks.sum() - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside))


# %%
# Images that are not digits: the same pixels, in another order.

inside, outside, labels = {}, {}, []
for seed in range(3):
    ways, (x, y) = contenders(seed)
    shuffled = np.random.default_rng(seed).permuted(x, axis=1)
    labels.append(y)
    for name, predict in ways.items():
        inside.setdefault(name, []).append(predict(x))
        outside.setdefault(name, []).append(predict(shuffled).max(axis=1))
labels = np.concatenate(labels)
results = {name: hvp.calibration(np.concatenate(p), labels) for name, p in inside.items()}
for name, result in results.items():
    sure = np.concatenate(inside[name]).max(axis=1), np.concatenate(outside[name])
    print(
        f"{name:15} calibration error {result.error:.4f}, log loss {result.log_loss:.4f}, "
        f"accuracy {result.accuracy:.3f}; confidence in other images {sure[1].mean():.3f}, AUROC "
        f"{auroc(*sure):.3f}"
    )

# %%
# Left, how often the most probable digit is the right one, over its predicted probability: below
# the diagonal the network is too sure. Right, the probabilities of the most probable digit, for
# images that are not.

fig, axes = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
both = dataclasses.replace(results["Laplace"], point=results["point estimate"])
both.plot(axes[0])
bins = np.linspace(0.1, 1, 31)
for name, sureness in outside.items():
    axes[1].hist(np.concatenate(sureness), bins, histtype="step", label=name, linewidth=1.4)
axes[1].set_title("Images that are not digits", loc="left")
axes[1].set(xlabel="confidence", ylabel="images")
axes[1].legend(frameon=False, fontsize="small", loc="upper left")
plt.show()
