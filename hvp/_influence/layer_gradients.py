"""Gradients of single examples as sums over positions, from what enters each layer and comes out.

Where a layer multiplies what enters by a matrix, the gradient of an example is the sum of `a_t g_t`
over the positions `t`: `a_t` is what enters, and `g_t` the gradient in what comes out. For a few
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
from hvp._kronecker.layers import EntrywiseLayer, MatrixLayer
from hvp._runtime.interrupts import Uninterrupted
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

# Functions that are kept, each for one shape of examples, such as a length of sequences.
MOST_SHAPES = 16


class LayerParts(abc.ABC):
    """What the gradient of one layer's weights is made of.

    Attributes
    ----------
    entries : ndarray of int
        The places of the layer's weights in the flat vector, of shape `(size,)`.
    """

    entries: np.ndarray

    @abc.abstractmethod
    def traced(self, graph: LayeredGraph, gradients: Sequence[Any], examples: Any) -> list[Any]:
        """Return the parts, each with the examples along its first axis.

        Parameters
        ----------
        graph : LayeredGraph
            Where the layer is.
        gradients : sequence of tf.Tensor
            The gradients in what comes out of its operations.
        examples : tf.Tensor
            Their number.
        """

    @abc.abstractmethod
    def gradient(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the gradients that they make, of shape `(examples, size)`."""

    @abc.abstractmethod
    def products(self, parts: Sequence[tf.Tensor], vector: tf.Tensor) -> list[tf.Tensor]:
        """Return the product of the gradients with a vector of shape `(size,)`, by positions.

        For each use of the weights there is a tensor of shape `(examples, positions)`.
        """

    def can_be_kept(self, dtype: tf.DType) -> bool:
        """Whether the parts are right in a dtype of real numbers."""
        return True


class MatrixParts(LayerParts):
    """What enters a matrix product, and the gradient in what comes out."""

    def __init__(self, layer: MatrixLayer) -> None:
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
    """The numbers of the rows that are looked up in a table, and the gradients in these rows."""

    def __init__(self, layer: MatrixLayer) -> None:
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

    def __init__(self, layer: EntrywiseLayer) -> None:
        self._layer, self.entries = layer, layer.entries

    def traced(self, graph: LayeredGraph, gradients: Sequence[Any], examples: Any) -> list[Any]:
        parts: list[Any] = []
        for (form, tensor, value), data, gradient in zip(
            self._layer.uses, graph.inputs(self._layer), gradients
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
        """Return the shapes in which the weights meet the parts."""
        shapes = []
        for part, (form, *_) in zip(parts, [use for use in self._layer.uses if use[0].output]):
            own = [self.entries.size] if len(part.shape) == 2 else list(form.shape)
            shapes.append([1] * (len(part.shape) - len(own)) + own)
        return shapes


def parts_of(layer: Any) -> LayerParts:
    """Return what the gradient of a layer is made of."""
    if isinstance(layer, EntrywiseLayer):
        return EntrywiseParts(layer)
    return TableParts(layer) if layer.is_table else MatrixParts(layer)


class LayerGradients:
    """The gradients of single examples, by the layers of a loss.

    Parameters
    ----------
    loss : callable
        Takes the elements of a batch, and returns the mean over the batch.
    nest : VariableNest
        The variables.
    space : Space
        The space of flat gradients.
    snapshot : Snapshot
        As for `ExampleGradients`.
    whole : callable
        Takes examples, and returns their gradients as rows, for weights that belong to no layer.
    nbytes : int
        Upper bound on the memory for parts of gradients.
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
        self._functions: dict[Any, tuple[Compiled, list[LayerParts], list[int]]] = {}

    def of(self, elements: Elements) -> tuple[list[tuple[LayerParts, list[tf.Tensor]]], Any]:
        """Return the layers with the parts of examples, and the gradient in the other weights.

        Returns
        -------
        layers : list of (LayerParts, list of tf.Tensor)
            What the gradients are made of.
        others : (ndarray of int, tf.Tensor)
            Places in the flat vector, and the entries of the gradients there.

        Raises
        ------
        HvpError
            If the layers cannot be found.
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
        """Return products of the gradients of `k` examples with vectors, by positions.

        Parameters
        ----------
        elements : Elements
            The examples.
        vectors : tf.Tensor
            The vectors as rows, of shape `(m, n)`.
        length : int
            The number of positions.

        Returns
        -------
        by_position : ndarray
            Those of layers with this number of positions, of shape `(m, k, length)`.
        rest : ndarray
            Of the others, of shape `(m, k)`.
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
        """Whether a layer has this number of positions."""
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
        specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in elements.tensors]
        key = tuple((tuple(spec.shape), spec.dtype) for spec in specs)
        if key in self._functions:
            return self._functions[key]
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

        with self._preserving():
            function = Compiled(of_examples, specs, False)
        self._functions[key] = function, layers, lengths
        if len(self._functions) > MOST_SHAPES:
            del self._functions[next(iter(self._functions))]
        return self._functions[key]

    @contextlib.contextmanager
    def _preserving(self) -> Iterator[None]:
        with Uninterrupted(), self._snapshot.preserving(), preserved_losses(self._nest.source):
            yield


def in_order(entries: Sequence[np.ndarray], parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Join parts of rows, in the order of the flat vector.

    Parameters
    ----------
    entries : sequence of ndarray of int
        The places of the entries of each part.
    parts : sequence of tf.Tensor
        Shape `(k, m)` each.
    """
    joined = tf.concat(parts, axis=1)
    order = np.argsort(np.concatenate(entries), kind="stable")
    return joined if (np.diff(order) == 1).all() else tf.gather(joined, order, axis=1)
