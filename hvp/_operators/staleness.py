"""Noticing that a variable changed after the loss was evaluated.

TensorFlow has no public version counter. What is kept is the value each variable had, and each
check compares bit for bit, on the device: exact, whoever changed the variable and however. A value
read from a variable shares its buffer until the variable is written, so what is kept costs no
memory while nothing changes.
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
        self._resources = tuple(resources)
        self._values: list[tf.Tensor] = []
        # One function for each watch: a shared one would trace for every operator, and warn.
        self._differs = tf.function(_differs, autograph=False)

    def set(self) -> None:
        """Take the values of now as those to compare with."""
        self._values = [resource.read() for resource in self._resources]

    def release(self) -> None:
        """Forget the values."""
        self._values = []

    def changed(self) -> list[str]:
        """Return the names of the variables whose values differ, by one read of each."""
        if not self._values:
            return []
        handles = [resource.handle for resource in self._resources]
        differs = self._differs(handles, self._values).numpy()
        return [self._resources[index].name for index in np.flatnonzero(differs)]


def _differs(handles: list[tf.Tensor], values: list[tf.Tensor]) -> tf.Tensor:
    return tf.stack(
        [
            tf.reduce_any(
                tf.not_equal(
                    _bits(tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)),
                    _bits(value),
                )
            )
            for handle, value in zip(handles, values)
        ]
    )


def _bits(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_bool or value.dtype == tf.string:
        return value
    return tf.bitcast(value, _BITS.get(value.dtype.size, tf.int64))
