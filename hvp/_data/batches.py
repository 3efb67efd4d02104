"""Iteration over batches, their weights, and checks that every pass sees the same data."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import (
    EXPECTED,
    FOR_ONE_ARRAY,
    NO_DATA,
    Elements,
    check_first_axes,
    convert_batch,
    refuse_infinite,
    refuse_list,
    rows_of,
)
from hvp._errors import InvalidDataError
from hvp._runtime.arguments import check_count
from hvp._runtime.interrupts import deliver_interrupt

# The fingerprint of a tensor covers about `_PIECES` pieces of `_PIECE_BYTES` bytes each.
_PIECE_BYTES, _PIECES = 256, 16


@dataclass(frozen=True)
class Batch:
    """One batch, and its position `index` among all batches.

    `weight` is its weight `w_b` in the mean over batches. `fingerprint` is a checksum of a sample
    of the tensors, so that a small change may go undetected, and of a weight that was passed.
    """

    index: int
    elements: Elements
    weight: float
    fingerprint: int


class Batches:
    """Batches that can be iterated over repeatedly.

    A tuple or dict of arrays is one batch, or is divided into batches of `batch_size`. Otherwise
    the data are batches: a `tf.data.Dataset`, a Keras `PyDataset`, a list, or any other iterable
    that can be iterated over more than once. `weight` takes the elements of a batch, as the loss
    does, and returns the weight of the batch; by default this is the number of examples. Batches
    have to be alike; if they are `separate`, those with the same names. `arrays` are the data if
    the batches are parts of arrays, else None.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int | None,
        weight: Callable[..., Any] | None,
        *,
        separate: bool = False,
    ) -> None:
        self._weight, self._separate = weight, separate
        self._fingerprints: list[int] = []
        self._complete = False
        if batch_size is not None:
            check_count(batch_size, "batch_size")
        if isinstance(data, (tuple, dict)):
            data = tf.nest.map_structure(_without_table, data)
        self._source = _source(data, batch_size)
        self.arrays = data if isinstance(data, (tuple, dict)) else None
        # Arrays that may still be divided into batches of any size, to fit a memory limit.
        self._whole = data if batch_size is None and isinstance(data, (tuple, dict)) else None

    @property
    def examples(self) -> int | None:
        """The number of examples in undivided arrays; None if the batches are fixed."""
        return None if self._whole is None else _length(self._whole)

    def head(self, count: int) -> Elements:
        """Return the first examples of undivided arrays."""
        return convert_batch(next(_slices(self._whole, count)), "data")

    def cut(self, size: int) -> None:
        """Divide the arrays into batches of `size` examples."""
        data, self._whole = self._whole, None
        self._source = lambda: _slices(data, size)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over all batches; while one is in use, a thread fetches the next."""
        return self.after(0)

    @property
    def count(self) -> int | None:
        """The number of batches; None until the first pass has ended."""
        return len(self._fingerprints) if self._complete else None

    def weight_of(self, elements: Elements, index: int) -> float:
        """Return the weight of a batch, or of a piece of one."""
        if self._weight is None:
            return float(elements.examples)
        array = np.asarray(elements.call(self._weight))
        if array.ndim:
            raise InvalidDataError(
                f"the weight of batch {index} has shape {array.shape}",
                "a scalar, the weight of the batch as a whole",
                "take its sum: tf.reduce_sum(...)",
            )
        weight = float(array)
        if not (np.isfinite(weight) and weight >= 0):
            raise InvalidDataError(
                f"the weight of batch {index} is {weight}", "a finite number that is not negative"
            )
        return weight

    def kind_of(self, elements: Elements) -> Any:
        """Return what a batch has in common with those that it has to be like."""
        return tuple(elements.by_key) if self._separate else None

    def after(self, count: int) -> Iterator[Batch]:
        """Iterate over the batches without the first `count`."""
        return self.select(lambda index: index >= count)

    def select(self, wanted: Callable[[int], bool]) -> Iterator[Batch]:
        """Iterate over the batches whose number is wanted."""
        source, index = iter(self._source()), 0
        first: dict[Any, Batch] = {}
        with ThreadPoolExecutor(1) as executor:
            following = executor.submit(next, source, _END)
            while (data := following.result()) is not _END:
                following = executor.submit(next, source, _END)
                if wanted(index):
                    batch = self._batch(index, data)
                    _check_like(first.setdefault(self.kind_of(batch.elements), batch), batch)
                    self._check_same(batch)
                    deliver_interrupt()
                    yield batch
                index += 1
        if index == 0:
            raise InvalidDataError(
                "data has no batches",
                "at least one",
                "if it is a list of what a generator yields, make a new generator: one that was "
                "used before yields nothing more",
            )
        if self._complete and index != len(self._fingerprints):
            _refuse_change(
                f"there were {len(self._fingerprints)} batches, and now there are {index}"
            )
        self._complete = True

    def fingerprint(self) -> str:
        """Return the fingerprints of all batches; the first pass must have ended."""
        return " ".join(map(str, self._fingerprints))

    def forget(self) -> None:
        """Discard the fingerprints of a first pass that was interrupted."""
        if not self._complete:
            self._fingerprints = []

    def _batch(self, index: int, data: Any) -> Batch:
        if not isinstance(data, (tuple, dict)) and hasattr(data, "shape"):
            data = (data,)
        data = tuple(data) if isinstance(data, list) else data
        elements = convert_batch(data, f"batch {index}")
        weight = self.weight_of(elements, index)
        weighed = [] if self._weight is None else [np.float64(weight)]
        return Batch(index, elements, weight, _fingerprint([*elements.tensors, *weighed]))

    def _check_same(self, batch: Batch) -> None:
        if batch.index < len(self._fingerprints):
            if self._fingerprints[batch.index] != batch.fingerprint:
                _refuse_change(f"batch {batch.index} is not what it was before")
        elif self._complete:
            _refuse_change(f"there were {len(self._fingerprints)} batches, and now there are more")
        else:
            self._fingerprints.append(batch.fingerprint)


class OneBatch(Batches):
    """Data that are one batch, or none at all, where batches are expected."""

    def __init__(self, elements: Elements) -> None:
        weight = 1.0 if elements is NO_DATA else float(elements.examples)
        self._batch_of_all = Batch(0, elements, weight, 0)
        self._separate = False

    examples = arrays = None
    count = 1

    def select(self, wanted: Callable[[int], bool]) -> Iterator[Batch]:
        """Iterate over the batch, if its number is wanted."""
        if wanted(0):
            yield self._batch_of_all

    def forget(self) -> None:
        """Do nothing: there was no pass that could be interrupted."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the batch."""
        return str(_fingerprint(self._batch_of_all.elements.tensors))


