"""The forcing term of Eisenstat and Walker, which is the tolerance of conjugate gradients."""

from __future__ import annotations

import math

_GAMMA, _ALPHA = 0.9, (1 + math.sqrt(5)) / 2
# The safeguard applies while it is larger than this.
_SAFEGUARD = 0.1
# Forcing term of the first step, and upper bound for all steps.
MAX_FORCING = 0.5


def next_forcing(
    norm: float, previous_norm: float, previous_forcing: float, target: float
) -> float:
    """Return the forcing term for the next step.

    Conjugate gradients end when the norm of the model's gradient is at most the forcing term times
    the norm of the gradient. With the gradients `g` of this step and `g-` of the last accepted one,
    and the forcing term `eta-` of that one, this is "Choice 2" of Eisenstat and Walker [1]_,

        `eta = gamma (norm(g) / norm(g-))**alpha`,  with `gamma = 0.9`, `alpha = (1 + sqrt(5)) / 2`,

    with their safeguard, which keeps it from decreasing too fast,

        `eta = max(eta, gamma eta-**alpha)`  if `gamma eta-**alpha > 0.1`,

    limited to what the run needs to reach its target, and to one half:

        `eta = min(max(eta, target / (2 norm(g))), 1/2)`

    The `target` is the norm of the gradient at which the run ends. `previous_norm` is zero if no
    step has been accepted yet.

    References
    ----------
    .. [1] S. C. Eisenstat, H. F. Walker, "Choosing the forcing terms in an inexact Newton method",
       SIAM Journal on Scientific Computing 17(1), 16-32, 1996. https://doi.org/10.1137/0917003
    """
    if previous_norm == 0 or norm == 0:
        return MAX_FORCING
    forcing = _GAMMA * (norm / previous_norm) ** _ALPHA
    safeguard = _GAMMA * previous_forcing**_ALPHA
    if safeguard > _SAFEGUARD:
        forcing = max(forcing, safeguard)
    return min(max(forcing, target / (2 * norm)), MAX_FORCING)
