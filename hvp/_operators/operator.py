"""Linear maps as operators for scipy and TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import scipy.sparse
import tensorflow as tf

from hvp._derivatives.belonging import Gradient, may_be_recorded, recorded_product
from hvp._engines.linear_map import LinearMap, damped
from hvp._errors import FailedCheckError, HvpError, TooLargeError
from hvp._graphs.sparsity import patterns_of
from hvp._operators.arithmetic import DtypePreserving
from hvp._operators.damping import check_damping
from hvp._operators.sparse import Sparsity, recovered, sparsity_of
from hvp._operators.tf_operator import TensorFlowOperator
from hvp._runtime.arguments import check_count, check_flag
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._snapshots.snapshot import Snapshot
from hvp._snapshots.statistics import Statistics
from hvp._vectors.arrays import check_array, check_product, refuse_graphs
from hvp._vectors.nests import flattened, unflattened

Self = TypeVar("Self", bound="Operator")

# Vectors with at least this many bytes are multiplied part by part.
_LONG = 2**26
# Columns in one block when a dense matrix is assembled.
_DENSE_BLOCK = 64
# A pattern that nobody asked for has at most so many entries for each column, and so many more.
_PER_COLUMN, _ALWAYS = 64, 2**20
# The diagonal of no larger a matrix is computed by products, whatever its structure.
_FEW = 256


class Operator(OneProcess, DtypePreserving):
    """Base class of all operators, which multiply tensors, arrays and blocks of columns.

    Parameters
    ----------
    linear_map : LinearMap
        The map that computes products. The dtype of arrays is the wider one of its domain and
        codomain.
    """

    __signature__: inspect.Signature
    # Whether it is its own transpose.
    is_symmetric = False
    # What it is the transpose of.
    _plain: Operator | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Show the signature of `__init__`; scipy's `__new__` would show `(*args, **kwargs)`."""
        super().__init_subclass__(**options)
        signature = inspect.signature(cls.__init__)
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __init__(self, linear_map: LinearMap) -> None:
        self.linear_map = linear_map
        rows, columns = linear_map.codomain, linear_map.domain
        dtype = np.result_type(rows.dtype.as_numpy_dtype, columns.dtype.as_numpy_dtype)
        self._sparsity: Sparsity | None = None
        super().__init__(dtype, (rows.size, columns.size))

    def __repr__(self) -> str:
        if self._plain is not None:
            return f"{self._plain!r}.T"
        return f"{type(self).__name__}({', '.join(self._properties())})"

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
            The product in the form of `v`: a nest, or a flat tensor.

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

        For a tape around it, the product is a function of `v`. The product of a `HessianOperator`
        or `JacobianOperator` is a function of the variables as well, and of all other variables and
        tensors that the loss reads, such as hyperparameters, unless the loss cannot be traced or
        the operator has a `batch_size`, `memory_limit`, `weight` or data set. For a Hessian its
        gradient is a third derivative of the loss, as in `third_order_product`. The loss is traced
        again for the first gradient; if it reads values of Python, they must not have changed until
        then. A gradient costs a few of the loss if the tape watches variables. Other gradients in
        variables raise a `SecondDerivativeError` when they are used: those of blocks, of other
        matrices, and of a loss whose random numbers cannot be drawn again, which is true of all
        inside a `tf.function`.

        Unlike `H @ v`, this does not check whether entries are finite, which would mean waiting for
        the device.
        """
        product = self._multiplied(self.linear_map.domain.vector_of(v))
        return product if tf.is_tensor(product) else self.linear_map.codomain.nest_of_parts(product)

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
            The product, of shape `(m,)` or `(m, 1)`, in the operator's dtype.

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
        x = check_array(x, self.shape[1], self.dtype, ndims=(1, 2))
        product = self._matvec(x)
        return product if x.ndim == 1 else product[:, np.newaxis]

    def matmat(self, X: Any) -> np.ndarray:
        """Multiply by a block of columns.

        Parameters
        ----------
        X : array_like
            A real and finite matrix of shape `(n, k)`, which is cast to the operator's dtype.

        Returns
        -------
        ndarray
            The products, of shape `(m, k)`, in the operator's dtype.

        Raises
        ------
        InvalidVectorError, NonFiniteError, StaleOperatorError, ClosedOperatorError
            As `matvec`.
        """
        if scipy.sparse.issparse(X):
            X = X.toarray()
        return self._matmat(check_array(X, self.shape[1], self.dtype, ndims=(2,)))

    def rmatvec(self, x: Any) -> np.ndarray:
        """Multiply the transpose by one vector, of shape `(m,)` or `(m, 1)`; see `matvec`."""
        return self.matvec(x) if self.is_symmetric else self.T.matvec(x)

    def rmatmat(self, X: Any) -> np.ndarray:
        """Multiply the transpose by a block of columns, of shape `(m, k)`; see `matmat`."""
        return self.matmat(X) if self.is_symmetric else self.T.matmat(X)

    def dot(self, x: Any) -> Any:
        """Multiply by a scalar, an operator, or an array of one or two axes."""
        if type(x) is np.ndarray and x.ndim:  # the usual case comes first, for small products
            return self.matvec(x) if x.ndim == 1 else self.matmat(x)
        return super().dot(x)

    def __matmul__(self, other: Any) -> Any:
        """Multiply by an operator or an array of one or two axes."""
        if type(other) is np.ndarray and other.ndim == 1:
            return self.matvec(other)
        return self.dot(other) if type(other) is np.ndarray else super().__matmul__(other)

    def damped(self, lam: float) -> Operator:
        """Return this operator plus `lam` times the identity.

        Parameters
        ----------
        lam : float
            A finite number, which is added to the operator's own damping.

        Returns
        -------
        Operator
            It shares everything with this one. For the matrix of a loss, it is an operator of the
            same kind.

        Raises
        ------
        HvpError
            If the operator is not square.
        """
        self._refuse_rectangular("damped", "for a least-squares problem pass damp to scipy's lsqr")
        twin = self._over(damped(self.linear_map, check_damping(lam)))
        twin.is_symmetric = self.is_symmetric
        return twin

    @Uninterrupted()
    def diagonal(self, *, max_size: int = 4096) -> np.ndarray:
        """Return the exact diagonal.

        It takes `n` products, or fewer if the matrix is sparse. That of a Gauss-Newton or Fisher
        matrix comes from the predictions of each example, and takes about as long as two gradients
        for each prediction that an example has.

        Parameters
        ----------
        max_size : int, optional
            The largest number of products. `hvp.diagonal` estimates the diagonal of a matrix that
            takes more.

        Returns
        -------
        ndarray
            The diagonal, of shape `(n,)`, damping included, in the operator's dtype.

        Raises
        ------
        TooLargeError
            If it takes more products than `max_size`.
        HvpError
            If the operator is not square.
        """
        self._refuse_rectangular("asked for its diagonal", "")
        size = self.shape[0]
        if size > _FEW:
            known, _ = self._known_diagonal(max_size)
            if known is not None:
                return known.astype(self.dtype)
        if size > max_size:
            raise TooLargeError(
                f"the diagonal of a matrix of {size} x {size} numbers takes {size} products",
                f"at most {max_size}",
                f"pass max_size={size}, or use hvp.diagonal, which estimates it",
            )
        columns = self._products_of_unit_vectors(self.linear_map)
        return np.concatenate([np.diagonal(block[taken]) for taken, block in columns])

    def _known_diagonal(self, most: int) -> tuple[np.ndarray | None, int]:
        """Return the exact diagonal if it takes fewer than `n` products, and how many it takes.

        Return None in its place if it would take more than `most`. A pattern is looked for only if
        otherwise there would be no diagonal.
        """
        if self._sparsity is None and self.shape[0] <= most:
            return None, 0
        sparsity = self._sparsity_of_few(min(most - 1, self.shape[0] // 2))
        if sparsity is None:
            return None, 0
        return self.to_sparse().diagonal(), sparsity.products + 1  # which checks the pattern

    def _sparsity_of_few(self, most: int) -> Sparsity | None:
        """Return the sparsity, which is kept, or None unless it takes few products."""
        if self._sparsity is None:
            # There is no pattern, or one of too many entries.
            with contextlib.suppress(HvpError), patterns_of(_PER_COLUMN * self.shape[1] + _ALWAYS):
                self._sparsity = self.sparsity()
        kept = self._sparsity
        return kept if kept is not None and kept.products <= most else None

    @Uninterrupted()
    def to_dense(self, *, max_size: int = 4096) -> np.ndarray:
        """Return the whole matrix, which takes as many products as its shorter side is long.

        Parameters
        ----------
        max_size : int, optional
            The largest size of the matrix: it may have as many entries as a square one of this
            size.

        Returns
        -------
        ndarray
            The matrix of shape `(m, n)`, damping included, in the operator's dtype.

        Raises
        ------
        TooLargeError
            If the matrix has more entries than that.
        """
        rows, columns = self.shape
        if rows * columns > check_count(max_size, "max_size") ** 2:
            least = math.isqrt(rows * columns - 1) + 1
            raise TooLargeError(
                f"a dense matrix of {rows} x {columns} numbers was asked for",
                f"at most {max_size} x {max_size}",
                f"pass max_size={least} if {min(rows, columns)} products and "
                f"{rows * columns * self.dtype.itemsize / 2**30:.2g} GiB are what you want",
            )
        return self._whole()

    @Uninterrupted()
    def sparsity(self) -> Sparsity:
        """Return where the matrix may be nonzero, and how many products its sparse form takes.

        Returns
        -------
        Sparsity
            The `pattern`, `colors` and number of `products`. A matrix that is not sparse has a
            dense pattern, and takes as many products as columns.

        Raises
        ------
        TooLargeError
            If the pattern would have more than 2**27 entries.
        HvpError
            If it is not known: of the tape engine, of batches on devices or evaluated again for
            each product, and of matrices that are not those of a loss or function.

        Notes
        -----
        The pattern comes from the graph of a product, through which sets of entries are propagated,
        and may have entries that are always zero. It costs about as much as some tens of products.
        Columns that have no row in common share a product. Of a symmetric matrix, so do columns of
        which each entry is alone in its row or its column, by a star coloring.

        Related: A. R. Curtis, M. J. D. Powell and J. K. Reid, "On the estimation of sparse Jacobian
        matrices", IMA Journal of Applied Mathematics 13(1), 1974,
        https://doi.org/10.1093/imamat/13.1.117; A. H. Gebremedhin, F. Manne and A. Pothen, "What
        color is your Jacobian?", SIAM Review 47(4), 2005, https://doi.org/10.1137/S0036144504444711.
        """
        pattern = self.linear_map.pattern()
        if pattern is None:
            raise HvpError(
                "the pattern of the matrix is not known",
                'the matrix of a loss or function with engine="graph", held in this process',
                "pass to_sparse(pattern=...), a matrix that is nonzero wherever this one may be",
            )
        return sparsity_of(pattern, self.is_symmetric)

    @Uninterrupted()
    def to_sparse(self, *, pattern: Any = None) -> Any:
        """Return the matrix in sparse form, from a few products.

        Parameters
        ----------
        pattern : Sparsity, scipy.sparse matrix or array, optional
            Where the matrix may be nonzero. By default the `sparsity` of the first call is used
            again, or found anew if it does not fit.

        Returns
        -------
        scipy.sparse.csr_array
            The matrix, damping included. Entries of the pattern may be zero.

        Raises
        ------
        FailedCheckError
            If the result is not the matrix, which is found out by a product with a random vector.
        HvpError, TooLargeError
            As `sparsity`.

        Examples
        --------
        >>> import tensorflow as tf
        >>> import hvp
        >>> w = tf.Variable([1.0, 2.0, 3.0, 4.0, 5.0])
        >>> H = hvp.HessianOperator(lambda: tf.reduce_sum((w[1:] - w[:-1]) ** 2) / 2, w)
        >>> H.sparsity()
        Sparsity(5 x 5, 13 entries, 3 products)
        >>> H.to_sparse().toarray()
        array([[ 1., -1.,  0.,  0.,  0.],
               [-1.,  2., -1.,  0.,  0.],
               [ 0., -1.,  2., -1.,  0.],
               [ 0.,  0., -1.,  2., -1.],
               [ 0.,  0.,  0., -1.,  1.]], dtype=float32)
        """
        if pattern is not None:
            if not isinstance(pattern, Sparsity):
                pattern = sparsity_of(pattern, self.is_symmetric)
            return self._recovered(pattern)
        kept = self._sparsity
        if kept is not None:
            with contextlib.suppress(FailedCheckError):
                return self._recovered(kept)
        self._sparsity = self.sparsity()
        return self._recovered(self._sparsity)

    def _recovered(self, sparsity: Sparsity) -> Any:
        if sparsity.pattern.shape != self.shape:
            raise HvpError(
                f"the pattern has the shape {sparsity.pattern.shape}",
                f"that of the operator, {self.shape}",
            )
        return recovered(sparsity, self.linear_map, self.dtype)

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
        return flattened(self.linear_map.domain, nest)

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
        return unflattened(self.linear_map.domain, vector)

    def as_tf_operator(
        self, *, is_positive_definite: bool | None = None, name: str = "Operator"
    ) -> tf.linalg.LinearOperator:
        """Return this operator as a `tf.linalg.LinearOperator`.

        Parameters
        ----------
        is_positive_definite : bool, optional
            Whether the matrix, damping included, is positive definite, as far as you know.
            `tf.linalg.experimental.conjugate_gradient` requires it. By default it is True for a
            damped matrix that is known to be positive semi-definite, and otherwise unknown.
        name : str, optional
            The name of the operator in TensorFlow.

        Returns
        -------
        tf.linalg.LinearOperator
            It shares everything with this operator, and is self-adjoint if this one is symmetric.

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
        if is_positive_definite is not None:
            check_flag(is_positive_definite, "is_positive_definite")
        return TensorFlowOperator(
            self._columns,
            self.shape,
            self.linear_map.codomain.dtype,
            is_self_adjoint=self.is_symmetric,
            is_positive_definite=is_positive_definite,
            name=name,
        )

    @Uninterrupted()
    def _matvec(self, x: np.ndarray) -> np.ndarray:
        refuse_graphs("a product")
        x, domain = x.reshape(-1), self.linear_map.domain
        if x.nbytes < _LONG:
            product = self.linear_map.apply(tf.constant(x, domain.dtype)).numpy()
        else:
            # Part by part, so that there are no copies of the whole vector or product besides.
            parts = domain.parts_of_array(x.astype(domain.dtype.as_numpy_dtype, copy=False))
            product = self.linear_map.codomain.array_of_parts(self.linear_map.apply(parts))
        return check_product(product if product.dtype == self.dtype else product.astype(self.dtype))

    @Uninterrupted()
    def _matmat(self, X: np.ndarray) -> np.ndarray:
        refuse_graphs("a product")
        if X.shape[1] == 0:
            return np.zeros((self.shape[0], 0), self.dtype)
        product = self._columns(tf.constant(X, self.linear_map.domain.dtype)).numpy()
        return check_product(product.astype(self.dtype, copy=False))

    def _adjoint(self) -> Operator:
        if self.is_symmetric:
            return self
        if self._plain is None:
            twin = self._over(self.linear_map.T)
            twin._plain = self
            return twin
        return self._plain

    def _transpose(self) -> Operator:
        return self._adjoint()

    def _over(self, linear_map: LinearMap) -> Operator:
        """Return an operator over another map that shares what this one does."""
        return Operator(linear_map)

    def _columns(self, block: tf.Tensor, adjoint: bool = False) -> tf.Tensor:
        """Multiply a tensor of shape `(n, k)`."""
        adjoint, linear_map = adjoint and not self.is_symmetric, self.linear_map
        given = linear_map.codomain if adjoint else linear_map.domain
        rows = self._multiplied(tf.transpose(tf.cast(block, given.dtype)), adjoint)
        return tf.cast(tf.transpose(rows), linear_map.codomain.dtype)

    def _multiplied(self, vector: Any, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout, as a tape around it should see it."""
        multiply = functools.partial(self.linear_map.apply, adjoint=adjoint)
        if tf.executing_eagerly() and not may_be_recorded():
            return multiply(vector)
        other = None if self.is_symmetric else not adjoint
        transposed = other if other is None else functools.partial(multiply, adjoint=other)
        is_block = tf.is_tensor(vector) and len(vector.shape) == 2
        gradient = None if is_block else self._gradient_of_products(adjoint)
        sources, same_point = self.linear_map.sources, self.linear_map.same_point
        return recorded_product(multiply, vector, sources, gradient, transposed, same_point)

    def _gradient_of_products(self, adjoint: bool) -> Gradient | None:
        """Return what returns gradients of products in variables, if they are known."""
        del adjoint
        return None

    def _properties(self) -> list[str]:
        """Return what `repr` shows."""
        rows, columns = self.shape
        return [f"{rows} x {columns}", self.dtype.name]

    def _whole(self) -> np.ndarray:
        """Return the whole matrix, from products with unit vectors of its shorter side."""
        by_rows = self.shape[0] < self.shape[1]
        dense = np.empty(self.shape, self.dtype)
        for taken, block in self._products_of_unit_vectors(
            self.linear_map.T if by_rows else self.linear_map
        ):
            if by_rows:
                dense[taken] = block.T
            else:
                dense[:, taken] = block
        return dense

    def _products_of_unit_vectors(self, held: LinearMap) -> Any:
        """Iterate over the indices of columns, and the products that are these columns."""
        refuse_graphs("a matrix")
        count = held.domain.size
        for start in range(0, count, _DENSE_BLOCK):
            taken = np.arange(start, min(start + _DENSE_BLOCK, count))
            rows = np.zeros((len(taken), count), held.domain.dtype.as_numpy_dtype)
            rows[taken - start, taken] = 1
            product = held.apply(tf.constant(rows)).numpy().T
            yield taken, check_product(product.astype(self.dtype, copy=False))
            deliver_interrupt()

    def _refuse_rectangular(self, what: str, remedy: str) -> None:
        rows, columns = self.shape
        if rows != columns:
            raise HvpError(
                f"an operator of shape {rows} x {columns} is {what}", "a square operator", remedy
            )


class EvaluatedOperator(Operator):
    """Base class of operators that were evaluated at the values of variables.

    Parameters
    ----------
    linear_map : LinearMap
        The map that computes products: that of the snapshot, or one that derives from it.
    snapshot : Snapshot
        The evaluation.
    """

    def __init__(self, linear_map: LinearMap, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        super().__init__(linear_map)

    @property
    def stats(self) -> Statistics:
        """Counts of the work done so far."""
        return self._snapshot.statistics

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
        point are released first, so that memory never has to hold both.
        """
        self._snapshot.refresh()

    def close(self) -> None:
        """Release the residuals. Closing twice does nothing."""
        self._snapshot.close()

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

    def _over(self, linear_map: LinearMap) -> EvaluatedOperator:
        return EvaluatedOperator(linear_map, self._snapshot)

    def _properties(self) -> list[str]:
        stats, status = self.stats, self._snapshot.status
        properties = [*super()._properties(), f"engine {stats.engine!r}"]
        if stats.batches_kept is not None:
            properties.append(f"{stats.batches} batches")
        return [*properties, *filter(None, [status])]


def gradient_of_products(other: Any) -> Gradient | None:
    """Return what returns gradients of an operator's products in variables, if they are known."""
    return other._gradient_of_products(False) if isinstance(other, Operator) else None


def known_diagonal(other: Any, most: int) -> tuple[np.ndarray | None, int]:
    """Return the exact diagonal of an operator, and the products that it took, at most `most`.

    Return None in its place if it takes more, or `n` products, or if this is not an operator.
    """
    if isinstance(other, np.ndarray) or scipy.sparse.issparse(other):
        return other.diagonal(), 0
    return other._known_diagonal(most) if isinstance(other, Operator) else (None, 0)


def sparsity_of_few(other: Any, most: int) -> Sparsity | None:
    """Return the sparsity of an operator if its sparse form takes at most so many products."""
    return other._sparsity_of_few(most) if isinstance(other, Operator) else None
