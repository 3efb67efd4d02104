"""
The curvature of a classifier on all of its data
================================================

A Keras model trained on handwritten digits, and the Hessian of its compiled loss over the whole
data set, in batches: its largest eigenvalues, and how few of them stand out.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits

import hvp

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(32, "tanh", kernel_regularizer=keras.regularizers.L2(1e-3)),
        keras.layers.Dense(10),
    ]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=128, epochs=20, verbose=0)

# %%
# The operator, from what the model was compiled with
# ---------------------------------------------------
#
# However the 1797 digits are divided, the operator is the Hessian of the mean over all of them;
# the regularizer counts once. `H.value` is what `model.evaluate` answers.

H = hvp.HessianOperator.from_keras(model, (x, y), batch_size=256)
print(f"{H.stats.batches} batches, loss {H.value:.6f}, {H.shape[0]} parameters")
print(f"model.evaluate: {model.evaluate(x, y, verbose=0):.6f}")

# %%
# Its spectrum
# ------------
#
# Nine eigenvalues stand out: one fewer than there are classes, since adding a number to all
# logits changes no probability.

eigenvalues = eigsh(H, 30, which="LA", return_eigenvectors=False, v0=np.ones(H.shape[0]))[::-1]
print(f"{H.stats.products} products from one evaluation of the gradient")

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(np.arange(1, 31), eigenvalues, "o", markersize=4)
axes.axvline(9.5, color="0.7", linewidth=0.8)
axes.set_xlabel("rank")
axes.set_ylabel("eigenvalue")
axes.set_title("The largest eigenvalues of the Hessian, all digits", loc="left")
plt.show()
