"""K-FAC in model.fit: natural gradients in closed form, and by NumPy from the factors it keeps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp

rng = np.random.default_rng(0)
X = rng.standard_normal((40, 5)).astype("float32")
Y = rng.integers(0, 3, 40)
KFAC = hvp.keras.optimizers.KFAC


def made(optimizer, dtype="float32", loss=None, **options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, "tanh", dtype=dtype, name="hidden")(inputs)
    outputs = keras.layers.Dense(3, dtype=dtype, name="last")(hidden)
    model = hvp.keras.Model(inputs, outputs)
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    return model


def fit(model, epochs=1, **options):
    options = {"batch_size": 10, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, epochs=epochs, **options).history["loss"]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.few(1)
def test_one_step_solves_linear_regression(outputs):
    """The natural gradient of a linear model with normal errors is Newton's step."""
    x = rng.standard_normal((4000, 3)) @ np.diag([1.0, 5.0, 0.2])
    y = x @ rng.standard_normal((3, outputs)) + 2 + rng.standard_normal((4000, outputs)) / 10
    inputs = keras.Input((3,), dtype="float64")
    layer = keras.layers.Dense(outputs, dtype="float64")
    model = hvp.keras.Model(inputs, layer(inputs))
    optimizer = KFAC(1.0, momentum=0.0, damping=1e-12, norm_constraint=None)
    model.compile(optimizer, "mse")
    losses = model.fit(x, y, batch_size=4000, epochs=2, verbose=0).history["loss"]
    # Targets are drawn, so that the curvature has an error of a few percent.
    assert losses[1] - 0.01 < 0.01 * losses[0]


