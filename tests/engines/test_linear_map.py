"""Rectangular maps and their transposes, by every engine, and sums of maps."""

import weakref

import numpy as np
import pytest
import tensorflow as tf

from hvp._engines.linear_map import Identity, Sum, damped
from hvp._engines.options import Options
from hvp._engines.rule import HessianRule, PullbackRule
from hvp._engines.single_plan import SinglePlan
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.variables import collect_variables
from tests.cases import long, random, relative_error

A = random(0, 4, 3, dtype="float64")


def problem():
    """The function `sin(A w) * b` of `w` and `b`, and its Jacobian."""
    w, b = (tf.Variable(random(i, n, dtype="float64")) for i, n in ((1, 3), (2, 4)))
    x = A @ w.numpy()
    jacobian = np.concatenate([(np.cos(x) * b.numpy())[:, None] * A, np.diag(np.sin(x))], axis=1)
    return (lambda: {"y": tf.sin(tf.linalg.matvec(A, w)) * b}), [w, b], jacobian


def snapshot(rule, variables, **options):
    how = Options(on_stale="ignore", **options)
    return Snapshot(lambda: SinglePlan(rule, collect_variables(variables), how), "ignore")


def eagerly(multiply):
    return multiply


def in_graph(multiply):
    return tf.function(multiply, autograph=False)


@pytest.mark.parametrize(
    ("settings", "wrap"),
    [(engine, wrap) for engine in ("graph", "tape") for wrap in (eagerly, in_graph)]
    + [("xla", eagerly), long("xla", in_graph)],
)
@pytest.mark.few(1)
def test_a_rectangular_map_and_its_transpose(settings, wrap):
    options = {"engine": "tape"} if settings == "tape" else {"jit_compile": settings == "xla"}
    function, variables, jacobian = problem()
    held = snapshot(PullbackRule(function), variables, **options)
    u, v = tf.constant(random(3, 4, dtype="float64")), tf.constant(random(4, 7, dtype="float64"))
    U, V = (
        tf.constant(random(5, 6, 4, dtype="float64")),
        tf.constant(random(6, 6, 7, dtype="float64")),
    )

    def check(find, matrix, vector, rows):
        want = matrix @ vector.numpy()
        assert relative_error(wrap(lambda x: find().apply(x))(vector), want) < 1e-12
        by_rows = wrap(lambda X: find().apply(X))(rows)
        assert relative_error(by_rows, rows.numpy() @ matrix.T) < 1e-12
        domain, codomain = find().domain, find().codomain
        parts = wrap(lambda x: find().apply(domain.split(x)))(vector)
        assert relative_error(codomain.join(parts), want) < 1e-12

    check(lambda: held, jacobian.T, u, U)
    check(lambda: held.T, jacobian, v, V)
    check(lambda: held.T.T, jacobian.T, u, U)


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_a_map_of_a_shape_that_is_not_known_beforehand(engine):
    function, variables, jacobian = problem()
    chosen = jacobian[variables[1].numpy() > -10]

    def some():
        return tf.boolean_mask(function()["y"], variables[1] > -10)

    held = snapshot(PullbackRule(some), variables, engine=engine)
    u, v = tf.constant(random(3, 4, dtype="float64")), tf.constant(random(4, 7, dtype="float64"))
    assert relative_error(held.apply(u), chosen.T @ u.numpy()) < 1e-12
    assert relative_error(held.T.apply(v), chosen @ v.numpy()) < 1e-12


def test_sums_of_maps():
    function, variables, jacobian = problem()
    pullback = snapshot(PullbackRule(function), variables)
    double = Sum([(1.0, pullback), (2.0, pullback)], pullback.domain, pullback.codomain)
    u, v = tf.constant(random(3, 4, dtype="float64")), tf.constant(random(4, 7, dtype="float64"))
    assert relative_error(double.apply(u), 3 * jacobian.T @ u.numpy()) < 1e-12
    assert relative_error(double.T.apply(v), 3 * jacobian @ v.numpy()) < 1e-12
    transposed = double.T
    freed = weakref.ref(transposed)
    del transposed
    assert freed() is None  # without the garbage collector: it holds the residuals
    nothing = Sum([], pullback.domain, pullback.codomain)
    assert np.array_equal(nothing.apply(u), np.zeros(7))
    assert np.array_equal(nothing.apply(u[tf.newaxis]), np.zeros((1, 7)))
    w = tf.Variable([1.0, 2.0])
    square = snapshot(HessianRule(lambda: tf.reduce_sum(w**3)), w)
    assert damped(square, 0.0) is square
    shifted = damped(square, 0.5)
    assert np.array_equal(shifted.apply(tf.ones(2)), [6.5, 12.5])
    assert np.array_equal(shifted.T.apply(tf.ones(2)), [6.5, 12.5])
    assert Identity(square.domain).T.apply(tf.ones(2)).numpy().tolist() == [1, 1]
