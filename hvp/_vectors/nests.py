"""Conversion of nests of tensors or arrays to flat vectors and back, at the package's boundary."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvp._vectors.arrays import make_array
from hvp._vectors.space import Space, check_numeric


def flattened(space: Space, nest: Any) -> Any:
    """Concatenate a nest into one vector, which is an array if all of its parts are arrays."""
    parts = space.parts_of_nest(nest, "the nest")
    flat = space.join([tf.convert_to_tensor(part) for part in parts])
    return flat.numpy() if all(isinstance(part, np.ndarray) for part in parts) else flat


def unflattened(space: Space, vector: Any) -> Any:
    """Split a vector into a nest, of tensors if it is a tensor and of arrays otherwise.

    A block of columns, of shape `(n, k)`, gives parts with a further last axis of length `k`.
    """
    is_tensor = tf.is_tensor(vector)
    vector = vector if is_tensor else make_array(vector)
    check_numeric(vector, "the vector")
    if len(vector.shape) == 2 and vector.shape[0] == space.size:
        rows = space.split(tf.cast(tf.transpose(vector), space.dtype))
        parts = [tf.transpose(part, [*range(1, len(part.shape)), 0]) for part in rows]
    else:
        space.check_flat(vector)
        parts = space.split(tf.cast(vector, space.dtype))
    return space.nest_of_parts(parts if is_tensor else [p.numpy() for p in parts])
