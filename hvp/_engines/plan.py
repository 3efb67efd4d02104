"""Plans: rules that are ready to be evaluated, at any number of points."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from hvp._derivatives.suspects import SuspectOperation
from hvp._devices.statistics import DeviceStatistics
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap
from hvp._vectors.resources import Resource
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

# Takes the values of variables in float64; returns the gradient, None for variables without.
WideGradient = Callable[[Sequence[tf.Tensor]], list[Any]]


class DerivativeReport(NamedTuple):
    """What the graph of a function tells about its derivatives, before it runs.

    `custom` are operations with a `tf.custom_gradient`, and `wrong_at_values` those whose
    derivative is wrong at some values, where they are refused. `random` are random draws, and
    `repeated` those that are the same each time. `python` tells whether Python code runs with the
    graph.
    """

    custom: list[SuspectOperation]
    wrong_at_values: list[SuspectOperation]
    random: list[SuspectOperation]
    repeated: list[SuspectOperation]
    python: bool

    @classmethod
    def union(cls, every: Iterable[DerivativeReport]) -> DerivativeReport:
        """Return the report on several functions."""
        every = list(every)

        def distinct(lists: Iterable[list[SuspectOperation]]) -> list[SuspectOperation]:
            return list(dict.fromkeys(itertools.chain(*lists)))

        return cls(
            distinct(remarks.custom for remarks in every),
            distinct(remarks.wrong_at_values for remarks in every),
            distinct(remarks.random for remarks in every),
            distinct(remarks.repeated for remarks in every),
            any(remarks.python for remarks in every),
        )


@dataclass(frozen=True)
class TraceSummary:
    """What is known about a plan so far.

    Attributes
    ----------
    engine
        What multiplies: "graph" or "tape".
    reads
        What the results depend on: a linear map is out of date when one of these changes.
    writes
        What running the function changes; it is put back afterwards.
    captured
        All variables that running the function needs.
    seeds
        The integers among `writes`: seeds of random draws, counters.
    draws
        Whether results depend on random draws whose state is not a variable.
    remarks
        What the graph tells about derivatives; None if the function could not be traced.
    foreign
        What else the function uses that only this process has, such as a lookup table or Python
        code.
    differentiates
        Whether the values of the function contain derivatives.
    recomputes
        Whether the function recomputes some of its values; None if it could not be traced.
    traces
        How often the function was traced.
    uses_xla
        Whether XLA computes products; None before the first.
    expected_nbytes
        Bytes that a linear map will hold, as far as shapes tell before it is evaluated.
    precision
        The low precision in which products are computed; empty for full precision.
    note
        Why something is not as good as it could be; empty if nothing is.
    """

    engine: str
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()
    captured: tuple[Resource, ...] = ()
    seeds: tuple[Resource, ...] = ()
    draws: bool = False
    remarks: DerivativeReport | None = None
    foreign: str = ""
    differentiates: bool = False
    recomputes: bool | None = None
    traces: int = 0
    uses_xla: bool | None = None
    expected_nbytes: int = 0
    precision: str = ""
    note: str = ""

    @classmethod
    def union(cls, every: Sequence[TraceSummary]) -> TraceSummary:
        """Return the summary of several plans that serve together."""
        remarks = [facts.remarks for facts in every if facts.remarks is not None]
        recomputes = [facts.recomputes for facts in every]
        return cls(
            engine="tape" if any(facts.engine == "tape" for facts in every) else "graph",
            reads=_distinct(facts.reads for facts in every),
            writes=_distinct(facts.writes for facts in every),
            captured=_distinct(facts.captured for facts in every),
            seeds=_distinct(facts.seeds for facts in every),
            draws=any(facts.draws for facts in every),
            remarks=DerivativeReport.union(remarks) if len(remarks) == len(every) else None,
            foreign=next((facts.foreign for facts in every if facts.foreign), ""),
            differentiates=any(facts.differentiates for facts in every),
            recomputes=None if None in recomputes else any(recomputes),
            traces=sum(facts.traces for facts in every),
            uses_xla=next((facts.uses_xla for facts in every if facts.uses_xla is not None), None),
            expected_nbytes=sum(facts.expected_nbytes for facts in every),
            precision=next((facts.precision for facts in every if facts.precision), ""),
            note="; ".join(dict.fromkeys(filter(None, (facts.note for facts in every)))),
        )


def _distinct(resources: Iterable[Iterable[Resource]]) -> tuple[Resource, ...]:
    """Return each variable's buffer once."""
    return tuple({id(r.handle): r for r in itertools.chain(*resources)}.values())


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
