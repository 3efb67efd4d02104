"""Block conjugate gradients: all right-hand sides search in the Krylov space of all.

Each iteration minimizes over the directions of every column, so that k columns need a fraction of
the iterations that each would need alone (O'Leary 1980). Where it differs from that method:

1. Residuals are held as a triangle-like factor times an orthonormal block (Dubrulle 2001, his
   BCGrQ), which does not break down when columns become dependent, as they do when they converge.
2. The block is made orthonormal from its matrix of inner products, computed again until it is: a
   few products of matrices, where TensorFlow's QR takes a hundred times as long.
3. A negative eigenvalue of the projected matrix is a direction of negative curvature, and ends it.

Neither scipy nor TensorFlow has a block method.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvp._solve.method import Method, Step, System
from hvp._solve.outcome import Outcome
from hvp._solve.rows import dots

# How often a block is made more nearly orthonormal, at most.
_PASSES = 4


def _first(residual: tf.Tensor, system: System) -> list[tf.Tensor]:
    del system
    factor, block = orthonormal(residual)
    return [tf.zeros_like(residual), block, factor, block]


def _iterate(state: Sequence[tf.Tensor], running: tf.Tensor, system: System) -> Step:
    """One iteration; the rows of the residuals are `factor @ block`."""
    x, block, factor, directions = state
    image = system.multiply(directions)
    inverse, negative, rotation = _inverse(_products(directions, image), directions)
    lengths = factor @ inverse
    x += lengths @ directions
    gain = dots(lengths, factor) / 2
    lower, block = orthonormal(block - inverse @ image)
    factor @= lower
    onward = block + tf.transpose(lower) @ directions
    # Where curvature is negative, every row of the directions becomes that direction.
    directions = tf.where(negative, rotation @ directions, onward)
    norm = tf.norm(factor, axis=1)
    outcome = tf.where(norm <= system.tolerance, int(Outcome.CONVERGED), int(Outcome.RUNNING))
    outcome = tf.where(negative, tf.fill(tf.shape(norm), int(Outcome.NEGATIVE_CURVATURE)), outcome)
    outcome = tf.where(tf.math.is_finite(norm), outcome, int(Outcome.NOT_FINITE))
    x = tf.where(negative, state[0], x)
    return Step(outcome, norm, gain, [x, block, factor, directions])


def _inverse(matrix: tf.Tensor, directions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Invert the projected matrix; tell whether it is indefinite, and along which combination.

    Directions that depend on the others, to rounding, are left out.
    """
    dtype = directions.dtype
    lengths = tf.cast(tf.norm(directions, axis=1), tf.float64)
    scale = 1 / tf.where(lengths > 0, lengths, tf.ones_like(lengths))
    values, vectors = tf.linalg.eigh(scale[:, tf.newaxis] * matrix * scale)
    largest = tf.reduce_max(tf.abs(values))
    count = tf.cast(tf.shape(values)[0], tf.float64)
    rounding = 4 * count * float(np.finfo(dtype.as_numpy_dtype).eps) * largest
    kept = values > rounding
    halves = scale[:, tf.newaxis] * vectors
    inverted = tf.where(kept, 1 / tf.where(kept, values, tf.ones_like(values)), 0)
    inverse = tf.matmul(halves * inverted, halves, transpose_b=True)
    lowest = tf.ones_like(matrix)[:, :1] * halves[:, 0]
    return tf.cast(inverse, dtype), values[0] < -rounding, tf.cast(lowest, dtype)


def orthonormal(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a square factor, and orthonormal rows that it makes the given ones of.

    Eigenvalues of the matrix of inner products that are mere rounding are raised, not dropped: what
    belongs to them is found by the next pass (as in shifted Cholesky QR, Fukaya et al. 2020). Rows
    of zeros stay zero.
    """
    dtype = rows.dtype
    eps = float(np.finfo(dtype.as_numpy_dtype).eps)
    count = tf.cast(tf.shape(rows)[0], tf.float64)

    def unlike(products: tf.Tensor) -> tf.Tensor:
        there = tf.linalg.diag_part(products) > 0
        return tf.reduce_max(tf.abs(products - tf.linalg.diag(tf.cast(there, tf.float64))))

    def more(turn: tf.Tensor, products: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
        del rest
        return (turn == 0) | ((turn < _PASSES) & (unlike(products) > np.sqrt(eps)))

    def again(
        turn: tf.Tensor, products: tf.Tensor, factor: tf.Tensor, block: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        lengths = tf.sqrt(tf.linalg.diag_part(products))
        lengths = tf.where(lengths > 0, lengths, tf.ones_like(lengths))
        cosines = products / (lengths[:, tf.newaxis] * lengths)
        values, vectors = tf.linalg.eigh(cosines)
        roots = tf.sqrt(tf.maximum(values, 4 * count * eps * tf.reduce_max(values)))
        forth = tf.transpose(vectors / roots) / lengths
        back = lengths[:, tf.newaxis] * vectors * roots
        block = tf.cast(forth, dtype) @ block
        return turn + 1, _products(block, block), factor @ back, block

    unity = tf.eye(tf.shape(rows)[0], dtype=tf.float64)
    start = (tf.constant(0), _products(rows, rows), unity, rows)
    _, _, factor, block = tf.while_loop(more, again, start, parallel_iterations=1)
    return tf.cast(factor, dtype), tf.ensure_shape(block, rows.shape)


def _products(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return inner products of rows with rows, in float64, symmetric."""
    product = tf.cast(tf.matmul(one, other, transpose_b=True), tf.float64)
    return (product + tf.transpose(product)) / 2


BLOCK_CONJUGATE_GRADIENTS = Method(
    name="block_cg",
    first=_first,
    iterate=_iterate,
    shapes=lambda size: [[None, size], [None, size], [None, None], [None, size]],
    separable=False,
    preconditioned=False,
    direction=3,
)
