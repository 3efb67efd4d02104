"""Sparse matrices from a few products: columns without a common row share one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import tensorflow as tf

from hvp._engines.linear_map import LinearMap
from hvp._errors import FailedCheckError

# How far products with a sparse matrix and with its operator may be apart in a row, relative to
# the products of absolute values: this power of the unit of rounding.
_APART = 0.6
# Beside it, so many units of rounding of the largest row are allowed.
_ROUNDINGS = 8
# Columns of one block of products.
_BLOCK = 64


@dataclass(frozen=True, repr=False)
class Sparsity:
    """Where a matrix may have entries that are not zero, and how few products tell them.

    Attributes
    ----------
    pattern : scipy.sparse.csr_array
        A boolean matrix of the operator's shape.
    colors : ndarray of int
        The number of the product that each column takes part in; of each row, if `by_rows`.
    products : int
        The number of products.
    by_rows : bool
        Whether products are with the transpose.
    separate : ndarray of bool
        Rows of a symmetric matrix that are taken from its columns, which are multiplied one by one.
    """

    pattern: Any
    colors: np.ndarray
    products: int
    by_rows: bool
    separate: np.ndarray

    @functools.cached_property
    def oriented(self) -> Any:
        """The pattern of the matrix that is multiplied, which may be the transpose."""
        return self.pattern.T.tocsr() if self.by_rows else self.pattern

    @functools.cached_property
    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The entries of the pattern in the order of the products that tell them.

        These are their places in the pattern, their rows and colors in products, and for each
        color the number of entries before.
        """
        pattern = self.oriented
        i, j = np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr)), pattern.indices
        if self.separate.any():
            turned = self.separate[i] & ~self.separate[j]
            i, j = np.where(turned, j, i), np.where(turned, i, j)
        color = self.colors[j]
        order = np.argsort(color, kind="stable")
        starts = np.searchsorted(color[order], np.arange(self.products + 1))
        return order, i[order], color[order], starts

    @functools.cached_property
    def at_once(self) -> tuple[tf.Tensor, np.ndarray]:
        """The vectors of all products, and where in these each entry of the pattern is."""
        order, i, color, _ = self.entries
        places, rows = np.empty(len(i), np.int64), self.oriented.shape[0]
        places[order] = color * rows + i
        return tf.constant(self.seeds(0, self.products + 1, self.probe)), places

    @functools.cached_property
    def probe(self) -> np.ndarray:
        """A random vector."""
        return np.random.default_rng(0).standard_normal(len(self.colors))

    def seeds(self, first: int, end: int, probe: np.ndarray) -> np.ndarray:
        """Return the vectors of products as rows, after all of which comes the random vector."""
        seeds = np.zeros((end - first, len(self.colors)), probe.dtype)
        own = np.flatnonzero((self.colors >= first) & (self.colors < end))
        seeds[self.colors[own] - first, own] = 1
        if end > self.products:
            seeds[-1] = probe
        return seeds

    def __repr__(self) -> str:
        rows, columns = self.pattern.shape
        return (
            f"Sparsity({rows} x {columns}, {self.pattern.nnz} entries, {self.products} products"
            f"{' with the transpose' if self.by_rows else ''})"
        )


def sparsity_of(pattern: Any, symmetric: bool) -> Sparsity:
    """Return a pattern with the coloring that needs the fewest products."""
    pattern = scipy.sparse.csr_array(pattern, dtype=bool)
    pattern.sum_duplicates()
    none = np.zeros(pattern.shape[0], bool)
    if symmetric:
        pattern = scipy.sparse.csr_array(pattern + pattern.T)
        separate = _dense_rows(pattern)
        colors = _colored(pattern, separate)
        return Sparsity(pattern, colors, int(colors.max(initial=-1)) + 1, False, separate)
    columns, rows = _colored(pattern, none), _colored(pattern.T.tocsr(), none[:0])
    by_rows = rows.max(initial=-1) < columns.max(initial=-1)
    colors = rows if by_rows else columns
    return Sparsity(pattern, colors, int(colors.max(initial=-1)) + 1, by_rows, none)


