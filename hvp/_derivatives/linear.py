"""Gradients of linear operations that TensorFlow lacks.

Most of these operations are gradients themselves: that of a linear operation `y = A x` is
`x' = Aᵀ y'`, an operation of its own, whose gradient in turn is multiplication by `A`, the first
operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.registry import attributes, dense, gradient_of, size_of
from hvp._graphs.private import record

raw = tf.raw_ops


@gradient_of("ResizeBicubicGrad")
def _resize_bicubic_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    options = attributes(operation, "align_corners", "half_pixel_centers")
    return raw.ResizeBicubic(images=upstream, size=size_of(operation.inputs[0]), **options), None


@gradient_of("ResizeNearestNeighborGrad")
def _resize_nearest_neighbor_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    options = attributes(operation, "align_corners", "half_pixel_centers")
    size = size_of(operation.inputs[0])
    return raw.ResizeNearestNeighbor(images=upstream, size=size, **options), None


@gradient_of("ScaleAndTranslateGrad")
def _scale_and_translate_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    grads, _, scale, translation = operation.inputs
    options = attributes(operation, "kernel_type", "antialias")
    again = raw.ScaleAndTranslate(
        images=upstream, size=size_of(grads), scale=scale, translation=translation, **options
    )
    return again, None, None, None


@gradient_of("ResizeBilinear")
def _resize_bilinear(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # TensorFlow takes ResizeBilinearGrad for a constant, so that tapes do not keep its inputs. Its
    # gradient is therefore recorded here, with the inputs.
    options = attributes(operation, "align_corners", "half_pixel_centers")
    image = operation.inputs[0]
    with record.stop_recording():
        result = raw.ResizeBilinearGrad(grads=upstream, original_image=image, **options)

    def again(further: tf.Tensor) -> list[tf.Tensor]:
        return [raw.ResizeBilinear(images=dense(further), size=size_of(upstream), **options)]

    record.record_operation("ResizeBilinearGrad", [result], [upstream], again)
    return result, None


@gradient_of("ResizeBilinearGrad")  # in the graphs of functions
def _resize_bilinear_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    if operation.inputs is None:  # the operation was called directly under a tape
        raise LookupError("gradient registry has no entry for: ResizeBilinearGrad")
    options = attributes(operation, "align_corners", "half_pixel_centers")
    size = size_of(operation.inputs[0])
    return raw.ResizeBilinear(images=upstream, size=size, **options), None


@gradient_of("CropAndResizeGradImage")
def _crop_and_resize_grad_image(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    grads, boxes, which, _ = operation.inputs
    method = attributes(operation, "method")
    again = raw.CropAndResize(
        image=upstream, boxes=boxes, box_ind=which, crop_size=size_of(grads), **method
    )
    by_boxes = raw.CropAndResizeGradBoxes(
        grads=grads, image=upstream, boxes=boxes, box_ind=which, method="bilinear"
    )
    return tf.cast(again, grads.dtype), by_boxes, None, None


@gradient_of("MaxPoolGradWithArgmax")
def _max_pool_grad_with_argmax(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    image, grad, argmax = operation.inputs
    # The gradient puts `grad` at the places of the maxima; its transpose gathers from there.
    places = argmax
    if not operation.get_attr("include_batch_in_index"):
        image_size = tf.cast(tf.reduce_prod(tf.shape(image)[1:]), argmax.dtype)
        first = image_size * tf.range(tf.shape(image)[0], dtype=argmax.dtype)
        places += tf.reshape(first, [-1, 1, 1, 1])
    return None, tf.gather(tf.reshape(upstream, [-1]), tf.reshape(places, tf.shape(grad))), None


@gradient_of("FractionalAvgPoolGrad")
def _fractional_avg_pool_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # Pooling by means is y = R x Cᵀ, with matrices that take means of rows and of columns.
    overlapping = operation.get_attr("overlapping")

    def means(sequence: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """Return the matrix that takes means of windows along an axis, given their edges."""
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


@gradient_of("FractionalMaxPoolGrad")
def _fractional_max_pool_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    image, maxima, _, rows, columns = operation.inputs
    overlap = 1 if operation.get_attr("overlapping") else 0

    def windows(sequence: tf.Tensor, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the places of each window along an axis, padded, and which are not padding."""
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
        """Return values by window and place in the window, for rows and for columns."""
        return tf.gather(tf.gather(values, across, axis=1), along, axis=3)

    inside = is_row[:, :, tf.newaxis, tf.newaxis] & is_column
    largest = tf.equal(in_windows(image), maxima[:, :, tf.newaxis, :, tf.newaxis])
    chosen = tf.cast(largest & inside[tf.newaxis, ..., tf.newaxis], upstream.dtype)
    sums = tf.reduce_sum(chosen * in_windows(upstream), axis=[2, 4])
    again = sums / tf.reduce_sum(chosen, axis=[2, 4])
    return None, None, tf.ensure_shape(again, maxima.shape), None, None


