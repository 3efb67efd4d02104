"""Every operator has the same methods, which agree with its dense matrix."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import random

X = random(0, 5, 3, dtype="float64")
Y = random(1, 5, 2, dtype="float64")


def variables():
    shapes = {"W": (3, 2), "b": (2,)}
    return {
        name: tf.Variable(random(i, *shape, dtype="float64"), name=name)
        for i, (name, shape) in enumerate(shapes.items())
    }


def made(kind):
    v = variables()

    def model(x):
        return tf.tanh(x @ v["W"] + v["b"])

    def loss(p, y):
        return tf.reduce_mean(tf.reduce_sum((p - y) ** 2, axis=1)) / 2

    if kind == "hessian":
        return hvp.HessianOperator(lambda x, y: loss(model(x), y), v, (X, Y), damping=0.5)
    if kind == "gauss-newton":
        return hvp.GaussNewtonOperator(model, loss, v, (X, Y), batch_size=2)
    if kind == "fisher":
        return hvp.FisherOperator(model, loss, v, (X, Y), kind="empirical")
    if kind in ("kfac", "ekfac"):
        K = {"kfac": hvp.KFAC, "ekfac": hvp.EKFAC}[kind](model, loss, v, (X, Y))
        return K.inverse(0.5) if kind == "ekfac" else K
    if kind == "block":
        return made("hessian").block("W")
    if kind == "off the diagonal":
        return made("hessian").block("W", "b")
    J = hvp.JacobianOperator(model, v, (X,), batch_size=2)
    return {"jacobian": J, "columns": J.block("b"), "transpose": J.T}[kind]


KINDS = ["hessian", "gauss-newton", "fisher", "block", "kfac", "ekfac"]
RECTANGULAR = ["off the diagonal", "jacobian", "columns", "transpose"]


def close(value, want):
    np.testing.assert_allclose(value, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS + RECTANGULAR)
def test_they_agree_with_the_dense_matrix(kind):
    A = made(kind)
    dense = A.to_dense()
    m, n = A.shape
    u, v = random(3, m, dtype="float64"), random(4, n, dtype="float64")
    U, V = random(5, m, 4, dtype="float64"), random(6, n, 4, dtype="float64")
    for product, want in (
        (A @ v, dense @ v),
        (A @ V, dense @ V),
        (A.matvec(v[:, None]), dense @ v[:, None]),
        (A.rmatvec(u), dense.T @ u),
        (A.T @ u, dense.T @ u),
        (A.T @ U, dense.T @ U),
        (A.T.to_dense(), dense.T),
        (A.T.T.to_dense(), dense),
        (A.H @ u, dense.T @ u),
        (A.product(tf.constant(v)), dense @ v),
        (A.T.product(tf.constant(u)), dense.T @ u),
        ((2 * A) @ v, 2 * dense @ v),
    ):
        close(np.ravel(product), np.ravel(want))
    linear = A.as_tf_operator()
    close(linear.matvec(v), dense @ v)
    close(linear.matmul(V), dense @ V)
    close(linear.matvec(u, adjoint=True), dense.T @ u)
    close(linear.to_dense(), dense)
    close(linear.matmul(np.stack([V, 2 * V])), np.stack([dense @ V, 2 * dense @ V]))
    assert linear.is_square == (m == n)
    assert A.T.T is A or kind == "transpose"
    assert f"{m} x {n}" in repr(A) or kind == "transpose"
    if kind in ("kfac", "ekfac"):
        return
    assert A.stats.products > 0
    A.close()
    with pytest.raises(hvp.ClosedOperatorError):
        A @ v


@pytest.mark.parametrize("kind", KINDS)
def test_square_ones_have_a_diagonal_and_take_damping(kind):
    A = made(kind)
    dense = A.to_dense()
    close(A.diagonal(), np.diagonal(dense))
    close(A.damped(0.25).to_dense(), dense + 0.25 * np.eye(len(dense)))
    close(A.damped(0.25).diagonal(), np.diagonal(dense) + 0.25)
    if kind in ("kfac", "ekfac"):
        return
    with pytest.raises(hvp.TooLargeError, match=r"hvp\.diagonal"):
        A.diagonal(max_size=3)


@pytest.mark.parametrize("kind", RECTANGULAR)
def test_rectangular_ones_say_so(kind):
    A = made(kind)
    rows, columns = A.shape
    for use in (A.diagonal, lambda: A.damped(1.0)):
        with pytest.raises(hvp.HvpError, match=f"{rows} x {columns}"):
            use()


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton", "fisher", "jacobian", "kfac", "ekfac"])
def test_nests(kind):
    A = made(kind)
    v = random(4, A.shape[1], dtype="float64")
    nest = A.unflatten(v)
    assert set(nest) == {"W", "b"}
    close(A.flatten(nest), v)
    product = A.product({name: tf.constant(part) for name, part in nest.items()})
    if kind == "jacobian":
        close(product, (A @ v).reshape(5, 2))
    else:
        close(A.flatten(product), A @ v)


MADE_FROM_MATRICES = {
    "exact inverse": lambda H: hvp.ExactInverse(H),
    "Neumann series": lambda H: hvp.NeumannInverse(H, iterations=20),
    "Arnoldi": lambda H: hvp.ArnoldiInverse(H, rank=3),
    "Nystrom": lambda H: hvp.NystromPreconditioner(H, rank=4),
    "diagonal": lambda H: hvp.DiagonalPreconditioner(H),
    "blocks": lambda H: hvp.BlockDiagonalPreconditioner(H),
}


@pytest.mark.parametrize("kind", MADE_FROM_MATRICES)
def test_inverses_and_preconditioners_have_them_too(kind):
    A = MADE_FROM_MATRICES[kind](made("fisher").damped(1.0))
    n = A.shape[0]
    dense = np.asarray(A.to_dense())
    close(dense, dense.T)
    v, V = random(4, n, dtype="float64"), random(6, n, 4, dtype="float64")
    for product, want in (
        (A @ v, dense @ v),
        (A @ V, dense @ V),
        (A.T @ v, dense @ v),
        (A.product(tf.constant(v)), dense @ v),
        (tf.function(A.product)(tf.constant(v)), dense @ v),
        (A.damped(0.25) @ v, dense @ v + 0.25 * v),
        (A.as_tf_operator().matmul(V), dense @ V),
        (A.flatten(A.product(A.unflatten(v))), dense @ v),
    ):
        np.testing.assert_allclose(product, want, rtol=1e-6, atol=1e-7)
    assert A.T is A
    with pytest.raises(hvp.InvalidVectorError, match="finite"):
        A @ np.full(n, np.nan)
