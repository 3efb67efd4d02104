"""
The edge of stability
=====================

Full-batch gradient descent is unstable along an eigenvector whose eigenvalue exceeds 2 divided by
the learning rate. During training the largest eigenvalue rises until it reaches that bound, and
then stays near it (Cohen et al. 2021, https://arxiv.org/abs/2103.00065). A callback measures it.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import hvp.keras

# %%
# 500 handwritten digits, one-hot targets, and the square loss.

x, y = load_digits(return_X_y=True)
x, y = (x[:500] / 16).astype("float32"), keras.utils.to_categorical(y[:500])


def train(learning_rate, steps=2000):
    """Train with the whole data in each step; return the model, measurements and losses."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(32, "tanh") for _ in range(3)]
    layers = [keras.Input((64,)), *hidden, keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(learning_rate), "mse")
    monitor = hvp.keras.CurvatureMonitor((x, y), quantities=["largest"], every=20, budget=100.0)
    # One batch for each step; an epoch is 20 steps.
    repeated = np.tile(np.arange(len(x)), 20)
    history = model.fit(
        x[repeated],
        y[repeated],
        batch_size=len(x),
        epochs=steps // 20,
        shuffle=False,
        verbose=0,
        callbacks=[monitor],
    )
    return model, monitor.history, history.history["loss"]


# %%
# The mean square loss of ten outputs has small eigenvalues, so these learning rates are large.

rates = (0.3, 0.45, 0.6)
runs = {rate: train(rate) for rate in rates}
for rate, (_, measured, _) in runs.items():
    largest = measured[-1]["largest"]
    print(f"learning rate {rate}: largest eigenvalue {largest:.3f}, 2 / rate {2 / rate:.3f}")

# %%
# The loss along that eigenvector, at the end of the last run: a parabola nearby.

with hvp.HessianOperator.from_keras(runs[rates[-1]][0], (x, y)) as H:
    along = hvp.loss_slice(H, hvp.eigsh(H, 1).eigenvectors, radius=0.6)
    print(along)

# %%
# The dashed lines are 2 divided by the learning rate.

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
for color, (rate, (_, measured, losses)) in zip(("#0f766e", "#c2410c", "#4338ca"), runs.items()):
    steps = [row["batch"] for row in measured]
    left.plot(steps, [row["largest"] for row in measured], color=color, label=f"rate {rate:g}")
    left.axhline(2 / rate, color=color, linestyle="--", linewidth=0.8)
    middle.semilogy(steps, losses, color=color)
left.set_title("Sharpness, and 2 / rate (dashed)", loc="left")
left.set(xlabel="step", ylabel="largest eigenvalue", ylim=(0, 1.25 * 2 / min(rates)))
left.legend(frameon=False, fontsize="small")
middle.set_title("Loss", loc="left")
middle.set(xlabel="step", ylabel="loss")
along.plot(right).set_title(f"Along the eigenvector, rate {rates[-1]:g}", loc="left")
plt.show()