@gradient_of("RaggedTensorToVariantGradient")
def _ragged_tensor_to_variant_gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    splits = operation.inputs[1]
    again = raw.RaggedTensorToVariant(
        rt_nested_splits=[splits], rt_dense_values=upstream, batched_input=True
    )
    return again, None, None


@gradient_of("SparseSliceGrad")
def _sparse_slice_grad(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
    # Each entry of the slice is an entry of the whole tensor. The entries of that are in order of
    # their indices, so that numbering the indices row by row allows a binary search.
    _, indices, start, of_slice = operation.inputs
    sizes = tf.reduce_max(indices, axis=0) + 1
    strides = tf.math.cumprod(sizes, exclusive=True, reverse=True)
    numbers = tf.reduce_sum(indices * strides, axis=1)
    numbers_of_slice = tf.reduce_sum((of_slice + start) * strides, axis=1)
    return tf.gather(upstream, tf.searchsorted(numbers, numbers_of_slice)), None, None, None


@gradient_of("SparseAdd")
def _sparse_add(operation: Any, upstream_of_indices: Any, upstream: tf.Tensor, *_: Any) -> Any:
    # TensorFlow's gradient is an operation without a derivative. A gather has one: each entry of
    # the terms gets the upstream gradient of the entry with the same index in the sum.
    total = operation.outputs[0]
    both = [operation.inputs[0], operation.inputs[3]]
    sizes = tf.reduce_max(tf.concat([total, *both], 0), axis=0) + 1
    strides = tf.math.cumprod(sizes, exclusive=True, reverse=True)
    numbers = tf.reduce_sum(total * strides, axis=1)
    # Entries below the threshold are not in the sum. They get the zero at the end.
    upstream_or_zero = tf.concat([upstream, tf.zeros([1], upstream.dtype)], 0)
    padded = tf.concat([numbers, -tf.ones([1], numbers.dtype)], 0)

    def gradient_at(indices: tf.Tensor) -> tf.Tensor:
        own_numbers = tf.reduce_sum(indices * strides, axis=1)
        # An index that occurs again in a term, where they are in order, does so in the sum.
        repeats = tf.range(tf.size(own_numbers)) - tf.searchsorted(own_numbers, own_numbers)
        places = tf.searchsorted(numbers, own_numbers) + repeats
        in_sum = tf.equal(tf.gather(padded, places), own_numbers)
        return tf.gather(upstream_or_zero, tf.where(in_sum, places, tf.size(numbers)))

    return None, gradient_at(both[0]), None, None, gradient_at(both[1]), None, None


@gradient_of("SparseFillEmptyRowsGrad")
def _sparse_fill_empty_rows_grad(
    operation: Any, upstream: tf.Tensor, upstream_of_default: tf.Tensor
) -> Sequence[Any]:
    places, grads = operation.inputs
    size = tf.shape(grads, places.dtype)
    places = places[:, tf.newaxis]
    filled = tf.scatter_nd(places, tf.ones_like(upstream), size)
    return None, tf.scatter_nd(places, upstream, size) + (1 - filled) * upstream_of_default


def _segments(kind: str) -> None:
    """Register gradients of the gradients of sums, means, ... over segments of rows."""
    reduce = getattr(raw, f"SparseSegment{kind}WithNumSegments")

    @gradient_of(f"SparseSegment{kind}Grad")
    def gradient(operation: Any, upstream: tf.Tensor) -> Sequence[Any]:
        grad, indices, segments, _ = operation.inputs
        again = reduce(
            data=upstream, indices=indices, segment_ids=segments, num_segments=tf.shape(grad)[0]
        )
        return again, None, None, None

    @gradient_of(f"SparseSegment{kind}GradV2")
    def gradient_of_some_rows(
        operation: Any, upstream: tf.Tensor, *upstream_of_numbers: Any
    ) -> Sequence[Any]:
        # The result holds one row for each number among the indices, in order.
        grad, indices, segments, _ = operation.inputs
        numbers = operation.outputs[1]
        again = reduce(
            data=upstream,
            indices=tf.searchsorted(numbers, indices),
            segment_ids=segments,
            num_segments=tf.shape(grad)[0],
        )
        return again, None, None, None


for _kind in ("Sum", "Mean", "SqrtN"):
    _segments(_kind)
