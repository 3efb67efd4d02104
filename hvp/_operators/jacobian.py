"""The Jacobian of a function, and its transpose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import retraced
from hvp._engines.linear_map import LinearMap
from hvp._engines.options import Options, declared, without
from hvp._engines.restricted import Restricted, Selection
from hvp._engines.rule import PullbackRule
from hvp._errors import InvalidLossError, InvalidVectorError
from hvp._operators.rectangular import RectangularOperator
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.problem import Problem
from hvp._snapshots.statistics import Statistics
from hvp._vectors.nests import flattened, unflattened
from hvp._vectors.selection import select
from hvp._vectors.space import Space, as_tensor, check_numeric, outline

# Values are stacked, not averaged, and not divided among devices.
OPTIONS = without("reduction", "regularization", "weight", "devices", "device_timeout")


@declared(OPTIONS)
class JacobianOperator(RectangularOperator):
    """The Jacobian of a function of the variables, as a rectangular scipy `LinearOperator`.

    The function is evaluated once, at the values the variables have now. What its derivative needs
    is kept as *residuals*, which all products reuse: `J @ v`, `J.T @ u`, and those of blocks.

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
    solver may multiply by it after it has tried a further one, hence ``on_stale="ignore"``:

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
        self.snapshot = Problem.of(rule, variables, data, checked).snapshot()
        self._value = self.snapshot.value()
        pullback = self.snapshot.map()
        rows, columns = pullback.domain, pullback.codomain
        dtype = np.result_type(rows.dtype.as_numpy_dtype, columns.dtype.as_numpy_dtype)
        super().__init__(dtype, (rows.size, columns.size))

    def __repr__(self) -> str:
        rows, columns = self.shape
        stats, standing = self.stats, self.snapshot.standing
        properties = [f"{rows} x {columns}", self.dtype.name, f"engine {stats.engine!r}"]
        if stats.batches_kept is not None:
            properties.append(f"{stats.batches} batches")
        properties += filter(None, [standing])
        return f"{type(self).__name__}({', '.join(properties)})"

    @property
    def value(self) -> Any:
        """The values of the function, a nest of tensors; those of batches are stacked."""
        if self.snapshot.held is not None:
            self._value = self.snapshot.value()
        return self._value

    @property
    def stats(self) -> Statistics:
        """Counts of the work done so far."""
        return self.snapshot.statistics

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
        pushforward = self._map()
        tangents = _parts(pushforward.domain, v)
        products = self.snapshot.belonging(pushforward.apply(tangents))
        return tf.nest.pack_sequence_as(self._value, products)

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
            self.snapshot.make_sure()
        pullback = self.snapshot.map()
        domain, codomain = pullback.domain, pullback.codomain
        shape = getattr(u, "shape", None)
        if shape is not None and tuple(shape) == (domain.size,) != domain.shapes[0]:
            check_numeric(u, "u")
            parts = domain.split(as_tensor(u, domain.dtype))
        else:
            parts = self._parts_of_value(u, domain)
        cotangents = [as_tensor(part, dtype) for part, dtype in zip(parts, domain.dtypes)]
        products = self.snapshot.belonging(pullback.apply(cotangents))
        return codomain.nest_of_parts(products)

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
    def flatten(self, nest: Any) -> Any:
        """Concatenate a nest shaped like the variables, as `HessianOperator.flatten` does."""
        return flattened(self.snapshot.plan.space, nest)

    @Uninterrupted()
    def unflatten(self, vector: Any) -> Any:
        """Split a vector of `n` numbers, or a block, as `HessianOperator.unflatten` does."""
        return unflattened(self.snapshot.plan.space, vector)

    @Uninterrupted()
    def block(self, variables: Any) -> ColumnBlock:
        """Return the columns of some of the variables.

        Parameters
        ----------
        variables : str, variable, layer, module or list of these
            The variables, as for `HessianOperator.block`.

        Returns
        -------
        ColumnBlock
            A rectangular operator, which shares the residuals, `refresh` and `close` with this one.
            A product takes as long as one with the whole matrix.

        Raises
        ------
        InvalidVariablesError
            If something is none of the operator's variables.

        Examples
        --------
        >>> import tensorflow as tf
        >>> import hvp
        >>> a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable(3.0, name="b")
        >>> hvp.JacobianOperator(lambda: b * a, [a, b]).block("b").to_dense()
        array([[1.],
               [2.]], dtype=float32)
        """
        plan = self.snapshot.plan
        return ColumnBlock(self, select(variables, plan.space.paths, plan.nest.variables))

    def refresh(self) -> None:
        """Evaluate again, at the values the variables have now."""
        self.snapshot.refresh()
        self._value = self.snapshot.value()

    def close(self) -> None:
        """Release the residuals, but not `value`. Closing twice does nothing."""
        self.snapshot.close()

    def __enter__(self) -> JacobianOperator:
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

    def _map(self) -> LinearMap:
        return self.snapshot.map().transpose()


class ColumnBlock(RectangularOperator):
    """The columns of a Jacobian that belong to some of the variables.

    Parameters
    ----------
    whole : JacobianOperator
        The Jacobian.
    places : sequence of int
        Which variables the columns belong to.
    """

    def __init__(self, whole: JacobianOperator, places: Sequence[int]) -> None:
        self._whole = whole
        self._columns = Selection(whole.snapshot.plan.space, places)
        super().__init__(whole.dtype, (whole.shape[0], self._columns.space.size))

    def _map(self) -> LinearMap:
        pushforward = self._whole.snapshot.map().transpose()
        rows = pushforward.codomain
        every = Selection(rows, range(len(rows.shapes)))
        return Restricted(pushforward, every, self._columns)


def _parts(space: Space, v: Any) -> list[tf.Tensor]:
    flat = space.is_flat(v)
    parts = space.split(as_tensor(v, space.dtype)) if flat else space.parts_of_nest(v)
    return [as_tensor(part, dtype) for part, dtype in zip(parts, space.dtypes)]


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
        return tf.nest.map_structure(_checked_output, call(*elements, **named))

    return values


def _checked_output(leaf: Any) -> tf.Tensor:
    is_tensor = isinstance(leaf, (tf.Tensor, tf.Variable))
    if not is_tensor or not leaf.dtype.is_floating:
        kind = leaf.dtype.name if is_tensor else type(leaf).__name__
        raise InvalidLossError(
            f"the function to linearize returned a {kind}", "floating-point tensors"
        )
    return tf.convert_to_tensor(leaf)
