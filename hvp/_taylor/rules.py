"""How each operation acts on the derivatives of its inputs.

Linear operations apply to every derivative. Functions of single entries follow Faa di Bruno's
formula, and products Leibniz's. A few others are written with these. Everything else is
differentiated along the curves by automatic differentiation of the one operation, order by order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.registry import dense
from hvp._graphs.sizes import ENTRYWISE
from hvp._taylor.curves import Curves, for_each
from hvp._taylor.entrywise import FORMULAS, derivatives_of, derivatives_of_power
from hvp._taylor.series import Series, Term, add, partitions, product_of

Rule = Callable[[tf.Operation, Sequence[Series], Curves], list[Series]]

# Whose derivatives are zero wherever they exist.
_PIECEWISE_CONSTANT = frozenset(
    "Ceil Floor FloorDiv OnesLike Rint Round Sign StopGradient ZerosLike".split()
)
# Linear operations, with the inputs in which they are jointly linear; the others are constants.
_LINEAR: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        """
        AvgPool AvgPool3D BatchToSpaceND BroadcastTo Cast CheckNumerics Conj Cumsum
        DepthToSpace DiagPart EnsureShape ExpandDims FFT FFT2D FFT3D Gather GatherNd GatherV2 IFFT
        IFFT2D IFFT3D IRFFT IRFFT2D Identity Imag MatrixBandPart MatrixDiag MatrixDiagPart
        Mean MirrorPad Neg Pad PreventGradient RFFT RFFT2D Real
        Reshape ResizeBicubic ResizeBilinear ResizeNearestNeighbor Reverse ReverseV2 Roll
        SegmentMean SegmentSum Slice SpaceToBatchND SpaceToDepth SplitV Squeeze StridedSlice Sum
        Tile Transpose Unpack UnsortedSegmentSum
        """.split(),
        (0,),
    ),
    **dict.fromkeys(["Select", "SelectV2"], (1, 2)),
    **dict.fromkeys(["PadV2", "MatrixDiagPartV2", "MatrixDiagPartV3"], (0, 2)),
    **dict.fromkeys(["MatrixDiagV2", "MatrixDiagV3"], (0, 4)),
    "Complex": (0, 1),
    "Split": (1,),
    "ScatterNd": (1,),
    "MatrixSetDiag": (0, 1),
    "MatrixSetDiagV3": (0, 1),
    "TensorScatterAdd": (0, 2),
    "TensorScatterUpdate": (0, 2),
}
_JOINED = frozenset(["ConcatV2", "Pack"])
_SUMS = frozenset(["Add", "AddN", "AddV2", "BiasAdd", "Sub"])
# Linear in each of the first two inputs.
_BILINEAR = frozenset(
    """
    BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D
    Cross DepthwiseConv2dNative Einsum MatMul Mul MulNoNan
    """.split()
)
_VIEWS = frozenset("ExpandDims Reshape Squeeze".split())
_OF_ENTRIES = frozenset("Cast CheckNumerics Conj Identity Imag Neg PreventGradient Real".split())


def push(operation: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    """Return the series of the results of an operation."""
    kind = operation.type
    smooth = any(t.dtype.is_floating or t.dtype.is_complex for t in operation.outputs)
    if not smooth or kind in _PIECEWISE_CONSTANT or all(s.is_constant for s in inputs):
        values = _replay(operation, [series.value for series in inputs])
        return [curves.constant(value) for value in values]
    rule = _rule_of(operation, inputs)
    if not _broadcasts(operation, rule, inputs):
        inputs = [series.with_full_terms() for series in inputs]
    return rule(operation, inputs, curves)


def _rule_of(operation: tf.Operation, inputs: Sequence[Series]) -> Rule:
    kind = operation.type
    moving = [i for i, series in enumerate(inputs) if not series.is_constant]
    if kind in _SUMS:
        return _sum
    if kind == "IdentityN":
        return lambda operation, inputs, curves: list(inputs)
    # TensorFlow's derivatives of complex entries are conjugates; some are not of the argument.
    is_complex = any(t.dtype.is_complex for t in (*operation.inputs, *operation.outputs))
    if kind in _REWRITTEN and not is_complex:
        return _REWRITTEN[kind]
    if kind in _JOINED or (kind in _LINEAR and set(moving) <= set(_LINEAR[kind])):
        return _linear
    if kind in _BILINEAR and max(moving) < 2:
        return _linear if len(moving) == 1 else _bilinear
    if kind == "RealDiv":
        return _linear if moving == [0] else _quotient
    entrywise = kind in FORMULAS or (kind in ENTRYWISE and not is_complex)
    if (
        entrywise
        and len(moving) == 1
        and inputs[moving[0]].value.shape == operation.outputs[0].shape
    ):
        return _entrywise
    return _any


def _broadcasts(op: tf.Operation, rule: Rule, inputs: Sequence[Series]) -> bool:
    """Return whether a rule works with terms that have one entry along some axes."""
    if rule in (_sum, _entrywise) or (rule is _linear and op.type == "Mul"):
        return True
    if rule is not _linear or op.type != "MatMul" or inputs[0].is_constant:
        return False
    columns = inputs[0].value.shape[-1]
    terms = [term for term in inputs[0].terms if term is not None]
    return not op.get_attr("transpose_a") and all(t.shape[-1] == columns for t in terms)


def _linear(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    """Apply a linear operation to each derivative, with zeros where there are none."""
    values = [series.value for series in inputs]
    results = _replay(op, values)
    moving = [i for i, series in enumerate(inputs) if not series.is_constant]
    joint = range(len(inputs)) if op.type in _JOINED else _LINEAR.get(op.type, moving)
    terms: list[list[Term]] = []
    for order in range(1, curves.order + 1):
        given = {i: t for i in moving if (t := inputs[i].terms[order - 1]) is not None}
        if given:
            rest = [i for i in joint if i not in given and _is_smooth(values[i])]
            zeros = {i: tf.zeros_like(values[i]) for i in rest}
            with_zeros = [zeros.get(i, value) for i, value in enumerate(values)]
            terms.append(_moved(op, with_zeros, given, order, curves))
        else:
            terms.append([None] * len(results))
    return _collected(results, terms)


def _moved(
    op: tf.Operation,
    values: Sequence[tf.Tensor],
    given: dict[int, tf.Tensor],
    order: int,
    curves: Curves,
) -> list[tf.Tensor]:
    """Apply an operation to terms of an order in place of some values, in which it is linear."""

    def apply(*tensors: tf.Tensor) -> list[tf.Tensor]:
        replaced = dict(zip(given, tensors))
        return _replay(op, [replaced.get(i, value) for i, value in enumerate(values)])

    if len(given) == 1 and not curves.is_collapsed(order):
        [(place, term)] = given.items()
        direct = _stacked(op, values, place, term)
        if direct is not None:
            return [direct]
    return curves.mapped(order, apply, list(given.values()))


def _stacked(
    op: tf.Operation, values: Sequence[tf.Tensor], place: int, term: tf.Tensor
) -> tf.Tensor | None:
    """Apply a linear operation of one moving input to all curves at once, if that is simple.

    Return None if it is not. `tf.vectorized_map` does the same, and takes longer to trace.
    """
    [shape] = [op.outputs[0].shape] if len(op.outputs) == 1 else [tf.TensorShape(None)]
    count, value, rows = term.shape[0], values[place], term.shape[1:]
    if not shape.is_fully_defined() or not value.shape.is_fully_defined():
        return None
    if op.type in _OF_ENTRIES:
        return _replay(op, [term, *values[1:]])[0]
    if op.type in _VIEWS:
        return tf.reshape(term, [count, *shape])
    if op.type in ("Mul", "RealDiv"):
        other = values[1 - place]
        aligned = tf.reshape(term, [count, *[1] * (shape.rank - rows.rank), *rows])
        return aligned * other if op.type == "Mul" else aligned / other
    if op.type == "MatMul" and place == 0 and not op.get_attr("transpose_a"):
        joined = tf.reshape(term, [-1, value.shape[1]])
        product = tf.matmul(joined, values[1], transpose_b=op.get_attr("transpose_b"))
        return tf.reshape(product, [count, rows[0], shape[1]])
    axes = tf.get_static_value(op.inputs[1]) if op.type in ("Sum", "Mean", "Transpose") else None
    if axes is not None and op.type == "Transpose":
        return tf.transpose(term, [0, *(axes + 1)])
    if axes is not None:
        shifted = [int(axis) % value.shape.rank + 1 for axis in axes.reshape(-1)]
        reduce = tf.reduce_sum if op.type == "Sum" else tf.reduce_mean
        return reduce(term, shifted, keepdims=op.get_attr("keep_dims"))
    return None


def _sum(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    [value] = _replay(op, [series.value for series in inputs])
    rank = value.shape.rank
    channels_first = op.type == "BiasAdd" and op.get_attr("data_format") == b"NCHW"
    if rank is None or any(s.value.shape.rank is None for s in inputs):
        return _any(op, inputs, curves)
    terms: list[list[Term]] = []
    for order in range(1, curves.order + 1):
        stacked = 0 if curves.is_collapsed(order) else 1
        parts: list[Term] = []
        for i, series in enumerate(inputs):
            term = series.terms[order - 1]
            if term is not None:
                missing = rank - series.value.shape.rank
                if missing:
                    shape = tf.shape(term)
                    before, after = shape[:stacked], shape[stacked:]
                    ones = tf.ones([missing], tf.int32)
                    if channels_first:
                        after, ones = tf.concat([after, ones[1:]], 0), ones[:1]
                    term = tf.reshape(term, tf.concat([before, ones, after], 0))
                parts.append(-term if i and op.type == "Sub" else term)
        terms.append([add(*parts)])
    return _collected([value], terms)


def _entrywise(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    [place] = [i for i, series in enumerate(inputs) if not series.is_constant]
    values = [series.value for series in inputs]
    x = values[place]

    def function(x: tf.Tensor) -> tf.Tensor:
        return _replay(op, [*values[:place], x, *values[place + 1 :]])[0]

    exponent = tf.get_static_value(op.inputs[1]) if op.type == "Pow" and place == 0 else None
    if exponent is not None and exponent.ndim == 0:
        slopes = [function(x), *derivatives_of_power(x, float(exponent), curves.order)]
    elif op.type in FORMULAS:
        y = function(x)
        slopes = [y, *FORMULAS[op.type](x, y, curves.order)]
    else:
        slopes = derivatives_of(function, x, curves.order)
    terms = [
        [_composed(slopes, inputs[place].terms, order, curves)]
        for order in range(1, curves.order + 1)
    ]
    return _collected([slopes[0]], terms)


def _composed(
    slopes: Sequence[Term | float], terms: Sequence[Term], order: int, curves: Curves
) -> Term:
    """Return the derivative of an order of a function of single entries, by Faa di Bruno."""
    total: Term = None
    for degree in range(1, order + 1):
        slope = slopes[degree]
        if slope is None:
            continue
        parts: list[Term] = []
        for ways, orders in partitions(order):
            if len(orders) == degree:
                product = _times(ways, product_of([terms[j - 1] for j in orders]))
                # The derivative of the order itself has that form already.
                parts.append(product if orders == (order,) else curves.of_order(order, product))
        bell = add(*parts)
        is_number = isinstance(slope, float)
        total = add(total, _times(slope, bell) if is_number else product_of([slope, bell]))
    return total


def _bilinear(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    """Leibniz's rule for the first two inputs; the others are constants."""
    values = [series.value for series in inputs]
    left, right = inputs[:2]

    def product(a: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
        return _replay(op, [a, b, *values[2:]])

    [value] = product(left.value, right.value)
    terms: list[list[Term]] = []
    for order in range(1, curves.order + 1):
        parts: list[Term] = []
        for place in (0, 1):
            term = inputs[place].terms[order - 1]
            if term is not None:
                parts += _moved(op, values, {place: term}, order, curves)
        for j in range(1, order):
            a, b = left.terms[j - 1], right.terms[order - j - 1]
            if a is not None and b is not None:
                [both] = for_each(product, [a, b])
                parts.append(_times(math.comb(order, j), curves.of_order(order, both)))
        terms.append([add(*parts)])
    return _collected([value], terms)


def _quotient(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    return _rewritten(lambda a, b: a * tf.math.reciprocal(b), inputs, curves)


def _rewritten(
    function: Callable[..., Any], inputs: Sequence[Series], curves: Curves
) -> list[Series]:
    """Push the series through a function, which is traced with other operations."""
    with tf.Graph().as_default() as graph:
        placeholders = [
            tf.raw_ops.Placeholder(dtype=s.value.dtype, shape=s.value.shape) for s in inputs
        ]
        result = function(*placeholders)
    series = {p.name: s for p, s in zip(placeholders, inputs)}
    for operation in graph.get_operations():
        if operation.type != "Placeholder":
            given = [series[tensor.name] for tensor in operation.inputs]
            results = push(operation, given, curves)
            series.update({t.name: result for t, result in zip(operation.outputs, results)})
    return [series[tensor.name] for tensor in tf.nest.flatten(result)]


def _softmax(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    """Write the softmax `y` of `x + h` as `y exp(h) / sum(y exp(h))`, where `h` is zero."""
    [y] = _replay(op, [inputs[0].value])
    numerator, total = _shifted_exponentials(y, inputs[0], curves)
    # The derivatives of 1 / total, where total is one.
    slopes = [(-1.0) ** n * math.factorial(n) for n in range(curves.order + 1)]
    orders = range(1, curves.order + 1)
    reciprocal = Series(y, tuple(_composed(slopes, total, j, curves) for j in orders))
    terms: list[list[Term]] = []
    for order in orders:
        parts = [numerator[order - 1], product_of([y, reciprocal.terms[order - 1]])]
        for j in range(1, order):
            both = product_of([numerator[j - 1], reciprocal.terms[order - j - 1]])
            parts.append(_times(math.comb(order, j), curves.of_order(order, both)))
        terms.append([add(*parts)])
    return _collected([y], terms)


def _log_softmax(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    """Write the logarithm of softmax at `x + h` as `log(y) + h - log(sum(y exp(h)))`."""
    [value] = _replay(op, [inputs[0].value])
    _, total = _shifted_exponentials(tf.exp(value), inputs[0], curves)
    # The derivatives of -log(total), where total is one.
    slopes = [0.0, *((-1.0) ** n * math.factorial(n - 1) for n in range(1, curves.order + 1))]
    terms = [
        [add(inputs[0].terms[order - 1], _composed(slopes, total, order, curves))]
        for order in range(1, curves.order + 1)
    ]
    return _collected([value], terms)


def _shifted_exponentials(y: tf.Tensor, x: Series, curves: Curves) -> tuple[list[Term], list[Term]]:
    """Return the derivatives of `y exp(h)` and of its sum over the last axis, as `x + h` moves."""
    ones = [1.0] * (curves.order + 1)
    orders = range(1, curves.order + 1)
    moved = [product_of([y, _composed(ones, x.terms, order, curves)]) for order in orders]
    return moved, [None if m is None else tf.reduce_sum(m, axis=-1, keepdims=True) for m in moved]


def _times(factor: float, term: Term) -> Term:
    """Return a term times a number."""
    return term if term is None or factor == 1 else tf.constant(factor, term.dtype) * term


def _squared_difference(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    return _rewritten(lambda a, b: tf.square(a - b), inputs, curves)


def _maximum(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    larger = op.type == "Maximum"
    return _rewritten(lambda a, b: tf.where(a >= b if larger else a <= b, a, b), inputs, curves)


def _product(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    """Write a product of entries as products of two halves.

    TensorFlow's third derivatives of products are wrong where an entry is zero.
    """
    axes = tf.get_static_value(op.inputs[1])
    shape = inputs[0].value.shape
    if axes is None or not inputs[1].is_constant or None in shape.as_list():
        return _any(op, inputs, curves)
    reduced = sorted({int(axis) % shape.rank for axis in axes.reshape(-1)})
    kept = [axis for axis in range(shape.rank) if axis not in reduced]
    count = math.prod(shape[axis] for axis in reduced)
    result = op.outputs[0].shape

    def product(x: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(tf.transpose(x, [*reduced, *kept]), [count, -1])
        left = count
        while left > 1:
            half = left // 2
            rest = rows[2 * half :]
            rows = tf.concat([rows[:half] * rows[half : 2 * half], rest], axis=0)
            left -= half
        return tf.reshape(rows, result) if count else tf.ones(result, x.dtype)

    return _rewritten(product, inputs[:1], curves)


_REWRITTEN: dict[str, Rule] = {
    "LogSoftmax": _log_softmax,
    "Maximum": _maximum,
    "Minimum": _maximum,
    "Prod": _product,
    "Softmax": _softmax,
    "SquaredDifference": _squared_difference,
}


def _any(op: tf.Operation, inputs: Sequence[Series], curves: Curves) -> list[Series]:
    """Differentiate the operation along each curve, order by order."""
    moving = [i for i, series in enumerate(inputs) if not series.is_constant]
    values = [series.value for series in inputs]
    points = [values[i] for i in moving]
    results = _replay(op, values)
    smooth = [i for i, result in enumerate(results) if _is_smooth(result)]

    def function(*points: tf.Tensor) -> list[tf.Tensor]:
        replaced = dict(zip(moving, points))
        again = _replay(op, [replaced.get(i, value) for i, value in enumerate(values)])
        return [again[i] for i in smooth]

    terms: list[list[Term]] = []
    for order in range(1, curves.order + 1):
        lower = [[inputs[i].terms[j] for i in moving] for j in range(order)]
        top = lower.pop()
        parts: list[list[Term]] = []
        if any(term is not None for term in top):
            # The derivative of this order enters linearly.
            given = [term for term in top if term is not None]

            def first(*tensors: tf.Tensor) -> list[tf.Tensor]:
                rest = iter(tensors)
                directions = [
                    tf.zeros_like(p) if t is None else next(rest)
                    for p, t in zip(points, top)  # noqa: B023
                ]
                return _directional(function, points, directions)

            parts.append(list(curves.mapped(order, first, given)))
        known = [term for terms_ in lower for term in terms_ if term is not None]
        if known and order > 1:

            def rest_of(*tensors: tf.Tensor) -> list[tf.Tensor]:
                given = iter(tensors)
                derivatives = [
                    [tf.zeros_like(p) if t is None else next(given) for p, t in zip(points, one)]
                    for one in lower  # noqa: B023
                ]
                derivatives.append([tf.zeros_like(p) for p in points])
                return _along(function, points, derivatives)

            parts.append([curves.of_order(order, term) for term in for_each(rest_of, known)])
        sums = {i: add(*(part[place] for part in parts)) for place, i in enumerate(smooth)}
        terms.append([sums.get(i) for i in range(len(results))])
    return _collected(results, terms)


def _along(
    function: Callable[..., list[tf.Tensor]],
    points: Sequence[tf.Tensor],
    derivatives: Sequence[Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Return the derivative of the highest order along one curve, whose derivatives are given."""
    *lower, highest = derivatives
    if not lower:
        return _directional(function, points, highest)
    count = len(points)

    def before(*tensors: tf.Tensor) -> list[tf.Tensor]:
        groups = [list(tensors[i : i + count]) for i in range(0, len(tensors), count)]
        return _along(function, groups[0], groups[1:])

    flat = [*points, *(tensor for one in lower for tensor in one)]
    directions = [tensor for one in derivatives for tensor in one]
    return _directional(before, flat, directions)


def _directional(
    function: Callable[..., list[tf.Tensor]],
    points: Sequence[tf.Tensor],
    directions: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Return the derivative of a function along directions, by two reverse modes."""
    # Copies, since one point may have been computed from another.
    points = [tf.identity(point) for point in points]
    results = function(*points)
    weights = [tf.ones_like(result) for result in results]
    gradients = tf.gradients(results, points, weights)
    pairs = [(dense(g), d) for g, d in zip(gradients, directions) if g is not None]
    if not pairs:
        return [tf.zeros_like(result) for result in results]
    derivatives = tf.gradients(
        [g for g, _ in pairs],
        weights,
        [d for _, d in pairs],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return [dense(derivative) for derivative in derivatives]


def _replay(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Add an operation like `operation` to the graph being traced; return its results.

    Tapes do not record it. `tf.gradients`, and the gradient of the function that is traced, know
    it like any other.
    """
    known = {attribute.name for attribute in operation.op_def.attr}
    attributes = {k: v for k, v in operation.node_def.attr.items() if k in known}
    dtypes = [tensor.dtype for tensor in operation.outputs]
    graph = tf.compat.v1.get_default_graph()
    added = graph.create_op(operation.type, list(inputs), dtypes, attrs=attributes)
    return list(added.outputs)


def _is_smooth(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _collected(values: Sequence[tf.Tensor], terms: Sequence[Sequence[Term]]) -> list[Series]:
    """Return the series of results from their values, and their derivatives order by order."""
    return [
        Series(value, tuple(of_order[i] for of_order in terms))
        if _is_smooth(value)
        else Series(value, (None,) * len(terms))
        for i, value in enumerate(values)
    ]
