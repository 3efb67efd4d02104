"""Linear maps computed with NumPy: matrices and operators of scipy, inverses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._derivatives.belonging import may_be_recorded, recorded_product
from hvp._engines.linear_map import LinearMap, Source, apply_in_python
from hvp._vectors.space import Space


class ArrayMap(LinearMap):
    """A symmetric linear map computed with NumPy.

    `multiply` takes an array of shape `(k, n)` and returns the products with its rows. The gradient
    of a product in the `sources` that the map was computed from raises an error.
    """

    calls_python = True

    def __init__(
        self,
        multiply: Callable[[np.ndarray], np.ndarray],
        space: Space,
        sources: Sequence[Source] = (),
    ) -> None:
        self._multiply, self._sources = multiply, sources
        self.domain = self.codomain = space

    @property
    def sources(self) -> Sequence[Source]:
        """What the map was computed from."""
        return self._sources

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout; inside a graph, Python runs when the graph does."""
        if may_be_recorded() or (self._sources and not tf.executing_eagerly()):
            return recorded_product(self._applied, vector, self._sources)
        return self._applied(vector)

    def _applied(self, vector: Any) -> Any:
        if not tf.executing_eagerly():
            return apply_in_python(lambda: self, vector, self.codomain, False)
        if isinstance(vector, (list, tuple)):
            return self.codomain.split(self._applied(self.domain.join(vector)))
        array = vector.numpy()
        product = self._multiply(array.reshape(-1, self.domain.size))
        return tf.constant(product.reshape(array.shape), self.codomain.dtype)
