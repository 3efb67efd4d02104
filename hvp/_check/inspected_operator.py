"""The operator under inspection, with timed products and random vectors."""

from __future__ import annotations

import time

import numpy as np

from hvp._operators.symmetric import SymmetricOperator, evaluation_of
from hvp._runtime.interrupts import deliver_interrupt

# Products in low precision count as equal if they differ by at most this many rounding units of the
# operator's norm.
_ROUNDINGS = 6


class InspectedOperator:
    """An operator under inspection, whose products with one vector are timed in `seconds`.

    Products that should be equal may differ by `tolerance`, relative to the norm of the operator.
    `epsilon` is the rounding unit of its dtype, and `rng` draws the random vectors.
    """

    def __init__(self, operator: SymmetricOperator, rng: np.random.Generator) -> None:
        self.operator, self.rng = operator, rng
        self.evaluation = evaluation_of(operator)
        self.size = operator.shape[0]
        self.epsilon = float(np.finfo(operator.dtype).eps)
        self.tolerance = 3 * np.sqrt(self.epsilon)
        if self.evaluation.is_low:
            self.tolerance = max(self.tolerance, _ROUNDINGS * self.evaluation.rounding)
        self.seconds: list[float] = []

    def random_unit_vector(self) -> np.ndarray:
        """Return a random vector of norm one."""
        v = self.rng.standard_normal(self.size)
        return (v / np.linalg.norm(v)).astype(self.operator.dtype)

    def multiply(self, v: np.ndarray) -> np.ndarray:
        """Return the product with a vector in float64, and record its time."""
        deliver_interrupt()
        start = time.perf_counter()
        product = self.operator @ v
        self.seconds.append(time.perf_counter() - start)
        return product.astype(np.float64)  # in which norms of large float32 numbers are finite
