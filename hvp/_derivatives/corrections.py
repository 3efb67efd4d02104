"""Derivatives that TensorFlow lacks or has wrong. Importing this module registers them.

They are in force only inside `corrected_derivatives`; see the module `registry`.
"""

from __future__ import annotations

from hvp._derivatives import formulas, linear, wrong
from hvp._derivatives.registry import TENSORFLOWS, corrected_derivatives, is_linearizing

__all__ = ["TENSORFLOWS", "corrected_derivatives", "formulas", "is_linearizing", "linear", "wrong"]
