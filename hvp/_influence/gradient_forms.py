"""The forms in which gradients of training examples can be kept."""

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
from hvp._influence.projection import Projection

# The factors of a layer are kept if they take less than this part of its gradient.
_WORTH_IT = 0.5
# So many examples tell the sizes.
_SAMPLE = 2


class GradientForm(abc.ABC):
    """A form of gradients.

    Attributes
    ----------
    width : int
        How many numbers are kept of each gradient.
    at_once : int
        The number of examples to compute at once.
    name : str
        What distinguishes the form from others.
    """

    width: int
    at_once: int
    name: str

    @abc.abstractmethod
    def rows(self, elements: Elements, first: int) -> np.ndarray:
        """Compute what is kept of the gradients of examples, of shape `(k, width)`.

        Parameters
        ----------
        elements : Elements
            The examples.
        first : int
            Number of the first one, for error messages.
        """

    def restored(self, rows: np.ndarray) -> tf.Tensor:
        """Return the vectors that scores are products with, one for each row."""
        return tf.constant(rows)

    def matching(self, solutions: np.ndarray) -> np.ndarray:
        """Return what the restored vectors are to be multiplied by for scores."""
        return solutions

    @property
    def whitens(self) -> bool:
        """Whether rows depend on the matrix, too."""
        return False


class WholeGradients(GradientForm):
    """Gradients as they are."""

    def __init__(self, gradients: ExampleGradients) -> None:
        self._gradients = gradients
        self.width, self.at_once, self.name = gradients.size, gradients.at_once, "whole"

    def rows(self, elements: Elements, first: int) -> np.ndarray:
        return self._gradients.of_all(elements, "training example", first)


class ProjectedGradients(GradientForm):
    """Random projections of gradients.

    The error of a projection grows with the lengths of vectors. If the root of the inverse is
    known, gradients are multiplied by it before, so that their lengths differ less.
    """

    def __init__(self, gradients: ExampleGradients, inverse: Any, projection: Projection) -> None:
        self._gradients, self._inverse, self._projection = gradients, inverse, projection
        self.width, self.at_once = projection.size, gradients.at_once
        self.name = f"projections to {projection.size} numbers, seed {projection.seed}"

    @property
    def whitens(self) -> bool:
        return isinstance(self._inverse, FactoredInverse)

    def rows(self, elements: Elements, first: int) -> np.ndarray:
        rows = self._gradients.of_all(elements, "training example", first)
        return self._projection.apply(self._inverse.whitened(rows) if self.whitens else rows)

    def matching(self, solutions: np.ndarray) -> np.ndarray:
        if self.whitens:
            solutions = self._inverse.whitened_solutions(solutions)
        return self._projection.apply(solutions)


class FactoredGradients(GradientForm):
    """What enters the layers and the gradients in what comes out, where these are smaller.

    Parameters
    ----------
    gradients : ExampleGradients
        The gradients.
    layers : LayerGradients
        The same by layers.
    sample : Elements
        Some examples, from which the sizes are known.
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
        """Whether less is kept than whole gradients."""
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
    gradients: ExampleGradients, inverse: Any, projection: Projection | None, sample: Elements
) -> GradientForm:
    """Return the form in which to keep gradients.

    Parameters
    ----------
    gradients : ExampleGradients
        The gradients.
    inverse : DampedInverse or FactoredInverse
        What they are multiplied by for scores.
    projection : Projection or None
        What the user wants them to be multiplied by.
    sample : Elements
        Some examples.
    """
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
