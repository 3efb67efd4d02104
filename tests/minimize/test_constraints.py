"""Bounds, fixed entries, units and own preconditioners, against scipy and closed forms."""

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

import hvp

SIZE = 12


class Quartic:
    """A convex loss of two variables whose minimum bounds move."""

    def __init__(self, dtype="float64"):
        rng = np.random.default_rng(0)
        root = rng.standard_normal((SIZE, SIZE))
        self.matrix = root @ root.T / SIZE + 0.1 * np.eye(SIZE)
        self.slope = rng.standard_normal(SIZE)
        self.variables = {
            "a": tf.Variable(tf.zeros([2, 3], dtype)),
            "b": tf.Variable(tf.zeros([6], dtype)),
        }

    def flat(self):
        parts = [tf.reshape(self.variables[name], [-1]) for name in "ab"]
        return tf.concat(parts, 0)

    def loss(self):
        x = self.flat()
        image = tf.linalg.matvec(tf.constant(self.matrix, x.dtype), x)
        linear = tf.tensordot(tf.constant(self.slope, x.dtype), x, 1)
        return tf.tensordot(x, image, 1) / 2 - linear + tf.reduce_sum(x**4) / 10

    def gradient(self, x):
        return self.matrix @ x - self.slope + 0.4 * x**3

    def solution(self, bounds):
        def f(x):
            return x @ self.matrix @ x / 2 - self.slope @ x + (x**4).sum() / 10

        options = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 1000}
        start = np.clip(np.zeros(SIZE), *bounds)
        return scipy.optimize.minimize(
            f, start, jac=self.gradient, bounds=list(zip(*bounds)), options=options
        ).x


LOWER = np.where(np.arange(SIZE) % 3, -0.2, -np.inf)
UPPER = np.full(SIZE, 0.3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preconditioner": "diagonal"},
        {"x_scale": np.linspace(0.5, 2, SIZE)},
        {"damping": 0.1},
        {"engine": "tape"},
    ],
)
@pytest.mark.few(1)
def test_bounds(options):
    problem = Quartic()
    newton = hvp.NewtonCG(problem.loss, problem.variables, bounds=(LOWER, UPPER), **options)
    result = newton.minimize(gtol=1e-9)
    assert result.success, result.message
    assert ((result.x >= LOWER) & (result.x <= UPPER)).all()
    assert (result.x == UPPER).any()
    assert (result.x == LOWER).any()
    np.testing.assert_allclose(result.x, problem.solution((LOWER, UPPER)), atol=1e-6)


@pytest.mark.parametrize(
    "bounds",
    [
        scipy.optimize.Bounds(-0.2, 0.3),
        (-0.2, {"a": np.full((2, 3), 0.3), "b": np.full(6, 0.3)}),
        ([-0.2] * SIZE, 0.3),
    ],
    ids=["scipy", "nest", "list"],
)
@pytest.mark.few(1)
def test_forms_of_bounds(bounds):
    problem = Quartic("float32")
    result = hvp.NewtonCG(problem.loss, problem.variables, bounds=bounds).minimize(gtol=1e-4)
    expected = problem.solution((np.full(SIZE, -0.2), np.full(SIZE, 0.3)))
    np.testing.assert_allclose(result.x, expected, atol=1e-3)


def test_a_saddle_at_a_bound_is_left_inside():
    w = tf.Variable([0.0, 0.0], dtype=tf.float64)
    newton = hvp.NewtonCG(
        lambda: -(w[0] ** 2) + w[1] ** 2 + w[0] ** 4, w, bounds=([-0.5, -1.0], [0.6, 1.0])
    )
    result = newton.minimize(gtol=1e-9)
    assert result.success, result.message
    # The minima at 0.707 and -0.707 are outside; the ends of the interval are what is left.
    assert abs(result.x[0]) in (0.5, 0.6)
    assert result.x[1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "preconditioner",
    [None, "diagonal", "nystrom", "recycled", "array", "operator", "function", "ours"],
)
@pytest.mark.few(1)
def test_fixed_entries_and_preconditioners(preconditioner):
    problem = Quartic()
    fixed = np.arange(SIZE) % 2 == 0
    problem.variables["a"].assign(np.full((2, 3), 0.1))
    before = problem.flat().numpy()
    inverse = np.linalg.inv(problem.matrix)
    operator = LinearOperator((SIZE, SIZE), matvec=lambda v: inverse @ v, dtype=np.float64)
    points = []

    def made(H):
        points.append(problem.flat().numpy())
        return np.linalg.inv(H.to_dense())

    given = {
        "array": inverse,
        "operator": operator,
        "function": made,
        "ours": lambda H: hvp.NystromPreconditioner(H, rank=3, damping=0.1),
    }
    newton = hvp.NewtonCG(
        problem.loss,
        problem.variables,
        preconditioner=given.get(preconditioner, preconditioner),
        rank=4,
        fixed=fixed,
    )
    result = newton.minimize(gtol=1e-9)
    assert result.success, result.message
    np.testing.assert_array_equal(result.x[fixed], before[fixed])
    assert np.abs(problem.gradient(result.x)[~fixed]).max() < 1e-9
    if preconditioner == "function":  # made once at each point
        assert len(points) > 1
        assert all((p != q).any() for p, q in zip(points, points[1:]))


