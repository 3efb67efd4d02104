"""Products of an operator with the rows of a block, and the algebra of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from hvp._errors import HvpError, StaleOperatorError, quoted
from hvp._graphs.python_calls import call_python
from hvp._operators.symmetric import SymmetricOperator, core_of
from hvp._runtime.digest import digest
from hvp._vectors.arrays import check_product
from hvp._vectors.space import Space


class Rows:
    """A symmetric operator that multiplies the rows of tensors.

    Parameters
    ----------
    operator : SymmetricOperator, LinearOperator, ndarray or sparse array
        Square and symmetric. The products of a `SymmetricOperator` become part of a graph; any
        other operator is called in Python.

    Attributes
    ----------
    operator : SymmetricOperator or LinearOperator
        The operator.
    native : bool
        Whether the operator is a `SymmetricOperator`.
    damping : float
        The damping of the operator itself, which `multiply` leaves out.
    in_python : bool
        Whether Python runs for each product, even inside a graph.
    is_positive_semidefinite : bool
        Whether that is known of the operator.
    size : int
        Length of a row.
    dtype : tf.DType
        Type of the products.
    space : Space
        The space of vectors and products.

    Raises
    ------
    HvpError
        If the operator has another type, or is not square or not real.
    """

    def __init__(self, operator: Any) -> None:
        self.native = isinstance(operator, SymmetricOperator)
        if not self.native:
            operator = _as_linear_operator(operator)
        self.operator = operator
        self.size = int(operator.shape[0])
        self.is_positive_semidefinite = self.native and operator.is_positive_semidefinite
        self.damping = operator.damping if self.native else 0.0
        if self.native:
            stats = operator.stats
            self.in_python = stats.engine == "tape" or stats.batches is not None
        else:
            self.in_python = True
        keeps_dtype = self.native or operator.dtype == np.float32
        self.dtype = tf.as_dtype(operator.dtype) if keeps_dtype else tf.float64
        foreign = Space([0], ["vector"], [(self.size,)], [self.dtype])
        self.space = core_of(operator).space if self.native else foreign

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[Rows]:
        """Yield the rows of the operator in full precision; these, if they are."""
        if not self.is_low:
            yield self
            return
        with core_of(self.operator).in_full_precision() as core:
            yield Rows(SymmetricOperator(core, self.damping))

    def gradient(self) -> np.ndarray | None:
        """Return the gradient of the loss, if the operator is the matrix of one and has it."""
        if not self.native:
            return None
        try:
            gradient = self.operator.gradient
        except HvpError:
            return None
        return None if gradient is None else np.asarray(gradient)

    @property
    def is_low(self) -> bool:
        """Whether products are computed in low precision."""
        return self.native and core_of(self.operator).is_low

    @property
    def may_refine(self) -> bool:
        """Whether residuals can be computed in float64 although the operator is float32."""
        return self.native and core_of(self.operator).may_be_wide

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[Rows | None]:
        """Yield the rows of a float32 operator computed in float64; None where there are none."""
        if not self.native:
            yield None
            return
        with core_of(self.operator).in_float64() as core:
            yield None if core is None else Rows(SymmetricOperator(core, self.damping))

    @property
    def evaluations(self) -> int:
        """How often an operator of this package was evaluated; zero for others."""
        return self.operator.stats.gradient_evaluations if self.native else 0

    def make_sure_evaluated(self, evaluations: int) -> None:
        """Raise `StaleOperatorError` if the operator is at another point than it was then.

        What was computed from an operator that is closed now remains valid.
        """
        if not self.native:
            return
        snapshot = core_of(self.operator).snapshot
        if snapshot.held is None:
            return
        changed = snapshot.changed() if snapshot.on_stale == "raise" else []
        if changed or self.evaluations != evaluations:
            names = f" ({quoted(changed)})" if changed else ""
            raise StaleOperatorError(
                f"the operator was evaluated again, or its variables have changed{names}, since "
                "this was computed from it",
                "the values of then",
                "compute it again from the operator, after a refresh() if variables have changed",
            )

    def multiply(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply each row by the undamped operator, eagerly or in the graph being traced."""
        if self.native:
            return core_of(self.operator).linear_map.apply(rows)
        if tf.executing_eagerly():
            return tf.constant(self._multiply_in_numpy(rows.numpy()))
        spec = tf.TensorSpec(rows.shape, rows.dtype)
        (product,) = call_python(lambda r: [self._multiply_in_numpy(r.numpy())], [rows], [spec])
        return product

    def multiply_damped(self, vectors: np.ndarray) -> np.ndarray:
        """Multiply the rows of an array by the operator with its own damping, outside of graphs."""
        product = self.multiply(tf.constant(vectors)).numpy()
        if self.damping:
            product = product + np.asarray(self.damping, product.dtype) * vectors
        return product

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, computed once for each key and cached with a native operator."""
        return core_of(self.operator).cached(key, make) if self.native else make()

    def probe(self) -> np.ndarray:
        """Return a fixed random row, whose product distinguishes operators."""
        row = np.random.default_rng(0).standard_normal((1, self.size))
        return row.astype(self.dtype.as_numpy_dtype)

    def fingerprint(self) -> dict[str, str]:
        """Return a fingerprint of the operator, which is the same in every process."""
        if self.native:
            return core_of(self.operator).fingerprint()
        return {"operator": digest(self._multiply_in_numpy(self.probe()))}

    def _multiply_in_numpy(self, rows: np.ndarray) -> np.ndarray:
        product = np.ascontiguousarray(self.operator.matmat(rows.T).T, rows.dtype)
        return check_product(product)


def _as_linear_operator(operator: Any) -> LinearOperator:
    is_scipy = isinstance(operator, (LinearOperator, np.ndarray)) or scipy.sparse.issparse(operator)
    if not is_scipy:
        raise HvpError(
            f"the operator is {type(operator).__name__}",
            "a HessianOperator, or a scipy LinearOperator or matrix",
        )
    operator = aslinearoperator(operator)
    if operator.shape[0] != operator.shape[1]:
        raise HvpError(f"the operator has shape {operator.shape}", "a square, symmetric operator")
    if np.dtype(operator.dtype).kind not in "fiub":
        raise HvpError(f"the operator has dtype {operator.dtype}", "a real operator")
    return operator


def dots(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the inner products of corresponding rows, of shape `(k,)`."""
    return tf.reduce_sum(one * other, axis=-1)


def scaled(factors: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Multiply each row by its own factor."""
    return factors[:, tf.newaxis] * rows


def norms(rows: tf.Tensor) -> np.ndarray:
    """Return the Euclidean norms of rows, computed in float64 to avoid overflow."""
    array = rows.numpy() if tf.is_tensor(rows) else rows
    return np.array([float(np.linalg.norm(row.astype(np.float64))) for row in array])


def system_residual(rows: Rows, b: np.ndarray, x: np.ndarray, damping: float) -> np.ndarray:
    """Return the residual of the system, `b - (A + damping I) x`, row by row.

    This costs one product with each row. The terms, which cancel, are added in float64.
    """
    product = rows.multiply(tf.constant(x)).numpy().astype(np.float64)
    return (b - product - damping * x.astype(np.float64)).astype(x.dtype)