def _dense_rows(pattern: Any) -> np.ndarray:
    """Return a mask of the rows of a symmetric pattern that are better multiplied one by one.

    At least as many products are needed as a row has entries, beside one for each of these rows.
    """
    lengths = np.diff(pattern.indptr)
    ordered = np.sort(lengths)[::-1]
    needed = np.arange(len(ordered) + 1) + np.append(ordered, 0)
    count = int(np.argmin(needed))
    separate = np.zeros(len(lengths), bool)
    separate[np.argsort(-lengths, kind="stable")[:count]] = True
    return separate


def _colored(pattern: Any, separate: np.ndarray) -> np.ndarray:
    """Color columns so that two of a color have no common row, other than those that are separate.

    Separate columns have colors of their own. The colors that a row has are the bits of a number.
    """
    count = pattern.shape[1]
    by_columns = pattern.tocsc()
    starts, rows = by_columns.indptr.tolist(), by_columns.indices.tolist()
    skipped = separate.tolist() if len(separate) else [False] * pattern.shape[0]
    alone = skipped if len(separate) == count else [False] * count
    used, colors = [0] * pattern.shape[0], np.empty(count, np.int64)
    for column in range(count):
        if alone[column]:
            continue
        own = [row for row in rows[starts[column] : starts[column + 1]] if not skipped[row]]
        taken = 0
        for row in own:
            taken |= used[row]
        bit = ~taken & (taken + 1)
        colors[column] = bit.bit_length() - 1
        for row in own:
            used[row] |= bit
    mask = np.array(alone, bool)
    first = int(colors[~mask].max(initial=-1)) + 1
    colors[mask] = first + np.arange(mask.sum())
    return colors


def recovered(sparsity: Sparsity, matrix: LinearMap, dtype: np.dtype) -> Any:
    """Return a matrix from products.

    FailedCheckError is raised if its product with a random vector is not that of the map.
    """
    pattern = sparsity.oriented
    matrix = matrix.T if sparsity.by_rows else matrix
    rows = pattern.shape[0]
    probe = sparsity.probe.astype(matrix.domain.dtype.as_numpy_dtype)
    if sparsity.products < _BLOCK:
        seeds, places = sparsity.at_once
        products = matrix.apply(tf.cast(seeds, matrix.domain.dtype)).numpy()
        values = products.ravel().take(places).astype(dtype, copy=False)
    else:
        order, i, color, starts = sparsity.entries
        values = np.empty(len(i), dtype)
        # The random vector is the last row of all blocks.
        for first in range(0, sparsity.products + 1, _BLOCK):
            end = min(first + _BLOCK, sparsity.products + 1)
            seeds = sparsity.seeds(first, end, probe)
            products = matrix.apply(tf.constant(seeds)).numpy()
            taken = slice(starts[first], starts[min(end, sparsity.products)])
            values[order[taken]] = products.ravel()[(color[taken] - first) * rows + i[taken]]
    found = scipy.sparse.csr_array((values, pattern.indices, pattern.indptr), shape=pattern.shape)
    difference = np.abs(found @ probe - products[-1])
    scale = abs(found) @ np.abs(probe) + np.abs(products[-1])
    eps = np.finfo(dtype).eps
    wrong = ~(difference <= eps**_APART * scale + _ROUNDINGS * eps * scale.max(initial=0))
    if wrong.any():
        row = int(np.argmax(np.where(wrong, difference, -1)))
        raise FailedCheckError(
            f"the products of {int(wrong.sum())} rows with a random vector are not those of the "
            f"operator (in row {row} by {difference[row] / scale[row]:.2g} of its size): the "
            "pattern lacks entries, or products are not finite or not accurate",
            "a pattern with all entries that are not zero",
            "leave out pattern; to_dense() needs none",
        )
    return scipy.sparse.csr_array(found.T) if sparsity.by_rows else found
