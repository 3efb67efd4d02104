"""Inverses of sparse matrices against dense ones, and Newton's method with them."""

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import tensorflow as tf

import hvp


def banded(size=60, dtype="float64", shift=1.0):
    rng = np.random.default_rng(0)
    w = tf.Variable(rng.standard_normal(size), dtype=dtype)

    def loss():
        return tf.reduce_sum((w[1:] - w[:-1]) ** 4) + shift * tf.reduce_sum(w**2)

    return loss, w


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_the_inverse_is_that_of_the_dense_matrix(dtype, damping):
    loss, w = banded(dtype=dtype)
    H = hvp.HessianOperator(loss, w)
    inverse = hvp.SparseInverse(H, damping)
    dense = H.to_dense().astype(np.float64) + damping * np.eye(60)
    v = np.random.default_rng(1).standard_normal((60, 3)).astype(dtype)
    rtol = 1e-4 if dtype == "float32" else 1e-10
    np.testing.assert_allclose(inverse @ v, np.linalg.solve(dense, v), rtol=rtol, atol=rtol)
    assert inverse.negative == 0
    assert inverse.shift == 0
    assert inverse.log_determinant == pytest.approx(np.linalg.slogdet(dense)[1], rel=rtol)


@pytest.mark.parametrize("shift", [-1.0, -0.2])
def test_negative_eigenvalues_are_counted_and_shifted(shift):
    loss, w = banded(shift=shift)
    H = hvp.HessianOperator(loss, w)
    eigenvalues = np.linalg.eigvalsh(H.to_dense())
    inverse = hvp.SparseInverse(H)
    assert inverse.negative == (eigenvalues < 0).sum() > 0
    positive = hvp.SparseInverse(H, positive=True)
    assert positive.negative == 0
    assert positive.shift > -eigenvalues[0]
    assert (np.linalg.eigvalsh(positive.to_dense()) > 0).all()


def test_a_singular_matrix_is_refused():
    w = tf.Variable(np.zeros(20))
    H = hvp.HessianOperator(lambda: tf.reduce_sum((w[1:] - w[:-1]) ** 2) / 2 + 0 * w[0], w)
    singular = scipy.sparse.csr_array(np.diag([1.0, 0.0, 2.0]))
    with pytest.raises(hvp.HvpError, match="singular"):
        hvp.SparseInverse(singular)
    with pytest.raises(hvp.HvpError, match="symmetric"):
        hvp.SparseInverse(scipy.sparse.csr_array(np.triu(np.ones((3, 3)))))
    # The remedy.
    assert hvp.SparseInverse(singular, damping=0.5).negative == 0
    assert hvp.SparseInverse(H, positive=True).shift > 0


@pytest.mark.parametrize("shape", ["vector", "columns", "nest"])
def test_solve(shape):
    loss, w = banded()
    H = hvp.HessianOperator(loss, w)
    b = np.random.default_rng(1).standard_normal((60, 4) if shape == "columns" else 60)
    given = H.unflatten(tf.constant(b)) if shape == "nest" else b
    result = hvp.solve(H, given, method="sparse", damping=0.1, rtol=1e-12)
    assert np.all(result.converged)
    assert result.method == "sparse"
    expected = np.linalg.solve(H.to_dense() + 0.1 * np.eye(60), b)
    np.testing.assert_allclose(result.x, expected, rtol=1e-9)
    with pytest.raises(hvp.HvpError, match="'sparse'"):
        hvp.solve(H, given, method="sparse", M="nystrom")


def test_newton_with_a_sparse_factorization_settles_a_long_string():
    size = 2000
    w = tf.Variable(np.random.default_rng(0).standard_normal(size))

    def loss():
        length = tf.reduce_sum(tf.sqrt(1 + (w[1:] - w[:-1]) ** 2))
        return length + 0.01 * tf.reduce_sum((w - 1) ** 2) + 1e-3 * tf.reduce_sum(w**4)

    newton = hvp.NewtonCG(loss, w, preconditioner="sparse")
    result = newton.minimize(gtol=1e-10)
    assert result.success, result.message
    assert result.nit <= 15
    assert max(step.cg_iterations for step in result.history) <= 2


