"""Block conjugate gradients: every column searches the Krylov space of all columns.

Each iteration minimizes over the search directions of every column, so that k columns need a
fraction of the iterations that each of them would need alone. With right-hand sides, residuals of
the system and directions as the rows of `B`, `R` and `P`, from `X = 0`::

    B = C Q,  P = Q                (Q has orthonormal rows)
    T = (P A P^T)^{-1}
    X <- X + C T P
    L Q <- Q - T P A               (the rows of Q made orthonormal, L is the factor)
    C <- C L
    P <- Q + L^T P

The residual of the system is `R = C Q` throughout. The implementation differs from the original
method of O'Leary in three ways:

1. The residual is stored as the factor `C` and the orthonormal block `Q`, which is Dubrulle's
   variant BCGrQ. It does not break down when columns become linearly dependent, as they do when
   they converge.
2. The block is orthonormalized by its matrix of inner products, repeatedly until the result is
   accurate. This takes a few matrix products; TensorFlow's QR takes a hundred times as long.
3. A negative eigenvalue of `P A P^T` gives a direction of negative curvature and ends the
   iteration.

Neither scipy nor TensorFlow has a block method.

References
----------
D. P. O'Leary, "The block conjugate gradient algorithm and related methods", Linear Algebra and its
Applications 29, 293-322, 1980. https://doi.org/10.1016/0024-3795(80)90247-5

A. A. Dubrulle, "Retooling the method of block conjugate gradients", Electronic Transactions on
Numerical Analysis 12, 216-233, 2001.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvp._solve.method import Method, State, Step, System
from hvp._solve.outcome import SolveOutcome
from hvp._solve.rows import dots

# Upper bound on the passes that make a block orthonormal.
_MAX_PASSES = 4


def _initial_state(residual: tf.Tensor, system: System) -> list[tf.Tensor]:
    """Return `X`, `Q`, `C` and `P` at `X = 0`."""
    del system
    factor, block = orthonormal(residual)
    return [tf.zeros_like(residual), block, factor, block]


def _iterate(state: State, running: tf.Tensor, system: System) -> Step:
    """Take one step; the names are those of the formulas in the module's docstring."""
    x, block, factor, directions = state
    image = system.multiply(directions)
    inverse, negative, combination = _invert(_inner_products(directions, image), directions)
    steps = factor @ inverse
    x += steps @ directions
    gain = dots(steps, factor) / 2
    lower, block = orthonormal(block - inverse @ image)
    factor @= lower
    conjugate = block + tf.transpose(lower) @ directions
    # If curvature is negative, every row of the directions becomes that direction.
    directions = tf.where(negative, combination @ directions, conjugate)
    norm = tf.norm(factor, axis=1)
    outcome = tf.where(
        norm <= system.tolerance, int(SolveOutcome.CONVERGED), int(SolveOutcome.RUNNING)
    )
    all_negative = tf.fill(tf.shape(norm), int(SolveOutcome.NEGATIVE_CURVATURE))
    outcome = tf.where(negative, all_negative, outcome)
    outcome = tf.where(tf.math.is_finite(norm), outcome, int(SolveOutcome.NOT_FINITE))
    x = tf.where(negative, state[0], x)
    return Step(outcome, norm, gain, [x, block, factor, directions])


