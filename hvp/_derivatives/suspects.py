"""Finds derivatives that TensorFlow would leave out, before anything runs.

TensorFlow returns None both for a derivative that is zero and for one that is not implemented. A
tape leaves such a term out of a sum without a warning.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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

# These are not types of operations but patterns of several operations. See
# `_moments_differentiated_twice` and `_logarithms_of_upstream`.
_MOMENTS = "tf.nn.moments"
_CUMULATIVE_LOGSUMEXP = "tf.math.cumulative_logsumexp"
_STOPPED = "tf.stop_gradient in the gradient of a function"
# Part of the names of those operations of this package that are rightly constant.
CONSTANT = "hvp_constant"
_REMEDIES = {kind: missing.remedy for kind, missing in MISSING_DERIVATIVES.items()}
for _kind, (_values, _remedy) in WRONG_AT_VALUES.items():
    _REMEDIES[_kind] = (
        f"where there are {_values} (and inside functions, loops, branches and recomputed parts, "
        f"where the values cannot be checked), {_remedy}"
    )
_REMEDIES[_STOPPED] = (
    "write the gradient of the tf.custom_gradient with operations that have derivatives, without "
    "tf.stop_gradient and back_prop=False; with curvature='gauss-newton', or an "
    "hvp.GaussNewtonOperator, first derivatives of the model are enough"
)
_REMEDIES.update({name: BY_NAME.format(name) for name in (_MOMENTS, _CUMULATIVE_LOGSUMEXP)})


class SuspectOperation(NamedTuple):
    """An operation whose derivative is in doubt: its name, type and line of code."""

    name: str
    kind: str
    line: str = ""

    @property
    def place(self) -> str:
        """The layer or scope of the operation, or its line if it has none."""
        scope = layer_of(self.name).rpartition("/")[0]
        return repr(scope) if scope else self.line

    def __str__(self) -> str:
        line = f" ({self.line})" if self.line else ""
        return f"{self.kind} at {layer_of(self.name)!r}{line}"


@dataclass(frozen=True)
class Suspects:
    """Operations between variables and results whose derivative is in doubt.

    `missing` have a nonzero derivative that TensorFlow lacks. `wrong_at_values` have a derivative
    that is wrong at some values, which can be checked. The derivative of `custom` operations is
    defined by a `tf.custom_gradient`.
    """

    missing: list[SuspectOperation]
    wrong_at_values: list[SuspectOperation]
    custom: list[SuspectOperation]

    def without(self, kinds: Collection[str]) -> Suspects:
        """Return the suspects that are not of these types."""
        lists = (self.missing, self.wrong_at_values, self.custom)
        return Suspects(
            *([suspect for suspect in some if suspect.kind not in kinds] for some in lists)
        )


def find_suspects(flow: Dataflow, sources: Iterable[Vertex], targets: Iterable[Vertex]) -> Suspects:
    """Find operations between variables (`sources`) and results whose derivative is in doubt."""

    def passes(edge: Edge) -> bool:
        kind = flow.types.get(edge.target)
        return kind not in CONSTANT_OPERATIONS and flow.differentiable(edge)

    depends = flow.reachable(sources, passes=passes)
    matters = flow.reachable(targets, passes=passes, backward=True)
    without_derivative: set[Vertex] = set()
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
            # Values can be checked only in the outermost graph, not in a function or loop.
            (wrong_at_values if vertex[0] == () else without_derivative).add(vertex)
        if missing is None:
            continue
        if entering & set(missing.inputs) if missing.inputs else entering:
            without_derivative.add(vertex)
    suspects = {suspect_of(flow, vertex) for vertex in without_derivative}
    for vertex in _moments_differentiated_twice(flow, depends, matters):
        suspects.add(suspect_of(flow, vertex, _MOMENTS))
    for vertex in _logarithms_of_upstream(flow, depends & matters):
        suspects.add(suspect_of(flow, vertex, _CUMULATIVE_LOGSUMEXP))
    custom = [suspect_of(flow, v) for v in flow.custom_gradients & depends & matters]
    return Suspects(
        sorted(suspects),
        sorted(suspect_of(flow, vertex) for vertex in wrong_at_values),
        sorted(custom),
    )


def is_wrong_at(kind: str, entering: tf.Tensor, leaving: tf.Tensor) -> tf.Tensor:
    """Return whether an operation of `WRONG_AT_VALUES` is at such values, of input or output 0.

    TensorFlow takes `x / (x**2 + 1e-20)` for the reciprocal of a difference `x` of eigenvalues, or
    of squared singular values, by which it divides.
    """
    if WRONG_AT_VALUES[kind][0] == "zeros":
        return tf.reduce_any(tf.equal(entering, 0))
    values = leaving**2 if kind == "Svd" else leaving
    apart = tf.abs(values[..., tf.newaxis] - values[..., tf.newaxis, :])
    largest = tf.reduce_max(tf.abs(values), -1)[..., tf.newaxis, tf.newaxis]
    near = apart <= tf.maximum(10 * np.finfo(apart.dtype.as_numpy_dtype).eps * largest, 1e-7)
    return tf.reduce_any(tf.linalg.set_diag(near, tf.zeros_like(values, tf.bool)))


def stopped_gradients(
    flow: Dataflow, sources: Iterable[Vertex], value: Iterable[Vertex], gradient: Iterable[Vertex]
) -> list[SuspectOperation]:
    """Find what stops derivatives in the gradient of a function, and not in the function itself.

    The gradient depends on the variables through it, so that its derivative is not what a tape
    returns. In the function, whose results are `value`, the caller stopped the gradient on purpose.
    """

    def passes(edge: Edge) -> bool:
        kind = flow.types.get(edge.target)
        return kind not in CONSTANT_OPERATIONS - {"StopGradient"} and flow.differentiable(edge)

    stops = {
        vertex
        for vertex, kind in flow.types.items()
        if kind == "StopGradient" and CONSTANT not in flow.names[vertex]
    }
    # Sums of exponentials are shifted by their maximum, on which they do not depend.
    stops -= {vertex for vertex in stops if _is_maximum(flow, vertex)}
    if stops:
        stops -= flow.reachable(value, backward=True)
        stops &= flow.reachable(sources, passes=passes)
        stops &= flow.reachable(gradient, passes=passes, backward=True)
    return sorted(suspect_of(flow, vertex, _STOPPED) for vertex in stops)


def _is_maximum(flow: Dataflow, vertex: Vertex) -> bool:
    """Whether an operation takes a maximum, perhaps with non-finite values replaced."""
    producers = flow.producers(vertex)
    chosen = [v for v in producers if flow.types.get(v) in ("Select", "SelectV2")]
    producers = producers.union(*map(flow.producers, chosen))
    return any(flow.types.get(v) == "Max" for v in producers)


def suspect_of(flow: Dataflow, vertex: Vertex, kind: str = "") -> SuspectOperation:
    """Describe an operation."""
    return SuspectOperation(
        flow.names[vertex], kind or flow.types[vertex], flow.source_line(vertex)
    )


def refuse_missing_derivatives(suspects: list[SuspectOperation]) -> None:
    """Raise `SecondDerivativeError` if there are suspects, naming operations and alternatives."""
    if not suspects:
        return
    places = ", ".join(map(str, suspects[:5]))
    if len(suspects) > 5:
        places += f", and {len(suspects) - 5} more"
    remedies = dict.fromkeys(_REMEDIES[suspect.kind] for suspect in suspects)
    raise SecondDerivativeError(
        f"TensorFlow has no derivative, or a wrong one, of {places}; a term that is not zero would "
        "be left out, and the product would be wrong",
        "operations that can be differentiated",
        "; ".join(remedies),
    )


@contextlib.contextmanager
def derivative_errors() -> Iterator[None]:
    """Turn TensorFlow's errors about missing derivatives into `SecondDerivativeError`."""
    try:
        yield
    except (LookupError, NotImplementedError) as error:
        recomputes = "recompute_grad" in str(error)
        match = _WITHOUT_GRADIENT.search(str(error))
        if not (recomputes or match):  # an error of the user's own code
            raise
        kind = next(filter(None, match.groups())) if match else ""
        remedy = "call the function without tf.recompute_grad or keras.remat"
        if not recomputes:
            remedy = WITHOUT_GRADIENT.get(kind, "replace that operation")
        reason = line_of(error).partition(". ")[0]
        raise SecondDerivativeError(
            f"TensorFlow cannot differentiate {_first_of(kind)} ({reason})",
            "operations that have derivatives of every order",
            remedy,
        ) from error


