"""Positive definite approximations of a symmetric operator that are easily inverted, as tensors.

Each kind is a pair: what makes its tensors from products with the operator, and what applies its
inverse, which also runs inside a graph. Neither scipy nor TensorFlow has one that is made from
products alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from hvp._operators.operator import SymmetricOperator

# Random signs for the diagonal, and what its entries are at least, in units of their mean.
_SAMPLES = 16
_LEAST = 1e-2

Tensors = Sequence[tf.Tensor]


@dataclass(frozen=True)
class Preconditioner:
    """One kind of preconditioner.

    Attributes
    ----------
    make : callable
        Takes an operator, the rank wanted and a seed of two integers; returns tensors.
    shapes : callable
        Takes `n` and the rank; returns the tensors' shapes.
    solve : callable
        Takes a vector and the tensors; returns the inverse times the vector.
    products : callable
        Takes the rank; tells how many products `make` needs.
    """

    make: Callable[[SymmetricOperator, int, Tensors], list[tf.Tensor]]
    shapes: Callable[[int, int], list[list[int]]]
    solve: Callable[[tf.Tensor, Tensors], tf.Tensor]
    products: Callable[[int], int]


def _make_diagonal(operator: SymmetricOperator, rank: int, seed: Tensors) -> list[tf.Tensor]:
    """Estimate the diagonal's absolute values (Bekas, Kokiopoulou and Saad 2007)."""
    del rank
    shape = (operator.shape[0], _SAMPLES)
    bits = tf.random.stateless_uniform(shape, seed, 0, 2, tf.int32)
    signs = tf.cast(2 * bits - 1, operator.dtype)
    estimate = tf.abs(tf.reduce_mean(signs * operator.as_tf_operator().matmul(signs), axis=1))
    least = _LEAST * tf.reduce_mean(estimate)
    # All the same where the operator is zero.
    return [tf.where(least > 0, tf.maximum(estimate, least), tf.ones_like(estimate))]


def _make_nystrom(operator: SymmetricOperator, rank: int, seed: Tensors) -> list[tf.Tensor]:
    """Sketch the largest eigenvalues (Frangella, Tropp and Udell 2023), of the positive part."""
    size = operator.shape[0]
    basis, _ = tf.linalg.qr(tf.random.stateless_normal((size, rank), seed, dtype=operator.dtype))
    image = operator.as_tf_operator().matmul(basis)
    core = tf.linalg.matmul(basis, image, transpose_a=True)
    values, vectors = tf.linalg.eigh((core + tf.transpose(core)) / 2)
    # Curvature that is not positive, or rounding, has no part in it.
    used = values > tf.reduce_max(tf.abs(values)) * rank * operator.dtype.type(1e-6)
    roots = tf.where(used, tf.math.rsqrt(tf.where(used, values, tf.ones_like(values))), 0)
    singular, left, _ = tf.linalg.svd(tf.linalg.matmul(image, vectors) * roots)
    eigenvalues = tf.square(singular)
    kept = eigenvalues > 0
    smallest = tf.reduce_min(tf.where(kept, eigenvalues, tf.reduce_max(eigenvalues)))
    # The inverse is the identity but for these factors along these vectors.
    factors = tf.where(kept, smallest / tf.where(kept, eigenvalues, tf.ones_like(singular)) - 1, 0)
    return [left, factors]


PRECONDITIONERS = {
    "diagonal": Preconditioner(
        make=_make_diagonal,
        shapes=lambda size, rank: [[size]],
        solve=lambda vector, tensors: vector / tensors[0],
        products=lambda rank: _SAMPLES,
    ),
    "nystrom": Preconditioner(
        make=_make_nystrom,
        shapes=lambda size, rank: [[size, rank], [rank]],
        solve=lambda vector, tensors: (
            vector
            + tf.linalg.matvec(
                tensors[0], tensors[1] * tf.linalg.matvec(tensors[0], vector, transpose_a=True)
            )
        ),
        products=lambda rank: rank,
    ),
}
