"""Gauss-Newton steps in the space of residuals, against dense least squares in float64."""

import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import hvp

RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((80, 2))
TARGETS = np.sin(INPUTS[:, :1])


def network(dtype, widths):
    sizes = [2, *widths, 1]
    rng = np.random.default_rng(1)
    shapes = list(zip(sizes, sizes[1:]))
    weights = [tf.Variable(rng.standard_normal(s) / np.sqrt(s[0]), dtype=dtype) for s in shapes]

    def model(x):
        for weight in weights[:-1]:
            x = tf.tanh(x @ weight)
        return x @ weights[-1]

    return model, weights


def squares(predictions, y):
    return tf.reduce_mean((predictions - y) ** 2)


def softplus(predictions, y):
    """Curved differently at each prediction, and never flat."""
    return tf.reduce_mean(tf.nn.softplus(predictions) - tf.cast(y > 0, y.dtype) * predictions)


def dense_step(pair, weights, data, damping):
    """Return the step in the space of variables, and its matrix, in float64."""
    G = hvp.GaussNewtonOperator(*pair, weights, data)
    matrix = G.to_dense().astype(np.float64) + damping * np.eye(G.shape[0])
    return -np.linalg.solve(matrix, G.gradient.astype(np.float64)), matrix


def in_residuals(pair, weights, data=(INPUTS, TARGETS), **options):
    return hvp.NewtonCG(pair, weights, data, curvature="gauss-newton", space="residuals", **options)


def flat(weights):
    return np.concatenate([weight.numpy().ravel() for weight in weights]).astype(np.float64)


def taken(newton, weights):
    before = flat(weights)
    step = newton.step()
    assert step.accepted
    return flat(weights) - before


# More variables than residuals, and fewer.
@pytest.mark.parametrize("widths", [(40, 40), (3,)], ids=["wide", "tall"])
@pytest.mark.parametrize("output_loss", [squares, softplus])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.few(1)
def test_a_step_is_that_of_the_dense_matrix(widths, output_loss, dtype):
    model, weights = network(dtype, widths)
    data = INPUTS.astype(dtype), TARGETS.astype(dtype)
    damping = 0.1
    expected, _ = dense_step((model, output_loss), weights, data, damping)
    newton = in_residuals(
        (model, output_loss),
        weights,
        data,
        radius=1e6,
        damping=damping,
    )
    rtol = 1e-3 if dtype == "float32" else 1e-9
    error = np.linalg.norm(taken(newton, weights) - expected)
    assert error <= rtol * np.linalg.norm(expected)


@pytest.mark.parametrize("options", [{}, {"engine": "tape"}, {"batch_size": 30}])
@pytest.mark.few(1)
def test_a_step_does_not_depend_on_the_engine_or_on_batches(options):
    model, weights = network("float64", (5,))
    expected, _ = dense_step((model, squares), weights, (INPUTS, TARGETS), 0.1)
    newton = in_residuals(
        (model, squares),
        weights,
        radius=1e6,
        damping=0.1,
        **options,
    )
    np.testing.assert_allclose(taken(newton, weights), expected, rtol=1e-7, atol=1e-10)


def test_a_loss_without_data():
    w = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64)
    pair = (lambda: w**2, lambda r: tf.reduce_sum((r - 1.0) ** 2) / 2)
    newton = hvp.NewtonCG(pair, w, curvature="gauss-newton", space="residuals", radius=1e6)
    # Newton's method for w**2 = 1, whose Jacobian is diag(2 w).
    expected = -(np.array([1.0, 4.0, 9.0]) - 1) / np.array([2.0, 4.0, 6.0])
    np.testing.assert_allclose(taken(newton, [w]), expected, rtol=1e-10)


def test_a_step_on_the_boundary_minimizes_the_model_there():
    model, weights = network("float64", (40, 40))
    g_step, matrix = dense_step((model, squares), weights, (INPUTS, TARGETS), 0.0)
    del g_step
    gradient = hvp.GaussNewtonOperator(model, squares, weights, (INPUTS, TARGETS)).gradient
    newton = in_residuals(
        (model, squares),
        weights,
        radius=0.05,
    )
    step = taken(newton, weights)
    assert 0.04 < np.linalg.norm(step) < 0.06
    # A multiple of the step is missing from the equation of the free minimizer.
    missing = -(matrix @ step + gradient)
    multiplier = missing @ step / (step @ step)
    assert multiplier > 0
    np.testing.assert_allclose(missing, multiplier * step, atol=1e-9 * np.linalg.norm(missing))


