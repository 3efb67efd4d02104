"""Linear systems, against dense float64 algebra."""

import gc
import weakref

import numpy as np
import pytest
import scipy.sparse.linalg
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import aslinearoperator

import hvp
from tests import inside
from tests.cases import crossed, examples, long
from tests.solve.systems import SPECTRA, columns, matrix, operator, shared

N = 140
KRYLOV = ["cg", "block_cg", "minres"]
METHODS = [*KRYLOV, "exact", "auto"]
unconverged = pytest.mark.filterwarnings("ignore::hvp.ConvergenceWarning")


@pytest.mark.parametrize("k", [long(1), 7])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.few(4)
def test_dense_solutions(spectrum, method, k):
    if spectrum == "indefinite" and method in ("cg", "block_cg"):
        pytest.skip("test_negative_curvature_is_reported")
    A = matrix(SPECTRA[spectrum](N))
    b = columns(N, k)
    if spectrum == "singular":
        b = A @ b
    result = hvp.solve(shared(A), b, method=method, rtol=1e-10, maxiter=20000)
    assert result.converged.shape == (k,)
    assert result.converged.all()
    residual_norms = np.linalg.norm(b - A @ result.x, axis=0)
    np.testing.assert_allclose(residual_norms, result.residual_norms, atol=1e-11)
    assert (residual_norms <= 1e-10 * np.linalg.norm(b, axis=0) * 1.01).all()
    solution = np.linalg.pinv(A, rcond=1e-10, hermitian=True) @ b
    error = np.linalg.norm(result.x - solution) / np.linalg.norm(solution)
    # A block whose Krylov space is the whole range picks up rounding errors in the null space.
    assert error < (1e-6 if (spectrum, method) in _RANGE_EXHAUSTED else 1e-8)


_RANGE_EXHAUSTED = [("singular", "block_cg"), ("singular", "auto")]


@pytest.mark.parametrize(("method", "k"), crossed(["cg", "block_cg", "auto"], [1, 7, 7]))
def test_negative_curvature_is_reported(method, k):
    A = matrix(SPECTRA["indefinite"](N))
    b = columns(N, k)
    H = shared(A)
    if method == "auto":
        result = hvp.solve(H, b, rtol=1e-10)
        np.testing.assert_allclose(result.x, np.linalg.solve(A, b), rtol=1e-6, atol=1e-8)
    else:
        with pytest.warns(hvp.ConvergenceWarning, match="not positive definite: raise damping"):
            result = hvp.solve(H, b, method=method, rtol=1e-10)
        assert not result.converged.any()
        assert set(result.outcomes) == {"negative curvature"}
    D = result.negative_curvature
    assert D.shape == b.shape
    assert (np.sum(D * (A @ D), axis=0) < 0).all()


