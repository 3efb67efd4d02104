"""Fits against certified values of NIST, scipy, and closed forms."""

import re

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import tensorflow as tf

import hvp
from tests.cases import FUZZ
from tests.minimize.nist import SETS


@pytest.mark.parametrize("name", SETS)
@pytest.mark.few(1)
def test_certified_values_to_all_their_digits(name):
    regression = SETS[name]
    # NIST's second start is nearer; `make test-all` takes both.
    for start in regression.starts if FUZZ else regression.starts[:1]:
        result = hvp.fit(regression.model, regression.named(start), regression.data)
        assert result.success, result.message
        assert not result.notes
        values, errors = map(regression.named, (regression.values, regression.errors))
        assert result.parameters == pytest.approx(values, rel=1e-10)
        assert result.errors == pytest.approx(errors, rel=1e-10)
        assert result.chi_square == pytest.approx(regression.squares, rel=1e-10)
        assert result.distance < 1e-9 * result.chi_square


def line(x, slope, offset):
    return slope * x + offset


def points(size=40, noise=0.1):
    x = np.linspace(-1, 3, size)
    return x, 2 * x - 1 + noise * np.random.default_rng(0).standard_normal(size)


def test_a_line_has_its_closed_form():
    x, y = points()
    sigma = np.linspace(0.1, 0.3, len(x))
    result = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x, y), sigma=sigma)
    design = np.stack([x, np.ones_like(x)], axis=1) / sigma[:, np.newaxis]
    covariance = np.linalg.inv(design.T @ design)
    best = covariance @ design.T @ (y / sigma)
    np.testing.assert_allclose(list(result.parameters.values()), best, rtol=1e-12)
    np.testing.assert_allclose(result.covariance, covariance, rtol=1e-12)
    residuals = design @ best - y / sigma
    np.testing.assert_allclose(result.residuals, residuals, atol=1e-12)
    assert result.chi_square == pytest.approx(residuals @ residuals)
    assert result.degrees_of_freedom == 38
    value, error = result.predict([0.0, 10.0])
    rows = np.array([[0.0, 1.0], [10.0, 1.0]])
    np.testing.assert_allclose(value, rows @ best, rtol=1e-12)
    np.testing.assert_allclose(error, np.sqrt(((rows @ covariance) * rows).sum(1)), rtol=1e-12)
    assert result.correlation[0, 1] == pytest.approx(
        covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    )


def exponentials(x, heights, rates):
    return tf.linalg.matvec(tf.exp(-x[:, tf.newaxis] * rates), heights)


def test_parameters_of_very_different_sizes_need_no_scaling():
    x = np.linspace(0, 5e6, 400)
    heights, rates = np.array([3e3, 2e1, 0.3]), np.array([3e-5, 3e-6, 4e-7])
    y = exponentials(tf.constant(x), heights, rates).numpy()
    start = {"heights": 1.3 * heights, "rates": 0.8 * rates}
    result = hvp.fit(exponentials, start, (x, y), sigma=1e-6)
    assert result.success, result.message
    np.testing.assert_allclose(result.parameters["heights"], heights, rtol=1e-6)
    np.testing.assert_allclose(result.parameters["rates"], rates, rtol=1e-6)
    assert result.names[:2] == ["heights[0]", "heights[1]"]
    assert result.errors["rates"].shape == (3,)


def decay(x, height, rate, floor=0.0):
    return height * tf.exp(-rate * x) + floor


def decaying():
    x = np.linspace(0, 4, 60)
    return x, 2.5 * np.exp(-1.3 * x) + 0.02 * np.random.default_rng(1).standard_normal(60)


