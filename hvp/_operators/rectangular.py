"""Rectangular operators: a linear map and its transpose as scipy operators."""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

from hvp._engines.linear_map import LinearMap
from hvp._errors import TooLargeError
from hvp._operators.arithmetic import DtypePreserving
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._vectors.arrays import check_array, check_product
from hvp._vectors.space import as_tensor

# Columns or rows in one block when a dense matrix is assembled.
_DENSE_BLOCK = 64


class RectangularOperator(OneProcess, DtypePreserving):
    """Base class of rectangular operators: vectors and blocks in, the same out.

    Parameters
    ----------
    dtype : numpy.dtype
        The type of the products.
    shape : tuple of int
        The numbers of rows and columns.
    """

    __signature__: inspect.Signature

    def __init_subclass__(cls, **options: Any) -> None:
        """Show the signature of `__init__`; scipy's `__new__` would show `(*args, **kwargs)`."""
        super().__init_subclass__(**options)
        cls.__signature__ = _signature_of(cls)

    @abc.abstractmethod
    def _map(self) -> LinearMap:
        """Return the linear map to multiply with here; its transpose is the other one."""

    def matvec(self, x: Any) -> np.ndarray:
        """Multiply by one vector.

        Parameters
        ----------
        x : array_like
            A real and finite vector of shape `(n,)` or `(n, 1)`.

        Returns
        -------
        ndarray
            The product, of shape `(m,)` or `(m, 1)`.

        Raises
        ------
        InvalidVectorError
            If `x` has another shape or kind, or entries that are not finite.
        NonFiniteError
            If the product is not finite.
        StaleOperatorError, ClosedOperatorError
            As `jvp`.
        """
        return _column(check_array(x, self.shape[1], self.dtype, ndims=(1, 2)), self._matvec)

    def rmatvec(self, x: Any) -> np.ndarray:
        """Multiply the transpose by one vector, of shape `(m,)` or `(m, 1)`; see `matvec`."""
        return _column(check_array(x, self.shape[0], self.dtype, ndims=(1, 2)), self._rmatvec)

    def matmat(self, X: Any) -> np.ndarray:
        """Multiply by a block of columns, of shape `(n, k)`; see `matvec`."""
        return self._matmat(_block(X, self.shape[1], self.dtype))

    def rmatmat(self, X: Any) -> np.ndarray:
        """Multiply the transpose by a block of columns, of shape `(m, k)`; see `matvec`."""
        return self._rmatmat(_block(X, self.shape[0], self.dtype))

    @Uninterrupted()
    def to_dense(self, *, max_size: int = 4096) -> np.ndarray:
        """Return the whole matrix, which takes as many products as its shorter side is long.

        Parameters
        ----------
        max_size : int, optional
            The matrix may have as many entries as a square one of this size.

        Returns
        -------
        ndarray
            The matrix of shape `(m, n)`.

        Raises
        ------
        TooLargeError
            If it has more entries than that.
        """
        rows, columns = self.shape
        if rows * columns > max_size**2:
            least = math.isqrt(rows * columns - 1) + 1
            raise TooLargeError(
                f"a dense matrix of {rows} x {columns} numbers was asked for",
                f"at most as many as {max_size} x {max_size}",
                f"pass max_size={least} if "
                f"{rows * columns * self.dtype.itemsize / 2**30:.2g} GiB are what you want",
            )
        dense = np.empty(self.shape, self.dtype)
        by_rows = self.shape[0] < self.shape[1]
        count = min(self.shape)
        for start in range(0, count, _DENSE_BLOCK):
            taken = np.arange(start, min(start + _DENSE_BLOCK, count))
            block = np.zeros((count, len(taken)), self.dtype)
            block[taken, taken - start] = 1
            if by_rows:
                dense[taken] = self._rmatmat(block).T
            else:
                dense[:, taken] = self._matmat(block)
            deliver_interrupt()
        return dense

    @Uninterrupted()
    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._flat(self._map(), x)

    @Uninterrupted()
    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        return self._flat(self._map().transpose(), x)

    @Uninterrupted()
    def _matmat(self, X: np.ndarray) -> np.ndarray:
        return self._rows(self._map(), X)

    @Uninterrupted()
    def _rmatmat(self, X: np.ndarray) -> np.ndarray:
        return self._rows(self._map().transpose(), X)

    def _flat(self, held: LinearMap, x: np.ndarray) -> np.ndarray:
        product = held.apply_flat(as_tensor(x.reshape(-1), held.domain.dtype)).numpy()
        return check_product(product.astype(self.dtype, copy=False))

    def _rows(self, held: LinearMap, X: np.ndarray) -> np.ndarray:
        if X.shape[1] == 0:
            return np.zeros((held.codomain.size, 0), self.dtype)
        rows = held.apply_rows(tf.transpose(as_tensor(X, held.domain.dtype)))
        return check_product(tf.transpose(rows).numpy().astype(self.dtype, copy=False))

    def _adjoint(self) -> LinearOperator:
        return _Transposed(self)

    def _transpose(self) -> LinearOperator:
        return _Transposed(self)


class _Transposed(DtypePreserving):
    """The transpose of an operator, which runs it."""

    def __init__(self, plain: RectangularOperator) -> None:
        self._plain = plain
        rows, columns = plain.shape
        super().__init__(plain.dtype, (columns, rows))

    def __repr__(self) -> str:
        return f"{self._plain!r}.T"

    def to_dense(self, *, max_size: int = 4096) -> np.ndarray:
        return self._plain.to_dense(max_size=max_size).T

    def matvec(self, x: Any) -> np.ndarray:
        return self._plain.rmatvec(x)

    def rmatvec(self, x: Any) -> np.ndarray:
        return self._plain.matvec(x)

    def matmat(self, X: Any) -> np.ndarray:
        return self._plain.rmatmat(X)

    def rmatmat(self, X: Any) -> np.ndarray:
        return self._plain.matmat(X)

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self.matvec(x)

    def _adjoint(self) -> LinearOperator:
        return self._plain

    def _transpose(self) -> LinearOperator:
        return self._plain


def _signature_of(cls: type) -> inspect.Signature:
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _column(x: np.ndarray, multiply: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    product = multiply(x)
    return product if x.ndim == 1 else product[:, np.newaxis]


def _block(X: Any, rows: int, dtype: np.dtype) -> np.ndarray:
    if scipy.sparse.issparse(X):
        X = X.toarray()
    return check_array(X, rows, dtype, ndims=(2,))