_END = object()


def _source(data: Any, batch_size: int | None) -> Callable[[], Iterator[Any]]:
    """Check the data, and return a function that starts a pass over the batches."""
    if isinstance(data, (tuple, dict)):
        elements = data if isinstance(data, dict) else dict(enumerate(data))
        if not tf.nest.flatten(elements):
            raise InvalidDataError("data has no elements", EXPECTED)
        for key, element in elements.items():
            refuse_list(element, f"data[{key!r}]")
        data = tf.nest.map_structure(_array, data)
        check_first_axes(data if isinstance(data, dict) else dict(enumerate(data)), "data")
        return lambda: _slices(data, batch_size)
    if batch_size is not None:
        raise InvalidDataError(
            f"batch_size={batch_size} is given with data of type {type(data).__name__}",
            "a tuple or dict of arrays to divide, or batches without batch_size",
            "leave out batch_size, or rebatch: dataset.unbatch().batch(batch_size)",
        )
    if isinstance(data, tf.distribute.DistributedDataset):
        return lambda: _of_replicas(data)
    if hasattr(data, "__getitem__") and hasattr(data, "num_batches"):  # a Keras PyDataset
        if data.num_batches is None:
            raise InvalidDataError(
                f"the {type(data).__name__} has no number of batches, as one without end",
                "a finite number of batches",
                "return the number of batches from num_batches",
            )
        return lambda: (data[i] for i in range(data.num_batches))
    refuse_infinite(data, "data")
    if not hasattr(data, "__iter__") or hasattr(data, "shape"):
        remedy = FOR_ONE_ARRAY if hasattr(data, "shape") else ""
        if inspect.isgeneratorfunction(data):
            remedy = "pass list(data()), or tf.data.Dataset.from_generator(data, ...)"
        raise InvalidDataError(
            f"data is a {type(data).__name__}", f"{EXPECTED}, or batches of that kind", remedy
        )
    if isinstance(data, list) and data and hasattr(data[0], "shape"):
        raise InvalidDataError(
            f"data is a list of {type(data[0]).__name__}",
            "one batch, as a tuple such as (x, y), or a list of batches, each of them a tuple",
            "pass tuple(data) if these are the arrays of one batch, else [(x,) for x in data]",
        )
    if iter(data) is data:
        raise InvalidDataError(
            f"data is a {type(data).__name__}, which can be iterated over only once",
            "repeatable batches: a list, a tf.data.Dataset, or an object with __iter__",
            "pass list(data), if it ends and was not used before, or "
            "tf.data.Dataset.from_generator(...), with take(n) if it does not end",
        )
    return lambda: iter(data)