def test_it_agrees_with_curve_fit():
    x, y = decaying()
    for sigma in (None, 0.02):
        result = hvp.fit(decay, {"height": 1.0, "rate": 1.0, "floor": 0.1}, (x, y), sigma=sigma)
        best, covariance = scipy.optimize.curve_fit(
            lambda x, a, b, c: a * np.exp(-b * x) + c,
            x,
            y,
            [1.0, 1.0, 0.1],
            None if sigma is None else np.full(60, sigma),
            absolute_sigma=sigma is not None,
        )
        np.testing.assert_allclose(result.vector, best, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(result.covariance, covariance, rtol=1e-4)


def test_bounds_fixed_and_tied_parameters():
    x, y = decaying()
    start = {"height": 1.0, "rate": 1.0, "floor": 0.1}
    result = hvp.fit(decay, start, (x, y), bounds={"rate": (0.0, 1.2)}, fixed="floor")
    assert result.parameters["rate"] == 1.2
    assert result.parameters["floor"] == 0.1
    assert result.errors["rate"] == 0
    assert result.notes == ["rate is at its bound"]
    assert result.degrees_of_freedom == 59
    assert "floor" in repr(result)
    assert "bound" in repr(result)
    basis = np.exp(-1.2 * x)
    assert result.parameters["height"] == pytest.approx(basis @ (y - 0.1) / (basis @ basis))
    tied = hvp.fit(
        decay, {"height": 1.0, "rate": 1.0}, (x, y), tied={"floor": lambda p: p["height"] / 100}
    )
    assert tied.parameters["floor"] == pytest.approx(tied.parameters["height"] / 100)
    assert set(tied.errors) == {"height", "rate"}


def test_profiles_are_parabolas_where_the_model_is_linear():
    x, y = points()
    result = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x, y))
    values, increase = result.profile("slope", points=7)
    expected = ((values - result.parameters["slope"]) / result.errors["slope"]) ** 2
    np.testing.assert_allclose(increase, expected, atol=1e-8)
    with pytest.raises(hvp.HvpError, match="'hope'"):
        result.profile("hope")
    profile = result.profile("slope")
    for level, errors in ((0.6827, 1.00002), (0.95, 1.959964)):
        ends = result.parameters["slope"] + errors * result.errors["slope"] * np.array([-1, 1])
        np.testing.assert_allclose(profile.interval(level), ends, rtol=1e-6)
    with pytest.raises(hvp.HvpError, match=r"15\.1") as caught:
        profile.interval(0.9999)
    width = float(re.search(r"width=(\d+)", str(caught.value))[1])
    far = result.profile("slope", width=width).interval(0.9999)
    assert far[1] > profile.interval(0.95)[1]
    with pytest.raises(hvp.HvpError, match="level"):
        profile.interval(1.5)
    with pytest.raises(hvp.HvpError, match="'slope'"):
        result.profile("slope", points=1).interval()
    even = result.profile("slope", points=2).interval()
    np.testing.assert_allclose(even, profile.interval(), rtol=1e-6)


def test_an_interval_of_a_likelihood_is_that_of_its_closed_form():
    counts = np.array([0.0, 2.0, 1.0, 0.0, 1.0])
    mean, number = counts.mean(), len(counts)

    def loss(predictions, y):
        return tf.reduce_sum(predictions - y * tf.math.log(predictions))

    result = hvp.fit(
        lambda x, rate: rate * tf.ones_like(x), {"rate": 1.0}, (np.arange(5.0), counts), loss=loss
    )

    def increase(rate):
        return 2 * number * (rate - mean - mean * np.log(rate / mean))

    low, high = (
        scipy.optimize.brentq(lambda rate: increase(rate) - 1, *ends)
        for ends in ((0.1, mean), (mean, 5.0))
    )
    profile = result.profile("rate", width=1.5)
    np.testing.assert_allclose(profile.increase, increase(profile.values), atol=1e-9)
    found = profile.interval()
    np.testing.assert_allclose(found, (low, high), rtol=1e-3)
    assert high - mean > 1.2 * (mean - low)


def test_an_interval_ends_at_a_bound():
    x, y = points()
    slope = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x, y)).parameters["slope"]
    bounds = {"slope": (0, slope + 0.001)}
    result = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x, y), bounds=bounds)
    low, high = result.profile("slope").interval()
    assert high == slope + 0.001
    assert low == pytest.approx(slope - result.errors["slope"], rel=1e-4)


