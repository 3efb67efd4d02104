"""Derivatives of a function in its inputs, as tensors that can be differentiated further."""

from __future__ import annotations

import functools
import itertools
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError, InvalidVectorError, line_of
from hvp._runtime.arguments import check_count, check_seed
from hvp._runtime.guard import refuse_forks
from hvp._taylor.curves import Curves
from hvp._taylor.series import Series
from hvp._taylor.traced import TracedFunction

_HIGHEST = 6

_functions: Any = weakref.WeakKeyDictionary()


class Laplacian(NamedTuple):
    """The value of a function, its gradient with respect to the inputs, and its Laplacian.

    For inputs of shape `(n, *inputs)` and a function of shape `(n, *outputs)`, the gradient has the
    shape `(n, *outputs, *inputs)`, and the Laplacian that of the value. If the function returns a
    nest of tensors, these are nests. The gradient is None if the Laplacian was estimated.
    """

    value: Any
    gradient: Any
    laplacian: Any


def jet(f: Callable[[tf.Tensor], Any], x: Any, directions: Any, order: int = 2) -> list[Any]:
    """Compute the derivatives of a function along straight lines through its inputs.

    For each order `j`, this is the `j`-th derivative of `f(x + t d)` in `t` at zero, where `d` is a
    direction. All orders are computed in one pass (Taylor mode), whose cost grows with the square
    of the order, where nested tapes take twice as long for each further order. The results are
    ordinary tensors: they can be used in a loss, and differentiated with respect to the weights and
    `x`.

    Parameters
    ----------
    f : callable
        A function of one tensor of shape `(n, ...)`, made of TensorFlow operations, such as a Keras
        model. It returns a tensor or a nest of tensors. It has no loops or branches on tensors.
    x : array_like
        The inputs, real.
    directions : array_like
        One direction, of the shape of `x`, or `k` of them, of shape `(k, *x.shape)`.
    order : int, optional
        The highest order, from 1 to 6.

    Returns
    -------
    list
        The value of `f`, and its derivatives of orders 1 to `order`. With `k` directions, the
        derivatives have a first axis of this size.

    Raises
    ------
    InvalidDataError
        If `x` is not real, or has no known shape.
    InvalidVectorError
        If `directions` have the wrong shape.
    HvpError
        If `order` is not an integer from 1 to 6.
    SecondDerivativeError
        If `f` has an operation without derivatives; the message names it and its line.

    Notes
    -----
    Works eagerly and in a `tf.function`, which XLA can compile. `f` is traced once per shape and
    type of `x`, if `f` is the same object again.

    Related: A. Griewank and A. Walther, "Evaluating Derivatives", second edition, SIAM, 2008,
    chapter 13, https://doi.org/10.1137/1.9780898717761.

    Examples
    --------
    >>> import hvp
    >>> import tensorflow as tf
    >>> value, first, second, third = hvp.jet(tf.sin, [[0.0]], [[2.0]], order=3)
    >>> print(first.numpy(), third.numpy())
    [[2.]] [[-8.]]
    """
    order = check_count(order, "order")
    if order > _HIGHEST:
        raise HvpError(
            f"the argument order is {order}",
            f"an integer from 1 to {_HIGHEST}",
            "nest two jets for higher ones",
        )
    x = _real(x)
    directions = _like(directions, x, "directions")
    single = directions.shape.rank == x.shape.rank

    def compute(f: Any, x: tf.Tensor, stacked: tf.Tensor) -> Any:
        traced = _traced(f, x)
        curves = Curves(stacked.shape[0], order)
        results = _pushed(traced, x, stacked, curves)
        of_order = [[s.value for s in results]]
        for j in range(order):
            terms = [_filled(s, j, curves) for s in results]
            of_order.append([term[0] for term in terms] if single else terms)
        return [tf.nest.pack_sequence_as(traced.structure, one) for one in of_order]

    stacked = directions[tf.newaxis] if single else directions
    return _compiled(f, ("jet", order, single), compute)(x, stacked)


