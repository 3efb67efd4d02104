"""The derivatives of a tensor along a curve, and how they are combined."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import tensorflow as tf

# A derivative of one order; None if it is zero.
Term = Optional[tf.Tensor]


@dataclass(frozen=True)
class Series:
    """The value of a tensor and its derivatives along `k` curves.

    `terms[j - 1]` holds the derivatives of order `j`, of shape `(k, *shape)`. Of a collapsed
    series, the last term is their sum over the curves, of the shape of the value: to know the sum
    of the highest derivatives of a function, one needs of its input only the sum of these.

    Axes along which a term is constant, such as that of the examples, may have the size one.
    """

    value: tf.Tensor
    terms: tuple[Term, ...]

    @property
    def is_constant(self) -> bool:
        """Whether all derivatives are zero."""
        return all(term is None for term in self.terms)

    def with_full_terms(self) -> Series:
        """Return the same, with the terms repeated along axes of which they have one entry."""
        return Series(self.value, tuple(map(self._full, self.terms)))

    def _full(self, term: Term) -> Term:
        if term is None or self.value.shape.rank is None:
            return term
        stacked = term.shape[: term.shape.rank - self.value.shape.rank]
        if term.shape[stacked.rank :] == self.value.shape:
            return term
        shape = tf.concat([tf.shape(term)[: stacked.rank], tf.shape(self.value)], 0)
        return tf.ensure_shape(tf.broadcast_to(term, shape), [*stacked, *self.value.shape])


def add(*terms: Term) -> Term:
    """Return the sum of those terms that are not zero."""
    some = [term for term in terms if term is not None]
    return functools.reduce(tf.add, some) if some else None


def partitions(order: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the partitions of an order, with the number of ways to partition a set like that.

    By Faa di Bruno's formula, the derivative of order `n` of `f(x(t))` is the sum over partitions
    `n = j_1 + ... + j_m` of this number, times the `m`-th derivative of `f`, times the derivatives
    of `x` of the orders `j_1` to `j_m`.
    """
    for parts in _decreasing(order, order):
        ways = math.factorial(order)
        for part in set(parts):
            count = parts.count(part)
            ways //= math.factorial(part) ** count * math.factorial(count)
        yield ways, parts


def _decreasing(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(min(total, largest), 0, -1):
        for rest in _decreasing(total - first, first):
            yield (first, *rest)


def product_of(terms: Sequence[Term]) -> Term:
    """Return the product of terms, zero if one of them is."""
    if any(term is None for term in terms):
        return None
    if len(terms) == 2 and terms[0] is terms[1]:
        return tf.square(terms[0])
    return functools.reduce(tf.multiply, terms)
