"""Derivatives that TensorFlow lacks or has wrong. Importing this module registers them.

They are in force only inside `corrected_derivatives`; see the module `registry`.
"""

from __future__ import annotations

from hvp._derivatives import (
    batched_products,
    formulas,
    fourier,
    linear,
    linear_algebra,
    repeated_indices,
    wrong,
)
from hvp._derivatives.registry import TENSORFLOWS, corrected_derivatives, is_linearizing

__all__ = [
    "TENSORFLOWS",
    "batched_products",
    "corrected_derivatives",
    "formulas",
    "fourier",
    "is_linearizing",
    "linear",
    "linear_algebra",
    "repeated_indices",
    "wrong",
]
