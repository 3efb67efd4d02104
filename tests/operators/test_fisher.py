"""Fisher matrices, against closed forms and Jacobians example by example."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import FUZZ, crossed, random, relative_error
from tests.operators.test_gauss_newton import (
    WAYS,
    dense_gauss_newton,
    make,
    softmax_curvature,
    softmax_loss,
)

COUNTS = np.array([[0.0, 2, 1], [1, 0, 0], [3, 1, 0], [0, 0, 1], [2, 2, 0], [1, 0, 4], [0, 1, 0]])


def bernoulli_loss(logits, y):
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))


def gaussian_loss(means, y):
    return tf.reduce_mean((means - y) ** 2)


def poisson_loss(logs, y):
    return tf.reduce_mean(tf.reduce_sum(tf.exp(logs) - y * logs, axis=-1))


def variance_of_coins(logits):
    p = 1 / (1 + np.exp(-logits))
    return p * (1 - p)


# The loss, the targets, and the Fisher matrix of one example in its three predictions, times what
# the loss multiplies the negative log-likelihood by.
LIKELIHOODS = {
    "categorical": (softmax_loss, np.arange(7) % 3, softmax_curvature),
    "bernoulli": (bernoulli_loss, COUNTS % 2, lambda p: np.diag(variance_of_coins(p)) / 3),
    "gaussian": (gaussian_loss, random(8, 7, 3, dtype="float64"), lambda p: 2 * np.eye(3) / 3),
    "poisson": (poisson_loss, COUNTS, lambda p: np.diag(np.exp(p))),
}


def gradients_of_examples(model, loss, x, y):
    """The gradient of each example's own loss, as rows."""
    rows = []
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            value = loss(model(x[i : i + 1]), y[i : i + 1])
        parts = tape.gradient(value, model.trainable_variables)
        rows.append(np.concatenate([part.numpy().ravel() for part in parts]))
    return np.array(rows)


def options_of(way, build):
    """Return the options of one of `WAYS`; a limit is such that one batch of four is kept."""
    options = dict(WAYS[way])
    if "memory_limit" in options:
        with build(batch_size=2) as F:
            options["memory_limit"] = int(4.6 * F.stats.residual_bytes / 4)
    return options


def compare(F, want, options):
    n = len(want)
    v = random(1, n, dtype="float64")
    assert relative_error(F @ np.eye(n)[:, 0], want[:, 0]) < 1e-12
    assert relative_error(F.to_dense(), want) < 1e-12
    assert relative_error(F.damped(0.5) @ v, want @ v + 0.5 * v) < 1e-12
    assert relative_error(tf.function(F.product)(tf.constant(v)), want @ v) < 1e-12
    assert F.stats.engine == options.get("engine", "graph")
    if "memory_limit" in options:
        assert F.stats.batches_kept < F.stats.batches


@pytest.mark.parametrize(
    ("name", "way"), crossed(["dense", "images", "dense", "lstm"], [*WAYS, "devices"])
)
@pytest.mark.few(1)
def test_the_empirical_matrix_is_made_of_gradients_of_examples(name, way):
    model, x, y = make(name)
    G = gradients_of_examples(model, softmax_loss, x, y)

    def build(**options):
        return hvp.FisherOperator(model, softmax_loss, model, (x, y), kind="empirical", **options)

    options = {"devices": ["CPU:0", "CPU:1"]} if way == "devices" else options_of(way, build)
    with build(**options) as F:
        compare(F, G.T @ G / len(x), options)
        assert relative_error(F.gradient, G.mean(axis=0)) < 1e-12


@pytest.mark.parametrize(
    ("likelihood", "way"), crossed(LIKELIHOODS, [*WAYS, "devices", "one batch"])
)
@pytest.mark.few(1)
def test_the_expected_matrix_has_a_closed_form(likelihood, way):
    loss, y, curvature = LIKELIHOODS[likelihood]
    model, x, _ = make("dense")
    want = dense_gauss_newton(model, x, curvature)

    def build(**options):
        return hvp.FisherOperator(model, loss, model, (x, y), likelihood=likelihood, **options)

    options = {"devices": ["CPU:0", "CPU:1"]} if way == "devices" else options_of(way, build)
    with build(**options) as F:
        compare(F, want, options)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.few(1)
