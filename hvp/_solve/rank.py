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

import numpy as np

from hvp._operators.matrix import Matrix
from hvp._solve.nystrom import NystromSketch

# The rank to begin with: what is spent where nothing pays.
_FIRST_RANK = 8


def sketch_that_pays(
    matrix: Matrix, damping: float, columns: int, *, are_together: bool, rtol: float
) -> NystromSketch:
    """Sketch an operator with a rank that pays for `columns` right-hand sides.

    `are_together` tells whether every column searches the Krylov space of all columns. The damping
    must be positive.
    """
    sketch = NystromSketch(matrix, (0, 0))

    def products(rank: int) -> float:
        next_one = rank + (columns if are_together else 1)
        condition = (_extrapolated(sketch.eigenvalues, next_one) + damping) / damping
        iterations = math.sqrt(condition) * math.log(2 / min(max(rtol, 1e-16), 1.0)) / 2
        return rank + columns * iterations

    sketch.grow(_FIRST_RANK, lambda: not products(2 * sketch.rank) < products(sketch.rank))
    return sketch


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
