"""Damping: the multiple of the identity that an operator adds."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from hvp._errors import HvpError


def check_damping(damping: Any) -> float:
    """Return a number, NumPy scalar or tensor without axes as a float, and refuse anything else."""
    is_number = isinstance(damping, numbers.Real) or getattr(damping, "shape", None) == ()
    value = np.asarray(damping) if is_number else None  # an object, if too large for a float
    if value is None or value.dtype.kind not in "fiu" or not np.isfinite(value):
        shown = damping if is_number or damping is None else f"of type {type(damping).__name__}"
        raise HvpError(f"the damping is {shown}", "a finite real number")
    return float(value)
