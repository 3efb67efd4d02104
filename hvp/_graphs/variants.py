"""The size of variants: lists of tensors and optional values, which loops and branches pass on.

A variant does not reveal the type of its content, so types are tried until one fits.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

_DTYPES = (
    *(tf.float32, tf.float64, tf.int32, tf.bool, tf.variant, tf.int64, tf.float16, tf.bfloat16),
    *(tf.complex64, tf.complex128, tf.uint8, tf.int8, tf.int16, tf.uint16, tf.uint32, tf.uint64),
)


def variant_nbytes(variant: tf.Tensor) -> int | None:
    """Return the bytes of a list, assuming elements of equal size, or of an optional value.

    Return None if the variant is, or contains, anything else.
    """

    def element(dtype: tf.DType) -> tf.Tensor:
        return tf.raw_ops.TensorListGetItem(
            input_handle=variant, index=0, element_shape=-1, element_dtype=dtype
        )

    def optional(dtype: tf.DType) -> tf.Tensor:
        return tf.raw_ops.OptionalGetValue(
            optional=variant, output_types=[dtype], output_shapes=[None]
        )[0]

    try:
        length = int(tf.raw_ops.TensorListLength(input_handle=variant))
        return 0 if length == 0 else _times(length, _first_that_fits(element))
    except tf.errors.InvalidArgumentError:  # not a list
        pass
    try:
        full = bool(tf.raw_ops.OptionalHasValue(optional=variant))
        return _first_that_fits(optional) if full else 0
    except tf.errors.InvalidArgumentError:  # not an optional value either
        return None


def _first_that_fits(get: Callable[[tf.DType], tf.Tensor]) -> int | None:
    """Return the bytes of a value, read with the first type that does not fail."""
    for dtype in _DTYPES:
        try:
            value = get(dtype)
        except tf.errors.InvalidArgumentError:  # another dtype
            continue
        if dtype == tf.variant:
            return variant_nbytes(value)
        return int(tf.size(value)) * int(dtype.size)
    return None


def _times(length: int, nbytes: int | None) -> int | None:
    return None if nbytes is None else length * nbytes
