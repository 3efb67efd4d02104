"""Products with the rows of a block, and inner products of rows, wherever the operator is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from hvp._errors import HvpError
from hvp._operators.operator import SymmetricOperator, core_of
from hvp._runtime.digest import digest
from hvp._vectors.arrays import check_product


class Rows:
    """A symmetric operator that multiplies the rows of tensors.

    Parameters
    ----------
    operator : SymmetricOperator, LinearOperator, ndarray or sparse array
        Square and symmetric; of this package's operators products are part of a graph, others are
        called in Python.

    Attributes
    ----------
    operator : SymmetricOperator or LinearOperator
        The same.
    own : bool
        Whether it is of this package.
    damping : float
        What the operator itself adds, which `multiply` leaves out.
    in_python : bool
        Whether Python runs for each product, also inside graphs.
    size : int
        Of a row.
    dtype : tf.DType
        Of the products.

    Raises
    ------
    HvpError
        If it is none of these, not square or not real.
    """

    def __init__(self, operator: Any) -> None:
        self.own = isinstance(operator, SymmetricOperator)
        if not self.own:
            operator = _as_linear_operator(operator)
        self.operator = operator
        self.size = int(operator.shape[0])
        self.damping = operator.damping if self.own else 0.0
        if self.own:
            stats = operator.stats
            self.in_python = stats.engine == "tape" or stats.batches is not None
        else:
            self.in_python = True
        narrow = operator.dtype == np.float32
        self.dtype = tf.as_dtype(operator.dtype) if self.own or narrow else tf.float64

    def multiply(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply each row, now or in the graph being traced; without damping."""
        if self.own:
            return core_of(self.operator).map().apply_rows(rows)
        if tf.executing_eagerly():
            return tf.constant(self._in_numpy(rows.numpy()))
        (product,) = tf.numpy_function(self._in_numpy, [rows], [rows.dtype])
        return tf.ensure_shape(product, rows.shape)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for this operator under a key; it is kept with the operator."""
        return core_of(self.operator).cached(key, make) if self.own else make()

    def probe(self) -> np.ndarray:
        """Return a row by which operators can be told from each other, always the same."""
        row = np.random.default_rng(0).standard_normal((1, self.size))
        return row.astype(self.dtype.as_numpy_dtype)

    def fingerprint(self) -> dict[str, str]:
        """Return what tells this operator from others, also in another process."""
        if self.own:
            return core_of(self.operator).fingerprint()
        return {"operator": digest(self._in_numpy(self.probe()))}

    def _in_numpy(self, rows: np.ndarray) -> np.ndarray:
        product = np.ascontiguousarray(self.operator.matmat(rows.T).T, rows.dtype)
        return check_product(product)


def _as_linear_operator(operator: Any) -> LinearOperator:
    known = isinstance(operator, (LinearOperator, np.ndarray)) or scipy.sparse.issparse(operator)
    if not known:
        raise HvpError(
            f"the operator is {type(operator).__name__}",
            "a HessianOperator, or a scipy LinearOperator or matrix",
        )
    operator = aslinearoperator(operator)
    if operator.shape[0] != operator.shape[1]:
        raise HvpError(f"the operator has shape {operator.shape}", "a square, symmetric one")
    if np.dtype(operator.dtype).kind not in "fiub":
        raise HvpError(f"the operator is of type {operator.dtype}", "a real one")
    return operator


def dots(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the inner products of rows, of shape `(k,)`."""
    return tf.reduce_sum(one * other, axis=-1)


def scaled(factors: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Multiply each row by a number of its own."""
    return factors[:, tf.newaxis] * rows


def norms(rows: tf.Tensor) -> np.ndarray:
    """Return the Euclidean norms of rows in float64, without overflow in between."""
    array = rows.numpy() if tf.is_tensor(rows) else rows
    return np.array([float(np.linalg.norm(row.astype(np.float64))) for row in array])


def residuals(rows: Rows, b: np.ndarray, x: np.ndarray, damping: float) -> np.ndarray:
    """Return `b - (A + damping I) x`, row by row, by a product."""
    product = rows.multiply(tf.constant(x)).numpy()
    return b - product - np.asarray(damping, x.dtype) * x
