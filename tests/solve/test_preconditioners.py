"""Preconditioners, against the dense matrices they approximate."""

import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf

import hvp
from hvp._solve.preconditioners import PRECONDITIONERS

SIZE = 40


def inverse_of(A, name, rank, dtype="float64"):
    """Return the preconditioner of a kind for the matrix `A`, as a dense matrix."""
    w = tf.Variable(np.zeros(len(A), dtype))
    H = hvp.HessianOperator(lambda: tf.tensordot(w, tf.linalg.matvec(A.astype(dtype), w), 1) / 2, w)
    kind = PRECONDITIONERS[name]
    tensors = kind.make(H, rank, [0, 1])
    assert H.stats.products == kind.products(rank)
    assert [list(t.shape) for t in tensors] == kind.shapes(len(A), rank)
    return np.stack(
        [kind.solve(tf.constant(e), tensors).numpy() for e in np.eye(len(A), dtype=dtype)]
    )


def matrix(eigenvalues, seed=0):
    Q = scipy.linalg.qr(np.random.default_rng(seed).standard_normal((SIZE, SIZE)))[0]
    return (Q * eigenvalues) @ Q.T


def test_diagonal_of_a_diagonal_is_exact():
    d = np.linspace(-3, 5, SIZE)
    inverse = inverse_of(np.diag(d), "diagonal", 0)
    lowest = 1e-2 * np.abs(d).mean()
    np.testing.assert_allclose(inverse, np.diag(1 / np.maximum(np.abs(d), lowest)), rtol=1e-10)


def test_nystrom_improves_the_condition_of_a_low_rank_matrix():
    """A sketch underestimates small eigenvalues, by a factor that its rank bounds."""
    A = matrix(np.concatenate([np.geomspace(1e6, 10, 8), np.zeros(SIZE - 8)])) + np.eye(SIZE)
    P = inverse_of(A, "nystrom", 12)
    np.testing.assert_allclose(P, P.T, atol=1e-10)
    eigenvalues = np.linalg.eigvals(P @ A).real
    assert np.linalg.cond(A) > 1e5
    assert eigenvalues.max() / eigenvalues.min() < 20


@pytest.mark.parametrize("name", PRECONDITIONERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spectrum", ["positive", "indefinite", "negative", "zero"])
@pytest.mark.few(8)
def test_the_inverse_is_positive_definite_for_any_matrix(name, dtype, spectrum):
    values = np.geomspace(1e-3, 1e3, SIZE)
    values[: {"positive": 0, "indefinite": 30, "negative": SIZE, "zero": 0}[spectrum]] *= -1
    A = matrix(values if spectrum != "zero" else 0 * values)
    P = inverse_of(A, name, 10, dtype).astype("float64")
    assert np.linalg.eigvalsh((P + P.T) / 2).min() > 0


def test_blocks_of_entries():
    w = tf.Variable(np.arange(1.0, 6.0))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) + w[0] * w[3] + w[1] * w[2], w)
    blocks = [np.array([3, 0]), np.array([1, 4])]
    with pytest.raises(hvp.HvpError, match="in no block"):
        hvp.BlockDiagonalPreconditioner(H, blocks)
    for wrong in (1, "w"):
        with pytest.raises(hvp.HvpError, match=f"blocks is {wrong!r}"):
            hvp.BlockDiagonalPreconditioner(H, wrong)
    M = hvp.BlockDiagonalPreconditioner(H, [*blocks, np.array([2])])
    dense = H.to_dense()
    dense[1, 2] = dense[2, 1] = 0
    np.testing.assert_allclose(M @ dense, np.eye(5), atol=1e-12)