def test_standard_errors_of_chosen_entries():
    loss, w = banded()
    H = hvp.HessianOperator(loss, w)
    inverse = hvp.SparseInverse(H)
    expected = np.sqrt(np.linalg.inv(H.to_dense()).diagonal())
    np.testing.assert_allclose(inverse.standard_errors(), expected, rtol=1e-10)
    np.testing.assert_allclose(inverse.standard_errors([3, 57]), expected[[3, 57]], rtol=1e-10)
    with pytest.raises(hvp.HvpError, match="60"):
        inverse.standard_errors([60])
    loss, w = banded(shift=-1.0)
    with pytest.raises(hvp.HvpError, match="negative eigenvalues"):
        hvp.SparseInverse(hvp.HessianOperator(loss, w)).standard_errors()


def test_the_diagonal_of_a_large_sparse_matrix_is_exact():
    loss, w = banded(size=5000)
    H = hvp.HessianOperator(loss, w)
    before = H.stats.products
    diagonal = H.diagonal()
    assert H.stats.products - before < 10
    steps = 12 * np.diff(w.numpy()) ** 2
    np.testing.assert_allclose(diagonal, 2 + np.pad(steps, (0, 1)) + np.pad(steps, (1, 0)))
    dense = tf.Variable(np.ones(5000))
    full = hvp.HessianOperator(lambda: tf.reduce_sum(dense) ** 2, dense)
    with pytest.raises(hvp.TooLargeError, match="5000"):
        full.diagonal()


@pytest.mark.parametrize("kind", ["dense", "sparse", "iterative"])
@pytest.mark.few(1)
def test_standard_errors(kind):
    """A chain of springs has a known inverse; a common factor couples all entries."""
    size = {"dense": 50, "sparse": 5000, "iterative": 5000}[kind]
    w = tf.Variable(np.zeros(size))

    def loss():
        shared = 0.0 if kind == "sparse" else 3 * tf.reduce_sum(w) ** 2 / size
        return tf.reduce_sum(w**2) / 2 + shared

    H = hvp.HessianOperator(loss, w)
    common = 0.0 if kind == "sparse" else 6 / size
    places = np.array([7, 0, 33])
    for damping in (0.0, 3.0):
        alone, found = 1 + damping, hvp.standard_errors(H.damped(damping), places)
        expected = np.sqrt((1 - common / (alone + common * size)) / alone)
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    if kind == "iterative":
        with pytest.raises(hvp.TooLargeError, match="5000"):
            hvp.standard_errors(H)
        with pytest.raises(hvp.HvpError, match="negative curvature"):
            hvp.standard_errors(H.damped(-2.0), places)
        scale = tf.constant(np.logspace(-6, 6, size))
        hard = hvp.HessianOperator(lambda: loss() + tf.reduce_sum(scale * w**2), w)
        with pytest.raises(hvp.HvpError, match=r"column 7 .* 3 iterations"):
            hvp.standard_errors(hard, places, maxiter=3)
    else:
        assert hvp.standard_errors(H).shape == (size,)
    for wrong in ([size], [-1], [0.5], [[1]]):
        with pytest.raises(hvp.HvpError, match=str(size - 1)):
            hvp.standard_errors(H, wrong)


def test_log_determinants_of_sparse_matrices_are_exact():
    size = 3000
    w = tf.Variable(np.zeros(size))
    H = hvp.HessianOperator(lambda: tf.reduce_sum((w[1:] - w[:-1]) ** 2) / 2, w).damped(0.5)
    # The eigenvalues of a chain with free ends.
    values = 2 - 2 * np.cos(np.pi * np.arange(size) / size) + 0.5
    result = hvp.logdet(H)
    assert result.estimate == pytest.approx(np.log(values).sum(), rel=1e-12)
    assert (result.method, result.products, result.standard_error) == ("sparse", 4, 0)
    estimate = hvp.logdet(H, method="lanczos", rtol=0.01)
    assert abs(estimate.estimate - result.estimate) < 6 * estimate.standard_error
    with pytest.raises(hvp.HvpError, match="negative"):
        hvp.logdet(H.damped(-1.0))
    turned = scipy.sparse.csr_array(np.kron(np.eye(200), [[0.0, 1.0], [1.0, 0.0]]))
    with pytest.raises(hvp.HvpError, match="negative"):  # its pivots are not on the diagonal
        hvp.logdet(turned, method="sparse")
    A = scipy.sparse.diags_array([1.0, 2.0, 3.0]).tocsr()
    assert hvp.logdet(A).estimate == pytest.approx(np.log(6))


