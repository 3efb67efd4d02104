"""Plans: rules that are ready to be evaluated, at any number of points."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._devices.statistics import DeviceStatistics
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap
from hvp._engines.summary import TraceSummary
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

# Takes the values of variables in float64; returns the gradient, None for variables without.
WideGradient = Callable[[Sequence[tf.Tensor]], list[Any]]


class Plan(abc.ABC):
    """A rule that is ready to be evaluated, over one batch or many.

    `divides` tells whether the data are divided into batches, and `cuts` whether batches of the
    caller's own have been divided further. `batches` is their number, None if
    the data are not divided or if it is not known yet, and `evaluations` is how often a batch was
    evaluated. `devices` holds counts for each device, if devices were named.
    """

    nest: VariableNest
    space: Space
    divides: bool = False
    cuts: bool = False
    batches: int | None = None
    evaluations: int = 0
    devices: tuple[DeviceStatistics, ...] = ()

    @property
    @abc.abstractmethod
    def facts(self) -> TraceSummary:
        """What is known about the rule by now."""

    @abc.abstractmethod
    def at_point(self) -> tuple[Results, LinearMap]:
        """Evaluate at the current values of the variables."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, the data and the function, the same in every process."""

    @abc.abstractmethod
    def in_float64(self) -> WideGradient | None:
        """Return the gradient as a function of the variables in float64; None if there is none."""