def laplacian(
    f: Callable[[tf.Tensor], Any], x: Any, *, probes: int | None = None, seed: Any = 0
) -> Laplacian:
    """Compute the Laplacian of a function with respect to its inputs, with its value and gradient.

    The Laplacian is the sum of the second derivatives by each input of an example. All come from
    one pass that propagates the value, the derivatives by each input, and the sum of the second
    derivatives (collapsed Taylor mode). With `d` inputs per example, it costs about as much as
    `d + 2` evaluations of `f`. The results are ordinary tensors: they can be used in a loss, and
    differentiated with respect to the weights and `x`.

    Parameters
    ----------
    f : callable
        A function of one tensor of shape `(n, ...)`, made of TensorFlow operations, such as a Keras
        model. It treats the `n` examples independently of each other, and returns a tensor of shape
        `(n, ...)`, or a nest of such tensors. It has no loops or branches on tensors.
    x : array_like
        The inputs, real, of shape `(n, ...)`.
    probes : int, optional
        Number of random directions for an estimate of the Laplacian, which is worth it for hundreds
        of inputs. The directions have entries 1 and -1 and differ between examples (Hutchinson's
        estimate, which has no bias). By default the Laplacian is exact.
    seed : int or scalar tensor of integers, optional
        Seed of the directions. The same seed gives the same directions; a step of training can pass
        its number.

    Returns
    -------
    Laplacian
        `value`, `gradient` and `laplacian`, which is also a tuple of these.

    Raises
    ------
    InvalidDataError
        If `x` is not real, or has no known shape.
    InvalidLossError
        If `f` mixes examples, or returns something else than one row for each.
    SecondDerivativeError
        If `f` has an operation without derivatives; the message names it and its line.

    Notes
    -----
    Works eagerly and in a `tf.function`, which XLA can compile. `f` is traced once per shape and
    type of `x`, if `f` is the same object again. Only what is used is computed in a `tf.function`.

    Related: F. Dangel, T. Siebert, M. Zeinhofer and A. Walther, "Collapsing Taylor mode automatic
    differentiation", 2025, https://arxiv.org/abs/2505.13644.

    Examples
    --------
    >>> import hvp
    >>> import tensorflow as tf
    >>> x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    >>> value, gradient, laplacian = hvp.laplacian(lambda x: tf.reduce_sum(x**3, axis=1), x)
    >>> print(laplacian.numpy())
    [18. 42.]
    """
    x = _real(x)
    if not tf.is_tensor(seed):
        seed = check_seed(seed)
    if probes is not None:
        probes = check_count(probes, "probes")

    def compute(f: Any, x: tf.Tensor, seed: tf.Tensor) -> Laplacian:
        traced = _traced(f, x, independent=True)
        if probes is None:
            directions, weights = _units(x), None
        else:
            shape = tf.concat([[probes], tf.shape(x)], axis=0)
            draws = tf.random.stateless_uniform(shape, seed, 0, 2, tf.int32)
            directions = tf.ensure_shape(tf.cast(2 * draws - 1, x.dtype), [probes, *x.shape])
            weights = tf.fill([probes], tf.constant(1 / probes, x.dtype))
        curves = Curves(directions.shape[0], 2, collapsed=True, weights=weights)
        results = _pushed(traced, x, directions, curves)
        pack = functools.partial(tf.nest.pack_sequence_as, traced.structure)
        gradient = None
        if probes is None:
            gradient = pack([_as_gradient(_filled(s, 0, curves), x) for s in results])
        return Laplacian(
            pack([s.value for s in results]),
            gradient,
            pack([_filled(s, 1, curves) for s in results]),
        )

    return Laplacian(*_compiled(f, ("laplacian", probes), compute)(x, tf.stack([seed, 0])))


def bilaplacian(f: Callable[[tf.Tensor], Any], x: Any) -> Any:
    """Compute the Laplacian of the Laplacian of a function with respect to its inputs.

    With `d` inputs per example, it costs about as much as `(d + 2)**2` evaluations of `f`.

    Parameters
    ----------
    f, x
        As in `hvp.laplacian`.

    Returns
    -------
    tensor or nest of tensors
        The bilaplacian, of the shape of the value of `f`. It can be differentiated further.

    Raises
    ------
    HvpError
        As in `hvp.laplacian`.

    Examples
    --------
    >>> import hvp
    >>> import tensorflow as tf
    >>> x = tf.constant([[1.0, 2.0]])
    >>> print(hvp.bilaplacian(lambda x: tf.reduce_sum(x**4, axis=1), x).numpy())
    [48.]
    """
    x = _real(x)

    def compute(f: Any, x: tf.Tensor) -> Any:
        return laplacian(lambda x: laplacian(f, x).laplacian, x).laplacian

    return _compiled(f, ("bilaplacian",), compute)(x)


