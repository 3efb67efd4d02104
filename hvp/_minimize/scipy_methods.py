"""The methods of `scipy.optimize.minimize` that use a gradient."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScipyMethod:
    """What one of scipy's methods requires of the objective.

    The method uses the Hessian by products with vectors (`hessp`), as a `LinearOperator` or as a
    matrix (`hess`), or not at all: `hessian` is "products", "operator", "dense" or "none". With
    `line_search`, it interpolates along lines, which an infinite value would break.
    """

    hessian: str
    line_search: bool = False


METHODS = {
    "trust-krylov": ScipyMethod("products"),
    "trust-ncg": ScipyMethod("products"),
    "Newton-CG": ScipyMethod("operator", line_search=True),
    "trust-constr": ScipyMethod("operator"),
    "trust-exact": ScipyMethod("dense"),
    "dogleg": ScipyMethod("dense"),
    "L-BFGS-B": ScipyMethod("none", line_search=True),
    "TNC": ScipyMethod("none", line_search=True),
    "BFGS": ScipyMethod("none", line_search=True),
    "CG": ScipyMethod("none", line_search=True),
    "SLSQP": ScipyMethod("none", line_search=True),
}
