"""Packing of many small tensors into a few buffers, as each argument of a call costs time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Above this size copying costs more than packing saves, and packed values do not share the buffers
# of variables.
_MAX_BYTES = 2**18


class Packing:
    """Concatenates tensors of known shapes into one buffer per dtype."""

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self._specs = list(specs)
        self._dtypes = list(dict.fromkeys(spec.dtype for spec in specs))

    @property
    def buffers(self) -> int:
        """The number of buffers."""
        return len(self._dtypes)

    @property
    def pays(self) -> bool:
        """Whether the tensors can be packed and are small enough for it to save time."""
        packable = all(
            spec.shape.is_fully_defined() and (spec.dtype.is_floating or spec.dtype.is_integer)
            for spec in self._specs
        )
        if not packable:
            return False
        nbytes = sum(spec.dtype.size * spec.shape.num_elements() for spec in self._specs)
        return nbytes <= _MAX_BYTES

    def fits(self, buffers: Sequence[tf.Tensor]) -> bool:
        """Whether the buffers are as long as those of the tensors."""
        lengths = dict.fromkeys(self._dtypes, 0)
        for spec in self._specs:
            lengths[spec.dtype] += spec.shape.num_elements()
        return [buffer.shape.num_elements() for buffer in buffers] == list(lengths.values())

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenate the tensors, or the first few of them, into buffers."""
        flat: dict[tf.DType, list[tf.Tensor]] = {dtype: [] for dtype in self._dtypes}
        shape = tf.constant([-1])  # one for all: each constant is an operation of its own
        for tensor in tensors:
            flat[tensor.dtype].append(reshaped(tensor, shape, rank=1))
        return [
            tf.concat(parts, 0) if parts else tf.zeros([0], dtype) for dtype, parts in flat.items()
        ]

    def unpack(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the tensors in the buffers."""
        pieces = {}
        for dtype, buffer in zip(self._dtypes, buffers):
            sizes = [s.shape.num_elements() for s in self._specs if s.dtype == dtype]
            pieces[dtype] = iter(tf.split(buffer, sizes))
        shapes = {tuple(spec.shape) for spec in self._specs}
        constants = {shape: tf.constant(shape, tf.int32, [len(shape)]) for shape in sorted(shapes)}
        return [
            reshaped(next(pieces[spec.dtype]), constants[tuple(spec.shape)], spec.shape.rank)
            for spec in self._specs
        ]


def reshaped(tensor: tf.Tensor, shape: Any, rank: int) -> tf.Tensor:
    """Reshape a flat vector to a tensor or back; at equal ranks they have the same shape."""
    return tensor if tensor.shape.rank == rank else tf.reshape(tensor, shape)