def hessian_trace(
    f: Callable[[tf.Tensor], Any], x: Any, A: Any = None, *, factor: Any = None
) -> Any:
    """Compute the trace of a matrix times the Hessian of a function with respect to its inputs.

    This is `sum_ij A_ij d^2 f / dx_i dx_j`, the second-order term of a diffusion, for each example.
    It costs about as much as `2 d + 2` evaluations of `f`, or `m + 2` with a factor.

    Parameters
    ----------
    f : callable
        As in `hvp.laplacian`.
    x : array_like
        The inputs, real, of shape `(n, d)`.
    A : array_like, optional
        A matrix of shape `(d, d)`, or one for each example, of shape `(n, d, d)`. It need not be
        symmetric or definite. The identity by default.
    factor : array_like, optional
        In place of `A = factor @ transpose(factor)`, its factor of shape `(d, m)` or `(n, d, m)`,
        which takes half the time.

    Returns
    -------
    tensor or nest of tensors
        The trace, of the shape of the value of `f`. It can be differentiated further, in the
        matrix too.

    Raises
    ------
    InvalidVectorError
        If the matrix has the wrong shape, or if both are given.
    HvpError
        As in `hvp.laplacian`.

    Examples
    --------
    >>> import hvp
    >>> import tensorflow as tf
    >>> x = tf.constant([[1.0, 2.0]])
    >>> print(hvp.hessian_trace(lambda x: x[:, 0] * x[:, 1], x, [[0.0, 3.0], [4.0, 0.0]]).numpy())
    [7.]
    """
    x = _real(x)
    if A is None and factor is None:
        return laplacian(f, x).laplacian
    if A is not None and factor is not None:
        raise InvalidVectorError(
            "both A and factor are given", "one of them", "leave A out: factor determines it"
        )
    if x.shape.rank != 2:
        raise InvalidDataError(
            f"x has the shape {x.shape}", "inputs of shape (n, d)", "flatten the axes of an example"
        )
    is_factor = factor is not None
    matrix = _matrix(factor if is_factor else A, x, square=not is_factor)

    def compute(f: Any, x: tf.Tensor, matrix: tf.Tensor) -> Any:
        traced = _traced(f, x, independent=True)
        # The columns as directions of shape (m, n or 1, d).
        columns = tf.transpose(matrix, [2, 0, 1])
        weights = None
        if not is_factor:
            # e' H a = ((e + a)' H (e + a) - (e - a)' H (e - a)) / 4
            units = _units(x)
            columns = tf.concat([units + columns, units - columns], axis=0)
            quarters = np.repeat([0.25, -0.25], x.shape[1])
            weights = tf.constant(quarters, x.dtype)
        curves = Curves(columns.shape[0], 2, collapsed=True, weights=weights)
        results = _pushed(traced, x, columns, curves)
        traces = [_filled(s, 1, curves) for s in results]
        return tf.nest.pack_sequence_as(traced.structure, traces)

    return _compiled(f, ("hessian_trace", is_factor), compute)(x, matrix)


