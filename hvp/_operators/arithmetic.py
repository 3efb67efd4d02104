"""Arithmetic of scipy operators that preserves their dtype.

`scipy.sparse.linalg.LinearOperator` takes the type of a Python scalar for that of an array: `2 * H`
of a float32 operator is float64. NumPy's arrays do not do that, and neither do these operators.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from hvp._errors import InvalidVectorError
from hvp._vectors.arrays import make_array


class DtypePreserving(LinearOperator):
    """A `LinearOperator` whose dtype survives sums, products and Python scalars."""

    def __add__(self, other: Any) -> LinearOperator:
        """Add another operator or matrix of the same shape."""
        return _compose(super().__add__(_operator(other)))

    def __radd__(self, other: Any) -> LinearOperator:
        """Add to a matrix, or to the 0 that `sum` starts from."""
        return self if np.isscalar(other) and other == 0 else self + other

    def __sub__(self, other: Any) -> LinearOperator:
        """Subtract another operator or matrix of the same shape."""
        other = _operator(other)
        # Booleans and integers without a sign have no -1.
        return self + other * np.result_type(other.dtype, np.int8).type(-1)

    def __rsub__(self, other: Any) -> LinearOperator:
        """Subtract from a matrix."""
        return -self + other

    def __neg__(self) -> LinearOperator:
        """Return the operator times -1."""
        return self * -1

    def __mul__(self, other: Any) -> Any:
        """Multiply by a scalar (which may be a tensor without axes), an operator, or an array."""
        if hasattr(other, "shape") and len(other.shape) == 0:
            other = np.asarray(other)[()]
        return self.dot(other)

    def __rmul__(self, other: Any) -> Any:
        """Multiply a scalar or an array by the operator."""
        if np.ndim(other) == 0:
            return self * other
        return _compose(super().__rmul__(other))

    def __truediv__(self, other: Any) -> LinearOperator:
        """Divide by a scalar."""
        if not isinstance(other, numbers.Number):
            raise TypeError("an operator can be divided by a scalar only")
        number: Any = other
        return self.dot(1 / number)

    def __pow__(self, power: int) -> LinearOperator:
        """Apply the operator `power` times."""
        return _compose(super().__pow__(power))

    def dot(self, x: Any) -> Any:
        """Multiply by a scalar, an operator, or an array of one or two axes.

        Parameters
        ----------
        x : scalar, LinearOperator or array
            A Python scalar takes the operator's dtype; a NumPy scalar or array keeps its own.

        Returns
        -------
        LinearOperator or ndarray
            An array if `x` is one, and an operator otherwise.
        """
        if type(x) in (bool, int, float):
            x = self.dtype.type(x)
        if np.isscalar(x) or isinstance(x, LinearOperator):
            return _compose(super().dot(x))
        if scipy.sparse.issparse(x):
            return self.matmat(x)
        # Not by way of scipy, some versions of which look at shapes before the operator does.
        x = make_array(x)
        return self.matvec(x) if x.ndim == 1 else self.matmat(x)


class Composite(DtypePreserving):
    """An operator that scipy built out of others, with arithmetic that preserves the dtype.

    `args` are these, and numbers, as scipy has them.
    """

    def __init__(self, operator: LinearOperator) -> None:
        self._operator, self.args = operator, operator.args
        super().__init__(np.dtype(operator.dtype), operator.shape)

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._operator.matvec(self._narrow(x))

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        return self._operator.matmat(self._narrow(X))

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        return self._operator.rmatvec(self._narrow(x))

    def _rmatmat(self, X: np.ndarray) -> np.ndarray:
        return self._operator.rmatmat(self._narrow(X))

    def _narrow(self, x: np.ndarray) -> np.ndarray:
        """Cast real numbers to the operator's dtype, as its parts from this package do."""
        return x.astype(self.dtype, copy=False) if x.dtype.kind in "fiub" else x

    def _adjoint(self) -> LinearOperator:
        return Composite(self._operator.adjoint())

    def _transpose(self) -> LinearOperator:
        return Composite(self._operator.transpose())


def _compose(result: Any) -> Any:
    if isinstance(result, LinearOperator) and not isinstance(result, DtypePreserving):
        return Composite(result)
    return result


def _operator(other: Any) -> LinearOperator:
    if np.ndim(other) == 0 and not isinstance(other, LinearOperator):
        raise InvalidVectorError(
            f"an operator and {other!r} were added",
            "two operators, or an operator and a matrix",
            "for a multiple of the identity, call damped(number)",
        )
    return other if isinstance(other, LinearOperator) else aslinearoperator(other)
