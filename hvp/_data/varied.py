"""A few examples that differ from each other, for checks that would pass if all were alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements, convert_batch, rows_of

# How many examples are looked at, evenly spaced; and for an element of at most `_NARROW` numbers,
# such as a label, one example for each of so many of its values.
_CANDIDATES, _VALUES, _NARROW = 32, 8, 4


def varied_examples(data: Any, count: int) -> Elements:
    """Return up to `count` examples that differ in as many elements as possible.

    If `data` are arrays, only a few rows are converted to tensors.
    """
    leaves = data.leaves if isinstance(data, Elements) else tf.nest.flatten(data)
    dense = [leaf for leaf in leaves if isinstance(leaf, (np.ndarray, tf.Tensor))]
    total = int(leaves[0].shape[0])
    indices = _varied(dense, total, count) if dense else list(range(min(count, total)))
    if isinstance(data, Elements):
        return data.taken(indices)
    rows = tf.nest.map_structure(lambda leaf: _rows(leaf, indices), data)
    return convert_batch(rows, "data")


def _varied(leaves: Sequence[Any], total: int, count: int) -> list[int]:
    candidates = {*np.linspace(0, total - 1, min(total, _CANDIDATES)).astype(int).tolist()}
    for leaf in leaves:
        if 0 < np.prod(leaf.shape[1:], dtype=int) <= _NARROW:
            _, first = np.unique(np.asarray(leaf).reshape(total, -1)[:, :1], return_index=True)
            candidates |= {*first[np.linspace(0, len(first) - 1, _VALUES).astype(int)].tolist()}
    rows = {
        index: [np.asarray(leaf[index]).tobytes() for leaf in leaves]
        for index in sorted(candidates)
    }
    chosen: list[int] = []
    seen: list[set[bytes]] = [set() for _ in leaves]
    while rows and len(chosen) < count:
        news = {
            index: sum(value not in known for value, known in zip(row, seen))
            for index, row in rows.items()
        }
        best = max(news, key=lambda index: (news[index], -index))
        for value, known in zip(rows.pop(best), seen):
            known.add(value)
        chosen.append(best)
    return chosen


def _rows(leaf: Any, indices: Sequence[int]) -> Any:
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor)):
        return tf.gather(leaf, indices)
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.concat(0, [rows_of(leaf, index, index + 1) for index in indices])
    return np.stack([np.asarray(leaf[index]) for index in indices])
