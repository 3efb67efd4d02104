"""Conjugate gradients for many right-hand sides, with one block product for each iteration.

For `A x = b`, with a preconditioner `M` that approximates the inverse of `A`, from `x_0 = 0`::

    r_0 = b,  p_0 = M r_0
    alpha_k = (r_k, M r_k) / (p_k, A p_k)
    x_{k+1} = x_k + alpha_k p_k
    r_{k+1} = r_k - alpha_k A p_k
    beta_k  = (r_{k+1}, M r_{k+1}) / (r_k, M r_k)
    p_{k+1} = M r_{k+1} + beta_k p_k

Each step minimizes the quadratic model `(x, A x) / 2 - (b, x)` along `p_k`, which decreases by
`alpha_k (r_k, M r_k) / 2`.

This implementation differs from those of scipy and TensorFlow in three ways:

1. The columns advance together, because the product of a block takes a fraction of the time of the
   separate products. Each column has its own step lengths. A column that has ended stays as it is
   until it is removed from the block.
2. The iteration ends when the curvature `(p, A p)` is not positive, and the direction `p` is
   returned; scipy's iteration continues. Curvature is compared with rounding by the angle between
   `p` and `A p`: if `A` is positive definite with condition number `c`, the cosine of that angle
   is at least `2 sqrt(c) / (c + 1)`.
3. If products are in low precision, the residual is occasionally replaced by the true one, and the
   iteration continues in its direction instead of starting over. The idea is that of H. A. van der
   Vorst and Q. Ye, "Residual replacement strategies for Krylov subspace iterative methods for the
   convergence of true residuals", SIAM Journal on Scientific Computing 22(3), 835-852, 2000.
   https://doi.org/10.1137/S1064827599353865

Reference: M. R. Hestenes and E. Stiefel, "Methods of conjugate gradients for solving linear
systems", Journal of Research of the National Bureau of Standards 49(6), 409-436, 1952.
https://doi.org/10.6028/jres.049.044
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvp._solve.method import Method, State, Step, System
from hvp._solve.outcome import SolveOutcome
from hvp._solve.rows import dots, scaled


def _initial_state(residual: tf.Tensor, system: System) -> list[tf.Tensor]:
    """Return `x`, `r`, `p` and `(r, M r)` at `x = 0`."""
    descent = system.precondition(residual)
    return [tf.zeros_like(residual), residual, descent, dots(residual, descent)]


def _continued_state(state: State, residual: tf.Tensor, system: System) -> list[tf.Tensor]:
    """Replace the residual by the true one, and keep the direction conjugate to earlier ones.

    The direction contains `M r` for the residual `r` of the recurrence, which is replaced too.
    """
    _, by_recurrence, direction, _ = state
    descent = system.precondition(residual)
    direction += descent - system.precondition(by_recurrence)
    return [tf.zeros_like(residual), residual, direction, dots(residual, descent)]


def _iterate(state: State, running: tf.Tensor, system: System) -> Step:
    """Take one step along the search direction of each running row."""
    x, residual, direction, squared = state
    image = system.multiply(direction)
    curvature = dots(direction, image)
    eps = float(np.finfo(x.dtype.as_numpy_dtype).eps)
    rounding = eps * tf.norm(direction, axis=1) * tf.norm(image, axis=1)
    negative = curvature <= rounding
    moving = running & ~negative
    one, zero = tf.ones_like(squared), tf.zeros_like(squared)
    alpha = tf.where(moving, squared / tf.where(moving, curvature, one), zero)
    x += scaled(alpha, direction)
    residual -= scaled(alpha, image)
    descent = system.precondition(residual)
    squared_before, squared = squared, tf.where(moving, dots(residual, descent), squared)
    beta = squared / tf.where(squared_before > 0, squared_before, one)
    beta = tf.where(moving, beta, one)
    # A row that ends here keeps its direction, which may be one of negative curvature.
    direction = scaled(beta, direction) + scaled(tf.where(moving, one, zero), descent)
    norm = tf.norm(residual, axis=1)
    outcome = tf.where(
        norm <= system.tolerance, int(SolveOutcome.CONVERGED), int(SolveOutcome.RUNNING)
    )
    outcome = tf.where(negative, int(SolveOutcome.NEGATIVE_CURVATURE), outcome)
    outcome = tf.where(squared < 0, int(SolveOutcome.INDEFINITE_PRECONDITIONER), outcome)
    finite = tf.math.is_finite(curvature) & tf.math.is_finite(norm)
    outcome = tf.where(finite, outcome, int(SolveOutcome.NOT_FINITE))
    return Step(outcome, norm, alpha * squared_before / 2, [x, residual, direction, squared])


CONJUGATE_GRADIENTS = Method(
    name="cg",
    initial_state=_initial_state,
    iterate=_iterate,
    state_shapes=lambda size: [[None, size], [None, size], [None, size], [None]],
    separable=True,
    preconditioned=True,
    direction=2,
    continued_state=_continued_state,
)