def _of_replicas(data: Any) -> Iterator[Any]:
    """Iterate over the batches that a distributed data set gives to the replicas of this process.

    The last replicas may get none, in the form of a batch without examples.
    """
    for batch in data:
        leaves = tf.nest.flatten(batch)
        several = [isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves]
        for parts in zip(*(x.values if many else (x,) for x, many in zip(leaves, several))):
            if not (parts[0].shape.rank and parts[0].shape[0] == 0):
                yield tf.nest.pack_sequence_as(batch, parts)


def _array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)


def _without_table(leaf: Any) -> Any:
    """Return an array for a table of pandas, whose index names columns, or rows by labels."""
    return np.asarray(leaf) if hasattr(leaf, "iloc") else leaf


def _slices(data: Any, batch_size: int | None) -> Iterator[Any]:
    length = _length(data)
    size = batch_size or length
    for start in range(0, length, size):
        yield tf.nest.map_structure(lambda leaf, s=start: rows_of(leaf, s, s + size), data)


def _length(data: Any) -> int:
    return int(tf.nest.flatten(data)[0].shape[0])


def _check_like(first: Batch, batch: Batch) -> None:
    """Raise `InvalidDataError` if a batch is not of the same kind as the first."""
    difference = batch.elements.difference_from(first.elements)
    if difference:
        raise InvalidDataError(
            f"batch {batch.index} differs from batch 0: it has {difference}",
            "batches that differ only in their number of examples, or in the length of an axis",
        )


def _refuse_change(problem: str) -> None:
    raise InvalidDataError(
        f"the data changed between two passes: {problem}",
        "the same batches, in the same order, in every pass",
        "shuffle with reshuffle_each_iteration=False, draw augmentations once, or pass "
        "list(data) if it fits in memory",
    )


def _fingerprint(tensors: Sequence[Any]) -> int:
    """Return a checksum of the shapes, the dtypes and a sample of the bytes."""
    checksum = 0
    for tensor in tensors:
        array = np.asarray(tensor)
        checksum = zlib.crc32(f"{array.shape}{array.dtype}".encode(), checksum)
        if array.dtype == object:  # strings
            checksum = zlib.crc32(repr(array.ravel()[:_PIECES].tolist()).encode(), checksum)
            continue
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        step = max(_PIECE_BYTES, len(raw) // _PIECES)
        for start in range(0, len(raw), step):
            checksum = zlib.crc32(raw[start : start + _PIECE_BYTES].tobytes(), checksum)
    return checksum
