"""The progress of a Krylov method on one block of right-hand sides, which checkpoints save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvp._solve.outcome import SolveOutcome

# Number of tensors in `BlockProgress.counters`.
COUNTERS = 5
# What checkpoints hold of the progress, besides the state of the cycle.
_ARRAYS = ("x", "directions", "outcome", "iterations", "residual_norms", "active")
_NUMBERS: dict[str, Callable[[Any], Any]] = {"products": int, "is_low": bool, "is_refining": bool}

S = TypeVar("S", bound="Solution")


@dataclass
class Solution:
    """The solutions as rows; consists of arrays only.

    `outcome` holds a `SolveOutcome` for each row, and `residual_norms` the norms of the residuals
    as computed by a product. `directions`, of the shape of `x`, holds directions of negative
    curvature, and zeros for rows without one. `products` counts products with single vectors.
    """

    x: np.ndarray
    directions: np.ndarray
    outcome: np.ndarray
    iterations: np.ndarray
    residual_norms: np.ndarray
    products: int = 0

    @classmethod
    def begin(cls: type[S], x: np.ndarray, **fields: Any) -> S:
        """Return the solutions before anything is computed, with a guess."""
        zeros, norms = np.zeros(len(x), np.int64), np.full(len(x), np.inf)
        return cls(x.copy(), np.zeros_like(x), zeros, zeros.copy(), norms, **fields)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the attributes as arrays, for a checkpoint."""
        return {name: np.asarray(value) for name, value in vars(self).items()}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> Solution:
        """Restore the solutions from the arrays of a checkpoint."""
        fields = {name: array for name, array in arrays.items() if name != "products"}
        return cls(**fields, products=int(arrays["products"]))

    def replace(self, columns: np.ndarray, other: Solution) -> None:
        """Replace the solutions of some columns, but keep their directions."""
        for name in ("x", "outcome", "residual_norms"):
            getattr(self, name)[columns] = getattr(other, name)
        self.iterations[columns] += other.iterations
        self.products += other.products

    def forget_curvature(self) -> None:
        """Treat negative curvature as rounding error, for a matrix that has none."""
        self.directions[:] = 0
        self.outcome[self.outcome == SolveOutcome.NEGATIVE_CURVATURE] = SolveOutcome.STALLED


@dataclass
class BlockProgress(Solution):
    """The progress of a Krylov method on one block of rows, from the best solutions so far.

    The iterations multiply in low precision while `is_low` is set; while `is_refining` is set, they
    multiply in float32 and residuals are computed in float64. An interrupt while `changing` is set
    would leave inconsistent arrays.

    The other attributes belong to the current cycle. `active` lists the rows that are in `counters`
    and `state`, and is empty between cycles. `counters` holds for each active row its outcome, its
    iterations, the smallest norm of its residual, the iterations since that norm or the quadratic
    model fell, and the total decrease of the model. `correction`, of shape `(k, n)`, is what the
    cycle adds to `x` for the rows that have ended in it; it is None between cycles.
    """

    is_low: bool = False
    is_refining: bool = False
    active: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    counters: list[Any] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    correction: np.ndarray | None = None
    changing: bool = False

    def go_on_in_full_precision(self, maxiter: int) -> None:
        """Restart the rows that low precision has not solved."""
        pending = (self.outcome != SolveOutcome.CONVERGED) & (self.iterations < maxiter)
        self.outcome[pending] = SolveOutcome.RUNNING
        self.directions[pending] = 0
        self.is_low = False

    def refine(self, maxiter: int) -> None:
        """Restart the rows that have converged or stalled, as far as float32 can tell."""
        solved = (self.outcome == SolveOutcome.CONVERGED) | (self.outcome == SolveOutcome.STALLED)
        self.outcome[solved & (self.iterations < maxiter)] = SolveOutcome.RUNNING
        self.is_refining = True

    def begin_cycle(self, rows: np.ndarray, state: list[Any]) -> None:
        """Make some rows active, with the initial state of the method."""
        dtype = self.x.dtype
        running = tf.fill([len(rows)], int(SolveOutcome.RUNNING))
        iterations = tf.constant(self.iterations[rows], tf.int32)
        smallest = tf.constant(self.residual_norms[rows], dtype)
        since, gained = tf.zeros([len(rows)], tf.int32), tf.zeros([len(rows)], dtype)
        self.state = state
        self.counters = [running, iterations, smallest, since, gained]
        self.correction = np.zeros_like(self.x)
        self.active = rows

    def end_cycle(self) -> None:
        """Make all rows inactive."""
        self.active, self.state, self.counters = self.active[:0], [], []
        self.correction = None

    @property
    def active_outcome(self) -> np.ndarray:
        """The `SolveOutcome` of each active row."""
        return self.counters[0].numpy()

    @property
    def active_iterations(self) -> np.ndarray:
        """The number of iterations of each active row."""
        return self.counters[1].numpy()

    def summary(self) -> tuple[int, float]:
        """Return the number of iterations and the largest residual norm, for display."""
        if not len(self.active):
            return int(self.iterations.max(initial=0)), float(self.residual_norms.max(initial=0))
        return int(self.active_iterations.max()), float(self.counters[2].numpy().max())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the progress as arrays, for a checkpoint."""
        arrays = {name: np.asarray(getattr(self, name)) for name in (*_ARRAYS, *_NUMBERS)}
        if self.correction is not None:
            arrays["moved"] = self.correction
        arrays.update({f"counter{i}": tensor.numpy() for i, tensor in enumerate(self.counters)})
        arrays.update({f"state{i}": tensor.numpy() for i, tensor in enumerate(self.state)})
        return arrays

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> BlockProgress:
        """Restore the progress from the arrays of a checkpoint."""

        def numbered(name: str) -> list[tf.Tensor]:
            count = sum(key.startswith(name) for key in arrays)
            return [tf.constant(arrays[f"{name}{i}"]) for i in range(count)]

        fields: dict[str, Any] = {name: arrays[name] for name in _ARRAYS}
        fields |= {name: kind(arrays.get(name, 0)) for name, kind in _NUMBERS.items()}
        return cls(
            **fields,
            counters=numbered("counter"),
            state=numbered("state"),
            correction=arrays.get("moved"),
        )
