"""Derivatives in the inputs: against closed forms, nested tapes and differences."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import crossed, random

X = random(0, 5, 3, dtype="float64")
WEIGHTS = [
    random(i, *shape, dtype="float64", scale=0.5)
    for i, shape in enumerate([(3, 8), (8, 8), (8, 2)])
]


def network(dtype="float64"):
    weights = [tf.Variable(w.astype(dtype)) for w in WEIGHTS]

    def f(x):
        h = x
        for w in weights[:-1]:
            h = tf.tanh(h @ w + 0.1)
        return tf.nn.softmax(h @ weights[-1]) * tf.sin(x[:, :1]) / (1.5 + x[:, 1:2] ** 2)

    return f, weights


def hessians(f, x):
    """The Hessians of each result of each example, by tapes; the shape is (n, outputs, d, d)."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = f(x)
        jacobian = inner.batch_jacobian(y, x)
    return jacobian, outer.batch_jacobian(jacobian, x)


def powers(x, power, order):
    """The derivative of a power of x."""
    return np.prod([power - i for i in range(order)]) * x ** (power - order)


def inverse(x):
    """The reciprocal, as the inverse of a matrix."""
    return tf.linalg.inv(x[..., tf.newaxis])[..., 0]


# Functions with derivatives of every order in closed form, along a line.
ANALYTIC = {
    "polynomial": (lambda x: x**5 - x**2, lambda x, j: powers(x, 5, j) - powers(x, 2, j)),
    "exponential": (tf.exp, lambda x, j: np.exp(x)),
    "sine": (lambda x: tf.sin(2 * x), lambda x, j: 2**j * np.sin(2 * x + j * np.pi / 2)),
    "cosine": (lambda x: tf.cos(2 * x), lambda x, j: 2**j * np.cos(2 * x + j * np.pi / 2)),
    "logarithm": (tf.math.log, lambda x, j: powers(x, -1.0, j - 1) if j else np.log(x)),
    "reciprocal": (lambda x: 1 / x, lambda x, j: powers(x, -1.0, j)),
    "square root": (tf.sqrt, lambda x, j: powers(x, 0.5, j)),
    "power": (lambda x: x**-1.5, lambda x, j: powers(x, -1.5, j)),
    "inverse": (inverse, lambda x, j: powers(x, -1.0, j)),
}


@pytest.mark.parametrize("name", ANALYTIC)
@pytest.mark.few(1)
def test_all_orders_of_analytic_functions(name):
    function, derivative = ANALYTIC[name]
    x = X[:, :1] + 3
    for order, found in enumerate(hvp.jet(function, x, np.ones_like(x), order=6)):
        np.testing.assert_allclose(found, derivative(x, order), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "by_value"),
    [
        (
            "tanh",
            [
                lambda y: 1 - y**2,
                lambda y: -2 * y * (1 - y**2),
                lambda y: (6 * y**2 - 2) * (1 - y**2),
            ],
        ),
        (
            "sigmoid",
            [
                lambda y: y * (1 - y),
                lambda y: y * (1 - y) * (1 - 2 * y),
                lambda y: y * (1 - y) * (1 - 6 * y + 6 * y**2),
            ],
        ),
    ],
)
def test_formulas_by_the_value(name, by_value):
    function = getattr(tf, name)
    y, *derivatives = hvp.jet(function, X, np.ones_like(X), order=3)
    for found, formula in zip(derivatives, by_value):
        np.testing.assert_allclose(found, formula(y.numpy()), rtol=1e-12, atol=1e-14)


