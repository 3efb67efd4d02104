"""
Which training images made a prediction
=======================================

A Keras network reads handwritten digits, some of which were deliberately given a wrong label.
Influence functions tell which training images help and which harm a test image that is misread; and
the influence of each training image on itself finds the wrong labels.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import hvp

# %%
# A network, and wrong labels
# ---------------------------
#
# 1,500 digits to train with, one in ten of them with a label drawn from the nine wrong ones. The
# weights decay, so that the network does not learn all of them by heart.

images, digits = load_digits(return_X_y=True)
rng = np.random.default_rng(0)
order = rng.permutation(len(images))
images, digits = (images[order] / 16).astype("float32"), digits[order]
x, y = images[:1500], digits[:1500].copy()
wrong = rng.choice(1500, 150, replace=False)
y[wrong] = (y[wrong] + rng.integers(1, 10, 150)) % 10
x_test, y_test = images[1500:], digits[1500:]

keras.utils.set_random_seed(0)
decay = keras.regularizers.L2(1e-3)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(48, "tanh", kernel_regularizer=decay),
        keras.layers.Dense(10, kernel_regularizer=decay),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss)
model.fit(x, y, batch_size=100, epochs=60, verbose=0)

# %%
# Influences
# ----------
#
# Three lines. Stochastic training does not end at a minimum, and the damping makes up for that.

influence = hvp.InfluenceFunctions.from_keras(model, (x, y), damping=0.05)
guesses = model.predict(x_test, verbose=0).argmax(axis=1)
misread = np.flatnonzero(guesses != y_test)
print(f"{len(misread)} of {len(y_test)} test images are misread; {model.count_params()} weights")

top = influence.top((x_test[misread], y_test[misread]), k=5)

# %%
# Helpful and harmful training images
# -----------------------------------
#
# For the misread images of largest influences: on the left the test image, then the training images
# without which it would be read still worse, then those without which it would be read better. A
# label that was made wrong is red.

strongest = np.argsort(top.harmful_scores[:, 0])[:4]
fig, axes = plt.subplots(4, 11, figsize=(10, 4.4), layout="constrained")


def draw(ax, image, said, color="black"):
    ax.imshow(image.reshape(8, 8), cmap="gray_r")
    ax.set_title(said, fontsize=9, color=color)
    ax.set_axis_off()


for row, test in zip(axes, strongest):
    number = misread[test]
    draw(row[0], x_test[number], f"a {y_test[number]},\nread as {guesses[number]}")
    for ax, train in zip(row[1:], [*top.helpful[test], *top.harmful[test]]):
        draw(ax, x[train], f"{y[train]}", "red" if train in wrong else "black")
axes[0, 3].set_title(f"helpful\n{axes[0, 3].get_title()}", fontsize=9)
axes[0, 8].set_title(f"harmful\n{axes[0, 8].get_title()}", fontsize=9)
plt.show()

# %%
# Finding the wrong labels
# ------------------------
#
# Whoever looks at labels again looks at the most suspicious first: those of largest influence on
# themselves, those that harm the test images most, or those of largest loss. What part of the first
# `k` is really wrong?

own = influence.self_influence()
on_test = influence.scores((x_test, y_test)).mean(axis=0)
probabilities = keras.activations.softmax(keras.ops.convert_to_tensor(model.predict(x, verbose=0)))
losses = -np.log(np.asarray(probabilities)[np.arange(1500), y])
ranks = {
    "influence on itself": np.argsort(-own),
    "harm to test images": np.argsort(on_test),
    "loss": np.argsort(-losses),
    "random": rng.permutation(1500),
}
looked_at = np.arange(1, 301)
fig, ax = plt.subplots(layout="constrained")
for name, rank in ranks.items():
    precision = np.cumsum(np.isin(rank[:300], wrong)) / looked_at
    ax.plot(looked_at, precision, label=name)
    print(f"{name:20} precision at 50, 100, 150: {precision[[49, 99, 149]].round(2)}")
ax.axvline(150, color="0.8", zorder=0)
ax.set(xlabel="labels looked at again", ylabel="part of them that is wrong", ylim=(0, 1.02))
ax.legend(frameon=False)
plt.show()

# %%
# With one label in ten wrong, the loss alone finds them as well as the influence of an image on
# itself does. What only influences tell is whom a wrong label harms.
