"""First, second and third derivatives of a function, in every mode TensorFlow has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

MODES = {
    "eager": lambda function: function,
    "graph": lambda function: tf.function(function, autograph=False),
    "xla": lambda function: tf.function(function, autograph=False, jit_compile=True),
}


def derivatives(f: Callable[[], Any], sources: Sequence[Any], order: int = 3) -> list[tf.Tensor]:
    """Nested gradients: each a nonlinear function of the one before.

    Returns
    -------
    list of tf.Tensor
        The value, then the gradients by all sources of each order up to `order`; zero where
        there is none.
    """
    found: list[tf.Tensor] = []

    def differentiated(level: int) -> tf.Tensor:
        if level == 0:
            parts = [_sum_of_squares(y) for y in tf.nest.flatten(f()) if _floats(y)]
            total = tf.add_n([tf.cast(part, tf.float64) for part in parts])
        else:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                value = differentiated(level - 1)
            gradient = tape.gradient(value, sources, unconnected_gradients="zero")
            gradient = [tf.convert_to_tensor(g) for g in gradient]
            found.extend(gradient)
            total = tf.add_n([tf.cast(_sum_of_squares(g), tf.float64) for g in gradient])
        if level == 0:
            found.append(total)
        return total

    differentiated(order)
    return found


def _sum_of_squares(tensor: tf.Tensor) -> tf.Tensor:
    # Not as a power: TensorFlow's third derivative of that is NaN at zero.
    return tf.reduce_sum(tf.square(tf.abs(tensor)))


def _floats(tensor: Any) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def assert_same(
    got: Sequence[Any], want: Sequence[Any], tolerance: float, floor: float = 1e-6
) -> None:
    """Compare lists of tensors, each relative to its largest entry, or to `floor`.

    Some gradients are zero but for rounding: attention does not depend on the bias of its keys.
    """
    assert len(got) == len(want)
    for index, (one, other) in enumerate(zip(got, want)):
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        scale = max(floor, float(np.max(np.abs(other), initial=0)))
        error = float(np.max(np.abs(one - other), initial=0)) / scale
        assert error <= tolerance, f"derivative {index}: {error}"
