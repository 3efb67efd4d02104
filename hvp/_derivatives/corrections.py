"""Derivatives that TensorFlow lacks, or has wrong, written down: importing this puts them in force.

They hold only where `corrected_derivatives` is entered; see the module `registry`.
"""

from __future__ import annotations

from hvp._derivatives import formulas, linear, wrong
from hvp._derivatives.registry import TENSORFLOWS, corrected_derivatives, is_linearizing

__all__ = ["TENSORFLOWS", "corrected_derivatives", "formulas", "is_linearizing", "linear", "wrong"]
