"""Block conjugate gradients: every column searches the Krylov space of all columns.

Each iteration minimizes over the search directions of every column, so that k columns need a
fraction of the iterations that each of them would need alone. With right-hand sides, residuals of
the system and directions as the rows of `B`, `R` and `P`, and a preconditioner `M`, from `X = 0`::

    B = C Q,  P = Q M              (Q M Q^T is the identity)
    T = (P A P^T)^{-1}
    X <- X + C T P
    L Q <- Q - T P A               (so that Q M Q^T is the identity again, L is the factor)
    C <- C L
    P <- Q M + L^T P

The residual of the system is `R = C Q` throughout. The implementation differs from the original
method of O'Leary in four ways:

1. The residual is stored as the factor `C` and the orthonormal block `Q`, which is Dubrulle's
   variant BCGrQ. It does not break down when columns become linearly dependent, as they do when
   they converge.
2. The block is orthonormalized by its matrix of inner products, repeatedly until the result is
   accurate. This takes a few matrix products; TensorFlow's QR takes a hundred times as long.
3. A negative eigenvalue of `P A P^T` gives a direction of negative curvature and ends the
   iteration.
4. Dubrulle's variant is applied to `K^T A K` for a preconditioner `M = K K^T`, written so that
   only `M` itself is needed.

Neither scipy nor TensorFlow has a block method.

References
----------
D. P. O'Leary, "The block conjugate gradient algorithm and related methods", Linear Algebra and its
Applications 29, 293-322, 1980. https://doi.org/10.1016/0024-3795(80)90247-5

A. A. Dubrulle, "Retooling the method of block conjugate gradients", Electronic Transactions on
Numerical Analysis 12, 216-233, 2001.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvp._solve.method import Method, State, Step, System
from hvp._solve.outcome import SolveOutcome
from hvp._solve.rows import dots

# Upper bound on the passes that make a block orthonormal.
_MAX_PASSES = 4


def _initial_state(residual: tf.Tensor, system: System) -> list[tf.Tensor]:
    """Return `X`, `Q`, `C` and `P` at `X = 0`, and zeros for the product of the last `P`."""
    factor, block, image = orthonormal(residual, system.precondition)
    return [tf.zeros_like(residual), block, factor, image, tf.zeros_like(residual)]


def _iterate(state: State, running: tf.Tensor, system: System) -> Step:
    """Take one step; the names are those of the formulas in the module's docstring."""
    x, block, factor, directions, _ = state
    product = image = system.multiply(directions)
    inverse, negative, combination = _invert(_inner_products(directions, image), directions)
    steps = factor @ inverse
    x += steps @ directions
    gain = dots(steps, factor) / 2
    block -= inverse @ image
    lower, block, image = orthonormal(block, system.precondition)
    factor @= lower
    conjugate = image + tf.transpose(lower) @ directions
    # If curvature is negative, every row of the directions becomes that direction.
    directions = tf.where(negative, combination @ directions, conjugate)
    # A preconditioned block is not orthonormal itself.
    norm = tf.norm(factor if image is block else factor @ block, axis=1)
    outcome = tf.where(
        norm <= system.tolerance, int(SolveOutcome.CONVERGED), int(SolveOutcome.RUNNING)
    )
    all_negative = tf.fill(tf.shape(norm), int(SolveOutcome.NEGATIVE_CURVATURE))
    outcome = tf.where(negative, all_negative, outcome)
    outcome = tf.where(tf.math.is_finite(norm), outcome, int(SolveOutcome.NOT_FINITE))
    if image is not block:
        is_definite = tf.reduce_all(tf.linalg.diag_part(_inner_products(block, image)) >= 0)
        indefinite = tf.where(running, int(SolveOutcome.INDEFINITE_PRECONDITIONER), outcome)
        outcome = tf.where(is_definite, outcome, indefinite)
    x = tf.where(negative, state[0], x)
    return Step(outcome, norm, gain, [x, block, factor, directions, product])


