"""SOAP in model.fit, beside the same steps in NumPy."""

import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp

rng = np.random.default_rng(0)
X, Y = rng.standard_normal((32, 5)).astype("float32"), rng.standard_normal((32, 4))
OPTIONS = {"learning_rate": 0.02, "interval": 3}


def made(optimizer, dtype="float64", seed=0, **options):
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(4, "tanh", dtype=dtype, name="hidden")
    last = keras.layers.Dense(4, dtype=dtype, name="last")
    model = keras.Sequential([keras.Input((5,)), hidden, last])
    model.compile(optimizer, "mse", **options)
    return model


def fit(model, epochs=1, **options):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


class Reference:
    """The algorithm of Vyas et al. for one variable, step by step."""

    def __init__(self, w, rate=0.02, beta=0.95, eps=1e-8, interval=3):
        self.w, self.rate, self.beta, self.eps, self.interval = w, rate, beta, eps, interval
        self.mean, self.square, self.t = np.zeros_like(w), np.zeros_like(w), 0

    def moments(self, g):
        return [g @ g.T, g.T @ g]

    def step(self, g):
        if self.t == 0 and g.ndim == 2:
            self.factors = [m * (1 - self.beta) for m in self.moments(g)]
            self.bases = [np.linalg.eigh(f)[1][:, ::-1] for f in self.factors]
            self.t = 1
            return
        count = self.t if g.ndim == 2 else self.t + 1
        bases = self.bases if g.ndim == 2 else [np.eye(len(g)), np.eye(1)]
        turned = (bases[0].T @ g.reshape(len(g), -1) @ bases[1]).reshape(g.shape)
        self.mean = self.beta * self.mean + (1 - self.beta) * g
        self.square = self.beta * self.square + (1 - self.beta) * turned**2
        mean = (bases[0].T @ self.mean.reshape(len(g), -1) @ bases[1]).reshape(g.shape)
        power = 1 - self.beta**count
        direction = mean / power / (np.sqrt(self.square / power) + self.eps)
        back = (bases[0] @ direction.reshape(len(g), -1) @ bases[1].T).reshape(g.shape)
        self.w = self.w - self.rate * back
        if g.ndim == 2:
            pairs = zip(self.factors, self.moments(g))
            self.factors = [self.beta * f + (1 - self.beta) * m for f, m in pairs]
            if self.t % self.interval == 0:
                for axis, factor in enumerate(self.factors):
                    estimates = np.diag(self.bases[axis].T @ factor @ self.bases[axis])
                    order = np.argsort(-estimates)
                    self.square = np.take(self.square, order, axis)
                    self.bases[axis] = np.linalg.qr(factor @ self.bases[axis][:, order])[0]
        self.t += 1


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.few(1)
def test_the_steps_are_those_of_the_paper(jit_compile):
    model = made(hvp.keras.optimizers.SOAP(**OPTIONS), jit_compile=jit_compile)
    references = [Reference(w.numpy()) for w in model.trainable_variables]
    weights = [tf.Variable(w.numpy()) for w in model.trainable_variables]
    for epoch in range(3):
        for start in range(0, 32, 8):
            x, y = X[start : start + 8].astype("float64"), Y[start : start + 8]
            with tf.GradientTape() as tape:
                a, b, c, d = weights
                outputs = tf.tanh(x @ a + b) @ c + d
                loss = tf.reduce_mean((outputs - y) ** 2)
            for reference, variable, slope in zip(
                references, weights, tape.gradient(loss, weights)
            ):
                reference.step(slope.numpy())
                variable.assign(reference.w)
        fit(model)
        for variable, other in zip(model.trainable_variables, weights):
            np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-6, atol=1e-8)
        assert epoch < 3


@pytest.mark.long
def test_it_resumes_to_the_bit(tmp_path):
    keras.utils.set_random_seed(0)
    whole = made(hvp.keras.optimizers.SOAP(**OPTIONS, weight_decay=0.01), "float32")
    first = made(hvp.keras.optimizers.SOAP(**OPTIONS, weight_decay=0.01), "float32")
    fit(whole, 4)
    fit(first, 2)
    first.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == first.optimizer.get_config()
    fit(again, 2)
    for one, other in zip(again.variables, whole.variables):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    for one, other in zip(again.optimizer.variables, whole.optimizer.variables):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.long
def test_what_keras_does_for_every_optimizer():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.5)
    for options in (
        {"learning_rate": schedule},
        {"clipnorm": 0.1},
        {"global_clipnorm": 0.1, "use_ema": True},
        {"gradient_accumulation_steps": 2},
    ):
        model = made(hvp.keras.optimizers.SOAP(**options), "float32")
        losses = fit(model, 10).history["loss"]
        assert losses[-1] < losses[0]
    model = made(hvp.keras.optimizers.SOAP(), keras.DTypePolicy("mixed_float16"))
    model.compile(
        keras.optimizers.LossScaleOptimizer(hvp.keras.optimizers.SOAP(), initial_scale=128.0), "mse"
    )
    losses = fit(model, 10).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_another_process_loads_a_model_after_import_hvp(tmp_path):
    inputs = keras.Input((3,))
    model = hvp.keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.compile(hvp.keras.optimizers.SOAP(1e-3), "mse")
    model.save(tmp_path / "model.keras")
    script = "import hvp, keras; print(keras.models.load_model('model.keras').optimizer.name)"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert ended.stdout.strip() == "soap", ended.stderr[-2000:]


@pytest.mark.long
def test_kernels_of_convolutions_and_long_sides():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(3, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6, 6, 2)), *layers])
    optimizer = hvp.keras.optimizers.SOAP(0.01, largest=20)
    model.compile(optimizer, "mse")
    x, y = rng.standard_normal((16, 6, 6, 2)), rng.standard_normal(16)
    losses = model.fit(x, y, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    shapes = sorted(tuple(v.shape) for v in optimizer.variables if "moment" in v.path)
    assert shapes == [(1, 1), (3, 3), (18, 18)]  # not 48, the inputs of the last layer


def test_nothing_is_traced_again():
    count = []

    class Counting(hvp.keras.optimizers.SOAP):
        def update_step(self, *arguments):
            count.append(1)
            super().update_step(*arguments)

    model = made(Counting(), "float32")
    fit(model)
    after_first = len(count)
    fit(model, 5)
    assert len(count) == after_first


@pytest.mark.long
def test_under_a_strategy():
    devices = [device.name for device in tf.config.list_logical_devices("CPU")[:2]]

    def difference(make):
        with tf.distribute.MirroredStrategy(devices).scope():
            model = made(make())
        alone = made(make())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TensorFlow, about sharding
            fit(model, 3)
        fit(alone, 3)
        pairs = zip(model.trainable_variables, alone.trainable_variables)
        return max(np.abs(one.numpy() - other.numpy()).max() for one, other in pairs)

    if difference(lambda: keras.optimizers.SGD(0.1)) > 1e-6:
        pytest.skip("this version of Keras adds gradients of replicas differently")
    assert difference(lambda: hvp.keras.optimizers.SOAP(**OPTIONS)) < 1e-6


def test_arguments():
    for options in ({"beta_1": 1.0}, {"epsilon": 0.0}, {"interval": 0}, {"largest": 0.5}):
        with pytest.raises(hvp.HvpError, match=next(iter(options))):
            hvp.keras.optimizers.SOAP(**options)
