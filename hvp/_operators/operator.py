"""Symmetric operators: a snapshot's linear map as a scipy and as a TensorFlow operator."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import scipy.sparse
import tensorflow as tf

from hvp._engines.linear_map import LinearMap
from hvp._engines.restricted import Restricted, Selection
from hvp._errors import TooLargeError
from hvp._operators.arithmetic import DtypePreserving
from hvp._operators.core import Core
from hvp._operators.damping import check_damping
from hvp._operators.rectangular import RectangularOperator
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._snapshots.statistics import Statistics
from hvp._vectors.arrays import check_array, check_product
from hvp._vectors.selection import groups, select
from hvp._vectors.space import as_tensor

Self = TypeVar("Self", bound="SymmetricOperator")

# Vectors with at least this many bytes are multiplied part by part.
_LONG = 2**26
# Columns in one block when a dense matrix is assembled.
_DENSE_BLOCK = 64


class SymmetricOperator(OneProcess, DtypePreserving):
    """Base class of the symmetric operators: vectors, arrays and blocks in, the same out.

    Parameters
    ----------
    core : Core
        The snapshot with the linear map. Operators that differ in damping only share it.
    damping : float
        The multiple of the identity to add.
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
        properties = [f"{size} x {size}", self.dtype.name, f"engine {stats.engine!r}"]
        if self._damping:
            properties.append(f"damping {self._damping:g}")
        if stats.batches_kept is not None:
            properties.append(f"{stats.batches} batches")
        properties += filter(None, [self._core.snapshot.standing])
        return f"{type(self).__name__}({', '.join(properties)})"

    @property
    def damping(self) -> float:
        """The multiple of the identity that is added."""
        return self._damping

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it is known that no eigenvalue is negative, damping included.

        It is for Fisher matrices, and for Gauss-Newton matrices with ``convex=True``, unless a
        regularization is added.
        """
        return self._core.is_positive_semidefinite and self._damping >= 0

    @property
    @Uninterrupted()
    def value(self) -> float:
        """The loss at the values of the last evaluation."""
        return float(self._core.snapshot.value())

    @property
    @Uninterrupted()
    def gradient(self) -> np.ndarray:
        """The gradient of the loss at the values of the last evaluation.

        A new array of shape `(n,)` each time, in the operator's dtype. Damping is not part of it.
        """
        return self._core.gradient().numpy()

    @property
    def stats(self) -> Statistics:
        """Counts of the work done so far."""
        return self._core.snapshot.statistics

    @tf.autograph.experimental.do_not_convert
    @Uninterrupted()
    def product(self, v: Any) -> Any:
        """Multiply by one vector of tensors, without copying anything to the host.

        Parameters
        ----------
        v : nest of tensors, or tf.Tensor
            A real vector shaped like the variables, which is cast to their dtypes; or one flat
            tensor of shape `(n,)`.

        Returns
        -------
        nest of tf.Tensor, or tf.Tensor
            The product in the form of `v`: a nest in the variables' dtypes, or a flat tensor in the
            operator's.

        Raises
        ------
        InvalidVectorError
            If `v` does not fit the variables.
        StaleOperatorError
            If a variable that the loss reads has changed, depending on `on_stale`.
        ClosedOperatorError
            If the operator is closed.

        Notes
        -----
        You can call this inside a `tf.function` and its loops. The graph engine then adds the
        product itself to the graph, and no Python runs for each product. Each call multiplies by
        the operator in its current state, also after `refresh()`, without another trace. If the
        operator is closed or stale when the graph runs, its error arrives as one of TensorFlow's
        with the original text.

        In a function with ``jit_compile=True`` nothing can raise or call Python. There the product
        of a stale operator is NaN until you call `refresh()` outside, also with
        ``on_stale="refresh"``, and the product of a closed one fails with an error about shapes.
        XLA cannot compile the product of a loss with loops, branches or max pooling. With the tape
        engine, and with data in several batches, products in graphs run through `tf.py_function`,
        which XLA cannot compile either.

        The operator belongs to one point: for a tape around it the product is a function of `v`. A
        gradient in the variables raises a `SecondDerivativeError`.

        Unlike `H @ v`, this does not check whether entries are finite, which would mean waiting for
        the device.
        """
        space, held = self._space, self._core.map(self._damping)
        belongs = self._core.snapshot.belonging
        if space.is_flat(v):
            return belongs(held.apply_flat(as_tensor(v, space.dtype)))
        parts = space.parts_of_nest(v)
        vector = [as_tensor(part, dtype) for part, dtype in zip(parts, space.dtypes)]
        return space.nest_of_parts(belongs(held.apply(vector)))

    def matvec(self, x: Any) -> np.ndarray:
        """Multiply by one vector.

        Parameters
        ----------
        x : array_like
            A real and finite vector of shape `(n,)` or `(n, 1)`, which is cast to the operator's
            dtype.

        Returns
        -------
        ndarray
            The product, shaped like `x`, in the operator's dtype.

        Raises
        ------
        InvalidVectorError
            If `x` has another shape or kind, or entries that are not finite.
        NonFiniteError
            If the product is not finite.
        StaleOperatorError
            If a variable that the loss reads has changed, depending on `on_stale`.
        ClosedOperatorError
            If the operator is closed.
        """
        x = check_array(x, self.shape[0], self.dtype, ndims=(1, 2))
        return self._matvec(x).reshape(x.shape)

    def matmat(self, X: Any) -> np.ndarray:
        """Multiply by a block of columns.

        Parameters
        ----------
        X : array_like
            A real and finite matrix of shape `(n, k)`, which is cast to the operator's dtype.

        Returns
        -------
        ndarray
            The products, shaped like `X`, in the operator's dtype.

        Raises
        ------
        InvalidVectorError, NonFiniteError, StaleOperatorError, ClosedOperatorError
            As `matvec`.
        """
        if scipy.sparse.issparse(X):
            X = X.toarray()
        return self._matmat(check_array(X, self.shape[0], self.dtype, ndims=(2,)))

    def rmatvec(self, x: Any) -> np.ndarray:
        """Multiply by one vector; the same as `matvec`, since the operator is symmetric."""
        return self.matvec(x)

    def rmatmat(self, X: Any) -> np.ndarray:
        """Multiply by a block of columns; the same as `matmat`, since the operator is symmetric."""
        return self.matmat(X)

    def dot(self, x: Any) -> Any:
        """Multiply by a scalar, an operator, or an array of one or two axes."""
        if type(x) is np.ndarray and x.ndim:  # the usual case comes first, for small products
            return self.matvec(x) if x.ndim == 1 else self.matmat(x)
        return super().dot(x)

    def __matmul__(self, other: Any) -> Any:
        """Multiply by an operator or an array of one or two axes."""
        return self.dot(other) if type(other) is np.ndarray else super().__matmul__(other)

    def damped(self: Self, lam: float) -> Self:
        """Return this operator plus `lam` times the identity.

        Parameters
        ----------
        lam : float
            A finite number, which is added to the operator's own damping.

        Returns
        -------
        operator of the same kind
            It shares the residuals, `stats`, `refresh` and `close` with this one.
        """
        twin = copy.copy(self)
        twin._damping = self._damping + check_damping(lam)
        return twin

    @Uninterrupted()
    def to_dense(self, *, max_size: int = 4096) -> np.ndarray:
        """Return the whole matrix, which takes `n` products.

        Parameters
        ----------
        max_size : int, optional
            The largest `n` to accept. Memory grows as the square of `n`.

        Returns
        -------
        ndarray
            The matrix of shape `(n, n)`, damping included, in the operator's dtype.

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
            deliver_interrupt()
        return dense

    @Uninterrupted()
    def block(self, rows: Any, columns: Any = None) -> BlockOperator | OffDiagonalBlock:
        """Return a block of the matrix, of some of the variables.

        Parameters
        ----------
        rows : str, variable, layer, module or list of these
            The variables. A string is a pattern for one or several successive parts of a
            variable's path: ``"dense_2"`` stands for all variables of the layer of this name,
            ``"kernel"`` for all kernels, ``"encoder_*/attention"`` for the attention layers in
            several others. The variables keep the order that they have in this operator.
        columns : like `rows`, optional
            The variables of the columns, for a block that is not on the diagonal.

        Returns
        -------
        BlockOperator or OffDiagonalBlock
            A symmetric operator like this one, with its damping; or, if `columns` is given, a
            rectangular one. Both share the residuals, `stats`, `refresh` and `close` with this
            operator: nothing is traced or evaluated again.

        Raises
        ------
        InvalidVariablesError
            If something is none of the operator's variables.

        Notes
        -----
        A product takes as long as one with the whole matrix.

        Examples
        --------
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import hvp
        >>> a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable(3.0, name="b")
        >>> H = hvp.HessianOperator(lambda: b * tf.reduce_sum(a**2), [a, b])
        >>> H.block("a").to_dense()
        array([[6., 0.],
               [0., 6.]], dtype=float32)
        >>> H.block(a, b).to_dense()
        array([[2.],
               [4.]], dtype=float32)
        """
        places = self._places(rows)
        if columns is None:
            return self._block(places)
        return OffDiagonalBlock(self._core, places, self._places(columns))

    @Uninterrupted()
    def blocks(self) -> dict[str, BlockOperator]:
        """Return the diagonal blocks of the layers, which together have all variables.

        Returns
        -------
        dict of str to BlockOperator
            The blocks by the paths of the layers, in the order of the variables. A variable that is
            in no layer has a block of its own.

        Examples
        --------
        >>> import tensorflow as tf
        >>> import hvp
        >>> a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable(3.0, name="b")
        >>> H = hvp.HessianOperator(lambda: b * tf.reduce_sum(a**2), [a, b])
        >>> {name: block.shape for name, block in H.blocks().items()}
        {'a': (2, 2), 'b': (1, 1)}
        """
        by_layer = groups(self._core.variable_names)
        return {layer: self._block(places) for layer, places in by_layer.items()}

    def _places(self, chosen: Any) -> list[int]:
        return select(chosen, self._core.variable_names, self._core.variables)

    def _block(self, places: Sequence[int]) -> BlockOperator:
        return BlockOperator(self._core.block(places), self._damping)

    @Uninterrupted()
    def flatten(self, nest: Any) -> Any:
        """Concatenate a nest shaped like the variables into one vector, in `tf.nest` order.

        Parameters
        ----------
        nest : nest of tensors, arrays or variables
            Parts shaped like the variables.

        Returns
        -------
        ndarray or tf.Tensor
            A vector of shape `(n,)` in the operator's dtype. It is an ndarray if all parts are.
        """
        return self._core.flatten(nest)

    @Uninterrupted()
    def unflatten(self, vector: Any) -> Any:
        """Split a flat vector, or a block of columns, into a nest like the variables.

        Parameters
        ----------
        vector : array_like or tf.Tensor
            A vector of shape `(n,)`, or a block of shape `(n, k)`.

        Returns
        -------
        nest of tf.Tensor or of ndarray
            Parts shaped and typed like the variables; for a block each part has a further last
            axis, which numbers the columns. They are tensors if `vector` is one.
        """
        return self._core.unflatten(vector)

    def as_tf_operator(
        self, *, is_positive_definite: bool | None = None, name: str = "HessianOperator"
    ) -> tf.linalg.LinearOperator:
        """Return this operator as a `tf.linalg.LinearOperator`.

        Parameters
        ----------
        is_positive_definite : bool, optional
            Whether the matrix, damping included, is positive definite, as far as you know.
            `tf.linalg.experimental.conjugate_gradient` requires it. By default it is True for a
            damped matrix that `is_positive_semidefinite`, and otherwise unknown.
        name : str, optional
            The name of the operator in TensorFlow.

        Returns
        -------
        tf.linalg.LinearOperator
            A self-adjoint, square operator that shares everything with this one.

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

        if is_positive_definite is None and self.is_positive_semidefinite and self._damping:
            is_positive_definite = True

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
            If the loss or its gradient is not finite there. The operator is then unusable until a
            `refresh` succeeds.

        Notes
        -----
        This costs one evaluation of the gradient, as the constructor does. The residuals of the old
        point are released first, so that the two never have to fit in memory together.
        """
        self._core.snapshot.refresh()

    def release_gradient(self) -> None:
        """Release the gradient, where memory is short and products are all you need.

        It takes `n` numbers. Until the next `refresh`, `gradient` then raises an `HvpError`, as do
        functions that need the gradient. Products are not affected.

        Examples
        --------
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import hvp
        >>> w = tf.Variable([1.0, 2.0])
        >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
        >>> H.release_gradient()
        >>> H @ np.ones(2)
        array([1., 4.], dtype=float32)
        >>> H.refresh()
        >>> H.gradient.round(3)
        array([0.333, 2.667], dtype=float32)
        """
        self._core.snapshot.release_gradient()

    def close(self) -> None:
        """Release the residuals. Closing twice does nothing."""
        self._core.snapshot.close()

    def __enter__(self: Self) -> Self:
        """Return the operator."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Release the residuals."""
        self.close()

    @Uninterrupted()
    def _matvec(self, x: np.ndarray) -> np.ndarray:
        x, held = x.reshape(-1), self._core.map(self._damping)
        if x.nbytes < _LONG:
            return check_product(held.apply_flat(tf.constant(x)).numpy())
        # Part by part, so that there are no copies of the whole vector or product besides.
        return check_product(self._space.array_of_parts(held.apply(self._space.parts_of_array(x))))

    @Uninterrupted()
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
        return self._core.snapshot.belonging(tf.transpose(rows))


