"""The operator as scipy's solvers and operator arithmetic see it."""

import inspect

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, aslinearoperator, cg, eigsh, gmres, lobpcg, minres

import hvp
from hvp._engines.options import NAMES
from tests.cases import mlp, random, relative_error


@pytest.fixture(scope="module", params=["float32", "float64"])
def quadratic(request):
    """An operator whose matrix is known and positive definite."""
    root = random(0, 20, 16, dtype=request.param)
    A = root.T @ root + np.eye(16, dtype=request.param)
    w = tf.Variable(random(1, 16, dtype=request.param))
    with hvp.HessianOperator(lambda: tf.tensordot(w, tf.linalg.matvec(A, w), 1) / 2, w) as H:
        yield H, A


def tolerance(dtype):
    return 1e-4 if dtype == np.float32 else 1e-10


@pytest.mark.parametrize("solver", [cg, minres, gmres])
def test_linear_solvers(quadratic, solver):
    H, A = quadratic
    b = random(2, 16, dtype=H.dtype)
    x, info = solver(H, b, rtol=tolerance(H.dtype) / 100)
    assert info == 0
    assert relative_error(x, np.linalg.solve(A.astype(float), b)) <= tolerance(H.dtype)


def test_eigenvalue_solvers(quadratic):
    H, A = quadratic
    want = np.linalg.eigvalsh(A.astype(float))[-2:]
    v0 = random(3, 16, dtype=H.dtype)
    assert relative_error(eigsh(H, 2, v0=v0)[0], want) <= tolerance(H.dtype)
    start = random(4, 16, 2, dtype=H.dtype)
    values, _ = lobpcg(H, start, maxiter=200, tol=tolerance(H.dtype))
    assert relative_error(values[::-1], want) <= 10 * tolerance(H.dtype)


def test_cg_solves_with_the_hessian_of_a_model():
    problem = mlp("float64")
    with hvp.HessianOperator(problem.loss, problem.variables, problem.data, damping=1.0) as H:
        x, info = cg(H, H.gradient, rtol=1e-12)
        assert info == 0
        assert H.stats.gradient_evaluations == 1
        assert relative_error(H.to_dense() @ x, H.gradient) <= 1e-11


