"""Gradients of operations that read or write entries by indices that may occur twice.

Where an index is written twice, the last entry wins, and the gradients of the others are zero;
TensorFlow gives all of them the gradient of the result. Where it is read twice, the gradients add
up; TensorFlow takes one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.registry import TENSORFLOWS, gradient_of

raw = tf.raw_ops


@gradient_of("TensorListGather")
def _list_gather(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    handle, indices = operation.inputs[:2]
    count = raw.TensorListLength(input_handle=handle)
    rows = tf.math.unsorted_segment_sum(upstream, indices, count)
    again = raw.TensorListFromTensor(tensor=rows, element_shape=tf.shape(upstream)[1:])
    return again, None, None


def _list_scatter(kind: str, place: int) -> None:
    """Register the gradient of a scatter into a list, whose tensor is the input at `place`."""

    @gradient_of(kind)
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        gradients = list(TENSORFLOWS[kind](operation, upstream))
        indices = operation.inputs[place + 1]
        gradients[place] = _of_last(gradients[place], indices)
        return gradients


_list_scatter("TensorListScatter", 0)
_list_scatter("TensorListScatterV2", 0)
_list_scatter("TensorListScatterIntoExistingList", 1)


@gradient_of("DynamicStitch")
def _dynamic_stitch(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    count = len(operation.inputs) // 2
    indices = operation.inputs[:count]
    flat = [tf.reshape(i, [-1]) for i in indices]
    sizes = [tf.size(i) for i in flat]
    is_last = tf.split(_is_last(tf.concat(flat, 0)), sizes, num=count)

    def by_one(places: tf.Tensor, is_last: tf.Tensor) -> tf.Tensor:
        gathered = tf.gather(upstream, places)
        return _masked(gathered, tf.reshape(is_last, tf.shape(places)))

    return [None] * count + [by_one(*pair) for pair in zip(indices, is_last)]


@gradient_of("TensorScatterUpdate")
def _tensor_scatter_update(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    indices = operation.inputs[1]
    by_tensor, _, by_updates = TENSORFLOWS["TensorScatterUpdate"](operation, upstream)
    depth = tf.shape(indices)[-1]
    numbers = _numbers(tf.reshape(indices, [-1, depth]), tf.shape(upstream)[:depth])
    is_last = tf.reshape(_is_last(numbers), tf.shape(indices)[:-1])
    return by_tensor, None, _masked(by_updates, is_last)


@gradient_of("SparseToDense")
def _sparse_to_dense(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    indices, shape = operation.inputs[:2]
    if indices.shape.rank != 2:
        return TENSORFLOWS["SparseToDense"](operation, upstream)
    gathered = tf.gather_nd(upstream, indices)
    by_values = _of_last(gathered, _numbers(indices, shape))
    by_default = tf.reduce_sum(upstream) - tf.reduce_sum(by_values)
    return None, None, by_values, by_default


def _numbers(indices: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Return the row-major numbers of entries from the rows of their indices."""
    strides = tf.math.cumprod(tf.cast(shape, indices.dtype), exclusive=True, reverse=True)
    return tf.reduce_sum(indices * strides, axis=1)


def _is_last(numbers: tf.Tensor) -> tf.Tensor:
    """Whether a number does not occur again after this one."""
    distinct, places = tf.unique(numbers)
    order = tf.range(tf.size(numbers))
    last = tf.math.unsorted_segment_max(order, places, tf.size(distinct))
    return tf.equal(tf.gather(last, places), order)


def _of_last(gradients: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return _masked(gradients, _is_last(numbers))


def _masked(gradients: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Put zeros where a mask of the first axes is false."""
    more = tf.ones([tf.rank(gradients) - tf.rank(mask)], tf.int32)
    mask = tf.reshape(mask, tf.concat([tf.shape(mask), more], 0))
    return tf.where(mask, gradients, tf.zeros_like(gradients))
