"""The curves along which a function is differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._graphs.vectorized import NotVectorizedError, vectorized
from hvp._taylor.series import Series, Term


@dataclass(frozen=True)
class Curves:
    """A number of curves, and the highest order of derivatives along them.

    If they are `collapsed`, only the sum of the derivatives of that order is wanted, with the
    `weights` of the curves, if there are any.
    """

    count: int
    order: int
    collapsed: bool = False
    weights: tf.Tensor | None = None

    def is_collapsed(self, order: int) -> bool:
        """Return whether the derivatives of an order are summed over the curves."""
        return self.collapsed and order == self.order

    def of_order(self, order: int, term: Term) -> Term:
        """Return derivatives of each curve in the form in which those of this order are kept."""
        if term is None or not self.is_collapsed(order):
            return term
        if self.weights is None:
            return tf.reduce_sum(term, axis=0)
        return tf.tensordot(tf.cast(self.weights, term.dtype), term, 1)

    def constant(self, value: tf.Tensor) -> Series:
        """Return the series of a tensor that does not depend on the curves."""
        return Series(value, (None,) * self.order)

    def mapped(
        self, order: int, function: Callable[..., Any], terms: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Apply a function that is linear in each argument to terms of an order, for each curve."""
        return function(*terms) if self.is_collapsed(order) else for_each(function, terms)


def for_each(function: Callable[..., Any], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Apply a function to the slices of tensors along their first axis, and stack the results."""
    try:
        return list(vectorized(lambda slices: function(*slices), list(tensors)))
    except NotVectorizedError:
        shapes = function(*(tensor[0] for tensor in tensors))
        signature = [tf.TensorSpec(one.shape, one.dtype) for one in shapes]
        mapped = tf.map_fn(
            lambda slices: function(*slices), list(tensors), fn_output_signature=signature
        )
        return list(mapped)
