"""Symmetric matrices with chosen eigenvalues, and operators with these matrices."""

import functools

import numpy as np
import tensorflow as tf

import hvp

SPECTRA = {
    "definite": lambda n: np.linspace(1, 10, n),
    "clustered": lambda n: np.concatenate([np.geomspace(10, 1e4, 8), np.ones(n - 8)]),
    "ill-conditioned": lambda n: np.geomspace(1e-5, 1, n),
    "indefinite": lambda n: np.concatenate(
        [-np.linspace(0.1, 1, n // 6), np.linspace(0.1, 2, n - n // 6)]
    ),
    "singular": lambda n: np.concatenate([np.zeros(n // 6), np.linspace(0.5, 2, n - n // 6)]),
}


def matrix(eigenvalues, seed=0):
    """Return a symmetric matrix with these eigenvalues and random eigenvectors."""
    eigenvalues = np.asarray(eigenvalues, float)
    draws = np.random.default_rng(seed).standard_normal((len(eigenvalues), len(eigenvalues)))
    Q = np.linalg.qr(draws)[0]
    A = (Q * eigenvalues) @ Q.T
    return (A + A.T) / 2


def operator(A, dtype="float64", **options):
    """Return the Hessian of the quadratic `(w, A w) / 2`, which is `A`."""
    w = tf.Variable(np.zeros(len(A), dtype))
    constant = tf.constant(A.astype(dtype))
    return hvp.HessianOperator(
        lambda: tf.tensordot(w, tf.linalg.matvec(constant, w), 1) / 2, w, **options
    )


def shared(A, dtype="float64"):
    """Return an operator with the matrix `A` until the next call, traced once for each size.

    The matrix is a frozen variable of the loss, so that its solvers are compiled once as well.
    """
    constant, H = _shared(len(A), dtype)
    constant.assign(A)
    H.refresh()
    return H


@functools.cache
def _shared(n, dtype):
    w, A = tf.Variable(np.zeros(n, dtype)), tf.Variable(np.eye(n, dtype=dtype), trainable=False)
    loss = lambda: tf.tensordot(w, tf.linalg.matvec(A, w), 1) / 2  # noqa: E731
    return A, hvp.HessianOperator(loss, w)


def columns(n, k, seed=1):
    """Return `k` random right-hand sides."""
    return np.random.default_rng(seed).standard_normal((n, k))
