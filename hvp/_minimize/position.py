"""The values of a nest of variables as one flat vector."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

from hvp._errors import InvalidVectorError
from hvp._graphs.compiled import Compiled
from hvp._vectors.arrays import check_array, make_array
from hvp._vectors.resources import restored
from hvp._vectors.space import Space, check_numeric
from hvp._vectors.variables import VariableNest, collect_variables

# Tracing a function takes as long as some hundred operations.
_FEW = 8


class Position:
    """Reads and writes a nest of variables as one vector.

    The vector has the widest of the variables' types, and at least float32.
    """

    def __init__(self, nest: VariableNest) -> None:
        self.variables = nest.variables
        self._space = Space.of_variables(nest)
        self.size = self._space.size
        self.dtype = np.dtype(self._space.dtype.as_numpy_dtype)

    def checked(self, x: Any, name: str = "x") -> np.ndarray:
        """Check a vector from the user, and return it as an array of type `dtype`."""
        return check_array(x, self.size, self.dtype, ndims=(1,), name=name)

    def vector_of(self, value: Any, name: str) -> np.ndarray:
        """Return a number, a flat vector or a nest like the variables as one array in float64.

        Infinities are allowed. The errors call the argument by its `name`.
        """
        for leaf in tf.nest.flatten(value):
            check_numeric(
                leaf if hasattr(leaf, "dtype") else make_array(leaf), f"the argument {name}"
            )
        if isinstance(value, (list, tuple)) and all(np.ndim(entry) == 0 for entry in value):
            value = np.asarray(value)
        if not tf.nest.is_nested(value) and np.ndim(value) == 0:
            array = np.full(self.size, float(value))
        else:
            flat = self._space.is_flat(value)
            parts = [value] if flat else self._space.parts_of_nest(value, name)
            array = np.concatenate([np.ravel(np.asarray(part, np.float64)) for part in parts])
        if np.isnan(array).any():
            raise InvalidVectorError(f"{name} has entries that are NaN", "real numbers")
        return array

    def read(self) -> tf.Tensor:
        """Return the values of the variables as one vector."""
        return self._read()

    def write(self, x: Any) -> None:
        """Assign an array or a tensor to the variables."""
        self._write(tf.cast(x, self._space.dtype))

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Return a vector of what the variables would be, each in its own type, in float64."""
        parts = self._space.split(tf.constant(x, self._space.dtype))
        return self._space.join(parts).numpy().astype(np.float64)

    def restored(self, only_on_error: bool = False) -> AbstractContextManager[None]:
        """Restore the variables on exit, or only if an exception is raised inside."""
        return restored([self], only_on_error=only_on_error)

    # Reading and writing are compiled into one call each: with one operation per variable they
    # would take as long as a small evaluation of the loss. A few variables are not worth it.

    @property
    def _eager(self) -> bool:
        return len(self.variables) <= _FEW

    @functools.cached_property
    def _read(self) -> Compiled:
        def read() -> tf.Tensor:
            return self._space.join([variable.read_value() for variable in self.variables])

        return Compiled(read, [], False, eager=self._eager, pure=True)

    @functools.cached_property
    def _write(self) -> Compiled:
        def write(x: tf.Tensor) -> tf.Tensor:
            for variable, value in zip(self.variables, self._space.split(x)):
                variable.assign(value)
            return tf.constant(0)

        specs = [tf.TensorSpec([self.size], self._space.dtype)]
        return Compiled(write, specs, False, eager=self._eager)


def variables_size(loss: Any, variables: Any) -> int:
    """Return the number of entries of the variables, or the size of an operator."""
    if isinstance(loss, LinearOperator):
        return int(loss.shape[0])
    return Space.of_variables(collect_variables(variables)).size
