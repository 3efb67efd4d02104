"""Adapt the trust region and the damping to the quality of the quadratic model.

The rules are functions of the ratio of the decrease of the loss to the decrease that the model
predicted,

    `ratio = (f(x) - f(x + p)) / (m(0) - m(p))`,

which is NaN if there was no trial point, and minus infinity if the loss was not finite there.

References
----------
.. [1] A. R. Conn, N. I. M. Gould, P. L. Toint, "Trust-Region Methods", SIAM, 2000, chapter 6.
   https://doi.org/10.1137/1.9780898719857
.. [2] J. Martens, "Deep learning via Hessian-free optimization", ICML 2010, section 4.1.
"""

from __future__ import annotations

# The model is poor below the first ratio, and good above the second.
_POOR, _GOOD = 0.25, 0.75
_ACCEPT = 1e-4
_SHRINK, _GROW = 0.25, 2.0
_INCREASE_DAMPING, _DECREASE_DAMPING = 3 / 2, 2 / 3


def is_accepted(ratio: float) -> bool:
    """Return whether a step is accepted: `ratio > 1e-4`."""
    return ratio > _ACCEPT


def next_radius(radius: float, ratio: float, step_norm: float, on_boundary: bool) -> float:
    """Return the radius of the trust region for the next step [1]_.

    It is `min(step_norm, radius) / 4` if `ratio < 1/4` or the ratio is NaN, `2 radius` if
    `ratio > 3/4` and the step ends on the boundary, and `radius` otherwise.
    """
    if not ratio >= _POOR:  # true for NaN
        return _SHRINK * min(step_norm, radius)
    if ratio > _GOOD and on_boundary:
        return _GROW * radius
    return radius


def next_damping(damping: float, ratio: float) -> float:
    """Return the damping for the next step, adapted as by Levenberg and Marquardt [2]_.

    It is `3/2 damping` if `ratio < 1/4` or the ratio is NaN, `2/3 damping` if `ratio > 3/4`, and
    `damping` otherwise.
    """
    if not ratio >= _POOR:  # true for NaN
        return _INCREASE_DAMPING * damping
    if ratio > _GOOD:
        return _DECREASE_DAMPING * damping
    return damping
