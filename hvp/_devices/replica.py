"""A device on which functions run, with its copies of variables and other tensors."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._devices.device import Device
from hvp._graphs.sizes import nbytes
from hvp._graphs.target import ExecutionTarget, unbound
from hvp._vectors.resources import Resource, same
from hvp._vectors.tensor_cell import TensorCell

# From this many bytes on, it pays to let a device fetch a tensor, which takes more operations.
_LARGE = 2**24


@functools.cache
def _assigning(dtype: tf.DType) -> Any:
    """Return a function that assigns to a variable, on the variable's device."""

    def assign(handle: tf.Tensor, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    signature = [tf.TensorSpec([], tf.resource), tf.TensorSpec(None, dtype)]
    with tf.init_scope():
        return tf.function(assign, autograph=False, input_signature=signature)


# Variables, and the values that they had at one moment.
Values = Sequence[tuple[Resource, tf.Tensor]]


class DeviceReplica(ExecutionTarget):
    """A device, and the copies it holds of variables and other tensors that functions read.

    Everything that uses it runs in the device's own thread, one piece of work at a time. It belongs
    to the device's current life. `sent` and `received` count the bytes moved to the device and
    back, and `variable_bytes` the part of `sent` that were values of variables.
    """

    def __init__(self, device: Device) -> None:
        self.device, self._life = device, device.lives
        self.sent = self.received = self.variable_bytes = 0
        # By the tensor or handle that a function captured, which is kept so that it stays the one.
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._values: dict[int, tf.Tensor] = {}
        # A variable that takes what is moved there, and the value that it has otherwise.
        self._inboxes: dict[tf.DType, tuple[tf.Variable, tf.Tensor]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"DeviceReplica({self.device.name!r})"

    @property
    def name(self) -> str:  # type: ignore[override]
        """The full name of the device."""
        return self.device.name

    @property
    def is_remote(self) -> bool:  # type: ignore[override]
        """Whether the device belongs to another process."""
        return self.device.is_remote

    @property
    def runs_xla(self) -> bool:  # type: ignore[override]
        """Whether TensorFlow can call functions there that XLA has compiled."""
        return not self.device.is_remote

    @property
    def is_there(self) -> bool:  # type: ignore[override]
        """Whether the device still holds what was moved there."""
        return not self.device.lost and self.device.lives == self._life

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which TensorFlow runs operations on the device."""
        return tf.device(self.device.name)

    def captured(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the copies that a function reads there in place of its captured tensors."""
        return [self._copy(tensor) for tensor in tensors]

    def resource(self, resource: Resource) -> Resource:
        """Return the copy of a variable."""
        return Resource(self._copy(resource.handle), resource.dtype, resource.name)

    def sync(self, values: Values) -> None:
        """Assign values to the copies of variables, except to those that have them already.

        A value that has not changed since the last call must be the same tensor.
        """
        for resource, value in values:
            key = id(resource.handle)
            if self._values.get(key) is not value:
                self._assign(resource.handle, value)
                self._values[key] = value
                self.variable_bytes += nbytes(value)

    def put(self, slot: TensorCell, tensor: tf.Tensor) -> None:
        """Assign a tensor to the device's copy of a cell, from which functions read it."""
        self._assign(slot.variable.handle, tensor)

    def take(self, tensor: tf.Tensor, *, uses: int = 2) -> tf.Tensor:
        """Move a tensor to the device.

        `uses` is the number of operations that use it. For a single one, TensorFlow moves it by
        itself.
        """
        if self._is_here(tensor):
            return tensor
        self.sent += nbytes(tensor)
        if uses == 1:
            return tensor
        with self.scope():
            return tf.identity(tensor)

    def fetches(self, tensor: tf.Tensor) -> bool:
        """Return whether it pays to let the device fetch a tensor."""
        large = self.device.is_remote and nbytes(tensor) >= _LARGE
        return large and not self._is_here(tensor)

    def fetch(self, tensor: tf.Tensor) -> tf.Tensor:
        """Move a large tensor to another process, in less than half the time of `take`.

        TensorFlow sends the arguments of remote operations in messages that are copied several
        times. The inputs of a function on several devices are instead fetched by the device that
        needs them. But that device waits for what other devices compute: use this while they are
        idle.
        """
        self.sent += nbytes(tensor)
        with tf.device(None):
            assign = _assigning(tensor.dtype)
        with self.scope():
            if tensor.dtype not in self._inboxes:
                nothing = tf.zeros([0], tensor.dtype)
                shape = tf.TensorShape(None)
                inbox = tf.Variable(nothing, trainable=False, shape=shape)
                self._inboxes[tensor.dtype] = inbox, nothing
            inbox, nothing = self._inboxes[tensor.dtype]
        with tf.device(None):
            assign(inbox.handle, tensor)
        with self.scope():
            moved = tf.raw_ops.ReadVariableOp(resource=inbox.handle, dtype=tensor.dtype)
            tf.raw_ops.AssignVariableOp(resource=inbox.handle, value=nothing)
        return moved

    def give(self, tensor: tf.Tensor, home: str) -> tf.Tensor:
        """Move a tensor from the device to the device named `home`."""
        if tensor.device == home:
            return tensor
        self.received += nbytes(tensor)
        # In Python that a graph calls, tensors tell this name even if the process is a task of a
        # cluster, and TensorFlow does not know it then.
        # A name without a task would be one of the device of the context, but for the None.
        with tf.device(None), tf.device(home.replace("/job:localhost/replica:0/task:0", "")):
            return tf.identity(tensor)

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function on the device, while no other one runs there."""
        with self._lock, unbound(), self.scope():
            return function()

    def _is_here(self, tensor: tf.Tensor) -> bool:
        return tensor.device.endswith(self.device.name)

    def _assign(self, handle: tf.Tensor, value: tf.Tensor) -> None:
        value = self.take(value)
        known = self._copies.get(id(handle))
        if known is None:
            with self.scope():
                shape = tf.TensorShape(None)
                self._copies[id(handle)] = (
                    handle,
                    tf.Variable(value, trainable=False, shape=shape),
                )
            return
        tf.raw_ops.AssignVariableOp(resource=known[1].handle, value=value)

    def _copy(self, tensor: Any) -> Any:
        known = self._copies.get(id(tensor))
        if known is None:
            if tensor.dtype in (tf.resource, tf.variant):
                return tensor  # such as a table, which the devices of a process share
            known = self._copies[id(tensor)] = (tensor, self.take(tensor))
        copy = known[1]
        return copy.handle if isinstance(copy, tf.Variable) else copy


class VariableValues:
    """The values of variables at one moment.

    A variable that has the same value as in `before`, an earlier moment, keeps the same tensor.
    """

    def __init__(self, before: VariableValues | None = None) -> None:
        self._before: dict[int, tf.Tensor] = {} if before is None else before.tensors
        self.tensors: dict[int, tf.Tensor] = {}

    def of(self, resources: Sequence[Resource]) -> Values:
        """Return variables with their values, which are read when they are first requested."""
        return [(resource, self._value(resource)) for resource in resources]

    def _value(self, resource: Resource) -> tf.Tensor:
        key = id(resource.handle)
        if key not in self.tensors:
            now, before = resource.read(), self._before.get(key)
            self.tensors[key] = now if before is None or not same(now, before) else before
        return self.tensors[key]
