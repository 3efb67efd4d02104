"""Traces, diagonals, norms and functions of dense matrices; errors against their own spread."""

import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, aslinearoperator

import hvp
from tests.cases import FUZZ, crossed, relative_error
from tests.operators.test_gauss_newton import WAYS
from tests.spectra.matrices import SIZE, SPECTRA, matrix_of, network

METHODS = ["hutchinson", "hutch++", "xtrace"]
PLACES = {"first": slice(0, 48), "second": slice(48, 84), "third": slice(84, 94)}


def options_of(way, build):
    options = dict(WAYS[way])
    if "memory_limit" in options:
        with build(batch_size=2) as H:
            options["memory_limit"] = int(6 * H.stats.residual_bytes / 6)
    return options


@pytest.mark.parametrize(("way", "method"), crossed(WAYS, METHODS))
@pytest.mark.few(1)
@pytest.mark.long
def test_operators_of_this_package(way, method):
    model, loss, data, want = network()

    def build(**options):
        return hvp.HessianOperator(loss, model, data, **options)

    with build(damping=0.25, **options_of(way, build)) as H:
        result = hvp.trace(H, method=method, rtol=0.1)
        right = np.trace(want) + 0.25 * len(want)
        assert abs(result.estimate - right) < 5 * result.standard_error
        assert result.converged == (result.standard_error <= 0.1 * abs(result.estimate))
        assert result.products <= 1000
        again = hvp.trace(H, method=method, rtol=0.1)
        assert again.estimate == result.estimate
        assert hvp.trace(H, method=method, rtol=0.1, seed=1).estimate != result.estimate
        if method == "hutchinson":
            layers = {name.split("/")[-1]: part for name, part in result.layers.items()}
            assert list(layers) == list(PLACES)
            for name, part in PLACES.items():
                layer = layers[name]
                exact = np.trace(want[part, part]) + 0.25 * (part.stop - part.start)
                assert abs(layer.estimate - exact) < 5 * layer.standard_error
            own = hvp.trace(H.block(name), rtol=0.1, method=method)
            assert abs(own.estimate - exact) < 5 * own.standard_error
            total = sum(layer.estimate for layer in result.layers.values())
            assert total == pytest.approx(result.estimate, rel=1e-12)
        for choice, rtol, sampled in (("exact", 0.0, 0), ("auto", 1e-9, 32)):
            exactly = hvp.trace(H, method=choice, rtol=rtol)
            assert exactly.estimate == pytest.approx(right, rel=1e-12)
            assert (exactly.method, exactly.standard_error) == ("exact", 0)
            assert exactly.converged
            assert exactly.products == sampled + H.shape[0]
            for part, layer in zip(PLACES.values(), exactly.layers.values()):
                expected = np.trace(want[part, part]) + 0.25 * (part.stop - part.start)
                assert layer.estimate == pytest.approx(expected, rel=1e-12)
        diagonal = hvp.diagonal(H, rtol=0.3, method="bekas")
        error = np.abs(diagonal.estimate - np.diag(want) - 0.25)
        assert (error < 6 * diagonal.standard_error).all()
        frobenius = hvp.norm(H, rtol=0.2)
        right = np.linalg.norm(want + 0.25 * np.eye(len(want)))
        assert abs(frobenius.estimate - right) < 5 * frobenius.standard_error


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SPECTRA)
def test_standard_errors_of_traces_are_calibrated(name, method):
    """Intervals of 95 % cover the trace as often as they say, or more often.

    Of 40 seeds fewer than 33 with a probability of 0.2 %; of 300, fewer than 277 with 2 %.
    """
    A, right = matrix_of(SPECTRA[name]), SPECTRA[name].sum()
    seeds = 300 if FUZZ else 40
    covered = 0
    for seed in range(seeds):
        result = hvp.trace(A, method=method, rtol=0.05, seed=seed, max_products=200)
        low, high = result.interval()
        rounding = 1e-12 * np.abs(SPECTRA[name]).sum()
        covered += low - rounding <= right <= high + rounding
    assert covered >= (276 if FUZZ else 33)
    if method == "hutchinson" and name in ("decaying", "flat", "indefinite"):
        assert covered <= (297 if FUZZ else 40)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 24])
def test_traces_of_few_rows_are_exact(size, method):
    A = np.arange(float(size**2)).reshape(size, size)
    result = hvp.trace(A + A.T, method=method, rtol=1e-8)
    assert result.converged or (method == "hutchinson" and size > 1)
    assert abs(result.estimate - 2 * np.trace(A)) <= 1e-8 * np.trace(A) + 6 * result.standard_error


