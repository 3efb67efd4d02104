"""Rules that evaluate statistics of layers in place of a gradient.

A rule's gradient is averaged over batches, devices and pieces of batches, with memory limits, data
checks and progress bars. These rules return statistics instead: the variables that they are
"differentiated" with respect to have the shapes of the statistics, and are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._engines.prediction_rule import PredictionRule
from hvp._engines.rule import Evaluated, Parts, Rule
from hvp._errors import HvpError
from hvp._keras.unrolled import unrolled
from hvp._kronecker.layers import Layer
from hvp._kronecker.statistics import Statistic, exact_block, factors, scales
from hvp._kronecker.traced_model import TracedModel
from hvp._vectors.variables import VariableNest


@dataclass(frozen=True)
class Arrangement:
    """Which statistics of each layer are stored.

    Kronecker factors with more than `largest` rows and exact blocks with more than `largest_exact`
    rows are stored as diagonals. If `reduces`, positions that share weights are reduced before
    products are taken.
    """

    reduces: bool
    largest: int
    largest_exact: int
    dtype: tf.DType

    def full(self, layer: Layer) -> tuple[bool, bool]:
        """Return whether each factor of a layer is stored as a full matrix."""
        _, size, width = layer.entries.shape
        return size <= self.largest and not layer.is_table, width <= self.largest

    def is_exact(self, layer: Layer) -> bool:
        """Whether the block of a layer is stored as a full matrix."""
        return layer.entries.size <= self.largest_exact

    def shapes(self, layer: Layer) -> list[tuple[int, ...]]:
        """Return the shapes of the statistics of a layer."""
        if layer.is_entrywise:
            size = layer.entries.size
            return [(1, size, size) if self.is_exact(layer) else (1, size)]
        groups, *sizes = layer.entries.shape
        pairs = zip(sizes, self.full(layer))
        return [(groups, size, size) if full else (groups, size) for size, full in pairs]


@dataclass(frozen=True)
class StatisticsRule(Rule):
    """The Kronecker factors and exact blocks of all layers.

    They approximate the matrix of the rule `matrix`. The `source` has the models and layers that
    may be recurrent, and `signs` is as for `roots`. If there are `bases`, the second moments of
    gradients along these are evaluated instead: for each layer the pair of its factors'
    eigenvectors, where None stands for unit vectors, or None if the layer has an exact block.
    """

    matrix: PredictionRule
    nest: VariableNest
    arrangement: Arrangement
    source: Any
    signs: int
    bases: Sequence[Any] | None = None
    needs_graph = True

    @property
    def evaluates(self) -> str:  # type: ignore[override]
        """What is evaluated, for messages."""
        return "the Kronecker factors" if self.bases is None else "the scales of the eigenvectors"

    def evaluate(self, variables: Sequence[tf.Variable], batch: Any) -> Evaluated:
        traced = self.traced(batch)
        self._refuse_others(traced.graph.layers, variables)
        own = [self.statistic(*pair, traced) for pair in enumerate(traced.graph.layers)]
        statistics = [(place, *pair) for place, pair in enumerate(own) if pair is not None]

        def step(gradients: list[list[Any]]) -> list[tf.Tensor]:
            return [take(gradients[place]) for place, take, _ in statistics]

        sums = traced.backward(step)
        pairs = zip(statistics, sums)
        parts: Parts = [mean for (_, _, finish), total in pairs for mean in finish(total)]
        return Evaluated(traced.output.taped.value, parts, None)

    def _refuse_others(self, layers: Sequence[Layer], variables: Sequence[tf.Variable]) -> None:
        """Refuse a batch whose graph has other layers than the graph of the first batch."""
        found = [shape for place, layer in enumerate(layers) for shape in self.shapes(place, layer)]
        if found != [tuple(variable.shape) for variable in variables]:
            raise HvpError(
                "the layers of the model are not the same in all batches",
                "batches that differ only in their number of examples, or in the length of an axis",
                "pad the data to a common length",
            )

    def shapes(self, place: int, layer: Layer) -> list[tuple[int, ...]]:
        """Return the shapes of the statistics of a layer."""
        if self.bases is None:
            return self.arrangement.shapes(layer)
        known = place < len(self.bases) and self.bases[place] is not None
        return [layer.entries.shape] if known else []

    def weights(self, variables: Sequence[tf.Variable]) -> Sequence[tf.Variable]:
        """Return the weights of the model, not the variables that stand for the statistics."""
        return self.nest.variables

    def traced(self, batch: Any, *, backward: bool = True) -> TracedModel:
        """Trace the model into the current graph."""
        with unrolled(self.source):
            return TracedModel.of(self.matrix, self.nest, batch, self.signs, backward=backward)

    def statistic(self, place: int, layer: Layer, traced: TracedModel) -> Statistic | None:
        """Return the statistic of a layer, or None if it has none."""
        how, dtype = self.arrangement, self.arrangement.dtype
        if self.bases is not None:
            bases = self.bases[place]
            return None if bases is None else scales(layer, traced, dtype, bases)
        if layer.is_entrywise:
            return exact_block(layer, traced, dtype, how.is_exact(layer))
        return factors(layer, traced, how.reduces, dtype, how.full(layer))

    def multiply(self, state: Any, vector: Parts) -> Parts:
        """Raise an error: statistics are not linear in anything, and have no product."""
        raise NotImplementedError
