"""The variables and tensors that a traced function uses besides its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from hvp._errors import RecomputeError
from hvp._graphs.concrete import captured_resources, captures, is_read, is_written
from hvp._graphs.dataflow import Dataflow
from hvp._recompute.order import has_derivatives


class CapturedVariable(NamedTuple):
    """A variable that a function reads and does not change.

    Tapes watch `source`, and record `read`, which returns the value.
    """

    handle: tf.Tensor
    dtype: tf.DType
    shape: tf.TensorShape
    source: Any
    read: Callable[[], tf.Tensor]


def captured_variables(concrete: Any, flow: Dataflow) -> list[CapturedVariable]:
    """Return the variables that a traced function reads and does not change."""
    known = {id(variable.handle): variable for variable in concrete.variables}
    results = [flow.vertex(tensor.name) for tensor in concrete.outputs]
    reaching = flow.reachable(results, backward=True)
    variables = []
    for resource, vertex in captured_resources(concrete, flow, ()):
        if not is_read(flow, vertex, reaching):
            continue
        variable = known.get(id(resource.handle))
        # A variable that the function updates (a moving average) is not an input. Its reads stay
        # in the graph as stateful operations, and run in the first call only.
        if not is_written(flow, vertex):
            handle, dtype = resource.handle, resource.dtype
            own = (tf.TensorShape(None), handle, resource.read)
            if variable is not None:
                own = (variable.shape, variable, variable.read_value)
            variables.append(CapturedVariable(handle, dtype, *own))
        elif variable is not None and variable.trainable and has_derivatives(variable):
            raise RecomputeError(
                f"the function changes a trainable variable that it also reads: {resource.name!r}",
                "a function that does not change the variables it is differentiated by",
                "update the variable outside, or create it with trainable=False",
            )
    return variables


def captured_tensors(concrete: Any) -> list[tf.Tensor]:
    """Return the tensors from outside that a traced function uses."""
    outside = [tensor for _, tensor in captures(concrete)]
    if any(t.dtype == tf.variant and tf.is_symbolic_tensor(t) for t in outside):
        raise RecomputeError(
            "the function uses a TensorArray or list of tensors from outside",
            "tensors",
            "stack it, and pass the tensor",
        )
    return [tensor for tensor in outside if tensor.dtype not in (tf.resource, tf.variant)]
