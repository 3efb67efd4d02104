"""Hessian-vector products in TensorFlow, from one evaluation of the gradient.

The public names, all of them:

`HessianOperator`
    The Hessian of a loss as a scipy `LinearOperator`.
`hessian_vector_product`
    One product, and nothing kept.
`linearize`
    Any function's value, and its derivative as a linear map.
`HvpError`
    Base of the errors, each listed in the documentation.
"""

from hvp._errors import (
    ClosedOperatorError,
    GraphModeError,
    HvpError,
    InvalidDataError,
    InvalidLossError,
    InvalidVariablesError,
    InvalidVectorError,
    NonFiniteError,
    SecondDerivativeError,
    StaleOperatorError,
    TooLargeError,
)
from hvp._linearize.linearization import Linearization, linearize
from hvp._operators.hessian import HessianOperator, hessian_vector_product
from hvp._operators.statistics import Statistics

__version__ = "0.1.0.dev0"

__all__ = [
    "ClosedOperatorError",
    "GraphModeError",
    "HessianOperator",
    "HvpError",
    "InvalidDataError",
    "InvalidLossError",
    "InvalidVariablesError",
    "InvalidVectorError",
    "Linearization",
    "NonFiniteError",
    "SecondDerivativeError",
    "StaleOperatorError",
    "Statistics",
    "TooLargeError",
    "hessian_vector_product",
    "linearize",
]
