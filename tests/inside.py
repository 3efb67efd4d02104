"""The one place where tests look behind the public interface."""

from __future__ import annotations

from typing import Any

import hvp
from hvp._operators.operator import core_of


def snapshot(operator: Any) -> Any:
    """What an operator, or a `Linearization`, evaluated last."""
    if isinstance(operator, hvp.Linearization):
        return operator.snapshot
    return core_of(operator).snapshot


def held(operator: Any) -> Any:
    """The linear map that is held, with its residuals; None if there is none."""
    return snapshot(operator).held


def program(operator: Any) -> Any:
    """The compiled functions of the graph engine."""
    return held(operator).program


def variables(operator: Any) -> Any:
    """The variables of an operator."""
    return snapshot(operator).plan.nest.variables


def made_for(operator: Any) -> int:
    """How many compiled solvers are kept with an operator."""
    return core_of(operator).cached_count


def multiply_rows(operator: Any, rows: Any) -> Any:
    """Products with the rows of a block."""
    return core_of(operator).map(operator.damping).apply_rows(rows)


def fingerprint(operator: Any) -> dict[str, str]:
    """What tells an operator's weights, data and loss from others."""
    return core_of(operator).fingerprint()
