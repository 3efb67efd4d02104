"""
Is the network as sure as it should be?
=======================================

A network that was trained until it knows its examples by heart is too sure of others. A Laplace
approximation makes its probabilities honest, without training again. Here it is compared with the
two usual remedies, a temperature and an ensemble of five networks, on handwritten digits, and on
images that are no digits at all.
"""

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
# 400 digits to train with, 200 to choose the prior, and the others to judge by.

images, digits = load_digits(return_X_y=True)
images = (images / 16).astype("float32")


def split(seed):
    """Return data for training, for validation and for judging."""
    order = np.random.default_rng(seed).permutation(len(images))
    parts = np.split(order, [400, 600])
    return [(images[part], digits[part]) for part in parts]


def train(data, seed):
    """Return a network that fits all examples."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(64, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(*data, batch_size=32, epochs=200, verbose=0)
    return model


train_data, validation, (x_test, y_test) = split(0)
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
calibration = la.calibration((x_test, y_test))
print(f"prior precision {la.prior_precision:.3g}")
print(calibration)

# %%
# The other remedies
# ------------------
#
# A temperature divides the logits, and is chosen by the same validation data. An ensemble averages
# the probabilities of five networks, which takes five times as long to train.


def temperature_of(logits, y):
    """Return the temperature of the largest likelihood."""

    def loss(log_temperature):
        scaled = scipy.special.log_softmax(logits / np.exp(log_temperature), axis=1)
        return -scaled[np.arange(len(y)), y].mean()

    return np.exp(scipy.optimize.minimize_scalar(loss, bounds=(-3, 3)).x)


def contenders(model, la, others, validation):
    """Return functions from images to probabilities, by name."""
    temperature = temperature_of(la.function(validation[0])[0], validation[1])
    return {
        "point estimate": lambda x: model.predict(x, verbose=0),
        "temperature": lambda x: scipy.special.softmax(la.function(x)[0] / temperature, axis=1),
        "ensemble of 5": lambda x: np.mean(
            [one.predict(x, verbose=0) for one in (model, *others)], axis=0
        ),
        "Laplace": la.predict,
    }


def auroc(inside, outside):
    """Return how often the network is surer of a digit than of something else."""
    both = scipy.stats.rankdata(np.concatenate([inside, outside]))
    count = len(inside)
    return (both[:count].sum() - count * (count + 1) / 2) / (count * len(outside))


# %%
# Images that are no digits: the same pixels, in another order.

shuffled = np.random.default_rng(0).permuted(x_test, axis=1)
others = [train(train_data, seed) for seed in range(1, 5)]
results, sureness = {}, {}
for name, predict in contenders(model, la, others, validation).items():
    results[name] = hvp.calibration(predict(x_test), y_test)
    sureness[name] = predict(x_test).max(axis=1), predict(shuffled).max(axis=1)
    print(
        f"{name:15} calibration error {results[name].error:.4f}, log loss "
        f"{results[name].log_loss:.4f}, accuracy {results[name].accuracy:.3f}; "
        f"mean sureness of no digit {sureness[name][1].mean():.3f}, "
        f"AUROC {auroc(*sureness[name]):.3f}"
    )

# %%
# Left, how often the most probable digit is the right one, over its predicted probability: below
# the diagonal the network is too sure. Right, the probabilities of the most probable digit, for
# images that are none.

fig, axes = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
calibration.plot(axes[0])
bins = np.linspace(0.1, 1, 31)
for place, (name, (_, outside)) in enumerate(sureness.items()):
    axes[1].hist(outside, bins, histtype="step", label=name, color=f"C{place}", linewidth=1.4)
axes[1].set(xlabel="sureness of images that are no digits", ylabel="images")
axes[1].legend(frameon=False, fontsize="small", loc="upper left")
plt.show()
