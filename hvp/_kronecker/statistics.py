"""Statistics that are averaged over examples: Kronecker factors, their scales and exact blocks.

Each is a mean over the examples of one batch, so that its weighted mean over batches is the mean
over the data.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._kronecker.layers import EntrywiseLayer, MatrixLayer
from hvp._kronecker.traced_model import TracedModel

# The bytes of the gradients of single examples that are computed at once.
_BYTES = 2**26


class Statistic(abc.ABC):
    """The means of one layer, computed from a batch.

    Call `start` once, `step` for each backward pass, and `finish` with the sums of what the steps
    returned.
    """

    @abc.abstractmethod
    def start(self, traced: TracedModel, inputs: Sequence[Sequence[tf.Tensor]]) -> None:
        """Take the inputs of the layer."""

    @abc.abstractmethod
    def step(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the contribution of one backward pass."""

    def finish(self, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the means."""
        return sums


class _OfMatrix(Statistic):
    """Shared by the statistics of matrices; the means have the type `dtype`.

    If `reduces`, inputs are averaged over positions and gradients summed before products are taken.
    """

    def __init__(self, layer: MatrixLayer, reduces: bool, dtype: tf.DType) -> None:
        self._layer, self._dtype = layer, dtype
        self._reduces = reduces and not layer.is_table

    def start(self, traced: TracedModel, inputs: Sequence[Sequence[tf.Tensor]]) -> None:
        self._examples = traced.examples
        self._count = tf.cast(traced.examples, self._dtype)
        # The mean of ones is one, whatever is reduced.
        rows = [
            (form.rows_with_ones if self._layer.has_bias else form.rows)(x, self._examples)
            for form, x in zip(self._layer.forms, inputs)
        ]
        self._rows = rows[0] if len(rows) == 1 else tf.concat(rows, axis=2)
        self._rows = _grouped(self._rows, self._layer)
        self._positions = tf.cast(tf.shape(self._rows)[2], self._dtype)
        if self._layer.is_table:
            return
        self._rows = tf.cast(self._rows, self._dtype)
        if self._reduces:
            self._rows = tf.reduce_mean(self._rows, axis=2, keepdims=True)
            self._positions = tf.ones([], self._dtype)

    def columns(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the gradients in the outputs, of shape `(K, examples, T, O)`."""
        pairs = zip(self._layer.forms, gradients)
        columns = [tf.cast(form.columns(g, self._examples), self._dtype) for form, g in pairs]
        whole = columns[0] if len(columns) == 1 else tf.concat(columns, axis=2)
        whole = _grouped(whole, self._layer)
        return tf.reduce_sum(whole, axis=2, keepdims=True) if self._reduces else whole


class FactorStatistic(_OfMatrix):
    """The Kronecker factors `A` of the inputs and `G` of the gradients.

    `full` tells whether each of them is a matrix, or only its diagonal.
    """

    def __init__(
        self, layer: MatrixLayer, reduces: bool, dtype: tf.DType, full: tuple[bool, bool]
    ) -> None:
        super().__init__(layer, reduces, dtype)
        self._full = full

    def step(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [_second_moment(self.columns(gradients), self._full[1])]

    def finish(self, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        if self._layer.is_table:
            numbers = tf.reshape(self._rows, [-1])
            size = self._layer.entries.shape[1]
            ones = tf.ones(tf.shape(numbers), self._dtype)
            moment = tf.math.unsorted_segment_sum(ones, numbers, size)[tf.newaxis]
        else:
            moment = _second_moment(self._rows, self._full[0])
        return [moment / (self._count * self._positions), sums[0] / self._count]


class ScaleStatistic(_OfMatrix):
    """The second moments of gradients along products of eigenvectors, as EK-FAC needs them.

    The `bases` are the eigenvectors of `A` and of `G` as columns, or None for unit vectors.
    """

    def __init__(
        self, layer: MatrixLayer, reduces: bool, dtype: tf.DType, bases: Sequence[Any]
    ) -> None:
        super().__init__(layer, reduces, dtype)
        self._bases = bases

    def start(self, traced: TracedModel, inputs: Sequence[Sequence[tf.Tensor]]) -> None:
        super().start(traced, inputs)
        if not self._layer.is_table:
            self._rows = _rotated(self._rows, self._bases[0])
        self._has_one = self._rows.shape[2] == 1 and not self._layer.is_table

    def step(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        columns = _rotated(self.columns(gradients), self._bases[1])
        if self._has_one:
            return [columns[:, :, 0] ** 2]
        if self._layer.is_table:
            return [self._of_table(columns)]
        return [self._of_examples(columns)]

    def finish(self, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        total = sums[0]
        if self._has_one:
            total = tf.matmul(self._rows[:, :, 0] ** 2, total, transpose_a=True)
        return [total / self._count]

    def _of_examples(self, columns: tf.Tensor) -> tf.Tensor:
        """Sum the squares of the gradients of single examples, a limited number at a time."""
        groups, size, width = self._layer.entries.shape
        shape = groups, size, width
        at_once = max(1, _BYTES // (groups * size * width * self._dtype.size))

        def squares(rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
            gradients = tf.matmul(rows, columns, transpose_a=True)
            return tf.reduce_sum(gradients**2, axis=1)

        static = columns.shape[1]
        if static is not None and static <= at_once:
            return squares(self._rows, columns)

        def body(start: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            end = start + at_once
            term = squares(self._rows[:, start:end], columns[:, start:end])
            return end, total + tf.ensure_shape(term, shape)

        start = tf.constant(0), tf.zeros(shape, self._dtype)
        return tf.while_loop(
            lambda start, _: start < self._examples, body, start, parallel_iterations=1
        )[1]

    def _of_table(self, columns: tf.Tensor) -> tf.Tensor:
        """Sum the gradients of the rows that each example looks up, and square the sums."""
        size = self._layer.entries.shape[1]
        example = tf.range(tf.cast(self._examples, tf.int64), dtype=tf.int64)[:, tf.newaxis]
        keys, places = tf.unique(tf.reshape(example * size + self._rows[0], [-1]))
        flat = tf.reshape(columns, [-1, tf.shape(columns)[-1]])
        sums = tf.math.unsorted_segment_sum(flat, places, tf.size(keys))
        squares = tf.math.unsorted_segment_sum(sums**2, keys % size, size)
        return squares[tf.newaxis]


class ExactBlock(Statistic):
    """The block of weights that act entry by entry, or its diagonal unless `is_full`."""

    def __init__(self, layer: EntrywiseLayer, dtype: tf.DType, is_full: bool) -> None:
        self._layer, self._dtype, self._is_full = layer, dtype, is_full

    def start(self, traced: TracedModel, inputs: Sequence[Sequence[tf.Tensor]]) -> None:
        self._examples, self._inputs = traced.examples, inputs
        size = self._layer.entries.size
        self._slopes = [
            tf.reshape(traced.graph.derivative(tensor, value), [size]) if tensor else None
            for _, tensor, value in self._layer.uses
        ]

    def step(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        total: Any = None
        for (form, *_), data, gradient, slope in zip(
            self._layer.uses, self._inputs, gradients, self._slopes
        ):
            if not form.output:
                continue
            rows = form.gradients(data, gradient, self._examples)
            rows = tf.cast(rows if slope is None else rows * slope, self._dtype)
            total = rows if total is None else total + rows
        size = self._layer.entries.size
        if total is None:
            shape = [1, size, size] if self._is_full else [1, size]
            return [tf.zeros(shape, self._dtype)]
        return [_second_moment(total[tf.newaxis, :, tf.newaxis], self._is_full)]

    def finish(self, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        return [sums[0] / tf.cast(self._examples, self._dtype)]


def _grouped(rows: tf.Tensor, layer: MatrixLayer) -> tf.Tensor:
    """Declare the number of groups, which a computed shape hides."""
    shape = [layer.entries.shape[0], *[None] * (len(rows.shape) - 1)]
    return tf.ensure_shape(rows, shape)


def _second_moment(rows: tf.Tensor, is_full: bool) -> tf.Tensor:
    """Sum `r r^T`, or its diagonal, over the rows of `(K, N, T, d)`."""
    groups, width = rows.shape[0], tf.shape(rows)[-1]
    flat = tf.reshape(rows, [tf.shape(rows)[0], -1, width])
    if not is_full:
        return tf.reduce_sum(flat**2, axis=1)
    if groups == 1:  # TensorFlow's product of two matrices is faster than that of many
        return tf.matmul(flat[0], flat[0], transpose_a=True)[tf.newaxis]
    return tf.matmul(flat, flat, transpose_a=True)


def _rotated(rows: tf.Tensor, basis: Any) -> tf.Tensor:
    """Multiply rows of `(K, N, T, d)` by the basis of each group."""
    if basis is None:
        return rows
    shape = tf.shape(rows)
    if rows.shape[0] == 1:
        flat = tf.matmul(tf.reshape(rows, [-1, shape[-1]]), basis[0])
        return tf.reshape(flat, tf.concat([shape[:-1], [basis.shape[-1]]], 0))
    flat = tf.matmul(tf.reshape(rows, [shape[0], -1, shape[-1]]), basis)
    return tf.reshape(flat, shape)
