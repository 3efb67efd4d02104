"""Checks pass correct operators, and report what is wrong with each wrong one."""

import contextlib
import functools
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import CASES, LONG_CASES, long, mlp, random

NAMES = [
    "products",
    "symmetry",
    "linearity",
    "blocks",
    "same each time",
    "differences",
    "connected",
    "operations",
    "curvature",
    "precision",
    "cost",
]


def outcomes(report):
    """Return the outcomes of a report by name."""
    return {finding.name: finding.outcome for finding in report.findings}


# The network itself is checked below, in all ways to build its operator; functions and branches are
# parts of other cases.
MUCH_LIKE_OTHERS = [*LONG_CASES, "mlp", "tf.function", "cond"]


@pytest.mark.parametrize(
    "case", [long(name) if name in MUCH_LIKE_OTHERS else name for name in CASES]
)
@pytest.mark.few(1)
def test_correct_operators_pass(case):
    problem = CASES[case]("float64")
    with hvp.HessianOperator(problem.loss, problem.variables, problem.data, damping=0.3) as H:
        before = [v.numpy() for v in problem.tensorflow_variables()]
        report = hvp.check(H)
        assert report.ok, str(report)
        names = [finding.name for finding in report.findings]
        assert [name for name in names if name != "examples"] == NAMES
        assert ("examples" in names) <= (problem.data is not None)
        verdicts = outcomes(report)
        assert verdicts["differences"] == "ok" or "kinks" in report["differences"].message
        assert verdicts["same each time"] == verdicts["symmetry"] == "ok"
        assert report.products == H.stats.products <= 20 + 100
        assert report.gradient_evaluations == 8
        assert H.stats.gradient_evaluations == 1
        report.raise_if_failed()
        for variable, value in zip(problem.tensorflow_variables(), before):
            np.testing.assert_array_equal(variable, value)
        H @ np.ones(H.shape[0])  # raises if the check has made the operator stale


@functools.cache
def double_precision_network():
    return mlp("float64")


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 4}, {"memory_limit": "1MiB"}, {"engine": "tape"}, long({"reduction": "sum"})],
    ids=str,
)
@pytest.mark.few(1)
def test_all_ways_to_build_an_operator_pass(options):
    problem = double_precision_network()
    with hvp.HessianOperator(problem.loss, problem.variables, problem.data, **options) as H:
        report = hvp.check(H)
        assert report.ok
        assert outcomes(report)["differences"] == "ok"


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_a_gradient_that_is_right_only_once_fails(engine):
    """The custom gradient holds a number back, so that the second derivative lacks a term."""
    good = tf.Variable(random(0, 4).astype("float64"), name="good")
    bad = tf.Variable(random(1, 4).astype("float64"), name="bad")

    @tf.custom_gradient
    def held(x):
        return tf.identity(x), lambda upstream: 0 * upstream

    @tf.custom_gradient
    def square(x):
        return x**2, lambda upstream: 2 * upstream * held(x)

    with hvp.HessianOperator(
        lambda: tf.reduce_sum(square(bad) + tf.sin(good)), [good, bad], engine=engine
    ) as H:
        report = hvp.check(H)
        assert not report.ok
        assert outcomes(report)["differences"] == "failed"
        assert "'bad'" in report["differences"].message
        assert "test_check.py, line" in report["operations"].message
        with pytest.raises(hvp.FailedCheckError, match="differences: central"):
            report.raise_if_failed()
        assert "FAILED" in str(report)