def test_an_exact_preconditioner_needs_one_iteration():
    problem = Quartic()

    def inverse(H):
        return np.linalg.inv(H.to_dense())

    newton = hvp.NewtonCG(
        problem.loss, problem.variables, preconditioner=inverse, forcing=1e-8, radius=100.0
    )
    assert newton.step().cg_iterations == 1


def test_units_are_those_of_the_trust_region():
    w = tf.Variable([0.0, 0.0], dtype=tf.float64)
    newton = hvp.NewtonCG(
        lambda: -w[0] - w[1] + 1e-9 * tf.reduce_sum(w**2), w, x_scale=[1.0, 100.0], radius=1.0
    )
    newton.step()
    # The steepest descent in these units: the gradient times the squares of the units.
    expected = np.array([1.0, 1e4]) / np.sqrt(1 + 1e4)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("unit", [1.0, 1e4, 1e6])
@pytest.mark.few(2)
def test_a_run_with_a_small_radius_is_the_same_in_all_units(unit):
    w = tf.Variable([unit, unit])
    newton = hvp.NewtonCG(lambda: tf.reduce_sum((w / unit - 2) ** 2), w, x_scale=unit, radius=1e-4)
    result = newton.minimize(gtol=0.0, rtol=1e-3)
    assert result.success
    np.testing.assert_allclose(w / unit, [2.0, 2.0], rtol=1e-3)


def test_bounds_that_a_narrower_type_rounds():
    rng = np.random.default_rng(1)
    for _ in range(3):
        m, b = rng.normal(size=(4, 4)), 3 * rng.normal(size=4)
        A = m @ m.T + np.eye(4)
        parts = [tf.Variable(np.zeros(2), dtype=dtype) for dtype in (tf.float32, tf.float64)]

        def loss(A=A, b=b, parts=parts):
            x = tf.concat([tf.cast(part, tf.float64) for part in parts], 0)
            return tf.tensordot(x, tf.linalg.matvec(A, x), 1) / 2 - tf.tensordot(b, x, 1)

        result = hvp.NewtonCG(loss, parts, bounds=(-0.13, 0.13)).minimize(gtol=1e-6)
        assert result.success
        expected = scipy.optimize.minimize(
            lambda x, A=A, b=b: (x @ A @ x / 2 - b @ x, A @ x - b),
            np.zeros(4),
            jac=True,
            bounds=[(-0.13, 0.13)] * 4,
            tol=1e-14,
        )
        np.testing.assert_allclose(result.x, expected.x, atol=1e-7)


@pytest.mark.parametrize("widths", [3, 40])
def test_the_space_of_residuals_takes_them_too(widths):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, widths))
    y = x @ np.full(widths, 1.0) + rng.standard_normal(20)
    w = tf.Variable(np.zeros(widths))
    pair = lambda x: tf.linalg.matvec(x, w), lambda p, y: tf.reduce_mean((p - y) ** 2)
    fixed = np.arange(widths) == 1
    newton = hvp.NewtonCG(
        pair,
        w,
        (x, y),
        curvature="gauss-newton",
        space="residuals",
        bounds=(-0.3, 0.7),
        fixed=fixed,
        x_scale=np.linspace(1, 2, widths),
        damping=1e-6,
    )
    result = newton.minimize(gtol=1e-7, maxiter=200)
    assert result.success, result.message
    free = ~fixed
    best = scipy.optimize.lsq_linear(x[:, free], y, (-0.3, 0.7), tol=1e-14)
    assert result.fun == pytest.approx(2 * best.cost / 20, rel=1e-6)
    assert w.numpy()[1] == 0