# TensorFlow's messages for an operation of a type without a gradient.
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
            return str(SuspectOperation(operation.name, kind, source_line(graph, operation.name)))
    return unknown


def _moments_differentiated_twice(
    flow: Dataflow, depends: set[Vertex], matters: set[Vertex]
) -> list[Vertex]:
    """Find variances about `stop_gradient(mean)` whose gradient contributes to the results.

    They can be differentiated once, not twice (see the module `moments`). A variance has been
    differentiated already if its stopped mean is used for anything else that affects the results.
    """
    variances_of = []
    for vertex, kind in flow.types.items():
        if kind != "StopGradient":
            continue
        producers = flow.producers(vertex)
        if not any(flow.types.get(v) == "Mean" and v in depends for v in producers):
            continue
        users = flow.users(vertex)
        variances = {v for v in users if flow.types[v] == "SquaredDifference"}
        if variances and (users - variances) & matters:
            variances_of.append(vertex)
    return variances_of


def _logarithms_of_upstream(flow: Dataflow, between: set[Vertex]) -> list[Vertex]:
    """Find gradients of `CumulativeLogsumexp` whose derivative by the upstream gradient matters.

    TensorFlow loses this derivative where the upstream gradient `dy` is zero (see
    `CumulativeLogsumexp` in the module `formulas`), unless `dy` is constant. It enters by
    `where(dy > 0, log(dy), lowest)`.
    """

    def producers(vertex: Vertex, kind: str) -> list[Vertex]:
        return [v for v in flow.producers(vertex) if flow.types.get(v) == kind]

    return [
        vertex
        for vertex, kind in flow.types.items()
        if kind == "CumulativeLogsumexp"
        for difference in producers(vertex, "Sub")
        for chosen in producers(difference, "SelectV2")
        if chosen in between and producers(chosen, "Log")
    ]
