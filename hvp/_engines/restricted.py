"""A part of a linear map: some of its rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._engines.linear_map import LinearMap
from hvp._vectors.space import Space


class Selection:
    """Some of the parts of the vectors of a space, by their `places` in increasing order.

    `space` is the space of the vectors of these parts alone. `runs` are the ranges of their entries
    in a flat vector of the whole space, from the first number of each pair up to the second,
    exclusive; neighbouring ranges are joined.
    """

    def __init__(self, whole: Space, places: Sequence[int]) -> None:
        self.places, self._whole = list(places), whole
        self.space = whole.subspace(places)
        self.runs = self._find_runs()

    def widened(self, vector: Any) -> Any:
        """Return a vector of the whole space, in any layout, that is zero elsewhere."""
        if isinstance(vector, (list, tuple)):
            given = dict(zip(self.places, vector))
            return self._whole.with_zeros([given.get(i) for i in range(len(self._whole.shapes))])
        flat = tf.cast(vector, self._whole.dtype)
        pieces = tf.split(flat, [end - start for start, end in self.runs], axis=-1)
        padded, at = [], 0
        for (start, end), piece in zip(self.runs, pieces):
            padded += [self._zeros(flat, start - at), piece]
            at = end
        padded.append(self._zeros(flat, self._whole.size - at))
        return tf.concat(padded, axis=-1)

    def taken(self, vector: Any) -> Any:
        """Return the chosen parts of a vector of the whole space, in any layout."""
        if isinstance(vector, (list, tuple)):
            return [vector[place] for place in self.places]
        pieces = [vector[..., start:end] for start, end in self.runs]
        joined = pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis=-1)
        return tf.cast(joined, self.space.dtype)

    @property
    def entries(self) -> np.ndarray:
        """The numbers of the entries in a flat vector of the whole space."""
        return np.concatenate([np.arange(start, end) for start, end in self.runs])

    def _find_runs(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for place in self.places:
            start = sum(self._whole.sizes[:place])
            end = start + self._whole.sizes[place]
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, end))
        return runs

    def _zeros(self, flat: tf.Tensor, count: int) -> tf.Tensor:
        shape = tf.concat([tf.shape(flat)[:-1], [count]], axis=0)
        return tf.zeros(shape, flat.dtype)


class Entries:
    """Entries of the flat vectors of a space by their numbers, where a `Selection` has whole parts.

    `space` is that of vectors of these entries alone.
    """

    def __init__(self, whole: Space, entries: np.ndarray) -> None:
        self.entries, self._whole = entries, whole
        self.space = Space([0], ["entries"], [(len(entries),)], [whole.dtype])

    def widened(self, vector: Any) -> Any:
        """Return a vector of the whole space, in any layout, that is zero elsewhere."""
        if isinstance(vector, (list, tuple)):
            return self._whole.split(self.widened(vector[0]))
        columns = tf.transpose(vector)
        shape = tf.concat([[self._whole.size], tf.shape(columns)[1:]], axis=0)
        indices = self.entries[:, np.newaxis].astype(np.int32)
        return tf.transpose(tf.scatter_nd(indices, columns, shape))

    def taken(self, vector: Any) -> Any:
        """Return the entries of a vector of the whole space, in any layout."""
        if isinstance(vector, (list, tuple)):
            return [self.taken(self._whole.join(self._whole.with_zeros(vector)))]
        return tf.gather(vector, self.entries, axis=-1)


class Restricted(LinearMap):
    """Some rows and columns of a linear map, whose products are products with the whole.

    `rows` select parts or entries of its results, and `columns` those of its arguments.
    """

    def __init__(
        self, whole: LinearMap, rows: Selection | Entries, columns: Selection | Entries
    ) -> None:
        self._whole, self._rows, self._columns = whole, rows, columns
        self.domain, self.codomain, self.made_of = columns.space, rows.space, [whole]

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout."""
        into, out = (self._rows, self._columns) if adjoint else (self._columns, self._rows)
        return out.taken(self._whole.apply(into.widened(vector), adjoint=adjoint))

    def pattern(self) -> Any:
        """Return rows and columns of the whole pattern."""
        pattern = self._whole.pattern()
        return None if pattern is None else pattern[self._rows.entries][:, self._columns.entries]
