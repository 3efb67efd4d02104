"""Gradients of single examples as sums over the positions to which a layer is applied.

Where a layer multiplies its input by a matrix, the gradient of an example is the sum of `a_t g_t`
over the positions `t`, where `a_t` is the input and `g_t` the gradient in the output. For a few
positions these take much less space than the gradient, and each position has its own part of it.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements
from hvp._graphs.compiled import Compiled
from hvp._keras.losses import preserved_losses
from hvp._keras.unrolled import unrolled
from hvp._kronecker.layered_graph import LayeredGraph
from hvp._kronecker.layers import Layer
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.recent import Recent
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

# Functions that are kept, each for one shape of examples, such as a length of sequences.
MOST_SHAPES = 16


class LayerParts(abc.ABC):
    """The parts that make up the gradient of one layer's weights.

    The weights are at the indices `entries` of the flat vector, of shape `(size,)`.
    """

    entries: np.ndarray

    @abc.abstractmethod
    def traced(self, graph: LayeredGraph, gradients: Sequence[Any], examples: Any) -> list[Any]:
        """Return the parts, each with the examples along its first axis.

        The `gradients` are those in the outputs of the layer's operations in `graph`, and
        `examples` is the number of examples, as a tensor.
        """

    @abc.abstractmethod
    def gradient(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the gradients from their parts, of shape `(examples, size)`."""

    @abc.abstractmethod
    def products(self, parts: Sequence[tf.Tensor], vector: tf.Tensor) -> list[tf.Tensor]:
        """Return the products of the gradients with a vector of shape `(size,)`, by positions.

        Each use of the weights has its own tensor, of shape `(examples, positions)`.
        """

    def can_be_kept(self, dtype: tf.DType) -> bool:
        """Whether the floating-point type `dtype` represents the parts exactly."""
        return True