def partial_derivatives(
    f: Callable[..., Any], coordinates: Mapping[str, Any], names: Sequence[Any]
) -> dict[Any, Any]:
    """Compute partial derivatives of a function of named coordinates, of any order up to six.

    All come from one pass. A mixed derivative is put together from derivatives along a few straight
    lines: `u_xy` from those along `x + y` and both axes, for example.

    Parameters
    ----------
    f : callable
        A function with one argument for each coordinate, called as `f(x=..., t=...)`, such as
        ``lambda x, t: model(tf.stack([x, t], axis=1))`` for a Keras model and coordinates of shape
        `(n,)`. It returns a tensor with one row for each example, which depends on this example
        only, or a nest of such tensors.
    coordinates : dict
        The coordinates by name, each of shape `(n,)` or `(n, 1)`, and all of one real type.
    names : sequence of str or of tuples of str
        The derivatives: ``"xx"`` is the second derivative by `x`, and ``""`` is the value. Names of
        coordinates that have several characters go into a tuple: ``("time", "time")``.

    Returns
    -------
    dict
        The derivatives by name, of the shape of the value of `f`. They can be differentiated
        further.

    Raises
    ------
    InvalidDataError
        If the coordinates are not as described, or a name has none of them.
    HvpError
        As in `hvp.laplacian`.

    Notes
    -----
    Related: A. Griewank, J. Utke and A. Walther, "Evaluating higher derivative tensors by forward
    propagation of univariate Taylor series", Mathematics of Computation 69, 2000,
    https://doi.org/10.1090/S0025-5718-00-01120-0.

    Examples
    --------
    >>> import hvp
    >>> import tensorflow as tf
    >>> points = {"x": tf.constant([1.0, 2.0]), "t": tf.constant([3.0, 4.0])}
    >>> u = hvp.partial_derivatives(lambda x, t: x**2 * t, points, ["t", "xx", "xt"])
    >>> print(u["xx"].numpy(), u["xt"].numpy())
    [6. 8.] [2. 4.]
    """
    if not isinstance(coordinates, Mapping) or isinstance(names, str):
        raise InvalidDataError(
            f"the coordinates are {type(coordinates).__name__}, and the names {names!r}",
            "a dict of coordinates, and a list of names",
            'pass {"x": x, "t": t} and ["xx", "t"]',
        )
    tensors = {name: _real(value) for name, value in coordinates.items()}
    _check_coordinates(tensors)
    keys = tuple(tensors)
    wanted = {name: _exponents(name, keys) for name in names}
    if not wanted:
        return {}
    highest = max(map(sum, wanted.values()), default=0)
    if highest > _HIGHEST:
        raise InvalidDataError(
            f"a derivative of order {highest} is asked for",
            f"orders up to {_HIGHEST}",
            "nest two calls for higher ones",
        )
    lines, combinations = _interpolation(sorted(set(wanted.values())))

    def compute(f: Any, *values: tf.Tensor) -> Any:
        columns = [tf.reshape(value, [-1, 1]) for value in values]

        def of_columns(x: tf.Tensor) -> Any:
            pieces = tf.split(x, len(values), axis=1)
            shaped = (p[:, 0] if v.shape.rank == 1 else p for p, v in zip(pieces, values))
            named = dict(zip(keys, shaped))
            try:
                return f(**named)
            except TypeError as error:
                if not re.search("required|unexpected|positional", str(error)):
                    raise
                raise HvpError(
                    f"the function cannot be called as f({', '.join(f'{k}=...' for k in keys)}): "
                    f"{line_of(error)}",
                    "a function of the coordinates by their names",
                    f"for a Keras model, pass lambda {', '.join(keys)}: model(tf.stack("
                    f"[{', '.join(keys)}], axis=1)), or tf.concat for columns of shape (n, 1)",
                ) from error

        x = tf.concat(columns, axis=1)
        traced = _traced(of_columns, x, independent=True)
        order = max(highest, 1)
        directions = tf.constant(lines, x.dtype)[:, tf.newaxis]
        curves = Curves(len(lines), order)
        results = _pushed(traced, x, directions, curves)

        def one(exponents: tuple[int, ...]) -> list[tf.Tensor]:
            total = sum(exponents)
            if total == 0:
                return [s.value for s in results]
            terms = [_filled(s, total - 1, curves) for s in results]
            # A Keras model casts its inputs: results may have another type.
            weights = combinations[exponents]
            return [tf.tensordot(tf.constant(weights, t.dtype), t, 1) for t in terms]

        return {e: tf.nest.pack_sequence_as(traced.structure, one(e)) for e in set(wanted.values())}

    key = "partial_derivatives", keys, tuple(wanted.values())
    found = _compiled(f, key, compute)(*tensors.values())
    return {name: found[exponents] for name, exponents in wanted.items()}


