"""Where compiled functions run, and what they read there instead of captured tensors."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._runtime.context import assigned
from hvp._vectors.resources import Resource
from hvp._vectors.tensor_cell import TensorCell


class ExecutionTarget:
    """Where a function runs; this one leaves it to TensorFlow.

    Where `runs_xla` is False, TensorFlow cannot call functions that XLA compiles, except from
    within other functions. A place that `is_remote` belongs to another process, so that an
    operation takes as long as a hundred here. `is_there` tells whether the place still has what was
    moved there.
    """

    name = "this process"
    runs_xla = True
    is_remote = False
    is_there = True

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which TensorFlow runs operations there."""
        return contextlib.nullcontext()

    def captured(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return what a function reads there instead of the tensors that it captured."""
        return tensors

    def resource(self, resource: Resource) -> Resource:
        """Return the variable that stands there for one that a function captured."""
        return resource

    def put(self, slot: TensorCell, tensor: tf.Tensor) -> None:
        """Put a tensor in a slot from which functions read it there."""
        slot.assign(tensor)

    def sync(self, values: Sequence[tuple[Resource, tf.Tensor]]) -> None:
        """Assign values to what stands there for variables."""

    def take(self, tensor: tf.Tensor, *, uses: int = 2) -> tf.Tensor:
        """Move a tensor there, where `uses` operations use it."""
        del uses
        return tensor

    def give(self, tensor: tf.Tensor, home: str) -> tf.Tensor:
        """Move a tensor from there to the device named `home`."""
        del home
        return tensor


LOCAL = ExecutionTarget()


@functools.cache
def has_cpus_only() -> bool:
    """Return whether TensorFlow runs on CPUs only in this process."""
    return {device.device_type for device in tf.config.list_logical_devices()} == {"CPU"}


# Whether this thread runs operations on a device that functions must not be bound to when they are
# traced: they run on others too.
_unbound = contextvars.ContextVar("hvp_unbound", default=False)


def unbound() -> contextlib.AbstractContextManager[None]:
    """Let functions that are traced in this context belong to no device."""
    return assigned(_unbound, True)


def scope_of_tracing() -> contextlib.AbstractContextManager[Any]:
    """Return the context in which to trace a function."""
    return tf.device(None) if _unbound.get() else contextlib.nullcontext()
