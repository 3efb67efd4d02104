"""
Solving with the Hessian of a Keras model
=========================================

Trains a small classifier on scikit-learn's handwritten digits, takes the Hessian of its loss over
the whole training set, and solves (*H* + *λI*) *x* = *g* with scipy's conjugate gradients:
one damped Newton step. The gradient is evaluated once, however many products the solver asks for.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import cg, eigsh
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import hvp

# %%
# A model as anyone would train it
# --------------------------------

images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(
    (images / 16).astype("float32"), labels, test_size=0.2, random_state=0
)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.layers.Input((64,)),
        keras.layers.Dense(64, "tanh"),
        keras.layers.Dense(32, "tanh"),
        keras.layers.Dense(10),
    ]
)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), cross_entropy, metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=15, verbose=0)
accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]

# %%
# Its Hessian, over the whole training set
# ----------------------------------------
#
# The loss is a function of the data, and returns the mean over the examples. The model stands for
# its trainable variables.

l2 = 1e-3


def loss(x, y):
    penalty = tf.add_n([tf.reduce_sum(w.value**2) for w in model.trainable_variables])
    return cross_entropy(y, model(x)) + l2 / 2 * penalty


H = hvp.HessianOperator(loss, model, data=(x, y))
n = H.shape[0]

# %%
# Conjugate gradients need a positive definite matrix, and the Hessian of a network seldom is one.
# Its smallest eigenvalue says how much damping makes it so.

smallest = eigsh(H, 1, which="SA", tol=1e-2, v0=np.ones(n, H.dtype), return_eigenvectors=False)[0]
damping = 2 * max(-smallest, 1e-3)

# %%
# The solve
# ---------
#
# ``H.damped(...)`` is *H* + *λI* over the same evaluation. scipy's callback gets the
# iterates; their true residuals are one block product afterwards.

g = H.gradient
A = H.damped(damping)
iterates = [np.zeros(n, H.dtype)]
before = H.stats.products
with tqdm(desc="conjugate gradients", unit=" iterations") as bar:

    def note(iterate):
        iterates.append(iterate.copy())
        bar.update()

    step, info = cg(A, g, rtol=1e-4, maxiter=500, callback=note)
products = H.stats.products - before
residuals = np.linalg.norm(g[:, None] - A @ np.stack(iterates, axis=1), axis=0)
residuals /= np.linalg.norm(g)

# %%
# What a product costs
# --------------------
#
# Beside one gradient, and beside the nested tapes that one writes by hand, which evaluate the
# gradient again for every vector: eager, and compiled by ``tf.function``. They take turns, so that
# whatever else the machine does falls on all alike.

variables = [w.value for w in model.trainable_variables]
data = tf.constant(x), tf.constant(y)


def gradient():
    with tf.GradientTape() as tape:
        value = loss(*data)
    return tape.gradient(value, variables)


def nested_tapes(vectors):
    with tf.GradientTape() as outer:
        gradients = gradient()
    return outer.gradient(gradients, variables, output_gradients=vectors)


compiled = tf.function(nested_tapes)
v = np.random.default_rng(0).standard_normal(n).astype(H.dtype)
vectors = [tf.constant(part) for part in H.unflatten(v)]
rivals = {
    "product, H @ v": lambda: H @ v,
    "gradient": gradient,
    "product, nested tapes": lambda: nested_tapes(vectors),
    "product, the same in tf.function": lambda: compiled(vectors),
}
compiled(vectors)  # traced here, not below
seconds = {name: [] for name in rivals}
for _ in tqdm(range(30), desc="timing", unit=" rounds"):
    for name, run in rivals.items():
        start = time.perf_counter()
        run()
        seconds[name].append(time.perf_counter() - start)
median = {name: 1e3 * np.median(times) for name, times in seconds.items()}

# %%
# The result
# ----------

weights = [w.numpy() for w in variables]
for w, part in zip(variables, H.unflatten(tf.constant(step))):
    w.assign_sub(part)
loss_after = float(loss(*data))
for w, old in zip(variables, weights):
    w.assign(old)

for name, value in {
    "parameters, n": f"{n}",
    "training examples": f"{len(x)}",
    "test accuracy": f"{accuracy:.3f}",
    "loss": f"{H.value:.4f}",
    "loss after the Newton step": f"{loss_after:.4f}",
    "smallest eigenvalue": f"{smallest:.4f}",
    "damping": f"{damping:.4f}",
    "gradient evaluations": f"{H.stats.gradient_evaluations}",
    "products in the solve": f"{products}",
    "converged": "yes" if info == 0 else "no",
    "relative residual": " ".join(f"{r:.0e}" for r in residuals[:: max(1, len(residuals) // 6)]),
    **{f"ms, {name}": f"{value:.2f}" for name, value in median.items()},
}.items():
    print(f"{name:>30}  {value}")

# %%

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
left.semilogy(residuals)
left.set(
    xlabel="iteration", ylabel="relative residual", title=f"cg on $(H + {damping:.3f}\\,I)\\,x = g$"
)
left.xaxis.get_major_locator().set_params(integer=True)
left.grid(alpha=0.3)
bars = right.barh(list(median), list(median.values()), color=["C0", "C7", "C3", "C1"])
right.bar_label(bars, fmt="%.1f ms", padding=3)
right.invert_yaxis()
right.margins(x=0.2)
right.set(xlabel="milliseconds, median", title=f"{n} parameters, {len(x)} images")
right.spines[["top", "right"]].set_visible(False)
figure.savefig("cg_solve.png", dpi=150)
print(f"{'figure':>30}  cg_solve.png")
H.close()