def test_examples_that_depend_on_each_other_are_noted():
    """Labels of shape (n,) and predictions of shape (n, 1) give n * n differences."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x, y = random(0, 12, 3), random(1, 12)

    def said(loss, *data, **options):
        with hvp.HessianOperator(loss, model, data, **options) as H:
            report = hvp.check(H)
        assert report.ok
        return report["examples"].outcome, report["examples"].message

    def mean_square(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    def total(x, y):
        return 2 * tf.reduce_sum((model(x) - y) ** 2)

    for options in ({}, {"batch_size": 5}, {"engine": "tape"}):
        right = said(mean_square, x, y[:, np.newaxis], **options)
        assert right == ("ok", "the loss of 4 examples is the mean of their losses")
    for options in ({}, {"engine": "tape"}):
        outcome, message = said(mean_square, x, y, **options)
        assert outcome == "warning"
        few = [0, 1, 2, 3]
        together = tf.reduce_mean((model(x[few]) - y[few]) ** 2)
        apart = tf.reduce_mean((model(x[few])[:, 0] - y[few]) ** 2)
        found = re.search(r"is ([\d.e+-]+), the mean of their losses ([\d.e+-]+)", message)
        assert [float(x) for x in found.groups()] == pytest.approx(
            [float(together), float(apart)], rel=1e-5
        )
    with pytest.raises(hvp.InvalidLossError, match=r"\(n,\) and \(n, 1\)"):
        said(mean_square, x, y, batch_size=5)
    assert said(total, x, y[:, np.newaxis])[0] == "note"


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.few(1)
def test_labels_that_are_sorted_or_rare_do_not_hide_it(batches):
    """The first four examples, and all but one, have the same label."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x = random(0, 400, 3)
    for y in (np.arange(400) >= 200, np.arange(400) == 333, np.arange(400) == 399):
        y = y.astype("float32")
        data = [(x, y)] if batches else (x, y)
        with hvp.HessianOperator(
            lambda x, y: tf.reduce_mean((model(x) - y) ** 2), model, data
        ) as H:
            report = hvp.check(H)
        assert report["examples"].outcome == "warning"
        assert "examples" in str(report).splitlines()[0]


def test_labels_that_happen_not_to_correlate_do_not_hide_it():
    """All four losses together are their mean, those of three are not."""
    w, x = tf.Variable([[1.0]]), np.array([[1.0], [1.0], [-1.0], [-1.0]], "float32")
    y = np.array([1.0, 0.0, 1.0, 0.0], "float32")
    with hvp.HessianOperator(lambda x, y: tf.reduce_mean((x @ w - y) ** 2), w, [(x, y)]) as H:
        report = hvp.check(H)
    assert report["examples"].outcome == "warning"


def test_a_random_loss_fails_and_the_layer_is_named():
    w = tf.Variable(tf.ones(5), name="w")
    fixed = tf.Variable(tf.ones(5), name="fixed")

    class Noise(tf.Module):
        def __call__(self):
            with tf.name_scope("noise"):
                return tf.random.normal([5]) * w**2

    noise = Noise()
    with hvp.HessianOperator(lambda: tf.reduce_sum(noise()) + tf.reduce_sum(fixed**2), [w, fixed]):
        pass
    H = hvp.HessianOperator(lambda: tf.reduce_sum(noise()) + tf.reduce_sum(fixed**2), [w, fixed])
    with H:
        report = hvp.check(H)
        text = report["same each time"].message
        assert outcomes(report)["same each time"] == "failed"
        assert "evaluated twice" in text
        assert "gradients in 'w' differ by" in text
        assert "fixed" not in text
        assert "RandomStandardNormal at 'noise" in text
        assert outcomes(report)["differences"] == "warning"


