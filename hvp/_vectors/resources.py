"""The buffers of variables: read, compared bit for bit, moved, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from hvp._runtime.interrupts import put_back


@dataclass(frozen=True)
class Resource:
    """A variable's buffer that a traced function touches.

    Attributes
    ----------
    handle : tf.Tensor
        Of dtype resource.
    dtype : tf.DType
        Of the values in the buffer.
    name : str
        What to call it in messages.
    """

    handle: tf.Tensor
    dtype: tf.DType
    name: str

    @classmethod
    def of(cls, variable: tf.Variable, name: str | None = None) -> Resource:
        """Return the buffer of a variable."""
        return cls(variable.handle, variable.dtype, name or variable.name.partition(":")[0])

    def read(self) -> tf.Tensor:
        """Return the value now; later writes do not reach it."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def write(self, value: tf.Tensor) -> None:
        """Replace the value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


# Equal as bits, not as numbers: NaN is NaN, and 0.0 is not -0.0.
_BITS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def differ(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Whether two tensors of one shape and type have different bits anywhere."""
    return tf.reduce_any(tf.not_equal(_bits(value), _bits(other)))


def _bits(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_bool or value.dtype == tf.string:
        return value
    return tf.bitcast(value, _BITS.get(value.dtype.size, tf.int64))


@contextlib.contextmanager
def restored(resources: Sequence[Resource], *, only_on_error: bool = False) -> Iterator[None]:
    """Put variables back to the values they had, whatever happens in between.

    Parameters
    ----------
    resources : sequence of Resource
        The variables.
    only_on_error : bool, optional
        Whether to leave them as they are if nothing is raised.
    """
    values = [resource.read() for resource in resources]
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or not only_on_error:
            put_back((resource.write, value) for resource, value in zip(resources, values))
