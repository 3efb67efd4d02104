"""Data in batches: where they come from, how much each counts, whether they come again."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import EXPECTED, Elements, check_first_axes, convert_batch
from hvp._errors import InvalidDataError
from hvp._runtime.arguments import check_count
from hvp._runtime.interrupts import let_interrupts_come

# Bytes of a tensor that its fingerprint looks at, in pieces of this size.
_PIECE, _PIECES = 256, 16


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes
    ----------
    index : int
        Its place among the batches.
    elements : Elements
        Its tensors.
    weight : float
        How much it counts.
    fingerprint : int
        Differs if the tensors do, as good as always.
    """

    index: int
    elements: Elements
    weight: float
    fingerprint: int


class Batches:
    """Batches that can be gone through again and again.

    Parameters
    ----------
    data : tuple or dict of arrays, or iterable of such
        With `batch_size` one batch that is cut, else batches: a `tf.data.Dataset`, a Keras
        `PyDataset`, a list, or anything else that can be iterated over more than once.
    batch_size : int or None
        Examples in a batch.
    weight : callable or None
        Takes the elements of a batch, as the loss does; returns how much it counts. By default its
        number of examples.
    """

    def __init__(
        self, data: Any, batch_size: int | None, weight: Callable[..., Any] | None
    ) -> None:
        self._weight = weight
        self._fingerprints: list[int] = []
        self._complete = False
        if batch_size is not None:
            check_count(batch_size, "batch_size")
        self._source = _source(data, batch_size)
        # Arrays that may be cut as memory wants it.
        self._whole = data if batch_size is None and isinstance(data, (tuple, dict)) else None

    @property
    def examples(self) -> int | None:
        """How many there are to be cut; None if the batches are given."""
        return None if self._whole is None else len(tf.nest.flatten(self._whole)[0])

    def head(self, count: int) -> Elements:
        """Return the first examples of what is to be cut."""
        return convert_batch(next(_slices(self._whole, count)), "data")

    def cut(self, size: int) -> None:
        """Make batches of so many examples."""
        data, self._whole = self._whole, None
        self._source = lambda: _slices(data, size)

    def __iter__(self) -> Iterator[Batch]:
        """Go through the batches; the next is fetched while the last is in use."""
        return self.after(0)

    @property
    def count(self) -> int | None:
        """How many there are; None before the end of the first pass."""
        return len(self._fingerprints) if self._complete else None

    def weight_of(self, elements: Elements, index: int) -> float:
        """Return how much a batch, or part of one, counts."""
        if self._weight is None:
            return float(elements.examples)
        said = np.asarray(elements.call(self._weight))
        if said.ndim:
            raise InvalidDataError(
                f"the weight of batch {index} has shape {said.shape}",
                "a scalar: how much the batch counts as a whole",
                "take its sum: tf.reduce_sum(...)",
            )
        weight = float(said)
        if not (np.isfinite(weight) and weight >= 0):
            raise InvalidDataError(
                f"the weight of batch {index} is {weight}", "a finite number that is not negative"
            )
        return weight

    def after(self, count: int) -> Iterator[Batch]:
        """Go through the batches from one on."""
        source, first = iter(self._source()), None
        index = 0
        with ThreadPoolExecutor(1) as executor:
            following = executor.submit(next, source, _END)
            while (given := following.result()) is not _END:
                following = executor.submit(next, source, _END)
                if index >= count:
                    batch = self._batch(index, given)
                    if first is not None:
                        _check_like(first, batch)
                    first = first or batch
                    self._check_same(batch)
                    let_interrupts_come()
                    yield batch
                index += 1
        if index == 0:
            raise InvalidDataError("data has no batches", "at least one")
        if self._complete and index != len(self._fingerprints):
            _refuse_other(f"there were {len(self._fingerprints)} batches, and now {index}")
        self._complete = True

    def fingerprint(self) -> str:
        """Return what tells these batches from others, after the first pass."""
        return " ".join(map(str, self._fingerprints))

    def forget(self) -> None:
        """Let the next pass be the first if the last one was not finished."""
        if not self._complete:
            self._fingerprints = []

    def _batch(self, index: int, given: Any) -> Batch:
        if not isinstance(given, (tuple, dict)) and hasattr(given, "shape"):
            given = (given,)
        given = tuple(given) if isinstance(given, list) else given
        elements = convert_batch(given, f"batch {index}")
        weight = self.weight_of(elements, index)
        return Batch(index, elements, weight, _fingerprint(elements.tensors))

    def _check_same(self, batch: Batch) -> None:
        if batch.index < len(self._fingerprints):
            if self._fingerprints[batch.index] != batch.fingerprint:
                _refuse_other(f"batch {batch.index} differs from what it was")
        elif self._complete:
            _refuse_other(f"there were {len(self._fingerprints)} batches, and now more")
        else:
            self._fingerprints.append(batch.fingerprint)


