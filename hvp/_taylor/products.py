"""The gradients of products with derivatives of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from hvp._derivatives.gradient import densify, without_dependence
from hvp._taylor.curves import Curves
from hvp._taylor.series import Series
from hvp._taylor.traced import TracedFunction
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

Parts = Sequence[tf.Tensor]


def gradient_of_products(
    function: Callable[[], Any], nest: VariableNest, others: Sequence[Any] = ()
) -> Callable[..., list[tf.Tensor]]:
    """Return a function of directions, cotangents, and values of the variables and of the others.

    The others are variables, and tensors that the function captures. The gradient in all of them is
    that of the values of `function`; of their derivative along one direction; or of the mixed one
    along two, for a loss `u' H v`. Each is multiplied by the cotangents. The function is traced at
    the first call, which raises SecondDerivativeError if that fails.
    """
    dtype = Space.of_variables(nest).dtype

    def multiply(directions: Sequence[Parts], upstream: Parts, values: Parts) -> list[tf.Tensor]:
        traced = TracedFunction(function, [], [*nest.variables, *others])
        curves = Curves(1, 1, collapsed=True)
        terms: list[Any] = [(part,) for parts in directions for part in parts]
        if len(directions) == 2:
            # u' H v = ((u + v)' H (u + v) - (u - v)' H (u - v)) / 4
            curves = Curves(2, 2, collapsed=True, weights=tf.constant([0.25, -0.25], dtype))
            terms = [(tf.stack([a + b, a - b]), None) for a, b in zip(*directions)]
        constants = [(None,) * curves.order] * (len(values) - len(terms))
        series = [Series(value, own) for value, own in zip(values, [*terms, *constants])]
        results = traced.push(series, curves)
        if len(directions) == 2 and results[0].terms[0] is None:
            raise without_dependence(nest.names)
        targets = [result.terms[-1] if directions else result.value for result in results]
        pairs = [(target, u) for target, u in zip(targets, upstream) if target is not None]
        if not pairs:
            return [tf.zeros_like(value) for value in values]
        zeros = tf.UnconnectedGradients.ZERO
        moving, cotangents = zip(*pairs)
        gradients = tf.gradients(moving, values, cotangents, unconnected_gradients=zeros)
        return [densify(gradient, x.shape) for gradient, x in zip(gradients, values)]

    # A partial function, since TensorFlow counts traces of all functions from here together.
    return cast(Any, tf.function(functools.partial(multiply), autograph=False))
