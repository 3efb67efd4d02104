"""The curvature of a penalty of weights, which is added to factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvp._errors import InvalidVariablesError
from hvp._operators.hessian import HessianOperator
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

Penalty = Callable[[], Any]


def penalty_diagonal(penalty: Penalty, nest: VariableNest) -> np.ndarray:
    """Return the diagonal of the Hessian of a penalty, in float64; zeros if it reads no weight."""
    try:
        operator = HessianOperator(penalty, nest.source)
    except InvalidVariablesError:  # it depends on other weights only
        return np.zeros(Space.of_variables(nest).size)
    with operator:
        return operator.diagonal().astype(np.float64)