@pytest.mark.long
def test_drawn_matrices_are_unbiased(likelihood):
    """The mean over seeds is within four of its standard errors, for each of ten vectors."""
    loss, y, curvature = LIKELIHOODS[likelihood]
    model, x, _ = make("dense")
    dense = dense_gauss_newton(model, x, curvature)
    V = random(2, len(dense), 10, dtype="float64")
    want = np.einsum("ij,ij->j", V, dense @ V)
    found = []
    for seed in range(200 if FUZZ else 12):
        F = hvp.FisherOperator(
            model,
            loss,
            model,
            (x, y),
            kind="monte-carlo",
            likelihood=likelihood,
            samples=1 + seed % 3,
            seed=seed,
            engine="tape",
        )
        found.append(np.einsum("ij,ij->j", V, F @ V))
    error = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    assert (error > 0.01 * want).all()
    assert (np.abs(np.mean(found, axis=0) - want) < (4 if FUZZ else 6) * error).all()


@pytest.mark.parametrize(
    ("likelihood", "way"), crossed(LIKELIHOODS, ["one batch", "tape", *list(WAYS)[2:]])
)
@pytest.mark.few(1)
@pytest.mark.long
def test_standard_errors_are_those_of_the_draws(likelihood, way):
    """Errors divided by standard errors have Student's t-distribution, with 7 degrees of freedom.

    Products of different vectors and entries are not independent, hence the tolerance: of 99 % of
    all entries, at most one in fifteen may be outside.
    """
    loss, y, curvature = LIKELIHOODS[likelihood]
    model, x, _ = make("dense")
    dense = dense_gauss_newton(model, x, curvature)
    V = random(2, len(dense), 5, dtype="float64")
    options = {"kind": "monte-carlo", "likelihood": likelihood, "samples": 30}

    def build(**more):
        return hvp.FisherOperator(model, loss, model, (x, y), **options, **more)

    found = []
    for seed in range(20 if FUZZ else 3):
        with build(seed=seed, **options_of(way, build)) as F:
            errors = F.standard_error(V)
            assert errors.shape == V.shape
            found.append((F @ V - dense @ V) / errors)
            if not seed:
                assert relative_error(F.standard_error(V[:, 0]), errors[:, 0]) < 1e-10
                assert relative_error(F.damped(1.0).standard_error(V), errors) < 1e-10
    within = np.mean(np.abs(found) < 3.499)
    assert within > 1 - 1 / 15
    assert 0.6 < np.std(np.clip(found, -3.5, 3.5)) < 1.5


def test_standard_errors_that_are_refused():
    model, x, y = make("dense")
    arguments = model, softmax_loss, model, (x, y)
    options = {"likelihood": "categorical"}
    F = hvp.FisherOperator(*arguments, **options)
    with pytest.raises(hvp.HvpError, match="no sampling error"):
        F.standard_error(np.ones(F.shape[0]))
    options["kind"] = "monte-carlo"
    with hvp.FisherOperator(*arguments, on_stale="ignore", **options) as F:
        with pytest.raises(hvp.HvpError, match="at least 2"):
            F.standard_error(np.ones(F.shape[0]), replicates=1)
        with pytest.raises(hvp.InvalidVectorError):
            F.standard_error(np.ones(3))
        model.trainable_variables[0].assign_add(np.ones((4, 5)))
        with pytest.raises(hvp.StaleOperatorError, match="present values only"):
            F.standard_error(np.ones(F.shape[0]))
    with pytest.raises(hvp.ClosedOperatorError):
        F.standard_error(np.ones(F.shape[0]))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.few(1)
def test_many_draws_approach_the_expectation(likelihood):
    loss, y, curvature = LIKELIHOODS[likelihood]
    model, x, _ = make("dense")
    want = dense_gauss_newton(model, x, curvature)
    options = {"kind": "monte-carlo", "likelihood": likelihood}
    errors = []
    for samples in (100, 10_000):
        with hvp.FisherOperator(model, loss, model, (x, y), samples=samples, **options) as F:
            errors.append(relative_error(F.to_dense(), want))
    assert 0 < errors[0] < 0.3
    assert errors[1] < 0.03


@pytest.mark.parametrize("way", ["one batch", "tape", "batches evaluated for each product"])
@pytest.mark.few(1)
def test_draws_are_the_same_in_all_products(way):
    model, x, y = make("dense")

    def build(seed=3, **options):
        return hvp.FisherOperator(
            model,
            softmax_loss,
            model,
            (x, y),
            kind="monte-carlo",
            likelihood="categorical",
            seed=seed,
            **options,
        )

    with build(**options_of(way, build)) as F:
        dense = F.to_dense()
        assert relative_error(dense, dense.T) < 1e-12
        assert np.linalg.eigvalsh(dense).min() > -1e-12
        v = random(1, len(dense), dtype="float64")
        assert relative_error(F @ v, dense @ v) < 1e-12
        F.refresh()
        assert relative_error(F @ v, dense @ v) < 1e-12
        assert relative_error(build(seed=4) @ v, dense @ v) > 1e-3
    # Batches with other data have other draws: the second of these is the first, the other order.
    if way == "one batch":
        twice = np.concatenate([x, x]), np.concatenate([y, y])
        F = hvp.FisherOperator(
            model, softmax_loss, model, twice, kind="monte-carlo", likelihood="categorical", seed=3
        )
        assert relative_error(F @ v, dense @ v) > 1e-3


