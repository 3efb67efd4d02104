"""Fits against certified values of NIST, scipy, and closed forms."""

import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import hvp

# From NIST's nonlinear regression sets: the data, the model, a start, and the certified values,
# standard errors and sums of squares (https://www.itl.nist.gov/div898/strd).
MISRA1A = (
    [
        77.6,
        114.9,
        141.1,
        190.8,
        239.9,
        289.0,
        332.8,
        378.4,
        434.8,
        477.3,
        536.8,
        593.1,
        689.1,
        760.0,
    ],
    [
        10.07,
        14.73,
        17.94,
        23.93,
        29.61,
        35.18,
        40.02,
        44.82,
        50.76,
        55.05,
        61.01,
        66.40,
        75.47,
        81.78,
    ],
    lambda x, b1, b2: b1 * (1 - tf.exp(-b2 * x)),
    {"b1": 500.0, "b2": 0.0001},
    {"b1": (2.3894212918e02, 2.7070075241e00), "b2": (5.5015643181e-04, 7.2668688436e-06)},
    1.2455138894e-01,
)
BOXBOD = (
    [1.0, 2.0, 3.0, 5.0, 7.0, 10.0],
    [109.0, 149.0, 149.0, 191.0, 213.0, 224.0],
    lambda x, b1, b2: b1 * (1 - tf.exp(-b2 * x)),
    {"b1": 100.0, "b2": 0.75},
    {"b1": (2.1380940889e02, 1.2354515176e01), "b2": (5.4723748542e-01, 1.0455993237e-01)},
    1.1680088766e03,
)
MGH09 = (
    [4.0, 2.0, 1.0, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625],
    [0.1957, 0.1947, 0.1735, 0.16, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246],
    lambda x, b1, b2, b3, b4: b1 * (x**2 + x * b2) / (x**2 + x * b3 + b4),
    {"b1": 0.25, "b2": 0.39, "b3": 0.415, "b4": 0.39},
    {
        "b1": (1.9280693458e-01, 1.1435312227e-02),
        "b2": (1.9128232873e-01, 1.9633220911e-01),
        "b3": (1.2305650693e-01, 8.0842031232e-02),
        "b4": (1.3606233068e-01, 9.0025542308e-02),
    },
    3.0750560385e-04,
)


@pytest.mark.parametrize("case", [MISRA1A, BOXBOD, MGH09], ids=["Misra1a", "BoxBOD", "MGH09"])
def test_certified_values_to_all_their_digits(case):
    x, y, model, start, certified, squares = case
    result = hvp.fit(model, start, (x, y))
    assert result.success, result.message
    assert not result.notes
    for name, (value, error) in certified.items():
        assert result.parameters[name] == pytest.approx(value, rel=1e-9)
        assert result.errors[name] == pytest.approx(error, rel=1e-9)
    assert result.chi_square == pytest.approx(squares, rel=1e-9)


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
    unused = hvp.fit(lambda x, a, b: a * x, {"a": 1.0, "b": 0.5}, (x, y))
    assert np.isinf(unused.errors["b"])
    exact = hvp.fit(line, {"slope": 0.0, "offset": 0.0}, (x[:2], y[:2]))
    assert any("errors cannot be estimated" in note for note in exact.notes)


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
        ({"tied": {"rate": lambda p: 1.0}}, ["'rate'"]),
        ({"sigma": 0.0}, ["sigma"]),
        ({"sigma": np.ones(7)}, ["igma", "7"]),
        ({"model": 3}, ["int"]),
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
    at_bounds = {"slope": (0.0, 1.0), "offset": (0.0, 0.5)}
    result = hvp.fit(line, {"slope": 0.5, "offset": 0.25}, (x, y), sigma=0.1, bounds=at_bounds)
    assert len(result.notes) == 2
    assert result.covariance.shape == (2, 2)
    assert not result.covariance.any()
