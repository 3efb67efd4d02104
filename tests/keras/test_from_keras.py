"""Every call that takes a compiled model refuses one without a loss, and takes all its outputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import random, relative_error

X, Y = random(0, 6, 3), random(1, 6, 1)
MATRICES = [hvp.HessianOperator, hvp.GaussNewtonOperator, hvp.FisherOperator]
OTHERS = [hvp.KFAC, hvp.EKFAC, hvp.InfluenceFunctions, hvp.NewtonCG, hvp.minimize]


@pytest.mark.parametrize("call", MATRICES + OTHERS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_without_a_loss(call, compiled):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    if compiled:
        model.compile("sgd")
    with pytest.raises(hvp.InvalidLossError) as caught:
        call.from_keras(model, (X, Y))
    assert "model.compile(loss=" in caught.value.remedy


@pytest.mark.parametrize("call", MATRICES, ids=lambda call: call.__name__)
@pytest.mark.parametrize("loss", ["mse", ["mse", "mse"]])
@pytest.mark.few(1)
def test_all_outputs_count(call, loss):
    """The mean square error of two linear models has the Hessian 2 X^T X / n for each."""
    x = keras.Input((3,))
    outputs = [keras.layers.Dense(1, use_bias=False)(x) for _ in range(2)]
    model = keras.Model(x, outputs)
    model.compile(loss=loss)
    want = np.kron(np.eye(2), 2 * X.T @ X / 6)
    with call.from_keras(model, (X, [Y, -Y]), batch_size=4) as matrix:
        assert relative_error(matrix.to_dense(), want) < 1e-5


@pytest.mark.parametrize("loss", ["categorical_crossentropy", "sparse_categorical_crossentropy"])
@pytest.mark.parametrize("kind", [hvp.HessianOperator, hvp.GaussNewtonOperator, hvp.KFAC])
def test_labels_of_the_other_kind_are_refused_by_name(loss, kind):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    model.compile(loss=loss)
    x, y = np.random.default_rng(0).random((6, 4)), np.arange(6) % 3
    one_hot = keras.utils.to_categorical(y)
    right, wrong = (y, one_hot) if loss.startswith("sparse") else (one_hot, y)
    remedy = "np.argmax" if loss.startswith("sparse") else "to_categorical"
    with pytest.raises(hvp.InvalidDataError, match=f"one-hot.*{remedy}"):
        kind.from_keras(model, (x, wrong))
    assert kind.from_keras(model, (x, right)).shape == (15, 15)


def test_a_mean_over_weights_asks_for_the_weight_of_a_batch():
    x, y, weights = random(0, 12, 3), random(1, 12, 1), np.random.default_rng(2).random(12)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    try:
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    except ValueError:
        pytest.skip("this version of Keras has no such reduction")
    model.compile(loss=loss)
    whole = hvp.HessianOperator.from_keras(model, (x, y, weights)).to_dense()
    batches = tf.data.Dataset.from_tensor_slices((x, y, weights.astype("f"))).batch(5)
    for data, options in ((batches, {}), ((x, y, weights), {"batch_size": 5})):
        with pytest.raises(hvp.InvalidLossError, match="weight=lambda"):
            hvp.HessianOperator.from_keras(model, data, **options)
        options["weight"] = lambda x, y, sample_weight: tf.reduce_sum(sample_weight)
        H = hvp.HessianOperator.from_keras(model, data, **options)
        np.testing.assert_allclose(H.to_dense(), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batched", [False, True])
def test_a_tuple_of_inputs_is_an_input_as_for_evaluate(batched):
    a, b = keras.Input((3,)), keras.Input((2,))
    model = keras.Model([a, b], keras.layers.Dense(1)(keras.layers.Concatenate()([a, b])))
    model.compile(loss="mse")
    x, z, y = random(0, 6, 3), random(1, 6, 2), random(2, 6, 1)
    data = ((x, z), y)
    if batched:
        data = tf.data.Dataset.from_tensor_slices(data).batch(3)
    # The gradient of an output by the weights is the input, and by the bias one.
    rows = np.concatenate([x, z, np.ones((6, 1))], axis=1)
    expected = 2 * rows.T @ rows / 6
    for kind in (hvp.HessianOperator, hvp.GaussNewtonOperator, hvp.FisherOperator, hvp.KFAC):
        found = kind.from_keras(model, data).to_dense()
        assert relative_error(found, expected) < 1e-5, kind
    if batched:
        return
    # The same model as a function of its inputs, which are several arguments for other functions.
    pair = model, lambda p, y: tf.reduce_mean((p - y) ** 2)
    made = (
        hvp.GaussNewtonOperator(*pair, model, data),
        hvp.FisherOperator(*pair, model, data, likelihood="gaussian"),
        hvp.KFAC(*pair, model, data, likelihood="gaussian"),
    )
    for found in made:
        matrix = found.to_dense()
        assert relative_error(matrix / matrix[-1, -1], expected / 2) < 1e-5, found
    posterior = hvp.Laplace(model, "gaussian", data, curvature="full", noise=1.0)
    assert (
        relative_error(posterior.covariance().to_dense(), np.linalg.inv(rows.T @ rows + np.eye(6)))
        < 1e-4
    )


def test_functions_of_several_inputs_are_no_models():
    """Functions with graphs have a list of inputs as well."""
    x, z, y = random(0, 6, 3), random(1, 6, 2), random(2, 6, 1)
    w = tf.Variable(tf.ones((5, 1)))
    specs = [tf.TensorSpec([None, n]) for n in (3, 2)]
    function = tf.function(lambda x, z: tf.concat([x, z], 1) @ w).get_concrete_function(*specs)
    options = {"curvature": "full", "noise": 1.0, "subset": [w]}
    posterior = hvp.Laplace(function, "gaussian", ((x, z), y), **options)
    rows = np.concatenate([x, z], axis=1)
    expected = np.linalg.inv(rows.T @ rows + np.eye(5))
    assert relative_error(posterior.covariance().to_dense(), expected) < 1e-4


@pytest.mark.parametrize("kind", [hvp.HessianOperator, hvp.GaussNewtonOperator, hvp.Laplace])
def test_missing_data_are_refused(kind):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    with pytest.raises(hvp.InvalidDataError, match="None"):
        kind.from_keras(model, None)


def test_a_weight_that_does_not_fit_all_outputs_is_refused():
    """One output is averaged over tokens, and the other over examples."""
    tokens = np.array([[1, 0, 0], [2, 3, 4], [1, 2, 0], [4, 4, 4], [3, 0, 0], [2, 1, 3]])
    t, b = keras.Input((3,), dtype="int32", name="t"), keras.Input((2,), name="b")
    embedded = keras.layers.Embedding(5, 2, mask_zero=True)(t)
    outputs = {
        name: keras.layers.Dense(1, name=name)(x)
        for name, x in (("of_tokens", embedded), ("of_b", b))
    }
    model = keras.Model({"t": t, "b": b}, outputs)
    x = {"t": tokens, "b": random(0, 6, 2)}
    y = {"of_tokens": random(1, 6, 3, 1), "of_b": random(2, 6, 1)}

    def weight(x, y):
        return tf.math.count_nonzero(x["t"])

    model.compile(loss={"of_tokens": "mse", "of_b": "mse"})
    with pytest.raises(hvp.InvalidLossError, match="mask"):
        hvp.HessianOperator.from_keras(model, (x, y), batch_size=3, weight=weight)
    # One output has no loss, in the dict of the model or in the order of a list.
    in_order = keras.Model(model.inputs, [outputs["of_tokens"], outputs["of_b"]])
    names = in_order.output_names
    for made, losses, labels in (
        (model, {"of_tokens": "mse", "of_b": None}, y),
        (in_order, ["mse", None], tuple(y.values())),
        (in_order, {names[0]: "mse", names[1]: None}, tuple(y.values())),
    ):
        made.compile(loss=losses)
        whole = hvp.HessianOperator.from_keras(made, (x, labels))
        divided = hvp.HessianOperator.from_keras(made, (x, labels), batch_size=3, weight=weight)
        assert divided.value == pytest.approx(whole.value, rel=1e-5)
