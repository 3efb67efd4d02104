"""Float32 systems whose residuals are computed in float64: as accurate as their data allow."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import long, random

ROWS, SIZE, DAMPING = 80, 40, 1e-3


@pytest.fixture(autouse=True)
def _iterative(monkeypatch):
    inside.set_limit(monkeypatch, "size of a dense solve", 8)


def rows(scale=100.0):
    """Return two arrays whose difference has singular values from 0.2 to 1, or nearly so."""
    left, _ = np.linalg.qr(random(0, ROWS, SIZE, dtype="float64"))
    right, _ = np.linalg.qr(random(1, SIZE, SIZE, dtype="float64"))
    large = random(3, ROWS, SIZE, scale=scale)
    return (left * np.geomspace(0.2, 1, SIZE) @ right + large).astype("float32"), large


def difference(whole, large, w):
    """Return the difference times `w`, of terms that cancel."""
    return tf.matmul(whole, w) - tf.matmul(large, w)


def least_squares(data, **options):
    """Return the operator `C^T C` of the difference `C`."""
    w = tf.Variable(np.zeros((SIZE, 1), "float32"))
    loss = lambda *data: tf.reduce_mean(difference(*data, w) ** 2) / 2  # noqa: E731
    return hvp.HessianOperator(loss, w, data, reduction="sum", **options)


def relative_residuals(data, x, b):
    C = data[0].astype("float64") - data[1]
    residual = b - C.T @ (C @ x.astype("float64")) - DAMPING * x
    return np.linalg.norm(residual, axis=0) / np.linalg.norm(b, axis=0)


@pytest.mark.parametrize("method", ["cg", "block_cg", "minres"])
@pytest.mark.parametrize("batch_size", [None, 30])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.few(1)
def test_residuals_are_small_in_float64(method, batch_size, count, monkeypatch):
    data, b = rows(), random(2, SIZE, count)
    with least_squares(data, batch_size=batch_size) as A:
        options = {"method": method, "damping": DAMPING}
        result = hvp.solve(A, b, **options)
        assert result.converged.all()
        assert (relative_residuals(data, result.x, b) <= 1.01e-5).all()
        assert result.x.dtype == np.float32
        inside.forbid_wide_residuals(monkeypatch)
        with pytest.warns(hvp.ConvergenceWarning, match="rounding"):
            alone = hvp.solve(A, b, **options)
        assert not alone.converged.all()
        assert relative_residuals(data, alone.x, b).max() > 1.5e-5


@pytest.mark.long
def test_gauss_newton_matrices_blocks_and_solvers_that_remember():
    data = rows()
    w, other = tf.Variable(np.zeros((SIZE, 1), "float32")), tf.Variable([2.0])
    matrix = hvp.GaussNewtonOperator(
        lambda both: other * difference(both[:, 0], both[:, 1], w) / 2,
        lambda outputs: tf.reduce_mean(outputs**2) / 2,
        [w, other],
        (np.stack(data, axis=1),),
        reduction="sum",
    )
    b = random(2, SIZE, 3)
    with matrix as G:
        block, solver = G.block(w), hvp.Solver(G.block(w))
        for _ in range(2):
            for solve in (hvp.solve, lambda _, *args, **kwargs: solver.solve(*args, **kwargs)):
                result = solve(block, b, method="block_cg", damping=DAMPING)
                assert result.converged.all()
                assert (relative_residuals(data, result.x, b) <= 1.01e-5).all()


def test_products_in_low_precision_are_refined_as_far(monkeypatch):
    inside.use_low_precision(monkeypatch)
    data, b = rows(1.0), random(2, SIZE)
    with least_squares(data, precision="bfloat16") as A:
        assert A.stats.precision == "bfloat16"
        result = hvp.solve(A, b, method="cg", damping=DAMPING, rtol=3e-7)
        assert result.converged
    assert relative_residuals(data, result.x[:, np.newaxis], b[:, np.newaxis]) <= 3.1e-7


def test_nothing_is_evaluated_in_float64_unless_rounding_matters():
    with least_squares(rows(0.1)) as A:
        assert hvp.solve(A, random(2, SIZE), method="cg").converged
        assert not inside.has_wide_evaluation(A)


@pytest.mark.parametrize(
    "options", [{"engine": "tape"}, {"memory_limit": "1 GiB"}], ids=["tape", "memory limit"]
)
def test_where_there_is_no_float64_the_warning_tells(options):
    b = random(2, SIZE)
    with least_squares(rows(), **options) as A:
        with pytest.warns(hvp.ConvergenceWarning, match="rounding"):
            result = hvp.solve(A, b, method="cg", damping=DAMPING)
        assert not inside.has_wide_evaluation(A)
    assert result.residual_norms > 1e-5 * np.linalg.norm(b)


def test_other_weights_are_refined_after_a_refresh():
    data, w, b = rows(), tf.Variable(random(3, SIZE, 1)), random(2, SIZE)

    def loss():
        return tf.reduce_sum(difference(*data, w) ** 2) / 2 + tf.reduce_sum(w**4)

    with hvp.HessianOperator(loss, w) as H:
        for scale in (0.2, 0.1):
            w.assign(scale * random(3, SIZE, 1))
            H.refresh()
            x = hvp.solve(H, b, method="cg", damping=DAMPING).x.astype("float64")
            weights, C = w.numpy().ravel().astype("float64"), data[0].astype("float64") - data[1]
            product = C.T @ (C @ x) + (12 * weights**2 + DAMPING) * x
            assert np.linalg.norm(b - product) <= 1.01e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("calls", [2, long(5), long(8)])
def test_a_refinement_resumes(calls, tmp_path, monkeypatch):
    inside.set_limit(monkeypatch, "iterations in one call", 4)
    b, path = random(2, SIZE, 3), tmp_path / "solve.npz"
    with least_squares(rows()) as A:
        options = {"method": "block_cg", "damping": DAMPING}
        whole = hvp.solve(A, b, **options)
        with (
            inside.interrupted("call of the graph of a Krylov method", calls),
            pytest.raises(KeyboardInterrupt),
        ):
            hvp.solve(A, b, checkpoint=path, **options)
        assert path.exists()
        resumed = hvp.solve(A, b, checkpoint=path, **options)
    assert whole.converged.all()
    assert np.array_equal(resumed.x, whole.x)


def test_a_solution_is_not_lost_where_float64_fails(monkeypatch):
    data, b = rows(), random(2, SIZE)
    with least_squares(data) as A:
        inside.fail_in_float64(monkeypatch, tf.errors.UnimplementedError(None, None, "no kernel"))
        with pytest.warns(hvp.ConvergenceWarning, match="rounding"):
            result = hvp.solve(A, b, method="cg", damping=DAMPING)
    assert relative_residuals(data, result.x[:, np.newaxis], b[:, np.newaxis]) < 1e-3