def test_sparse_jacobians_in_scipys_least_squares():
    size = 300
    w = tf.Variable(np.full(size, -1.0))

    def residuals():
        return tf.concat([10 * (w[1:] - w[:-1] ** 2), 1 - w[:-1]], axis=0)

    J = hvp.JacobianOperator(residuals, w, on_stale="ignore")

    def values(at):
        w.assign(at)
        return residuals().numpy()

    def jacobian(at):
        w.assign(at)
        J.refresh()
        return J.to_sparse()

    pattern = J.sparsity().pattern
    start = np.full(size, 0.5)
    ours = scipy.optimize.least_squares(values, start, jacobian)
    theirs = scipy.optimize.least_squares(values, start, jac_sparsity=pattern)
    assert ours.success
    assert theirs.success
    np.testing.assert_allclose(ours.x, 1, atol=1e-6)
    np.testing.assert_allclose(theirs.x, 1, atol=1e-6)


@pytest.mark.long
def test_incomplete_factors_are_preconditioners():
    """Of a grid in three dimensions, whose exact factors have many more entries."""
    side = 14
    w = tf.Variable(np.random.default_rng(0).standard_normal((side, side, side)))

    def loss():
        along = [tf.reduce_sum(tf.experimental.numpy.diff(w, axis=axis) ** 2) for axis in range(3)]
        return tf.add_n(along) / 2 + 1e-4 * tf.reduce_sum(w**4)

    H = hvp.HessianOperator(loss, w)
    M = hvp.SparseInverse(H, drop=0.01)
    assert M.negative is None
    assert np.isnan(M.log_determinant)
    u, v = np.random.default_rng(1).standard_normal((2, side**3))
    assert u @ (M @ v) == pytest.approx(v @ (M @ u), rel=1e-10)
    plain, better = (hvp.solve(H, v, method="cg", rtol=1e-8, M=m) for m in (None, M))
    assert better.converged
    assert better.iterations < plain.iterations / 3
    np.testing.assert_allclose(better.x, hvp.SparseInverse(H) @ v, rtol=1e-4, atol=1e-6)
    with pytest.raises(hvp.HvpError, match="positive definite"):
        M.standard_errors([0])
    indefinite = H.damped(-0.5)
    assert hvp.SparseInverse(indefinite, positive=True, drop=0.01).shift > 0
    newton = hvp.NewtonCG(
        loss, w, preconditioner=lambda H: hvp.SparseInverse(H, positive=True, drop=0.01)
    )
    assert newton.minimize(gtol=1e-6).success


def arrowhead(n):
    """ARWHEAD: all share the last variable; the minimum is zero."""

    def loss(x):
        return tf.reduce_sum((x[:-1] ** 2 + x[-1] ** 2) ** 2 - 4 * x[:-1] + 3)

    def hessian(x):
        H = np.diag(12 * x**2 + 4 * x[-1] ** 2)
        H[-1, -1] = np.sum(4 * x[:-1] ** 2 + 12 * x[-1] ** 2)
        H[-1, :-1] = H[:-1, -1] = 8 * x[:-1] * x[-1]
        return H

    return loss, hessian, np.ones(n), 0.0, 2


def engval(n):
    """ENGVAL1: pairs of neighbours."""

    def loss(x):
        return tf.reduce_sum((x[:-1] ** 2 + x[1:] ** 2) ** 2 - 4 * x[:-1] + 3)

    def hessian(x):
        H = np.zeros((n, n))
        for i in range(n - 1):
            a, b = x[i : i + 2]
            pair = [[12 * a**2 + 4 * b**2, 8 * a * b], [8 * a * b, 4 * a**2 + 12 * b**2]]
            H[i : i + 2, i : i + 2] += pair
        return H

    return loss, hessian, np.full(n, 2.0), None, 3


def broyden(n):
    """The tridiagonal system of Broyden, as a sum of squares."""

    def residuals(x):
        return (3 - 2 * x) * x - np.r_[0, x[:-1]] - 2 * np.r_[x[1:], 0] + 1

    def loss(x):
        zero = tf.zeros(1, x.dtype)
        before, after = tf.concat([zero, x[:-1]], 0), tf.concat([x[1:], zero], 0)
        return tf.reduce_sum(((3 - 2 * x) * x - before - 2 * after + 1) ** 2)

    def hessian(x):
        J = np.diag(3 - 4 * x) - np.eye(n, k=-1) - 2 * np.eye(n, k=1)
        f = residuals(x)
        return 2 * (J.T @ J + np.diag(-4 * f))

    return loss, hessian, np.full(n, -1.0), 0.0, 5


