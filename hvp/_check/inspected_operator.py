"""The operator under inspection, with timed products and random vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvp._check.report import Finding
from hvp._operators.symmetric import SymmetricOperator, evaluation_of
from hvp._runtime.interrupts import deliver_interrupt

# Products in low precision count as equal if they differ by at most this many rounding units of the
# operator's norm.
_ROUNDINGS = 6

# The differences have settled if those of two neighbouring steps agree to the part _SETTLED. The
# product is then allowed to deviate from them _MAX_RATIO times as much as they do from each other.
_SETTLED, _MAX_RATIO = 0.05, 10.0
# Products in float32, and in float64, whose relative error is larger are not of that precision.
_NOISE = 1e-3, 1e-9


class InspectedOperator:
    """An operator under inspection, whose products with one vector are timed in `seconds`.

    Products that should be equal may differ by `tolerance`, relative to the norm of the operator.
    `epsilon` is the rounding unit of its dtype, and `rng` draws the random vectors. `noise` is the
    relative error that products were seen to have, unless they are meant to be in low precision.
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
        self.noise = 0.0

    @property
    def is_narrow(self) -> bool:
        """Whether parts of the loss seem to be computed in a narrower type than the operator's."""
        is_float64 = self.epsilon < 1e-12
        return self.noise > _NOISE[is_float64]

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

    def verdict(
        self, text: str, error: float, uncertainty: float, *, causes: str, advice: str = ""
    ) -> Finding:
        """Judge a product by differences, both relative to the size of what is compared.

        `error` is its distance from them, and `uncertainty` their distance from each other.
        `advice` follows if that is too large for a verdict, and `causes` if the product is wrong.
        """
        name = "differences"
        if uncertainty > _SETTLED:
            return Finding(
                name,
                "warning",
                f"inconclusive: {text}, but kinks (such as those of ReLU) or rounding limit the "
                f"accuracy of the differences to {uncertainty:.1g}{advice}",
            )
        if error <= max(_MAX_RATIO * uncertainty, self.tolerance):
            return Finding(name, "ok", text)
        return Finding(name, "failed", f"{text}{causes}")


def settled(differences: Sequence[Any]) -> tuple[Any, float]:
    """Return the mean of the two neighbouring differences that agree best, and their distance.

    The differences are those of several step lengths.
    """
    distances = [float(np.linalg.norm(a - b)) for a, b in zip(differences, differences[1:])]
    best = int(np.argmin(distances))
    return (differences[best] + differences[best + 1]) / 2, distances[best]
