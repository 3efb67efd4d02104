"""Conjugate gradients (Hestenes and Stiefel 1952) for many right-hand sides in one product.

Where it differs from scipy's and from TensorFlow's:

1. The columns advance together: a product of a block takes a fraction of the time of as many
   products. Each keeps its own step lengths; finished ones stay where they are until they are
   dropped.
2. Curvature that is not positive ends it, with the direction; scipy's goes on and answers
   something. Rounding is told from curvature by the angle between `p` and `A p`, which of a
   positive definite matrix is bounded by its condition number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvp._solve.method import Method, Step, System
from hvp._solve.outcome import Outcome
from hvp._solve.rows import dots, scaled


def _first(residual: tf.Tensor, system: System) -> list[tf.Tensor]:
    descent = system.precondition(residual)
    return [tf.zeros_like(residual), residual, descent, dots(residual, descent)]


def _iterate(state: Sequence[tf.Tensor], running: tf.Tensor, system: System) -> Step:
    x, residual, direction, squared = state
    image = system.multiply(direction)
    curvature = dots(direction, image)
    eps = float(np.finfo(x.dtype.as_numpy_dtype).eps)
    rounding = eps * tf.norm(direction, axis=1) * tf.norm(image, axis=1)
    negative = curvature <= rounding
    going = running & ~negative
    one, zero = tf.ones_like(squared), tf.zeros_like(squared)
    length = tf.where(going, squared / tf.where(going, curvature, one), zero)
    x += scaled(length, direction)
    residual -= scaled(length, image)
    descent = system.precondition(residual)
    before, squared = squared, tf.where(going, dots(residual, descent), squared)
    ratio = tf.where(going, squared / tf.where(before > 0, before, one), one)
    # The direction of those that end here is kept.
    direction = scaled(ratio, direction) + scaled(tf.where(going, one, zero), descent)
    norm = tf.norm(residual, axis=1)
    outcome = tf.where(norm <= system.tolerance, int(Outcome.CONVERGED), int(Outcome.RUNNING))
    outcome = tf.where(negative, int(Outcome.NEGATIVE_CURVATURE), outcome)
    outcome = tf.where(squared < 0, int(Outcome.INDEFINITE_PRECONDITIONER), outcome)
    finite = tf.math.is_finite(curvature) & tf.math.is_finite(norm)
    outcome = tf.where(finite, outcome, int(Outcome.NOT_FINITE))
    return Step(outcome, norm, length * before / 2, [x, residual, direction, squared])


CONJUGATE_GRADIENTS = Method(
    name="cg",
    first=_first,
    iterate=_iterate,
    shapes=lambda size: [[None, size], [None, size], [None, size], [None]],
    separable=True,
    preconditioned=True,
    direction=2,
)