def rosenbrock(n):
    """The chained function of Rosenbrock."""

    def loss(x):
        return tf.reduce_sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    def hessian(x):
        H = np.diag(np.r_[2 + 1200 * x[:-1] ** 2 - 400 * x[1:], 0] + np.r_[0, np.full(n - 1, 200)])
        return H - 400 * (np.diag(x[:-1], 1) + np.diag(x[:-1], -1))

    return loss, hessian, np.full(n, 0.5), 0.0, 3


def trigonometric(n):
    """The trigonometric function of Spedicato: all variables in all residuals."""

    def loss(x):
        i = tf.range(1, n + 1, dtype=x.dtype)
        return tf.reduce_sum((n - tf.reduce_sum(tf.cos(x)) + i * (1 - tf.cos(x)) - tf.sin(x)) ** 2)

    def hessian(x):
        i, s, c = np.arange(1, n + 1), np.sin(x), np.cos(x)
        f = n - c.sum() + i * (1 - c) - s
        J = np.tile(s, (n, 1)) + np.diag(i * s - c)
        return 2 * (J.T @ J + np.diag(c * f.sum() + f * (i * c + s)))

    return loss, hessian, np.full(n, 1 / n), None, n


@pytest.mark.parametrize("problem", [arrowhead, engval, broyden, rosenbrock, trigonometric])
@pytest.mark.few(1)
def test_problems_of_the_literature(problem):
    size = 60
    loss, hessian, start, least, products = problem(size)
    x = tf.Variable(start)
    for at in (start, np.random.default_rng(0).standard_normal(size)):
        x.assign(at)
        H = hvp.HessianOperator(lambda: loss(x), x)
        expected = hessian(at)
        found = H.to_sparse().toarray()
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * abs(expected).max())
        assert H.sparsity().products == products
    x.assign(start)
    result = hvp.NewtonCG(lambda: loss(x), x, preconditioner="sparse").minimize(gtol=1e-8)
    assert result.success, result.message
    if least is not None:
        assert result.fun == pytest.approx(least, abs=1e-12)


def test_entries_that_are_no_numbers_are_refused():
    matrix = scipy.sparse.csc_array([[np.nan, 0.0], [0.0, 1.0]])
    with pytest.raises(hvp.NonFiniteError):
        hvp.SparseInverse(matrix, positive=True)


def test_checkpoints(tmp_path):
    w, file = tf.Variable(np.arange(1.0, 6.0)), tmp_path / "solution.npz"
    for begun in (False, True):
        H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
        x = hvp.solve(H, np.ones(5), method="sparse", checkpoint=file).x
        np.testing.assert_allclose(x, 1 / np.arange(1.0, 6.0) ** 2, rtol=1e-12)
        assert file.exists()
        assert (H.stats.products == 0) is begun
    with pytest.raises(hvp.CheckpointError, match="right-hand sides"):
        hvp.solve(H, np.zeros(5), method="sparse", checkpoint=file)


@pytest.mark.parametrize("pivot", [0.0, 1e-17, 1e-10, 1e-5])
def test_small_pivots_of_an_indefinite_matrix(pivot):
    """On the diagonal alone, the pivots would spoil the factors."""
    A = np.kron(np.eye(5), [[pivot, 1], [1, pivot]]) + np.diag(np.full(8, 0.3), 2)
    A = (A + A.T) / 2 + np.diag([0, *[0.1, 0] * 4, 1])
    inverse = hvp.SparseInverse(scipy.sparse.csr_array(A))
    np.testing.assert_allclose(inverse @ np.eye(10), np.linalg.inv(A), rtol=1e-6, atol=1e-8)
    assert inverse.log_determinant == pytest.approx(np.linalg.slogdet(A)[1], rel=1e-6)
    assert inverse.negative in (None, int((np.linalg.eigvalsh(A) < 0).sum()))
    positive = hvp.SparseInverse(scipy.sparse.csr_array(A), positive=True)
    assert (np.linalg.eigvalsh(positive.to_dense()) > 0).all()


def test_the_inverse_of_another_point_is_refused():
    loss, w = banded()
    H = hvp.HessianOperator(loss, w)
    inverse = hvp.SparseInverse(H)
    H.refresh()
    for use in (lambda: inverse @ np.ones(60), lambda: inverse.standard_errors()):
        with pytest.raises(hvp.StaleOperatorError, match="evaluated again"):
            use()
