"""The operator that an estimator multiplies with."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvp._errors import GraphModeError
from hvp._operators.matrix import Matrix
from hvp._operators.symmetric import matrix_of


def symmetric_matrix(A: Any, caller: str) -> Matrix:
    """Return the rows of a symmetric operator.

    Parameters
    ----------
    A : SymmetricOperator, LinearOperator, ndarray or sparse array
        The operator.
    caller : str
        The name of the public function, for the error.

    Raises
    ------
    GraphModeError
        If TensorFlow traces a graph.
    StaleOperatorError
        If a variable has changed since the operator was evaluated.
    HvpError
        If the operator has another type, or is not square or not real, or is closed.
    """
    if not tf.executing_eagerly():
        raise GraphModeError(
            f"the function {caller} was called while TensorFlow traces a graph",
            "eager execution",
            f"call {caller} outside of the tf.function",
        )
    matrix = matrix_of(A)
    matrix.make_sure()
    return matrix