@pytest.mark.parametrize("method", ["bekas", "xdiag"])
@pytest.mark.parametrize("name", SPECTRA)
def test_standard_errors_of_diagonals_are_calibrated(name, method):
    A = matrix_of(SPECTRA[name])
    result = hvp.diagonal(A, method=method, rtol=0.05, max_products=200)
    error = np.abs(result.estimate - np.diag(A))
    rounding = 1e-12 * np.abs(SPECTRA[name]).max()
    assert (error <= 2.1 * result.standard_error + rounding).mean() > 0.88
    assert (error <= 6 * result.standard_error + rounding).all()
    if method == "bekas":
        rows = hvp.diagonal(A, absolute=True, rtol=0.02)
        right = np.linalg.norm(A, axis=0)
        # The mean of the squares of z * (A z) is the squared norm of a row.
        assert relative_error(rows.estimate + 1, right + 1) < 0.05
        spread = np.abs(rows.estimate - right) <= 6 * rows.standard_error + rounding
        assert spread.all()


def test_better_methods_need_fewer_products():
    A = matrix_of(SPECTRA["decaying"])
    plain, better, best = (hvp.trace(A, method=m, rtol=0.01, max_products=9999) for m in METHODS)
    assert all(result.converged for result in (plain, better, best))
    assert max(better.products, best.products) < plain.products / 4


@pytest.mark.parametrize("name", SPECTRA)
def test_norms(name):
    eigenvalues = SPECTRA[name]
    A = matrix_of(eigenvalues)
    right = np.linalg.norm(eigenvalues)
    result = hvp.norm(A)
    assert abs(result.estimate - right) <= 5 * result.standard_error + 1e-12
    largest = np.abs(eigenvalues).max()
    spectral = hvp.norm(A, 2, rtol=1e-8)
    assert spectral.estimate == pytest.approx(largest, rel=1e-6)
    coarse = hvp.norm(A, 2)
    assert abs(coarse.estimate - largest) <= 0.02 * largest
    assert coarse.converged
    assert coarse.products <= spectral.products


@pytest.mark.long
def test_functions():
    A = matrix_of(SPECTRA["flat"])
    V = np.random.default_rng(0).standard_normal((SIZE, 3))
    for function, dense in (
        (np.reciprocal, np.linalg.inv(A)),
        (np.exp, scipy.linalg.expm(A)),
        (np.sqrt, scipy.linalg.sqrtm(A).real),
    ):
        want = np.einsum("ij,ik,kj->j", V, dense, V)
        assert relative_error(hvp.quadratic_forms(A, V, function), want) < 1e-10
        single = hvp.quadratic_forms(A, V[:, 1], function)
        assert isinstance(single, float)
        assert single == pytest.approx(want[1], rel=1e-10)
    assert hvp.quadratic_forms(A, np.zeros(SIZE), np.exp) == 0
    covered = 0
    for seed in range(100 if FUZZ else 15):
        result = hvp.logdet(A, seed=seed, rtol=0.01)
        low, high = result.interval()
        covered += low <= np.linalg.slogdet(A)[1] <= high
    assert covered >= (89 if FUZZ else 11)


def test_scipys_operators_and_float32():
    dense = matrix_of(SPECTRA["flat"], dtype="float32")
    for A in (dense, aslinearoperator(dense)):
        result = hvp.trace(A, method="hutchinson")
        assert abs(result.estimate - SPECTRA["flat"].sum()) < 5 * result.standard_error
        assert not result.layers


def test_prints_and_bars(capsys):
    result = hvp.trace(matrix_of(SPECTRA["rank one"]), max_products=72, progress=False)
    assert repr(result).endswith("72 products by hutchinson, not converged)")
    model, loss, data, _ = network()
    with hvp.HessianOperator(loss, model, data) as H:
        text = str(hvp.trace(H))
        assert "second" in text.splitlines()[2]


def test_arguments_that_are_refused():
    A = matrix_of(SPECTRA["indefinite"])
    for call, said in (
        (lambda: hvp.trace(A, method="hutch"), "'hutchinson' or 'hutch"),
        (lambda: hvp.trace(A, method="exact", max_products=72), f"takes {SIZE} products"),
        (lambda: hvp.trace(A, rtol=-1), "rtol is -1"),
        (lambda: hvp.trace(A, seed=-1), "seed is -1"),
        (lambda: hvp.trace(A, max_products=3), "max_products is 3"),
        (lambda: hvp.trace(A[:9, :9], method="hutchinson", max_products=9), "max_products is 9"),
        (lambda: hvp.diagonal(A[:9, :9], method="bekas", max_products=9), "max_products is 9"),
        (lambda: hvp.diagonal(A, max_products=0), "max_products is 0"),
        (lambda: hvp.diagonal(A, absolute="x"), "absolute is 'x'"),
        (lambda: hvp.trace(A, rtol=0.5).interval(95), "level is 95"),
        (lambda: hvp.logdet(np.eye(3), seed="x", method="sparse"), "seed is 'x'"),
        (lambda: hvp.trace(A[:3]), "shape"),
        (lambda: hvp.trace("A"), "is str"),
        (lambda: hvp.diagonal(A, method="bekas's"), "'bekas' or 'xdiag'"),
        (
            lambda: hvp.diagonal(aslinearoperator(A), method="exact", max_products=72),
            f"takes {SIZE} products",
        ),
        (lambda: hvp.diagonal(A, method="xdiag", absolute=True), "another method"),
        (lambda: hvp.norm(A, "nuc"), "ord is 'nuc'"),
        (lambda: hvp.logdet(A), "not positive definite.*damp the operator by more than"),
        (lambda: hvp.quadratic_forms(A, np.ones(SIZE), np.log), "not finite at the Ritz values"),
        (lambda: hvp.quadratic_forms(A, np.ones(SIZE), "log"), "function is str"),
        (lambda: hvp.quadratic_forms(A, np.ones(3), np.log), "V has shape"),
        (lambda: hvp.trace(np.full((300, 300), np.nan)), "not finite"),
        (lambda: hvp.diagonal(np.full((300, 300), np.nan)), "not finite"),
    ):
        with pytest.raises(hvp.HvpError, match=f"(?is){said}"):
            call()
    unused = LinearOperator((SIZE, SIZE), matvec=lambda v: 1 / 0, dtype=float)
    with pytest.raises(hvp.HvpError, match="function is str"):
        hvp.quadratic_forms(unused, np.ones(SIZE), "log")
    # The remedy of the message about the logarithm.
    low = np.linalg.eigvalsh(A)[0]
    assert np.isfinite(hvp.logdet(A + (0.5 - low) * np.eye(SIZE), rtol=0.2).estimate)


