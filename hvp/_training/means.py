"""Running means among the variables of an optimizer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def kept(optimizer: Any, variable: Any, value: tf.Tensor, part: Any) -> tf.Tensor:
    """Update a running mean of which this part is kept, and return it."""
    mean = tf.convert_to_tensor(variable)
    mean += (1 - part) * (value - mean)
    optimizer.assign(variable, mean)
    return mean