def test_steps_are_natural_gradients_of_the_factors_it_keeps():
    rate, damping, momentum, limit = 0.1, 0.05, 0.8, 1e-3
    optimizer = KFAC(rate, momentum, damping, interval=1, norm_constraint=limit)
    model = made(optimizer, "float64")
    velocity = [np.zeros(v.shape) for v in model.trainable_variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for epoch in range(3):
        before = [v.numpy() for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            value = loss(Y, model(X))
        slopes = [g.numpy() for g in tape.gradient(value, [v.value for v in model.weights])]
        fit(model, batch_size=40)
        kept = {v.path.rpartition("/")[2]: v.numpy() for v in optimizer.variables}
        natural = []
        for name, kernel, bias in (("hidden", 0, 1), ("last", 2, 3)):
            A, G = (kept[f"{name}_kernel_factor_{i}"][0] for i in (0, 1))
            pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
            A = A + pi * damping**0.5 * np.eye(len(A))
            G = G + damping**0.5 / pi * np.eye(len(G))
            both = np.concatenate([slopes[kernel], slopes[bias][None]])
            step = np.linalg.inv(A) @ both @ np.linalg.inv(G)
            natural += [step[:-1], step[-1]]
        squared = rate**2 * sum(np.sum(n * g) for n, g in zip(natural, slopes))
        scale = min(1, np.sqrt(limit / squared))
        velocity = [momentum * v + scale * n for v, n in zip(velocity, natural)]
        for variable, old, v in zip(model.trainable_variables, before, velocity):
            np.testing.assert_allclose(variable.numpy(), old - rate * v, rtol=1e-7, atol=1e-10)
        assert scale < 1 or epoch


def test_the_length_of_steps_does_not_depend_on_the_scale_of_the_loss():
    found = []
    for scale in (None, 512.0):
        model = made(KFAC(0.1, norm_constraint=1e-4, loss_scale_factor=scale))
        model.fit(X, Y, batch_size=40, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


def test_factors_are_means_with_targets_that_are_drawn_anew():
    optimizer = KFAC(1e-12, decay=0.95)
    model = made(optimizer, "float64")
    fit(model, epochs=5)  # twenty batches of ten examples
    kept = {v.path.rpartition("/")[2]: v.numpy() for v in optimizer.variables}
    ones = np.concatenate([X, np.ones((40, 1))], axis=1)
    weights = np.full(20, 0.0)
    for step in range(20):
        keep = min(1 - 1 / (step + 1), 0.95)
        weights *= keep
        weights[step] = 1 - keep
    batches = [ones[10 * (i % 4) : 10 * (i % 4) + 10] for i in range(20)]
    expected = sum(w * b.T @ b / 10 for w, b in zip(weights, batches))
    np.testing.assert_allclose(kept["hidden_kernel_factor_0"][0], expected, rtol=1e-6)
    # The expectation over targets is the type-2 factor; 200 draws come near to it.
    exact = hvp.KFAC.from_keras(model, (X, Y), fisher="type-2").factors["last/kernel"][1][0]
    found = kept["last_kernel_factor_1"][0]
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert 1e-3 < error < 0.3


@pytest.mark.long
def test_a_model_that_is_compiled_again_is_measured_by_its_new_loss():
    optimizer = KFAC(1e-12, decay=0.0)
    model = made(optimizer)
    fit(model, batch_size=40)
    model.compile(optimizer, "mse")
    model.fit(np.repeat(X, 50, axis=0), np.zeros((2000, 3)), batch_size=2000, verbose=0)
    (factor,) = [v for v in optimizer.variables if v.path.endswith("last_kernel_factor_1")]
    # The Hessian of the mean of three squares, from 2000 draws.
    np.testing.assert_allclose(factor.numpy()[0], 2 / 3 * np.eye(3), atol=0.1)


@pytest.mark.long
def test_it_resumes_to_the_bit(tmp_path):
    options = {"learning_rate": 0.05, "interval": 3, "statistics_interval": 2}
    whole, first = (made(KFAC(**options)) for _ in range(2))
    fit(whole, 4)
    fit(first, 2)
    first.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == first.optimizer.get_config()
    fit(again, 2)
    for one, other in zip(again.variables, whole.variables):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.few(1)
@pytest.mark.long
def test_convolutions_normalization_and_embeddings(sharing):
    keras.utils.set_random_seed(0)
    images = keras.Input((6, 6, 2))
    x = keras.layers.Conv2D(4, 3, activation="relu")(images)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Flatten()(x)
    words = keras.Input((3,), dtype="int32")
    x = keras.layers.Concatenate()([x, keras.layers.Flatten()(keras.layers.Embedding(7, 4)(words))])
    model = hvp.keras.Model([images, words], keras.layers.Dense(3, "softmax")(x))
    model.compile(KFAC(0.1, sharing=sharing), "sparse_categorical_crossentropy")
    data = [rng.standard_normal((40, 6, 6, 2)), rng.integers(0, 7, (40, 3))]
    losses = model.fit(data, Y, batch_size=20, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.long
def test_what_keras_does_for_every_optimizer():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
    for options in ({"learning_rate": schedule}, {"weight_decay": 0.01}, {"clipnorm": 1.0}):
        losses = fit(made(KFAC(**{"learning_rate": 0.1, **options})), 10)
        assert losses[-1] < losses[0]
    scaled = keras.optimizers.LossScaleOptimizer(KFAC(0.1), initial_scale=128.0)
    losses = fit(made(scaled, keras.DTypePolicy("mixed_float16")), 10)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    # And other optimizers in a model of this kind.
    assert fit(made("adam"), 3)[-1] > 0


@pytest.mark.parametrize("optimizer", ["KFAC", "Sophia"])
@pytest.mark.few(1)
def test_a_last_batch_of_another_size(optimizer):
    model = made(getattr(hvp.keras.optimizers, optimizer)(0.02))
    losses = fit(model, 30, batch_size=16)  # 16, 16 and 8
    assert losses[-1] < losses[0]


def test_a_class_of_ones_own():
    @keras.saving.register_keras_serializable(package="tests")
    class Own(hvp.keras.Trainer, keras.Model):
        pass

    inputs = keras.Input((5,))
    model = Own(inputs, keras.layers.Dense(3)(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(KFAC(0.1), loss)
    losses = fit(model, 10)
    assert losses[-1] < losses[0]


def test_what_is_refused():
    inputs = keras.Input((5,))
    plain = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    plain.compile(KFAC(), "mse")
    for _ in range(2):  # the second call, too, which finds what the first has left
        with pytest.raises(hvp.HvpError, match=r"hvp\.keras\.Model"):
            plain.fit(X, np.ones((40, 3)), verbose=0)
    with pytest.raises(hvp.HvpError, match="likelihood"):
        made(KFAC(), loss="mae").fit(X, np.ones((40, 3)), verbose=0)
    devices = [device.name for device in tf.config.list_logical_devices("CPU")[:2]]
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope(), pytest.raises(hvp.HvpError, match="has 2"):
        made(KFAC())
    for options in (
        {"momentum": 1.0},
        {"damping": 0.0},
        {"interval": 0},
        {"statistics_interval": 1.5},
        {"norm_constraint": -1},
        {"sharing": "both"},
    ):
        with pytest.raises(hvp.HvpError, match=next(iter(options))):
            KFAC(**options)