@pytest.mark.long
def test_several_predictions_and_sequences():
    """Two predictions with weights of their own, and one class for each of two tokens."""
    w = tf.Variable(random(0, 4, 6, dtype="float64", scale=0.5))
    x = random(1, 5, 4, dtype="float64")
    labels, numbers = np.arange(10).reshape(5, 2) % 2, random(2, 5, 2, dtype="float64")

    def model(x):
        hidden = x @ w
        return {"tokens": tf.reshape(hidden[:, :4], [-1, 2, 2]), "means": hidden[:, 4:]}

    def loss(predictions, labels, numbers):
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, predictions["tokens"])
        return tf.reduce_mean(each) + 3 * gaussian_loss(predictions["means"], numbers)

    names = {"tokens": "categorical", "means": "gaussian"}
    with tf.GradientTape(persistent=True) as tape:
        predictions = model(x)
    J = tape.jacobian(predictions["tokens"], w).numpy().reshape(10, 2, 24)
    B = [softmax_curvature(p) / 10 for p in predictions["tokens"].numpy().reshape(10, 2)]
    want = sum(j.T @ b @ j for j, b in zip(J, B))
    J = tape.jacobian(predictions["means"], w).numpy().reshape(10, 24)
    want = want + 6 / 10 * J.T @ J
    data = x, labels, numbers
    for options in ({}, {"batch_size": 2}):
        with hvp.FisherOperator(model, loss, w, data, likelihood=names, **options) as F:
            assert relative_error(F.to_dense(), want) < 1e-12
    G = []
    for i in range(5):
        with tf.GradientTape() as tape:
            value = loss(model(x[i : i + 1]), labels[i : i + 1], numbers[i : i + 1])
        G.append(tape.gradient(value, w).numpy().ravel())
    G = np.array(G)
    with hvp.FisherOperator(model, loss, w, data, kind="empirical", batch_size=2) as F:
        assert relative_error(F.to_dense(), G.T @ G / 5) < 1e-12
    with pytest.raises(hvp.HvpError, match="3 likelihoods are named for 2 predictions"):
        hvp.FisherOperator(model, loss, w, data, likelihood=["gaussian"] * 3)


def test_a_loss_that_divides_by_something_else():
    """Sequences of different lengths, and a mean over tokens."""
    w = tf.Variable(random(0, 3, dtype="float64"))
    x, lengths = random(1, 6, 3, dtype="float64"), np.array([1.0, 4, 2, 2, 5, 3])
    y = random(2, 6, dtype="float64")

    def loss(p, y, lengths):
        return tf.reduce_sum(lengths * (p - y) ** 2) / tf.reduce_sum(lengths)

    def weight(x, y, lengths):
        return tf.reduce_sum(lengths)

    model = lambda x: tf.tensordot(x, w, 1)  # noqa: E731
    data = x, y, lengths
    residuals = 2 * lengths * (x @ w.numpy() - y)
    want = (x.T * residuals**2) @ x / lengths.sum()
    for options in ({}, {"batch_size": 4}):
        F = hvp.FisherOperator(model, loss, w, data, kind="empirical", weight=weight, **options)
        assert relative_error(F.to_dense(), want) < 1e-12
    with pytest.raises(hvp.InvalidLossError, match=r"not a mean.*pass weight"):
        hvp.FisherOperator(model, loss, w, data, kind="empirical")
    # The mean of the first example alone is 0 / 0 if it has no weight.
    masked = x, y, lengths * (np.arange(len(x)) > 0)
    residuals = 2 * masked[2] * (x @ w.numpy() - y)
    want = (x.T * residuals**2) @ x / masked[2].sum()
    F = hvp.FisherOperator(model, loss, w, masked, kind="empirical", weight=weight)
    assert relative_error(F.to_dense(), want) < 1e-12


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize(
    ("loss", "likelihood", "said"),
    [
        (lambda p, y: tf.reduce_sum((p - y) ** 2), "gaussian", "not a mean of a loss"),
        (lambda p, y: tf.reduce_mean((p - y[::-1]) ** 2), "gaussian", "not a mean of a loss"),
        (lambda p, y: tf.reduce_mean(tf.abs(p - y) ** 3), "gaussian", "a gaussian distribution"),
        (bernoulli_loss, "poisson", "a poisson distribution"),
        (gaussian_loss, "bernoulli", "not a positive multiple of the Fisher matrix"),
        (poisson_loss, "categorical", "hvp.GaussNewtonOperator"),
        (lambda p, y: tf.reduce_mean(y[:, :1] * (p - y) ** 2), "gaussian", "same weight"),
    ],
)
@pytest.mark.few(3)
def test_other_losses_are_refused(loss, likelihood, said, engine):
    model, x, _ = make("dense")
    y = np.abs(random(8, 7, 3, dtype="float64"))
    for kind in ("type-2", "monte-carlo"):
        with pytest.raises(hvp.InvalidLossError, match=said):
            hvp.FisherOperator(
                model, loss, model, (x, y), kind=kind, likelihood=likelihood, engine=engine
            )


