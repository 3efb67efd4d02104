"""
More than one machine
=====================

Each worker holds what products need of its own part of the data, and sends one vector for each
product. A worker that dies costs time, not the answer.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import time
import warnings

import keras
import matplotlib.pyplot as plt
import numpy as np
from scipy.sparse.linalg import cg
from sklearn.datasets import load_digits

import hvp

# %%
# A classifier of digits
# ----------------------

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(256, "tanh"),
        keras.layers.Dense(256, "tanh"),
        keras.layers.Dense(10),
    ]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(images, labels, epochs=10, verbose=0)

# %%
# Two workers
# -----------
#
# Two TensorFlow servers on this machine, in processes of their own. On several machines one starts
# the servers there, and connects with ``tf.config.experimental_connect_to_cluster``; the names of
# devices are the same.

cluster = hvp.Cluster(2)
H = hvp.HessianOperator.from_keras(model, (images, labels), batch_size=225, devices=cluster.devices)
for device in H.stats.devices:
    print(f"{device.name}: {device.batches} batches, {device.residual_bytes / 1e6:.1f} MB")

# %%
# One of them dies
# ----------------
#
# scipy solves ``(H + 0.1 I) x = b``. After 12 products one worker is killed by SIGKILL, as a power
# cut would do. The next product notices this, and evaluates the batches of that worker again on the
# other one.

KILLED = 12
rng = np.random.default_rng(0)
b = rng.standard_normal(H.shape[0]).astype("float32")
damped = H.damped(0.1)
for _ in range(2):
    damped @ b  # the first two products prepare what the others use

ends, norms = [], []
start = time.perf_counter()


def note(x):
    ends.append(time.perf_counter() - start)
    if len(ends) == KILLED:
        cluster.kill(1)


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x, info = cg(damped, b, rtol=1e-5, callback=note)
print("warning:", next(str(w.message)[:90] for w in caught if "is lost" in str(w.message)), "...")
print(f"converged: {info == 0}, after {len(ends)} products; kept: {H.stats.batches_kept} batches")

# %%
# The same solution as in one process:

with hvp.HessianOperator.from_keras(model, (images, labels), damping=0.1) as alone:
    want, _ = cg(alone, b, rtol=1e-5)
print(f"relative difference: {np.linalg.norm(x - want) / np.linalg.norm(want):.1e}")

times = np.diff([0.0, *ends])
lost = KILLED  # the iteration after the one that killed the worker
H.close()
cluster.close()

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.bar(np.arange(len(times)), 1e3 * times, width=0.8, color="#64748b")
axes.bar([lost], [1e3 * times[lost]], width=0.8, color="#c2410c")
axes.annotate(
    "one worker is killed:\nthe other takes over its batches",
    (lost, 1e3 * times[lost]),
    xytext=(-10, -4),
    textcoords="offset points",
    ha="right",
    va="top",
    color="#c2410c",
)
axes.set_xlabel("iteration of conjugate gradients")
axes.set_ylabel("milliseconds")
axes.set_title("A solve over two workers, of which one dies", loc="left")
plt.show()
