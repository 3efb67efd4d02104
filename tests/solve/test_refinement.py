"""Solutions with products in low precision: as accurate as those in full precision."""

import numpy as np
import pytest
import tensorflow as tf
from scipy.sparse.linalg import cg

import hvp
from tests import inside
from tests.cases import long, random
from tests.solve.systems import matrix

SIZE = 60


@pytest.fixture(autouse=True)
def _low_precision(monkeypatch):
    inside.use_low_precision(monkeypatch)
    inside.set_limit(monkeypatch, "size of a dense solve", 8)


def operator(A, **options):
    """The matrix `A`, by matrix products that precision applies to."""
    w = tf.Variable(np.zeros((len(A), 1), "float32"))
    constant = tf.constant(A.astype("float32"))
    options = {"precision": "bfloat16", **options}
    return hvp.HessianOperator(lambda: tf.reduce_sum(w * tf.matmul(constant, w)) / 2, w, **options)


def true_residuals(A, x, b):
    return np.linalg.norm(b - A.astype("float32") @ x, axis=0) / np.linalg.norm(b, axis=0)


def test_plain_conjugate_gradients_do_not_reach_the_tolerance():
    A, b = matrix(np.linspace(1, 30, SIZE)), random(1, SIZE)
    with operator(A) as H:
        assert H.stats.precision == "bfloat16"
        x, _ = cg(H, b, rtol=1e-5, maxiter=500)
        assert true_residuals(A, x, b) > 1e-3
        assert true_residuals(A, hvp.solve(H, b, method="cg").x, b) <= 1e-5