def test_profiles_without_one_minimum_have_no_interval():
    values = np.linspace(-1.0, 1.0, 5)
    for increase in ([4.0, 1.0, 0.0, 1.0, np.nan], [4.0, 1.0, 0.0, 1.0, 0.5]):
        profile = hvp.Profile("a", values, np.array(increase), 0.0, 0.5, (-np.inf, np.inf))
        with pytest.raises(hvp.HvpError, match="'a'"):
            profile.interval()


def test_a_profile_is_drawn():
    pytest.importorskip("matplotlib").use("Agg")
    x, y = points()
    ax = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x, y)).profile("slope").plot()
    profile, parabola = ax.lines[:2]
    expected = np.interp(profile.get_xdata(), parabola.get_xdata(), parabola.get_ydata())
    np.testing.assert_allclose(profile.get_ydata(), expected, atol=0.01)
    assert ax.get_xlabel() == "slope"


def test_profiles_keep_to_bounds():
    x, y = points()
    slope = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x, y)).parameters["slope"]
    near = slope + 0.01
    result = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x, y), bounds={"slope": (0, near)})
    values, _ = result.profile("slope", points=5)
    assert values.max() == near
    at = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x, y), bounds={"slope": (0, slope / 2)})
    with pytest.raises(hvp.HvpError, match="bound"):
        at.profile("slope")


def test_what_the_data_do_not_determine_is_said():
    x, y = points()
    result = hvp.fit(
        lambda x, a, b, c: (a + b) * x + c, {"a": 1.0, "b": 0.5, "c": 0.0}, (x, y), sigma=0.1
    )
    assert np.isinf(result.errors["a"])
    assert np.isinf(result.errors["b"])
    assert np.isfinite(result.errors["c"])
    assert len(result.notes) == 2
    assert result.parameters["a"] + result.parameters["b"] == pytest.approx(np.polyfit(x, y, 1)[0])
    unused = hvp.fit(lambda x, a, b: a * x, {"a": 1.0, "b": 0.5}, (x, y), sigma=0.1)
    assert np.isinf(unused.errors["b"])
    # Predictions that do not depend on it have errors all the same.
    alone = hvp.fit(lambda x, a: a * x, {"a": 1.0}, (x, y), sigma=0.1)
    np.testing.assert_allclose(unused.predict(x)[1], alone.predict(x)[1])
    assert np.isinf(result.predict(x[1:])[1]).all()
    exact = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x[:2], y[:2]))
    assert any("errors cannot be estimated" in note for note in exact.notes)


def test_least_squares_need_first_derivatives_alone():
    """TensorFlow has no second derivative of the incomplete gamma function by its order."""
    x = np.linspace(0.5, 4.0, 30)
    result = hvp.fit(
        lambda x, order: tf.math.igamma(order, x),
        {"order": 2.0},
        (x, scipy.special.gammainc(2.5, x)),
        sigma=0.1,
    )
    assert result.success
    assert result.parameters["order"] == pytest.approx(2.5, rel=1e-6)


def test_the_start_is_copied():
    x, y = points()
    start = np.array([1.0, 0.5])
    result = hvp.fit(
        lambda x, w, a: w[0] * x + w[1] + a, {"w": start, "a": 1.0}, (x, y), fixed=["w"]
    )
    start[:] = 100
    np.testing.assert_allclose(result.profile("a", points=3).values[1], result.parameters["a"])
    np.testing.assert_allclose(result.profile("a", points=3).increase[1], 0, atol=1e-9)


