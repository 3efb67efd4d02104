"""Private names of Keras: when one moves, this fails first."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state

import hvp
from hvp._keras import private


def test_what_keras_layers_are_told():
    seen = []

    class Look(keras.layers.Layer):
        def call(self, x, training=None):
            for name in ("current_call_ctx", "autocast_scope", "stateless_scope"):
                seen.append(global_state.get_global_attribute(name))
            assert vars(global_state.GLOBAL_STATE_TRACKER)["current_call_ctx"] is seen[-3]
            return x

    layer = Look(dtype="mixed_float16")
    layer(tf.ones(2), training=True)
    call = seen[-3]
    training = call.get_value("training") if hasattr(call, "get_value") else call.training
    assert training is True
    assert seen[-2].dtype == "float16"
    assert seen[-1] is None
    layer.stateless_call([], [], tf.ones(2))
    assert seen[-1] is not None


def test_the_graph_of_a_functional_model():
    x = keras.Input((3,))
    dense = keras.layers.Dense(2)
    y = dense(x)
    operation, index, _ = y._keras_history
    node = operation._inbound_nodes[index]
    assert operation is dense
    assert node.input_tensors[0] is x
    assert node.output_tensors[0] is y
    args, _ = node.arguments.fill_in({id(x): tf.ones((1, 3))})
    assert args[0].shape == (1, 3)


def test_the_layers_and_losses_of_a_model():
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="inside")])
    model = keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, name="outside")])
    names = {layer.name for layer in private.layers_of(model)}
    assert names >= {"inside", "outside", model.name}
    assert model.name not in {layer.name for layer in private.layers_of(model, include_self=False)}
    assert private.layers_of(3) == []
    regularized = keras.layers.Dense(1, activity_regularizer="l2")
    regularized(tf.ones((1, 2)))
    assert len(private.losses_of(regularized)) == 1
    assert any(
        private.losses_of(regularized) == held for held in private.lists_of_losses(regularized)
    )


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_logits(name):
    x = tf.constant([[1.0, 200.0]])
    layer = keras.layers.Dense(2, name)
    layer.build(x.shape)
    layer.kernel.assign(np.eye(2))
    y = layer(x)
    assert private.logits_of(x) is None
    np.testing.assert_array_equal(private.logits_of(y), x)
    # Keras computes with what is attached.
    private.set_logits(y, tf.constant([[3.0, 1.0]]))
    loss = {
        "softmax": keras.losses.categorical_crossentropy,
        "sigmoid": keras.losses.binary_crossentropy,
    }[name]
    t = tf.constant([[1.0, 0.0]])
    expected = loss(t, tf.constant([[3.0, 1.0]]), from_logits=True)
    np.testing.assert_allclose(loss(t, y), expected, rtol=1e-6)


def test_masks():
    embedding = keras.layers.Embedding(3, 2, mask_zero=True)
    x = embedding(tf.constant([[1, 0]]))
    assert private.mask_of(x).numpy().tolist() == [[True, False]]
    private.set_mask(x, None)
    assert private.mask_of(x) is None
    assert private.mask_of(tf.ones(2)) is None


@pytest.mark.parametrize("name", ["_MASK", "_LOGITS", "_LISTS_OF_LOSSES"])
def test_names_that_have_moved_are_refused(monkeypatch, name):
    """Instead of a loss without masks, logits or penalties."""
    moved = ("_elsewhere",) if name == "_LISTS_OF_LOSSES" else "_elsewhere"
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])
    model.compile(loss="sparse_categorical_crossentropy")
    data = np.ones((2, 3), "float32"), np.array([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(private, name, moved)
        private._missing_names.cache_clear()
        with pytest.raises(hvp.HvpError, match="_elsewhere"):
            hvp.GaussNewtonOperator.from_keras(model, data)
    private._missing_names.cache_clear()
    hvp.GaussNewtonOperator.from_keras(model, data).close()


def test_looking_for_names_changes_nothing():
    """Neither the names of layers nor random numbers."""
    keras.utils.set_random_seed(0)
    first = [keras.layers.Dense(2).name, keras.layers.Masking().name]
    numbers = keras.random.normal((3,)).numpy()
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()
    private._missing_names.cache_clear()
    private.refuse_other_names()
    second = [keras.layers.Dense(2).name, keras.layers.Masking().name]
    np.testing.assert_array_equal(keras.random.normal((3,)).numpy(), numbers)
    keras.backend.clear_session()
    assert second == [keras.layers.Dense(2).name, keras.layers.Masking().name]
    assert [name.rstrip("_0123456789") for name in first] == ["dense", "masking"]


def test_an_error_within_a_layer_keeps_its_sentences():
    class Layer(keras.layers.Layer):
        def call(self, x):
            raise hvp.HvpError("the problem", "the expected", "the remedy")

    with pytest.raises(hvp.HvpError) as caught:
        Layer()(np.ones((2, 3)))
    assert (caught.value.expected, caught.value.remedy) == ("the expected", "the remedy")