def test_a_new_run_follows_other_variables():
    w, target = tf.Variable([1.0, 2.0], dtype=tf.float64), tf.Variable(3.0, dtype=tf.float64)
    newton = hvp.NewtonCG(lambda: tf.reduce_sum((w - target) ** 2), w)
    for value in (3.0, 5.0):
        target.assign(value)
        assert newton.minimize(gtol=1e-10).success
        np.testing.assert_allclose(w.numpy(), value)
    target.assign(7.0)
    newton.reset()
    assert newton.minimize(gtol=1e-10).success
    np.testing.assert_allclose(w.numpy(), 7.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bounds": (0.1, 1.0)}, ["12 of 12", "bounds"]),
        ({"bounds": (1.0, -1.0)}, ["12 lower bounds"]),
        ({"bounds": 3.0}, ["bounds", "float"]),
        ({"bounds": (np.nan, 1.0)}, ["NaN"]),
        ({"bounds": (-1.0, np.ones(3))}, ["3", "12"]),
        ({"fixed": np.zeros(3, bool)}, ["3", "12"]),
        ({"fixed": np.linspace(0, 1, 12)}, ["fixed", "mask"]),
        ({"bounds": ("low", "high")}, ["bounds", "real numbers"]),
        ({"x_scale": 0.0}, ["x_scale"]),
        ({"x_scale": 2.0, "preconditioner": "nystrom"}, ["x_scale", "preconditioner"]),
        ({"bounds": (-1.0, 1.0), "preconditioner": "nystrom"}, ["bounds", "preconditioner"]),
        ({"preconditioner": "jacobi"}, ["'jacobi'", "'nystrom'", "'sparse'"]),
    ],
)
def test_refuses_arguments(options, words):
    problem = Quartic()
    with pytest.raises(hvp.HvpError) as error:
        hvp.NewtonCG(problem.loss, problem.variables, **options)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("preconditioner", "words"),
    [
        (-np.eye(SIZE), ["positive definite"]),
        (np.triu(np.ones((SIZE, SIZE))) + 20 * np.eye(SIZE), ["symmetric"]),
        (np.eye(3), ["(3, 3)", "(12, 12)"]),
        (lambda H: scipy.sparse.eye(5), ["(5, 5)", "(12, 12)"]),
        (lambda H: None, ["NoneType"]),
    ],
)
def test_refuses_preconditioners(preconditioner, words):
    problem = Quartic()
    newton = hvp.NewtonCG(problem.loss, problem.variables, preconditioner=preconditioner)
    with pytest.raises(hvp.HvpError) as error:
        newton.step()
    assert all(word in str(error.value) for word in words)
    assert not problem.flat().numpy().any()


def test_a_run_ends_when_rounding_keeps_the_gradient_where_it_is():
    size = 1000
    y = np.sin(np.linspace(0, 20, size)) + 0.1 * np.random.default_rng(0).standard_normal(size)
    w = tf.Variable(np.zeros(size))

    def loss():
        bends = w[2:] - 2 * w[1:-1] + w[:-2]
        return 1e7 * tf.reduce_sum(bends**2) + tf.reduce_sum(tf.sqrt(1 + (w - y) ** 2) - 1)

    newton = hvp.NewtonCG(loss, w, preconditioner=lambda H: hvp.SparseInverse(H, positive=True))
    result = newton.minimize(gtol=1e-12, maxiter=300)
    assert result.status == 2
    assert result.nit < 100
    assert np.linalg.norm(result.jac) < 1e-5


def test_pairs_for_two_entries_are_ambiguous():
    w = tf.Variable([0.5, 2.5], dtype=tf.float64)

    def loss():
        return (w[0] - 5) ** 2 + w[1] ** 2

    with pytest.raises(hvp.HvpError, match=r"scipy.optimize.Bounds"):
        hvp.NewtonCG(loss, w, bounds=[(0, 1), (2, 3)])
    for bounds in (scipy.optimize.Bounds([0, 2], [1, 3]), (np.array([0.0, 2]), np.array([1.0, 3]))):
        w.assign([0.5, 2.5])
        np.testing.assert_allclose(hvp.NewtonCG(loss, w, bounds=bounds).minimize().x, [1, 2])
