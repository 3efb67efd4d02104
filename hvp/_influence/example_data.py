"""Examples that are iterated over many times, one batch or one block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.batches import Batches
from hvp._data.elements import Elements
from hvp._errors import HvpError, InvalidDataError
from hvp._runtime.digest import digest

# Arrays are converted to tensors this many examples at a time.
_SLICE = 4096


class ExampleData:
    """Examples in a fixed order, regardless of batching.

    The `data` are as for `HessianOperator`, and must not contain ragged or sparse tensors. Error
    messages call the examples by their `name`, ``"training"`` or ``"test"``. There are `count` of
    them, and `first` is the first batch.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.name = name
        is_whole = isinstance(data, (tuple, dict))
        if is_whole:
            _refuse_ragged(tf.nest.flatten(data), name)
        self._batches = Batches(data, _SLICE if is_whole else None, None)
        self.count, first = 0, None
        for elements in self:
            _refuse_ragged(elements.leaves, name)
            first = first or elements
            self.count += elements.examples
        assert first is not None
        self.first: Elements = first

    def fingerprint(self) -> str:
        """Return a fingerprint of the examples; takes one pass over the data."""
        return " ".join(digest(tensor) for elements in self for tensor in elements.tensors)

    def __iter__(self) -> Iterator[Elements]:
        """Iterate over the batches."""
        return (batch.elements for batch in self._batches)

    def blocks(self, size: int) -> Iterator[tuple[int, Elements]]:
        """Iterate over blocks of at most `size` examples, each with its first example's number."""
        start = 0
        for elements in self:
            for i in range(0, elements.examples, size):
                yield start + i, elements.part(i, min(i + size, elements.examples))
            start += elements.examples

    def selected(self, numbers: np.ndarray) -> Iterator[Elements]:
        """Iterate over the examples with these numbers, one batch at a time."""
        start = 0
        for elements in self:
            in_batch = (numbers >= start) & (numbers < start + elements.examples)
            if in_batch.any():
                yield elements.taken(numbers[in_batch] - start)
            start += elements.examples

    def numbers(self, indices: Any) -> np.ndarray:
        """Return the numbers of the examples that the user selected by number or by a mask.

        Invalid indices and numbers that occur twice are refused.
        """
        numbers = np.asarray(indices)
        if numbers.dtype == bool and numbers.shape == (self.count,):
            numbers = np.flatnonzero(numbers)
        numbers = np.atleast_1d(numbers)
        if not numbers.size:
            raise HvpError("no indices are given", f"at least one {self.name} example")
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            raise HvpError(
                f"the indices have shape {np.shape(indices)} and type {np.asarray(indices).dtype}",
                f"numbers of {self.name} examples, or a mask of shape ({self.count},)",
            )
        if numbers.min() < 0 or numbers.max() >= self.count:
            raise HvpError(
                f"the indices go from {numbers.min()} to {numbers.max()}",
                f"numbers from 0 to {self.count - 1}",
            )
        if len(np.unique(numbers)) != len(numbers):
            raise HvpError(
                "an index is given twice", "each example once, since it can be left out only once"
            )
        return numbers


def _refuse_ragged(leaves: list[Any], name: str) -> None:
    if any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves):
        raise InvalidDataError(
            f"the {name} data contain ragged or sparse tensors",
            "dense tensors with one slice for each example",
            "pad them: tensor.to_tensor(), tf.sparse.to_dense(tensor)",
        )
