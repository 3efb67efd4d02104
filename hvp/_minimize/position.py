"""Where variables are, as one flat vector."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

from hvp._graphs.compiled import Compiled
from hvp._vectors.arrays import check_array
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest, collect_variables


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
        self._space = Space.of_variables(nest)
        self.size = self._space.size
        self.dtype = np.dtype(self._space.dtype.as_numpy_dtype)

    def checked(self, x: Any, name: str = "x") -> np.ndarray:
        """Return a vector given by somebody as an array in the variables' type, or refuse it."""
        return check_array(x, self.size, self.dtype, ndims=(1,), name=name)

    def read(self) -> tf.Tensor:
        """Return the vector."""
        return self._read()

    def write(self, x: Any) -> None:
        """Write a vector, an array or a tensor, to the variables."""
        self._write(tf.cast(x, self._space.dtype))

    @contextlib.contextmanager
    def restored(self, only_if_it_fails: bool = False) -> Iterator[None]:
        """Put the variables back afterwards, whatever happens in between."""
        before = self.read()
        try:
            yield
        except BaseException:
            self.write(before)
            raise
        if not only_if_it_fails:
            self.write(before)

    # One call each: an operation for each variable would take as long as a small evaluation.

    @functools.cached_property
    def _read(self) -> Compiled:
        def read() -> tf.Tensor:
            return self._space.join([variable.read_value() for variable in self.variables])

        return Compiled(read, [], False)

    @functools.cached_property
    def _write(self) -> Compiled:
        def write(x: tf.Tensor) -> tf.Tensor:
            for variable, value in zip(self.variables, self._space.split(x)):
                variable.assign(value)
            return tf.constant(0)

        return Compiled(write, [tf.TensorSpec([self.size], self._space.dtype)], False)


def variables_size(loss: Any, variables: Any) -> int:
    """Return the number of entries of variables, or of those of an operator given instead."""
    if isinstance(loss, LinearOperator):
        return int(loss.shape[0])
    return Space.of_variables(collect_variables(variables)).size