class MatrixParts(LayerParts):
    """The input of a matrix product, and the gradient in its output."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.entries = layer.entries.reshape(-1)

    def traced(self, graph: LayeredGraph, gradients: Sequence[Any], examples: Any) -> list[Any]:
        parts: list[Any] = []
        for form, data, gradient in zip(self._layer.forms, graph.inputs(self._layer), gradients):
            rows, columns = form.rows(data, examples), form.columns(gradient, examples)
            parts += [tf.transpose(x, [1, 0, 2, 3]) for x in (rows, columns)]
        return parts

    def gradient(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        total: Any = None
        for rows, columns in self._pairs(parts):
            term = tf.matmul(rows, columns, transpose_a=True)
            total = term if total is None else total + term
        return tf.reshape(total, [-1, self.entries.size])

    def products(self, parts: Sequence[tf.Tensor], vector: tf.Tensor) -> list[tf.Tensor]:
        matrices = tf.reshape(vector, self._layer.entries.shape)
        # `tf.matmul` may crash for these shapes: see `hvp._graphs.vectorized`.
        return [
            tf.reduce_sum(tf.einsum("ngti,gio->ngto", rows, matrices) * columns, axis=[1, 3])
            for rows, columns in self._pairs(parts)
        ]

    def _pairs(self, parts: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        pairs = list(zip(parts[::2], parts[1::2]))
        if not self._layer.has_bias:
            return pairs
        return [(tf.concat([a, tf.ones_like(a[..., :1])], axis=-1), g) for a, g in pairs]


class TableParts(LayerParts):
    """The indices that are looked up in a table, and the gradients in the rows found there."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.entries = layer.entries.reshape(-1)
        _, self._size, self._width = layer.entries.shape

    def traced(self, graph: LayeredGraph, gradients: Sequence[Any], examples: Any) -> list[Any]:
        parts: list[Any] = []
        for form, data, gradient in zip(self._layer.forms, graph.inputs(self._layer), gradients):
            parts += [form.rows(data, examples)[0], form.columns(gradient, examples)[0]]
        return parts

    def gradient(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        total: Any = None
        for numbers, columns in zip(parts[::2], parts[1::2]):
            examples = tf.shape(numbers, tf.int64)[0]
            places = tf.cast(numbers, tf.int64) + self._size * tf.range(examples)[:, tf.newaxis]
            term = tf.math.unsorted_segment_sum(columns, places, examples * self._size)
            total = term if total is None else total + term
        return tf.reshape(total, [-1, self.entries.size])

    def products(self, parts: Sequence[tf.Tensor], vector: tf.Tensor) -> list[tf.Tensor]:
        table = tf.reshape(vector, [self._size, self._width])
        return [
            tf.reduce_sum(tf.gather(table, tf.cast(numbers, tf.int64)) * columns, axis=2)
            for numbers, columns in zip(parts[::2], parts[1::2])
        ]

    def can_be_kept(self, dtype: tf.DType) -> bool:
        return self._size <= 2 ** (np.finfo(dtype.as_numpy_dtype).nmant + 1)


class EntrywiseParts(LayerParts):
    """Products with weights that act entry by entry, before they are summed over positions."""

    def __init__(self, layer: Layer) -> None:
        self._layer, self.entries = layer, layer.entries

    def traced(self, graph: LayeredGraph, gradients: Sequence[Any], examples: Any) -> list[Any]:
        parts: list[Any] = []
        for form, (tensor, value), data, gradient in zip(
            self._layer.forms, self._layer.tensors, graph.inputs(self._layer), gradients
        ):
            if tensor:
                slope = tf.reshape(graph.derivative(tensor, value), [self.entries.size])
                parts.append(form.gradients(data, gradient, examples) * slope)
            elif form.output:
                product = form.products(data, gradient)
                # The examples may share their axis with positions.
                shape = tf.concat([[examples, -1], tf.shape(product)[1:]], axis=0)
                parts.append(tf.reshape(product, shape))
        return parts

    def gradient(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        total: Any = 0.0
        for part, shape in zip(parts, self._shapes(parts)):
            axes = [axis for axis in range(1, len(shape)) if shape[axis] == 1]
            total += tf.reshape(tf.reduce_sum(part, axis=axes), [-1, self.entries.size])
        return total

    def products(self, parts: Sequence[tf.Tensor], vector: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for part, shape in zip(parts, self._shapes(parts)):
            product = part * tf.reshape(vector, shape)
            if len(shape) == 2:  # summed over positions already
                product = product[:, tf.newaxis]
            elif len(shape) > 3 and part.shape[1] == 1:
                product = tf.squeeze(product, axis=1)
            found.append(tf.reduce_sum(product, axis=list(range(2, len(product.shape)))))
        return found

    def _shapes(self, parts: Sequence[tf.Tensor]) -> list[list[int]]:
        """Return for each part the shape to which the weights are reshaped to match it."""
        shapes = []
        for part, form in zip(parts, [form for form in self._layer.forms if form.output]):
            own = [self.entries.size] if len(part.shape) == 2 else list(form.shape)
            shapes.append([1] * (len(part.shape) - len(own)) + own)
        return shapes


def parts_of(layer: Any) -> LayerParts:
    """Return the parts that make up the gradient of a layer."""
    if layer.is_entrywise:
        return EntrywiseParts(layer)
    return TableParts(layer) if layer.is_table else MatrixParts(layer)


class LayerGradients:
    """The gradients of single examples, by the layers of a loss.

    The `loss` and the `snapshot` are as for `ExampleGradients`. `whole` takes examples and returns
    their gradients as rows, for weights that belong to no layer. Parts of gradients take at most
    `nbytes` bytes.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        nest: VariableNest,
        space: Space,
        snapshot: Snapshot,
        whole: Callable[[Elements], np.ndarray],
        nbytes: int,
    ) -> None:
        self._loss, self._nest, self._space = loss, nest, space
        self._snapshot, self._whole, self._nbytes = snapshot, whole, nbytes
        self._functions = Recent(MOST_SHAPES)

    def of(self, elements: Elements) -> tuple[list[tuple[LayerParts, list[tf.Tensor]]], Any]:
        """Return the layers with their parts at `elements`, and the gradient in all other weights.

        The latter is a pair of indices into the flat vector and the entries there. An `HvpError` is
        raised if the layers cannot be found.
        """
        function, layers, lengths = self._function(elements)
        with self._snapshot.preserving():
            flat = list(function(*elements.tensors))
        found = []
        for layer, length in zip(layers, lengths):
            found.append((layer, flat[:length]))
            flat = flat[length:]
        covered = np.zeros(self._space.size, bool)
        for layer in layers:
            covered[layer.entries] = True
        others = np.flatnonzero(~covered)
        if not len(others):
            return found, (others, tf.zeros([elements.examples, 0], self._space.dtype))
        return found, (others, tf.constant(self._whole(elements)[:, others]))

    def rows(self, elements: Elements) -> tf.Tensor:
        """Return the gradients of examples, of shape `(k, n)`."""
        layers, (others, rest) = self.of(elements)
        gradients = [layer.gradient(parts) for layer, parts in layers]
        return in_order([*(layer.entries for layer, _ in layers), others], [*gradients, rest])

    def products(
        self, elements: Elements, vectors: tf.Tensor, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return products of the gradients of `k` examples with rows of `vectors`, by positions.

        The first array, of shape `(m, k, length)`, is the sum over layers with `length` positions;
        the second, of shape `(m, k)`, is the sum over all other weights.
        """
        layers, (others, gradients) = self.of(elements)
        tokens, rest = [], []
        for vector in vectors:
            by_position: Any = tf.zeros([elements.examples, length], vector.dtype)
            unpositioned = tf.linalg.matvec(gradients, tf.gather(vector, others))
            for layer, parts in layers:
                for product in layer.products(parts, tf.gather(vector, layer.entries)):
                    if product.shape[1] == length:
                        by_position += product
                    else:
                        unpositioned += tf.reduce_sum(product, axis=1)
            tokens.append(by_position)
            rest.append(unpositioned)
        return tf.stack(tokens).numpy(), tf.stack(rest).numpy()

    def has_positions(self, elements: Elements, length: int) -> bool:
        """Whether any layer has `length` positions."""
        zeros = tf.zeros([self._space.size], self._space.dtype)
        return any(
            product.shape[1] == length
            for layer, parts in self.of(elements)[0]
            for product in layer.products(parts, tf.gather(zeros, layer.entries))
        )

    def at_once(self, sample: Elements) -> int:
        """Return how many examples like these to compute at once."""
        layers, _ = self.of(sample)
        parts = sum(int(np.prod(part.shape)) for _, several in layers for part in several)
        numbers = parts // sample.examples + self._space.size
        return max(1, self._nbytes // (numbers * self._space.dtype.size))

    def _function(self, elements: Elements) -> tuple[Compiled, list[LayerParts], list[int]]:
        specs = elements.specs_of_any_number
        layers: list[LayerParts] = []
        lengths: list[int] = []

        def of_examples(*tensors: tf.Tensor) -> list[tf.Tensor]:
            data = [tf.identity(tensor) for tensor in tensors]
            with unrolled(self._nest.source):
                value = elements.with_tensors(data).call(self._loss)
            graph = LayeredGraph.of(self._nest, data, [tf.identity(value)])
            gradients = graph.leave_out_unconnected(graph.gradients())
            examples = tf.shape(data[0])[0]
            found: list[tf.Tensor] = []
            layers.clear()
            lengths.clear()
            for layer, own in zip(graph.layers, gradients):
                if not any(gradient is not None for gradient in own):
                    continue  # the loss does not depend on these weights
                # The loss is the mean over the examples.
                own = [None if g is None else g * tf.cast(examples, g.dtype) for g in own]
                parts = parts_of(layer).traced(graph, own, examples)
                layers.append(parts_of(layer))
                lengths.append(len(parts))
                found += [tf.cast(part, self._space.dtype) for part in parts]
            return found

        def compiled() -> tuple[Compiled, list[LayerParts], list[int]]:
            with self._preserving():
                return Compiled(of_examples, specs, False), layers, lengths

        return self._functions.get_or_make(tuple(specs), compiled)

    @contextlib.contextmanager
    def _preserving(self) -> Iterator[None]:
        with Uninterrupted(), self._snapshot.preserving(), preserved_losses(self._nest.source):
            yield


def in_order(entries: Sequence[np.ndarray], parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Join parts of rows in the order of the flat vector, given the indices of their entries."""
    joined = tf.concat(parts, axis=1)
    order = np.argsort(np.concatenate(entries), kind="stable")
    return joined if (np.diff(order) == 1).all() else tf.gather(joined, order, axis=1)