def test_a_loss_that_becomes_another_is_refused_at_a_refresh():
    power = tf.Variable(2.0, dtype=tf.float64, trainable=False)
    model, x, _ = make("dense")
    y = random(8, 7, 3, dtype="float64")
    loss = lambda p, y: tf.reduce_mean(tf.abs(p - y) ** power)  # noqa: E731
    F = hvp.FisherOperator(model, loss, model, (x, y), likelihood="gaussian", on_stale="refresh")
    v = np.ones(F.shape[0])
    F @ v
    power.assign(3.0)
    with pytest.raises(hvp.InvalidLossError, match="a gaussian distribution"):
        F @ v


@pytest.mark.parametrize("kind", ["type-2", "empirical"])
@pytest.mark.few(1)
def test_certain_predictions_in_float32(kind):
    """Rounding errors are all there is, and are no other loss."""
    w = tf.Variable(random(0, 4, 3))
    x = random(1, 9, 4)
    y = np.argmax(x @ w.numpy(), axis=1)
    for scale in (1.0, 10.0, 30.0, 1000.0):
        model = lambda x, scale=scale: scale * (x @ w)  # noqa: E731
        options = {} if kind == "empirical" else {"likelihood": "categorical"}
        with hvp.FisherOperator(model, softmax_loss, w, (x, y), kind=kind, **options) as F:
            assert np.isfinite(F @ np.ones(12)).all()


def test_arguments_that_are_refused():
    model, x, y = make("dense")

    def build(data=(x, y), **options):
        return hvp.FisherOperator(model, softmax_loss, model, data, **options)

    for options, said in (
        ({"kind": "exact"}, "'type-2', 'monte-carlo', 'empirical'"),
        ({}, "the argument likelihood is None"),
        ({"likelihood": "normal"}, "'gaussian'"),
        ({"kind": "empirical", "likelihood": "categorical"}, "targets of the data"),
        ({"kind": "monte-carlo", "likelihood": "categorical", "samples": 0}, "samples is 0"),
        ({"likelihood": "categorical", "samples": 3}, "samples is 3.*kind='monte-carlo'"),
        ({"likelihood": "categorical", "seed": -1}, "seed is -1"),
        ({"likelihood": "categorical", "data": (x,)}, "data of 1 element"),
        ({"likelihood": "categorical", "data": None}, "There are no data"),
        ({"likelihood": "categorical", "data": {"x": x, "y": y}}, "The data are a dict"),
    ):
        with pytest.raises(hvp.HvpError, match=f"(?i){said}"):
            build(**options)
    with pytest.raises(hvp.InvalidLossError, match="returned a scalar"):
        hvp.FisherOperator(
            lambda x: tf.reduce_mean(model(x)),
            lambda p, y: p**2,
            model,
            (x, y),
            kind="empirical",
        )


def test_standard_errors_of_a_model_that_draws_are_refused():
    """Its own draws would count as those of the targets."""
    w = tf.Variable([[1.0, 0.5]])

    def model(x):
        return x @ w + tf.random.normal([len(x), 2])

    def loss(logits, y):
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

    data = np.ones((5, 1), "float32"), np.zeros(5, "int32")
    options = {"kind": "monte-carlo", "likelihood": "categorical"}
    with (
        hvp.FisherOperator(model, loss, w, data, **options) as F,
        pytest.raises(hvp.HvpError, match=r"draws random numbers.*with other targets"),
    ):
        F.standard_error(np.ones(2))
