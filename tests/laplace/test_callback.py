"""Tuning of weight decay during training."""

import keras
import numpy as np
import pytest

import hvp
import hvp.keras


def trained(callbacks, regularizer=None, epochs=40, weight=None):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    output = layers.Dense(3, "softmax", kernel_regularizer=regularizer, use_bias=False)
    model = keras.Sequential([keras.Input((6,)), output])
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.SGD(1.0), loss, loss_weights=weight)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 6)).astype("float32")
    y = np.argmax(x[:, :3] + rng.gumbel(size=(60, 3)), axis=1)
    history = model.fit(x, y, 60, epochs, verbose=0, callbacks=callbacks(x, y)).history
    return model, x, y, history


@pytest.mark.long
def test_the_prior_comes_to_rest_where_the_evidence_is_largest():
    made = []

    def callbacks(x, y):
        made.append(hvp.keras.LaplaceCallback((x, y), every=5, curvature="full"))
        return made

    model, _, _, history = trained(callbacks)
    (callback,) = made
    la = callback.laplace
    # Trained with the decay that it says, the same weights come out: they are at the maximum.
    (decay,) = la.weight_decay().values()
    assert la.prior_precision == pytest.approx(2 * 60 * decay)
    again, *_ = trained(lambda x, y: [], keras.regularizers.L2(decay), epochs=200)
    np.testing.assert_allclose(again.layers[0].kernel, model.layers[0].kernel, atol=0.02)
    before = la.prior_precision
    best = la.tune_prior_precision()  # which would refuse weights that are no maximum
    assert la.prior_precision == pytest.approx(before, rel=0.02)
    assert history["log_marginal_likelihood"][-1] == pytest.approx(best, rel=1e-3)
    assert np.isnan(history["log_marginal_likelihood"][3])
    assert history["log_marginal_likelihood"][-1] > history["log_marginal_likelihood"][4]
    assert model.losses == []


def test_a_weight_of_the_loss_multiplies_the_penalties():
    made, losses = [], []

    class Losses(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            losses.append(float(self.model.losses[0]))

    for weight in (None, [4.0]):

        def callbacks(x, y):
            made.append(hvp.keras.LaplaceCallback((x, y), curvature="full"))
            return [made[-1], Losses()]

        try:
            trained(callbacks, epochs=1, weight=weight)
        except ValueError as error:
            if "loss_weights" not in str(error):
                raise
            pytest.skip(f"Keras {keras.__version__} takes no weight of a single loss: {error}")
    assert losses[1] == pytest.approx(4 * losses[0], rel=1e-5)


def test_what_is_refused():
    with pytest.raises(hvp.HvpError, match="every is 0"):
        hvp.keras.LaplaceCallback((), every=0)
    with pytest.raises(hvp.HvpError, match="'block'"):
        hvp.keras.LaplaceCallback((), by="weight")
    with pytest.raises(hvp.HvpError, match="regularizer"):
        trained(lambda x, y: [hvp.keras.LaplaceCallback((x, y))], keras.regularizers.L2(0.1))


@pytest.mark.long
def test_a_regression_tunes_its_noise():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.SGD(0.2), "mse")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True) + 0.1 * rng.standard_normal((200, 1)).astype("float32")
    tuning = hvp.keras.LaplaceCallback((x, y), subset="out", curvature="full", every=5)
    model.fit(x, y, 200, 60, verbose=0, callbacks=[tuning])
    assert tuning.laplace.noise == pytest.approx(0.1, rel=0.15)
    assert [name.rpartition("/")[2] for name in tuning.laplace.weight_decay()] == ["kernel", "bias"]


def test_a_training_that_was_interrupted():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    model, x, y, _ = trained(lambda x, y: [], epochs=1)
    options = {"curvature": "diagonal"}
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, verbose=0, callbacks=[hvp.keras.LaplaceCallback((x, y), **options), Stop()])
    assert len(model.losses) == 1
    model.fit(x, y, verbose=0, callbacks=[hvp.keras.LaplaceCallback((x, y), **options)])
    assert model.losses == []
