"""Where variables are, as one flat vector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

from hvp._linearize.flatten import Flattener
from hvp._linearize.variables import VariableNest, collect_variables
from hvp._operators.vectors import check_array


class Position:
    """Reads and writes a nest of variables as one vector.

    Parameters
    ----------
    nest : VariableNest
        The variables.

    Attributes
    ----------
    size : int
        Entries of the vector.
    dtype : numpy.dtype
        In which the variables hold it: the widest of theirs, at least float32.
    variables : tuple of tf.Variable
        The variables.
    """

    def __init__(self, nest: VariableNest) -> None:
        self.variables = nest.variables
        self._flattener = Flattener(nest)
        self.size = self._flattener.size
        self.dtype = np.dtype(self._flattener.dtype.as_numpy_dtype)

    def checked(self, x: Any, name: str = "x") -> np.ndarray:
        """Return a vector given by somebody as an array in the variables' type, or refuse it."""
        return check_array(x, self.size, self.dtype, ndims=(1,), name=name)

    def values(self) -> list[tf.Tensor]:
        """Return what each variable holds now; costs no memory until it is written to."""
        # The variables' own methods, here and below, cost several times as much.
        return [
            tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
            for variable in self.variables
        ]

    def read(self) -> tf.Tensor:
        """Return the vector."""
        return self._flattener.join(self.values())

    def write(self, x: Any) -> None:
        """Write a vector, an array or a tensor, to the variables."""
        self.write_values(self._flattener.split(tf.cast(x, self._flattener.dtype)))

    def write_values(self, values: Sequence[tf.Tensor]) -> None:
        """Write what each variable is to hold."""
        for variable, value in zip(self.variables, values):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    @contextlib.contextmanager
    def restored(self, only_if_it_fails: bool = False) -> Iterator[None]:
        """Put the variables back afterwards, whatever happens in between."""
        values = self.values()
        try:
            yield
        except BaseException:
            self.write_values(values)
            raise
        if not only_if_it_fails:
            self.write_values(values)


def variables_size(loss: Any, variables: Any) -> int:
    """Return the number of entries of variables, or of those of an operator given instead."""
    if isinstance(loss, LinearOperator):
        return int(loss.shape[0])
    return Flattener(collect_variables(variables)).size
