"""Choose the rank of a Nystrom preconditioner from the number of right-hand sides.

Conjugate gradients reduce a residual to `rtol` in about `sqrt(c) log(2 / rtol) / 2` iterations,
where `c` is the condition number. A preconditioner of rank `r` replaces the `r` largest
eigenvalues, and so does a block of `k` columns with its `k` largest, nearly. The number of products
for `k` columns and the damping `mu` is therefore about

    r + k sqrt((e[r + 1] + mu) / mu) log(2 / rtol) / 2,

with `e[r + k]` in place of `e[r + 1]` for a block. The sketch provides the first `r` eigenvalues;
later ones are extrapolated. The rank doubles as long as that promises fewer products in total.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvp._operators.matrix import Matrix
from hvp._solve.nystrom import NystromSketch

# The rank to begin with: what is spent where nothing pays.
_FIRST_RANK = 8


@dataclass(frozen=True)
class RankPlan:
    """The solve that a preconditioner is for.

    `columns` counts the right-hand sides, and `are_together` tells whether every column searches
    the Krylov space of all columns.
    """

    columns: int
    are_together: bool
    rtol: float

    def sketch(self, matrix: Matrix, damping: float) -> NystromSketch:
        """Sketch an operator with a rank that pays; the damping must be positive."""
        sketch = NystromSketch(matrix, (0, 0))
        sketch.grow(
            _FIRST_RANK, lambda: not self._pays(sketch.eigenvalues, damping, 2 * sketch.rank)
        )
        return sketch

    def _pays(self, eigenvalues: np.ndarray, damping: float, rank: int) -> bool:
        """Return whether `rank` is expected to need fewer products than the present rank.

        The present rank is the number of `eigenvalues`, which are decreasing and without damping.
        """
        now, then = (self._products(eigenvalues, damping, r) for r in (len(eigenvalues), rank))
        return then < now

    def _products(self, eigenvalues: np.ndarray, damping: float, rank: int) -> float:
        next_one = rank + (self.columns if self.are_together else 1)
        condition = (_extrapolated(eigenvalues, next_one) + damping) / damping
        iterations = math.sqrt(condition) * math.log(2 / min(max(self.rtol, 1e-16), 1.0)) / 2
        return rank + self.columns * iterations


def _extrapolated(eigenvalues: np.ndarray, number: int) -> float:
    """Return an eigenvalue by its number, from 1; those not known follow a power law."""
    count = len(eigenvalues)
    last, middle = float(eigenvalues[-1]), float(eigenvalues[count // 2 - 1])
    if number <= count:
        return float(eigenvalues[number - 1])
    if last <= 0 or middle <= last:
        return max(last, 0.0)
    exponent = math.log(middle / last) / math.log(count / (count // 2))
    return last * (count / number) ** exponent
