"""MINRES for many right-hand sides, with one block product for each iteration.

The method minimizes the norm of the residual over the Krylov space, whatever the signs of the
eigenvalues. The Lanczos process, with a preconditioner `M` and from `y_1 = b`, gives the entries of
a tridiagonal matrix::

    beta_k = sqrt((y_k, M y_k))
    v_k = M y_k / beta_k
    alpha_k = (v_k, A v_k)
    y_{k+1} = A v_k - (alpha_k / beta_k) y_k - (beta_k / beta_{k-1}) y_{k-1}

Plane rotations reduce the tridiagonal matrix to an upper triangular one, column by column, where
`c` and `s` are the cosine and sine of the previous rotation::

    delta_k = c delta_bar_k + s alpha_k,          gamma_bar_k = s delta_bar_k - c alpha_k
    epsilon_{k+1} = s beta_{k+1},                 delta_bar_{k+1} = -c beta_{k+1}
    gamma_k = sqrt(gamma_bar_k^2 + beta_{k+1}^2)
    c_k = gamma_bar_k / gamma_k,                  s_k = beta_{k+1} / gamma_k

The solution and the norm of the residual, as the preconditioner measures it, follow::

    d_k = (v_k - delta_k d_{k-1} - epsilon_k d_{k-2}) / gamma_k
    x_k = x_{k-1} + c_k phi_bar_{k-1} d_k
    phi_bar_k = s_k phi_bar_{k-1}

This implementation differs from that of scipy in two ways:

1. The columns advance together, each with its own recurrences, as in `conjugate_gradients`.
2. If no solution exists, the iteration ends when the residual of the normal equations is small,
   and the outcome is "least squares". That residual needs no further product: the norm of
   `A r` is `sqrt(gamma_bar_k^2 + delta_bar_{k+1}^2)` times that of `r = b - A x_{k-1}`.

Reference: C. C. Paige and M. A. Saunders, "Solution of sparse indefinite systems of linear
equations", SIAM Journal on Numerical Analysis 12(4), 617-629, 1975.
https://doi.org/10.1137/0712047
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvp._solve.method import Method, State, Step, System
from hvp._solve.outcome import SolveOutcome
from hvp._solve.rows import dots, scaled

# If no solution exists, the residual of the normal equations, relative to the operator and the
# residual of the system, falls to about the square root of the rounding unit and then grows again.
# It counts as small below _NORMAL times that square root, provided that this step would make the
# residual of the system smaller by no more than such a part, or than _FALL rounding units; or that
# the Krylov space ends here, so that the step would divide by rounding errors.
_NORMAL, _FALL = 4, 16


def _initial_state(residual: tf.Tensor, system: System) -> list[tf.Tensor]:
    """Return the state at `x = 0`.

    It consists of `x`, `y_{k-1}`, `y_k`, `M y_k`, `d_{k-2}`, `d_{k-1}`, and nine numbers for each
    row: `beta_k`, `beta_{k-1}` (zero in the first iteration), `delta_bar`, `epsilon`, `phi_bar`,
    the cosine and sine of the last rotation, an estimate of the norm of the operator, and the ratio
    of the Euclidean norm of the residual to `phi_bar`.
    """
    zeros = tf.zeros_like(residual)
    preconditioned = system.precondition(residual)
    beta = tf.sqrt(tf.maximum(dots(residual, preconditioned), 0))
    zero = tf.zeros_like(beta)
    to_norm = tf.norm(residual, axis=1) / tf.where(beta > 0, beta, tf.ones_like(beta))
    numbers = [beta, zero, zero, zero, beta, zero - 1, zero, zero, to_norm]
    return [zeros, zeros, residual, preconditioned, zeros, zeros, tf.stack(numbers, axis=1)]


def _iterate(state: State, running: tf.Tensor, system: System) -> Step:
    """Compute one Lanczos vector and one rotation, and take one step."""
    x, older, old, preconditioned, direction_before, direction, numbers = state
    beta, beta_before, delta_bar, epsilon, phi_bar, cosine, sine, largest, to_norm = tf.unstack(
        numbers, axis=1
    )
    first = beta_before == 0
    vector = scaled(1 / _or_one(beta), preconditioned)
    new = system.multiply(vector) - scaled(beta / _or_one(beta_before), older)
    alpha = dots(vector, new)
    new -= scaled(alpha / _or_one(beta), old)
    new_preconditioned = system.precondition(new)
    squared = dots(new, new_preconditioned)
    new_beta = tf.sqrt(tf.maximum(squared, 0))

    delta = cosine * delta_bar + sine * alpha
    gamma_bar = sine * delta_bar - cosine * alpha
    new_epsilon, new_delta_bar = sine * new_beta, -cosine * new_beta
    # The norm of the operator is at least that of each column of the tridiagonal matrix.
    column = alpha**2 + tf.where(first, tf.zeros_like(beta), beta**2) + new_beta**2
    largest = tf.maximum(largest, tf.sqrt(column))
    gamma = tf.sqrt(gamma_bar**2 + new_beta**2)
    new_cosine, new_sine = gamma_bar / _or_one(gamma), new_beta / _or_one(gamma)
    # A vector in the null space leaves the residual as it is.
    new_phi_bar = tf.where(gamma > 0, new_sine, tf.ones_like(new_sine)) * phi_bar
    # If A r is zero, to rounding, x is a least-squares solution, and this step is not taken.
    eps = float(np.finfo(x.dtype.as_numpy_dtype).eps)
    normal = tf.sqrt(gamma_bar**2 + new_delta_bar**2) / _or_one(largest)
    least = normal <= _NORMAL * np.sqrt(eps)
    stalls = phi_bar - new_phi_bar <= tf.maximum(normal, _FALL * eps) * phi_bar
    ends = new_beta <= np.sqrt(eps) * largest
    ends &= tf.abs(gamma_bar) <= tf.maximum(_NORMAL * new_beta, _FALL * eps * largest)
    least &= stalls | ends
    new_direction = vector - scaled(epsilon, direction_before) - scaled(delta, direction)
    new_direction = scaled(1 / _or_one(gamma), new_direction)
    length = tf.where(least, tf.zeros_like(beta), new_cosine * phi_bar)
    new_phi_bar = tf.where(least, phi_bar, new_phi_bar)

    new_numbers = [new_beta, beta, new_delta_bar, new_epsilon, new_phi_bar, new_cosine, new_sine]
    new_state = [
        x + scaled(length, new_direction),
        old,
        new,
        new_preconditioned,
        direction,
        new_direction,
        tf.stack([*new_numbers, largest, to_norm], axis=1),
    ]
    mask = running[:, tf.newaxis]
    new_state = [tf.where(mask, after, before) for after, before in zip(new_state, state)]
    norm = new_phi_bar * to_norm
    outcome = tf.where(
        norm <= system.tolerance, int(SolveOutcome.CONVERGED), int(SolveOutcome.RUNNING)
    )
    outcome = tf.where(least, int(SolveOutcome.LEAST_SQUARES), outcome)
    indefinite = first & (beta == 0) & running
    indefinite |= squared < -eps * tf.norm(new, axis=1) * tf.norm(new_preconditioned, axis=1)
    outcome = tf.where(indefinite, int(SolveOutcome.INDEFINITE_PRECONDITIONER), outcome)
    finite = tf.math.is_finite(alpha) & tf.math.is_finite(new_beta)
    outcome = tf.where(finite, outcome, int(SolveOutcome.NOT_FINITE))
    return Step(outcome, norm, tf.zeros_like(norm), new_state)


def _or_one(divisor: tf.Tensor) -> tf.Tensor:
    return tf.where(divisor == 0, tf.ones_like(divisor), divisor)


MINRES = Method(
    name="minres",
    initial_state=_initial_state,
    iterate=_iterate,
    state_shapes=lambda size: [[None, size]] * 6 + [[None, 9]],
    separable=True,
    preconditioned=True,
    direction=None,
)
