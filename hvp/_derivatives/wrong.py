"""Gradients that TensorFlow has but that are wrong, or raise an error, in some cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.registry import TENSORFLOWS, gradient_of

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
    # The second result is softmax(logits) - labels, which TensorFlow takes for the gradient by the
    # logits. It is for labels whose sum is one; in general that is sum(labels) softmax(logits) -
    # labels. TensorFlow also leaves out the derivative of the second result by the labels, -1.
    logits, difference = operation.inputs[0], operation.outputs[1]
    excess = -tf.reduce_sum(difference, axis=1, keepdims=True)  # sum(labels) - 1
    by_loss = difference + excess * tf.nn.softmax(logits)
    by_labels = -upstream[:, tf.newaxis] * tf.nn.log_softmax(logits)
    if upstream_of_gradient is not None:
        by_labels -= upstream_of_gradient
    return _by_logits(operation, by_loss, upstream, upstream_of_gradient), by_labels


@gradient_of("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_softmax_cross_entropy(
    operation: Any, upstream: tf.Tensor, upstream_of_gradient: Any
) -> Sequence[Any]:
    by_loss = operation.outputs[1]
    return _by_logits(operation, by_loss, upstream, upstream_of_gradient), None


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a graph is known to be zero."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    if tensor.op.type == "Fill":
        tensor = tensor.op.inputs[1]
    value = tf.get_static_value(tensor) if tensor.op.type == "Const" else None
    return tensor.op.type == "ZerosLike" or (value is not None and not value.any())


def _by_logits(
    operation: Any, by_loss: tf.Tensor, upstream: tf.Tensor, upstream_of_gradient: Any
) -> tf.Tensor:
    """Return the derivative of a cross-entropy, and of its second result, by its logits.

    Where the loss itself does not count, as in a derivative of its gradient, TensorFlow multiplies
    the gradient by zeros: this would keep one tensor of the size of the logits for nothing.
    """
    by_loss = None if _is_zero(upstream) else upstream[:, tf.newaxis] * by_loss
    if upstream_of_gradient is None or _is_zero(upstream_of_gradient):
        return tf.zeros_like(operation.inputs[0]) if by_loss is None else by_loss
    p = tf.nn.softmax(operation.inputs[0])
    mean = tf.reduce_sum(upstream_of_gradient * p, axis=1, keepdims=True)
    by_gradient = (upstream_of_gradient - mean) * p
    return by_gradient if by_loss is None else by_loss + by_gradient


def _apart_from_channels(operation: Any, x: tf.Tensor) -> tuple[list[int], list[int]]:
    """Return the axes over which a batch is normalized, and the shape of a vector of channels."""
    is_first = operation.get_attr("data_format") in (b"NCHW", b"NCDHW")
    channel = 1 if is_first else x.shape.rank - 1
    axes = [axis for axis in range(x.shape.rank) if axis != channel]
    return axes, [-1 if axis == channel else 1 for axis in range(x.shape.rank)]


def _fused_batch_norm(kind: str) -> None:
    """Register the gradient of a fused batch normalization, by its mean and variance, too."""

    @gradient_of(kind)
    def gradient(
        operation: Any, upstream: Any, of_mean: Any, of_variance: Any, *rest: Any
    ) -> Sequence[Any]:
        gradients = list(TENSORFLOWS[kind](operation, upstream, of_mean, of_variance, *rest))
        moments = [u for u in (of_mean, of_variance) if u is not None and not _is_zero(u)]
        if not (moments and operation.get_attr("is_training")):
            return gradients  # otherwise these results are inputs, which are refused
        x = operation.inputs[0]
        axes, shape = _apart_from_channels(operation, x)
        count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), tf.float32)
        wide = tf.cast(x, tf.float32)
        further = tf.zeros_like(wide)
        if of_mean is not None:
            further += tf.reshape(of_mean, shape) / count
        if of_variance is not None:
            deviation = wide - tf.reduce_mean(wide, axes, keepdims=True)
            further += 2 * tf.reshape(of_variance, shape) * deviation / tf.maximum(count - 1, 1)
        factor = 1.0
        if kind != "FusedBatchNorm":
            factor = operation.get_attr("exponential_avg_factor")
        gradients[0] += tf.cast(factor * further, x.dtype)
        return gradients


for _kind in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"):
    _fused_batch_norm(_kind)


@gradient_of("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def _fused_batch_norm_grad(operation: Any, *upstream: Any) -> Sequence[Any]:
    # TensorFlow's variance stops a gradient, so that further derivatives lack a term.
    by_y, x, scale = operation.inputs[:3]
    rest = [None] * (len(operation.inputs) - 3)
    if not operation.get_attr("is_training"):
        return TENSORFLOWS[operation.type](operation, *upstream)
    axes, shape = _apart_from_channels(operation, x)
    epsilon = operation.get_attr("epsilon")
    with tf.GradientTape() as tape:
        tape.watch([by_y, x, scale])
        wide, up = tf.cast(x, scale.dtype), tf.cast(by_y, scale.dtype)
        deviation = wide - tf.reduce_mean(wide, axes, keepdims=True)
        inverse = tf.math.rsqrt(tf.reduce_mean(deviation**2, axes, keepdims=True) + epsilon)
        slope = tf.reduce_mean(up * deviation, axes, keepdims=True) * inverse**2
        centered = up - tf.reduce_mean(up, axes, keepdims=True) - slope * deviation
        by_x = tf.cast(tf.reshape(scale, shape) * inverse * centered, x.dtype)
        by_scale = tf.reduce_sum(up * deviation * inverse, axes)
        results = [by_x, by_scale, tf.reduce_sum(up, axes)]
    gradients = tape.gradient(results, [by_y, x, scale], output_gradients=list(upstream[:3]))
    return [*gradients, *rest]


def _diagonals(kind: str, place: int, of_part: bool, align: str | None) -> None:
    """Register the gradient of diagonals, by the value that they are padded with, too."""

    @gradient_of(kind)
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        gradients = list(TENSORFLOWS[kind](operation, upstream))
        how = align or operation.get_attr("align").decode()
        k = operation.inputs[1]
        options = {"k": k, "align": how}
        if of_part:
            ones = tf.ones_like(operation.inputs[0])
            inside = tf.linalg.diag_part(ones, **options)
            gradients[place] = tf.reduce_sum(upstream * (1 - inside))
        else:
            zeros = tf.zeros_like(tf.linalg.diag_part(upstream, **options))
            gradients[place] = tf.reduce_sum(tf.linalg.set_diag(upstream, zeros, **options))
        return gradients


_diagonals("MatrixDiagV3", 4, False, None)
_diagonals("MatrixDiagPartV3", 2, True, None)


@gradient_of("SquaredDifference")
def _squared_difference(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # |x - y|**2 is real, so that the imaginary part of the upstream gradient does not matter.
    if upstream.dtype.is_complex:
        upstream = tf.cast(tf.math.real(upstream), upstream.dtype)
    return TENSORFLOWS["SquaredDifference"](operation, upstream)
