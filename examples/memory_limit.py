"""
More data than memory
=====================

What a product needs of each batch takes memory. With ``memory_limit`` as many batches are kept as
fit, and the others are evaluated again for each product: the same numbers, more time.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import time

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import hvp

rng = np.random.default_rng(0)
weights = [tf.Variable(rng.normal(size=(128, 128)) / 12, dtype=tf.float32) for _ in range(6)]


def loss(x):
    for w in weights:
        x = tf.tanh(x @ w)
    return tf.reduce_mean(x**2)


# %%
# Data that are made when they are asked for
# ------------------------------------------
#
# Any object that gives the same batches each time will do. This one holds none of them: 16
# batches of 4096 examples, of which the linearizations take some 680 MB together.


class Generated:
    """Batches drawn from a seed each."""

    def __iter__(self):
        for seed in range(16):
            yield (np.random.default_rng(seed).normal(size=(4096, 128)).astype("float32"),)


# %%
# Less memory, more time
# ----------------------

v = rng.normal(size=sum(w.shape.num_elements() for w in weights)).astype("float32")
kept, seconds, products = [], [], []
limits = ["200MB", "400MB", "600MB", None]
for limit in limits:
    with hvp.HessianOperator(loss, weights, Generated(), memory_limit=limit) as H:
        H @ v  # the first prepares what the others use
        start = time.perf_counter()
        products.append(H @ v)
        seconds.append(time.perf_counter() - start)
        kept.append(H.stats.batches_kept)
        megabytes = H.stats.residual_bytes / 1e6
        print(f"limit {limit}: {kept[-1]} of {H.stats.batches} batches kept, {megabytes:.0f} MB")

differences = [np.linalg.norm(p - products[-1]) / np.linalg.norm(products[-1]) for p in products]
print(f"largest relative difference: {max(differences):.1e}")

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
bars = axes.bar([limit or "no limit" for limit in limits], seconds, color="#c2410c")
axes.bar_label(bars, [f"{count} of 16 kept" for count in kept], padding=2)
axes.set_ylabel("seconds for one product")
axes.set_xlabel("memory_limit")
axes.set_title("A product over 65536 examples", loc="left")
axes.margins(y=0.15)
plt.show()
