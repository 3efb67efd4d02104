"""Tracing functions, and finding the variables that they read and write."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import Dataflow, Vertex
from hvp._vectors.resources import Resource

_WRITES = re.compile(r"Assign\w*VariableOp|Resource\w*(Scatter|Apply|Assign)\w*|Rng\w+|Stateful\w+")
_READS = re.compile(r"ReadVariableOp|ResourceGather\w*|ResourceStridedSlice\w*")


def concrete_function(function: Callable[..., Any], *specs: Any) -> Any:
    """Trace a function as plain Python, and with AutoGraph only if it branches on tensors.

    AutoGraph warns about every function whose source it cannot find, such as a lambda or a function
    typed at a prompt.
    """
    try:
        return tf.function(function, autograph=False).get_concrete_function(*specs)
    except tf.errors.OperatorNotAllowedInGraphError:
        return tf.function(function, autograph=True).get_concrete_function(*specs)


def captures(concrete: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Pair the placeholder of each captured tensor with the tensor itself."""
    captured = concrete.captured_inputs
    return list(zip(concrete.inputs[len(concrete.inputs) - len(captured) :], captured))


def captured_resources(
    concrete: Any, flow: Dataflow, variables: Sequence[tf.Variable]
) -> list[tuple[Resource, Vertex]]:
    """Pair each variable that the function captured with its vertex in the graph."""
    known = {id(v.handle): Resource.of(v) for v in (*concrete.variables, *variables)}
    resources = []
    for inside, outside in captures(concrete):
        if outside.dtype != tf.resource:
            continue
        vertex = flow.vertex(inside.name)
        resource = known.get(id(outside)) or _unnamed_resource(outside, flow, vertex)
        if resource is not None:
            resources.append((resource, vertex))
    return resources


def is_written(flow: Dataflow, vertex: Vertex) -> bool:
    """Return whether the graph updates a variable."""
    return any(_WRITES.fullmatch(flow.types[user]) for user in flow.users(vertex))


def is_read(flow: Dataflow, vertex: Vertex, reaching: set[Vertex]) -> bool:
    """Return whether one of the operations `reaching` reads a variable."""
    return any(_READS.fullmatch(flow.types[user]) for user in flow.users(vertex) & reaching)


def _unnamed_resource(handle: tf.Tensor, flow: Dataflow, vertex: Vertex) -> Resource | None:
    """Describe a variable that is known only by its handle; None for a table, for example."""
    for user in flow.users(vertex):
        kind = flow.types[user]
        if kind.startswith("Rng"):
            return Resource(handle, tf.int64, "random generator state")
        if _WRITES.fullmatch(kind) or _READS.fullmatch(kind):
            dtype = flow.dtypes.get(user)
            if dtype is not None:
                return Resource(handle, dtype, "unnamed variable")
    return None