@pytest.mark.parametrize("absolute", [False, True])
def test_diagonals_are_estimated_only_where_exact_ones_take_too_many_products(absolute):
    rng = np.random.default_rng(0)
    B = rng.standard_normal((500, 40))
    A = aslinearoperator(B @ B.T)
    want = np.linalg.norm(B @ B.T, axis=1) if absolute else np.sum(B**2, axis=1)
    result = hvp.diagonal(A, absolute=absolute)
    assert (result.method, result.products) == ("exact", 500)
    np.testing.assert_allclose(result.estimate, want, rtol=1e-10)
    assert not result.standard_error.any()
    few = hvp.diagonal(A, absolute=absolute, max_products=100)
    assert few.method == "bekas"
    assert few.products <= 100
    assert hvp.diagonal(A, method="bekas", absolute=absolute).method == "bekas"
    small = aslinearoperator(np.diag(np.arange(5.0)))
    assert hvp.diagonal(small, max_products=5, absolute=absolute).products == 5
    assert hvp.trace(small, max_products=5).estimate == 10


def test_no_entry_of_a_semidefinite_diagonal_is_negative():
    """Drawn signs alone say so of small ones beside large ones."""
    rng = np.random.default_rng(0)
    scale = tf.constant(np.r_[np.ones(10), np.zeros(40)] + 1e-3)
    mixing = tf.constant(rng.standard_normal((50, 50)))
    w = tf.Variable(np.ones(50))

    def model():
        return tf.linalg.matvec(mixing, scale * w)

    G = hvp.GaussNewtonOperator(model, lambda p: tf.reduce_sum(p**2) / 2, w, convex=True)
    estimate = hvp.diagonal(G, method="bekas", max_products=32, rtol=1e-6).estimate
    assert (estimate >= 0).all()
    assert (
        hvp.diagonal(G.to_dense(), method="bekas", max_products=32, rtol=1e-6).estimate < 0
    ).any()


def test_eigenvalues_unpack():
    values, vectors = hvp.eigsh(np.diag([3.0, 1.0, 2.0]), 2)
    np.testing.assert_allclose(values, [3.0, 2.0])
    assert vectors.shape == (3, 2)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 20])
def test_random_signs_of_short_vectors_depend_on_each_other(size):
    rng = np.random.default_rng(size)
    matrix = rng.standard_normal((size, size))
    matrix += matrix.T
    for seed in range(5):
        result = hvp.diagonal(matrix, method="xdiag", rtol=1e-6, seed=seed)
        np.testing.assert_allclose(result.estimate, np.diag(matrix), atol=1e-10)


@pytest.mark.parametrize("seed", [132, 153, 254, 318])
def test_random_signs_of_few_entries_that_count_depend_on_each_other(seed):
    values = np.zeros(40)
    values[:15] = np.arange(1.0, 16.0)
    result = hvp.diagonal(np.diag(values), method="xdiag", seed=seed)
    assert result.converged
    np.testing.assert_allclose(result.estimate, values, atol=1e-10)


def test_a_diagonal_whose_range_may_not_be_known_has_not_converged():
    values = np.zeros(40)
    values[:15] = np.arange(1.0, 16.0)
    result = hvp.diagonal(np.diag(values), method="xdiag", seed=132, max_products=32)
    assert not result.converged
    assert np.isinf(result.standard_error).all()
    assert result.products <= 32


@pytest.mark.parametrize("seed", range(6, 9))
def test_the_determinant_of_a_singular_matrix_has_no_logarithm(seed):
    """Its smallest Ritz value is a rounding error of either sign."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((2, 2)))
    matrix = np.outer(basis[:, 0], basis[:, 0])
    with pytest.raises(hvp.HvpError, match="not positive definite"):
        hvp.logdet(aslinearoperator(matrix))
