"""Conjugate gradients in a trust region, compared with dense matrices."""

import functools

import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf

import hvp
from hvp._solve.outcome import SolveOutcome
from hvp._solve.preconditioners import PRECONDITIONERS
from hvp._solve.steihaug import Steihaug

SIZE = 12


def matrix(eigenvalues, seed=0):
    Q = scipy.linalg.qr(np.random.default_rng(seed).standard_normal((SIZE, SIZE)))[0]
    return (Q * eigenvalues) @ Q.T


@functools.cache
def quadratic():
    """Return the Hessian of a quadratic form, and its matrix, a variable."""
    w, A = tf.Variable(np.zeros(SIZE)), tf.Variable(np.eye(SIZE), trainable=False)
    return hvp.HessianOperator(lambda: tf.tensordot(w, tf.linalg.matvec(A, w), 1) / 2, w), A


@functools.cache
def solver_of(preconditioner):
    kind = PRECONDITIONERS.get(preconditioner)
    return Steihaug(quadratic()[0], None if kind is None else kind.solve)


def solve(A, g, preconditioner=None, **options):
    """Solve with a matrix; return the result, and the tensors of the preconditioner."""
    H, matrix_of_H = quadratic()
    matrix_of_H.assign(A)
    H.refresh()
    kind = PRECONDITIONERS.get(preconditioner)
    tensors = [] if kind is None else kind.make(H, 5, [0, 1])
    limits = {"radius": 1e6, "tolerance": 1e-11, "maxiter": 200, **options}
    return solver_of(preconditioner).solve(tf.constant(g), tensors=tensors, **limits), tensors


def model(A, g, p):
    return g @ p + p @ A @ p / 2


@pytest.mark.parametrize("preconditioner", [None, *PRECONDITIONERS])
@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.few(2)
def test_an_interior_step_solves_the_system(preconditioner, damping):
    A, g = matrix(np.geomspace(1, 1e3, SIZE)), np.arange(1.0, SIZE + 1)
    result, _ = solve(A, g, preconditioner, damping=damping)
    expected = np.linalg.solve(A + damping * np.eye(SIZE), -g)
    np.testing.assert_allclose(result.step, expected, rtol=1e-8)
    assert result.outcome == SolveOutcome.CONVERGED
    assert result.predicted == pytest.approx(-model(A + damping * np.eye(SIZE), g, expected))
    if preconditioner is None:
        assert result.norm == pytest.approx(np.linalg.norm(expected))


@pytest.mark.parametrize("preconditioner", [None, *PRECONDITIONERS])
@pytest.mark.parametrize("eigenvalues", ["positive", "indefinite", "negative"])
def test_a_boundary_step_has_the_norm_of_the_radius(eigenvalues, preconditioner):
    spectrum = np.geomspace(1, 100, SIZE)
    spectrum[: {"positive": 0, "indefinite": 4, "negative": SIZE}[eigenvalues]] *= -1
    A, g = matrix(spectrum), np.arange(1.0, SIZE + 1)
    result, tensors = solve(A, g, preconditioner, radius=0.05)
    step = result.step.numpy()
    if preconditioner is None:
        norm = np.linalg.norm(step)
    else:
        inverse = PRECONDITIONERS[preconditioner].solve
        columns = [inverse(tf.constant(e), tensors).numpy() for e in np.eye(SIZE)]
        norm = np.sqrt(step @ np.linalg.solve(np.stack(columns), step))
    assert norm == pytest.approx(0.05, rel=1e-6)
    assert result.norm == pytest.approx(0.05, rel=1e-6)
    assert result.outcome in (SolveOutcome.BOUNDARY, SolveOutcome.NEGATIVE_CURVATURE)
    assert result.predicted == pytest.approx(-model(A, g, step))
    # The decrease is at least that of the best step along the gradient (the Cauchy point).
    if preconditioner is None:
        slope, curvature = g @ g, g @ A @ g
        length = 0.05 / np.sqrt(slope)
        if curvature > 0:
            length = min(length, slope / curvature)
        assert result.predicted >= -model(A, g, -length * g) * (1 - 1e-9)


def test_limits_end_the_iteration():
    A, g = matrix(np.geomspace(1, 1e4, SIZE)), np.arange(1.0, SIZE + 1)
    result, _ = solve(A, g, maxiter=3)
    assert (result.outcome, result.iterations) == (SolveOutcome.MAXITER, 3)
    loose, _ = solve(A, g, tolerance=0.1 * np.linalg.norm(g))
    assert loose.outcome == SolveOutcome.CONVERGED
    assert np.linalg.norm(A @ loose.step.numpy() + g) <= 0.1 * np.linalg.norm(g)
    tight, _ = solve(A, g)
    assert tight.iterations > loose.iterations


def test_products_are_counted_and_the_operator_may_be_refreshed():
    w = tf.Variable(np.ones(SIZE))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    solver = Steihaug(H)
    for at in (1.0, 2.0):
        w.assign(np.full(SIZE, at))
        H.refresh()
        result = solver.solve(tf.ones(SIZE, tf.float64), radius=9.0, tolerance=1e-9, maxiter=50)
        np.testing.assert_allclose(result.step, -np.ones(SIZE) / at**2)
    assert H.stats.products == 2


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("maxiter", [5, 70])
@pytest.mark.few(1)
def test_recorded_directions_have_the_products_of_the_matrix(engine, maxiter):
    A, g = matrix(np.geomspace(1, 1e6, SIZE)), np.arange(1.0, SIZE + 1)
    w = tf.Variable(np.zeros(SIZE))
    H = hvp.HessianOperator(
        lambda: tf.tensordot(w, tf.linalg.matvec(A, w), 1) / 2, w, engine=engine
    )
    result = Steihaug(H, recorded=8).solve(
        tf.constant(g), radius=1e9, tolerance=1e-30, damping=0.5, maxiter=maxiter
    )
    assert result.directions.shape == (min(maxiter, 8), SIZE)
    np.testing.assert_allclose(result.images, result.directions @ A, rtol=1e-10)
    np.testing.assert_allclose(result.directions[0], -g)
    products = result.directions @ (A + 0.5 * np.eye(SIZE)) @ result.directions.T
    scale = np.sqrt(np.outer(np.diag(products), np.diag(products)))
    off = products / scale - np.eye(len(products))  # conjugate, as far as rounding allows
    assert np.abs(off[:3, :3]).max() < 1e-8
    assert (
        Steihaug(H)
        .solve(tf.constant(g), radius=1e9, tolerance=1e-9, damping=0.5, maxiter=3)
        .directions
        is None
    )