@pytest.mark.parametrize("units", [[1, 1, 1, 1, 1], [1e3, 1e-9, 1e3, 1e9, 50]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.few(1)
def test_a_loss_at_its_minimum_passes(units, dtype):
    """What is left of the gradient there is rounding, which another trace rounds otherwise."""
    rng, units = np.random.default_rng(1), np.array(units, dtype)
    t = np.linspace(0, 10, 200).astype(dtype)
    truth = np.array([3.0, 1.25, 1.5, 0.25, 0.4], dtype)
    p = tf.Variable(truth * units)

    def curve():
        a, k, b, m, c = tf.unstack(p / units)
        return a * tf.exp(-k * t) + b * tf.exp(-m * t) + c

    y = curve().numpy() + 0.03 * rng.standard_normal(t.size).astype(dtype)

    def loss():
        return tf.reduce_sum(((curve() - y) / 0.03) ** 2) / 2

    with hvp.HessianOperator(loss, p) as H:
        for _ in range(20):  # Newton steps, in the units in which the parameters are near one
            scaled = H.to_dense().astype("float64") * np.outer(units, units)
            p.assign_sub(units * np.linalg.solve(scaled, units * H.gradient).astype(dtype))
            H.refresh()
        report = hvp.check(H)
        assert outcomes(report)["same each time"] == "ok", str(report)
        assert outcomes(report)["differences"] != "failed", str(report)
        assert dtype == "float32" or outcomes(report)["differences"] == "ok", str(report)


def test_numpy_draws_that_become_constants_fail():
    rng, w = np.random.default_rng(0), tf.Variable(tf.ones(5), name="w")
    with hvp.HessianOperator(lambda: tf.reduce_sum(rng.standard_normal(5) * w**2), w) as H:
        report = hvp.check(H)
        assert "traced again" in report["same each time"].message
        assert not report.ok


def test_dropout_from_a_seed_is_the_same_each_time():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(0.5, name="drop"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(loss="mse")
    x, y = random(0, 6, 3), random(1, 6, 1)
    before = [v.numpy() for v in model.variables]
    with hvp.HessianOperator.from_keras(model, (x, y), training=True) as H:
        report = hvp.check(H)
    assert report.ok, str(report)
    assert outcomes(report)["operations"] == "note"
    assert "drop" in report["operations"].message
    for now, then in zip(model.variables, before):
        np.testing.assert_array_equal(now, then)


@contextlib.contextmanager
def modified(H, monkeypatch, *, single=None, rows=None):
    """Replace the operator's products with single vectors, or modify those with blocks."""
    held = inside.held(H)
    with monkeypatch.context() as patch:
        if single is not None:

            def apply_flat(v):
                return tf.constant(single(v.numpy()).astype(H.dtype))

            patch.setattr(held, "apply_if_current", apply_flat)
        if rows is not None:
            plain = held.apply
            patch.setattr(held, "apply", lambda v, **options: rows(plain(v, **options)))
        yield


def test_each_wrong_product_fails(monkeypatch):
    w = tf.Variable(np.linspace(1, 2, 12), name="w")
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w) as H:
        dense = H.to_dense()
        skew = np.triu(np.ones((12, 12)), 1) * 1e-3
        rng = np.random.default_rng(0)
        products = {
            "symmetry": lambda v: (dense + skew) @ v,
            "linearity": lambda v: dense @ v + 1e-3 * np.abs(v),
            "products": lambda v: dense @ v + 1e-3 * rng.standard_normal(12),
            "differences": lambda v: 1.001 * dense @ v,
        }
        for name, multiply in products.items():
            with modified(H, monkeypatch, single=multiply):
                assert outcomes(hvp.check(H))[name] == "failed", name
        with modified(H, monkeypatch, rows=lambda block: 1.001 * block):
            report = hvp.check(H)
            failures = [name for name, verdict in outcomes(report).items() if verdict == "failed"]
            assert failures == ["blocks"]
        with modified(H, monkeypatch, single=lambda v: dense @ v * np.nan):
            report = hvp.check(H)
            assert "not finite" in report["products"].message
            assert not report.ok
        assert hvp.check(H).ok


def test_variables_the_loss_does_not_read_are_named():
    w, other = tf.Variable([1.0, 2.0], name="w"), tf.Variable([1.0], name="other")
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4), [w, other]) as H:
        report = hvp.check(H)
    assert outcomes(report)["connected"] == "warning"
    assert "'other'" in report["connected"].message
    assert "singular" in report["curvature"].message


def test_a_loss_that_cannot_be_traced_is_reported():
    w = tf.Variable([1.0, 2.0], name="w")
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4) * float(w.numpy()[0] > 0), w) as H:
        report = hvp.check(H)
    assert outcomes(report)["operations"] == "warning"
    assert "traced" in report["operations"].message
    assert report.ok


def test_kinks_are_a_warning():
    w = tf.Variable(np.zeros(3), name="w")
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.abs(w - 1e-7)) + tf.reduce_sum(w**2), w) as H:
        report = hvp.check(H)
    assert outcomes(report)["differences"] == "warning"
    assert "kinks" in report["differences"].message


def quadratic(eigenvalues, dtype="float64"):
    w = tf.Variable(np.ones(len(eigenvalues), dtype))
    d = tf.constant(np.array(eigenvalues, dtype))
    return hvp.HessianOperator(lambda: tf.reduce_sum(d * w**2) / 2, w)


