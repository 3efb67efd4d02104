"""Products inside a graph that are computed by a call to Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._engines.linear_map import LinearMap
from hvp._graphs.python_calls import call_python
from hvp._vectors.space import Space


def apply_in_python(find: Callable[[], LinearMap], vector: Any, space: Space, adjoint: bool) -> Any:
    """Add a product to the graph being traced, which calls Python to compute it.

    `find` returns the map to multiply with when the graph runs. The vector may have any layout.
    `space` is the space of the product.
    """
    if isinstance(vector, (list, tuple)):
        return call_python(lambda *parts: find().apply(parts, adjoint=adjoint), vector, space.specs)
    spec = tf.TensorSpec([*vector.shape[:-1], space.size], space.dtype)
    (product,) = call_python(lambda v: [find().apply(v, adjoint=adjoint)], [vector], [spec])
    return product