def _invert(matrix: tf.Tensor, directions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Invert the projected matrix `P A P^T` by its eigenvalues.

    Parameters
    ----------
    matrix : tf.Tensor
        The projected matrix, of shape `(k, k)`, in float64.
    directions : tf.Tensor
        The directions `P`, of shape `(k, n)`. Those that depend on the others, to rounding, are
        left out of the inverse.

    Returns
    -------
    inverse : tf.Tensor
        Shape `(k, k)`.
    negative : tf.Tensor
        Whether the matrix has a negative eigenvalue.
    combination : tf.Tensor
        Shape `(k, k)`; every row has the coefficients, in the directions, of the direction of the
        lowest eigenvalue.
    """
    dtype = directions.dtype
    lengths = tf.cast(tf.norm(directions, axis=1), tf.float64)
    scale = 1 / tf.where(lengths > 0, lengths, tf.ones_like(lengths))
    values, vectors = tf.linalg.eigh(scale[:, tf.newaxis] * matrix * scale)
    largest = tf.reduce_max(tf.abs(values))
    count = tf.cast(tf.shape(values)[0], tf.float64)
    rounding = 4 * count * float(np.finfo(dtype.as_numpy_dtype).eps) * largest
    positive = values > rounding
    reciprocals = tf.where(positive, 1 / tf.where(positive, values, tf.ones_like(values)), 0)
    coefficients = scale[:, tf.newaxis] * vectors
    inverse = tf.matmul(coefficients * reciprocals, coefficients, transpose_b=True)
    combination = tf.ones_like(matrix)[:, :1] * coefficients[:, 0]
    return tf.cast(inverse, dtype), values[0] < -rounding, tf.cast(combination, dtype)


def orthonormal(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Factor a block as `rows = factor @ block`, where the block has orthonormal rows.

    Each pass scales the rows to unit length, decomposes their matrix of inner products as
    `V E V^T`, and multiplies the block by `E^{-1/2} V^T`. Eigenvalues at rounding level are raised
    rather than dropped; the next pass removes the error, as in shifted Cholesky QR. Rows of zeros
    stay zero.

    Parameters
    ----------
    rows : tf.Tensor
        Shape `(k, n)`.

    Returns
    -------
    factor : tf.Tensor
        Shape `(k, k)`.
    block : tf.Tensor
        Shape `(k, n)`.

    References
    ----------
    T. Fukaya, R. Kannan, Y. Nakatsukasa, Y. Yamamoto and Y. Yanagisawa, "Shifted Cholesky QR for
    computing the QR factorization of ill-conditioned matrices", SIAM Journal on Scientific
    Computing 42(1), A477-A503, 2020. https://doi.org/10.1137/18M1218212
    """
    dtype = rows.dtype
    eps = float(np.finfo(dtype.as_numpy_dtype).eps)
    count = tf.cast(tf.shape(rows)[0], tf.float64)

    def deviation(products: tf.Tensor) -> tf.Tensor:
        """Return the largest deviation from the identity, without rows of zeros."""
        nonzero = tf.linalg.diag_part(products) > 0
        return tf.reduce_max(tf.abs(products - tf.linalg.diag(tf.cast(nonzero, tf.float64))))

    def is_inaccurate(passes: tf.Tensor, products: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
        del rest
        return (passes == 0) | ((passes < _MAX_PASSES) & (deviation(products) > np.sqrt(eps)))

    def orthonormalize(
        passes: tf.Tensor, products: tf.Tensor, factor: tf.Tensor, block: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        lengths = tf.sqrt(tf.linalg.diag_part(products))
        lengths = tf.where(lengths > 0, lengths, tf.ones_like(lengths))
        cosines = products / (lengths[:, tf.newaxis] * lengths)
        values, vectors = tf.linalg.eigh(cosines)
        roots = tf.sqrt(tf.maximum(values, 4 * count * eps * tf.reduce_max(values)))
        transform = tf.transpose(vectors / roots) / lengths
        inverse_transform = lengths[:, tf.newaxis] * vectors * roots
        block = tf.cast(transform, dtype) @ block
        return passes + 1, _inner_products(block, block), factor @ inverse_transform, block

    identity = tf.eye(tf.shape(rows)[0], dtype=tf.float64)
    start = (tf.constant(0), _inner_products(rows, rows), identity, rows)
    _, _, factor, block = tf.while_loop(is_inaccurate, orthonormalize, start, parallel_iterations=1)
    return tf.cast(factor, dtype), tf.ensure_shape(block, rows.shape)


def _inner_products(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the symmetric part of `one @ other^T`, in float64."""
    product = tf.cast(tf.matmul(one, other, transpose_b=True), tf.float64)
    return (product + tf.transpose(product)) / 2


BLOCK_CONJUGATE_GRADIENTS = Method(
    name="block_cg",
    initial_state=_initial_state,
    iterate=_iterate,
    state_shapes=lambda size: [[None, size], [None, size], [None, None], [None, size]],
    separable=False,
    preconditioned=False,
    direction=3,
)
