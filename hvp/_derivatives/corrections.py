"""Registers derivatives that TensorFlow lacks or has wrong, for use in `corrected_derivatives`."""

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
from hvp._derivatives.registry import (
    TENSORFLOWS,
    corrected_derivatives,
    corrected_graph,
    is_linearizing,
)

__all__ = [
    "TENSORFLOWS",
    "batched_products",
    "corrected_derivatives",
    "corrected_graph",
    "formulas",
    "fourier",
    "is_linearizing",
    "linear",
    "linear_algebra",
    "repeated_indices",
    "wrong",
]
