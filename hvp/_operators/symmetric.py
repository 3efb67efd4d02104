"""Symmetric operators, which are the curvature matrices of a loss."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from hvp._derivatives.belonging import may_be_recorded, recorded_result
from hvp._engines.array_map import ArrayMap
from hvp._engines.linear_map import Source
from hvp._engines.restricted import Entries, Restricted, Selection
from hvp._errors import GraphModeError, HvpError
from hvp._operators.damping import check_damping
from hvp._operators.example_diagonal import example_diagonal
from hvp._operators.matrix import Evaluation, Matrix
from hvp._operators.operator import EvaluatedOperator, Operator
from hvp._runtime.interrupts import Uninterrupted
from hvp._vectors.arrays import check_product
from hvp._vectors.selection import entries_of, groups, select
from hvp._vectors.space import Space

Self = TypeVar("Self", bound="SymmetricOperator")


class SymmetricOperator(EvaluatedOperator):
    """Base class of the symmetric matrices of a loss.

    Parameters
    ----------
    matrix : Evaluation
        The matrix, including its damping.
    """

    is_symmetric = True

    def __init__(self, matrix: Evaluation) -> None:
        self._matrix = matrix
        super().__init__(matrix.damped_map, matrix.snapshot)

    @property
    def damping(self) -> float:
        """The multiple of the identity that is added to the matrix."""
        return self._matrix.damping

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it is known that no eigenvalue is negative, damping included.

        This is so for Fisher matrices, and for Gauss-Newton matrices with ``convex=True``, unless a
        regularization is added.
        """
        return self._matrix.is_positive_semidefinite

    @property
    @Uninterrupted()
    def value(self) -> float:
        """The loss at the values of the last evaluation."""
        return float(self._matrix.snapshot.value())

    @property
    @Uninterrupted()
    def gradient(self) -> np.ndarray:
        """The gradient of the loss at the values of the last evaluation.

        Each access returns a new array of shape `(n,)` in the operator's dtype. Damping is not
        included.
        """
        return self._matrix.gradient().numpy()

    @Uninterrupted()
    def gradient_tensors(self) -> Any:
        """Return the gradient of the loss as tensors.

        For a tape around it, the gradient of a `HessianOperator` is a function of the variables,
        whose derivative is a product with the Hessian, and of others that the loss reads if the
        data are one batch. A derivative of what other operators return raises a
        `SecondDerivativeError`.

        Returns
        -------
        nest of tf.Tensor
            The gradient without damping, shaped like the variables.

        Examples
        --------
        >>> import tensorflow as tf
        >>> import hvp
        >>> w = tf.Variable([1.0, 2.0, 3.0])
        >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**3) / 3, w)
        >>> with tf.GradientTape() as tape:
        ...     penalty = tf.reduce_sum(H.gradient_tensors() ** 2) / 2
        >>> tape.gradient(penalty, w).numpy()
        array([ 2., 16., 54.], dtype=float32)
        """
        parts = self._matrix.space.split(self._matrix.gradient())
        cast = [tf.cast(x, dtype) for x, dtype in zip(parts, self._matrix.space.dtypes)]
        return self._matrix.space.nest_of_parts(self._gradient_parts(cast))

    def _gradient_parts(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the parts of the gradient as a tape around them should see them."""
        if not may_be_recorded():
            return parts
        return recorded_result(parts, self._snapshot.sources)

    def damped(self: Self, lam: float) -> Self:
        """Return this operator plus `lam` times the identity.

        Parameters
        ----------
        lam : float
            A finite number, which is added to the operator's own damping.

        Returns
        -------
        operator of the same kind
            An operator that shares the residuals, `stats`, `refresh` and `close` with this one.
        """
        twin = copy.copy(self)
        twin._matrix = self._matrix.damped(check_damping(lam))
        twin.linear_map = twin._matrix.damped_map
        return twin

    @Uninterrupted()
    def block(self, rows: Any, columns: Any = None) -> EvaluatedOperator:
        """Return the block of the matrix that belongs to some variables or entries.

        Parameters
        ----------
        rows : str, variable, layer, module or list of these; or list or ndarray of int, or slice
            The variables, or the numbers of entries of a flat vector, in any order. A string is a
            pattern for one or several successive parts of a variable's path: ``"dense_2"`` stands
            for all variables of the layer of this name, ``"kernel"`` for all kernels,
            ``"encoder_*/attention"`` for the attention layers in several others. The variables keep
            the order that they have in this operator.
        columns : like `rows`, optional
            The variables or entries of the columns, for a block that is not on the diagonal.

        Returns
        -------
        BlockOperator or Operator
            A symmetric operator like this one, with its damping; or a rectangular one if `columns`
            is given. They share the residuals, `stats`, `refresh` and `close` with this operator:
            nothing is traced or evaluated again.

        Raises
        ------
        InvalidVariablesError
            If something is not among the operator's variables, or an array has other numbers than
            those of entries.

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
        >>> H.block(np.array([0, 2])).to_dense()
        array([[6., 2.],
               [2., 0.]], dtype=float32)
        """
        chosen = self._selection(rows)
        if columns is None:
            return BlockOperator(self._matrix.block(chosen))
        parts = Restricted(self.linear_map, chosen, self._selection(columns))
        return EvaluatedOperator(parts, self._snapshot)

    def _selection(self, chosen: Any) -> Selection | Entries:
        space = self._matrix.space
        if isinstance(chosen, slice):
            chosen = np.arange(space.size)[chosen]
        if isinstance(chosen, (list, range)) and {type(i) for i in chosen} == {int}:
            chosen = np.array(chosen)
        if isinstance(chosen, np.ndarray):
            return Entries(space, entries_of(chosen, space.size, least=1))
        return Selection(space, select(chosen, self._matrix.variable_names, self._matrix.variables))

    @Uninterrupted()
    def blocks(self) -> dict[str, BlockOperator]:
        """Return the diagonal blocks of the layers, which together contain all variables.

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
        by_layer = groups(self._matrix.variable_names)
        matrix = self._matrix
        return {
            layer: BlockOperator(matrix.block(Selection(matrix.space, places)))
            for layer, places in by_layer.items()
        }

    def as_tf_operator(
        self, *, is_positive_definite: bool | None = None, name: str = "HessianOperator"
    ) -> tf.linalg.LinearOperator:
        """Return this operator as a `tf.linalg.LinearOperator`; see `Operator.as_tf_operator`."""
        if is_positive_definite is None and self.is_positive_semidefinite and self.damping:
            is_positive_definite = True
        return super().as_tf_operator(is_positive_definite=is_positive_definite, name=name)

    def release_gradient(self) -> None:
        """Release the gradient if memory is short and products are all you need.

        It takes the memory of `n` numbers. Until the next `refresh`, `gradient` then raises an
        `HvpError`, as do functions that need the gradient. Products are not affected.

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
        self._matrix.snapshot.release_gradient()

    def _known_diagonal(self, most: int) -> tuple[np.ndarray | None, int]:
        known = example_diagonal(self._matrix)
        return super()._known_diagonal(most) if known is None else (known + self.damping, 1)

    def _properties(self) -> list[str]:
        size, dtype, engine, *rest = super()._properties()
        damping = [f"damping {self.damping:g}"] if self.damping else []
        return [size, dtype, engine, *damping, *rest]


class BlockOperator(SymmetricOperator):
    """A diagonal block of a symmetric operator, which `block` and `blocks` return.

    It has everything that the operator has: products, `damped`, `to_dense`, and its part of the
    `gradient`. You can pass it to `hvp.solve`. What needs variables raises an `HvpError` if the
    block was chosen by numbers of entries.
    """

    def _properties(self) -> list[str]:
        names = self._matrix.variable_names
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return [*super()._properties(), f"of {shown}"]


def evaluation_of(operator: SymmetricOperator) -> Evaluation:
    """Return the matrix behind an operator, which the rest of the package uses."""
    return operator._matrix


def matrix_of(operator: Any) -> Matrix:
    """Return what solvers and estimators use of a square, real and symmetric operator.

    An operator or matrix that is not of this package is called in Python.
    """
    if isinstance(operator, Matrix):
        return operator
    if isinstance(operator, SymmetricOperator):
        return evaluation_of(operator)
    if isinstance(operator, Operator) and operator.is_symmetric:
        return Matrix(operator.linear_map)
    is_scipy = isinstance(operator, (LinearOperator, np.ndarray)) or scipy.sparse.issparse(operator)
    if not is_scipy:
        raise HvpError(
            f"the operator is {type(operator).__name__}",
            "a HessianOperator, or a scipy LinearOperator or matrix",
        )
    plain = aslinearoperator(operator)
    if plain.shape[0] != plain.shape[1] or not plain.shape[0]:
        raise HvpError(f"the operator has shape {plain.shape}", "a square, symmetric operator")
    if np.dtype(plain.dtype).kind not in "fiub":
        raise HvpError(f"the operator has dtype {plain.dtype}", "a real operator")
    if not isinstance(operator, LinearOperator):
        _refuse_asymmetric(operator)
    dtype = tf.float32 if plain.dtype == np.float32 else tf.float64

    def multiply(rows: np.ndarray) -> np.ndarray:
        return check_product(np.ascontiguousarray(plain.matmat(rows.T).T, rows.dtype))

    space = Space([0], ["vector"], [(plain.shape[0],)], [dtype])
    return Matrix(ArrayMap(multiply, space, _sources_within(plain)))


def _refuse_asymmetric(array: Any) -> None:
    """Refuse a dense or sparse matrix that is not symmetric, whatever the rounding errors."""
    if array.dtype.kind != "f":
        array = array.astype(np.float64)
    difference, scale = (float(abs(part).max()) for part in (array - array.T, array))
    if difference > np.cbrt(np.finfo(array.dtype).eps) * scale:
        raise HvpError(
            f"the matrix is not symmetric: entries differ by {difference:.2g} from those of its "
            "transpose",
            "a symmetric matrix",
            "pass (A + A.T) / 2 if that is what is meant",
        )


def _sources_within(operator: Any) -> list[Source]:
    """Return what operators of this package within sums and products depend on."""
    if isinstance(operator, Operator):
        return list(operator.linear_map.sources)
    return [v for part in getattr(operator, "args", ()) for v in _sources_within(part)]


def symmetric_matrix(A: Any, caller: str) -> Matrix:
    """Return the matrix of an operator; refuse graphs, and operators that are stale or closed."""
    if not tf.executing_eagerly():
        raise GraphModeError(
            f"the function {caller} was called while TensorFlow traces a graph",
            "eager execution",
            f"call {caller} outside of the tf.function",
        )
    matrix = matrix_of(A)
    matrix.make_sure()
    return matrix
