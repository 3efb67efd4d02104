"""
A layer with infinitely many layers
===================================

The same layer again and again, until nothing changes: that is a deep equilibrium layer (Bai et al.,
2019). Its output is a fixed point, and `hvp.fixed_point` differentiates it without the iterations.
Here it is a Keras layer, trained by `model.fit` on handwritten digits.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvp

keras.utils.set_random_seed(0)

# %%
# The layer
# ---------


class Equilibrium(keras.layers.Layer):
    """Solves ``z = tanh(z A + x B + c)`` for `z`, with as many entries as `x` has.

    The matrix `A` is kept from stretching anything, so that there is one solution.
    """

    def build(self, shape):
        """Make the weights."""
        width = shape[-1]
        self.inner = self.add_weight(shape=(width, width), name="inner")
        self.outer = self.add_weight(shape=(width, width), name="outer")
        self.bias = self.add_weight(shape=(width,), initializer="zeros", name="bias")

    def call(self, x):
        """Return the fixed point."""
        a, b, c = (tf.convert_to_tensor(v) for v in (self.inner, self.outer, self.bias))
        a *= 0.95 / tf.maximum(0.95, tf.norm(a, 2, axis=[0, 1]))
        return hvp.fixed_point(
            lambda z: tf.tanh(z @ a + x @ b + c), tf.zeros_like(x), [a, b, c, x], rtol=1e-4
        )


# %%
# Training
# --------

images, digits = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(32, "tanh"), Equilibrium(), keras.layers.Dense(10)]
)
model.compile(
    keras.optimizers.Adam(3e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    jit_compile=False,
)
history = model.fit(
    images[:1500],
    digits[:1500],
    batch_size=100,
    epochs=16,
    validation_data=(images[1500:], digits[1500:]),
    verbose=0,
).history
print(f"accuracy for other digits {history['val_accuracy'][-1]:.3f}")

# %%
# The fixed point, and how fast one would get there by iterating
# --------------------------------------------------------------

layer = model.layers[1]
inputs = model.layers[0](images[1500:])
solution = layer(inputs)
z, distances = tf.zeros_like(solution), []
inner = layer.inner.value * 0.95 / max(0.95, np.linalg.norm(layer.inner.numpy(), 2))
for _ in range(40):
    distances.append(float(tf.norm(z - solution) / tf.norm(solution)))
    z = tf.tanh(z @ inner + inputs @ layer.outer.value + layer.bias.value)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for name, label in (("accuracy", "training"), ("val_accuracy", "other digits")):
    left.plot(np.arange(1, 17), history[name], label=label)
left.set(xlabel="epoch", ylabel="accuracy", title="Training through a fixed point")
left.legend()
right.semilogy(distances)
right.set(xlabel="iterations", ylabel="relative distance", title="The same by iterating")
figure.savefig("equilibrium_layer.png", dpi=120)
