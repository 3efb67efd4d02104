"""Gradients that TensorFlow has but that are wrong, or raise an error, in some cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.registry import gradient_of

raw = tf.raw_ops


@gradient_of("TanhGrad")
def _tanh_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # The gradient of dy (1 - y**2). TensorFlow's own multiplies the upstream gradient by a Python
    # number, which fails for `tf.IndexedSlices`.
    y, dy = (tf.math.conj(tensor) for tensor in operation.inputs)
    return -2.0 * upstream * dy * y, raw.TanhGrad(y=y, dy=upstream)


@gradient_of("SegmentMean")
def _segment_mean(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # For a segment without rows TensorFlow divides by zero, which makes second derivatives NaN.
    data, segments = operation.inputs
    counts = tf.math.segment_sum(tf.ones_like(segments, upstream.dtype), segments)
    shape = tf.concat([tf.shape(counts), tf.ones([tf.rank(data) - 1], tf.int32)], 0)
    return tf.gather(upstream / tf.reshape(tf.maximum(counts, 1), shape), segments), None


@gradient_of("SegmentMin", "SegmentMax")
def _segment_extreme(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # The gradient of a segment is divided equally among the entries that are the extreme.
    data, segments = operation.inputs
    chosen = tf.equal(data, tf.gather(operation.outputs[0], segments))
    counts = tf.math.segment_sum(tf.cast(chosen, upstream.dtype), segments)
    shares = tf.gather(upstream / tf.maximum(counts, 1), segments)
    return tf.where(chosen, shares, tf.zeros_like(shares)), None


@gradient_of("UnsortedSegmentMin", "UnsortedSegmentMax")
def _unsorted_segment_extreme(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # Rows with a negative segment do not take part.
    data, segments, count = operation.inputs
    inside = segments >= 0
    places = tf.maximum(segments, 0)
    more = tf.ones([tf.rank(data) - tf.rank(segments)], tf.int32)
    inside = tf.reshape(inside, tf.concat([tf.shape(segments), more], 0))
    chosen = tf.equal(data, tf.gather(operation.outputs[0], places)) & inside
    counts = tf.math.unsorted_segment_sum(tf.cast(chosen, upstream.dtype), segments, count)
    shares = tf.gather(upstream / tf.maximum(counts, 1), places)
    return tf.where(chosen, shares, tf.zeros_like(shares)), None, None


@gradient_of("SparseSoftmax")
def _sparse_softmax(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # p (dy - sum(p dy)), with the sum over each row. TensorFlow's uses an operation that it cannot
    # differentiate.
    indices, _, shape = operation.inputs
    probabilities = operation.outputs[0]
    strides = tf.math.cumprod(shape[:-1], exclusive=True, reverse=True)
    numbers = tf.reduce_sum(indices[:, :-1] * strides, axis=1)
    distinct, rows = tf.unique(numbers)
    row_sums = tf.math.unsorted_segment_sum(upstream * probabilities, rows, tf.size(distinct))
    return None, probabilities * (upstream - tf.gather(row_sums, rows)), None


@gradient_of("SoftmaxCrossEntropyWithLogits")
def _softmax_cross_entropy(
    operation: Any, upstream: tf.Tensor, upstream_of_gradient: Any
) -> Sequence[Any]:
    # The second result is the gradient by the logits, softmax(logits) - labels. TensorFlow leaves
    # out its derivative by the labels, which is -1.
    logits = operation.inputs[0]
    by_labels = -upstream[:, tf.newaxis] * tf.nn.log_softmax(logits)
    if upstream_of_gradient is not None:
        by_labels -= upstream_of_gradient
    return _by_logits(operation, upstream, upstream_of_gradient), by_labels


@gradient_of("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_softmax_cross_entropy(
    operation: Any, upstream: tf.Tensor, upstream_of_gradient: Any
) -> Sequence[Any]:
    return _by_logits(operation, upstream, upstream_of_gradient), None


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a graph is known to be zero."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    if tensor.op.type == "Fill":
        tensor = tensor.op.inputs[1]
    value = tf.get_static_value(tensor) if tensor.op.type == "Const" else None
    return tensor.op.type == "ZerosLike" or (value is not None and not value.any())


def _by_logits(operation: Any, upstream: tf.Tensor, upstream_of_gradient: Any) -> tf.Tensor:
    """Return the derivative of a cross-entropy by its logits.

    Where the loss itself does not count, as in a derivative of its gradient, TensorFlow multiplies
    the gradient by zeros: this would keep one tensor of the size of the logits for nothing.
    """
    by_loss = None if _is_zero(upstream) else upstream[:, tf.newaxis] * operation.outputs[1]
    if upstream_of_gradient is None or _is_zero(upstream_of_gradient):
        return tf.zeros_like(operation.inputs[0]) if by_loss is None else by_loss
    p = tf.nn.softmax(operation.inputs[0])
    mean = tf.reduce_sum(upstream_of_gradient * p, axis=1, keepdims=True)
    by_gradient = (upstream_of_gradient - mean) * p
    return by_gradient if by_loss is None else by_loss + by_gradient
