"""
The spectrum of a network, before and after training
====================================================

The density of all eigenvalues of the Hessian of a convolutional network on scikit-learn's digits.
Most are close to zero. Training separates some large ones from the bulk.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
from sklearn.datasets import load_digits

import hvp

# %%
# A compiled Keras model and all 1797 digits. The Hessian takes the compiled loss.

x, y = load_digits(return_X_y=True)
x = (x / 16).reshape(-1, 8, 8, 1).astype("float32")

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="tanh", name="conv_1"),
        keras.layers.AveragePooling2D(2),
        keras.layers.Conv2D(32, 3, padding="same", activation="tanh", name="conv_2"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, name="classes"),
    ]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
H = hvp.HessianOperator.from_keras(model, (x, y))

# %%
# 8 random vectors and 40 steps each: 320 products for a density.

untrained = hvp.spectral_density(H)
print(untrained)

model.fit(x, y, epochs=20, batch_size=128, verbose=0)
H.refresh()
trained = hvp.spectral_density(H)
print(trained)

# %%
# The largest eigenvalues one by one, and the trace with those of the layers.

largest = hvp.eigsh(H, 10)
print(largest)
traces = hvp.trace(H, rtol=0.03)
print(traces)

# %%
# The dashed line is the height of a single eigenvalue.

figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), layout="constrained")
for ax, density, title in zip(axes[0], (untrained, trained), ("Untrained", "Trained")):
    density.plot(ax)
    ax.set_title(title, loc="left")
largest.plot(axes[1, 0]).set_title("Trained: the largest eigenvalues", loc="left")
traces.plot(axes[1, 1]).set_title("Trained: the trace of each layer", loc="left")
plt.show()
