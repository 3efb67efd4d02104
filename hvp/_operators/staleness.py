"""Noticing that a variable changed after the loss was evaluated.

TensorFlow has no public version counter. What is kept is the value each variable had. A value read
from a variable shares the variable's buffer, and TensorFlow writes into no buffer that somebody
else still holds, so keeping it costs no memory while nothing changes, and as long as the variable
answers with the same buffer its value is the same. When it answers with another one (it was
assigned to; or rows were scattered into it once, since when every read is a copy) the values are
compared bit for bit, on the device. So a change is noticed whoever made it and however, and an
assignment of equal values is no change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvp._linearize.trace import Resource

# Equal as bits, not as numbers: NaN is NaN, and 0.0 is not -0.0.
_BITS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


class Watch:
    """Compares variables with the values they had when the watch was last set.

    Parameters
    ----------
    resources : sequence of Resource
        What to watch.
    """

    def __init__(self, resources: Sequence[Resource]) -> None:
        self.resources = tuple(resources)
        self._values: list[tf.Tensor] = []
        self._addresses: list[int | None] = []

    def set(self, values: Sequence[tf.Tensor] | None = None) -> None:
        """Take some values, or those of now, as those to compare with."""
        self._values = (
            [resource.read() for resource in self.resources] if values is None else list(values)
        )
        self._addresses = [_address(value) for value in self._values]

    def release(self) -> None:
        """Forget the values."""
        self._values, self._addresses = [], []

    def changed(self) -> list[str]:
        """Return the names of the variables whose values differ.

        Costs a look at each variable's address, and a read of those that moved. On devices other
        than the CPU it costs a read of all.
        """
        found = []
        for resource, value, address in zip(self.resources, self._values, self._addresses):
            now = resource.read()
            if address is not None and _address(now) == address:
                continue
            if differ(now, value):
                found.append(resource.name)
        return found


def differ(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Whether two tensors of one type have different bits anywhere, or different shapes."""
    unequal = tf.raw_ops.NotEqual(x=_bits(value), y=_bits(other), incompatible_shape_error=False)
    return tf.reduce_any(unequal)


def _address(value: tf.Tensor) -> int | None:
    """Where the numbers are, if that can be seen without copying them: on the CPU."""
    plain = value.dtype != tf.string and np.dtype(value.dtype.as_numpy_dtype).isbuiltin == 1
    if not plain or "CPU" not in value.device:
        return None
    address: int = np.asarray(memoryview(value)).__array_interface__["data"][0]
    return address


def _bits(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_bool or value.dtype == tf.string:
        return value
    return tf.bitcast(value, _BITS.get(value.dtype.size, tf.int64))
