"""The Jacobian of a function, and its transpose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements, retraced
from hvp._derivatives.belonging import Gradient, may_be_recorded, recorded_result
from hvp._engines.options import Options, declared, without
from hvp._engines.restricted import Restricted, Selection
from hvp._engines.rule import PullbackRule
from hvp._errors import InvalidLossError, InvalidVectorError, TooLargeError
from hvp._operators.example_rows import ExampleRows
from hvp._operators.operator import EvaluatedOperator
from hvp._operators.predictions import checked_floating
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.problem import Problem
from hvp._vectors.selection import select
from hvp._vectors.space import Space, as_tensor, check_numeric, outline

# Values are stacked, not averaged, and not divided among devices.
OPTIONS = without("reduction", "regularization", "weight", "devices", "device_timeout")

# A Jacobian of so many entries is kept as a whole to multiply it by its transpose.
_KEPT_ENTRIES = 2**26
# Passes over single examples are traced for no fewer.
_MANY_EXAMPLES = 64
# Two ways to compute a value agree up to so many rounding errors of the largest such value.
_ROUNDING_ERRORS = 64


@declared(OPTIONS)
class JacobianOperator(EvaluatedOperator):
    """The Jacobian of a function of the variables, as a rectangular scipy `LinearOperator`.

    The function is evaluated once, at the values the variables have now. The intermediate results
    that its derivative needs are kept as *residuals*, which all products reuse: `J @ v`, `J.T @ u`,
    and those of blocks.

    Parameters
    ----------
    function : callable
        Returns a nest of floating-point tensors, such as the predictions of a model. Without `data`
        it takes no arguments. With `data` it takes the elements of a batch, and the first axes of
        what it returns count the examples.
    variables : nest
        The variables that derivatives are taken with respect to, as for `HessianOperator`.
    data : tuple or dict of arrays, or iterable of such, optional
        The examples, as for `HessianOperator`. The values of batches are stacked in their order.
    {options}

    Attributes
    ----------
    shape : tuple of int
        `(m, n)`: the number of entries of all values, and of all variables.
    dtype : numpy.dtype
        The widest type among values and variables, at least float32.

    Raises
    ------
    InvalidLossError
        If the function does not return floating-point tensors, or returns a scalar for a batch.
    InvalidVariablesError
        If `variables` contains anything but variables.
    InvalidDataError
        If `data` is empty, the first axes of its elements differ, or the function takes other
        arguments.
    SecondDerivativeError
        If TensorFlow lacks the derivative of an operation in the function.
    HvpError
        If another argument is invalid.

    Notes
    -----
    The function is traced once for each shape of batches, and its graph runs once for each batch.
    State that it updates (moving averages, seeds) is restored. A product with `J` costs as much as
    one with its transpose, a backward pass over the residuals: `J^T u` is linear in `u`, and its
    derivative in the direction `v` is `J v`.

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0], dtype=tf.float64)
    >>> line = lambda x: w[0] + w[1] * x
    >>> J = hvp.JacobianOperator(line, w, (np.array([0.0, 1.0, 2.0]),))
    >>> J @ np.ones(2)
    array([1., 2., 3.])
    >>> J.T @ np.ones(3)
    array([3., 3.])

    It can be the `jac` of `scipy.optimize.least_squares`, evaluated again at each new point. The
    solver may multiply by it after it has tried another point, hence ``on_stale="ignore"``:

    >>> from scipy.optimize import least_squares
    >>> x = np.linspace(0, 1, 20)
    >>> J = hvp.JacobianOperator(line, w, (x,), on_stale="ignore")
    >>> def errors(at):
    ...     w.assign(at)
    ...     return line(x).numpy() - (3 - 2 * x)
    >>> def jacobian(at):
    ...     w.assign(at)
    ...     J.refresh()
    ...     return J
    >>> fit = least_squares(errors, [0.0, 0.0], jacobian, tr_solver="lsmr", x_scale=1.0)
    >>> fit.x.round(3)
    array([ 3., -2.])
    """

    @outside_strategies
    @Uninterrupted()
    def __init__(
        self,
        function: Callable[..., Any],
        variables: Any,
        data: Any = None,
        **options: Any,
    ) -> None:
        checked = Options.of(type(self).__name__, options, OPTIONS)
        rule = PullbackRule(_checked(function))
        problem = Problem.of(rule, variables, data, checked)
        snapshot = problem.snapshot()
        self._value = snapshot.value()
        source = problem.source
        self._elements = source if isinstance(source, Elements) and source.has_examples else None
        self._example_rows = ExampleRows(rule.function, snapshot.plan.nest)
        super().__init__(snapshot.T, snapshot)

    @property
    def value(self) -> Any:
        """The values of the function as a nest of tensors; those of batches are stacked.

        For a tape, values of one batch are a function of the variables, as `product` is.
        """
        snapshot = self._snapshot
        if snapshot.held is not None:
            self._value = snapshot.value()
        if snapshot.held is None or not may_be_recorded():
            return self._value
        slopes = snapshot.slopes()
        gradient = slopes and functools.partial(slopes, [])
        parts, same = tf.nest.flatten(self._value), snapshot.same_point()
        linked = recorded_result(parts, snapshot.sources, gradient, same)
        return tf.nest.pack_sequence_as(self._value, linked)

    @property
    def engine(self) -> str:
        """The engine that computes products: ``"graph"`` or ``"tape"``."""
        return self.stats.engine

    @property
    def nbytes(self) -> int | None:
        """An upper bound on the size of the residuals in bytes; None if it is not known."""
        return self.stats.residual_bytes

    @tf.autograph.experimental.do_not_convert
    @Uninterrupted()
    def jvp(self, v: Any) -> Any:
        """Return the directional derivative `J v`, without copying anything to the host.

        Parameters
        ----------
        v : nest of tensors or arrays, or array
            A tangent shaped like the variables, or one flat vector of shape `(n,)`. It is cast to
            their dtypes.

        Returns
        -------
        nest of tf.Tensor
            The product, shaped like `value`.

        Raises
        ------
        InvalidVectorError
            If `v` does not fit the variables.
        StaleOperatorError
            If a variable that the function reads has changed, depending on `on_stale`.
        ClosedOperatorError
            If the operator is closed.
        """
        product = self._multiplied(self.linear_map.domain.vector_of(v))
        return tf.nest.pack_sequence_as(self._value, self.linear_map.codomain.parts_of(product))

    def product(self, v: Any) -> Any:
        """Multiply by a nest of tensors or a flat one; the product is a nest like `value`, or flat.

        See `HessianOperator.product`.
        """
        product = super().product(v)
        if tf.is_tensor(product):
            return product
        return tf.nest.pack_sequence_as(self._value, tf.nest.flatten(product))

    @tf.autograph.experimental.do_not_convert
    @Uninterrupted()
    def vjp(self, u: Any) -> Any:
        """Return `J^T u`, without copying anything to the host.

        Parameters
        ----------
        u : nest of tensors or arrays, or array
            A cotangent shaped like `value`, or one flat vector of shape `(m,)`. It is cast to its
            dtypes.

        Returns
        -------
        nest of tf.Tensor
            The product, shaped like the variables.

        Raises
        ------
        InvalidVectorError
            If `u` does not fit the value.
        StaleOperatorError, ClosedOperatorError
            As `jvp`.
        """
        if tf.executing_eagerly():
            self._snapshot.make_sure()
        pullback = self._snapshot
        domain, codomain = pullback.domain, pullback.codomain
        shape = getattr(u, "shape", None)
        if shape is not None and tuple(shape) == (domain.size,) != domain.shapes[0]:
            check_numeric(u, "u")
            parts = domain.split(as_tensor(u, domain.dtype))
        else:
            parts = self._parts_of_value(u, domain)
        cotangents = [as_tensor(part, dtype) for part, dtype in zip(parts, domain.dtypes)]
        return codomain.nest_of_parts(self._multiplied(cotangents, adjoint=True))

    def _parts_of_value(self, u: Any, domain: Space) -> list[Any]:
        try:
            tf.nest.assert_same_structure(self._value, u)
        except (TypeError, ValueError) as error:
            raise InvalidVectorError(
                f"u has the structure {outline(u)}", f"that of the value, {outline(self._value)}"
            ) from error
        parts = tf.nest.flatten(u)
        for part in parts:
            check_numeric(part, "u")
        if [tuple(part.shape) for part in parts] != domain.shapes:
            raise InvalidVectorError(
                f"u has parts of shapes {[tuple(part.shape) for part in parts]}",
                f"the shapes of the value, {domain.shapes}",
            )
        return parts

    @Uninterrupted()
    def block(self, variables: Any) -> EvaluatedOperator:
        """Return the columns of some of the variables.

        Parameters
        ----------
        variables : str, variable, layer, module or list of these
            The variables, as for `HessianOperator.block`.

        Returns
        -------
        Operator
            A rectangular operator, which shares the residuals, `refresh` and `close` with this one.
            A product takes as long as one with the whole matrix.

        Raises
        ------
        InvalidVariablesError
            If something is not among the operator's variables.

        Examples
        --------
        >>> import tensorflow as tf
        >>> import hvp
        >>> a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable(3.0, name="b")
        >>> hvp.JacobianOperator(lambda: b * a, [a, b]).block("b").to_dense()
        array([[1.],
               [2.]], dtype=float32)
        """
        plan, rows = self._snapshot.plan, self.linear_map.codomain
        chosen = select(variables, plan.space.paths, plan.nest.variables)
        every = Selection(rows, range(len(rows.shapes)))
        columns = Restricted(self.linear_map, every, Selection(plan.space, chosen))
        return EvaluatedOperator(columns, self._snapshot)

    @Uninterrupted()
    def gram(self, *, max_size: int = 4096) -> np.ndarray:
        """Return `J @ J.T`, for functions with fewer values than variables.

        It takes as long as `to_dense`. If `J` has more than 2**26 entries, no more than a block of
        rows is in memory, and two products are needed for each value.

        Parameters
        ----------
        max_size : int, optional
            The largest number of values, `m`.

        Returns
        -------
        ndarray
            The symmetric matrix of shape `(m, m)`, in the operator's dtype.

        Raises
        ------
        TooLargeError
            If there are more values than that.

        Examples
        --------
        >>> import tensorflow as tf
        >>> import hvp
        >>> w = tf.Variable([1.0, 2.0, 3.0])
        >>> hvp.JacobianOperator(lambda: tf.reduce_sum(w**2)[tf.newaxis], w).gram()
        array([[56.]], dtype=float32)
        """
        count, size = self.shape
        if count > max_size:
            raise TooLargeError(
                f"a dense matrix of {count} x {count} numbers was asked for",
                f"at most {max_size} x {max_size}",
                f"pass max_size={count} if {count} products are what you want",
            )
        if count * size <= _KEPT_ENTRIES:
            rows = self._whole()
            return rows @ rows.T
        gram = np.empty((count, count), self.dtype)
        for taken, columns in self._products_of_unit_vectors(self.linear_map.T):
            gram[:, taken] = self @ columns
        return (gram + gram.T) / 2

    def _gradient_of_products(self, adjoint: bool) -> Gradient | None:
        slopes, linear_map = self._snapshot.slopes(), self.linear_map
        if slopes is None:
            return None

        def gradient(vector: Any, cotangent: Any, places: Sequence[int]) -> list[tf.Tensor]:
            direction, upstream = (cotangent, vector) if adjoint else (vector, cotangent)
            parts = linear_map.domain.parts_of(direction), linear_map.codomain.parts_of(upstream)
            return slopes([parts[0]], parts[1], places)

        return gradient

    def refresh(self) -> None:
        """Evaluate again, at the values the variables have now."""
        super().refresh()
        self._value = self._snapshot.value()

    def _whole(self) -> np.ndarray:
        rows = self._rows_of_examples()
        return super()._whole() if rows is None else rows

    def _rows_of_examples(self) -> np.ndarray | None:
        """Return the matrix from one pass over each example; None if that is not the matrix."""
        shapes, elements = self.linear_map.codomain.shapes, self._elements
        if elements is None or elements.examples < _MANY_EXAMPLES:
            return None
        if any(shape[:1] != (elements.examples,) for shape in shapes):
            return None
        rng = np.random.default_rng(0)
        vector = rng.standard_normal(self.shape[1]).astype(self.dtype)
        expected = self @ vector
        with self._snapshot.preserving():
            rows = self._example_rows.of(elements)
        if rows is None:
            return None
        dense = rows.astype(self.dtype, copy=False)
        # If values depended on other examples too, even weakly, the product would tell. Each of the
        # values of an example is compared by its own size, which may be small beside others.
        scale = np.abs(dense) @ np.abs(vector) + np.abs(expected)
        parts = np.split(scale, np.cumsum(self.linear_map.codomain.sizes)[:-1])
        by_example = [part.reshape(elements.examples, -1) for part in parts]
        largest = [np.broadcast_to(part.max(axis=0), part.shape).ravel() for part in by_example]
        eps = np.finfo(self.dtype).eps
        allowed = np.sqrt(eps) * scale + _ROUNDING_ERRORS * eps * np.concatenate(largest)
        return dense if (np.abs(dense @ vector - expected) <= allowed).all() else None


def _checked(function: Any) -> Callable[..., Any]:
    """Return a function whose results are checked."""
    if not callable(function):
        raise InvalidLossError(
            f"the function to linearize is {type(function).__name__}, which cannot be called",
            "a function of no arguments, or of the elements of the data",
            "pass lambda: ...",
        )
    call = function if hasattr(function, "trainable_weights") else retraced(function)

    @functools.wraps(call, updated=())
    def values(*elements: Any, **named: Any) -> Any:
        return checked_floating(call(*elements, **named), "the function to linearize")

    return values