class BlockOperator(SymmetricOperator):
    """A diagonal block of a symmetric operator, which `block` and `blocks` return.

    It has everything that the operator has: products, `damped`, `to_dense`, the part of the
    `gradient`, and `hvp.solve` takes it.
    """

    def __repr__(self) -> str:
        names = self._core.variable_names
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{super().__repr__()[:-1]}, of {shown})"


class OffDiagonalBlock(RectangularOperator):
    """A rectangular block of a symmetric operator: some of its rows and columns.

    Parameters
    ----------
    core : Core
        That of the operator.
    rows, columns : sequence of int
        Which variables the block belongs to.
    """

    def __init__(self, core: Core, rows: Sequence[int], columns: Sequence[int]) -> None:
        self._core = core
        self._rows_of, self._columns_of = (
            Selection(core.space, places) for places in (rows, columns)
        )
        of = self._rows_of.space, self._columns_of.space
        dtype = np.result_type(*(space.dtype.as_numpy_dtype for space in of))
        super().__init__(dtype, (of[0].size, of[1].size))

    def __repr__(self) -> str:
        (rows, columns), standing = self.shape, self._core.snapshot.standing
        properties = [f"{rows} x {columns}", self.dtype.name, *filter(None, [standing])]
        return f"{type(self).__name__}({', '.join(properties)})"

    def _map(self) -> LinearMap:
        return Restricted(self._core.map(), self._rows_of, self._columns_of)


def core_of(operator: SymmetricOperator) -> Core:
    """Return what the rest of the package uses of an operator."""
    return operator._core