def test_a_figure():
    pytest.importorskip("matplotlib").use("agg")
    result = hvp.fit(decay, {"height": 1.0, "rate": 1.0}, decaying())
    assert len(result.plot()) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": np.ones(3)}, ["pair"]),
        ({"data": (np.ones(3), np.ones(4))}, ["shape"]),
        ({"parameters": [1.0, 2.0]}, ["dict"]),
        ({"parameters": {"height": np.inf, "rate": 1.0}}, ["finite"]),
        ({"bounds": {"hight": (0, 1)}}, ["'hight'", "'height'"]),
        ({"bounds": {"rate": (2, 3)}}, ["rate", "bounds"]),
        ({"bounds": {"rate": 1.0}}, ["bounds['rate']", "pair"]),
        ({"bounds": {"rate": (0, None)}}, ["bounds['rate']", "inf"]),
        ({"bounds": {"rate": (2, 1)}}, ["bounds['rate']", "(2, 1)"]),
        ({"fixed": ["width"]}, ["'width'"]),
        ({"parameters": {"height": 1.0, "speed": 1.0}}, ["speed", "rate"]),
        ({"tied": {"floor": "height / 2"}}, ["tied", "function"]),
        ({"data": (np.ones(3), np.array([1.0, np.nan, 2.0]))}, ["1 entries of y"]),
        ({"data": (np.ones(3), np.ones(3) * 1j)}, ["complex"]),
        ({"data": (np.ones(3), np.ma.array(np.ones(3), mask=[0, 1, 1]))}, ["2 of 3", "masked"]),
        ({"data": (np.ma.array(np.ones(3), mask=[0, 1, 0]), np.ones(3))}, ["1 of 3", "masked"]),
        ({"model": lambda x, height, rate: tf.complex(height * x, rate * x)}, ["complex"]),
        ({"bounds": {"rate": (1.0, 1.0)}}, ["bounds['rate']", "fixed=['rate']"]),
        ({"tied": {"rate": lambda p: 1.0}}, ["'rate'"]),
        ({"sigma": 0.0}, ["sigma"]),
        ({"sigma": np.ones(7)}, ["igma", "7"]),
        ({"model": 3}, ["int"]),
        ({"fixed": 3}, ["ixed is 3"]),
        ({"fixed": [["rate"]]}, ["['rate']"]),
        ({"tied": 3}, ["ied is int"]),
        ({"parameters": {"height": 1j, "rate": 1.0}}, ["1j", "real"]),
        ({"model": lambda x, height, rate: None}, ["model returns NoneType"]),
        ({"loss": lambda p, y: "a"}, ["loss returns str"]),
    ],
)
def test_refuses_arguments(change, words):
    arguments = {
        "model": decay,
        "parameters": {"height": 1.0, "rate": 1.0},
        "data": decaying(),
        **change,
    }
    model, parameters, data = (arguments.pop(name) for name in ("model", "parameters", "data"))
    with pytest.raises(hvp.HvpError) as error:
        hvp.fit(model, parameters, data, **arguments)
    assert all(word in str(error.value) for word in words)


def test_a_start_that_is_not_finite_is_refused():
    with pytest.raises(hvp.NonFiniteError, match="start"):
        hvp.fit(lambda x, a: tf.math.log(a) * x, {"a": -1.0}, points())


def test_nothing_that_may_move():
    x, y = points()
    result = hvp.fit(line, {"slope": 1.0, "offset": 0.5}, (x, y), fixed=["slope", "offset"])
    np.testing.assert_allclose(result.residuals, x + 0.5 - y)
    assert result.errors == {}
    np.testing.assert_allclose(result.predict(x), [x + 0.5, 0 * x])
    at_bounds = {"slope": (0.0, 1.0), "offset": (0.0, 0.5)}
    result = hvp.fit(line, {"slope": 0.5, "offset": 0.25}, (x, y), sigma=0.1, bounds=at_bounds)
    assert [note.partition(" ")[0] for note in result.notes[:2]] == ["slope", "offset"]
    assert result.covariance.shape == (2, 2)
    assert not result.covariance.any()


def poisson(mean, y):
    return tf.reduce_sum(mean - y * tf.math.log(mean))


def peak(x, background, height, place, width):
    return background + height * tf.exp(-0.5 * ((x - place) / width) ** 2)