def _invert(matrix: tf.Tensor, directions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Invert the projected matrix `P A P^T`, of shape `(k, k)` in float64, by its eigenvalues.

    Directions that depend on the others, to rounding, are left out of the inverse. The second
    result tells whether an eigenvalue is negative, or all are zero. Each row of the third, of shape
    `(k, k)`, holds the coefficients of the lowest eigenvalue's direction in terms of the rows of
    `directions`.
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
    # Without any curvature there is no step.
    flat = (largest == 0) & tf.reduce_any(lengths > 0)
    return tf.cast(inverse, dtype), (values[0] < -rounding) | flat, tf.cast(combination, dtype)


def orthonormal(
    rows: tf.Tensor, precondition: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Factor a block of rows as `rows = factor @ block`, where the block has orthonormal rows.

    Return `factor`, `block`, and the block times the preconditioner `M`, in whose inner product
    `x M y^T` the block is orthonormal. Where `precondition` returns its argument itself, there is
    no preconditioner, and the third result is the block itself.

    Each pass scales the rows to unit length, decomposes their matrix of inner products as
    `V E V^T`, and multiplies the block by `E^{-1/2} V^T`. Eigenvalues at rounding level are raised
    rather than dropped; the next pass removes the error, as in shifted Cholesky QR. Rows of zeros
    stay zero. The products with `M` are transformed like the rows, unless this would enlarge their
    rounding errors, as for rows that depend on each other; then they are computed again.

    References
    ----------
    T. Fukaya, R. Kannan, Y. Nakatsukasa, Y. Yamamoto and Y. Yanagisawa, "Shifted Cholesky QR for
    computing the QR factorization of ill-conditioned matrices", SIAM Journal on Scientific
    Computing 42(1), A477-A503, 2020. https://doi.org/10.1137/18M1218212
    """
    dtype = rows.dtype
    eps = float(np.finfo(dtype.as_numpy_dtype).eps)
    count = tf.cast(tf.shape(rows)[0], tf.float64)
    images = precondition(rows)

    def deviation(products: tf.Tensor) -> tf.Tensor:
        """Return the largest deviation from the identity, ignoring rows of zeros."""
        nonzero = tf.linalg.diag_part(products) > 0
        return tf.reduce_max(tf.abs(products - tf.linalg.diag(tf.cast(nonzero, tf.float64))))

    def is_inaccurate(passes: tf.Tensor, products: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
        del rest
        return (passes == 0) | ((passes < _MAX_PASSES) & (deviation(products) > np.sqrt(eps)))

    blocks = [rows] if images is rows else [rows, images]

    def orthonormalize(
        passes: tf.Tensor, products: tf.Tensor, factor: tf.Tensor, *blocks: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        lengths = tf.sqrt(tf.maximum(tf.linalg.diag_part(products), 0))
        lengths = tf.where(lengths > 0, lengths, tf.ones_like(lengths))
        cosines = products / (lengths[:, tf.newaxis] * lengths)
        values, vectors = tf.linalg.eigh(cosines)
        # The largest one is at least 1, unless a preconditioner is not positive definite.
        largest = tf.maximum(tf.reduce_max(values), 1)
        roots = tf.sqrt(tf.maximum(values, 4 * count * eps * largest))
        transform = tf.cast(tf.transpose(vectors / roots) / lengths, dtype)
        inverse_transform = lengths[:, tf.newaxis] * vectors * roots
        block, *images = (transform @ block for block in blocks)
        if images:
            enlarges = values[0] < np.sqrt(eps) * largest
            images = [tf.cond(enlarges, lambda: precondition(block), lambda: images[0])]
        products = _inner_products(block, images[0] if images else block)
        return passes + 1, products, factor @ inverse_transform, block, *images

    identity = tf.eye(tf.shape(rows)[0], dtype=tf.float64)
    start = (tf.constant(0), _inner_products(blocks[0], blocks[-1]), identity, *blocks)
    _, _, factor, *blocks = tf.while_loop(
        is_inaccurate, orthonormalize, start, parallel_iterations=1
    )
    blocks = [tf.ensure_shape(block, rows.shape) for block in blocks]
    return tf.cast(factor, dtype), blocks[0], blocks[-1]


def _inner_products(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the symmetric part of `one @ other^T`, in float64."""
    product = tf.cast(tf.matmul(one, other, transpose_b=True), tf.float64)
    return (product + tf.transpose(product)) / 2


BLOCK_CONJUGATE_GRADIENTS = Method(
    name="block_cg",
    initial_state=_initial_state,
    iterate=_iterate,
    state_shapes=lambda size: [*[[None, size]] * 2, [None, None], *[[None, size]] * 2],
    separable=False,
    preconditioned=True,
    direction=3,
    product=4,
)
