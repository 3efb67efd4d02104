"""MINRES (Paige and Saunders 1975) for many right-hand sides in one product.

The residual falls whatever the signs of the eigenvalues. Where it differs from scipy's:

1. The columns advance together, each with its own recurrences, as in `conjugate_gradients`.
2. Where no solution exists it ends by the residual of the normal equations, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvp._solve.method import Method, Step, System
from hvp._solve.outcome import Outcome
from hvp._solve.rows import dots, scaled

# Where no solution exists the residual of the normal equations cannot fall much below the root of
# the unit of rounding, and then grows again; it has come there when it is so many times that root,
# and the residual itself falls, in two iterations, by at most so many units.
_NORMAL, _FALL = 4, 16


def _first(residual: tf.Tensor, system: System) -> list[tf.Tensor]:
    """Return the state at zero.

    The solution; the last two Lanczos vectors, not normalized; the preconditioner's inverse times
    the last; the last two directions; and numbers, for each row: norm of the last Lanczos vector,
    of the one before (zero if there is none), the entries delta_bar and epsilon of the factor's
    next column, phi_bar (the residual's norm, as the preconditioner measures it), cosine and sine
    of the last rotation, the operator's norm so far, what leads from phi_bar to the norm, and the
    phi_bar before.
    """
    zeros = tf.zeros_like(residual)
    image = system.precondition(residual)
    beta = tf.sqrt(tf.maximum(dots(residual, image), 0))
    none = tf.zeros_like(beta)
    to_norm = tf.norm(residual, axis=1) / tf.where(beta > 0, beta, tf.ones_like(beta))
    numbers = [beta, none, none, none, beta, none - 1, none, none, to_norm, 2 * beta]
    return [zeros, zeros, residual, image, zeros, zeros, tf.stack(numbers, axis=1)]


def _iterate(state: Sequence[tf.Tensor], running: tf.Tensor, system: System) -> Step:
    """One Lanczos vector, one rotation, one step."""
    x, older, old, image, before, last, numbers = state
    beta, beta_before, delta_bar, epsilon, phi_bar, cosine, sine, largest, to_norm, phi_before = (
        tf.unstack(numbers, axis=1)
    )
    first = beta_before == 0
    vector = scaled(1 / _or_one(beta), image)
    new = system.multiply(vector) - scaled(beta / _or_one(beta_before), older)
    alpha = dots(vector, new)
    new -= scaled(alpha / _or_one(beta), old)
    new_image = system.precondition(new)
    squared = dots(new, new_image)
    new_beta = tf.sqrt(tf.maximum(squared, 0))

    delta = cosine * delta_bar + sine * alpha
    gamma_bar = sine * delta_bar - cosine * alpha
    new_epsilon, new_delta_bar = sine * new_beta, -cosine * new_beta
    column = alpha**2 + tf.where(first, tf.zeros_like(beta), beta**2) + new_beta**2
    largest = tf.maximum(largest, tf.sqrt(column))
    gamma = tf.sqrt(gamma_bar**2 + new_beta**2)
    new_cosine, new_sine = gamma_bar / _or_one(gamma), new_beta / _or_one(gamma)
    # A null vector leaves the residual as it is.
    new_phi_bar = tf.where(gamma > 0, new_sine, tf.ones_like(new_sine)) * phi_bar
    # The last step left a residual that the operator takes to zero: there is no better solution.
    eps = float(np.finfo(x.dtype.as_numpy_dtype).eps)
    least = tf.sqrt(gamma_bar**2 + new_delta_bar**2) <= _NORMAL * np.sqrt(eps) * largest
    least &= phi_before - new_phi_bar <= _FALL * eps * phi_before
    direction = vector - scaled(epsilon, before) - scaled(delta, last)
    direction = scaled(1 / _or_one(gamma), direction)
    step = tf.where(least, tf.zeros_like(beta), new_cosine * phi_bar)
    new_phi_bar = tf.where(least, phi_bar, new_phi_bar)

    told = [new_beta, beta, new_delta_bar, new_epsilon, new_phi_bar, new_cosine, new_sine]
    made = [x + scaled(step, direction), old, new, new_image, last, direction]
    made.append(tf.stack([*told, largest, to_norm, phi_bar], axis=1))
    kept = running[:, tf.newaxis]
    made = [tf.where(kept, one, other) for one, other in zip(made, state)]
    norm = new_phi_bar * to_norm
    outcome = tf.where(norm <= system.tolerance, int(Outcome.CONVERGED), int(Outcome.RUNNING))
    outcome = tf.where(least, int(Outcome.LEAST_SQUARES), outcome)
    indefinite = first & (beta == 0) & running
    indefinite |= squared < -eps * tf.norm(new, axis=1) * tf.norm(new_image, axis=1)
    outcome = tf.where(indefinite, int(Outcome.INDEFINITE_PRECONDITIONER), outcome)
    finite = tf.math.is_finite(alpha) & tf.math.is_finite(new_beta)
    outcome = tf.where(finite, outcome, int(Outcome.NOT_FINITE))
    return Step(outcome, norm, tf.zeros_like(norm), made)


def _or_one(divisor: tf.Tensor) -> tf.Tensor:
    return tf.where(divisor == 0, tf.ones_like(divisor), divisor)


MINRES = Method(
    name="minres",
    first=_first,
    iterate=_iterate,
    shapes=lambda size: [[None, size]] * 6 + [[None, 10]],
    separable=True,
    preconditioned=True,
    direction=None,
)