def _interpolation(
    wanted: Sequence[tuple[int, ...]],
) -> tuple[np.ndarray, dict[tuple[int, ...], np.ndarray]]:
    """Return lines, and how derivatives along them combine to each wanted partial derivative.

    The derivative of order `m` along `b` is the sum of `m! / a! b**a` times the partial derivative
    `a`, over all `a` of order `m`. The lines are all integer vectors `b` of order `m` in the
    coordinates that are mixed, for which these sums determine the partial derivatives.
    """
    lines: dict[tuple[int, ...], int] = {}
    systems = []
    for exponents in filter(any, wanted):
        used = [i for i, exponent in enumerate(exponents) if exponent]
        total = sum(exponents)
        grid = [g for g in itertools.product(range(total + 1), repeat=len(used)) if sum(g) == total]
        if len(used) == 1:
            grid = [(total,)]
        matrix = np.array(
            [
                [_multinomial(a) * math.prod(b**e for b, e in zip(line, a)) for a in grid]
                for line in grid
            ],
            float,
        )
        goal = np.array([a == tuple(exponents[i] for i in used) for a in grid], float)
        combination = np.linalg.solve(matrix.T, goal)
        for line, weight in zip(grid, combination):
            # Derivatives along multiples of a line are known from those along the line.
            common = math.gcd(*line)
            full = [0] * len(exponents)
            for i, entry in zip(used, line):
                full[i] = entry // common
            place = lines.setdefault(tuple(full), len(lines))
            systems.append((exponents, place, weight * float(common) ** total))
    combinations = {exponents: np.zeros(len(lines)) for exponents in wanted}
    for exponents, place, weight in systems:
        combinations[exponents][place] += weight
    lines_or_one = list(lines) or [tuple([1] + [0] * (len(wanted[0]) - 1))]
    return np.array(lines_or_one, float), combinations


def _multinomial(exponents: Sequence[int]) -> int:
    return math.factorial(sum(exponents)) // math.prod(map(math.factorial, exponents))


def _exponents(name: Any, coordinates: tuple[str, ...]) -> tuple[int, ...]:
    """Return how often a name differentiates by each coordinate."""
    for factor in name:
        if factor not in coordinates:
            raise InvalidDataError(
                f"the derivative {name!r} is asked for, and there is no coordinate {factor!r}",
                "names made of " + ", ".join(map(repr, coordinates)),
                "use a tuple, such as ('time', 'time'), for names of several characters",
            )
    return tuple(list(name).count(coordinate) for coordinate in coordinates)


def _check_coordinates(tensors: Mapping[str, tf.Tensor]) -> None:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    count = {shape[0] if shape.rank else None for shape in shapes.values()}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    flat = all(shape.rank == 1 or (shape.rank == 2 and shape[1] == 1) for shape in shapes.values())
    if not tensors or len(count) > 1 or len(dtypes) > 1 or not flat:
        described = ", ".join(f"{n} of shape {t.shape}, {t.dtype.name}" for n, t in tensors.items())
        raise InvalidDataError(
            f"the coordinates are {described or 'empty'}",
            "coordinates of the same type and shape (n,) or (n, 1)",
            "split tensors of several columns, x[:, 0] and x[:, 1], and cast all to one type",
        )


def _real(x: Any) -> tf.Tensor:
    try:
        x = tf.convert_to_tensor(x)
    except (TypeError, ValueError) as error:
        raise InvalidDataError(
            f"the inputs are a {type(x).__name__} that cannot be made a tensor ({error})",
            "one tensor of examples",
            "join several inputs, tf.concat([a, b], 1), and split them in the function",
        ) from error
    if not x.dtype.is_floating:
        raise InvalidDataError(
            f"the inputs are of type {x.dtype.name}",
            "real inputs, such as float32 or float64",
            "convert them with tf.cast",
        )
    if not x.shape.rank or not x.shape[1:].is_fully_defined():
        raise InvalidDataError(
            f"the inputs have the shape {x.shape}",
            "a first axis of examples, and known sizes of all others",
            "give the inputs a shape with tf.ensure_shape or an input_signature",
        )
    return x


def _converted(value: Any, dtype: tf.DType, name: str) -> tf.Tensor:
    # The hint keeps all digits of Python's numbers; of arrays it would drop imaginary parts.
    hint = None if isinstance(value, np.ndarray) else dtype
    try:
        tensor = tf.convert_to_tensor(value, dtype_hint=hint)
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
            raise TypeError(f"it has the type {tensor.dtype.name}")
    except (TypeError, ValueError) as error:
        problem = f"{name} cannot be converted to {dtype.name} ({error})"
        raise InvalidVectorError(problem, "real numbers") from error
    return tf.cast(tensor, dtype)


