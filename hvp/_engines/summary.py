"""What is known about a function from its graph, before and after it runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from hvp._derivatives.suspects import SuspectOperation
from hvp._vectors.resources import Resource


class DerivativeReport(NamedTuple):
    """What the graph of a function tells about its derivatives, before it runs.

    `custom` are operations with a `tf.custom_gradient`, and `wrong_at_values` those whose
    derivative is wrong at some values, where they are refused. `random` are random draws whose
    state is not a variable, and `repeated` those that are the same each time, from seeds that are
    put back. `python` tells whether the results depend on Python code that runs with the graph.
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
        Variables, trainable or not, that the results depend on, except integers that the function
        itself updates: a linear map is out of date when one of these changes.
    writes
        Variables that running the function changes; they are put back afterwards.
    captured
        All variables that running the function needs.
    tensors
        The real or complex tensors that the function captured.
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
        Bytes that a linear map will hold, as far as shapes tell before it is evaluated: an upper
        bound, in which the body of a loop counts once, and a partly unknown shape not at all.
    precision
        The low precision in which products are computed; empty for full precision.
    note
        Why something is not as good as it could be; empty if nothing is.
    """

    engine: str
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()
    captured: tuple[Resource, ...] = ()
    tensors: tuple[tf.Tensor, ...] = ()
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

    @property
    def is_random(self) -> bool:
        """Whether the loss draws random numbers, also if they are the same each time."""
        remarks = self.remarks
        return self.draws or bool(remarks and (remarks.random or remarks.repeated))

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
            tensors=tuple(itertools.chain(*(facts.tensors for facts in every))),
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
