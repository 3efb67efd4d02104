"""The Gauss-Newton matrix, against dense Jacobians and against outer products of gradients."""

import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import (
    CASES,
    Problem,
    crossed,
    dense_hessian,
    flat_gradient,
    long,
    random,
    relative_error,
)

layers = keras.layers


def dense_network(dtype):
    return keras.Sequential(
        [
            layers.Input((4,), dtype=dtype),
            layers.Dense(5, "tanh", dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )


def images(dtype):
    return keras.Sequential(
        [
            layers.Input((4, 4, 2), dtype=dtype),
            layers.Conv2D(3, 3, activation="gelu", dtype=dtype),
            layers.MaxPooling2D(2, dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )


def sequences(dtype):
    return keras.Sequential(
        [
            layers.Input((3, 2), dtype=dtype),
            layers.LSTM(3, dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )


MODELS = {
    "dense": (dense_network, (4,)),
    "images": (images, (4, 4, 2)),
    "lstm": (sequences, (3, 2)),
}


def softmax_loss(logits, labels):
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(each)


def softmax_curvature(logits):
    """The Hessian of the cross-entropy in the logits of one example."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return np.diag(p) - np.outer(p, p)


def squares(predictions, targets):
    return tf.reduce_mean(tf.reduce_sum((predictions - targets) ** 2, axis=-1)) / 2


def dense_gauss_newton(model, x, curvature):
    """The mean of `J^T B J` over examples, by TensorFlow's Jacobian and a closed form of `B`."""
    with tf.GradientTape(persistent=True) as tape:
        predictions = model(x)
    blocks = tape.jacobian(predictions, model.trainable_variables, experimental_use_pfor=False)
    rows, outputs = predictions.shape
    J = np.concatenate([b.numpy().reshape(rows, outputs, -1) for b in blocks], axis=-1)
    J, predictions = J.astype("float64"), predictions.numpy().astype("float64")
    return sum(j.T @ curvature(p) @ j for j, p in zip(J, predictions)) / rows


def make(name, dtype="float64", examples=7):
    build, shape = MODELS[name]
    model = build(dtype)
    for index, weight in enumerate(model.trainable_variables):
        weight.assign(random(index, *weight.shape, dtype=dtype, scale=0.6))
    x = random(50, examples, *shape, dtype=dtype)
    return model, x, np.arange(examples) % 3


WAYS = {
    "one batch": {},
    "tape": {"engine": "tape"},
    "batches": {"batch_size": 3},
    "batches on the tape": {"batch_size": 3, "engine": "tape"},
    "batches evaluated for each product": {"batch_size": 2, "memory_limit": "some"},
    "recomputed": {"recompute": 2},
    "recomputed in batches": {"recompute": 2, "batch_size": 4},
    "recomputed on the tape": {"recompute": 2, "engine": "tape"},
}


ALWAYS = {
    ("images", "batches"),
    ("images", "recomputed on the tape"),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pair if pair[0] == "dense" or pair in ALWAYS else long(*pair)
        for pair in itertools.product(MODELS, WAYS)
    ],
)
@pytest.mark.few(1)
def test_it_is_the_dense_matrix(name, way):
    model, x, y = make(name)
    want = dense_gauss_newton(model, x, softmax_curvature)
    options = dict(WAYS[way])
    if "memory_limit" in options:  # one of four batches is kept, and three times one is for work
        with hvp.GaussNewtonOperator(model, softmax_loss, model, (x, y), batch_size=2) as G:
            options["memory_limit"] = int(4.6 * G.stats.residual_bytes / 4)
    with hvp.GaussNewtonOperator(model, softmax_loss, model, (x, y), **options) as G:
        n = G.shape[0]
        single = np.stack([G @ e for e in np.eye(n)[:, :4].T], axis=1)
        assert relative_error(single, want[:, :4]) < 1e-12
        assert relative_error(G.to_dense(), want) < 1e-12
        v = random(1, n, dtype="float64")
        damped, in_graph = G.damped(0.5), tf.function(lambda v: G.product(v))
        assert relative_error(damped @ v, want @ v + 0.5 * v) < 1e-12
        assert relative_error(in_graph(tf.constant(v)), want @ v) < 1e-12
        assert relative_error(G.value, softmax_loss(model(x), y)) < 1e-12
        assert G.stats.engine == options.get("engine", "graph")
        if "memory_limit" in options:
            assert G.stats.batches_kept < G.stats.batches


@pytest.mark.parametrize(
    ("name", "engine", "dtype"),
    crossed(CASES, ["graph", "tape", "graph"], ["float64", "float64", "float32"]),
)
@pytest.mark.few(1)
def test_of_a_single_prediction_it_is_an_outer_product(name, engine, dtype):
    """A loss as a model, its square as the loss: the matrix is `g g^T`, for every case."""
    problem, truth = CASES[name](dtype), CASES[name]("float64")
    g = flat_gradient(truth, truth.tensorflow_variables()).numpy()
    data = () if problem.data is None else problem.data

    def predict(*inputs):
        return problem.loss(*inputs)[tf.newaxis]

    def half_square(prediction, *_):
        return prediction[0] ** 2 / 2

    with hvp.GaussNewtonOperator(
        predict, half_square, problem.variables, (data,) if data else None, engine=engine
    ) as G:
        v = random(3, len(g), dtype="float64")
        block = random(4, len(g), 3, dtype="float64")
        limit = 1e-10 if dtype == "float64" else 2e-4
        assert relative_error(G @ v, g * (g @ v)) < limit
        assert relative_error(G @ block, np.outer(g, g @ block)) < limit
        assert relative_error(G.gradient, g * float(truth.bound())) < limit


@pytest.mark.parametrize(("engine", "batch_size"), crossed(["graph", "tape"], [3, None]))
@pytest.mark.few(1)
def test_least_squares_regularization_and_sums(engine, batch_size):
    model, x, _ = make("dense")
    targets = random(60, 7, 3, dtype="float64")
    want = 7 * dense_gauss_newton(model, x, lambda p: np.eye(3))
    n = want.shape[0]

    def half_squares():
        return sum(tf.reduce_sum(w**2) for w in model.trainable_variables) / 2

    with hvp.GaussNewtonOperator(
        model,
        squares,
        model,
        (x, targets),
        batch_size=batch_size,
        engine=engine,
        reduction="sum",
        regularization=half_squares,
    ) as G:
        assert relative_error(G.to_dense(), want + np.eye(n)) < 1e-12
        model.trainable_variables[0].assign_add(np.ones((4, 5)))
        with pytest.raises(hvp.StaleOperatorError):
            G @ np.ones(n)
        G.refresh()
        want = 7 * dense_gauss_newton(model, x, lambda p: np.eye(3))
        assert relative_error(G.to_dense(), want + np.eye(n)) < 1e-12
        solution = hvp.solve(G, np.ones(n), rtol=1e-10)
        assert relative_error((want + np.eye(n)) @ solution.x, np.ones(n)) < 1e-8


def test_an_operation_without_a_second_derivative_does_no_harm_in_the_model():
    """Only the Hessian differentiates the model twice."""
    w = tf.Variable(random(0, 6, dtype="float64", scale=0.3) + 2.0)

    def model():
        return tf.math.igamma(tf.constant(3.0, tf.float64), w)

    def half_squares(p):
        return tf.reduce_sum(p**2) / 2

    with tf.GradientTape() as tape:
        predictions = model()
    J = np.diag(tape.gradient(predictions, w))
    with hvp.GaussNewtonOperator(model, half_squares, w) as G:
        assert relative_error(G.to_dense(), J.T @ J) < 1e-12


def huber(predictions, targets):
    error = tf.abs(predictions - targets)
    return tf.reduce_mean(tf.where(error < 0.5, error**2 / 2, 0.5 * (error - 0.25)))


LINEAR = {
    "softmax": (softmax_loss, np.arange(7) % 3),
    "huber": (huber, random(6, 7, 3, dtype="float64")),
    "poisson": (lambda p, y: tf.reduce_mean(tf.exp(p) - y * p), np.arange(21.0).reshape(7, 3)),
}


@pytest.mark.parametrize(("name", "way"), crossed(LINEAR, WAYS))
@pytest.mark.few(1)
def test_of_a_linear_model_it_is_the_hessian(name, way):
    loss, y = LINEAR[name]
    made = [layers.Dense(3, dtype="float64"), layers.Identity(dtype="float64")]  # two segments
    model = keras.Sequential([layers.Input((4,), dtype="float64"), *made])
    x = random(1, 7, 4, dtype="float64", scale=0.3)
    for index, weight in enumerate(model.trainable_variables):
        weight.assign(random(index, *weight.shape, dtype="float64", scale=0.2))
    variables = [weight.value for weight in model.trainable_variables]
    want = dense_hessian(Problem(lambda: loss(model(x), y), variables), step=1e-4)
    options = dict(WAYS[way])
    if "memory_limit" in options:
        with hvp.GaussNewtonOperator(model, loss, model, (x, y), batch_size=2) as G:
            options["memory_limit"] = int(4.6 * G.stats.residual_bytes / 4)
    with hvp.GaussNewtonOperator(model, loss, model, (x, y), **options) as G:
        assert relative_error(G.to_dense(), want) < 1e-9


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.few(1)
def test_of_least_squares_that_interpolate_it_is_the_hessian(engine):
    model, x, _ = make("dense")
    y = model(x).numpy()
    variables = [weight.value for weight in model.trainable_variables]
    want = dense_hessian(Problem(lambda: squares(model(x), y), variables))
    with hvp.GaussNewtonOperator(model, squares, model, (x, y), engine=engine) as G:
        assert relative_error(G.to_dense(), want) < 1e-9
        model.trainable_variables[0].assign_add(np.full((4, 5), 0.1))
        moved = dense_hessian(Problem(lambda: squares(model(x), y), variables))
        G.refresh()
        assert relative_error(G.to_dense(), moved) > 1e-3  # where it does not, it is another one


def test_two_inputs_and_nested_predictions():
    w = tf.Variable(random(0, 3, 2, dtype="float64"))
    a, b = random(1, 5, 3, dtype="float64"), random(2, 5, 3, dtype="float64")

    def model(a, b):
        return {"sum": (a + b) @ w, "product": tf.sin(a * b) @ w**2}

    def loss(predictions, weight):
        each = tf.reduce_sum(predictions["sum"] ** 2 + tf.exp(predictions["product"]), axis=-1)
        return tf.reduce_mean(weight * each)

    weight = np.abs(random(3, 5, dtype="float64"))
    with tf.GradientTape(persistent=True) as tape:
        predictions = model(a, b)
    J = [tape.jacobian(predictions[key], w).numpy().reshape(10, 6) for key in ("sum", "product")]
    B = [np.full((5, 2), 2.0), np.exp(predictions["product"])]
    rows = [(weight[:, np.newaxis] * b).reshape(10) / 5 for b in B]
    want = sum(j.T @ (r[:, np.newaxis] * j) for j, r in zip(J, rows))
    for options in ({}, {"engine": "tape"}, {"batch_size": 2}):
        with hvp.GaussNewtonOperator(model, loss, w, ((a, b), weight), **options) as G:
            assert relative_error(G.to_dense(), want) < 1e-12


def test_what_cannot_be_right_is_refused():
    model, x, y = make("dense")
    # Losses of Keras compute in float32 unless told, which older versions cannot be.
    parameters = inspect.signature(keras.losses.SparseCategoricalCrossentropy).parameters
    precise = {"dtype": "float64"} if "dtype" in parameters else {}
    keras_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **precise)
    with pytest.raises(hvp.InvalidLossError, match="targets first"):
        hvp.GaussNewtonOperator(model, keras_loss, model, (x, y))
    with hvp.GaussNewtonOperator(model, lambda p, y: keras_loss(y, p), model, (x, y)) as G:
        error = relative_error(G.to_dense(), dense_gauss_newton(model, x, softmax_curvature))
        assert error < (1e-12 if precise else 1e-6)
    for output_loss, said in (("mse", "is str"), (lambda p, y: p, "shape"), (3, "is int")):
        with pytest.raises(hvp.InvalidLossError, match=said):
            hvp.GaussNewtonOperator(model, output_loss, model, (x, y))
    with pytest.raises(hvp.InvalidLossError, match="The model is str"):
        hvp.GaussNewtonOperator("model", softmax_loss, model, (x, y))
    with pytest.raises(hvp.InvalidLossError, match="returned a int64"):
        hvp.GaussNewtonOperator(lambda x: tf.argmax(model(x), -1), softmax_loss, model, (x, y))
    with pytest.raises(hvp.InvalidDataError, match="dict"):
        hvp.GaussNewtonOperator(model, softmax_loss, model, {"x": x, "labels": y})
    for option, said in (
        ("unknown", "no argument unknown"),
        ("batchsize", "pass batch_size"),
        ("products", "no argument products"),  # for the package alone
        ("wide", "no argument wide"),
    ):
        with pytest.raises(hvp.InvalidOptionError, match=said):
            hvp.GaussNewtonOperator(model, softmax_loss, model, (x, y), **{option: False})
        with pytest.raises(TypeError, match="FisherOperator"):
            hvp.FisherOperator(model, softmax_loss, model, (x, y), **{option: False})


def test_an_output_loss_that_was_traced_before():
    """Its old trace holds moments that TensorFlow differentiates wrong a second time."""
    w = tf.Variable(random(0, 5, dtype="float64"))
    factors = tf.constant(random(1, 5, dtype="float64"))

    @tf.function
    def loss(p):
        mean, variance = tf.nn.moments(p, [0])
        return tf.reduce_sum(((p - mean) / tf.sqrt(variance + 0.1)) ** 3)

    loss(w * factors)
    # The model is linear, so that the matrix is the Hessian.
    want = dense_hessian(Problem(lambda: loss(w * factors), w))
    for engine in ("graph", "tape"):
        with hvp.GaussNewtonOperator(lambda: w * factors, loss, w, engine=engine) as G:
            assert relative_error(G.to_dense(), want) < 1e-9


@pytest.mark.parametrize("number", [0, 0.1, np.float32(0.5), tf.constant(3)])
def test_a_regularization_may_be_a_number(number):
    model, x, y = make("dense")
    options = {"regularization": lambda: number}
    with hvp.GaussNewtonOperator(model, softmax_loss, model, (x, y), **options) as G:
        want = float(softmax_loss(model(x), y)) + float(np.asarray(number, "float64"))
        assert G.value == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_targets_that_are_subtracted_each_from_each_are_refused(engine):
    x = np.random.default_rng(0).standard_normal((20, 3))
    y, w = np.sin(x[:, 0]), tf.Variable(np.full((3, 1), 0.1))
    squares = lambda p, y: tf.reduce_mean((p - y) ** 2)  # noqa: E731
    with pytest.raises(hvp.InvalidLossError, match=r"\(n, 1\).*np\.newaxis"):
        hvp.GaussNewtonOperator(lambda x: x @ w, squares, w, (x, y), engine=engine)
    G = hvp.GaussNewtonOperator(lambda x: x @ w, squares, w, (x, y[:, np.newaxis]), engine=engine)
    np.testing.assert_allclose(G.to_dense(), 2 * x.T @ x / 20, rtol=1e-12)


def test_a_loss_of_several_examples_may_have_targets_of_shape_n():
    # The partial likelihood of Cox's model, with predictions of shape (n, 1).
    x, event = np.random.default_rng(0).standard_normal((20, 3)), np.arange(20) % 2.0
    time, w = np.arange(20.0)[::-1].copy(), tf.Variable(np.full((3, 1), 0.1))

    def cox(risk, time, event):
        risk = risk[:, 0]
        there = tf.cast(time[tf.newaxis] >= time[:, tf.newaxis], risk.dtype)
        return -tf.reduce_mean(event * (risk - tf.math.log(tf.linalg.matvec(there, tf.exp(risk)))))

    G = hvp.GaussNewtonOperator(lambda x: x @ w, cox, w, (x, time, event))
    H = hvp.HessianOperator(lambda *data: cox(x @ w, *data), w, (time, event))
    np.testing.assert_allclose(G.to_dense(), H.to_dense(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"batch_size": 10}, {"engine": "tape"}])
def test_a_penalty_in_the_output_loss_is_refused(options):
    """The gradient and the matrix would leave it out, and the value would not."""
    x, w = random(0, 30, 3, dtype="float64"), tf.Variable(np.full((3, 1), 0.5))

    def model(x):
        return x @ w

    def output_loss(p, y):
        return tf.reduce_mean((p - y) ** 2) + tf.reduce_sum(w**2) / 2

    for kind in (hvp.GaussNewtonOperator, hvp.FisherOperator, hvp.KFAC):
        more = {"kind": "empirical"} if kind is hvp.FisherOperator else {}
        if kind is hvp.KFAC:
            options = {name: value for name, value in options.items() if name != "engine"}
        with pytest.raises(hvp.InvalidLossError, match="regularization="):
            kind(model, output_loss, w, (x, x[:, :1]), **more, **options)
    # The remedy.
    G = hvp.GaussNewtonOperator(
        model,
        lambda p, y: tf.reduce_mean((p - y) ** 2),
        w,
        (x, x[:, :1]),
        regularization=lambda: tf.reduce_sum(w**2) / 2,
        **options,
    )
    np.testing.assert_allclose(G.to_dense(), x.T @ x / 15 + np.eye(3))
