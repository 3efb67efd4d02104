"""Random vectors that estimators multiply, drawn block by block."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from hvp._errors import HvpError, NonFiniteError
from hvp._operators.matrix import Matrix
from hvp._runtime.interrupts import deliver_interrupt

# The widest block, and the bytes that one may take.
_WIDEST, _BYTES = 32, 2**28


class Probes:
    """Draws independent random vectors, and counts the products with them."""

    def __init__(self, matrix: Matrix, seed: int) -> None:
        self._matrix, self._random = matrix, np.random.default_rng(seed)
        self.products = 0

    @property
    def widest(self) -> int:
        """The largest number of vectors that a block should have."""
        return block_width(self._matrix)

    def draw(self, count: int) -> np.ndarray:
        """Return vectors of random signs, as rows."""
        signs = self._random.integers(0, 2, (count, self._matrix.size), np.int8)
        return (2 * signs - 1).astype(self._matrix.dtype.as_numpy_dtype)

    def units(self, start: int, count: int) -> np.ndarray:
        """Return unit vectors as rows, beginning with the one at index `start`."""
        return np.eye(count, self._matrix.size, start, self._matrix.dtype.as_numpy_dtype)

    def draw_on_sphere(self, count: int) -> np.ndarray:
        """Return vectors of length `sqrt(n)` and random direction, as rows."""
        normal = self._random.standard_normal((count, self._matrix.size))
        normal *= np.sqrt(self._matrix.size) / np.linalg.norm(normal, axis=1, keepdims=True)
        return normal.astype(self._matrix.dtype.as_numpy_dtype)

    def multiply(self, vectors: np.ndarray) -> np.ndarray:
        """Multiply rows by the operator, damping included."""
        self.products += len(vectors)
        return multiply(self._matrix, vectors)


def block_width(matrix: Matrix) -> int:
    """Return the largest number of vectors that a block should have."""
    return max(1, min(_WIDEST, _BYTES // (matrix.size * matrix.dtype.size)))


def multiply(matrix: Matrix, vectors: np.ndarray) -> np.ndarray:
    """Multiply rows by an operator, damping included, block by block."""
    width, products = block_width(matrix), np.empty_like(vectors)
    for start in range(0, len(vectors), width):
        deliver_interrupt()
        part = slice(start, start + width)
        products[part] = matrix.multiply_damped(vectors[part])
    if not np.isfinite(products).all():
        raise NonFiniteError(
            "a product has entries that are not finite", "finite products", "scale the loss down"
        )
    return products


def check_seed(seed: Any) -> int:
    """Return a seed; raise `HvpError` unless it is a nonnegative integer."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
        raise HvpError(f"the argument seed is {seed!r}", "an integer that is not negative")
    return int(seed)


def check_tolerance(name: str, value: Any) -> float:
    """Return a tolerance; raise `HvpError` unless it is a finite nonnegative number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < float("inf"):
        raise HvpError(f"the argument {name} is {value!r}", "a number that is not negative")
    return float(value)
