"""The third derivative of a loss, multiplied by two vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from hvp._derivatives.gradient import check_scalar, densify, without_dependence
from hvp._taylor.curves import Curves
from hvp._taylor.series import Series
from hvp._taylor.traced import TracedFunction
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

Parts = Sequence[tf.Tensor]


def third_derivative(loss: Callable[[], Any], nest: VariableNest) -> Callable[..., list[tf.Tensor]]:
    """Return a function of `u`, `v` and values of the variables: the gradient of `u' H v` there.

    The loss is traced at the first call, which raises SecondDerivativeError if that fails.
    """
    dtype = Space.of_variables(nest).dtype

    def multiply(first: Parts, second: Parts, values: Parts) -> list[tf.Tensor]:
        traced = TracedFunction(lambda: check_scalar(loss()), [], nest.variables)
        # u' H v = ((u + v)' H (u + v) - (u - v)' H (u - v)) / 4
        curves = Curves(2, 2, collapsed=True, weights=tf.constant([0.25, -0.25], dtype))
        pairs = zip(values, first, second)
        inputs = [Series(x, (tf.stack([a + b, a - b]), None)) for x, a, b in pairs]
        [result] = traced.push(inputs, curves)
        slope, curvature = result.terms
        if slope is None:
            raise without_dependence(nest.names)
        if curvature is None:
            return [tf.zeros_like(value) for value in values]
        zeros = tf.UnconnectedGradients.ZERO
        gradients = tf.gradients(curvature, values, unconnected_gradients=zeros)
        return [densify(gradient, x.shape) for gradient, x in zip(gradients, values)]

    # A partial function, since TensorFlow counts traces of all functions from here together.
    return cast(Any, tf.function(functools.partial(multiply), autograph=False))
