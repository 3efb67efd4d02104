"""Sophia in model.fit, beside its steps in NumPy and expectations of its estimates."""

import keras
import numpy as np
import pytest

import hvp

rng = np.random.default_rng(0)
X = rng.standard_normal((200, 5)).astype("float32")
Y = rng.integers(0, 3, 200)
Sophia = hvp.keras.optimizers.Sophia


def made(optimizer):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, "tanh")(inputs)
    model = hvp.keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def fit(model, epochs=1):
    options = {"batch_size": 200, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, epochs=epochs, **options).history["loss"]


def state(optimizer, name):
    return [v.numpy() for v in optimizer.variables if v.path.endswith(name)]


@pytest.mark.parametrize("estimator", ["hutchinson", "gauss-newton-bartlett"])
@pytest.mark.few(1)
@pytest.mark.long
def test_estimates_come_near_the_diagonal(estimator):
    """The mean over six hundred steps that move nothing, each with other random numbers."""
    optimizer = Sophia(1e-9, beta_2=0.995, estimator=estimator, interval=1)
    model = made(optimizer)
    # In one epoch, because Keras takes longer between epochs than for a step.
    model.fit(np.tile(X, (600, 1)), np.tile(Y, 600), 200, shuffle=False, verbose=0)
    curvature = np.concatenate([part.ravel() for part in state(optimizer, "curvature")])
    curvature /= 1 - 0.995**600
    kind = hvp.HessianOperator if estimator == "hutchinson" else hvp.FisherOperator
    exact = kind.from_keras(model, (X, Y)).diagonal()
    assert np.corrcoef(curvature, exact)[0, 1] > 0.95
    assert curvature.sum() == pytest.approx(exact.sum(), rel=0.15)


@pytest.mark.parametrize("estimator", ["hutchinson", "gauss-newton-bartlett"])
@pytest.mark.few(1)
def test_steps(estimator):
    rate, beta, gamma = 0.01, 0.9, 0.5
    optimizer = Sophia(rate, beta, gamma=gamma, estimator=estimator, interval=2)
    model, clipped = made(optimizer), []
    for _ in range(4):
        old = [v.numpy() for v in model.trainable_variables]
        means = state(optimizer, "mean") or [np.zeros(v.shape) for v in old]
        H = hvp.HessianOperator.from_keras(model, (X, Y))
        slopes = [g.numpy() for g in H.gradient_tensors()]
        fit(model)
        means = [beta * m + (1 - beta) * g for m, g in zip(means, slopes)]
        for variable, w, m, h in zip(
            model.trainable_variables, old, means, state(optimizer, "curvature")
        ):
            step = np.clip(m / np.maximum(gamma * h, 1e-12), -1, 1)
            clipped += [np.abs(step) == 1]
            np.testing.assert_allclose(variable.numpy(), w - rate * step, rtol=1e-4, atol=1e-6)
    share = np.mean(np.concatenate([c.ravel() for c in clipped]))
    assert 0 < share < 1


@pytest.mark.long
def test_it_trains_and_resumes_to_the_bit(tmp_path):
    whole, first = (made(Sophia(0.02, interval=3)) for _ in range(2))
    losses = fit(whole, 60)
    assert losses[-1] < 0.9 * losses[0]
    fit(first, 30)
    first.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.get_config() == first.optimizer.get_config()
    fit(again, 30)
    for one, other in zip(again.variables, whole.variables):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_arguments():
    for options in (
        {"beta_1": 1.0},
        {"gamma": 0.0},
        {"epsilon": 0.0},
        {"interval": 0},
        {"estimator": "exact"},
    ):
        with pytest.raises(hvp.HvpError, match=next(iter(options))):
            Sophia(**options)
    inputs = keras.Input((5,))
    plain = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    plain.compile(Sophia(), "mse")
    with pytest.raises(hvp.HvpError, match="sophia"):
        plain.fit(X, np.ones((200, 3)), verbose=0)


@pytest.mark.parametrize("estimator", ["hutchinson", "gauss-newton-bartlett"])
def test_weights_of_examples(estimator):
    """They are part of the loss whose Hessian is multiplied; targets are drawn without them."""
    curvatures = []
    for weight in (None, np.full(200, 3.0)):
        optimizer = Sophia(1e-9, estimator=estimator, interval=1)
        options = {"batch_size": 200, "shuffle": False, "verbose": 0, "sample_weight": weight}
        made(optimizer).fit(X, Y, **options)
        curvatures.append(state(optimizer, "curvature"))
    factor = 3 if estimator == "hutchinson" else 1
    for one, other in zip(*curvatures):
        np.testing.assert_allclose(other, factor * one, rtol=1e-4, atol=1e-8)


def test_weights_without_gradient_in_half_precision():
    """Neither a mean nor a curvature, and an `epsilon` that half precision does not have."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), dtype="float16")
    hidden = keras.layers.Dense(4, "relu", dtype="float16", bias_initializer="ones")
    outputs = keras.layers.Dense(1, dtype="float16")(hidden(inputs))
    model = hvp.keras.Model(inputs, outputs)
    model.compile(Sophia(0.01), "mse")
    model.fit(np.concatenate([X[:, :4], 0 * X[:, :1]], 1), X[:, :1], verbose=0)
    assert all(np.isfinite(v.numpy()).all() for v in model.trainable_variables)