def test_momentum_departs_from_the_previous_step():
    model, weights = network("float64", (40, 40))
    newton = in_residuals(
        (model, squares),
        weights,
        radius=1e6,
        damping=1.0,
        momentum=0.5,
    )
    first = taken(newton, weights)
    G = hvp.GaussNewtonOperator(model, squares, weights, (INPUTS, TARGETS))
    matrix, gradient, damping = G.to_dense(), G.gradient, newton.damping
    second = taken(newton, weights)
    # The gradient of the model plus damping / 2 times the squared distance from half the step.
    residual = matrix @ second + gradient + damping * (second - 0.5 * first)
    assert np.linalg.norm(residual) <= 1e-9 * np.linalg.norm(gradient)


def test_geodesic_acceleration_is_the_second_order_correction():
    model, weights = network("float64", (6,))
    pair, data, damping = (model, squares), (INPUTS, TARGETS), 5.0
    velocity, matrix = dense_step(pair, weights, data, damping)
    J = hvp.JacobianOperator(lambda x, y: model(x), weights, data).to_dense()
    start, h = flat(weights), 1e-3

    def predictions(at):
        ends = np.cumsum([w.shape.num_elements() for w in weights])[:-1]
        for weight, part in zip(weights, np.split(at, ends)):
            weight.assign(part.reshape(weight.shape))
        return model(INPUTS).numpy().ravel()

    values = [predictions(start + t * velocity) for t in (-h, 0, h)]
    second = (values[0] - 2 * values[1] + values[2]) / h**2
    predictions(start)
    correction = -np.linalg.solve(matrix, J.T @ second * 2 / len(second)) / 2
    newton = in_residuals(
        pair,
        weights,
        data,
        radius=1e6,
        damping=damping,
        geodesic=True,
    )
    step = taken(newton, weights)
    assert np.linalg.norm(correction) > 1e-3 * np.linalg.norm(velocity)
    np.testing.assert_allclose(step - velocity, correction, atol=1e-5 * np.linalg.norm(velocity))


def test_a_fit_ends_where_scipy_does():
    x = np.linspace(0, 4, 70)
    y = 2.5 * np.exp(-1.3 * x) + 0.5 + 0.01 * np.cos(50 * x)
    w = tf.Variable([1.0, 1.0, 0.0], dtype=tf.float64)

    def curve(x):
        return w[0] * tf.exp(-w[1] * x) + w[2]

    newton = hvp.NewtonCG((curve, squares), w, (x, y), curvature="gauss-newton", space="residuals")
    assert newton.minimize(gtol=1e-10).success
    expected, _ = scipy.optimize.curve_fit(
        lambda x, a, b, c: a * np.exp(-b * x) + c, x, y, [1.0, 1.0, 0.0]
    )
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-6)


def test_several_data_sets_with_weights():
    model, weights = network("float64", (5,))
    at, value = np.array([[0.5, 1.0], [-1.0, 0.3], [2.0, -0.7]]), np.ones((3, 1))
    together = np.concatenate([INPUTS, at]), np.concatenate([TARGETS, value])
    scale = np.concatenate([np.full((80, 1), 1 / 80), np.full((3, 1), 7 / 3)])

    def whole(p, y):
        return tf.reduce_sum(scale * (p - y) ** 2)

    expected, _ = dense_step((model, whole), weights, together, 10.0)
    newton = in_residuals(
        {"inside": (model, squares), "edge": (model, squares)},
        weights,
        {"inside": (INPUTS, TARGETS), "edge": (at, value)},
        weight={"edge": 7.0},
        radius=1e6,
        damping=10.0,
    )
    np.testing.assert_allclose(taken(newton, weights), expected, rtol=1e-7, atol=1e-10)


def test_samples_decrease_the_loss():
    model, weights = network("float64", (10, 10))
    newton = in_residuals(
        (model, squares),
        weights,
        hessian_batch_size=40,
        gradient_batch_size=60,
        damping=1e-3,
        momentum=0.8,
    )
    before = squares(model(INPUTS), TARGETS).numpy()
    for _ in range(15):
        newton.step()
    assert squares(model(INPUTS), TARGETS).numpy() < before / 10


def test_a_checkpoint_continues_with_the_same_steps(tmp_path):
    def made():
        model, weights = network("float64", (10,))
        method = in_residuals(
            (model, squares),
            weights,
            momentum=0.5,
        )
        return method, weights

    newton, weights = made()
    for _ in range(3):
        newton.step()
    path = tf.train.Checkpoint(optimizer=newton).write(str(tmp_path / "state"))
    newton.step()
    other, restored = made()
    tf.train.Checkpoint(optimizer=other).read(path)
    other.step()
    np.testing.assert_allclose(flat(restored), flat(weights), rtol=1e-12)