@pytest.mark.parametrize("method", ["cg", "block_cg", "minres"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.few(1)
def test_methods_refine_to_the_tolerance(method, count):
    A, b = matrix(np.linspace(1, 30, SIZE)), random(1, SIZE, count)
    with operator(A) as H:
        result = hvp.solve(H, b, method=method)
        assert result.converged.all()
        assert (true_residuals(A, result.x, b) <= 1.001e-5).all()
        assert np.allclose(result.x, np.linalg.solve(A, b), rtol=0, atol=1e-4)
        assert np.array_equal(result.x, hvp.solve(H, b, method=method).x)
        # Most products were in low precision.
        assert H.stats.products > 0.6 * result.products


@pytest.mark.parametrize("M", ["diagonal", "nystrom"])
@pytest.mark.few(1)
def test_with_a_preconditioner(M):
    A, b = matrix(np.geomspace(1, 100, SIZE)), random(1, SIZE)
    with operator(A) as H:
        result = hvp.solve(H, b, method="cg", M=M, damping=0.5)
        damped = A + 0.5 * np.eye(SIZE)
        assert result.converged
        assert true_residuals(damped, result.x, b) <= 1.001e-5


def test_full_precision_goes_on_where_low_precision_stalls():
    A, b = matrix(np.geomspace(1e-3, 1, SIZE)), random(1, SIZE)
    with operator(A) as low, operator(A, precision=None) as full:
        for H in (low, full):
            result = hvp.solve(H, b, method="cg", rtol=1e-4)
            assert result.converged
            assert true_residuals(A, result.x, b) <= 1.001e-4


def test_curvature_is_negative_only_if_it_is_in_full_precision():
    b = random(1, SIZE)
    nearly = matrix(np.concatenate([[1e-3], np.linspace(1, 2, SIZE - 1)]))
    negative = matrix(np.concatenate([[-0.1], np.linspace(1, 2, SIZE - 1)]))
    with operator(nearly) as H:
        assert hvp.solve(H, b, method="cg").converged
    with operator(negative) as H, pytest.warns(hvp.ConvergenceWarning):
        result = hvp.solve(H, b, method="cg")
    assert result.outcomes == "negative curvature"
    direction = result.negative_curvature
    assert direction @ negative @ direction < 0


def test_the_exact_method_and_inverse_use_full_precision():
    A, b = matrix(np.linspace(1, 30, SIZE)), random(1, SIZE)
    with operator(A) as H:
        assert np.allclose(hvp.solve(H, b, method="exact").x, np.linalg.solve(A, b), atol=1e-5)
        assert np.allclose(hvp.ExactInverse(H).to_dense(), np.linalg.inv(A), atol=1e-5)


def test_what_full_precision_keeps_is_released_and_evaluated_again_after_a_refresh():
    x, w = random(0, 40, 12), tf.Variable(random(1, 12, 1))
    b = random(2, 12)

    def loss():
        return tf.reduce_mean(tf.sin(tf.matmul(x, w)) ** 2) + tf.reduce_sum(w**2)

    with hvp.HessianOperator(loss, w, precision="bfloat16") as H:
        for seed in (3, 4):
            w.assign(random(seed, 12, 1))
            H.refresh()
            solution = hvp.solve(H, b, method="cg").x
            with hvp.HessianOperator(loss, w) as exact:
                assert np.linalg.norm(exact @ solution - b) <= 1.1e-5 * np.linalg.norm(b)


def test_the_matrix_of_another_point_is_not_refined_by_that_of_this_one():
    w = tf.Variable(random(1, 12, 1))
    loss = lambda: tf.reduce_sum(tf.matmul(random(0, 12, 12), w) ** 4)  # noqa: E731
    with hvp.HessianOperator(loss, w, precision="bfloat16", on_stale="ignore") as H:
        w.assign_add(w)
        with pytest.raises(hvp.StaleOperatorError, match="full precision"):
            hvp.solve(H, np.ones(12), method="cg")


def test_a_loss_that_cannot_be_repeated_is_refused():
    w = tf.Variable(random(1, 12, 1))
    x = random(0, 12, 12)
    loss = lambda: tf.reduce_sum(  # noqa: E731
        tf.matmul(x, w) ** 4 * tf.random.uniform([12, 1], 1, 2)
    )
    with (
        hvp.HessianOperator(loss, w, precision="bfloat16") as H,
        pytest.raises(hvp.HvpError, match="draws random numbers"),
    ):
        hvp.solve(H, np.ones(12), method="cg")


@pytest.mark.parametrize("calls", [2, long(5), long(7)])
def test_an_interrupted_solve_resumes(calls, tmp_path, monkeypatch):
    inside.set_limit(monkeypatch, "iterations in one call", 2)
    A, b = matrix(np.linspace(1, 30, SIZE)), random(1, SIZE)
    path = tmp_path / "solve.npz"
    with operator(A) as H:
        with (
            inside.interrupted("call of the graph of a Krylov method", calls),
            pytest.raises(KeyboardInterrupt),
        ):
            hvp.solve(H, b, method="cg", checkpoint=path)
        assert path.exists()
        result = hvp.solve(H, b, method="cg", checkpoint=path)
        assert result.converged
        assert true_residuals(A, result.x, b) <= 1.001e-5


@pytest.mark.long
def test_influence_and_optimizers():
    x, y = random(0, 40, 6), random(1, 40, 1)
    w = tf.Variable(random(2, 6, 1))

    def loss(x, y):
        return tf.reduce_mean((tf.matmul(x, w) - y) ** 2)

    def scores(**options):
        influence = hvp.InfluenceFunctions(loss, w, (x, y), damping=0.01, solver="cg", **options)
        return influence.scores((x[:2], y[:2]))

    want = scores()
    assert np.allclose(scores(precision="bfloat16"), want, atol=1e-4 * np.abs(want).max())
    exact = np.linalg.lstsq(x, y, rcond=None)[0]
    result = hvp.minimize(loss, w, (x, y), method="trust-ncg", precision="bfloat16")
    assert np.allclose(result.x.reshape(6, 1), exact, atol=1e-4)
    w.assign(random(2, 6, 1))
    optimizer = hvp.NewtonCG(loss, w, (x, y), precision="bfloat16")
    optimizer.minimize(gtol=1e-5)
    assert np.allclose(w, exact, atol=1e-4)


def test_check_says_what_low_precision_costs(caplog):
    A = matrix(np.linspace(1, 30, SIZE))
    with operator(A) as H:
        report = hvp.check(H)
        assert report.ok, report
        message = report["low precision"].message
    # The gradient alone, which the check evaluates, has no products whose precision matters.
    assert not caplog.records
    assert message.startswith("products in bfloat16 differ from those in float32 by 0.00")
    with operator(A, precision=None) as H, pytest.raises(KeyError):
        hvp.check(H)["low precision"]
