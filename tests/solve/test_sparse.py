"""Inverses of sparse matrices against dense ones, and Newton's method with them."""

import numpy as np
import pytest
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

    newton = hvp.NewtonCG(loss, w, preconditioner=lambda H: hvp.SparseInverse(H, positive=True))
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
