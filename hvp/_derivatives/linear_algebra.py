"""Gradients of operations on singular or complex matrices, and with respect to regularizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._derivatives.registry import TENSORFLOWS, gradient_of

# A determinant counts as zero up to this many rounding errors of the product of the norms of the
# rows. Matrices with more rows than `_MOST_ROWS` must not be singular.
_ROUNDINGS, _MOST_ROWS = 1000, 64


@gradient_of("MatrixDeterminant")
def _determinant(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # The matrix of cofactors, det(A) A^-H. TensorFlow inverts singular matrices, too, although the
    # determinant is a polynomial.
    a, determinant = operation.inputs[0], operation.outputs[0]
    size = a.shape[-1]
    scales = upstream * tf.math.conj(determinant)
    if size is None or size > _MOST_ROWS:
        return [scales[..., tf.newaxis, tf.newaxis] * tf.linalg.inv(a, adjoint=True)]
    rounding = _ROUNDINGS * np.finfo(a.dtype.as_numpy_dtype).eps
    norms = tf.reduce_prod(tf.norm(tf.stop_gradient(a), axis=-1), axis=-1)
    is_singular = tf.abs(tf.stop_gradient(determinant)) <= tf.abs(rounding * norms)
    is_singular = is_singular[..., tf.newaxis, tf.newaxis]
    eye = tf.eye(size, batch_shape=tf.shape(a)[:-2], dtype=a.dtype)
    inverse = tf.linalg.inv(tf.where(is_singular, eye, a), adjoint=True)
    by_inverse = scales[..., tf.newaxis, tf.newaxis] * inverse
    cofactors = tf.linalg.adjoint(_adjugate(tf.where(is_singular, a, eye), size))
    by_cofactors = upstream[..., tf.newaxis, tf.newaxis] * cofactors
    return [tf.where(is_singular, by_cofactors, by_inverse)]


def _adjugate(a: tf.Tensor, size: int) -> tf.Tensor:
    """Return det(A) A^-1 by the polynomials of Faddeev and LeVerrier, without a division by zero.

    With M_1 = I, c_k = -tr(A M_k) / k and M_{k+1} = A M_k + c_k I, it is (-1)^(n-1) M_n.
    """
    eye = tf.eye(size, batch_shape=tf.shape(a)[:-2], dtype=a.dtype)
    total = eye
    for k in range(1, size):
        product = a @ total
        coefficients = -tf.linalg.trace(product) / tf.cast(k, a.dtype)
        total = product + coefficients[..., tf.newaxis, tf.newaxis] * eye
    return -total if size % 2 == 0 else total


@gradient_of("LogMatrixDeterminant")
def _log_determinant(
    operation: Any, upstream_of_sign: tf.Tensor, upstream: tf.Tensor
) -> Sequence[Any]:
    # TensorFlow leaves out the sign, which is a function of complex matrices.
    a = operation.inputs[0]
    if not a.dtype.is_complex:
        return TENSORFLOWS["LogMatrixDeterminant"](operation, upstream_of_sign, upstream)
    sign = tf.raw_ops.LogMatrixDeterminant(input=a).sign
    zero = tf.zeros_like(sign)
    turned = zero if upstream_of_sign is None else tf.math.conj(sign) * upstream_of_sign
    along = zero if upstream is None else upstream
    scales = tf.complex(tf.math.real(along), tf.math.imag(turned))
    return [scales[..., tf.newaxis, tf.newaxis] * tf.linalg.inv(a, adjoint=True)]


@gradient_of("MatrixSquareRoot")
def _square_root(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # With the root R, the gradient X solves R^H X + X R^H = u. TensorFlow does not conjugate R.
    if not operation.outputs[0].dtype.is_complex:
        return TENSORFLOWS["MatrixSquareRoot"](operation, upstream)
    root = tf.linalg.adjoint(operation.outputs[0])
    size, batch = tf.shape(root)[-1], tf.shape(root)[:-2]
    eye = tf.eye(size, batch_shape=batch, dtype=root.dtype)
    both = tf.einsum("...ij,...kl->...ikjl", root, eye)
    both += tf.einsum("...ij,...lk->...ikjl", eye, root)
    matrix = tf.reshape(both, tf.concat([batch, [size**2, size**2]], 0))
    right = tf.reshape(upstream, tf.concat([batch, [size**2, 1]], 0))
    return [tf.reshape(tf.linalg.solve(matrix, right), tf.shape(upstream))]


@gradient_of("TridiagonalSolve")
def _tridiagonal_solve(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # TensorFlow returns J^T u, and the gradient is J^H u.
    gradients = TENSORFLOWS["TridiagonalSolve"](operation, tf.math.conj(upstream))
    return [tf.math.conj(gradient) for gradient in gradients]


@gradient_of("MatrixSolveLs")
def _least_squares(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # x = (A^H A + l I)^-1 A^H b, or A^H (A A^H + l I)^-1 b for fewer rows than columns. TensorFlow
    # leaves out the derivative by l, and a conjugation.
    a, b, regularizer = operation.inputs
    rows, columns = a.shape[-2:]
    if not operation.get_attr("fast") or rows is None or columns is None:
        return TENSORFLOWS["MatrixSolveLs"](operation, upstream)
    x, size = operation.outputs[0], min(rows, columns)
    ridge = tf.cast(regularizer, a.dtype) * tf.eye(size, dtype=a.dtype)
    if rows >= columns:
        factor = tf.linalg.cholesky(tf.matmul(a, a, adjoint_a=True) + ridge)
        left = tf.linalg.cholesky_solve(factor, upstream)
        outer = tf.matmul(x, left, adjoint_b=True)
        by_a = tf.matmul(b, left, adjoint_b=True) - a @ (outer + tf.linalg.adjoint(outer))
        by_b, right = a @ left, x
    else:
        factor = tf.linalg.cholesky(tf.matmul(a, a, adjoint_b=True) + ridge)
        right = tf.linalg.cholesky_solve(factor, b)
        left = by_b = tf.linalg.cholesky_solve(factor, a @ upstream)
        rest = upstream - tf.matmul(a, by_b, adjoint_a=True)
        by_a = tf.matmul(right, rest, adjoint_b=True)
        by_a -= by_b @ tf.matmul(right, a, adjoint_a=True)
    product = tf.reduce_sum(tf.math.conj(left) * right)
    return by_a, by_b, -tf.cast(tf.math.real(product), regularizer.dtype)