@pytest.mark.long
def test_directions_one_or_many():
    f, _ = network()
    directions = random(3, 4, 5, 3, dtype="float64")
    many = hvp.jet(f, X, directions, order=4)
    for i, direction in enumerate(directions):
        one = hvp.jet(f, X, direction, order=4)
        for order in range(1, 5):
            np.testing.assert_allclose(many[order][i], one[order], rtol=1e-11, atol=1e-12)
    _, hessian = hessians(f, tf.constant(X))
    want = np.einsum("kni,noij,knj->kno", directions, hessian, directions)
    np.testing.assert_allclose(many[2], want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("how", ["eager", "function", "xla", "float32"])
@pytest.mark.few(1)
def test_value_gradient_and_laplacian(how):
    dtype = "float32" if how == "float32" else "float64"
    f, _ = network(dtype)
    x = tf.constant(X.astype(dtype))
    compute = lambda x: hvp.laplacian(f, x)  # noqa: E731
    if how in ("function", "xla"):
        compute = tf.function(compute, jit_compile=how == "xla")
    value, gradient, laplacian = compute(x)
    jacobian, hessian = hessians(f, x)
    close = {"rtol": 1e-4, "atol": 1e-5} if how == "float32" else {"rtol": 1e-11, "atol": 1e-12}
    np.testing.assert_allclose(value, f(x), **close)
    np.testing.assert_allclose(gradient, jacobian, **close)
    np.testing.assert_allclose(laplacian, np.trace(hessian, axis1=2, axis2=3), **close)


def test_examples_of_any_shape_and_nests_of_results():
    x = random(1, 4, 2, 3, dtype="float64")

    def f(x):
        return {
            "sum": tf.reduce_sum(x**3, axis=[1, 2]),
            "squares": x**2,
            "constant": tf.ones([4, 1]),
        }

    value, gradient, laplacian = hvp.laplacian(f, x)
    np.testing.assert_allclose(value["squares"], x**2)
    np.testing.assert_allclose(gradient["sum"], 3 * x**2)
    assert gradient["squares"].shape == (4, 2, 3, 2, 3)
    assert gradient["constant"].shape == (4, 1, 2, 3)
    np.testing.assert_allclose(laplacian["sum"], 6 * x.sum((1, 2)))
    np.testing.assert_allclose(laplacian["squares"], np.full_like(x, 2))
    assert not laplacian["constant"].numpy().any()


@pytest.mark.parametrize("kind", ["gaussian", "wave"])
def test_laplacians_in_closed_form(kind):
    k = np.array([1.0, -2.0, 0.5])
    if kind == "gaussian":
        f = lambda x: tf.exp(-tf.reduce_sum(x**2, axis=1) / 2)  # noqa: E731
        r2 = (X**2).sum(1)
        once = (r2 - 3) * np.exp(-r2 / 2)
        twice = (r2**2 - 10 * r2 + 15) * np.exp(-r2 / 2)
    else:
        f = lambda x: tf.sin(tf.linalg.matvec(x, tf.constant(k)))  # noqa: E731
        once = -(k @ k) * np.sin(X @ k)
        twice = (k @ k) ** 2 * np.sin(X @ k)
    np.testing.assert_allclose(hvp.laplacian(f, X).laplacian, once, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(hvp.bilaplacian(f, X), twice, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("given", ["A", "factor"])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.few(1)
def test_traces_with_a_matrix(given, each):
    f, _ = network()
    _, hessian = hessians(f, tf.constant(X))
    columns = 3 if given == "A" else 2
    matrix = random(7, *([5] if each else []), 3, columns, dtype="float64")
    found = hvp.hessian_trace(f, X, **{given: matrix})
    A = matrix if given == "A" else matrix @ np.swapaxes(matrix, -1, -2)
    want = np.einsum("nij,noij->no", np.broadcast_to(A, (5, 3, 3)), hessian)
    np.testing.assert_allclose(found, want, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(hvp.hessian_trace(f, X), hvp.laplacian(f, X).laplacian)


def test_a_trace_is_differentiable_in_the_matrix():
    A = tf.Variable(random(3, 3, 3, dtype="float64"))
    f = lambda x: tf.reduce_sum(x**3, axis=1)  # noqa: E731
    with tf.GradientTape() as tape:
        trace = tf.reduce_sum(hvp.hessian_trace(f, X, A))
    np.testing.assert_allclose(tape.gradient(trace, A), np.diag(6 * X.sum(0)), atol=1e-12)


def test_partial_derivatives_by_name():
    points = {"x": X[:, 0], "t": X[:, 1]}
    names = ["", "x", "t", "xx", "xt", "tt", "xxt", "xxtt", "tttt", "xxxttt", ("t", "x")]
    found = hvp.partial_derivatives(lambda x, t: tf.sin(x) * tf.exp(2 * t), points, names)
    for name in names:
        j, m = list(name).count("x"), list(name).count("t")
        want = np.sin(X[:, 0] + j * np.pi / 2) * 2**m * np.exp(2 * X[:, 1])
        np.testing.assert_allclose(found[name], want, rtol=1e-9, atol=1e-10)


def test_the_estimate_has_no_bias_and_follows_its_seed():
    f, _ = network()
    exact = hvp.laplacian(f, X).laplacian.numpy()
    estimates = [hvp.laplacian(f, X, probes=50, seed=seed) for seed in range(40)]
    values = np.stack([estimate.laplacian for estimate in estimates])
    error = values.std(0, ddof=1) / np.sqrt(40)
    assert (np.abs(values.mean(0) - exact) < 5 * error).all()
    assert (error > 0).all()
    again = hvp.laplacian(f, X, probes=50, seed=tf.constant(3))
    of_any_number = tf.function(
        lambda x: hvp.laplacian(f, x, probes=50, seed=3), [tf.TensorSpec([None, 3], X.dtype)]
    )
    np.testing.assert_allclose(of_any_number(X).laplacian, again.laplacian, rtol=1e-12)
    assert hvp.partial_derivatives(identity, {"x": X[:, 0]}, []) == {}
    np.testing.assert_array_equal(again.laplacian, values[3])
    assert again.gradient is None


def losses(x):
    f, weights = network()

    def loss(x=x):
        value, gradient, laplacian = hvp.laplacian(f, x)
        residual = laplacian + tf.reduce_sum(gradient**2, axis=2) - value
        return tf.reduce_mean(residual**2)

    def by_tapes(x=x):
        jacobian, hessian = hessians(f, x)
        residual = tf.linalg.trace(hessian) + tf.reduce_sum(jacobian**2, axis=2) - f(x)
        return tf.reduce_mean(residual**2)

    return loss, by_tapes, weights


def gradient_of(loss, weights):
    with tf.GradientTape() as tape:
        value = loss()
    return np.concatenate([np.ravel(g) for g in tape.gradient(value, weights)])


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.few(1)
@pytest.mark.long
def test_gradients_in_the_weights(in_function):
    loss, by_tapes, weights = losses(tf.constant(X))
    wrap = tf.function if in_function else lambda f: f
    found = gradient_of(wrap(loss), weights)
    np.testing.assert_allclose(found, gradient_of(by_tapes, weights), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("engine", "how"), crossed(["graph", "tape"], ["whole", "batches", "recompute"])
)
@pytest.mark.few(1)
@pytest.mark.long
def test_matrices_of_losses_with_laplacians(engine, how):
    loss, _, weights = losses(tf.constant(X))
    wrapped = hvp.recompute(loss) if how == "recompute" else loss
    options = {"batch_size": 2} if how == "batches" else {}
    with hvp.HessianOperator(wrapped, weights, data=(X,), engine=engine, **options) as H:
        V = random(4, H.shape[0], 3, dtype="float64")
        block = H @ V
        np.testing.assert_allclose(block[:, 0], H @ V[:, 0], rtol=1e-9, atol=1e-10)
        v, step = V[:, 0], 1e-4

    def gradient_at(sign):
        place = 0
        before = [w.numpy() for w in weights]
        for w in weights:
            part = v[place : place + w.shape.num_elements()].reshape(w.shape)
            w.assign_add(sign * step * part)
            place += part.size
        result = gradient_of(loss, weights)
        for w, value in zip(weights, before):
            w.assign(value)
        return result

    want = (gradient_at(1) - gradient_at(-1)) / (2 * step)
    np.testing.assert_allclose(block[:, 0], want, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["dense", "layer norm", "attention", "convolution", "batch norm"])
@pytest.mark.few(1)
@pytest.mark.long
def test_keras_models(kind):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,), dtype="float64")
    with_dtype = {"dtype": "float64"}
    h = keras.layers.Dense(8, "gelu", **with_dtype)(inputs)
    if kind == "layer norm":
        h = keras.layers.LayerNormalization(**with_dtype)(h)
    if kind == "batch norm":
        h = keras.layers.BatchNormalization(**with_dtype)(h)
    if kind == "attention":
        h = keras.layers.Reshape((4, 2), **with_dtype)(h)
        h = keras.layers.MultiHeadAttention(2, 2, **with_dtype)(h, h)
        h = keras.layers.Flatten(**with_dtype)(h)
    if kind == "convolution":
        h = keras.layers.Reshape((8, 1), **with_dtype)(h)
        h = keras.layers.Conv1D(3, 3, activation="softplus", **with_dtype)(h)
        h = keras.layers.GlobalAveragePooling1D(**with_dtype)(h)
    model = keras.Model(inputs, keras.layers.Dense(2, **with_dtype)(h))
    x = tf.constant(random(2, 4, 6, dtype="float64"))
    value, gradient, laplacian = hvp.laplacian(model, x)
    np.testing.assert_allclose(value, model(x), rtol=1e-11)
    # Differences of first derivatives, because TensorFlow's second derivative of moments is wrong.
    step = 1e-5
    jacobians = [hessians(model, x + sign * step * e)[0] for e in np.eye(6) for sign in (1, -1)]
    np.testing.assert_allclose(gradient, hessians(model, x)[0], rtol=1e-9, atol=1e-12)
    pairs = zip(jacobians[::2], jacobians[1::2])
    want = sum((a - b)[..., i] / (2 * step) for i, (a, b) in enumerate(pairs))
    np.testing.assert_allclose(laplacian, want, atol=1e-7 * np.abs(want).max())


def test_examples_of_unknown_number():
    f, _ = network()

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)])
    def compute(x):
        return hvp.laplacian(f, x)

    for count in (2, 5):
        for a, b in zip(compute(X[:count]), hvp.laplacian(f, X[:count])):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_function_is_traced_once_and_not_kept():
    traces = []

    def f(x):
        traces.append(1)
        return tf.reduce_sum(x**3, axis=1)

    for _ in range(3):
        hvp.laplacian(f, X)
    assert len(traces) == 1
    gone = weakref.ref(f)
    del f
    gc.collect()
    assert gone() is None


