"""Derivatives that TensorFlow lacks, or has wrong, written down.

TensorFlow looks the gradient of an operation up by the operation's type, so that what is written
here also reaches functions that were imported under another name, and what Keras calls. The first
half of the table are operations of which TensorFlow has no gradient at all: most are themselves
gradients of common operations, and linear in the upstream gradient, so that their own gradient is
the common operation again. The second half replaces gradients that TensorFlow has.

All of this is in force only while a function is linearized, in the thread, or context, that does
it. Everywhere else TensorFlow answers as it did.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# An operation without a gradient can be given one by `tf.RegisterGradient`; to replace one that
# TensorFlow has there is no public way, nor is there one to record an operation with a gradient of
# its own that can be differentiated inside functions and out.
from tensorflow.python.eager import record
from tensorflow.python.framework import op_def_registry, ops

from hvp._derivatives.gradient import densify

raw = tf.raw_ops
# Takes an operation, of which only what TensorFlow's own gradient uses is sure to be there, and the
# gradients of its results; returns those of its inputs.
GradientFunction = Callable[..., Sequence[Any]]

_in_force = contextvars.ContextVar("hvp_derivatives", default=False)
# The gradients that TensorFlow has, or what stands for those it lacks, of corrected operations.
TENSORFLOWS: dict[str, GradientFunction] = {}


@contextlib.contextmanager
def corrected_derivatives() -> Iterator[None]:
    """Differentiate with the gradients of this module, in this context."""
    token = _in_force.set(True)
    try:
        yield
    finally:
        _in_force.reset(token)


def is_linearizing() -> bool:
    """Whether the gradients of this module are in force in this context."""
    return _in_force.get()


def _gradient_of(*kinds: str) -> Callable[[GradientFunction], GradientFunction]:
    """Put a gradient in the place of TensorFlow's for operations of some types."""

    def decorated(function: GradientFunction) -> GradientFunction:
        for kind in kinds:
            _put_in_force(kind, function)
        return function

    return decorated


def _put_in_force(kind: str, function: GradientFunction) -> None:
    registry = getattr(ops, "gradient_registry", None) or ops._gradient_registry

    def chosen(operation: Any, *upstream: Any) -> Sequence[Any]:
        if _in_force.get():
            return function(operation, *map(_dense, upstream))
        return tensorflows(operation, *upstream)

    def missing(operation: Any, *upstream: Any) -> Sequence[Any]:
        raise LookupError(f"gradient registry has no entry for: {kind}")

    def none(operation: Any, *upstream: Any) -> Sequence[Any]:
        # A tape keeps no inputs of such an operation, not even how many there were.
        return [None] * len(op_def_registry.get(kind).input_arg)

    if kind in registry.list():
        tensorflows = registry.lookup(kind) or none
        registry._registry[kind] = {**registry._registry[kind], "type": chosen}
    else:
        tensorflows = missing
        tf.RegisterGradient(kind)(chosen)
    TENSORFLOWS[kind] = tensorflows


def _dense(upstream: Any) -> Any:
    """Make rows that are scattered dense: not every gradient can take them."""
    if isinstance(upstream, tf.IndexedSlices):
        return densify(upstream, upstream.dense_shape)
    return upstream


def _attributes(operation: Any, *names: str) -> dict[str, Any]:
    """Return attributes of an operation, as arguments to make another like it."""
    found = {name: operation.get_attr(name) for name in names}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def _size(images: tf.Tensor) -> tf.Tensor:
    return tf.shape(images)[1:3]


# Of linear operations that TensorFlow has as the gradients of others.


@_gradient_of("ResizeBicubicGrad")
def _resize_bicubic_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    options = _attributes(operation, "align_corners", "half_pixel_centers")
    return raw.ResizeBicubic(images=upstream, size=_size(operation.inputs[0]), **options), None


@_gradient_of("ResizeNearestNeighborGrad")
def _resize_nearest_neighbor_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    options = _attributes(operation, "align_corners", "half_pixel_centers")
    size = _size(operation.inputs[0])
    return raw.ResizeNearestNeighbor(images=upstream, size=size, **options), None


