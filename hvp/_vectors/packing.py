"""Many small tensors as a few: what a call costs grows with how many it is given."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# Above this copying costs more than is won, and values would no longer share variables' buffers.
_MOST_BYTES = 2**18


class Packing:
    """Tensors of known shapes end to end in one buffer for each dtype.

    Parameters
    ----------
    specs : sequence of tf.TensorSpec
        Of the tensors.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self._specs = list(specs)
        self._dtypes = list(dict.fromkeys(spec.dtype for spec in specs))

    @property
    def buffers(self) -> int:
        """How many buffers there are."""
        return len(self._dtypes)

    @property
    def pays(self) -> bool:
        """Whether the tensors are small, and of dtypes and shapes that can be packed."""
        plain = all(
            spec.shape.is_fully_defined() and (spec.dtype.is_floating or spec.dtype.is_integer)
            for spec in self._specs
        )
        if not plain:
            return False
        nbytes = sum(spec.dtype.size * spec.shape.num_elements() for spec in self._specs)
        return nbytes <= _MOST_BYTES

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Put them, or the first of them, into buffers."""
        flat: dict[tf.DType, list[tf.Tensor]] = {dtype: [] for dtype in self._dtypes}
        for tensor in tensors:
            flat[tensor.dtype].append(tf.reshape(tensor, [-1]))
        return [
            tf.concat(parts, 0) if parts else tf.zeros([0], dtype) for dtype, parts in flat.items()
        ]

    def unpack(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Take them out again."""
        found = {}
        for dtype, buffer in zip(self._dtypes, buffers):
            sizes = [s.shape.num_elements() for s in self._specs if s.dtype == dtype]
            found[dtype] = iter(tf.split(buffer, sizes))
        return [tf.reshape(next(found[spec.dtype]), spec.shape) for spec in self._specs]
