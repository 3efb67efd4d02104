"""A symmetric linear map of layer 1 as a scipy and as a TensorFlow operator."""

from __future__ import annotations

import copy
import inspect
import numbers
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

from hvp._errors import HvpError, TooLargeError
from hvp._operators.arithmetic import DtypePreserving
from hvp._operators.core import Core
from hvp._runtime.guard import OneProcess
from hvp._snapshots.statistics import Statistics
from hvp._vectors.arrays import check_array, check_product, make_array
from hvp._vectors.space import as_tensor, check_numeric

Self = TypeVar("Self", bound="SymmetricOperator")

# Columns in one block when a dense matrix is put together.
_DENSE_BLOCK = 64


class SymmetricOperator(OneProcess, DtypePreserving):
    """What the operators of this package have in common.

    Parameters
    ----------
    core : Core
        What was evaluated, and the linear map.
    damping : float
        Multiple of the identity to add.
    """

    __signature__: inspect.Signature

    def __init_subclass__(cls, **options: Any) -> None:
        """Show the signature of `__init__`; scipy's `__new__` would show `(*args, **kwargs)`."""
        super().__init_subclass__(**options)
        signature = inspect.signature(cls.__init__)
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __init__(self, core: Core, damping: float) -> None:
        self._core = core
        self._damping = check_damping(damping)
        self._space = core.space
        size = self._space.size
        super().__init__(np.dtype(self._space.dtype.as_numpy_dtype), (size, size))

    def __repr__(self) -> str:
        size, stats = self.shape[0], self.stats
        said = [f"{size} x {size}", self.dtype.name, f"engine {stats.engine!r}"]
        if self._damping:
            said.append(f"damping {self._damping:g}")
        if stats.batches_kept is not None:
            said.append(f"{stats.batches} batches")
        said += filter(None, [self._core.snapshot.standing])
        return f"{type(self).__name__}({', '.join(said)})"

    @property
    def damping(self) -> float:
        """The multiple of the identity that is added."""
        return self._damping

    @property
    def value(self) -> float:
        """The loss where it was evaluated, from that evaluation."""
        return float(self._core.snapshot.value())

    @property
    def gradient(self) -> np.ndarray:
        """The loss's gradient, of shape `(n,)` in the operator's dtype, from that evaluation.

        A fresh array each time. Damping does not enter.
        """
        return self._core.gradient().numpy()

    @property
    def stats(self) -> Statistics:
        """Counts of the work done so far, as they are now."""
        return self._core.snapshot.statistics

    @tf.autograph.experimental.do_not_convert
    def product(self, v: Any) -> Any:
        """Multiply by one vector of tensors; nothing is copied to the host.

        Parameters
        ----------
        v : nest of tensors, or tf.Tensor
            Shaped like the variables, or one flat tensor of shape `(n,)`. Real; cast to the
            variables' dtypes.

        Returns
        -------
        nest of tf.Tensor, or tf.Tensor
            In the form of `v`: a nest in the variables' dtypes, a flat tensor in the operator's.

        Raises
        ------
        InvalidVectorError
            If `v` does not fit the variables.
        StaleOperatorError, ClosedOperatorError
            As for every use of the operator.

        Notes
        -----
        Usable inside a `tf.function` and its loops, where the graph engine adds the product itself,
        and no Python runs for each. Each call multiplies by the operator as it then is, also after
        `refresh()`, without another trace; if it is closed or stale, errors arrive as
        TensorFlow's, with the original's text. In a function with ``jit_compile=True``, where
        nothing can raise or call Python, the product of a stale operator is NaN, also with
        ``on_stale="refresh"``, until `refresh()` is called outside; that of a closed one, an error
        of TensorFlow's about shapes. XLA cannot compile the product of a loss with loops or
        branches, or with max pooling. With the tape engine, and where the data are several batches,
        products in graphs run through `tf.py_function`, which XLA cannot compile either.

        The operator belongs to one point: a tape around the product sees it depend on `v`, not on
        the variables.

        Entries that are not finite go in and come out as they are: to look at them would mean to
        wait for the device. `H @ v` does look.
        """
        space, held = self._space, self._core.map(self._damping)
        if space.is_flat(v):
            return held.apply_flat(as_tensor(v, space.dtype))
        parts = space.parts_of_nest(v)
        vector = [as_tensor(part, dtype) for part, dtype in zip(parts, space.dtypes)]
        return space.nest_of_parts(held.apply(vector))

    def matvec(self, x: Any) -> np.ndarray:
        """Multiply by one vector.

        Parameters
        ----------
        x : array_like
            Of shape `(n,)` or `(n, 1)`; real and finite, cast to the operator's dtype.

        Returns
        -------
        ndarray
            Of the shape of `x`, in the operator's dtype.

        Raises
        ------
        InvalidVectorError
            If `x` has another shape or kind, or entries that are not finite.
        NonFiniteError
            If the product is not finite.
        StaleOperatorError, ClosedOperatorError
            As for every use of the operator.
        """
        x = check_array(x, self.shape[0], self.dtype, ndims=(1, 2))
        return self._matvec(x).reshape(x.shape)

    def matmat(self, X: Any) -> np.ndarray:
        """Multiply by a block of columns.

        Parameters
        ----------
        X : array_like
            Of shape `(n, k)`; real and finite, cast to the operator's dtype.

        Returns
        -------
        ndarray
            Of the shape of `X`, in the operator's dtype.

        Raises
        ------
        InvalidVectorError, NonFiniteError, StaleOperatorError, ClosedOperatorError
            As `matvec`.
        """
        if scipy.sparse.issparse(X):
            X = X.toarray()
        return self._matmat(check_array(X, self.shape[0], self.dtype, ndims=(2,)))

    def rmatvec(self, x: Any) -> np.ndarray:
        """Multiply the transpose by one vector: the same as `matvec`, the operator is symmetric."""
        return self.matvec(x)

    def rmatmat(self, X: Any) -> np.ndarray:
        """Multiply the transpose by a block of columns: the same as `matmat`."""
        return self.matmat(X)

    def dot(self, x: Any) -> Any:
        """Multiply by a scalar, an operator, or an array of one or two axes."""
        if type(x) is np.ndarray and x.ndim:  # the usual case, and small products wait for it
            return self.matvec(x) if x.ndim == 1 else self.matmat(x)
        if np.isscalar(x) or isinstance(x, LinearOperator):
            return super().dot(x)
        if scipy.sparse.issparse(x):
            return self.matmat(x)
        x = make_array(x)
        return self.matvec(x) if x.ndim == 1 else self.matmat(x)

    def __matmul__(self, other: Any) -> Any:
        """Multiply by an operator or an array of one or two axes."""
        return self.dot(other) if type(other) is np.ndarray else super().__matmul__(other)

    def damped(self: Self, lam: float) -> Self:
        """Return this operator plus `lam` times the identity, over the same evaluation.

        Parameters
        ----------
        lam : float
            Finite; added to the operator's own damping.

        Returns
        -------
        operator of the same kind
            Shares what was evaluated, `stats`, `refresh` and `close` with this one.
        """
        twin = copy.copy(self)
        twin._damping = self._damping + check_damping(lam)
        return twin

    def to_dense(self, *, max_size: int = 4096) -> np.ndarray:
        """Put the whole matrix together, by one product per column.

        Parameters
        ----------
        max_size : int, optional
            Refuse if `n` is larger: memory grows as its square, time as `n` products.

        Returns
        -------
        ndarray
            Of shape `(n, n)`, damping included, in the operator's dtype.

        Raises
        ------
        TooLargeError
            If `n` is larger than `max_size`.
        """
        size = self.shape[0]
        if size > max_size:
            raise TooLargeError(
                f"a dense matrix of {size} x {size} numbers was asked for",
                f"at most {max_size} x {max_size}",
                f"pass max_size={size} if {size} products and "
                f"{size**2 * self.dtype.itemsize / 2**30:.2g} GiB are what you want",
            )
        dense = np.empty((size, size), self.dtype)
        for start in range(0, size, _DENSE_BLOCK):
            columns = np.arange(start, min(start + _DENSE_BLOCK, size))
            block = np.zeros((size, len(columns)), self.dtype)
            block[columns, columns - start] = 1
            dense[:, columns] = self.matmat(block)
        return dense

    def flatten(self, nest: Any) -> Any:
        """Concatenate a nest shaped like the variables, in `tf.nest` order.

        Parameters
        ----------
        nest : nest of tensors, arrays or variables
            Shaped like the variables.

        Returns
        -------
        ndarray or tf.Tensor
            Of shape `(n,)` in the operator's dtype; an ndarray if all of `nest` are.
        """
        parts = self._space.parts_of_nest(nest, "the nest")
        flat = self._space.join([tf.convert_to_tensor(part) for part in parts])
        return flat.numpy() if all(isinstance(part, np.ndarray) for part in parts) else flat

    def unflatten(self, vector: Any) -> Any:
        """Cut a flat vector, or a block of columns, into a nest like the variables.

        Parameters
        ----------
        vector : array_like or tf.Tensor
            Of shape `(n,)`, or `(n, k)`.

        Returns
        -------
        nest of tf.Tensor or of ndarray
            Of tensors if `vector` is one. Typed like the variables, and shaped like them; of a
            block each part has a further last axis, of the columns.
        """
        is_tensor = tf.is_tensor(vector)
        vector = vector if is_tensor else np.asarray(vector)
        check_numeric(vector, "the vector")
        if len(vector.shape) == 2 and vector.shape[0] == self.shape[0]:
            rows = self._space.split(tf.cast(tf.transpose(vector), self._space.dtype))
            parts = [tf.transpose(part, [*range(1, len(part.shape)), 0]) for part in rows]
        else:
            self._space.check_flat(vector)
            parts = self._space.split(tf.cast(vector, self._space.dtype))
        return self._space.nest_of_parts(parts if is_tensor else [p.numpy() for p in parts])

    def as_tf_operator(
        self, *, is_positive_definite: bool | None = None, name: str = "HessianOperator"
    ) -> tf.linalg.LinearOperator:
        """Return a `tf.linalg.LinearOperator` over the same map.

        Parameters
        ----------
        is_positive_definite : bool, optional
            Your word that the matrix, damping included, is positive definite;
            `tf.linalg.experimental.conjugate_gradient` asks for it.
        name : str, optional
            TensorFlow's name for the operator.

        Returns
        -------
        tf.linalg.LinearOperator
            Self-adjoint and square. Shares everything with this operator.

        Examples
        --------
        >>> import tensorflow as tf
        >>> import hvp
        >>> w = tf.Variable([1.0, 2.0])
        >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
        >>> operator = H.as_tf_operator(is_positive_definite=True)
        >>> solution = tf.linalg.experimental.conjugate_gradient(operator, tf.constant([1.0, 4.0]))
        >>> solution.x.numpy().round(5)
        array([1., 1.], dtype=float32)
        """
        from hvp._operators.tf_operator import TensorFlowOperator

        return TensorFlowOperator(
            self._columns,
            self.shape[0],
            self._space.dtype,
            is_positive_definite=is_positive_definite,
            name=name,
        )

    def refresh(self) -> None:
        """Evaluate again, at the values the variables have now.

        Raises
        ------
        NonFiniteError
            If the loss or its gradient is not finite there. The operator then holds nothing until
            a `refresh` succeeds.

        Notes
        -----
        Costs one evaluation of the gradient, as the constructor does. What was kept of the old
        point is released first, so the two never have to fit in memory together.
        """
        self._core.snapshot.refresh()

    def close(self) -> None:
        """Release what is kept for products. Closing twice does nothing."""
        self._core.snapshot.close()

    def __enter__(self: Self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Release what is kept for products."""
        self.close()

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        product = self._core.map(self._damping).apply_flat(tf.constant(x.reshape(-1)))
        return check_product(product.numpy())

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        if X.shape[1] == 0:
            return np.zeros(X.shape, self.dtype)
        return check_product(self._columns(tf.constant(X)).numpy())

    def _adjoint(self: Self) -> Self:
        return self

    def _transpose(self: Self) -> Self:
        return self

    def _columns(self, block: tf.Tensor) -> tf.Tensor:
        """Multiply a tensor of shape `(n, k)`."""
        rows = self._core.map(self._damping).apply_rows(tf.transpose(block))
        return tf.transpose(rows)


def core_of(operator: SymmetricOperator) -> Core:
    """Return what the rest of the package uses of an operator."""
    return operator._core


def check_damping(damping: Any) -> float:
    """Return a number, NumPy scalar or tensor of no axes as a float."""
    is_number = isinstance(damping, numbers.Real) or getattr(damping, "shape", None) == ()
    value = np.asarray(damping) if is_number else None  # an object, if too large for a float
    if value is None or value.dtype.kind not in "fiu" or not np.isfinite(value):
        shown = damping if is_number or damping is None else f"of type {type(damping).__name__}"
        raise HvpError(f"the damping is {shown}", "a finite real number")
    return float(value)