def test_curvature_and_precision():
    spectra = {
        "positive": [1.0, 2.0, 5.0],
        "indefinite": [-1.0, 2.0, 5.0],
        "negative": [-1.0, -2.0, -5.0],
        "singular": [0.0, 2.0, 5.0],
    }
    w, diagonal = tf.Variable(np.ones(3)), tf.Variable(np.ones(3), trainable=False)
    with hvp.HessianOperator(lambda: tf.reduce_sum(diagonal * w**2) / 2, w) as H:
        for kind, eigenvalues in spectra.items():
            diagonal.assign(eigenvalues)
            H.refresh()
            report = hvp.check(H)
            assert report["curvature"].message.startswith(kind)
            np.testing.assert_allclose(report.eigenvalues, sorted(eigenvalues), atol=1e-12)
    x = tf.Variable([-1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.nn.relu(3 * x)), x) as H:  # piecewise linear
        report = hvp.check(H)
        assert outcomes(report)["products"] == "warning"
        assert "exactly zero" in report["products"].message
    with quadratic([1e-4, 1.0, 2.0], "float32") as H:
        report = hvp.check(H, rtol=1e-6)
        assert outcomes(report)["precision"] == "warning"
        assert "float64" in report["precision"].message
        assert outcomes(hvp.check(H, rtol=0.1))["precision"] == "ok"
    # Ritz values lie inside the spectrum.
    values = np.linspace(-3, 7, 60)
    with quadratic(values) as H:
        report = hvp.check(H, max_products=50)
        assert -3 <= report.eigenvalues[0] < -2.9
        assert 6 < report.eigenvalues[-1] <= 7
        assert len(report.eigenvalues) == 10
        assert 17 < report.products <= 17 + 50


