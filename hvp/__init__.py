"""Hessian-vector products in TensorFlow, from one evaluation of the gradient.

The public names, all of them:

`HessianOperator`
    The Hessian of a loss as a scipy `LinearOperator`.
`hessian_vector_product`
    One product, and nothing kept.
`linearize`
    Any function's value, and its derivative as a linear map.
`recompute`
    A function whose intermediate values are computed again instead of kept, in every derivative.
`recompute_model`
    A Keras model in segments of that kind.
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
    RecomputeError,
    SecondDerivativeError,
    StaleOperatorError,
    TooLargeError,
)
from hvp._linearize.linearization import Linearization, linearize
from hvp._operators.hessian import HessianOperator, hessian_vector_product
from hvp._operators.statistics import Statistics
from hvp._recompute.keras_segments import recompute_model
from hvp._recompute.recompute import recompute

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
    "RecomputeError",
    "SecondDerivativeError",
    "StaleOperatorError",
    "Statistics",
    "TooLargeError",
    "hessian_vector_product",
    "linearize",
    "recompute",
    "recompute_model",
]