COMPOSITIONS = {
    "2 * H": (lambda H, D: 2 * H, lambda A, D: 2 * A),
    "H * 2.5": (lambda H, D: H * 2.5, lambda A, D: A * 2.5),
    "H / 2": (lambda H, D: H / 2, lambda A, D: A / 2),
    "-H": (lambda H, D: -H, lambda A, D: -A),
    "H + H": (lambda H, D: H + H, lambda A, D: A + A),
    "3 * (2 * H) - H": (lambda H, D: 3 * (2 * H) - H, lambda A, D: 5 * A),
    "H @ H": (lambda H, D: H @ H, lambda A, D: A @ A),
    "H ** 2": (lambda H, D: H**2, lambda A, D: A @ A),
    "H.T": (lambda H, D: H.T, lambda A, D: A),
    "(H @ D).T": (lambda H, D: (H @ aslinearoperator(D)).T, lambda A, D: D.T @ A),
    "(H @ D).H": (lambda H, D: (H @ aslinearoperator(D)).H, lambda A, D: D.T @ A),
    "True * H": (lambda H, D: True * H, lambda A, D: A),
    "H + operator": (lambda H, D: H + aslinearoperator(D), lambda A, D: A + D),
    "H + array": (lambda H, D: H + D, lambda A, D: A + D),
    "array - H": (lambda H, D: D - H, lambda A, D: D - A),
    "H - sparse": (lambda H, D: H - scipy.sparse.csr_matrix(D), lambda A, D: A - D),
    "damped": (lambda H, D: 2 * H.damped(0.5), lambda A, D: 2 * A + np.eye(len(A))),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_arithmetic_keeps_the_dtype(quadratic, name):
    H, A = quadratic
    D = np.diag(np.arange(16)).astype(H.dtype)
    D[0, 5] = 3
    compose, dense = COMPOSITIONS[name]
    got, want = compose(H, D), dense(A, D)
    assert isinstance(got, LinearOperator)
    assert got.dtype == H.dtype
    V = random(5, 16, 3, dtype=H.dtype)
    for product, true in (
        (got @ V[:, 0], want @ V[:, 0]),
        (got @ V, want @ V),
        (got.rmatvec(V[:, 0]), want.T @ V[:, 0]),
        (got.rmatmat(V), want.T @ V),
    ):
        assert product.dtype == H.dtype
        np.testing.assert_allclose(product, true, rtol=1e-4, atol=1e-4)


def test_numpy_scalars_and_wider_operators_widen_as_numpy_does():
    w = tf.Variable([1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w) as H:
        assert (np.float64(2) * H).dtype == np.float64
        assert (np.float32(2) * H).dtype == np.float32
        assert (H + aslinearoperator(np.eye(2))).dtype == np.float64
        with pytest.raises(TypeError, match="scalar"):
            H / H


def test_tensors_without_axes_are_scalars_and_sum_adds_up(quadratic):
    H, A = quadratic
    v = random(5, 16, dtype=H.dtype)
    two = tf.constant(2, H.dtype)
    for operator in (H * two, two.numpy() * H, sum([H, H])):
        assert operator.dtype == H.dtype
        np.testing.assert_allclose(operator @ v, 2 * A @ v, rtol=1e-4, atol=1e-4)
    assert H.damped(two).damping == 2
    # A wider vector is narrowed by all parts of a sum alike.
    narrow = (2 * H + aslinearoperator(A)) @ v.astype("float64")
    assert narrow.dtype == H.dtype


def test_the_transpose_is_the_operator_itself(quadratic):
    H, _ = quadratic
    assert H.T is H
    assert H.H is H
    v = random(6, 16, dtype=H.dtype)
    np.testing.assert_array_equal(H.rmatvec(v), H @ v)
    np.testing.assert_array_equal(v @ H, H @ v)


def test_the_signature_is_shown():
    parameters = inspect.signature(hvp.HessianOperator).parameters
    assert list(parameters)[:3] == ["loss", "variables", "data"]
    assert set(parameters) == {"loss", "variables", "data", "damping", *NAMES}


def test_shapes_in_are_shapes_out(quadratic):
    H, A = quadratic
    column = random(7, 16, 1, dtype=H.dtype)
    assert (H @ column).shape == (16, 1)
    assert H.matvec(column).shape == (16, 1)
    assert (H @ np.zeros((16, 0))).shape == (16, 0)
    np.testing.assert_allclose(H @ scipy.sparse.eye(16), A, rtol=1e-4, atol=1e-4)


def test_integers_and_booleans_are_cast(quadratic):
    H, _ = quadratic
    np.testing.assert_array_equal(H.matvec(np.zeros(16, "int8")), np.zeros(16))
    np.testing.assert_array_equal(H @ np.eye(16, dtype=bool)[0], H @ np.eye(16)[0])
    np.testing.assert_array_equal(H @ list(range(16)), H @ np.arange(16.0))


@pytest.mark.parametrize(
    ("v", "message"),
    [
        (np.ones(7), r"shape \(7,\)"),
        (np.ones((7, 2)), r"shape \(7, 2\)"),
        (np.ones((1, 16)), r"shape \(1, 16\)"),
        (np.ones((16, 1, 1)), r"shape \(16, 1, 1\)"),
        (np.array(1.0), "shape"),
        (np.ones(16) * 1j, "complex128"),
        (np.array(["a"] * 16), "type <U1"),
        (np.array([None] * 16), "object"),
        ([np.ones(8), np.ones((4, 2))], "v is a list that cannot be converted.*flatten"),
        (np.full(16, np.nan), "16 entries that are not finite"),
        (np.array([np.inf] + [0] * 15), "1 entries that are not finite"),
    ],
)
def test_vectors_that_are_refused(quadratic, v, message):
    H, _ = quadratic
    before = H.stats.products
    for multiply in (H.dot, H.matvec, H.rmatvec, H.matmat, H.rmatmat):
        with pytest.raises(hvp.InvalidVectorError):
            multiply(v)
    with pytest.raises(hvp.InvalidVectorError, match=message):
        H.dot(v)
    assert H.stats.products == before


def test_a_vector_that_overflows_the_dtype_is_refused():
    w = tf.Variable([1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w) as H:
        with pytest.raises(hvp.InvalidVectorError, match="not finite in float32"):
            H @ np.array([1e300, 0.0])
        with pytest.raises(hvp.NonFiniteError, match="product"):
            H @ np.array([3e38, 0.0])


def test_a_second_derivative_that_is_infinite_raises():
    w = tf.Variable([0.0, 1.0])
    with (
        hvp.HessianOperator(lambda: tf.reduce_sum(w**1.5), w) as H,
        pytest.raises(hvp.NonFiniteError),
    ):
        H @ np.ones(2)


def test_to_dense_refuses_what_is_large():
    w = tf.Variable(tf.ones(5000))
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w) as H:
        with pytest.raises(hvp.TooLargeError, match="max_size=5000"):
            H.to_dense()
        assert H.stats.products == 0
    w = tf.Variable(tf.ones(70))
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w) as H:
        np.testing.assert_array_equal(H.to_dense(max_size=70), 2 * np.eye(70))


@pytest.mark.parametrize("damping", [np.nan, np.inf, 1j, "1", None, np.ones(2), [1.0], 10**400])
def test_dampings_that_are_refused(damping):
    w = tf.Variable([1.0])
    with pytest.raises(hvp.HvpError, match="damping"):
        hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w, damping=damping)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32])
