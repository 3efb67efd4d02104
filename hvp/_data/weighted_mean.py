"""Weighted sums and means of values and gradients over batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._engines.graph_program import Results
from hvp._errors import HvpError
from hvp._vectors.space import Space


class WeightedMean:
    """Weighted sums of values and gradients over batches, and their means.

    Batches are added to the sums `sum_b w_b L_b`. Dividing turns these into the means
    `sum_b w_b L_b / sum_b w_b`.
    """

    def __init__(self, space: Space, dtype: tf.DType | None = None) -> None:
        self._value = tf.zeros([], tf.float64)
        self._gradient: list[Any] = [None] * len(space.dtypes)
        self._shapes = space.shapes
        self._dtypes = space.dtypes if dtype is None else [dtype] * len(space.dtypes)
        self._sum_dtype = dtype or space.dtype
        self._weight = 0.0

    def add(self, weight: float, results: Results) -> None:
        """Add the value and the gradient of a batch, times its weight."""
        self._value += weight * tf.cast(results.value, tf.float64)
        self._weight += weight
        for i, part in enumerate(results.gradient or ()):
            if part is not None:
                part = tf.cast(part, self._sum_dtype) * tf.constant(weight, self._sum_dtype)
                self._gradient[i] = part if self._gradient[i] is None else self._gradient[i] + part

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Shapes and types of `tensors`."""
        scalar = tf.TensorSpec([], tf.float64)
        return [scalar, scalar, *(tf.TensorSpec(s, self._sum_dtype) for s in self._shapes)]

    def tensors(self) -> list[tf.Tensor]:
        """Return the sums: of values, of weights and of the parts of gradients."""
        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in self.specs[2:]]
        parts = [zero if g is None else g for g, zero in zip(self._gradient, zeros)]
        return [self._value, tf.constant(self._weight, tf.float64), *parts]

    def replace(self, tensors: Sequence[tf.Tensor]) -> None:
        """Replace the sums, in the order of `tensors`."""
        self._value, weight, *parts = tensors
        self._weight = float(weight)
        pairs = zip(self._gradient, parts)
        self._gradient = [g if g is None else part for g, part in pairs]

    def divide(self) -> float:
        """Divide by the sum of the weights; return the factor `1 / sum_b w_b`."""
        if self._weight == 0:
            raise HvpError("the weights of all batches are zero", "at least one positive weight")
        scale = 1 / self._weight
        self._value *= scale
        self._gradient = [
            g if g is None else g * tf.constant(scale, g.dtype) for g in self._gradient
        ]
        return scale

    @property
    def gradient(self) -> list[Any]:
        """The gradient, cast to the dtypes of the variables."""
        pairs = zip(self._gradient, self._dtypes)
        return [g if g is None else tf.cast(g, dtype) for g, dtype in pairs]

    @property
    def results(self) -> Results:
        """The value and the gradient."""
        return Results(self._value, self.gradient)