def test_maximum_likelihood_against_scipy():
    x = np.linspace(0, 60, 61)
    truth = {"background": 5.0, "height": 40.0, "place": 30.0, "width": 5.0}
    mean = peak(tf.constant(x), **truth).numpy()
    counts = np.random.default_rng(0).poisson(mean)
    start = {"background": 1.0, "height": 10.0, "place": 25.0, "width": 8.0}
    result = hvp.fit(peak, start, (x, counts), loss=poisson)
    assert result.success, result.message

    def value(at):
        b, h, p, w = at
        mean = b + h * np.exp(-0.5 * ((x - p) / w) ** 2)
        return float(np.sum(mean - counts * np.log(mean)))

    best = list(result.parameters.values())
    found = scipy.optimize.minimize(value, list(truth.values()), method="Nelder-Mead", tol=1e-10)
    np.testing.assert_allclose(best, found.x, rtol=1e-6)
    assert result.chi_square == pytest.approx(2 * found.fun, rel=1e-12)
    # The observed information by central differences of second order.
    steps, hessian = 1e-4 * np.eye(4), np.empty((4, 4))
    for i in range(4):
        for j in range(4):
            corners = [value(best + a * steps[i] + b * steps[j]) for a in (1, -1) for b in (1, -1)]
            hessian[i, j] = np.dot([1, -1, -1, 1], corners) / 4e-8
    np.testing.assert_allclose(result.covariance, np.linalg.inv(hessian), rtol=1e-4, atol=1e-5)
    assert result.distance < 1e-12
    assert result.degrees_of_freedom == 57
    assert "twice the loss" in str(result)
    values, increase = result.profile("height", points=5)
    assert increase[2] == pytest.approx(0, abs=1e-9)
    for at, rise in zip(values[::4], increase[::4]):
        others = scipy.optimize.minimize(
            lambda p, at=at: value([p[0], at, *p[1:]]), np.delete(best, 1), method="Nelder-Mead",
            options={"xatol": 1e-9, "fatol": 1e-11, "maxiter": 5000},
        )  # fmt: skip
        assert rise == pytest.approx(2 * (others.fun - value(best)), rel=1e-5)


def test_likelihoods_need_no_scaling_and_have_bounds():
    rng = np.random.default_rng(1)
    x = rng.exponential(2e6, 400)

    def density(x, life, share):  # two decays, one of a known rate
        return share * tf.exp(-x / life) / life + (1 - share) * tf.exp(-x / 1e5) / 1e5

    def negative(probability, y):
        return -tf.reduce_sum(tf.math.log(probability))

    result = hvp.fit(
        density,
        {"life": 1e6, "share": 0.5},
        (x, np.zeros(400)),
        loss=negative,
        bounds={"share": (0.0, 1.0)},
    )
    assert result.success, result.message
    assert result.parameters["share"] == 1
    assert result.notes == ["share is at its bound"]
    assert result.parameters["life"] == pytest.approx(x.mean(), rel=1e-9)
    assert result.errors["life"] == pytest.approx(x.mean() / 20, rel=1e-7)


def test_classes_are_told_by_logits():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 2))
    y = (x @ [1.0, -2.0] + rng.logistic(size=200) > 0.3).astype(int)

    def logits(x, weights, bias):
        score = tf.linalg.matvec(x, weights) + bias
        return tf.stack([tf.zeros_like(score), score], axis=1)

    def cross_entropy(logits, y):
        labels = tf.cast(y, tf.int32)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_sum(each)

    result = hvp.fit(logits, {"weights": np.zeros(2), "bias": 0.0}, (x, y), loss=cross_entropy)
    design = np.c_[x, np.ones(200)]
    best = np.append(result.parameters["weights"], result.parameters["bias"])
    p = 1 / (1 + np.exp(-design @ best))
    np.testing.assert_allclose(design.T @ (p - y), 0, atol=1e-9)
    information = (design * (p * (1 - p))[:, np.newaxis]).T @ design
    np.testing.assert_allclose(result.covariance, np.linalg.inv(information), rtol=1e-8)
    assert len(result.residuals) == 0


def test_the_distance_to_a_minimum_is_estimated():
    """Of a parabola it is exact."""
    x, y = points()
    start = {"slope": 0.0, "offset": 0.0}
    best = hvp.fit(line, start, (x, y), sigma=0.1)
    assert best.distance < 1e-12
    kept = hvp.fit(line, start, (x, y), sigma=0.1, maxiter=1)
    assert not kept.success
    assert kept.distance == pytest.approx((kept.chi_square - best.chi_square) / 2, rel=1e-9)