def test_matrices_without_negative_numbers_are_subtracted(dtype):
    w = tf.Variable(np.arange(1.0, 4.0))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    np.testing.assert_allclose((H - np.eye(3, dtype=dtype)) @ np.ones(3), [0, 3, 8])


@pytest.mark.parametrize("wrap", [np.asarray, scipy.sparse.csr_array])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float32, np.float64])
def test_matrices_that_are_not_symmetric_are_refused(wrap, dtype):
    upper = np.triu(np.ones((4, 4), dtype))
    for use in (lambda A: hvp.eigsh(A, 2), hvp.trace, lambda A: hvp.solve(A, np.ones(4))):
        with pytest.raises(hvp.HvpError, match=r"not symmetric.*\(A \+ A.T\) / 2"):
            use(wrap(upper))
    assert hvp.trace(wrap((upper + upper.T).astype(dtype))).estimate == (4 if dtype is bool else 8)
    rounded = np.float32(random(0, 6, 6, dtype="float64") @ np.diag(np.arange(6)))
    product = rounded @ rounded.T + np.float32(1e-5) * random(1, 6, 6)
    assert hvp.trace(wrap(product)).estimate == pytest.approx(np.trace(product), rel=1e-5)


def test_arrays_are_not_asked_for_in_graphs(quadratic):
    H, A = quadratic
    v = np.ones(16, A.dtype)
    for use in (lambda: H @ v, lambda: H @ np.eye(16), H.to_dense, H.diagonal):
        with pytest.raises(hvp.GraphModeError, match=r"product\(v\)"):
            tf.function(use, autograph=False)()
    product = tf.function(lambda: H.product(tf.constant(v)))()
    np.testing.assert_allclose(product, A @ v, rtol=1e-5)


@pytest.mark.parametrize("add", [lambda H: H + 2.0, lambda H: 2.0 + H, lambda H: H - 2.0])
def test_numbers_are_not_matrices(quadratic, add):
    H, A = quadratic
    with pytest.raises(hvp.InvalidVectorError, match=r"damped\(number\)"):
        add(H)
    np.testing.assert_allclose(H.damped(2.0).to_dense(), A + 2 * np.eye(16), rtol=1e-5)
