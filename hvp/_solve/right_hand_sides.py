"""Right-hand sides in any form that users may pass, and solutions in the same form."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import InvalidVectorError
from hvp._operators.matrix import Matrix
from hvp._vectors.arrays import check_array, make_array
from hvp._vectors.nests import flattened, unflattened


class RightHandSides:
    """One vector, the columns of a matrix, or a nest with the structure of the variables.

    `rows` holds the right-hand sides as rows, and `single` tells whether there is a single vector
    or nest rather than a matrix. Errors call the argument `name`. Raise `InvalidVectorError` for
    another shape or type, or entries that are not finite.
    """

    def __init__(self, matrix: Matrix, b: Any, name: str) -> None:
        self._space = matrix.space
        self._nest = matrix.has_variables and self._is_nest(b, matrix.size)
        self._tensor = not self._nest and tf.is_tensor(b)
        if self._nest:
            b = flattened(self._space, b)
        if tf.is_tensor(b) or isinstance(b, tf.Variable):
            b = b.numpy()
        dtype = np.dtype(matrix.dtype.as_numpy_dtype)
        array = make_array(b)
        if array.ndim not in (1, 2) or array.shape[0] != matrix.size:
            description = f"has shape {array.shape}" if array.ndim else f"is {type(b).__name__}"
            expected = f"shape ({matrix.size},) or ({matrix.size}, k)"
            nest = ", or a nest like the variables" if matrix.has_variables else ""
            raise InvalidVectorError(f"{name} {description}", expected + nest)
        array = check_array(array, matrix.size, dtype, ndims=(array.ndim,), name=name)
        self.single = array.ndim == 1
        self.rows = np.array(np.atleast_2d(array.T), order="C")

    def like(self, rows: np.ndarray) -> Any:
        """Convert rows to the form of the right-hand sides."""
        if self._nest:
            return unflattened(self._space, tf.constant(rows[0]))
        array = rows[0] if self.single else np.ascontiguousarray(rows.T)
        return tf.constant(array) if self._tensor else array

    def of_columns(self, values: np.ndarray) -> Any:
        """Return one value for each column, as a Python number if there is a single vector."""
        return values[0].item() if self.single else values

    def _is_nest(self, b: Any, size: int) -> bool:
        space = self._space
        nested = tf.nest.is_nested(space.structure)
        if not tf.nest.is_nested(b):  # with a single variable, b may have the variable's shape
            shape = tuple(getattr(b, "shape", ()))
            return not nested and shape == space.shapes[0] and shape[:1] != (size,)
        # A list or tuple of n numbers is a vector, unless the variables are n scalars.
        leaves = tf.nest.flatten(b)
        numbers = isinstance(b, (list, tuple)) and all(np.ndim(leaf) == 0 for leaf in leaves)
        return not numbers or (len(leaves) != size and nested)