SPECTRA = {
    "definite": lambda rng, n: rng.uniform(1, 50, n),
    "badly conditioned": lambda rng, n: np.geomspace(1e-6, 1, n),
    "singular": lambda rng, n: np.r_[np.zeros(n // 3), rng.uniform(1, 9, n - n // 3)],
    "one tiny negative eigenvalue": lambda rng, n: np.r_[-1e-3, rng.uniform(1, 9, n - 1)],
    "a few hidden ones": lambda rng, n: np.r_[-0.05, -0.05, np.linspace(1, 1000, n - 2)],
    "indefinite": lambda rng, n: rng.standard_normal(n),
    "negative": lambda rng, n: -rng.uniform(1, 9, n),
    "zero": lambda rng, n: np.zeros(n),
}


@pytest.mark.parametrize("size", [3, 40, 90, 300, 1000])
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.few(1)
def test_no_sign_is_claimed_that_is_wrong(kind, size):
    """Forty matrices of known inertia, half of them larger than the number of products."""
    eigenvalues = SPECTRA[kind](np.random.default_rng(size), size)
    lowest, highest = eigenvalues.min(), eigenvalues.max()
    with quadratic(eigenvalues) as H:
        report = hvp.check(H)
    message = report["curvature"].message
    claims = {
        "positive": lowest > 0,
        "negative": highest < 0,
        "negative curvature": lowest < 0,
        "indefinite": lowest < 0 < highest,
        "singular up to rounding": lowest == 0,
        "not positive": lowest < 0,
    }
    claim = message.partition(":")[0]
    assert claim.startswith("no negative curvature found in ") or claims[claim], message
    if size <= 100:
        assert "all eigenvalues" in message
        np.testing.assert_allclose(report.eigenvalues, np.sort(eigenvalues), atol=1e-10 * 1000)
    else:
        assert "positive" not in message.replace("not positive", "")
    assert report.eigenvalues[0] >= lowest - 1e-9 * max(1, highest)
    if "damping above" in message:
        damping = float(message.partition("damping above ")[2].partition(",")[0])
        assert damping >= -lowest or "or below" in message


def test_the_sign_of_hidden_negative_eigenvalues_is_found():
    """Ten steps of Lanczos' method do not find these; a hundred products do."""
    with quadratic(np.r_[np.linspace(1, 1000, 998), -0.05, -0.05]) as H:
        text = str(hvp.check(H))
    assert "positive" not in text
    assert "products" in text


def test_variables_are_restored_after_an_interrupt(monkeypatch):
    w = tf.Variable([1.0, 2.0], dtype=tf.float64)  # float32 variables are not moved
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w) as H:
        calls = []

        def interrupt():
            calls.append(w.numpy())
            if len(calls) > 2:
                raise KeyboardInterrupt

        inside.before_each(monkeypatch, "gradient at a nearby point", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hvp.check(H)
        assert not np.array_equal(calls[-1], [1.0, 2.0])
        np.testing.assert_array_equal(w, [1.0, 2.0])


def test_invalid_arguments_are_refused_before_any_work():
    with quadratic([1.0, 2.0]) as H:
        for argument in (np.eye(2), H + H, None):
            with pytest.raises(hvp.HvpError, match="heck was given"):
                hvp.check(argument)
        for seed in ("a", -1, 1.5, True):
            with pytest.raises(hvp.HvpError, match="seed"):
                hvp.check(H, seed=seed)
        for rtol in (0, 2, "small", np.nan):
            with pytest.raises(hvp.HvpError, match="rtol"):
                hvp.check(H, rtol=rtol)
        with pytest.raises(hvp.HvpError, match="progress"):
            hvp.check(H, progress="yes")
        assert H.stats.products == 0
    with pytest.raises(hvp.ClosedOperatorError):
        hvp.check(H)


def test_the_report_is_a_table():
    with quadratic([1.0, 2.0]) as H:
        report = hvp.check(H, progress="always")
    lines = str(report).splitlines()
    assert repr(report) == str(report)
    assert "no problem found" in lines[0] or "nothing failed" in lines[0]
    assert len(lines) == 1 + len(NAMES)
    assert (
        len({line.index(finding.message) for line, finding in zip(lines[1:], report.findings)}) == 1
    )
    assert max(map(len, lines)) < 160
    with pytest.raises(KeyError):
        report["nothing"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_variables_of_very_different_scales(dtype):
    large = tf.Variable(np.array([1e6], dtype), name="large")
    small = tf.Variable(np.array([0.3, 0.5], dtype), name="small")

    def loss():
        return tf.reduce_sum(tf.sin(10 * small)) + tf.reduce_sum(large / 1e6) ** 2

    with hvp.HessianOperator(loss, [large, small]) as H:
        report = hvp.check(H)
        assert outcomes(report)["differences"] == "ok", str(report)


def test_a_seed_that_has_advanced_does_not_change_the_loss():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(4, activation="tanh")]
    )
    model.compile(loss="mse")
    x, y = random(0, 6, 3), random(1, 6, 4)
    with hvp.HessianOperator.from_keras(model, (x, y), training=True) as H:
        model(x, training=True)
        before = [v.numpy() for v in model.variables]
        report = hvp.check(H)
        assert outcomes(report)["same each time"] == "ok", str(report)
        assert outcomes(report)["differences"] == "ok", str(report)
        for now, then in zip(model.variables, before):
            np.testing.assert_array_equal(now, then)


def test_two_checks_in_two_threads():
    with quadratic([1.0, 2.0, 5.0]) as H:
        reports = []
        threads = [threading.Thread(target=lambda: reports.append(hvp.check(H))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [report.ok for report in reports] == [True, True]


def test_calls_inside_a_graph_are_refused():
    with quadratic([1.0, 2.0, 5.0]) as H:
        for use in (
            lambda v: hvp.check(H),
            lambda v: hvp.solve(H, v, method="exact"),
            lambda v: H @ v,
            lambda v: H.refresh(),
        ):
            with pytest.raises(hvp.GraphModeError):
                tf.function(use, autograph=False)(tf.ones(3, tf.float64))
        np.testing.assert_allclose(H @ np.ones(3), [1.0, 2.0, 5.0])


def test_operations_refused_at_some_values_are_noted():
    w = tf.Variable(np.array([0.5, 2.0, -3.0]))
    with hvp.HessianOperator(
        lambda: tf.reduce_sum(tf.math.segment_prod(w, [0, 0, 1]) ** 2), w
    ) as H:
        report = hvp.check(H)
        assert report.ok
        assert "refused at zeros: SegmentProd" in str(report)


def network(activation, **options):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(48, activation, **options) for _ in range(2)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])


@functools.cache
def relu_network():
    """Return a network whose weights no test changes."""
    return network("relu")


RELU = {
    "whole": {},
    "batches": {"batch_size": 60},
    "regularized": {"batch_size": 60, "regularization": True},
    "sum": {"reduction": "sum"},
    "tape": {"engine": "tape"},
}


# Batches without regularization are much like those with it, and a mean is much like a sum.
@pytest.mark.parametrize("way", [long(way) if way in ("batches", "whole") else way for way in RELU])
@pytest.mark.few(1)
def test_float32_models_with_kinks_get_a_verdict(way):
    model = relu_network()
    data, options = (random(0, 100, 6), random(1, 100, 1)), dict(RELU[way])
    if options.pop("regularization", False):
        options["regularization"] = lambda: tf.add_n(
            [tf.reduce_sum(w**4) for w in model.trainable_variables]
        )

    def loss(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    with hvp.HessianOperator(loss, model, data, **options) as H:
        report = hvp.check(H)
    assert report["differences"].outcome == "ok"
    assert "in float64" in report["differences"].message
    assert report.gradient_evaluations == 8


def test_kinks_do_not_hide_errors():
    model = relu_network()

    def loss(x):
        y = model(x)
        return tf.reduce_mean(tf.stop_gradient(y) * y**2)

    with hvp.HessianOperator(loss, model, (random(0, 100, 6),)) as H:
        assert hvp.check(H)["differences"].outcome == "failed"


def test_random_draws_are_the_same_in_float64():
    model = relu_network()
    drop = keras.layers.Dropout(0.5, seed=1)

    def loss(x):
        return tf.reduce_mean(drop(model(x), training=True) ** 2)

    with hvp.HessianOperator(loss, model, (random(0, 100, 6),)) as H:
        report = hvp.check(H)
    assert report["differences"].outcome == "ok"
    assert "in float64" in report["differences"].message


@pytest.mark.few(0)
def test_without_float64_the_warning_gives_a_recipe():
    model = relu_network()

    def loss(x):  # contains a loop, which is not evaluated in float64
        return tf.while_loop(
            lambda i, _: i < 1, lambda i, _: (i + 1, tf.reduce_mean(model(x) ** 2)), (0, 0.0)
        )[1]

    x = random(0, 1000, 6)
    with hvp.HessianOperator(loss, model, (x,)) as H:
        finding = hvp.check(H)["differences"]
    assert finding.outcome == "warning"
    assert "keras.config.set_dtype_policy('float64') before" in finding.message
    policy = keras.config.dtype_policy()
    try:  # follow the recipe
        keras.config.set_dtype_policy("float64")
        model = network("relu")
        x = x.astype("float64")
        with hvp.HessianOperator(lambda x: tf.reduce_mean(model(x) ** 2), model, (x,)) as H:
            assert H.dtype == np.float64
            assert hvp.check(H)["differences"].outcome == "ok"
    finally:
        keras.config.set_dtype_policy(policy)


def test_grouped_convolutions_have_no_float64_kernel():
    layers = [keras.layers.Conv2D(4, 2, groups=2, activation="tanh"), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((4, 4, 4)), *layers, keras.layers.Dense(1)])
    with hvp.HessianOperator(
        lambda x: tf.reduce_mean(model(x) ** 2), model, (random(0, 6, 4, 4, 4),)
    ) as H:
        finding = hvp.check(H)["differences"]
    assert finding.outcome == "ok"
    assert "in float64" not in finding.message


@pytest.fixture
def policy():
    """A function that sets the policy of Keras, which is restored in the end."""
    floatx, before = keras.config.floatx(), keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(before)


def report_of_a_network(*more):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(5, "tanh"), *more, keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *hidden])
    model.compile(loss="mse")
    data = random(0, 12, 3, dtype="float64"), random(1, 12, 2, dtype="float64")
    with hvp.HessianOperator.from_keras(model, data, training=True) as H:
        return H.dtype, hvp.check(H)


@pytest.mark.parametrize("name", ["mixed_bfloat16", "float64"])
def test_parts_in_a_narrower_type_are_noted_and_the_remedy_works(name, policy):
    """Keras computes losses in its default type, whatever the policy of the layers is."""
    policy(name)
    dtype, report = report_of_a_network()
    assert outcomes(report)["precision"] == "warning"
    assert f"narrower type than {dtype}" in report["precision"].message
    assert "failed" not in (outcomes(report)["differences"], outcomes(report)["examples"])
    assert outcomes(report)["examples"] != "warning"
    for call in re.findall(r"set_\w+\('float\d+'\)", report["precision"].message):
        function, _, argument = call.partition("(")
        getattr(keras.config, function)(argument.strip("')"))
    _, report = report_of_a_network()
    assert report.ok
    assert "narrower" not in report["precision"].message


def test_random_draws_are_not_taken_for_examples_that_depend_on_each_other():
    _, report = report_of_a_network(keras.layers.Dropout(0.5))
    assert outcomes(report)["examples"] == "note"
    assert "random numbers" in report["examples"].message
