"""The forms in which gradients of training examples can be stored."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements
from hvp._errors import HvpError
from hvp._influence.example_gradients import ExampleGradients
from hvp._influence.factored_inverse import FactoredInverse
from hvp._influence.layer_gradients import LayerGradients, LayerParts, in_order

# The factors of a layer are kept if they take less than this part of its gradient.
_WORTH_IT = 0.5
# So many examples tell the sizes.
_SAMPLE = 2


class GradientForm(abc.ABC):
    """A form in which gradients are stored, as `width` numbers for each example.

    Gradients are computed for `at_once` examples at a time. The `name` tells the form from others
    in the description of a store.
    """

    width: int
    at_once: int
    name: str

    @abc.abstractmethod
    def rows(self, elements: Elements, first: int) -> np.ndarray:
        """Return what to store for examples, of shape `(k, width)`; errors count from `first`."""

    def restored(self, rows: np.ndarray) -> tf.Tensor:
        """Return vectors, one for each row, whose products with those of `matching` are scores."""
        return tf.constant(rows)

    def matching(self, solutions: np.ndarray) -> np.ndarray:
        """Return the vectors by which restored vectors are multiplied for scores."""
        return solutions

    @property
    def whitens(self) -> bool:
        """Whether rows depend on the inverse as well."""
        return False


class WholeGradients(GradientForm):
    """Gradients as they are."""

    def __init__(self, gradients: ExampleGradients) -> None:
        self._gradients = gradients
        self.width, self.at_once, self.name = gradients.size, gradients.at_once, "whole"

    def rows(self, elements: Elements, first: int) -> np.ndarray:
        return self._gradients.of_all(elements, "training example", first)


class ProjectedGradients(GradientForm):
    """Sparse random projections: each entry is added, with a random sign, to one of `width` sums.

    The product of two projected vectors is an unbiased estimate of their product `u . v`, whose
    standard error is at most ``|u| |v| sqrt(2 / width)`` (M. Charikar, K. Chen, M. Farach-Colton,
    "Finding frequent items in data streams", ICALP 2002, https://doi.org/10.1007/3-540-45465-9_59).
    If the square root of the inverse is known, gradients are multiplied by it first, so that their
    lengths differ less.
    """

    def __init__(self, gradients: ExampleGradients, inverse: Any, width: int) -> None:
        self._gradients, self._inverse = gradients, inverse
        self.width, self.at_once = width, gradients.at_once
        self.name = f"projections to {width} numbers, seed 0"
        random = np.random.default_rng(0)
        self._places = tf.constant(random.integers(0, width, gradients.size, dtype=np.int32))
        self._signs = random.integers(0, 2, gradients.size, dtype=np.int8) * 2 - 1

    @property
    def whitens(self) -> bool:
        return isinstance(self._inverse, FactoredInverse)

    def rows(self, elements: Elements, first: int) -> np.ndarray:
        rows = self._gradients.of_all(elements, "training example", first)
        return self._projected(self._inverse.whitened(rows) if self.whitens else rows)

    def matching(self, solutions: np.ndarray) -> np.ndarray:
        if self.whitens:
            solutions = self._inverse.whitened_solutions(solutions)
        return self._projected(solutions)

    def _projected(self, rows: np.ndarray) -> np.ndarray:
        signed = tf.transpose(tf.constant(rows * self._signs.astype(rows.dtype)))
        sums = tf.math.unsorted_segment_sum(signed, self._places, self.width)
        return tf.transpose(sums).numpy()


class FactoredGradients(GradientForm):
    """The inputs of layers and the gradients in their outputs, for layers where these are smaller.

    How large they are is known from `sample`; other layers keep their gradient.
    """

    def __init__(
        self, gradients: ExampleGradients, layers: LayerGradients, sample: Elements
    ) -> None:
        self._gradients, self._layers = gradients, layers
        found, (others, _) = layers.of(sample)
        # For each layer the shapes of its parts; None where the gradient is kept.
        self._shapes = [_shapes_if_worth_it(layer, parts) for layer, parts in found]
        self._parts = [layer for layer, _ in found]
        self._entries = [*(layer.entries for layer in self._parts), others]
        self._widths = [
            layer.entries.size if shapes is None else sum(map(_size, shapes))
            for layer, shapes in zip(self._parts, self._shapes)
        ] + [len(others)]
        self.width, self.at_once = sum(self._widths), layers.at_once(sample)
        kept = [width for width, shapes in zip(self._widths, self._shapes) if shapes is not None]
        self.name = f"factors of {len(kept)} layers, {sum(kept)} numbers"

    @property
    def is_worth_it(self) -> bool:
        """Whether fewer numbers are stored than for whole gradients."""
        return any(shapes is not None for shapes in self._shapes)

    def rows(self, elements: Elements, first: int) -> np.ndarray:
        blocks = []
        for start in range(0, elements.examples, self.at_once):
            part = elements.part(start, min(start + self.at_once, elements.examples))
            blocks.append(self._encoded(part))
        rows = np.concatenate(blocks)
        self._gradients.check_finite(rows, "training example", first)
        return rows

    def restored(self, rows: np.ndarray) -> tf.Tensor:
        pieces = tf.split(tf.constant(rows), self._widths, axis=1)
        gradients = [
            piece if shapes is None else layer.gradient(_unpack(piece, shapes))
            for piece, layer, shapes in zip(pieces, self._parts, self._shapes)
        ]
        return in_order(self._entries, [*gradients, pieces[-1]])

    def _encoded(self, elements: Elements) -> np.ndarray:
        found, (_, rest) = self._layers.of(elements)
        blocks = []
        for (layer, parts), shapes in zip(found, self._shapes):
            if shapes is None:
                blocks.append(layer.gradient(parts))
                continue
            if [list(part.shape[1:]) for part in parts] != shapes:
                raise HvpError(
                    "the training examples are not all of one shape, and their gradients are kept "
                    "as factors of layers, which depend on it",
                    "examples of one shape",
                    "pad them to one length, or pass projection=",
                )
            blocks += [tf.reshape(part, [elements.examples, -1]) for part in parts]
        return tf.concat([*blocks, rest], axis=1).numpy()


def gradient_form(
    gradients: ExampleGradients, inverse: Any, projection: int | None, sample: Elements
) -> GradientForm:
    """Return projections to so many numbers, if given, else factors where these are smaller."""
    if projection is not None:
        return ProjectedGradients(gradients, inverse, projection)
    layers = gradients.by_layers(sample)
    sample = sample.part(0, min(_SAMPLE, sample.examples))
    if isinstance(layers, LayerGradients):
        factored = FactoredGradients(gradients, layers, sample)
        if factored.is_worth_it:
            return factored
    return WholeGradients(gradients)


def _shapes_if_worth_it(layer: LayerParts, parts: Sequence[tf.Tensor]) -> list[list[int]] | None:
    shapes = [list(part.shape[1:]) for part in parts]
    is_smaller = sum(map(_size, shapes)) < _WORTH_IT * layer.entries.size
    return shapes if is_smaller and layer.can_be_kept(parts[0].dtype) else None


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape))


def _unpack(rows: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    parts = tf.split(rows, [_size(shape) for shape in shapes], axis=1)
    return [tf.reshape(part, [-1, *shape]) for part, shape in zip(parts, shapes)]