@pytest.mark.long
def test_a_likelihood_without_a_minimum_is_said():
    x = np.ones(5)
    result = hvp.fit(
        lambda x, a, b: a * b * x, {"a": 0.0, "b": 0.0}, (x, x), loss=lambda p, y: tf.reduce_sum(p)
    )
    assert not result.success
    assert "negative eigenvalues" in str(result)
    for wrong, error in (
        ({"loss": poisson, "sigma": 1.0}, "(?i)both sigma and a loss"),
        ({"loss": "poisson"}, "'poisson'"),
        ({"loss": lambda p, y: p - y}, "scalar"),
        ({"loss": lambda p, y: tf.reduce_sum(tf.math.log(p))}, "finite"),
    ):
        with pytest.raises(hvp.HvpError, match=error):
            hvp.fit(lambda x, a: a * x, {"a": 0.0}, (x, x), **wrong)


@pytest.mark.long
def test_a_start_from_which_trust_regions_are_lost():
    """The model tends to a straight line there; MINPACK's steps lead out."""
    t = np.linspace(0, 4, 60)
    y = 2.5 * np.exp(-1.3 * t) + 0.5 + 0.02 * np.random.default_rng(0).standard_normal(60)

    def model(t, a, b, c):
        return a * tf.exp(-b * t) + c

    best, _ = scipy.optimize.curve_fit(lambda t, a, b, c: a * np.exp(-b * t) + c, t, y, [1, 1, 0])
    result = hvp.fit(model, {"a": 1.0, "b": -0.3, "c": 0.0}, (t, y))
    assert result.success
    np.testing.assert_allclose(result.vector, best, rtol=1e-6)
    assert "sum of squares" in str(result)
    lost = hvp.fit(model, {"a": 1.0, "b": -2.0, "c": 0.0}, (t, y), maxiter=50)
    assert not lost.success
    assert [note for note in lost.notes if "other start" in note]
    with pytest.raises(hvp.HvpError, match="'a', 'b', 'c'"):
        result.profile("rate")
    with pytest.raises(hvp.InvalidLossError, match=r"symbolic.*tf\.exp"):
        hvp.fit(lambda t, a: a * np.exp(-t * a), {"a": 1.0}, (t, y))


def bump(x, height, center):
    return height * tf.exp(-((x - center) ** 2))


def test_a_start_on_which_no_measurement_depends():
    x = np.linspace(0, 10, 50)
    y = np.exp(-((x - 3.0) ** 2))
    for center in (60.0, 1e30):
        result = hvp.fit(bump, {"height": 1.0, "center": center}, (x, y))
        assert not result.success
        assert "center" in result.message
    assert hvp.fit(bump, {"height": 1.0, "center": 2.0}, (x, y)).success


@pytest.mark.long
def test_a_better_minimum_than_the_fit_is_told():
    x = np.linspace(0, 10, 50)
    y = np.exp(-((x - 3.0) ** 2)) + 2 * np.exp(-((x - 7.0) ** 2))
    result = hvp.fit(bump, {"height": 1.0, "center": 2.5}, (x, y), sigma=0.01)
    assert result.parameters["center"] == pytest.approx(3, abs=0.01)
    [note] = result.notes
    assert f"{result.chi_square:.3g} with 48 degrees" in note
    with pytest.warns(hvp.ConvergenceWarning, match=r"fit again") as caught:
        values, increase = result.profile("center", width=4 / result.errors["center"])
    place = np.nanargmin(increase)
    assert increase[place] < -1
    assert f"center = {values[place]:.6g}" in str(caught[0].message)
    both = hvp.fit(
        lambda x, h, c, k, d: bump(x, h, c) + bump(x, k, d),
        {"h": 1.0, "c": 2.5, "k": 1.0, "d": 7.5},
        (x, y),
        sigma=0.01,
    )
    assert both.notes == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bounds": ([0, 0], [1, 1])}, "a dict of pairs"),
        ({"bounds": {"height": (2.0, 0.0)}}, "in this order"),
        ({"bounds": {"height": (2.0, 3.0)}}, "height = 1.*2 and 3"),
        ({"fixed": {"height": 2.0}}, r"fixed=\['height'\]"),
    ],
)
def test_what_others_take_is_refused_by_name(options, text):
    x = np.linspace(0, 10, 50)
    with pytest.raises(hvp.HvpError, match=text):
        hvp.fit(bump, {"height": 1.0, "center": 2.0}, (x, x), **options)