def mixing(x):
    return x - tf.reduce_mean(x, axis=0)


@pytest.mark.parametrize(
    ("output_loss", "words"),
    [
        (lambda p, y: tf.reduce_mean(tf.abs(p - y)), ["zero"]),
        (lambda p, y: tf.reduce_mean(-((p - y) ** 2)), ["negative"]),
        (lambda p, y: tf.reduce_mean(p - y) ** 2, ["not diagonal"]),
        (lambda p, y: tf.reduce_mean((p - y) ** 2) - tf.reduce_sum(p - y) ** 2, ["not diagonal"]),
    ],
)
def test_refuses_losses_without_residuals(output_loss, words):
    model, weights = network("float64", (5,))
    newton = in_residuals(
        (model, output_loss),
        weights,
    )
    before = flat(weights)
    with pytest.raises(hvp.InvalidLossError) as error:
        newton.step()
    assert all(word in str(error.value) for word in words)
    np.testing.assert_array_equal(flat(weights), before)


def test_refuses_a_model_that_mixes_examples():
    model, weights = network("float64", (5,))
    newton = in_residuals(
        (lambda x: mixing(model(x)), squares),
        weights,
    )
    with pytest.raises(hvp.InvalidLossError, match="examples independently"):
        newton.step()


def test_targets_that_are_subtracted_each_from_each():
    """Predictions of shape (n, 1) and targets of shape (n,), which TensorFlow broadcasts."""
    rng = np.random.default_rng(0)
    w = tf.Variable(np.zeros((3, 1)))
    x, y = rng.standard_normal((8, 3)), rng.standard_normal(8)

    def newton(loss, y):
        pair = (lambda x: x @ w), loss
        return hvp.NewtonCG(pair, w, (x, y), curvature="gauss-newton", space="residuals")

    def broadcast(p, y):
        return tf.reduce_mean((p - y) ** 2)

    with pytest.raises(hvp.InvalidLossError, match=r"\(n, 1\).*\(n,\).*np.newaxis"):
        newton(broadcast, y).step()
    assert not w.numpy().any()
    newton(lambda p, y: tf.reduce_mean((p[:, 0] - y) ** 2), y).minimize()
    expected = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(w[:, 0], expected, rtol=1e-6)
    w.assign(0 * w)
    newton(broadcast, y[:, np.newaxis]).minimize()  # the remedy
    np.testing.assert_allclose(w[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"space": "residual"}, ["space", "'residual'"]),
        ({"space": "residuals"}, ["curvature='gauss-newton'"]),
        ({"momentum": 0.5}, ["space='residuals'"]),
        ({"momentum": 1.0}, ["momentum"]),
        (
            {
                "space": "residuals",
                "curvature": "gauss-newton",
                "preconditioner": "nystrom",
                "regularization": lambda: 0.0,
            },
            ["preconditioner", "egularization"],
        ),
    ],
)
def test_refuses_arguments(options, words):
    model, weights = network("float64", (5,))
    pair = (model, squares)
    loss = pair if options.get("curvature") else lambda x, y: squares(model(x), y)
    with pytest.raises(hvp.HvpError) as error:
        hvp.NewtonCG(loss, weights, (INPUTS, TARGETS), **options)
    assert all(word in str(error.value) for word in words)


def test_refuses_what_is_too_large_before_it_is_computed():
    w = tf.Variable(tf.zeros([5000], tf.float64))
    x = np.ones(5000)
    pair = (lambda x: w * x, lambda p, y: tf.reduce_mean((p - y) ** 2))
    newton = hvp.NewtonCG(pair, w, (x, x), curvature="gauss-newton", space="residuals")
    with pytest.raises(hvp.TooLargeError, match="5000 residuals of 5000 variables"):
        newton.step()


def test_weights_of_any_type_of_number():
    model, weights = network("float64", (5,))
    newton = in_residuals(
        {"all": (model, squares)},
        weights,
        {"all": (INPUTS, TARGETS)},
        weight={"all": np.float32(2)},
        damping=1.0,
    )
    assert newton.step().accepted


def test_a_model_of_two_inputs_says_how_they_are_given():
    x, t, wanted = np.random.default_rng(0).standard_normal((3, 20))
    w = tf.Variable(np.ones(2))
    pair = (lambda x, t: x * w[0] + t * w[1]), squares
    with pytest.raises(hvp.InvalidDataError, match=r"\(\(a, b\), y\)"):
        in_residuals(pair, w, (x, t, wanted))
    assert in_residuals(pair, w, ((x, t), wanted)).minimize().success  # the remedy
