"""The buffers of variables: reading, writing, bitwise comparison and restoring."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvp._runtime.interrupts import put_back


# Without `==`: TensorFlow compares tensors entry by entry, and cannot compare handles.
@dataclass(frozen=True, eq=False)
class Resource:
    """The buffer of a variable that a traced function reads or writes.

    `handle` is a tensor of dtype resource, `dtype` is the type of the values, and `variable` is the
    variable itself, if it is known.
    """

    handle: tf.Tensor
    dtype: tf.DType
    name: str
    variable: tf.Variable | None = None

    @classmethod
    def of(cls, variable: tf.Variable, name: str | None = None) -> Resource:
        """Return the buffer of a variable."""
        return cls(
            variable.handle, variable.dtype, name or variable.name.partition(":")[0], variable
        )

    def read(self) -> tf.Tensor:
        """Return the current value; later writes do not change it."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def write(self, value: tf.Tensor) -> None:
        """Replace the value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


# Values are compared as bits, so that NaN equals NaN, and 0.0 differs from -0.0.
_BITS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def differ(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return whether two tensors of the same dtype differ in their shapes, or in any bit."""
    bits, others = bits_of(value), bits_of(other)
    if value.shape.is_fully_defined() and other.shape.is_fully_defined():
        if value.shape != other.shape:
            return tf.constant(True)
        return tf.reduce_any(tf.not_equal(bits, others))
    # Comparing the tensors themselves would repeat axes of one entry, and fail for other shapes.
    pairs = [(tf.shape(value), tf.shape(other)), (bits, others)]
    unequal = [_differ_as_lists(*(tf.reshape(x, [-1]) for x in pair)) for pair in pairs]
    return tf.reduce_any(unequal)


def _differ_as_lists(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return whether two vectors differ in length or in an entry."""
    length = tf.minimum(tf.size(value), tf.size(other))
    unequal = tf.reduce_any(tf.not_equal(value[:length], other[:length]))
    return tf.logical_or(unequal, tf.not_equal(tf.size(value), tf.size(other)))


def bits_of(value: tf.Tensor) -> tf.Tensor:
    """Return the bits of numbers as integers, and booleans and strings unchanged."""
    if value.dtype.is_bool or value.dtype == tf.string:
        return value
    return tf.bitcast(value, _BITS.get(value.dtype.size, tf.int64))


# Types whose tensors show their memory to Python.
_PLAIN = frozenset(
    {
        *(tf.bool, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    }
)


def address(value: tf.Tensor) -> int | None:
    """Return the address of the numbers, or None if it cannot be seen without a copy."""
    if value.dtype not in _PLAIN or "CPU" not in value.device:
        return None
    return int(np.asarray(memoryview(value)).ctypes.data)


def same(value: tf.Tensor, other: tf.Tensor) -> bool:
    """Return whether two values of one variable are equal, bit for bit."""
    if value.shape != other.shape:
        return False
    place = address(value)
    return (place is not None and place == address(other)) or not differ(value, other)


class Restorable(Protocol):
    """Variables whose values can be read and written."""

    def read(self) -> Any:
        """Return the values now; later writes do not change them."""

    def write(self, value: Any) -> None:
        """Replace the values."""


@contextlib.contextmanager
def restored(resources: Sequence[Restorable], *, only_on_error: bool = False) -> Iterator[None]:
    """Restore the values of variables at the end of the context, or only after an error."""
    values = [resource.read() for resource in resources]
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or not only_on_error:
            put_back((resource.write, value) for resource, value in zip(resources, values))
