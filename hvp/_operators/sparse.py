"""Sparse matrices from a few products: columns without a common row share one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import tensorflow as tf

from hvp._engines.linear_map import LinearMap
from hvp._errors import FailedCheckError, HvpError
from hvp._vectors.space import rounding_of

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
    symmetric : bool
        Whether entries may be read from their transposes.
    """

    pattern: Any
    colors: np.ndarray
    products: int
    by_rows: bool
    symmetric: bool

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
        if self.symmetric:
            # An entry that shares its place with others of its row is read in its column.
            keys = i.astype(np.int64) * (self.products + 1) + self.colors[j]
            _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
            turned = counts[inverse] > 1
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
    try:
        pattern = scipy.sparse.csr_array(pattern, dtype=bool)
    except (TypeError, ValueError) as error:
        raise HvpError(f"the argument pattern is {pattern!r}", "a sparse matrix") from error
    pattern.sum_duplicates()
    if symmetric:
        pattern = scipy.sparse.csr_array(pattern + pattern.T)
        colors = _star_colored(pattern)
        return Sparsity(pattern, colors, int(colors.max(initial=-1)) + 1, False, True)
    columns, rows = _colored(pattern), _colored(pattern.T.tocsr())
    by_rows = rows.max(initial=-1) < columns.max(initial=-1)
    colors = rows if by_rows else columns
    products = int(colors.max(initial=-1)) + 1
    return Sparsity(pattern, colors, products, by_rows, False)


def _star_colored(pattern: Any) -> np.ndarray:
    """Color the columns of a symmetric pattern so that no path of four has two colors [1]_.

    Of each entry or its transpose, one is then alone in its row among the columns of its color: if
    neither were, the other columns would be the ends of such a path. Columns with many entries come
    first. The colors of a row's neighbours are the bits of a number.

    References
    ----------
    .. [1] A. H. Gebremedhin, F. Manne and A. Pothen, "What color is your Jacobian? Graph coloring
       for computing derivatives", SIAM Review 47(4), 2005. https://doi.org/10.1137/S0036144504444711
    """
    count = pattern.shape[0]
    starts, neighbours = pattern.indptr.tolist(), pattern.indices.tolist()
    used, bits = [0] * count, [0] * count
    for column in np.argsort(-np.diff(pattern.indptr), kind="stable").tolist():
        own = neighbours[starts[column] : starts[column + 1]]
        taken = 0
        for row in own:
            bit = bits[row]
            # Of a neighbour's other neighbours, later colors may be taken again.
            taken |= bit | (used[row] & (bit - 1)) if bit else used[row]
        bits[column] = bit = ~taken & (taken + 1)
        for row in own:
            used[row] |= bit
    return np.array([bit.bit_length() - 1 for bit in bits], np.int64)


def _colored(pattern: Any) -> np.ndarray:
    """Color columns so that two of a color have no common row."""
    by_columns = pattern.tocsc()
    starts, rows = by_columns.indptr.tolist(), by_columns.indices.tolist()
    used, colors = [0] * pattern.shape[0], np.empty(pattern.shape[1], np.int64)
    for column in range(pattern.shape[1]):
        own = rows[starts[column] : starts[column + 1]]
        taken = 0
        for row in own:
            taken |= used[row]
        bit = ~taken & (taken + 1)
        colors[column] = bit.bit_length() - 1
        for row in own:
            used[row] |= bit
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
    eps = max(rounding_of(part) for part in (*matrix.domain.dtypes, *matrix.codomain.dtypes))
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
