"""The decision whether an estimator has drawn enough samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvp._runtime.arguments import check_count, check_number


@dataclass(frozen=True)
class Stopping:
    """The tolerances of an estimate, and the upper bound on its products.

    The standard error may be `max(rtol * norm(estimate), atol)`.
    """

    rtol: float
    atol: float
    max_products: int

    @classmethod
    def of(cls, rtol: Any, atol: Any, max_products: Any, fewest: int) -> Stopping:
        """Check the arguments of an estimator that needs at least `fewest` products."""
        check_count(max_products, "max_products", fewest)
        tolerances = check_number(rtol, "rtol"), check_number(atol, "atol")
        return cls(*tolerances, int(max_products))

    def allowed(self, estimate: Any) -> float:
        """Return the standard error up to which an estimate has converged."""
        return max(self.rtol * float(np.linalg.norm(estimate)), self.atol)

    def sufficient(self, count: int, error: float, estimate: Any) -> int:
        """Return how many samples are likely to suffice, given the error of `count` of them.

        It is `count` if these do, and otherwise no more than twice as many, since the first samples
        determine the error poorly.
        """
        allowed = self.allowed(estimate)
        if error <= allowed:
            return count
        ratio = (error / allowed) ** 2 if allowed else np.inf
        return int(min(2 * count, np.ceil(count * min(ratio, 2.0)) + 1))

    def sample(
        self,
        draw: Callable[[int], np.ndarray],
        *,
        fewest: int,
        widest: int,
        cost: int = 1,
        summary: Callable[[np.ndarray], tuple[Any, float]] | None = None,
        most: float = np.inf,
    ) -> np.ndarray:
        """Draw samples, at least `fewest`, until there are enough.

        `draw` returns a number of samples, at most `widest`, along the first axis; each takes
        `cost` products. `summary` returns their estimate and its error, by default the mean with
        its standard error. If more than `most` samples are likely to be needed, those drawn so far
        are returned.
        """
        samples, target = draw(min(fewest, widest)), fewest
        while True:
            if len(samples) >= target:
                estimate, error = (summary or mean_and_error)(samples)
                allowed = self.allowed(estimate)
                if error > allowed and len(samples) * error**2 > most * allowed**2:
                    return samples
                target = self.sufficient(len(samples), error, estimate)
                target = min(target, self.max_products // cost)
                if len(samples) >= target:
                    return samples
            samples = np.concatenate([samples, draw(min(widest, target - len(samples)))])


def mean_and_error(samples: np.ndarray) -> tuple[float, float]:
    """Return the mean of numbers and its standard error."""
    return float(np.mean(samples)), float(np.std(samples, ddof=1) / np.sqrt(len(samples)))
