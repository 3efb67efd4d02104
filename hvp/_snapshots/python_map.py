"""Products inside somebody's graph for which Python runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._engines.linear_map import LinearMap
from hvp._graphs.python_calls import call_python
from hvp._vectors.space import Space


def apply_in_python(find: Callable[[], LinearMap], vector: Any, space: Space, adjoint: bool) -> Any:
    """Add a product to the graph being traced, for which Python runs.

    Parameters
    ----------
    find : callable
        Returns the map to multiply with, when the graph runs.
    vector : sequence of tf.Tensor, or tf.Tensor
        In any layout.
    space : Space
        The space of the product.
    adjoint : bool
        Whether to multiply by the transpose.
    """
    if isinstance(vector, (list, tuple)):
        return call_python(lambda *parts: find().apply(parts, adjoint=adjoint), vector, space.specs)
    spec = tf.TensorSpec([*vector.shape[:-1], space.size], space.dtype)
    (product,) = call_python(lambda v: [find().apply(v, adjoint=adjoint)], [vector], [spec])
    return product