FLAG, COUNT = tf.Variable(True), tf.Variable(1.0, dtype=tf.float64)


def branch(x):
    return tf.cond(FLAG, lambda: x**2, lambda: x)


@tf.custom_gradient
def straight_through(x):
    return tf.round(x), lambda upstream: upstream


LAYER = keras.layers.BatchNormalization(dtype="float64")


def of_neighbours(x):  # of the first and the last as well
    return tf.concat([x[:1], x[2:] * x[:-2], x[-1:]], axis=0)


# A graph from before the function below is traced, with TensorFlow's own derivatives.
VARIANCES = tf.function(lambda x: tf.nn.moments(x, 1)[1]).get_concrete_function(
    tf.TensorSpec(X.shape, tf.float64)
)


def normalized_by_the_batch(x):
    """This also updates the averages of the layer."""
    return LAYER(x, training=True)


def identity(x):
    return x


BAD = [
    (lambda: hvp.laplacian(lambda x: x - tf.reduce_mean(x, 0), X), "InvalidLossError", ["mixes"]),
    (lambda: hvp.laplacian(normalized_by_the_batch, X), "InvalidLossError", ["mixes"]),
    # With numbers of which random inputs have no logarithm; and with the last row alone.
    (
        lambda: hvp.laplacian(lambda x: tf.math.log(x) - tf.reduce_mean(x, 0), tf.exp(X)),
        "InvalidLossError",
        ["mixes"],
    ),
    (lambda: hvp.laplacian(lambda x: x - x[-1:], X), "InvalidLossError", ["mixes"]),
    (lambda: hvp.laplacian(of_neighbours, np.ones((6, 1))), "InvalidLossError", ["mixes"]),
    (
        lambda: hvp.laplacian(lambda x: tf.grad_pass_through(tf.round)(x), X),
        "SecondDerivativeError",
        ["tf.grad_pass_through"],
    ),
    (
        lambda: hvp.laplacian(lambda x: x * COUNT.assign_add(1.0), X),
        "SecondDerivativeError",
        ["assigned", "test_inputs.py, line"],
    ),
    (
        lambda: hvp.laplacian(
            lambda x: tf.nn.softmax_cross_entropy_with_logits(np.ones((1, 3)), x), X
        ),
        "SecondDerivativeError",
        ["SoftmaxCrossEntropyWithLogits", "shapes", "test_inputs.py, line"],
    ),
    (lambda: hvp.laplacian(lambda x: VARIANCES(x), X), "SecondDerivativeError", ["tf.nn.moments"]),
    (lambda: hvp.laplacian(tf.reduce_sum, X), "InvalidLossError", ["()", "5"]),
    (lambda: hvp.laplacian(lambda x: None, X), "InvalidLossError", ["None"]),
    (lambda: hvp.bilaplacian(lambda x: (), X), "InvalidLossError", ["()"]),
    (lambda: hvp.laplacian(tf.sin, [[1, 2]]), "InvalidDataError", ["int32", "tf.cast"]),
    (lambda: hvp.laplacian(tf.sin, 1.0), "InvalidDataError", ["()"]),
    (lambda: hvp.laplacian(tf.sin, X, probes=0), "HvpError", ["probes", "0"]),
    (lambda: hvp.laplacian(branch, X), "SecondDerivativeError", ["If", "tf.where"]),
    (
        lambda: hvp.jet(lambda x: tf.nn.max_pool1d(x[..., None], 1, 1, "VALID"), X, X),
        "SecondDerivativeError",
        ["MaxPool", "test_inputs.py, line"],
    ),
    (
        lambda: hvp.laplacian(lambda x: straight_through(x), X),
        "SecondDerivativeError",
        ["custom_gradient", "test_inputs.py, line"],
    ),
    (
        lambda: hvp.jet(lambda x: tf.numpy_function(np.sin, [x], x.dtype), X, X),
        "SecondDerivativeError",
        ["PyFunc", "test_inputs.py, line"],
    ),
    (lambda: hvp.laplacian(tf.sin, (X, X[:, :2])), "InvalidDataError", ["tuple", "tf.concat"]),
    (lambda: hvp.jet(tf.sin, X, X, order=0), "HvpError", ["order", "0"]),
    (lambda: hvp.jet(tf.sin, X, X, order=7), "HvpError", ["7", "6"]),
    (lambda: hvp.jet(tf.sin, X, X[:2]), "InvalidVectorError", ["(2, 3)", "(5, 3)"]),
    (lambda: hvp.jet(tf.sin, X, 1j * np.ones(X.shape)), "InvalidVectorError", ["complex128"]),
    (lambda: hvp.hessian_trace(tf.sin, X, "A"), "InvalidVectorError", ["string"]),
    (lambda: hvp.hessian_trace(tf.sin, X, np.eye(2)), "InvalidVectorError", ["(2, 2)"]),
    (lambda: hvp.hessian_trace(tf.sin, X, X, factor=X), "InvalidVectorError", ["A and factor"]),
    (
        lambda: hvp.partial_derivatives(identity, {"x": X[:, 0]}, ["xy"]),
        "InvalidDataError",
        ["'y'", "'x'"],
    ),
    (lambda: hvp.partial_derivatives(identity, {"x": X}, ["x"]), "InvalidDataError", ["(5, 3)"]),
    (
        lambda: hvp.partial_derivatives(identity, {"x": X[:, 0]}, ["x" * 7]),
        "InvalidDataError",
        ["7", "6"],
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_bad_input_is_refused(call, error, words):
    with pytest.raises(getattr(hvp, error)) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_directions_as_lists_keep_all_digits():
    x = tf.constant([[1.0, 2.0]], tf.float64)
    first = hvp.jet(lambda x: tf.reduce_sum(x, 1), x, [[0.1, 0.2]])[1]
    assert float(first[0]) == pytest.approx(0.3, rel=1e-14)


@pytest.mark.parametrize("name", ["silu", "gelu", "relu6", "softplus", "elu", "selu"])
def test_functions_to_which_tensorflow_or_keras_gives_a_gradient(name):
    function = getattr(keras.ops, name)
    _, gradient, laplacian = hvp.laplacian(function, X)
    step = 1e-4
    at = {k: np.asarray(function(tf.constant(X + k * step))) for k in (-1, 0, 1)}
    slopes = np.einsum("nii->ni", gradient)
    np.testing.assert_allclose(slopes, (at[1] - at[-1]) / (2 * step), atol=1e-6)
    np.testing.assert_allclose(laplacian, (at[1] - 2 * at[0] + at[-1]) / step**2, atol=1e-6)


FIVE = np.float64(5)
# Operations with a constant beside what moves, which no derivative may contain.
AFFINE = {
    "complex, real part": lambda x: tf.abs(tf.complex(tf.sin(x), FIVE * tf.ones_like(x))),
    "complex, imaginary part": lambda x: tf.abs(tf.complex(FIVE * tf.ones_like(x), tf.sin(x))),
    "padded": lambda x: tf.pad(tf.sin(x), [[0, 0], [1, 2]], constant_values=FIVE),
    "diagonals": lambda x: tf.linalg.diag_part(tf.sin(x), k=(0, 1), padding_value=FIVE),
    "diagonal matrix": lambda x: tf.linalg.diag(tf.sin(x), padding_value=FIVE),
    "set diagonal": lambda x: tf.linalg.set_diag(tf.fill([3, 3], FIVE), tf.sin(x[0])),
    "joined": lambda x: tf.concat([tf.sin(x), tf.fill([5, 1], FIVE)], axis=1),
    "stacked": lambda x: tf.stack([tf.sin(x), tf.fill([5, 3], FIVE)]),
    "chosen": lambda x: tf.where(x > 0, tf.sin(x), FIVE),
    "updated": lambda x: tf.tensor_scatter_nd_update(tf.fill([4, 3], FIVE), [[1]], tf.sin(x[:1])),
    "sum": lambda x: FIVE - tf.sin(x[:, :1]) + np.arange(4.0),
}


@pytest.mark.parametrize("name", AFFINE)
def test_no_derivative_has_a_constant_in_it(name):
    d, step = random(3, 5, 3, dtype="float64"), 1e-4
    after, at, before = (AFFINE[name](tf.constant(X + k * step * d)) for k in (1, 0, -1))
    _, first, second = hvp.jet(AFFINE[name], X, d)
    np.testing.assert_allclose(first, (after - before) / (2 * step), atol=1e-6)
    np.testing.assert_allclose(second, (after - 2 * at + before) / step**2, atol=1e-6)


def test_whole_powers_at_zero_have_all_derivatives():
    x = np.zeros((1, 1))
    found = hvp.jet(lambda x: x**5 + x**2, x, np.ones_like(x), order=6)
    np.testing.assert_array_equal(np.ravel(found), [0, 0, 2, 0, 0, 120, 0])


def test_a_check_for_mixed_examples_leaves_the_layer_as_it_is():
    LAYER(X)
    before = [weight.numpy() for weight in LAYER.weights]
    with pytest.raises(hvp.InvalidLossError):
        hvp.laplacian(normalized_by_the_batch, X[:4])
    for weight, value in zip(LAYER.weights, before):
        np.testing.assert_array_equal(weight.numpy(), value)


def test_the_remedy_of_a_branch_works():
    found = hvp.laplacian(lambda x: tf.where(tf.reduce_sum(x) > 0, x**2, x), X[:1])
    assert np.isfinite(found.laplacian).all()


@pytest.mark.parametrize("layout", ["nest", "flat tensor", "flat array"])
def test_third_order_products(layout):
    w = tf.Variable(random(0, 3, 2, dtype="float64"))
    b = tf.Variable(random(1, 2, dtype="float64"))
    x = tf.constant(random(2, 4, 3, dtype="float64"))

    def loss(x):
        return tf.reduce_mean(tf.nn.softplus(tf.tanh(x @ w + b)) ** 2) + tf.reduce_sum(w**3 * b)

    def flat(z, x):
        w, b = tf.reshape(z[:6], (3, 2)), z[6:]
        return tf.reduce_mean(tf.nn.softplus(tf.tanh(x @ w + b)) ** 2) + tf.reduce_sum(w**3 * b)

    z = tf.concat([tf.reshape(w, [-1]), b], 0)
    u, v = random(3, 8, dtype="float64"), random(4, 8, dtype="float64")
    with tf.GradientTape() as third:
        third.watch(z)
        with tf.GradientTape() as second:
            second.watch(z)
            with tf.GradientTape() as first:
                first.watch(z)
                value = flat(z, x)
            slope = tf.tensordot(first.gradient(value, z), v, 1)
        curvature = tf.tensordot(second.gradient(slope, z), u, 1)
    want = third.gradient(curvature, z)

    def packed(vector):
        if layout == "nest":
            return [tf.constant(vector[:6].reshape(3, 2)), tf.constant(vector[6:])]
        return tf.constant(vector) if layout == "flat tensor" else vector

    found = hvp.third_order_product(loss, [w, b], packed(u), packed(v), (x,))
    if layout == "nest":
        found = tf.concat([tf.reshape(part, [-1]) for part in found], 0)
    assert isinstance(found, np.ndarray) == (layout == "flat array")
    np.testing.assert_allclose(found, want, rtol=1e-11, atol=1e-13)


def test_third_derivatives_of_what_does_not_depend_on_a_variable_are_zero():
    w, unused = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    found = hvp.third_order_product(
        lambda: tf.reduce_sum(w**3), [w, unused], tf.ones(3), tf.ones(3)
    )
    np.testing.assert_allclose(found, [6, 6, 0])


def test_a_variable_inside_a_loop_is_refused():
    w = tf.Variable([1.0, 2.0])

    def loss():
        step = lambda i, x: (i + 1, x * w)  # noqa: E731
        return tf.reduce_sum(tf.while_loop(lambda i, x: i < 3, step, [0, tf.ones(2)])[1])

    with pytest.raises(hvp.SecondDerivativeError, match="While"):
        hvp.third_order_product(loss, w, tf.ones(2), tf.ones(2))


def test_third_order_products_of_rows_that_are_gathered():
    rng = np.random.default_rng(0)
    table = tf.Variable(rng.standard_normal((5, 3)))
    ids, kernel = np.array([[0, 1, 1], [4, 2, 0]]), tf.Variable(rng.standard_normal((3, 1)))

    def loss(ids):
        rows = tf.nn.embedding_lookup(table, ids)
        return tf.reduce_mean(tf.exp(tf.tanh(rows) @ kernel))

    variables = [table, kernel]
    H = hvp.HessianOperator(loss, variables, (ids,))
    u, v, direction = rng.standard_normal((3, H.shape[0]))
    product = hvp.third_order_product(loss, variables, u, v, (ids,))
    ends = []
    for step in (1e-5, -2e-5):
        for variable, part in zip(variables, H.unflatten(tf.constant(direction))):
            variable.assign_add(step * part)
        H.refresh()
        ends.append(u @ (H @ v))
    assert product @ direction == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_a_keras_model_casts_coordinates_and_inputs():
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    x, y = np.random.default_rng(0).random((2, 5))
    stacked = lambda x, y: model(tf.stack([x, y], axis=1))  # noqa: E731
    found, single = (
        hvp.partial_derivatives(stacked, {"x": x.astype(dtype), "y": y.astype(dtype)}, ["xy", "xx"])
        for dtype in ("float64", "float32")
    )
    for name in ("xy", "xx"):
        assert found[name].dtype == tf.float32
        np.testing.assert_allclose(found[name], single[name], rtol=1e-4, atol=1e-5)


def test_functions_that_cannot_be_called_by_coordinates():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x = np.ones(3, np.float32)
    with pytest.raises(hvp.HvpError, match=r"lambda x, y: model\(tf.stack\(\[x, y\], axis=1\)\)"):
        hvp.partial_derivatives(model, {"x": x, "y": x}, ["xy"])


def test_inputs_of_another_type_than_the_variables():
    w = tf.Variable(np.ones((2, 1), "float32"))
    f = lambda x: tf.tanh(x @ w)  # noqa: E731
    with pytest.raises(hvp.InvalidDataError, match=r"float64: .*tf.cast\(x, 'float32'\)"):
        hvp.laplacian(f, np.ones((3, 2)))
    assert hvp.laplacian(f, tf.cast(np.ones((3, 2)), "float32")).laplacian.shape == (3, 1)


def test_products_of_segments_with_zeros_are_not_numbers():
    """TensorFlow has their second derivatives wrong; without zeros they are right."""

    def product(x):
        parts = tf.transpose(tf.concat([x, x, x + 2.0], 1))
        return tf.transpose(tf.math.unsorted_segment_prod(parts, [0, 0, 0], 1))

    z = tf.zeros([1, 1], tf.float64)
    terms = np.ravel(hvp.jet(product, z + 1, z + 1, 3))  # x**3 + 2 x**2
    np.testing.assert_allclose(terms, [3, 7, 10, 6])
    assert np.isnan(np.ravel(hvp.jet(product, z, z + 1, 3)[1:])).all()
    w = tf.Variable(z)
    with pytest.raises(hvp.NonFiniteError):
        hvp.third_order_product(lambda: tf.reduce_sum(product(w)), w, np.ones(1), np.ones(1))


@pytest.mark.parametrize("kind", ["eigh", "eig", "svd"])
@pytest.mark.few(1)
def test_derivatives_of_equal_eigenvalues_are_not_numbers(kind):
    """TensorFlow divides by their differences. The cubes of eigenvalues add up to `tr X**3`."""

    def sum_of_powers(rows):
        x = tf.reshape(rows, [-1, 3, 3])
        if kind == "svd":
            return tf.reduce_sum(tf.linalg.svd(x, compute_uv=False) ** 2, axis=-1)
        x = (x + tf.linalg.matrix_transpose(x)) / 2
        values = tf.linalg.eigvalsh(x) if kind == "eigh" else tf.linalg.eigvals(x)
        return tf.math.real(tf.reduce_sum(values**3, axis=-1))

    x = np.diag([1.0, 2.0, 4.0]).reshape(1, 9)
    d = np.arange(9.0).reshape(1, 9)
    symmetric = (d.reshape(3, 3) + d.reshape(3, 3).T) / 2
    terms = np.ravel(hvp.jet(sum_of_powers, x, d, 2))
    second = 6 * np.trace(np.diag([1, 2, 4]) @ symmetric @ symmetric)
    assert terms[2] == pytest.approx(2 * (d**2).sum() if kind == "svd" else second, rel=1e-9)
    x = np.diag([1.0, 1.0, 4.0]).reshape(1, 9)
    assert np.isnan(np.ravel(hvp.jet(sum_of_powers, x, d, 2)[1:])).all()
    assert np.isnan(hvp.laplacian(sum_of_powers, x).laplacian).all()
    w = tf.Variable(x)
    with pytest.raises(hvp.NonFiniteError):
        hvp.third_order_product(lambda: tf.reduce_sum(sum_of_powers(w)), w, d[0], d[0])


def test_layers_that_draw_random_numbers_are_called_once():
    w = tf.Variable(np.ones((2, 6)))
    drop = keras.layers.Dropout(0.5, seed=3, dtype="float64")
    v = np.ones(12)
    once = hvp.third_order_product(lambda: tf.reduce_sum(drop(w, training=True) ** 4), w, v, v)
    assert set(np.unique(once)) == {0.0, 24.0 * 2**4}

    def twice():
        return tf.reduce_sum((drop(w, training=True) - 2 * drop(w, training=True)) ** 4)

    with pytest.raises(hvp.SecondDerivativeError, match="assigned"):
        hvp.third_order_product(twice, w, v, v)
    H = hvp.HessianOperator(twice, w)
    with tf.GradientTape() as tape:
        curvature = tf.tensordot(H.product(tf.constant(v)), tf.constant(v), 1)
    assert curvature > 0
    with pytest.raises(hvp.SecondDerivativeError, match="assigned"):
        np.asarray(tape.gradient(curvature, w))


def complex_product(x):
    return tf.sin(tf.math.imag(tf.math.cumprod(tf.complex(x, x**2), axis=1)[:, -1]) + 0.3)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "f",
    [
        complex_product,
        lambda x: tf.sin(tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(tf.sin(x)), x)),
        lambda x: tf.sin(tf.reduce_sum(tf.nn.softsign(x), axis=1)),
        lambda x: tf.sin(tf.math.cumprod(x - 0.2, axis=1)[:, -1] + 0.3),
    ],
    ids=["complex", "labels", "softsign", "zero"],
)
@pytest.mark.few(3)
def test_gradients_of_laplacians_are_right(f, compiled):
    """Of operations whose derivatives TensorFlow has wrong or lacks; by differences of values."""
    x, h = np.array([[0.3, 0.2, 0.7]]), 0.02
    value = tf.function(f)

    def second(at, direction):
        shifts = np.arange(-3, 4)[:, np.newaxis] * h * direction
        weights = np.array([2, -27, 270, -490, 270, -27, 2]) / (180 * h**2)
        return weights @ value(tf.constant(at + shifts)).numpy()

    def laplacian(at):
        return sum(second(at, direction) for direction in np.eye(3))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = hvp.laplacian(f, x).laplacian
        return tape.gradient(result, x)

    found = (tf.function(gradient) if compiled else gradient)(tf.constant(x)).numpy()[0]
    for entry, direction in zip(found, np.eye(3)):
        weights = np.array([-1, 9, -45, 45, -9, 1]) / (60 * h)
        along = [laplacian(x + k * h * direction) for k in (-3, -2, -1, 1, 2, 3)]
        assert entry == pytest.approx(weights @ along, rel=1e-5, abs=1e-6)
