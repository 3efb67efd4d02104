"""Statistics that are averaged over examples: Kronecker factors, their scales and exact blocks.

Each is a mean over the examples of one batch, so that its weighted mean over batches is the mean
over the data. Each function returns two: one returns the contribution of a backward pass, from the
gradients in the outputs of the layer's operations, and one returns the means, from the sum of these
contributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._kronecker.layers import Layer
from hvp._kronecker.traced_model import TracedModel

# The bytes of the gradients of single examples that are computed at once.
_BYTES = 2**26

Step = Callable[[Sequence[tf.Tensor]], tf.Tensor]
Statistic = tuple[Step, Callable[[tf.Tensor], list[tf.Tensor]]]


def _of_matrix(
    layer: Layer, traced: TracedModel, reduces: bool, dtype: tf.DType
) -> tuple[tf.Tensor, Step]:
    """Return the inputs of the matrices, and a function that arranges gradients like them.

    If `reduces`, inputs are averaged over positions and gradients summed before products are taken.
    """
    reduces = reduces and not layer.is_table
    # The mean of ones is one, whatever is reduced.
    parts = [
        (form.rows_with_ones if layer.has_bias else form.rows)(x, traced.examples)
        for form, x in zip(layer.forms, traced.graph.inputs(layer))
    ]
    rows = _grouped(tf.concat(parts, axis=2), layer)
    if not layer.is_table:
        rows = tf.cast(rows, dtype)
    if reduces:
        rows = tf.reduce_mean(rows, axis=2, keepdims=True)

    def columns(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the gradients in the outputs, of shape `(K, examples, T, O)`."""
        pairs = zip(layer.forms, gradients)
        parts = [tf.cast(form.columns(g, traced.examples), dtype) for form, g in pairs]
        whole = _grouped(tf.concat(parts, axis=2), layer)
        return tf.reduce_sum(whole, axis=2, keepdims=True) if reduces else whole

    return rows, columns


def factors(
    layer: Layer,
    traced: TracedModel,
    reduces: bool,
    dtype: tf.DType,
    full: tuple[bool, bool],
) -> Statistic:
    """Return the Kronecker factors `A` of the inputs and `G` of the gradients.

    `full` tells whether each of them is a matrix, or only its diagonal.
    """
    rows, columns = _of_matrix(layer, traced, reduces, dtype)

    def finish(total: tf.Tensor) -> list[tf.Tensor]:
        count = tf.cast(traced.examples, dtype)
        if layer.is_table:
            numbers = tf.reshape(rows, [-1])
            ones = tf.ones(tf.shape(numbers), dtype)
            size = layer.entries.shape[1]
            moment = tf.math.unsorted_segment_sum(ones, numbers, size)[tf.newaxis]
        else:
            moment = _second_moment(rows, full[0])
        return [moment / (count * tf.cast(tf.shape(rows)[2], dtype)), total / count]

    return lambda gradients: _second_moment(columns(gradients), full[1]), finish


def scales(layer: Layer, traced: TracedModel, dtype: tf.DType, bases: Sequence[Any]) -> Statistic:
    """Return the second moments of gradients along products of eigenvectors, for EK-FAC.

    The `bases` are the eigenvectors of `A` and of `G` as columns, or None for unit vectors.
    """
    # They are those of whole gradients of examples, whatever the factors are of.
    rows, columns = _of_matrix(layer, traced, False, dtype)
    rows = rows if layer.is_table else _rotated(rows, bases[0])
    has_one = rows.shape[2] == 1 and not layer.is_table

    def step(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        rotated = _rotated(columns(gradients), bases[1])
        if has_one:
            return rotated[:, :, 0] ** 2
        of_examples = _of_table if layer.is_table else _of_examples
        return of_examples(layer.entries.shape, rows, rotated, traced.examples)

    def finish(total: tf.Tensor) -> list[tf.Tensor]:
        if has_one:
            total = tf.matmul(rows[:, :, 0] ** 2, total, transpose_a=True)
        return [total / tf.cast(traced.examples, dtype)]

    return step, finish


def _of_examples(
    shape: Sequence[int], rows: tf.Tensor, columns: tf.Tensor, examples: Any
) -> tf.Tensor:
    """Sum the squares of the gradients of single examples, a limited number at a time."""
    at_once = max(1, _BYTES // (math.prod(shape) * columns.dtype.size))

    def squares(rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
        gradients = tf.matmul(rows, columns, transpose_a=True)
        return tf.reduce_sum(gradients**2, axis=1)

    static = columns.shape[1]
    if static is not None and static <= at_once:
        return squares(rows, columns)

    def body(start: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        end = start + at_once
        term = squares(rows[:, start:end], columns[:, start:end])
        return end, total + tf.ensure_shape(term, shape)

    start = tf.constant(0), tf.zeros(shape, columns.dtype)
    return tf.while_loop(lambda start, _: start < examples, body, start, parallel_iterations=1)[1]


def _of_table(
    shape: Sequence[int], rows: tf.Tensor, columns: tf.Tensor, examples: Any
) -> tf.Tensor:
    """Sum the gradients of the rows that each example looks up, and square the sums."""
    example = tf.range(tf.cast(examples, tf.int64), dtype=tf.int64)[:, tf.newaxis]
    keys, places = tf.unique(tf.reshape(example * shape[1] + rows[0], [-1]))
    flat = tf.reshape(columns, [-1, tf.shape(columns)[-1]])
    sums = tf.math.unsorted_segment_sum(flat, places, tf.size(keys))
    squares = tf.math.unsorted_segment_sum(sums**2, keys % shape[1], shape[1])
    return squares[tf.newaxis]


def exact_block(layer: Layer, traced: TracedModel, dtype: tf.DType, is_full: bool) -> Statistic:
    """Return the block of weights that act entry by entry, or its diagonal unless `is_full`."""
    size, inputs = layer.entries.size, traced.graph.inputs(layer)
    slopes = [
        tf.reshape(traced.graph.derivative(tensor, value), [size]) if tensor else None
        for tensor, value in layer.tensors
    ]

    def step(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        total: Any = None
        for form, data, gradient, slope in zip(layer.forms, inputs, gradients, slopes):
            if not form.output:
                continue
            rows = form.gradients(data, gradient, traced.examples)
            rows = tf.cast(rows if slope is None else rows * slope, dtype)
            total = rows if total is None else total + rows
        if total is None:
            return tf.zeros([1, size, size] if is_full else [1, size], dtype)
        return _second_moment(total[tf.newaxis, :, tf.newaxis], is_full)

    return step, lambda total: [total / tf.cast(traced.examples, dtype)]


def _grouped(rows: tf.Tensor, layer: Layer) -> tf.Tensor:
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