def _like(directions: Any, x: tf.Tensor, name: str) -> tf.Tensor:
    directions = _converted(directions, x.dtype, name)
    rank = directions.shape.rank
    fits = rank in (x.shape.rank, x.shape.rank + 1) and directions.shape[
        rank - x.shape.rank :
    ].is_compatible_with(x.shape)
    if not fits or (rank > x.shape.rank and not directions.shape[0]):
        raise InvalidVectorError(
            f"{name} have the shape {directions.shape}, and x has {x.shape}",
            "the shape of x, or (k, *x.shape) for k directions",
            "repeat a direction for all examples with tf.broadcast_to",
        )
    return directions


def _matrix(matrix: Any, x: tf.Tensor, *, square: bool) -> tf.Tensor:
    matrix = _converted(matrix, x.dtype, "the matrix")
    shape = matrix.shape
    size = x.shape[1]
    fits = shape.rank in (2, 3) and shape[-2] == size and (not square or shape[-1] == size)
    if not fits or (shape.rank == 3 and not shape[:1].is_compatible_with(x.shape[:1])):
        wanted = "(d, d) or (n, d, d)" if square else "(d, m) or (n, d, m)"
        raise InvalidVectorError(
            f"the matrix has the shape {shape}, and x has {x.shape}",
            f"a matrix of shape {wanted}",
            "transpose it, or repeat it for each example",
        )
    return matrix if shape.rank == 3 else matrix[tf.newaxis]


def _units(x: tf.Tensor) -> tf.Tensor:
    """Return the unit vectors of the inputs of an example, of shape `(d, 1, *x.shape[1:])`."""
    size = math.prod(x.shape[1:])
    return tf.reshape(tf.eye(size, dtype=x.dtype), [size, 1, *x.shape[1:]])


def _traced(f: Callable[..., Any], x: tf.Tensor, *, independent: bool = False) -> TracedFunction:
    try:
        traced = TracedFunction(f, [tf.TensorSpec(x.shape, x.dtype)])
    except (TypeError, ValueError) as error:
        others = {"float32", "float64"} - {x.dtype.name}
        if isinstance(error, HvpError) or not any(name in str(error) for name in others):
            raise
        raise InvalidDataError(
            f"the function fails for inputs of the type {x.dtype.name}: {line_of(error)}",
            "inputs of the type of its variables",
            f"pass tf.cast(x, {min(others)!r})",
        ) from error
    if independent:
        traced.check_examples()
    return traced


def _pushed(
    traced: TracedFunction, x: tf.Tensor, directions: tf.Tensor, curves: Curves
) -> list[Series]:
    start = Series(x, (directions, *[None] * (curves.order - 1)))
    return [series.with_full_terms() for series in traced.push([start], curves)]


def _filled(series: Series, j: int, curves: Curves) -> tf.Tensor:
    term = series.terms[j]
    if term is not None:
        return term
    zeros = tf.zeros_like(series.value)
    if curves.is_collapsed(j + 1):
        return zeros
    return tf.repeat(zeros[tf.newaxis], curves.count, axis=0)


def _as_gradient(term: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Move the axis of the inputs to the end, in their shape."""
    moved = tf.transpose(term, [*range(1, term.shape.rank), 0])
    return tf.reshape(moved, tf.concat([tf.shape(moved)[:-1], x.shape[1:]], 0))


def _compiled(f: Any, key: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
    """Return `compute(f, ...)` as a function in a graph, the same one if `f` and the key are."""
    refuse_forks()
    refer: Callable[[], Any]
    try:
        kept, refer = _functions.setdefault(f, {}), weakref.ref(f)
    except TypeError:  # no weak references, or no hash
        kept, refer = {}, lambda: f
    if key not in kept:

        def call(*arguments: Any, **options: Any) -> Any:
            # By a weak reference, because what is kept for `f` must not keep it.
            return compute(refer(), *arguments, **options)

        # A partial function, because TensorFlow counts traces of one definition together.
        kept[key] = tf.function(functools.partial(call), autograph=False)
    return kept[key]
