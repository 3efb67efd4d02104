"""Sums of values and gradients over the batches of one device, computed there in one call each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._devices.replica import DeviceReplica
from hvp._engines.graph_program import Results
from hvp._graphs.compiled import Compiled
from hvp._graphs.target import ExecutionTarget
from hvp._vectors.space import Space


@dataclass(frozen=True)
class PartialSum:
    """The sum `sum_b w_b L_b` over some batches, and its gradient as one vector.

    Attributes
    ----------
    value : tf.Tensor
        A scalar, in float64.
    gradient : tf.Tensor
        Of shape `(n,)`.
    connected : frozenset of int
        The variables, by their number, that it depends on.
    """

    value: tf.Tensor
    gradient: tf.Tensor
    connected: frozenset[int]

    def at(self, site: DeviceReplica, home: str) -> PartialSum:
        """Move it from a device to another one, given by its name."""
        value, gradient = site.give(self.value, home), site.give(self.gradient, home)
        return PartialSum(value, gradient, self.connected)

    def parts(self, space: Space) -> list[Any]:
        """Return the gradient in parts; None for variables that the loss does not depend on."""
        parts = space.split(self.gradient)
        return [part if i in self.connected else None for i, part in enumerate(parts)]


class Adding:
    """Adds results to a `PartialSum`, by functions that are compiled once.

    Parameters
    ----------
    space : Space
        The space of the gradient.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._functions: dict[Any, Compiled] = {}

    def __call__(
        self, total: PartialSum | None, weight: float, results: Results, place: ExecutionTarget
    ) -> PartialSum:
        """Return the sum with further results, times their weight.

        Parameters
        ----------
        total : PartialSum or None
            The sum so far.
        weight : float
            The weight of the results.
        results : Results
            What was evaluated at the place.
        place : ExecutionTarget
            Where to add.
        """
        gradient = list(results.gradient or ())
        connected = frozenset(i for i, part in enumerate(gradient) if part is not None)
        parts = [part for part in gradient if part is not None]
        before = [] if total is None else [total.value, total.gradient]
        weight, value = tf.constant(weight, tf.float64), tf.cast(results.value, tf.float64)
        function = self._function(connected, first=total is None)
        value, flat = function(weight, value, *parts, *before, place=place)
        return PartialSum(value, flat, connected | (total.connected if total else frozenset()))

    def sum(self, sums: Sequence[PartialSum]) -> PartialSum:
        """Add sums up that are in one place."""
        if len(sums) == 1:
            return sums[0]
        return PartialSum(
            tf.add_n([one.value for one in sums]),
            tf.add_n([one.gradient for one in sums]),
            frozenset().union(*(one.connected for one in sums)),
        )

    def _function(self, connected: frozenset[int], *, first: bool) -> Compiled:
        key = connected, first
        if key not in self._functions:
            space = self._space
            scalar = tf.TensorSpec([], tf.float64)
            specs = [scalar, scalar, *(space.specs[i] for i in sorted(connected))]
            specs += [] if first else [scalar, space.flat_spec]
            function = functools.partial(_add, space, sorted(connected))
            self._functions[key] = Compiled(_named(function), specs, False)
        return self._functions[key]


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    # TensorFlow names a graph's function after the Python function, which a partial one lacks.
    def add(*tensors: tf.Tensor) -> Any:
        return function(*tensors)

    return add


def _add(space: Space, connected: Sequence[int], *tensors: tf.Tensor) -> list[tf.Tensor]:
    weight, value, *rest = tensors
    parts: list[Any] = [None] * len(space.shapes)
    for number, part in zip(connected, rest):
        parts[number] = part
    value = weight * value
    flat = tf.cast(weight, space.dtype) * space.join(space.with_zeros(parts))
    before = rest[len(connected) :]
    return [value + before[0], flat + before[1]] if before else [value, flat]
