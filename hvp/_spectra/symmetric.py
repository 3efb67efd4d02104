"""The operator that an estimator multiplies by."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvp._errors import GraphModeError
from hvp._operators.matrix import Matrix
from hvp._operators.symmetric import matrix_of


def symmetric_matrix(A: Any, caller: str) -> Matrix:
    """Return the matrix of an operator; refuse graphs, and operators that are stale or closed."""
    if not tf.executing_eagerly():
        raise GraphModeError(
            f"the function {caller} was called while TensorFlow traces a graph",
            "eager execution",
            f"call {caller} outside of the tf.function",
        )
    matrix = matrix_of(A)
    matrix.make_sure()
    return matrix
