"""Gradients of operations that can be written as formulas of differentiable operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._derivatives.logsumexp import cumulative_logsumexp
from hvp._derivatives.registry import (
    TENSORFLOWS,
    attributes,
    gradient_of,
    gradient_of_formula,
    size_of,
)
from hvp._derivatives.suspects import CONSTANT
from hvp._derivatives.zeros import xdivy, xlog1py, xlogy

raw = tf.raw_ops

# Doublings that multiply as many entries as an axis of unknown size may have.
_DOUBLINGS = 31


def _by_formula(kind: str, formula: Callable[..., tf.Tensor]) -> None:
    """Differentiate an operation like a formula that computes the same."""

    @gradient_of(kind)
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        return gradient_of_formula(formula, operation.inputs, upstream)


# The gradient of x / (1 + |x|).
_by_formula("SoftsignGrad", lambda g, x: g / tf.square(1 + tf.abs(x)))
# TensorFlow's gradients by `x` of these are zero where `x` is zero, for any `y`.
_by_formula("Xlogy", xlogy)
_by_formula("Xlog1py", xlog1py)
_by_formula("Xdivy", xdivy)


def _by_series(
    kind: str, at: float, radius: float, coefficients: Sequence[float], elsewhere: Any
) -> None:
    """Differentiate a function of entries, which has a derivative that is a power series near `at`.

    `elsewhere` takes the entries and the operation. TensorFlow's derivative is 0 / 0 at that point,
    which it replaces by a constant, so that its second derivative there is wrong.
    """

    @gradient_of(kind)
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        [x] = operation.inputs
        is_near = tf.abs(x - at) < radius
        near = tf.where(is_near, x - at, tf.zeros_like(x))
        series = tf.zeros_like(x)
        for coefficient in reversed(coefficients):
            series = series * near + tf.constant(coefficient, x.dtype)
        two = tf.constant(2, x.dtype)
        away = elsewhere(tf.where(is_near, tf.fill(tf.shape(x), two), x), operation)
        return [upstream * tf.where(is_near, series, away)]


def _of_order_one(sign: int) -> list[float]:
    """Return coefficients of the derivative of a Bessel function of order one at zero."""
    terms = [
        (sign / 4) ** k * (k + 0.5) / (math.factorial(k) * math.factorial(k + 1)) for k in range(12)
    ]
    return [number for term in terms for number in (term, 0.0)]


_i0, _j0 = tf.math.bessel_i0, tf.math.special.bessel_j0
_by_series("BesselI1", 0, 1, _of_order_one(1), lambda x, op: _i0(x) - op.outputs[0] / x)
_by_series("BesselJ1", 0, 1, _of_order_one(-1), lambda x, op: _j0(x) - op.outputs[0] / x)
_of_log = [-((-1) ** k) / (k + 1) for k in range(20)]
_by_series("Spence", 1, 0.1, _of_log, lambda x, op: tf.math.log(x) / (1 - x))


@gradient_of("LRNGrad")
def _lrn_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # The gradient of local response normalization, y = x / s**beta with s = bias + alpha sum(x**2),
    # is g / s**beta - 2 alpha beta x sum(g x / s**(beta + 1)). The sums
    # are over neighbouring channels.
    radius, bias, alpha, beta = (
        operation.get_attr(name) for name in ("depth_radius", "bias", "alpha", "beta")
    )

    def along_channels(values: tf.Tensor) -> tf.Tensor:
        """Sum over neighbouring channels."""
        count = tf.shape(values)[-1]
        distance = tf.abs(tf.range(count)[:, tf.newaxis] - tf.range(count))
        return tf.tensordot(values, tf.cast(distance <= radius, values.dtype), 1)

    def formula(g: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        s = bias + alpha * along_channels(tf.square(x))
        return g * s**-beta - 2 * alpha * beta * x * along_channels(g * x * s ** (-beta - 1))

    return [*gradient_of_formula(formula, operation.inputs[:2], upstream), None]


@gradient_of("Dilation2D")
def _dilation(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # y[r, c, d] = max over i, j of (image[r s + i q, c s + j q, d] + kernel[i, j, d]), with strides
    # s and rates q. The image is padded by the lowest number, which no maximum chooses.
    image, kernel = operation.inputs
    rows, columns, channels = (kernel.shape[axis] for axis in range(3))
    _, *strides, _ = operation.get_attr("strides")
    _, *rates, _ = operation.get_attr("rates")
    extent = [(size - 1) * rate + 1 for size, rate in zip((rows, columns), rates)]
    missing = tf.zeros([2], tf.int32)
    if operation.get_attr("padding") == b"SAME":
        steps = -(-size_of(image) // strides)  # rounded up
        missing = tf.maximum((steps - 1) * strides + extent - size_of(image), 0)
    before = missing // 2
    paddings = tf.pad(tf.stack([before, missing - before], axis=1), [[1, 1], [0, 0]])

    def formula(image: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        padded = tf.pad(image, paddings, constant_values=image.dtype.min)
        patches = tf.image.extract_patches(
            tf.ensure_shape(padded, [None, None, None, channels]),
            [1, rows, columns, 1],
            [1, *strides, 1],
            [1, *rates, 1],
            "VALID",
        )
        shape = tf.concat([tf.shape(patches)[:3], [rows * columns, channels]], 0)
        sums = tf.reshape(patches, shape) + tf.reshape(kernel, [rows * columns, channels])
        return tf.reduce_max(sums, axis=3)

    return gradient_of_formula(formula, operation.inputs, upstream)


def _fake_quantization(kind: str, limits_are_inputs: bool, *others: str) -> None:
    """Register the gradient of a fake quantization.

    Between the limits, quantization counts as the identity. Beyond a limit the result is the limit,
    so that the derivative by the values is zero and that by the limit is one. TensorFlow's kernel
    is linear in the upstream gradient; it is used only to compute the constant mask of values
    between the limits.
    """
    kernel = getattr(raw, f"{kind}Gradient")

    @gradient_of(kind)
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        # The mask is piecewise constant.
        values, *limits = (tf.stop_gradient(x, CONSTANT) for x in operation.inputs)
        options = attributes(operation, "num_bits", "narrow_range", *others)
        if not limits_are_inputs:
            ones = tf.ones_like(values)
            return [upstream * kernel(gradients=ones, inputs=values, **options)]
        low, high = limits
        options.update(min=low, max=high)
        inside = kernel(gradients=tf.ones_like(values), inputs=values, **options)[0]
        is_low = tf.cast(values < (low + high) / 2, values.dtype)
        axes = list(range(values.shape.rank - low.shape.rank))
        beyond = upstream * (1 - inside)
        to_low = tf.reduce_sum(beyond * is_low, axes)
        return upstream * inside, to_low, tf.reduce_sum(beyond * (1 - is_low), axes)


_fake_quantization("FakeQuantWithMinMaxArgs", False, "min", "max")
_fake_quantization("FakeQuantWithMinMaxVars", True)
_fake_quantization("FakeQuantWithMinMaxVarsPerChannel", True)


@gradient_of("QuantizeAndDequantizeV4")
def _quantize(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # TensorFlow cannot differentiate its kernel of this gradient, which here computes the mask of
    # the values between the limits.
    values, low, high = (tf.stop_gradient(x, CONSTANT) for x in operation.inputs)
    inside = raw.QuantizeAndDequantizeV4Grad(
        gradients=tf.ones_like(values),
        input=values,
        input_min=low,
        input_max=high,
        **attributes(operation, "axis"),
    )
    return upstream * inside.input_backprop, None, None


@gradient_of("EuclideanNorm")
def _euclidean_norm(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # TensorFlow's gradient is `x / (norm / dy)`, with the upstream gradient `dy` in a denominator.
    # That is right to first order. Its derivative is NaN where `dy` is zero, for any norm: for
    # example, in every row of a matrix whose norm the loss does not use.
    x, axes = operation.inputs
    keepdims = operation.get_attr("keep_dims")

    def norm(x: tf.Tensor) -> tf.Tensor:
        return tf.sqrt(tf.reduce_sum(x * tf.math.conj(x), axes, keepdims=keepdims))

    return [*gradient_of_formula(norm, [x], upstream), None]


@gradient_of("CumulativeLogsumexp")
def _cumulative_logsumexp(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # TensorFlow's gradient takes logarithms of the positive and the negative part of the upstream
    # gradient `dy`. That is right to first order. Its derivative by `dy` is lost, or NaN, where
    # `dy` is zero, which affects products of a least squares fit at its solution, and every `jvp`.
    x, axis = operation.inputs
    static_axis = tf.get_static_value(axis)
    if static_axis is None:  # the module `suspects` refuses to differentiate this again
        return TENSORFLOWS["CumulativeLogsumexp"](operation, upstream)
    options = attributes(operation, "exclusive", "reverse")

    def summed(x: tf.Tensor) -> tf.Tensor:
        return cumulative_logsumexp(x, int(static_axis), **options)

    return [*gradient_of_formula(summed, [x], upstream), None]


@gradient_of("Cumprod")
def _cumprod(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # TensorFlow's gradient divides by the entries, and is wrong where one of them is zero.
    x, axis = operation.inputs
    options = attributes(operation, "exclusive", "reverse")

    def product(x: tf.Tensor) -> tf.Tensor:
        return _cumulative_product(x, axis, **options)

    return [*gradient_of_formula(product, [x], upstream), None]


def _cumulative_product(
    x: tf.Tensor, axis: tf.Tensor, *, exclusive: bool, reverse: bool
) -> tf.Tensor:
    """Return cumulative products by doubling: of one entry, of two, of four, ..."""
    rank = tf.rank(x)
    places = tf.range(rank)
    # The axis becomes the last one, and then goes back.
    order = tf.concat([tf.boolean_mask(places, places != axis % rank), [axis % rank]], 0)
    y = tf.transpose(x, order)
    static, known = tf.get_static_value(axis), x.shape.rank is not None
    size = x.shape[int(static)] if static is not None and known else None
    y = tf.reverse(y, [-1]) if reverse else y
    if exclusive:
        y = tf.concat([tf.ones_like(y[..., :1]), y[..., :-1]], -1)
    for doubling in range(_DOUBLINGS if size is None else int(size - 1).bit_length()):
        step = 2**doubling
        y = tf.concat([y[..., :step], y[..., step:] * y[..., :-step]], -1)
    y = tf.reverse(y, [-1]) if reverse else y
    return tf.ensure_shape(tf.transpose(y, tf.math.invert_permutation(order)), x.shape)


@gradient_of("Pow")
def _pow(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # x**0 is one for every x. TensorFlow's derivative at x = 0 is 0 * x**-1, which is not a number.
    x, y = operation.inputs
    exponents = _static(y)
    if exponents is not None and np.all(exponents != 0):
        return TENSORFLOWS["Pow"](operation, upstream)
    base, exponent = tf.math.conj(x), tf.math.conj(y)
    matters = tf.not_equal(exponent, 0)
    if exponents is not None and tf.is_symbolic_tensor(y):  # constants of a graph
        safe = tf.where(matters, exponent, tf.ones_like(exponent))
        slope = tf.where(matters, exponent * tf.pow(base, safe - 1), tf.zeros_like(base))
        return _as(upstream * slope, x), None
    # Where only the exponent is zero, the slope depends on it.
    matters |= tf.not_equal(base, 0)
    safe = tf.where(matters, base, tf.ones_like(base))
    slope = tf.where(matters, exponent * tf.pow(safe, exponent - 1), tf.zeros_like(base))
    is_inside = tf.not_equal(base, 0) if x.dtype.is_complex else base > 0
    logarithm = tf.math.log(tf.where(is_inside, base, tf.ones_like(base)))
    logarithm = tf.where(is_inside, logarithm, tf.zeros_like(base))
    by_y = upstream * tf.math.conj(operation.outputs[0]) * logarithm
    return _as(upstream * slope, x), _as(by_y, y)


def _static(exponent: tf.Tensor) -> Any:
    """Return the values of exponents that are constants, or differences of these; else None."""
    value = tf.get_static_value(exponent)
    if value is None and exponent.op.type == "Sub":
        first, second = map(tf.get_static_value, exponent.op.inputs)
        return None if first is None or second is None else first - second
    return value


def _as(gradient: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Sum a gradient over the axes along which an input was broadcast."""
    if like.shape.is_fully_defined() and like.shape == gradient.shape:
        return gradient
    axes, _ = raw.BroadcastGradientArgs(s0=tf.shape(like), s1=tf.shape(gradient))
    return tf.reshape(tf.reduce_sum(gradient, axes), tf.shape(like))


def _hsv(rgb: tf.Tensor) -> tf.Tensor:
    r, g, b = tf.unstack(rgb, axis=-1)
    is_r = (r >= g) & (r >= b)
    is_g = ~is_r & (g >= b)
    low_b = (b <= r) & (b <= g)
    low_g = ~low_b & (g <= r)
    value = tf.where(is_r, r, tf.where(is_g, g, b))
    chroma = value - tf.where(low_b, b, tf.where(low_g, g, r))
    saturation = tf.math.divide_no_nan(chroma, value)

    def part(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(one - other, chroma)

    hue = tf.where(is_r, part(g, b), tf.where(is_g, 2 + part(b, r), 4 + part(r, g))) / 6
    return tf.stack([tf.where(hue < 0, hue + 1, hue), saturation, value], -1)


_by_formula("RGBToHSV", _hsv)  # TensorFlow leaves out the smallest channel where it is zero
