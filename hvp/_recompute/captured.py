"""The variables and tensors that a traced function uses besides its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._errors import RecomputeError
from hvp._graphs.concrete import captured_resources, captures, is_read, is_written
from hvp._graphs.dataflow import Dataflow
from hvp._recompute.order import has_derivatives
from hvp._vectors.resources import Resource


@dataclass(frozen=True)
class CapturedVariable:
    """A variable that a function reads and does not change; `variable` is None if it is unknown."""

    resource: Resource
    variable: tf.Variable | None

    @property
    def handle(self) -> tf.Tensor:
        return self.resource.handle

    @property
    def dtype(self) -> tf.DType:
        return self.resource.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(None) if self.variable is None else self.variable.shape

    @property
    def source(self) -> Any:
        """The object that tapes watch."""
        return self.handle if self.variable is None else self.variable

    def read(self) -> tf.Tensor:
        """Return the value; tapes record the read."""
        return self.resource.read() if self.variable is None else self.variable.read_value()


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
            variables.append(CapturedVariable(resource, variable))
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
