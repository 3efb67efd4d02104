"""Random vectors that estimators multiply, drawn block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvp._errors import NonFiniteError
from hvp._operators.matrix import Matrix
from hvp._runtime.arguments import check_seed
from hvp._runtime.interrupts import deliver_interrupt
from hvp._runtime.progress import check_progress, progress_bar

# The widest block, and the bytes that one may take.
_WIDEST, _BYTES = 32, 2**28


class Probes:
    """Draws random vectors, multiplies them, and counts the products, on a progress bar too."""

    def __init__(self, matrix: Matrix, seed: int, bar: Any) -> None:
        self.matrix, self.random = matrix, np.random.default_rng(seed)
        self._bar, self.products = bar, 0

    @property
    def widest(self) -> int:
        """The largest number of vectors that a block should have."""
        matrix = self.matrix
        return max(1, min(_WIDEST, _BYTES // (matrix.size * matrix.dtype.size)))

    def draw(self, count: int) -> np.ndarray:
        """Return vectors of random signs, as rows."""
        signs = self.random.integers(0, 2, (count, self.matrix.size), np.int8)
        return (2 * signs - 1).astype(self.matrix.dtype.as_numpy_dtype)

    def units(self, start: int, count: int) -> np.ndarray:
        """Return unit vectors as rows, beginning with the one at index `start`."""
        return np.eye(count, self.matrix.size, start, self.matrix.dtype.as_numpy_dtype)

    def draw_on_sphere(self, count: int) -> np.ndarray:
        """Return vectors of length `sqrt(n)` and random direction, as rows."""
        normal = self.random.standard_normal((count, self.matrix.size))
        normal *= np.sqrt(self.matrix.size) / np.linalg.norm(normal, axis=1, keepdims=True)
        return normal.astype(self.matrix.dtype.as_numpy_dtype)

    def multiply(self, vectors: np.ndarray) -> np.ndarray:
        """Multiply rows by the operator, damping included, block by block."""
        width, products = self.widest, np.empty_like(vectors)
        for start in range(0, len(vectors), width):
            deliver_interrupt()
            part = slice(start, start + width)
            products[part] = self.matrix.multiply_damped(vectors[part])
        refuse_non_finite(products)
        self.count(len(vectors))
        return products

    def count(self, products: int) -> None:
        """Count products that were computed elsewhere."""
        self.products += products
        self._bar.update(products)


def refuse_non_finite(products: np.ndarray) -> None:
    """Raise `NonFiniteError` if products, or what was computed from some, are not finite."""
    if not np.isfinite(products).all():
        raise NonFiniteError(
            "a product has entries that are not finite", "finite products", "scale the loss down"
        )


@contextlib.contextmanager
def probing(matrix: Matrix, progress: Any, seed: Any, total: int | None) -> Iterator[Probes]:
    """Check the arguments that all estimators take, and let them multiply in full precision.

    At most `total` products are expected.
    """
    check_progress(progress)
    seed = check_seed(seed)
    with (
        progress_bar(progress, total=total, unit="product") as bar,
        matrix.in_full_precision() as exact,
    ):
        yield Probes(exact, seed, bar)
