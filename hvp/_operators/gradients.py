"""The gradient at points near the one an operator was evaluated at, by a trace of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from hvp._operators.evaluation import Evaluation


class Gradients:
    """A loss and its gradient, evaluated without the operator.

    Parameters
    ----------
    evaluation : Evaluation
        Of the gradient alone.
    other : Evaluation
        The operator's.

    Attributes
    ----------
    evaluations : int
        How many there were.
    """

    def __init__(self, evaluation: Evaluation, other: Evaluation) -> None:
        self._evaluation = evaluation
        self._flattener = other.program.flattener
        self._variables = other.program.nest.variables
        self.evaluations = 1

    def again(self) -> tuple[float, np.ndarray]:
        """Evaluate once more, at the values the variables have now."""
        self._evaluation.refresh()
        self.evaluations += 1
        return self.last()

    def last(self) -> tuple[float, np.ndarray]:
        """Return the loss and its gradient, of shape `(n,)`, from the last evaluation."""
        gradient = self._flattener.join(self._evaluation.gradient()).numpy()
        return float(self._evaluation.value()), gradient

    def parts(self, vector: np.ndarray) -> list[np.ndarray]:
        """Cut a vector, or an array of shape `(n,)`, into parts, one for each variable."""
        sizes = [int(np.prod(shape)) for shape in self._flattener.shapes]
        return np.split(vector, np.cumsum(sizes)[:-1])

    def norm_of_variables(self) -> float:
        """Return the norm of all variables together."""
        squares = [tf.reduce_sum(tf.square(tf.cast(v, tf.float64))) for v in self._variables]
        return float(tf.sqrt(tf.add_n(squares)))

    @contextlib.contextmanager
    def moved(self, change: np.ndarray) -> Iterator[None]:
        """Move the variables by a vector, and put them back."""
        before = [tf.identity(v) for v in self._variables]
        parts = self._flattener.split(tf.constant(change, self._flattener.dtype))
        try:
            for variable, value, part in zip(self._variables, before, parts):
                variable.assign(value + part)
            yield
        finally:
            for variable, value in zip(self._variables, before):
                variable.assign(value)

    def close(self) -> None:
        """Release what is kept."""
        self._evaluation.close()
