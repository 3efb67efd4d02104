"""Solves that remember, against fresh ones and dense algebra."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import crossed, relative_error
from tests.operators.test_gauss_newton import WAYS
from tests.solve.systems import columns, matrix, operator
from tests.spectra.matrices import network
from tests.spectra.test_estimates import options_of

N = 300
SPECTRUM = np.r_[np.geomspace(10, 1e4, 60), 1 + np.linspace(0, 1, N - 60)]


@pytest.mark.parametrize("kind", ["operator", "matrix"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.few(1)
def test_later_solves_need_fewer_products_and_agree(kind, dtype):
    # The condition number is 2e4, or 140 for what float32 can solve.
    A = matrix(SPECTRUM if dtype == "float64" else SPECTRUM**0.5)
    H = operator(A, dtype) if kind == "operator" else A.astype(dtype)
    rtol = 1e-8 if dtype == "float64" else 1e-4
    solver = hvp.Solver(H, capacity=100)
    counts = []
    for seed in range(4):
        b = columns(N, 8, seed).astype(dtype)
        result = solver.solve(b, method="block_cg", rtol=rtol)
        assert result.converged.all()
        residual = np.linalg.norm(b - A @ result.x, axis=0)
        assert (residual <= 1.1 * rtol * np.linalg.norm(b, axis=0)).all()
        assert relative_error(result.x, np.linalg.solve(A, b)) < 100 * rtol
        counts.append(result.products)
    assert solver.products == sum(counts)
    assert solver.directions == 100
    assert max(counts[2:]) < 0.6 * counts[0]
    fresh = hvp.solve(H, columns(N, 8, 3).astype(dtype), method="block_cg", rtol=rtol)
    assert counts[3] < 0.6 * fresh.products


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0)])
@pytest.mark.few(1)
def test_the_order_does_not_matter(order):
    A = matrix(SPECTRUM)
    solver = hvp.Solver(A)
    for seed, damping in zip(order, (0.0, 3.0, 100.0)):
        b = columns(N, 5, seed)
        result = solver.solve(b, method="block_cg", damping=damping, rtol=1e-9)
        right = np.linalg.solve(A + damping * np.eye(N), b)
        assert relative_error(result.x, right) < 1e-6
    single = solver.solve(columns(N, 1)[:, 0], method="block_cg", rtol=1e-9)
    assert relative_error(single.x, np.linalg.solve(A, columns(N, 1)[:, 0])) < 1e-6


@pytest.mark.long
def test_an_operator_that_changes():
    """The space of the point before preconditions, and is then replaced."""
    w = tf.Variable(np.zeros(N))
    scale = tf.Variable(1.0, trainable=False, dtype="float64")
    A = tf.constant(matrix(SPECTRUM))
    loss = lambda: scale * tf.tensordot(w, tf.linalg.matvec(A, w), 1) / 2  # noqa: E731
    H = hvp.HessianOperator(loss, w)
    solver = hvp.Solver(H, capacity=100)
    first = solver.solve(columns(N, 8), method="block_cg", rtol=1e-8)
    scale.assign(1.3)
    H.refresh()
    second = solver.solve(columns(N, 8, 2), method="block_cg", rtol=1e-8)
    right = np.linalg.solve(1.3 * A.numpy(), columns(N, 8, 2))
    assert relative_error(second.x, right) < 1e-6
    assert second.products < 0.7 * first.products
    other = np.diag(np.linspace(1, 2, N))
    solver = hvp.Solver(dense := A.numpy().copy())
    solver.solve(columns(N, 8), method="block_cg")
    dense[:] = other
    solver.changed()
    third = solver.solve(columns(N, 8), method="block_cg", rtol=1e-9)
    assert relative_error(third.x, np.linalg.solve(other, columns(N, 8))) < 1e-6


@pytest.mark.parametrize(("way", "matrix_kind"), crossed(WAYS, ["hessian", "gauss-newton"]))
@pytest.mark.few(1)
@pytest.mark.long
def test_operators_of_this_package(way, matrix_kind):
    model, loss, data, want = network()

    def build(**options):
        return hvp.HessianOperator(loss, model, data, **options)

    lift = 0.1 - np.linalg.eigvalsh(want)[0]
    with build(damping=lift, **options_of(way, build)) as H:
        A = want + lift * np.eye(len(want))
        solver = hvp.Solver(H)
        for seed in range(2):
            b = columns(len(A), 3, seed)
            result = solver.solve(b, method="block_cg", rtol=1e-8)
            assert relative_error(result.x, np.linalg.solve(A, b)) < 1e-5


@pytest.mark.long
def test_negative_curvature_and_arguments():
    A = matrix(np.r_[-1.0, np.linspace(1, 10, N - 1)])
    solver = hvp.Solver(A)
    for seed in range(2):
        b = columns(N, 4, seed)
        with pytest.warns(hvp.ConvergenceWarning, match="not positive definite") as caught:
            result = solver.solve(b, method="block_cg")
        assert caught[0].filename == __file__
        direction = result.negative_curvature[:, 0]
        assert direction @ A @ direction < 0
        assert relative_error(solver.solve(b, rtol=1e-10).x, np.linalg.solve(A, b)) < 1e-6
    with pytest.warns(hvp.ConvergenceWarning, match="not positive definite") as caught:
        hvp.solve(A, columns(N, 4), method="block_cg")
    assert caught[0].filename == __file__
    for call, said in (
        (lambda: hvp.Solver(A, capacity=0), "capacity is 0"),
        (lambda: hvp.Solver("A"), "is str"),
        (lambda: solver.solve(columns(N, 2), method="cg"), "'auto' or 'block_cg'"),
        (lambda: solver.solve(np.ones(3)), "b has shape"),
        (lambda: solver.solve(columns(N, 2), rtol=-1), "rtol is -1"),
    ):
        with pytest.raises(hvp.HvpError, match=said):
            call()
    assert "300 x 300" in repr(solver)


def test_equal_columns_are_solved_again():
    solver = hvp.Solver(np.diag(np.linspace(1, 3, 8)))
    b = np.tile(columns(8, 1), 8)
    for _ in range(2):
        x = solver.solve(b, method="block_cg").x
        np.testing.assert_allclose(x, b / np.linspace(1, 3, 8)[:, np.newaxis], rtol=1e-4)
