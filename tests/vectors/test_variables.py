"""What may be given as variables, and what is said of the rest."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._vectors.variables import all_variables, collect_variables


def test_nests_are_flattened_in_tf_nest_order():
    a, b, c = (tf.Variable(float(i)) for i in range(3))
    nest = collect_variables({"z": [c], "a": (a, {"b": b})})
    assert all(x is y for x, y in zip(nest.variables, (a, b, c)))


def test_keras_variables_and_models():
    variable = keras.Variable(np.ones(2), name="mine")
    assert collect_variables([variable]).variables[0] is variable.value
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="head")])
    nest = collect_variables(model)
    assert len(nest.variables) == 2
    assert "head" in nest.names[0]
    model.layers[0].trainable = False
    with pytest.raises(hvp.InvalidVariablesError, match="trainable=True"):
        collect_variables(model)
    with pytest.raises(hvp.InvalidVariablesError, match="calling it on a batch"):
        collect_variables(keras.Sequential([keras.layers.Dense(1)]))


def test_all_variables_counts_frozen_ones():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.BatchNormalization()])
    assert len(all_variables(model)) == 4
    assert len(collect_variables(model).variables) == 2


shared = tf.Variable([1.0])


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([], "empty"),
        ({}, "empty"),
        ([tf.Variable([1])], "int32"),
        ([tf.Variable([1j])], "complex128"),
        ([tf.constant([1.0])], "not a variable"),
        ([np.ones(2)], "not a variable"),
        (None, "not a variable"),
        ("weights", "not a variable"),
        ([shared, shared], "twice"),
        ({"a": shared, "b": [shared]}, "twice"),
        ([tf.Variable(1.0, shape=tf.TensorShape(None))], "partly unknown shape"),
        ([tf.Variable(np.zeros((0, 3)))], "no entries"),
    ],
)
def test_what_is_refused(variables, message):
    with pytest.raises(hvp.InvalidVariablesError, match=message):
        hvp.HessianOperator(lambda: tf.constant(0.0), variables)


def test_one_keras_variable_under_two_names_is_refused():
    variable = keras.Variable(np.ones(2))
    with pytest.raises(hvp.InvalidVariablesError, match="twice"):
        collect_variables([variable, variable.value])


def test_keras_on_another_backend_is_refused(monkeypatch):
    """The other backends need packages of their own, so what such a variable holds is imitated."""

    class Foreign(keras.Variable):
        value = property(lambda self: np.ones(2))

    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(hvp.InvalidVariablesError, match=r"'jax' backend.*KERAS_BACKEND=tensorflow"):
        collect_variables([Foreign(np.ones(2), name="w")])


def test_variables_without_names_of_their_own_are_told_apart():
    taken = tf.Variable(np.ones(1), name="Variable_1")
    nest = collect_variables([tf.Variable(1.0), tf.Variable(2.0), taken, tf.Variable(3.0)])
    assert len(set(nest.names)) == 4
    assert nest.names[0] == "Variable:0"
    assert nest.names[2] == "Variable_1:0"