@_gradient_of("ScaleAndTranslateGrad")
def _scale_and_translate_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    grads, _, scale, translation = operation.inputs
    options = _attributes(operation, "kernel_type", "antialias")
    again = raw.ScaleAndTranslate(
        images=upstream, size=_size(grads), scale=scale, translation=translation, **options
    )
    return again, None, None, None


@_gradient_of("ResizeBilinear")
def _resize_bilinear(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # A tape forgets the inputs of ResizeBilinearGrad, which TensorFlow takes for a constant; so it
    # is told here what the gradient of that is.
    options = _attributes(operation, "align_corners", "half_pixel_centers")
    image = operation.inputs[0]
    with record.stop_recording():
        result = raw.ResizeBilinearGrad(grads=upstream, original_image=image, **options)

    def again(further: tf.Tensor) -> list[tf.Tensor]:
        return [raw.ResizeBilinear(images=_dense(further), size=_size(upstream), **options)]

    record.record_operation("ResizeBilinearGrad", [result], [upstream], again)
    return result, None


@_gradient_of("ResizeBilinearGrad")  # in functions, where no tape looks on
def _resize_bilinear_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    if operation.inputs is None:  # called by itself, on a tape
        raise LookupError("gradient registry has no entry for: ResizeBilinearGrad")
    options = _attributes(operation, "align_corners", "half_pixel_centers")
    size = _size(operation.inputs[0])
    return raw.ResizeBilinear(images=upstream, size=size, **options), None


@_gradient_of("CropAndResizeGradImage")
def _crop_and_resize_grad_image(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    grads, boxes, which, _ = operation.inputs
    method = _attributes(operation, "method")
    again = raw.CropAndResize(
        image=upstream, boxes=boxes, box_ind=which, crop_size=_size(grads), **method
    )
    by_boxes = raw.CropAndResizeGradBoxes(
        grads=grads, image=upstream, boxes=boxes, box_ind=which, method="bilinear"
    )
    return tf.cast(again, grads.dtype), by_boxes, None, None


@_gradient_of("MaxPoolGradWithArgmax")
def _max_pool_grad_with_argmax(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    image, grad, argmax = operation.inputs
    places = argmax
    if not operation.get_attr("include_batch_in_index"):
        each = tf.cast(tf.reduce_prod(tf.shape(image)[1:]), argmax.dtype)
        first = each * tf.range(tf.shape(image)[0], dtype=argmax.dtype)
        places += tf.reshape(first, [-1, 1, 1, 1])
    return None, tf.gather(tf.reshape(upstream, [-1]), tf.reshape(places, tf.shape(grad))), None


@_gradient_of("FractionalAvgPoolGrad")
def _fractional_avg_pool_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    overlapping = operation.get_attr("overlapping")

    def means(sequence: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """Return the matrix that takes means along an axis, between the edges of a sequence."""
        # TensorFlow infers one edge too few.
        sequence = tf.compat.v1.placeholder_with_default(sequence, [None])
        ends = sequence[1:] + (1 if overlapping else 0)
        entries = tf.range(tf.cast(size, sequence.dtype))
        edges = sequence[:-1, tf.newaxis], ends[:, tf.newaxis]
        inside = tf.cast((entries >= edges[0]) & (entries < edges[1]), upstream.dtype)
        return inside / tf.reduce_sum(inside, axis=1, keepdims=True)

    _, grad, rows, columns = operation.inputs
    shape = tf.shape(upstream)
    across = means(rows, shape[1]), means(columns, shape[2])
    again = tf.ensure_shape(tf.einsum("ih,jw,bhwc->bijc", *across, upstream), grad.shape)
    return None, again, None, None


@_gradient_of("FractionalMaxPoolGrad")
def _fractional_max_pool_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    image, maxima, _, rows, columns = operation.inputs
    overlap = 1 if operation.get_attr("overlapping") else 0

    def windows(sequence: tf.Tensor, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the places in each window along an axis, and which of them are in it."""
        # TensorFlow infers one edge too few.
        sequence = tf.compat.v1.placeholder_with_default(sequence, [None])
        widths = sequence[1:] - sequence[:-1] + overlap
        offsets = tf.range(tf.reduce_max(widths))
        places = sequence[:-1, tf.newaxis] + offsets
        size = tf.cast(size, sequence.dtype)
        inside = (offsets < widths[:, tf.newaxis]) & (places < size)
        return tf.minimum(places, size - 1), inside

    shape = tf.shape(image)
    across, is_row = windows(rows, shape[1])
    along, is_column = windows(columns, shape[2])

    def in_windows(values: tf.Tensor) -> tf.Tensor:
        """Shape values as window, place, window, place along rows and columns."""
        return tf.gather(tf.gather(values, across, axis=1), along, axis=3)

    inside = is_row[:, :, tf.newaxis, tf.newaxis] & is_column
    largest = tf.equal(in_windows(image), maxima[:, :, tf.newaxis, :, tf.newaxis])
    chosen = tf.cast(largest & inside[tf.newaxis, ..., tf.newaxis], upstream.dtype)
    sums = tf.reduce_sum(chosen * in_windows(upstream), axis=[2, 4])
    again = sums / tf.reduce_sum(chosen, axis=[2, 4])
    return None, None, tf.ensure_shape(again, maxima.shape), None, None


@_gradient_of("RaggedTensorToVariantGradient")
def _ragged_tensor_to_variant_gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    splits = operation.inputs[1]
    again = raw.RaggedTensorToVariant(
        rt_nested_splits=[splits], rt_dense_values=upstream, batched_input=True
    )
    return again, None, None


@_gradient_of("SparseSliceGrad")
def _sparse_slice_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # Each entry of the slice is one of the whole, of which the indices are in order.
    _, indices, start, of_slice = operation.inputs
    sizes = tf.reduce_max(indices, axis=0) + 1
    strides = tf.math.cumprod(sizes, exclusive=True, reverse=True)
    numbers = tf.reduce_sum(indices * strides, axis=1)
    wanted = tf.reduce_sum((of_slice + start) * strides, axis=1)
    return tf.gather(upstream, tf.searchsorted(numbers, wanted)), None, None, None


@_gradient_of("SparseAdd")
def _sparse_add(operation: Any, upstream_of_indices: Any, upstream: tf.Tensor, *_: Any) -> Any:
    # By gathers, which can be differentiated, in place of an operation that cannot.
    total = operation.outputs[0]
    both = [operation.inputs[0], operation.inputs[3]]
    sizes = tf.reduce_max(tf.concat([total, *both], 0), axis=0) + 1
    strides = tf.math.cumprod(sizes, exclusive=True, reverse=True)
    numbers = tf.reduce_sum(total * strides, axis=1)
    # What was below the threshold is not in the sum, and gets the zero behind the rest.
    known = tf.concat([upstream, tf.zeros([1], upstream.dtype)], 0)
    padded = tf.concat([numbers, -tf.ones([1], numbers.dtype)], 0)

    def of(indices: tf.Tensor) -> tf.Tensor:
        wanted = tf.reduce_sum(indices * strides, axis=1)
        places = tf.searchsorted(numbers, wanted)
        is_there = tf.equal(tf.gather(padded, places), wanted)
        return tf.gather(known, tf.where(is_there, places, tf.size(numbers)))

    return None, of(both[0]), None, None, of(both[1]), None, None


@_gradient_of("SparseFillEmptyRowsGrad")
def _sparse_fill_empty_rows_grad(
    operation: Any, upstream: tf.Tensor, upstream_of_default: tf.Tensor
) -> Sequence[Any]:
    places, grads = operation.inputs
    size = tf.shape(grads, places.dtype)
    places = places[:, tf.newaxis]
    filled = tf.scatter_nd(places, tf.ones_like(upstream), size)
    return None, tf.scatter_nd(places, upstream, size) + (1 - filled) * upstream_of_default


def _segments(kind: str) -> None:
    """Put the gradients of the gradients of sums, means, ... over segments of rows in force."""
    along = getattr(raw, f"SparseSegment{kind}WithNumSegments")

    @_gradient_of(f"SparseSegment{kind}Grad")
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        grad, indices, segments, _ = operation.inputs
        again = along(
            data=upstream, indices=indices, segment_ids=segments, num_segments=tf.shape(grad)[0]
        )
        return again, None, None, None

    @_gradient_of(f"SparseSegment{kind}GradV2")
    def gradient_of_some_rows(
        operation: Any, upstream: tf.Tensor, *upstream_of_numbers: Any
    ) -> Sequence[Any]:
        # The result holds one row for each number among the indices, in order.
        grad, indices, segments, _ = operation.inputs
        numbers = operation.outputs[1]
        again = along(
            data=upstream,
            indices=tf.searchsorted(numbers, indices),
            segment_ids=segments,
            num_segments=tf.shape(grad)[0],
        )
        return again, None, None, None


for _kind in ("Sum", "Mean", "SqrtN"):
    _segments(_kind)


# Of operations with a formula.


def _gradient_of_formula(
    formula: Callable[..., tf.Tensor], inputs: Sequence[tf.Tensor], upstream: tf.Tensor
) -> list[Any]:
    # In the gradient of a loop they belong to another graph, where a tape does not follow them.
    inputs = [tf.identity(tensor) for tensor in inputs]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        result = formula(*inputs)
    return tape.gradient(result, inputs, upstream)


@_gradient_of("SoftsignGrad")
def _softsign_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    def formula(gradients: tf.Tensor, features: tf.Tensor) -> tf.Tensor:
        return gradients / tf.square(1 + tf.abs(features))

    return _gradient_of_formula(formula, operation.inputs, upstream)


@_gradient_of("LRNGrad")
def _lrn_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # It is g / s**beta - 2 alpha beta x sum(g x / s**(beta + 1)), with s = bias + alpha sum(x**2).
    radius, bias, alpha, beta = (
        operation.get_attr(name) for name in ("depth_radius", "bias", "alpha", "beta")
    )

    def along_channels(values: tf.Tensor) -> tf.Tensor:
        """Sum over neighbouring channels."""
        count = tf.shape(values)[-1]
        apart = tf.abs(tf.range(count)[:, tf.newaxis] - tf.range(count))
        return tf.tensordot(values, tf.cast(apart <= radius, values.dtype), 1)

    def formula(g: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        s = bias + alpha * along_channels(tf.square(x))
        return g * s**-beta - 2 * alpha * beta * x * along_channels(g * x * s ** (-beta - 1))

    return [*_gradient_of_formula(formula, operation.inputs[:2], upstream), None]


@_gradient_of("Dilation2D")
def _dilation(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    image, kernel = operation.inputs
    rows, columns, channels = (kernel.shape[axis] for axis in range(3))
    _, *strides, _ = operation.get_attr("strides")
    _, *rates, _ = operation.get_attr("rates")
    extent = [(size - 1) * rate + 1 for size, rate in zip((rows, columns), rates)]
    missing = tf.zeros([2], tf.int32)
    if operation.get_attr("padding") == b"SAME":
        moves = -(-_size(image) // strides)
        missing = tf.maximum((moves - 1) * strides + extent - _size(image), 0)
    before = missing // 2
    paddings = tf.pad(tf.stack([before, missing - before], axis=1), [[1, 1], [0, 0]])

    def formula(image: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        wide = tf.pad(image, paddings, constant_values=image.dtype.min)
        patches = tf.image.extract_patches(
            tf.ensure_shape(wide, [None, None, None, channels]),
            [1, rows, columns, 1],
            [1, *strides, 1],
            [1, *rates, 1],
            "VALID",
        )
        shape = tf.concat([tf.shape(patches)[:3], [rows * columns, channels]], 0)
        sums = tf.reshape(patches, shape) + tf.reshape(kernel, [rows * columns, channels])
        return tf.reduce_max(sums, axis=3)

    return _gradient_of_formula(formula, operation.inputs, upstream)


def _fake_quantization(kind: str, limits_are_inputs: bool, *others: str) -> None:
    """Let gradients pass between the limits, and to the limits beyond them, by operations."""
    kernel = getattr(raw, f"{kind}Gradient")

    @_gradient_of(kind)
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        values, *limits = map(tf.stop_gradient, operation.inputs)
        options = _attributes(operation, "num_bits", "narrow_range", *others)
        if not limits_are_inputs:
            ones = tf.ones_like(values)
            return [upstream * kernel(gradients=ones, inputs=values, **options)]
        low, high = limits
        options.update(min=low, max=high)
        inside = kernel(gradients=tf.ones_like(values), inputs=values, **options)[0]
        is_low = tf.cast(values < (low + high) / 2, values.dtype)
        axes = list(range(values.shape.rank - low.shape.rank))
        beyond = upstream * (1 - inside)
        to_low = tf.reduce_sum(beyond * is_low, axes)
        return upstream * inside, to_low, tf.reduce_sum(beyond * (1 - is_low), axes)


_fake_quantization("FakeQuantWithMinMaxArgs", False, "min", "max")
_fake_quantization("FakeQuantWithMinMaxVars", True)
_fake_quantization("FakeQuantWithMinMaxVarsPerChannel", True)


# Gradients that TensorFlow has, and that are wrong, or fail, somewhere.


@_gradient_of("TanhGrad")
def _tanh_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # TensorFlow's own multiplies the upstream gradient by a Python number, which rows cannot take.
    y, dy = (tf.math.conj(tensor) for tensor in operation.inputs)
    return -2.0 * upstream * dy * y, raw.TanhGrad(y=y, dy=upstream)


@_gradient_of("SegmentMean")
def _segment_mean(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # Of a segment without rows TensorFlow divides by zero, which shows in the second derivative.
    data, segments = operation.inputs
    counts = tf.math.segment_sum(tf.ones_like(segments, upstream.dtype), segments)
    shape = tf.concat([tf.shape(counts), tf.ones([tf.rank(data) - 1], tf.int32)], 0)
    return tf.gather(upstream / tf.reshape(tf.maximum(counts, 1), shape), segments), None


@_gradient_of("SegmentMin", "SegmentMax")
def _segment_extreme(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    data, segments = operation.inputs
    chosen = tf.equal(data, tf.gather(operation.outputs[0], segments))
    counts = tf.math.segment_sum(tf.cast(chosen, upstream.dtype), segments)
    shares = tf.gather(upstream / tf.maximum(counts, 1), segments)
    return tf.where(chosen, shares, tf.zeros_like(shares)), None


@_gradient_of("UnsortedSegmentMin", "UnsortedSegmentMax")
def _unsorted_segment_extreme(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    data, segments, count = operation.inputs
    inside = segments >= 0
    places = tf.maximum(segments, 0)
    more = tf.ones([tf.rank(data) - tf.rank(segments)], tf.int32)
    inside = tf.reshape(inside, tf.concat([tf.shape(segments), more], 0))
    chosen = tf.equal(data, tf.gather(operation.outputs[0], places)) & inside
    counts = tf.math.unsorted_segment_sum(tf.cast(chosen, upstream.dtype), segments, count)
    shares = tf.gather(upstream / tf.maximum(counts, 1), places)
    return tf.where(chosen, shares, tf.zeros_like(shares)), None, None


@_gradient_of("SparseSoftmax")
def _sparse_softmax(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # In TensorFlow's an operation enters that it cannot differentiate.
    indices, _, shape = operation.inputs
    probabilities = operation.outputs[0]
    strides = tf.math.cumprod(shape[:-1], exclusive=True, reverse=True)
    numbers = tf.reduce_sum(indices[:, :-1] * strides, axis=1)
    distinct, rows = tf.unique(numbers)
    along = tf.math.unsorted_segment_sum(upstream * probabilities, rows, tf.size(distinct))
    return None, probabilities * (upstream - tf.gather(along, rows)), None


@_gradient_of("SoftmaxCrossEntropyWithLogits")
def _softmax_cross_entropy(
    operation: Any, upstream: tf.Tensor, upstream_of_gradient: Any
) -> Sequence[Any]:
    # The second result is the gradient by the logits, softmax(logits) - labels, of which TensorFlow
    # leaves the derivative by the labels out.
    tensorflows = TENSORFLOWS["SoftmaxCrossEntropyWithLogits"]
    by_logits, by_labels = tensorflows(operation, upstream, upstream_of_gradient)
    if upstream_of_gradient is not None:
        by_labels -= upstream_of_gradient
    return by_logits, by_labels