_END = object()


def _source(data: Any, batch_size: int | None) -> Callable[[], Iterator[Any]]:
    """Return what begins a pass over the batches."""
    if isinstance(data, (tuple, dict)):
        elements = data if isinstance(data, dict) else dict(enumerate(data))
        if not tf.nest.flatten(elements):
            raise InvalidDataError("data has no elements", EXPECTED)
        data = tf.nest.map_structure(_array, data)
        check_first_axes(data if isinstance(data, dict) else dict(enumerate(data)), "data")
        return lambda: _slices(data, batch_size)
    if batch_size is not None:
        raise InvalidDataError(
            f"batch_size={batch_size} goes with data of type {type(data).__name__}",
            "a tuple or dict of arrays to cut, or batches without batch_size",
            "leave out batch_size, or rebatch: dataset.unbatch().batch(batch_size)",
        )
    if hasattr(data, "__getitem__") and hasattr(data, "num_batches"):  # a Keras PyDataset
        return lambda: (data[i] for i in range(data.num_batches))
    if isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise InvalidDataError(
            "data is a tf.data.Dataset without end",
            "batches that can all be gone through",
            "leave out repeat(), or take(n) batches",
        )
    if not hasattr(data, "__iter__") or hasattr(data, "shape"):
        remedy = "for a single array pass (x,)" if hasattr(data, "shape") else ""
        if inspect.isgeneratorfunction(data):
            remedy = "pass list(data()), or tf.data.Dataset.from_generator(data, ...)"
        raise InvalidDataError(
            f"data is a {type(data).__name__}", f"{EXPECTED}, or batches of that kind", remedy
        )
    if isinstance(data, list) and data and hasattr(data[0], "shape"):
        raise InvalidDataError(
            f"data is a list of {type(data[0]).__name__}",
            "one batch, a tuple such as (x, y), or a list of batches, tuples too",
            "pass tuple(data) if these are the arrays of one batch, else [(x,) for x in data]",
        )
    if iter(data) is data:
        raise InvalidDataError(
            f"data is a {type(data).__name__}, which can be gone through once only",
            "batches that come again: a list, a tf.data.Dataset, an object with __iter__",
            "pass list(data), or tf.data.Dataset.from_generator",
        )
    return lambda: iter(data)


def _array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)


def _slices(data: Any, batch_size: int | None) -> Iterator[Any]:
    length = len(tf.nest.flatten(data)[0])
    size = batch_size or length
    for start in range(0, length, size):
        yield tf.nest.map_structure(lambda leaf, s=start: leaf[s : s + size], data)


def _check_like(first: Batch, batch: Batch) -> None:
    """Refuse a batch of another structure than the first."""
    problem = first.elements.differs(batch.elements)
    if problem:
        raise InvalidDataError(
            f"batch {batch.index} differs from batch 0: {problem}",
            "batches that differ in their number of examples only, or in the length of an axis",
        )


def _refuse_other(problem: str) -> None:
    raise InvalidDataError(
        f"the data are not the same when they are gone through again: {problem}",
        "the same batches, in the same order, each time",
        "shuffle with reshuffle_each_iteration=False, draw augmentations once, or pass "
        "list(data) if it fits in memory",
    )


def _fingerprint(tensors: Sequence[tf.Tensor]) -> int:
    """Return a number made of shapes and of some of the bytes."""
    found = 0
    for tensor in tensors:
        array = np.asarray(tensor)
        found = zlib.crc32(f"{array.shape}{array.dtype}".encode(), found)
        if array.dtype == object:  # text
            found = zlib.crc32(repr(array.ravel()[:_PIECES].tolist()).encode(), found)
            continue
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        step = max(_PIECE, len(raw) // _PIECES)
        for start in range(0, len(raw), step):
            found = zlib.crc32(raw[start : start + _PIECE].tobytes(), found)
    return found