@pytest.mark.parametrize("size", [1e-20, 1e-15, 1e15])
def test_bounds_of_parameters_of_any_size(size):
    """Near a bound means near in standard errors. The oracle is linear least squares."""
    x = np.linspace(0, 5, 50)
    y = 2 * x + 1 + 0.1 * np.cos(9 * x)
    model = lambda x, slope, offset: slope * x / size + offset  # noqa: E731
    start, ends = {"slope": size, "offset": 0.5}, {"slope": (0, np.inf)}
    result = hvp.fit(model, start, (x, y), sigma=0.1, bounds=ends)
    rows = np.stack([x, np.ones(50)], axis=1) / 0.1
    expected = np.linalg.lstsq(rows, y / 0.1, rcond=None)[0] * [size, 1]
    errors = np.sqrt(np.linalg.inv(rows.T @ rows).diagonal()) * [size, 1]
    np.testing.assert_allclose(result.vector, expected, rtol=1e-9)
    np.testing.assert_allclose(list(result.errors.values()), errors, rtol=1e-9)
    assert result.success
    assert not result.notes


@pytest.mark.parametrize("size", [1e-100, 1e-16, 1e100])
@pytest.mark.few(1)
def test_data_of_any_size(size):
    x = np.linspace(0, 5, 30)
    y = 2 * np.exp(-x) + 0.5 + 0.05 * np.cos(40 * x)

    def decay(x, height, rate, rest):
        return height * tf.exp(-rate * x) + rest

    usual = hvp.fit(decay, {"height": 1.0, "rate": 3.0, "rest": 0.0}, (x, y))
    result = hvp.fit(decay, {"height": size, "rate": 3.0, "rest": 0.0}, (x, size * y))
    units = np.array([size, 1, size])
    np.testing.assert_allclose(result.vector, usual.vector * units, rtol=1e-7)
    np.testing.assert_allclose(
        list(result.errors.values()), np.array(list(usual.errors.values())) * units, rtol=1e-6
    )


@pytest.mark.parametrize("beyond", [1e-6, 1e-3, 1.0])
def test_a_minimum_beyond_a_bound_by_little(beyond):
    x, y = points()
    best = float((x @ y) / (x @ x))
    result = hvp.fit(lambda x, b: b * x, {"b": best + 2}, (x, y), bounds={"b": (best + beyond, 9)})
    assert result.parameters["b"] == best + beyond
    assert result.errors["b"] == 0
    assert result.notes == ["b is at its bound"]
    assert result.degrees_of_freedom == len(y)


@pytest.mark.parametrize("loss", [None, lambda p, y: tf.reduce_sum((p - y) ** 2) / 2])
def test_a_start_at_a_maximum(loss):
    """The distance of `(p, p**2)` from `(0, 5)` has a maximum at zero, and is least at `√4.5`."""
    curve = lambda x, p: tf.stack([p, p**2])  # noqa: E731
    result = hvp.fit(curve, {"p": 0.0}, (np.arange(2.0), [0.0, 5.0]), loss=loss)
    assert result.success
    assert abs(result.parameters["p"]) == pytest.approx(4.5**0.5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.few(2)
def test_what_a_likelihood_does_not_determine_is_said(seed):
    """The smallest eigenvalue of the Hessian is a rounding error of either sign."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 5, 20)
    result = hvp.fit(
        lambda x, a, b, c: (a + b) * x + c,
        {"a": 1.0, "b": 1.0, "c": 2.0},
        (x, rng.poisson(3 + 2 * x).astype(float)),
        loss=lambda mean, y: tf.reduce_sum(mean - y * tf.math.log(mean)),
    )
    assert np.isinf([result.errors["a"], result.errors["b"]]).all()
    assert result.errors["c"] < 2
    assert result.notes == [f"the data do not determine {name}" for name in "ab"]
