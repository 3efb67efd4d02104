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


def expected(kind):
    """The matrices in closed form, of arrays alone."""
    v = variables()
    # Flat vectors have the variables in the order of their names, as tf.nest sorts them.
    p = np.tanh(X @ v["W"].numpy() + v["b"].numpy())
    slope, bend = 1 - p**2, -2 * p * (1 - p**2)
    J = np.zeros((5, 2, 8))
    bends = np.zeros((5, 2, 8, 8))
    for i in range(5):
        for k in range(2):
            z = np.zeros(8)  # the derivative of what enters tanh
            z[:6].reshape(3, 2)[:, k] = X[i]
            z[6 + k] = 1
            J[i, k], bends[i, k] = slope[i, k] * z, bend[i, k] * np.outer(z, z)
    flat = J.reshape(10, 8)
    gauss_newton = flat.T @ flat / 5
    hessian = gauss_newton + np.einsum("ik,ikab->ab", p - Y, bends) / 5
    gradients = np.einsum("ik,ika->ia", p - Y, J)
    damped = hessian + 0.5 * np.eye(8)
    # Kronecker factors: of the inputs with a one for the bias, and of what enters tanh.
    inputs = np.hstack([X, np.ones((5, 1))])
    factors = inputs.T @ inputs / 5, np.diag(np.mean(slope**2, axis=0))
    Q = np.kron(*(np.linalg.eigh(factor)[1] for factor in factors))
    corrected = (Q * np.diagonal(Q.T @ gauss_newton @ Q)) @ Q.T
    return {
        "kfac": np.kron(*factors),
        "ekfac": np.linalg.inv(corrected + 0.5 * np.eye(8)),
        "hessian": damped,
        "gauss-newton": gauss_newton,
        "fisher": gradients.T @ gradients / 5,
        "block": damped[:6, :6],
        "off the diagonal": damped[:6, 6:],
        "jacobian": flat,
        "columns": flat[:, 6:],
        "transpose": flat.T,
    }[kind]


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
@pytest.mark.few(1)
def test_they_agree_with_the_dense_matrix(kind):
    A = made(kind)
    dense = A.to_dense()
    np.testing.assert_allclose(dense, expected(kind), rtol=1e-9, atol=1e-10)
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
@pytest.mark.few(1)
def test_square_ones_have_a_diagonal_and_take_damping(kind):
    A = made(kind)
    dense = A.to_dense()
    close(A.diagonal(), np.diagonal(dense))
    close(A.damped(0.25).to_dense(), dense + 0.25 * np.eye(len(dense)))
    close(A.damped(0.25).diagonal(), np.diagonal(dense) + 0.25)
    close(A.damped(0.25).damped(0.5) @ np.ones(len(dense)), dense.sum(1) + 0.75)
    if kind in ("kfac", "ekfac"):
        return
    with pytest.raises(hvp.TooLargeError, match=r"hvp\.diagonal"):
        A.diagonal(max_size=1)


def test_a_square_jacobian_that_is_damped_is_no_jacobian():
    """Its products with tensors would be those of the Jacobian."""
    w = tf.Variable(random(0, 3, dtype="float64"))
    J = hvp.JacobianOperator(lambda: tf.sin(w) * tf.reduce_sum(w), w)
    damped = J.damped(0.5)
    close(damped.to_dense(), J.to_dense() + 0.5 * np.eye(3))
    close(damped.T.to_dense(), J.to_dense().T + 0.5 * np.eye(3))
    assert not hasattr(damped, "jvp")
    assert not hasattr(damped, "vjp")
    assert damped.stats.products > 0


@pytest.mark.parametrize("kind", RECTANGULAR)
def test_rectangular_ones_say_so(kind):
    A = made(kind)
    rows, columns = A.shape
    for use in (A.diagonal, lambda: A.damped(1.0)):
        with pytest.raises(hvp.HvpError, match=f"{rows} x {columns}"):
            use()


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton", "fisher", "jacobian", "kfac", "ekfac"])
@pytest.mark.few(1)
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


# With the inverse that they approximate, and by how much they may differ from it.
MADE_FROM_MATRICES = {
    "exact inverse": (lambda H: hvp.ExactInverse(H), 1e-12),
    "Neumann series": (lambda H: hvp.NeumannInverse(H, iterations=200), 1e-10),
    "Nystrom": (lambda H: hvp.NystromPreconditioner(H, rank=8), 1e-8),
    "diagonal": (lambda H: hvp.DiagonalPreconditioner(H, samples=64), None),
    "blocks": (lambda H: hvp.BlockDiagonalPreconditioner(H, [["W", "b"]]), 1e-12),
}


@pytest.mark.parametrize("kind", MADE_FROM_MATRICES)
@pytest.mark.few(1)
def test_inverses_and_preconditioners_have_them_too(kind):
    make, tolerance = MADE_FROM_MATRICES[kind]
    A = make(made("fisher").damped(1.0))
    n = A.shape[0]
    dense = np.asarray(A.to_dense())
    inverse = np.linalg.inv(expected("fisher") + np.eye(n))
    if tolerance is None:
        assert 0 < np.linalg.norm(dense - inverse) < 0.6 * np.linalg.norm(inverse)
    elif kind == "Nystrom":  # of the five eigenvalues that are not zero
        values, vectors = np.linalg.eigh(expected("fisher"))
        e, U = values[-5:], vectors[:, -5:]
        approximated = (U * (e + 1)) @ U.T / (e[0] + 1) + np.eye(n) - U @ U.T
        np.testing.assert_allclose(dense, np.linalg.inv(approximated), atol=tolerance)
    else:
        np.testing.assert_allclose(dense, inverse, atol=tolerance)
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
    # What describes an inverse does not describe it with damping.
    close(A.damped(0.25).to_dense(), dense + 0.25 * np.eye(n))
    assert not hasattr(A.damped(0.25), "eigenvalues")
    with pytest.raises(hvp.InvalidVectorError, match="finite"):
        A @ np.full(n, np.nan)