def test_damping_below_the_most_negative_curvature():
    A = matrix(np.linspace(-1, 5, N))
    H, b = shared(A), columns(N, 1)[:, 0]
    with pytest.warns(hvp.ConvergenceWarning):
        too_small = hvp.solve(H, b, method="cg", damping=0.9)
    assert too_small.outcomes == "negative curvature"
    sufficient = hvp.solve(H, b, method="cg", damping=1.1, rtol=1e-10)
    assert sufficient.negative_curvature is None
    np.testing.assert_allclose(
        sufficient.x, np.linalg.solve(A + 1.1 * np.eye(N), b), rtol=1e-6, atol=1e-8
    )
    # The damping is added to the operator's own.
    combined = hvp.solve(H.damped(0.6), b, method="cg", damping=0.5, rtol=1e-10)
    np.testing.assert_allclose(combined.x, sufficient.x, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.few(2)
def test_small_singular_systems_have_least_squares_solutions(seed):
    """Where the Krylov space ends after a few steps. The oracle is NumPy's pseudo-inverse."""
    rng = np.random.default_rng(seed)
    n = 2 + 3 * seed
    B, b = rng.standard_normal((n, n - n // 2)), rng.standard_normal(n)
    A = B * rng.choice([-1, 1], B.shape[1]) @ B.T
    with pytest.warns(hvp.ConvergenceWarning, match="singular"):
        result = hvp.solve(aslinearoperator(A), b, method="minres")
    expected = np.linalg.pinv(A) @ b
    assert result.outcomes == "least squares"
    np.testing.assert_allclose(result.x, expected, atol=1e-6 * np.linalg.norm(expected))


@pytest.mark.parametrize(("method", "k"), crossed(["minres", "exact", "auto"], [1, 7, 7]))
def test_least_squares_if_no_solution_exists(method, k):
    A = matrix(SPECTRA["singular"](N))
    b = columns(N, k)
    with pytest.warns(hvp.ConvergenceWarning, match="singular, or nearly so"):
        result = hvp.solve(shared(A), b, method=method, rtol=1e-10)
    assert not result.converged.any()
    assert set(result.outcomes) == {"least squares"}
    shortest = np.linalg.pinv(A, rcond=1e-10, hermitian=True) @ b
    assert np.linalg.norm(result.x - shortest) < 1e-5 * np.linalg.norm(shortest)
    np.testing.assert_allclose(
        result.residual_norms, np.linalg.norm(b - A @ shortest, axis=0), rtol=1e-10
    )


@pytest.mark.parametrize("method", ["cg", "block_cg", "auto", "minres"])
def test_an_operator_of_zeros(method):
    H = shared(np.zeros((N, N)))
    with pytest.warns(hvp.ConvergenceWarning):
        result = hvp.solve(H, columns(N, 3), method=method)
    assert not result.converged.any()
    assert np.isfinite(result.x).all()


@examples(6)
@given(
    st.lists(st.one_of(st.floats(1e-3, 1e3), st.floats(-1e3, -1e-3)), min_size=2, max_size=30),
    st.integers(1, 5),
    st.sampled_from(METHODS),
    st.integers(0, 9),
)
@unconverged
def test_any_spectrum(eigenvalues, k, method, seed):
    """Columns that are reported as converged are, and those that should converge do."""
    A = matrix(eigenvalues, seed)
    b = columns(len(A), k, seed)
    result = hvp.solve(shared(A), b, method=method, rtol=1e-7)
    residual_norms = np.linalg.norm(b - A @ result.x, axis=0)
    scale = np.abs(A).max() * np.abs(result.x).max() * len(A)
    np.testing.assert_allclose(residual_norms, result.residual_norms, atol=1e-14 * scale, rtol=1e-6)
    small = residual_norms <= 1e-7 * np.linalg.norm(b, axis=0)
    np.testing.assert_array_equal(result.converged, small)
    definite = min(eigenvalues) > 0
    if method == "exact" or (definite and max(eigenvalues) < 1e3 * min(eigenvalues)):
        assert result.converged.all()
    if definite:
        assert result.negative_curvature is None
    elif result.negative_curvature is not None:
        D = result.negative_curvature
        assert (np.sum(D * (A @ D), axis=0) <= 1e-12 * scale).all()
    if method in ("cg", "block_cg") and not definite:
        # Negative curvature may go unnoticed only if the Krylov space does not contain it.
        assert result.converged.all() or "negative curvature" in result.outcomes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few(2)
def test_float32_residual_norms_are_true(method):
    A = matrix(np.geomspace(0.3, 10, N))
    b = columns(N, 4).astype("float32")
    result = hvp.solve(shared(A, "float32"), b, method=method, rtol=1e-5)
    assert result.converged.all()
    assert result.x.dtype == np.float32
    residual_norms = np.linalg.norm(b - A @ result.x.astype("float64"), axis=0)
    assert (residual_norms <= 1.1e-5 * np.linalg.norm(b, axis=0)).all()


@unconverged
@pytest.mark.few(0)
def test_a_tolerance_below_rounding_is_reported():
    A = matrix(np.geomspace(1e-4, 10, N))
    b = columns(N, 2).astype("float32")
    for method in ("cg", "block_cg"):
        result = hvp.solve(shared(A, "float32"), b, method=method, rtol=1e-9)
        assert set(result.outcomes) <= {"stalled", "maxiter"}
        assert (result.residual_norms < np.linalg.norm(b, axis=0)).all()


@unconverged
def test_a_matrix_without_curvature_is_noticed_at_once():
    for method in ("cg", "block_cg"):
        result = hvp.solve(np.zeros((N, N)), columns(N, 2), method=method)
        assert set(result.outcomes) == {"negative curvature"}
        assert result.products == 2


def test_a_block_needs_fewer_products():
    A = matrix(np.geomspace(1e-3, 1, 300))
    H, b = shared(A), columns(300, 16)
    columnwise = hvp.solve(H, b, method="cg", rtol=1e-8)
    block = hvp.solve(H, b, method="block_cg", rtol=1e-8)
    assert columnwise.converged.all()
    assert block.converged.all()
    assert block.products < columnwise.products / 3


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_converged_columns_are_removed(method):
    """Half of the columns are eigenvectors, and need one iteration."""
    A = matrix(np.geomspace(1, 1e3, N))
    vectors = np.linalg.eigh(A)[1]
    b = np.concatenate([vectors[:, :6], columns(N, 6)], axis=1)
    H = shared(A)
    before = H.stats.products
    result = hvp.solve(H, b, method=method, rtol=1e-8)
    assert (result.iterations[:6] <= 2).all()
    assert (result.iterations[6:] > 50).all()
    most = result.iterations.max()
    assert H.stats.products == before + result.products
    assert result.products < 12 + 6 * 2 + 6 * (most + 2)
    np.testing.assert_allclose(result.x, np.linalg.solve(A, b), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_more_columns_than_rows(method):
    A = matrix(np.linspace(1, 10, 5))
    b = columns(5, 12)
    result = hvp.solve(shared(A), b, method=method, rtol=1e-10)
    assert result.converged.all()
    np.testing.assert_allclose(result.x, np.linalg.solve(A, b), rtol=1e-7, atol=1e-9)


def test_dependent_columns():
    A = matrix(SPECTRA["definite"](N))
    b = columns(N, 4)
    b = np.concatenate([b, b[:, :2], b[:, :1] + b[:, 1:2], 1e-9 * b[:, 3:] + b[:, 2:3]], axis=1)
    result = hvp.solve(shared(A), b, method="block_cg", rtol=1e-10)
    assert result.converged.all()
    np.testing.assert_allclose(result.x, np.linalg.solve(A, b), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("M", "dtype"), crossed(["diagonal", "nystrom", "array"], ["float32", "float64"])
)
@pytest.mark.few(3)
def test_dependent_columns_with_a_preconditioner(M, dtype):
    A = (matrix(SPECTRA["definite"](N)) + np.diag(np.linspace(1, 20, N))).astype(dtype)
    M = np.diag(1 / np.diag(A)) if M == "array" else M
    independent = columns(N, 3)
    for b in (np.tile(independent[:, :1], 20), independent @ columns(3, 30, seed=2)):
        b = b.astype(dtype)
        result = hvp.solve(A, b, method="block_cg", M=M, rtol=1e-5)
        assert result.converged.all()
        expected = np.linalg.solve(A.astype(float), b)
        np.testing.assert_allclose(result.x, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("method", [*KRYLOV, "auto", "exact"])
def test_squares_of_right_hand_sides_may_underflow_or_overflow(method):
    A = matrix(SPECTRA["definite"](N)).astype("float32")
    b = columns(N, 4).astype("float32") * np.float32([1e-25, 1, 0, 1e25])
    expected = np.linalg.solve(A.astype(float), b)
    result = hvp.solve(A, b, method=method, x0=b / 5 if method != "exact" else None)
    assert result.converged.all()
    error = np.linalg.norm(result.x - expected, axis=0)
    assert (error <= 1e-4 * np.linalg.norm(expected, axis=0)).all()
    assert (result.residual_norms <= 1e-5 * np.linalg.norm(b.astype(float), axis=0)).all()
    # The absolute tolerance is in the units of the right-hand sides.
    loose = hvp.solve(A, b[:, 0], method="cg", atol=1e-22)
    assert loose.converged
    assert loose.iterations == 0


def test_many_columns_are_solved_block_by_block(monkeypatch):
    inside.set_limit(monkeypatch, "columns of a solve", 4)
    A = matrix(SPECTRA["definite"](N))
    b = columns(N, 10)
    result = hvp.solve(shared(A), b, method="block_cg", rtol=1e-10)
    np.testing.assert_allclose(result.x, np.linalg.solve(A, b), rtol=1e-6, atol=1e-9)


def test_forms_of_the_right_hand_side():
    A = matrix(SPECTRA["definite"](6))
    parts = [tf.Variable(np.zeros((2, 2))), tf.Variable(np.zeros(2))]

    def loss():
        flat = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
        return tf.tensordot(flat, tf.linalg.matvec(A, flat), 1) / 2

    H = hvp.HessianOperator(loss, parts)
    b = np.arange(6.0)
    x = np.linalg.solve(A, b)
    tolerance = {"rtol": 1e-4}
    for vector in (b, list(b), tuple(b), b.astype(int)):
        result = hvp.solve(H, vector)
        assert isinstance(result.x, np.ndarray)
        np.testing.assert_allclose(result.x, x, **tolerance)
    assert isinstance(result.converged, bool)
    assert isinstance(result.iterations, int)
    assert isinstance(result.residual_norms, float)
    assert result.outcomes == "converged"
    tensor = hvp.solve(H, tf.constant(b)).x
    assert tf.is_tensor(tensor)
    np.testing.assert_allclose(tensor, x, **tolerance)
    nest = hvp.solve(H, [tf.constant(b[:4].reshape(2, 2)), tf.constant(b[4:])]).x
    np.testing.assert_allclose(nest[0], x[:4].reshape(2, 2), **tolerance)
    np.testing.assert_allclose(nest[1], x[4:], **tolerance)
    block = hvp.solve(H, tf.constant(np.stack([b, 2 * b], 1))).x
    np.testing.assert_allclose(block, np.stack([x, 2 * x], 1), **tolerance)
    assert "2 of 2 converged" in repr(hvp.solve(H, np.eye(6)[:, :2]))
    for method in ("cg", "exact", "sparse"):
        assert hvp.solve(H, np.zeros((6, 0)), method=method).x.shape == (6, 0)


def test_a_single_matrix_as_variable():
    w = tf.Variable(np.zeros((3, 2)))
    H = hvp.HessianOperator(lambda: tf.reduce_sum([[1.0], [2.0], [4.0]] * w**2) / 2, w)
    x = hvp.solve(H, np.ones((3, 2))).x
    np.testing.assert_allclose(x, [[1, 1], [0.5, 0.5], [0.25, 0.25]], rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_zero_right_hand_sides(method):
    H = shared(matrix(SPECTRA["definite"](N)))
    b = columns(N, 3)
    b[:, 1] = 0
    result = hvp.solve(H, b, method=method)
    assert result.converged.all()
    assert not result.x[:, 1].any()
    assert result.iterations[1] == 0
    single = hvp.solve(H, np.zeros(N), method=method)
    assert single.converged
    assert not single.x.any()


def test_the_initial_guess_is_used():
    A = matrix(SPECTRA["definite"](N))
    H, b = shared(A), columns(N, 2)
    exact = np.linalg.solve(A, b)
    from_solution = hvp.solve(H, b, method="cg", x0=exact)
    assert (from_solution.iterations == 0).all()
    np.testing.assert_array_equal(from_solution.x, exact)
    near = hvp.solve(H, b, method="block_cg", x0=exact + 1e-3, rtol=1e-8)
    far = hvp.solve(H, b, method="block_cg", rtol=1e-8)
    assert near.iterations.max() < far.iterations.max()
    np.testing.assert_allclose(near.x, exact, rtol=1e-5, atol=1e-8)


def test_absolute_tolerance_and_iterations():
    A = matrix(SPECTRA["definite"](N))
    H, b = shared(A), columns(N, 2)
    inaccurate = hvp.solve(H, b, method="cg", rtol=0.0, atol=1.0)
    assert (inaccurate.residual_norms <= 1.0).all()
    assert inaccurate.iterations.max() < 15
    with pytest.warns(hvp.ConvergenceWarning, match="raise maxiter"):
        incomplete = hvp.solve(H, b, method="cg", maxiter=3)
    assert (incomplete.iterations == 3).all()
    assert set(incomplete.outcomes) == {"maxiter"}
    assert (incomplete.residual_norms < np.linalg.norm(b, axis=0)).all()


@pytest.mark.parametrize(
    ("name", "method"), crossed(["nystrom", "diagonal", "scipy"], ["cg", "block_cg", "minres"])
)
@pytest.mark.few(1)
def test_preconditioners_save_iterations(method, name):
    rng = np.random.default_rng(0)
    scales = np.concatenate([np.geomspace(1e2, 1e5, 10), 1 + rng.random(N - 10)])
    A = np.diag(scales)
    H, b = shared(A), columns(N, 3)
    M = scipy.sparse.linalg.aslinearoperator(np.diag(1 / scales)) if name == "scipy" else name
    plain = hvp.solve(H, b, method=method, rtol=1e-8)
    preconditioned = hvp.solve(H, b, method=method, rtol=1e-8, M=M)
    assert preconditioned.converged.all()
    assert preconditioned.iterations.max() <= plain.iterations.max() * 0.7
    np.testing.assert_allclose(preconditioned.x, b / scales[:, np.newaxis], rtol=1e-4, atol=1e-8)


def test_a_preconditioner_is_reused():
    A = matrix(SPECTRA["clustered"](N))
    H, b = shared(A), columns(N, 3)
    M = hvp.NystromPreconditioner(H, rank=12)
    before = H.stats.products
    result = hvp.solve(H, b, M=M)
    assert result.method == "block_cg"
    assert H.stats.products == before + result.products
    solver_count = inside.solver_count(H)
    hvp.solve(H.damped(1.0), 2 * b, M=M)
    assert inside.solver_count(H) == solver_count


def test_an_indefinite_preconditioner_is_refused():
    H = shared(matrix(SPECTRA["definite"](N)))
    for method in ("cg", "block_cg", "minres"):
        with pytest.raises(hvp.HvpError, match="M is not positive definite"):
            hvp.solve(H, columns(N, 2), M=-np.eye(N), method=method)


@pytest.mark.parametrize(
    ("kind", "method"), crossed(["tape", "batches", "scipy", "array", "sparse"], METHODS)
)
@pytest.mark.few(2)
def test_operators_that_run_in_python(kind, method):
    A = matrix(SPECTRA["definite"](N))
    w = tf.Variable(np.zeros(N))
    if kind == "tape":
        H = operator(A, engine="tape")
    elif kind == "batches":
        root = np.linalg.cholesky(A).T * np.sqrt(N)
        H = hvp.HessianOperator(
            lambda x: tf.reduce_mean(tf.linalg.matvec(x, w) ** 2) / 2, w, (root,), batch_size=50
        )
    else:
        H = {
            "scipy": scipy.sparse.linalg.aslinearoperator,
            "array": np.asarray,
            "sparse": scipy.sparse.csr_array,
        }[kind](A)
    b = columns(N, 3)
    result = hvp.solve(H, b, method=method, rtol=1e-10)
    assert result.converged.all()
    np.testing.assert_allclose(result.x, np.linalg.solve(A, b), rtol=1e-6, atol=1e-9)


def test_solutions_after_a_refresh():
    w = tf.Variable(np.ones(N))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    np.testing.assert_allclose(hvp.solve(H, np.ones(N), method="cg").x, 1.0, rtol=1e-4)
    w.assign(2 * np.ones(N))
    with pytest.raises(hvp.StaleOperatorError):
        hvp.solve(H, np.ones(N), method="cg")
    H.refresh()
    np.testing.assert_allclose(hvp.solve(H, np.ones(N), method="cg").x, 0.25, rtol=1e-4)
    H.close()
    with pytest.raises(hvp.ClosedOperatorError):
        hvp.solve(H, np.ones(N))


def test_products_that_are_not_finite_raise():
    not_a_number = scipy.sparse.linalg.LinearOperator(
        (N, N), matvec=lambda v: v * np.nan, dtype=float
    )
    with pytest.raises((hvp.NonFiniteError, tf.errors.OpError), match="not finite"):
        hvp.solve(not_a_number, columns(N, 1), method="cg")
    w = tf.Variable(np.zeros(N, "float32"))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**2) * 1e38, w)
    for method in KRYLOV:
        with pytest.raises(hvp.NonFiniteError, match="not finite"):
            hvp.solve(H, np.full(N, 1e8), method=method)


INVALID = {
    "b shape": (
        {"b": np.ones(5)},
        hvp.InvalidVectorError,
        r"b has shape \(5,\).* \(140, k\), or a nest",
    ),
    "b columns": ({"b": np.ones((5, 2))}, hvp.InvalidVectorError, ""),
    "b none": ({"b": None}, hvp.InvalidVectorError, "b is NoneType"),
    "b nan": ({"b": np.full(N, np.nan)}, hvp.InvalidVectorError, "b has 140 entries"),
    "b complex": ({"b": np.ones(N) * 1j}, hvp.InvalidVectorError, "complex"),
    "x0 shape": ({"x0": np.ones((N, 2))}, hvp.InvalidVectorError, "x0 has 2 columns"),
    "x0 inf": ({"x0": np.full(N, np.inf)}, hvp.InvalidVectorError, "x0 has 140 entries"),
    "method": ({"method": "gmres"}, hvp.HvpError, "'auto' or 'cg'"),
    "damping": ({"damping": np.nan}, hvp.HvpError, "damping is nan"),
    "rtol": ({"rtol": -1.0}, hvp.HvpError, "rtol is -1.0"),
    "atol": ({"atol": "small"}, hvp.HvpError, "atol is 'small'"),
    "maxiter": ({"maxiter": 0}, hvp.HvpError, "maxiter is 0"),
    "M name": ({"M": "jacobi"}, hvp.HvpError, "'auto' or 'nystrom' or 'diagonal'"),
    "M shape": ({"M": np.eye(3)}, hvp.HvpError, r"of shape \(3, 3\)"),
    "M complex": ({"M": 1j * np.eye(N)}, hvp.HvpError, "dtype complex128"),
    "M kind": ({"M": 3}, hvp.HvpError, "M is int"),
    "M block": ({"M": "nystrom", "method": "exact"}, hvp.HvpError, "leave M or method out"),
    "progress": ({"progress": 2}, hvp.HvpError, "progress is 2"),
    "H kind": ({"H": "H"}, hvp.HvpError, "the operator is str"),
    "H shape": ({"H": np.ones((N, 2))}, hvp.HvpError, "a square"),
    "H complex": ({"H": np.eye(N) * 1j}, hvp.HvpError, "a real operator"),
}


@pytest.mark.parametrize("argument", INVALID)
def test_invalid_arguments_are_refused_before_any_product(argument):
    H = shared(matrix(SPECTRA["definite"](N)))
    options, error, message = INVALID[argument]
    before = H.stats.products
    with pytest.raises(error, match=f"(?i){message}"):
        hvp.solve(**{"H": H, "b": np.ones(N), **options})
    assert H.stats.products == before


def test_progress_is_shown(capsys):
    H = shared(matrix(SPECTRA["definite"](N)))
    hvp.solve(H, columns(N, 3), method="cg", progress="always")
    assert "residual" in capsys.readouterr().err


USES = {
    "cg": lambda H: hvp.solve(H, np.ones((10, 2)), method="cg"),
    "minres": lambda H: hvp.solve(H, np.ones((10, 2)), method="minres"),
    "preconditioned": lambda H: hvp.solve(H, np.ones(10), method="cg", M="nystrom"),
    "an operator as M": lambda H: hvp.solve(
        H, np.ones(10), method="cg", M=aslinearoperator(np.eye(10))
    ),
    "neumann": lambda H: hvp.NeumannInverse(H, iterations=3) @ np.ones(10),
}


@pytest.mark.parametrize(("use", "engine"), crossed(USES, ["graph", "tape"]))
@pytest.mark.few(2)
def test_solvers_do_not_keep_the_operator_alive(use, engine):
    w = tf.Variable(np.linspace(1, 2, 10))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w, engine=engine)
    USES[use](H)
    residuals = weakref.ref(inside.held(H))
    gc.disable()
    try:
        del H
        assert residuals() is None
    finally:
        gc.enable()
