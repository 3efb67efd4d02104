"""What is said when something is wrong: the cause first, a guess second, a remedy that works."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import random

X, Y = random(0, 12, 3), random(1, 12, 1)


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    return model


def test_the_loss_own_error_comes_before_the_guess(model):
    def loss(x, y=None):
        return tf.reduce_mean(keras.losses.mean_squared_error(y, model(x)))

    with pytest.raises(hvp.InvalidDataError) as caught:
        hvp.HessianOperator(loss, model, (X.astype("float64"),))
    assert "raised ValueError: " in caught.value.problem
    assert "None" in caught.value.problem
    assert "float64" not in caught.value.problem
    assert "the cause may be that data[0] is float64" in caught.value.remedy
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("call", [hvp.HessianOperator, hvp.minimize, hvp.NewtonCG])
def test_the_name_of_a_loss(call, model):
    with pytest.raises(hvp.InvalidLossError, match="name 'mse'") as caught:
        call("mse", model, (X, Y))
    assert "from_keras(model, (x, y))" in caught.value.remedy


@pytest.mark.parametrize("name", ["class_weight", "sample_weight"])
def test_arguments_of_fit(name, model):
    calls = [
        lambda **given: hvp.HessianOperator.from_keras(model, (X, Y), **given),
        lambda **given: hvp.minimize.from_keras(model, (X, Y), **given),
        lambda **given: hvp.NewtonCG.from_keras(model, (X, Y), **given),
        lambda **given: hvp.minimize(lambda x: tf.reduce_sum(model(x)), model, (X,), **given),
    ]
    for call in calls:
        with pytest.raises(hvp.HvpError, match=r"one of model\.fit") as caught:
            call(**{name: {0: 1.0, 1: 3.0}})
        assert "(x, y, sample_weight)" in caught.value.remedy


def test_the_remedy_for_class_weights():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels, class_weight = np.arange(12) % 2, {0: 1.0, 1: 3.0}
    sample_weight = np.array([class_weight[label] for label in labels])
    with hvp.HessianOperator.from_keras(model, (X, labels, sample_weight)) as H:
        want = model.evaluate(X, labels, sample_weight=sample_weight, verbose=0, batch_size=12)
        assert H.value == pytest.approx(want, rel=1e-5)


def test_labels_of_outputs_that_are_none():
    x = keras.Input((3,))
    outputs = {name: keras.layers.Dense(1, name=name)(x) for name in ("a", "b")}
    model = keras.Model(x, outputs)
    model.compile(loss={"a": "mse", "b": "mse"})
    with pytest.raises(hvp.InvalidDataError, match=r"keys \['a', 'c'\]") as caught:
        hvp.HessianOperator.from_keras(model, (X, {"a": Y, "c": Y}))
    assert caught.value.remedy == "rename ['c'] to ['b']"
    with pytest.raises(hvp.InvalidDataError, match=r"Expected labels for \['a', 'b'\]"):
        hvp.HessianOperator.from_keras(model, (X, {"a": Y}))
    model.compile(loss={"a": "mse"})
    with hvp.HessianOperator.from_keras(model, (X, {"a": Y})) as H:
        assert H.value == pytest.approx(model.evaluate(X, {"a": Y}, verbose=0), rel=1e-5)


def test_a_generator_function(model):
    def batches():
        yield X[:6], Y[:6]
        yield X[6:], Y[6:]

    with pytest.raises(hvp.InvalidDataError, match="Data is a function") as caught:
        hvp.HessianOperator.from_keras(model, batches)
    assert "list(data())" in caught.value.remedy
    with hvp.HessianOperator.from_keras(model, list(batches())) as H:
        assert H.stats.batches == 2


def test_missing_labels_in_a_batch(model):
    with pytest.raises(hvp.InvalidDataError) as caught:
        hvp.HessianOperator.from_keras(model, [(X[:6], Y[:6]), (X[6:],)])
    said = "it has 1 element instead of 2 elements; labels may be missing"
    assert said in caught.value.problem
    with pytest.raises(hvp.InvalidDataError, match="the entries 'a' instead of the entries"):
        hvp.HessianOperator(
            lambda a, b=0.0: tf.reduce_sum(model(a)) ** 2, model, [{"a": X, "b": X}, {"a": X}]
        )


class Foreign:
    """An array of another library: of its own class and dtype."""

    dtype = "foreign.float32"

    def __init__(self, array):
        self.array = np.asarray(array, "float32")
        self.shape = self.array.shape

    def __array__(self, dtype=None, copy=None):
        return self.array.astype(dtype or self.array.dtype)


def test_vectors_of_other_libraries_and_flat_ones():
    w, u = tf.Variable([1.0, 2.0, 3.0]), keras.Variable([[1.0], [2.0]])

    def loss():
        return tf.reduce_sum(w**4) / 12 + tf.reduce_sum(u.value**2)

    with hvp.HessianOperator(loss, [w, u]) as H:
        flat = np.arange(5.0)
        want = [0, 4, 18, 6, 8]
        np.testing.assert_allclose(H.product(Foreign(flat)), want, rtol=1e-6)
        np.testing.assert_allclose(H @ Foreign(flat).array, want, rtol=1e-6)
        first, second = H.product([Foreign(flat[:3]), u])
        np.testing.assert_allclose(first, want[:3], rtol=1e-6)
        np.testing.assert_allclose(second, [[2], [4]], rtol=1e-6)
    with hvp.linearize(lambda: w**2, w) as linear:
        for v in (np.ones(3), Foreign(np.ones(3)), tf.ones(3), tf.Variable(tf.ones(3))):
            np.testing.assert_allclose(linear.jvp(v), [2, 4, 6])
        with pytest.raises(hvp.InvalidVectorError, match=r"shape \(4,\) was given"):
            linear.jvp(np.ones(4))


def test_numbers_that_meet_other_types(model):
    def squares(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    whole = np.ones((12, 1), "int64")
    for engine in ("graph", "tape"):
        with pytest.raises(hvp.InvalidDataError, match="data\\[1\\] is int64") as caught:
            hvp.HessianOperator(squares, model, (X, whole), engine=engine)
        assert "pass it as .astype('float32')" in caught.value.remedy
    hvp.HessianOperator(squares, model, (X, whole.astype("float32")))
    w, single = tf.Variable(np.ones(3)), tf.constant(X)
    with pytest.raises(hvp.InvalidDataError, match=r"double tensor\. Expected") as caught:
        hvp.HessianOperator(lambda: tf.reduce_sum(tf.linalg.matvec(single, w) ** 2), w)
    assert "tf.cast(tensor, 'float64')" in caught.value.remedy
    double = tf.cast(single, "float64")
    hvp.HessianOperator(lambda: tf.reduce_sum(tf.linalg.matvec(double, w) ** 2), w)


def test_an_error_about_shapes_is_not_explained_by_types(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    one_hot = np.eye(2)[np.arange(12) % 2]  # in float64
    with pytest.raises(ValueError, match=r"rank|shape") as caught:
        hvp.HessianOperator(lambda x, y: loss(y, model(x)), model, (X, one_hot))
    assert "float64" not in str(caught.value)


def test_lists_of_numbers(model):
    def squares(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    for options in ({}, {"batch_size": 4}):
        with pytest.raises(hvp.InvalidDataError, match=r"data\[1\] is a list of int"):
            hvp.HessianOperator(squares, model, (X, [1] * 12), **options)


def test_numbers_of_the_data_that_are_not_finite(model):
    def squares(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    broken = X.copy()
    broken[2, 1] = np.nan
    with pytest.raises(hvp.NonFiniteError, match=r"is nan, and data\[0\] contains NaN"):
        hvp.HessianOperator(squares, model, (broken, Y))
    with pytest.raises(hvp.NonFiniteError, match=r"is nan\. Expected a finite loss"):
        hvp.HessianOperator(lambda x, y: tf.math.log(-squares(x, y)), model, (X, Y))


def test_a_model_compiled_without_a_loss():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd")
    with pytest.raises(hvp.InvalidLossError, match="compiled without a loss"):
        hvp.HessianOperator.from_keras(model, (X, Y))


def test_single_examples_in_the_place_of_batches(model):
    single = tf.data.Dataset.from_tensor_slices((X, Y))

    def squares(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    with pytest.raises(hvp.InvalidDataError, match="The first axes differ") as caught:
        hvp.HessianOperator(squares, model, single)
    assert "dataset.batch(n)" in caught.value.remedy
    hvp.HessianOperator(squares, model, single.batch(4))


def test_a_part_of_a_gibibyte(model):
    with pytest.raises(hvp.HvpError, match=r"memory_limit is 0\.5") as caught:
        hvp.HessianOperator.from_keras(model, (X, Y), memory_limit=0.5)
    assert "pass '0.5GiB'" in caught.value.remedy
    hvp.HessianOperator.from_keras(model, (X, Y), memory_limit="0.5GiB")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("localhost:2222", "experimental_connect_to_cluster"),
        ("GPU:7", "no such GPU"),
        ("CPU:99", "before TensorFlow is used"),
    ],
)
def test_devices_that_are_not_there(name, remedy, model):
    with pytest.raises(hvp.HvpError, match="no device") as caught:
        hvp.HessianOperator.from_keras(model, (X, Y), devices=[name])
    assert remedy in caught.value.remedy


def test_a_sum_without_examples():
    w = tf.Variable([1.0, 2.0])
    with pytest.raises(hvp.InvalidDataError, match="reduction='sum' is passed without data"):
        hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w, reduction="sum")
