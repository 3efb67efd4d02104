"""Finding derivatives TensorFlow would leave out, before anything runs.

TensorFlow answers None both where a derivative is zero and where nobody wrote it down, and a
tape leaves such a term out of a sum without a word.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from hvp._derivatives.missing import (
    BY_NAME,
    CONSTANT_OPERATIONS,
    MISSING_DERIVATIVES,
    WITHOUT_GRADIENT,
    WRONG_AT_VALUES,
)
from hvp._errors import SecondDerivativeError, line_of
from hvp._graphs.dataflow import Dataflow, Edge, Vertex, layer_of
from hvp._graphs.source_lines import source_line

# Not operations, but patterns of several: see `_moments_differentiated_twice` and
# `_logarithms_from_above`.
_MOMENTS = "tf.nn.moments"
_CUMULATIVE_LOGSUMEXP = "tf.math.cumulative_logsumexp"
_REMEDIES = {kind: missing.remedy for kind, missing in MISSING_DERIVATIVES.items()}
for _kind, _wrong in WRONG_AT_VALUES.items():
    _REMEDIES[_kind] = (
        f"where there are {_wrong.values} (and inside functions, loops, branches and recomputed "
        f"parts, where that cannot be looked at), {_wrong.remedy}"
    )
_REMEDIES.update({name: BY_NAME.format(name) for name in (_MOMENTS, _CUMULATIVE_LOGSUMEXP)})


class Doubt(NamedTuple):
    """An operation whose derivative is in doubt: its name and type, and the line that made it."""

    name: str
    kind: str
    line: str = ""

    @property
    def place(self) -> str:
        """The layer or scope that it is in, or the line."""
        scope = layer_of(self.name).rpartition("/")[0]
        return repr(scope) if scope else self.line

    def __str__(self) -> str:
        made = f" ({self.line})" if self.line else ""
        return f"{self.kind} at {layer_of(self.name)!r}{made}"


@dataclass(frozen=True)
class Doubts:
    """Operations on the way from variables to results whose derivative is in doubt.

    Attributes
    ----------
    missing : list of Doubt
        Those without a derivative that is not zero.
    wrong_at_values : list of Doubt
        Those whose derivative is wrong at some values, which can be looked at.
    custom : list of Doubt
        Those whose derivative is what a `tf.custom_gradient` says.
    """

    missing: list[Doubt]
    wrong_at_values: list[Doubt]
    custom: list[Doubt]


def find_doubts(flow: Dataflow, sources: Iterable[Vertex], targets: Iterable[Vertex]) -> Doubts:
    """Look through the operations between sources and targets.

    Parameters
    ----------
    flow : Dataflow
        Of the traced function whose derivative is wanted.
    sources : iterable of Vertex
        Where the variables enter.
    targets : iterable of Vertex
        The function's results.

    Returns
    -------
    Doubts
    """

    def passes(edge: Edge) -> bool:
        kind = flow.types.get(edge.target)
        return kind not in CONSTANT_OPERATIONS and flow.differentiable(edge)

    depends = flow.reachable(sources, passes=passes)
    matters = flow.reachable(targets, passes=passes, backward=True)
    found: set[Vertex] = set()
    wrong_at_values: set[Vertex] = set()
    for vertex in depends & matters:
        kind = flow.types.get(vertex, "")
        missing = MISSING_DERIVATIVES.get(kind)
        if missing is None and kind not in WRONG_AT_VALUES:
            continue
        entering = {
            edge.input_index
            for edge in flow.incoming[vertex]
            if edge.source in depends and flow.differentiable(edge)
        }
        if kind in WRONG_AT_VALUES and 0 in entering:
            # Inside a function or loop its values cannot be looked at.
            (wrong_at_values if vertex[0] == () else found).add(vertex)
        if missing is None:
            continue
        if entering & set(missing.inputs) if missing.inputs else entering:
            found.add(vertex)
    doubts = {doubt_of(flow, vertex) for vertex in found}
    for vertex in _moments_differentiated_twice(flow, depends, matters):
        doubts.add(doubt_of(flow, vertex, _MOMENTS))
    for vertex in _logarithms_from_above(flow, depends & matters):
        doubts.add(doubt_of(flow, vertex, _CUMULATIVE_LOGSUMEXP))
    custom = [doubt_of(flow, v) for v in flow.custom_gradients & depends & matters]
    return Doubts(
        sorted(doubts),
        sorted(doubt_of(flow, vertex) for vertex in wrong_at_values),
        sorted(custom),
    )


def doubt_of(flow: Dataflow, vertex: Vertex, kind: str = "") -> Doubt:
    """Describe an operation."""
    return Doubt(flow.names[vertex], kind or flow.types[vertex], flow.source_line(vertex))


def refuse_missing_derivatives(found: list[Doubt]) -> None:
    """Raise `SecondDerivativeError`, naming each operation and what to use in its place."""
    if not found:
        return
    places = ", ".join(map(str, found[:5]))
    if len(found) > 5:
        places += f", and {len(found) - 5} more"
    remedies = dict.fromkeys(_REMEDIES[doubt.kind] for doubt in found)
    raise SecondDerivativeError(
        f"TensorFlow has no derivative, or a wrong one, of {places}; a term that is not zero would "
        "be left out, and the product would be wrong",
        "operations that can be differentiated",
        "; ".join(remedies),
    )


@contextlib.contextmanager
def derivative_errors() -> Iterator[None]:
    """Translate what TensorFlow raises where it has no derivative.

    The operation is named, and the line that made it, if it is in the graph being traced.
    """
    try:
        yield
    except (LookupError, NotImplementedError) as error:
        recomputes = "recompute_grad" in str(error)
        found = _WITHOUT_GRADIENT.search(str(error))
        if not (recomputes or found):  # what somebody's own code raises
            raise
        kind = next(filter(None, found.groups())) if found else ""
        remedy = "call the function without tf.recompute_grad or keras.remat"
        if not recomputes:
            remedy = WITHOUT_GRADIENT.get(kind, "replace that operation")
        reason = line_of(error).partition(". ")[0]
        raise SecondDerivativeError(
            f"TensorFlow cannot differentiate {_first_of(kind)} ({reason})",
            "operations that can be differentiated as often as is asked",
            remedy,
        ) from error


# How TensorFlow says that it has no gradient of an operation of some type.
_WITHOUT_GRADIENT = re.compile(
    r"registry has no entry for: (\w+)|op type: (\w+)|Gradient for (\w+) is not implemented"
)


def _first_of(kind: str) -> str:
    """Describe the first operation of a type in the graph being traced."""
    unknown = kind or "an operation of the function"
    if tf.executing_eagerly():
        return unknown
    graph = tf.compat.v1.get_default_graph()
    for operation in graph.get_operations():
        if operation.type == kind:
            return str(Doubt(operation.name, kind, source_line(graph, operation.name)))
    return unknown


def _moments_differentiated_twice(
    flow: Dataflow, depends: set[Vertex], matters: set[Vertex]
) -> list[Vertex]:
    """Find variances about `stop_gradient(mean)` whose gradient is among the results.

    The function `mean((x - stop_gradient(mean(x)))**2)` may be differentiated once, not twice (see
    the module `moments`). It was differentiated already where the stopped mean is used for
    anything that matters besides the variance.
    """
    found = []
    for vertex, kind in flow.types.items():
        if kind != "StopGradient":
            continue
        made_from = flow.producers(vertex)
        if not any(flow.types.get(v) == "Mean" and v in depends for v in made_from):
            continue
        users = flow.users(vertex)
        variances = {v for v in users if flow.types[v] == "SquaredDifference"}
        if variances and (users - variances) & matters:
            found.append(vertex)
    return found


def _logarithms_from_above(flow: Dataflow, on_the_way: set[Vertex]) -> list[Vertex]:
    """Find gradients of `CumulativeLogsumexp` whose derivative by the upstream gradient matters.

    Which is lost where that is zero (see the module `logsumexp`). It enters by `where(dy > 0,
    log(dy), lowest)`, and where it is constant nothing is lost.
    """

    def made_by(vertex: Vertex, kind: str) -> list[Vertex]:
        return [v for v in flow.producers(vertex) if flow.types.get(v) == kind]

    return [
        vertex
        for vertex, kind in flow.types.items()
        if kind == "CumulativeLogsumexp"
        for difference in made_by(vertex, "Sub")
        for chosen in made_by(difference, "SelectV2")
        if chosen in on_the_way and made_by(chosen, "Log")
    ]
