"""Products inside somebody's graph for which Python runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._engines.linear_map import LinearMap
from hvp._graphs.python_calls import call_python


class PythonMap(LinearMap):
    """A linear map in the graph being traced, for which Python runs at every product.

    Parameters
    ----------
    find : callable
        Returns the map to multiply with, when the graph runs.
    domain, codomain : Space
        Its spaces.
    """

    def __init__(self, find: Callable[[], LinearMap], domain: Any, codomain: Any) -> None:
        self._find = find
        self.domain, self.codomain = domain, codomain

    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply by a vector given as the parts of the domain."""
        parts = [tf.ensure_shape(p, s) for p, s in zip(parts, self.domain.shapes)]
        find = self._find
        specs = self.codomain.specs
        return call_python(lambda *parts: find().apply(parts), parts, specs)

    def apply_flat(self, flat: tf.Tensor) -> tf.Tensor:
        """Multiply by a flat vector."""
        flat, find = tf.ensure_shape(flat, [self.domain.size]), self._find
        spec = self.codomain.flat_spec
        return call_python(lambda flat: [find().apply_flat(flat)], [flat], [spec])[0]

    def apply_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by each row of a block."""
        find = self._find
        spec = tf.TensorSpec([rows.shape[0], self.codomain.size], self.codomain.dtype)
        return call_python(lambda rows: [find().apply_rows(rows)], [rows], [spec])[0]

    def transpose(self) -> LinearMap:
        """Return the transposed map, for which Python runs too."""
        find = self._find
        return PythonMap(lambda: find().transpose(), self.codomain, self.domain)
