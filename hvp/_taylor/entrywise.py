"""The derivatives of functions of single entries."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hvp._taylor.series import Term

# Returns the derivatives of orders 1 to `order` from the argument and the value.
Derivatives = Callable[[tf.Tensor, tf.Tensor, int], list[Term]]


def _of_tanh(_: tf.Tensor, y: tf.Tensor, order: int) -> list[Term]:
    # The n-th derivative is a polynomial in y, and y' = 1 - y**2.
    return _polynomials(y, [1.0, 0.0, -1.0], order)


def _of_sigmoid(_: tf.Tensor, y: tf.Tensor, order: int) -> list[Term]:
    return _polynomials(y, [0.0, 1.0, -1.0], order)


def _polynomials(y: tf.Tensor, slope: list[float], order: int) -> list[Term]:
    """Return the derivatives of `y`, where `y'` is a polynomial in `y` with these coefficients."""
    first = _polynomial(y, slope)
    derivatives: list[Term] = [first]
    coefficients = slope
    for _ in range(1, order):
        # (p(y))' = (dp/dy) y', and y' is a factor of every derivative.
        of_y = [i * c for i, c in enumerate(coefficients)][1:]
        derivatives.append(_polynomial(y, of_y) * first)
        coefficients = [0.0] * (len(of_y) + len(slope) - 1)
        for i, a in enumerate(of_y):
            for j, b in enumerate(slope):
                coefficients[i + j] += a * b
    return derivatives


def _polynomial(y: tf.Tensor, coefficients: list[float]) -> tf.Tensor:
    """Evaluate a polynomial by Horner's rule, without the operations that do nothing."""
    result: Term = None
    for coefficient in reversed(coefficients):
        if result is None:
            result = tf.constant(coefficient, y.dtype) if coefficient else None
            continue
        result = y if _is_one(result) else result * y
        if coefficient:
            result += tf.constant(coefficient, y.dtype)
    assert result is not None
    return result


def _is_one(value: tf.Tensor) -> bool:
    static = tf.get_static_value(value)
    return static is not None and static.ndim == 0 and static == 1


def _of_exp(_: tf.Tensor, y: tf.Tensor, order: int) -> list[Term]:
    return [y] * order


def _of_sin(x: tf.Tensor, y: tf.Tensor, order: int) -> list[Term]:
    cosine = tf.cos(x)
    return [[cosine, -y, -cosine, y][n % 4] for n in range(order)]


def _of_cos(x: tf.Tensor, y: tf.Tensor, order: int) -> list[Term]:
    sine = tf.sin(x)
    return [[-sine, -y, sine, y][n % 4] for n in range(order)]


def _of_square(x: tf.Tensor, _: tf.Tensor, order: int) -> list[Term]:
    return [2 * x, tf.fill(tf.shape(x), tf.constant(2, x.dtype)), *[None] * order][:order]


FORMULAS: dict[str, Derivatives] = {
    "Cos": _of_cos,
    "Exp": _of_exp,
    "Sigmoid": _of_sigmoid,
    "Sin": _of_sin,
    "Square": _of_square,
    "Tanh": _of_tanh,
}


def derivatives_of(
    function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor, order: int
) -> list[Term]:
    """Return the derivatives of orders 0 to `order` of a function of single entries."""
    derivatives: list[Term] = [function(x)]
    for _ in range(order):
        last = derivatives[-1]
        derivatives.append(None if last is None else tf.gradients(last, x)[0])
    return derivatives


def derivatives_of_power(x: tf.Tensor, exponent: float, order: int) -> list[Term]:
    """Return the derivatives of orders 1 to `order` of a power, which end for whole exponents."""
    derivatives: list[Term] = []
    factor = 1.0
    for n in range(order):
        factor *= exponent - n
        rest = exponent - n - 1
        power = (
            x if rest == 1 else tf.ones_like(x) if rest == 0 else x ** tf.constant(rest, x.dtype)
        )
        derivatives.append(tf.constant(factor, x.dtype) * power if factor else None)
    return derivatives
