"""The model of a Newton step: solved in a trust region, searched for negative curvature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._minimize.steihaug import Outcome, Steihaug, SteihaugResult
from hvp._operators.operator import SymmetricOperator
from hvp._solve.preconditioners import PRECONDITIONERS

# A preconditioner is made anew once it has served so many times the products it cost.
_SERVES = 4
# Products spent on looking for negative curvature where the gradient is small.
_LOOK = 20


class Subproblem:
    """Solves for steps, with a preconditioner or none.

    Not a part of `NewtonCG` itself, whose attributes go into checkpoints.
    """

    def __init__(self, kind: str | None, rank: int, maxiter: int, seed: int) -> None:
        self._kind = None if kind is None else PRECONDITIONERS[kind]
        self._rank, self._maxiter, self._seed = rank, maxiter, seed
        self._solvers: dict[int, tuple[Any, Steihaug, Steihaug]] = {}

    def shapes(self, size: int) -> list[list[int]]:
        """Return the shapes of the preconditioner's tensors."""
        return [] if self._kind is None else self._kind.shapes(size, self._rank)

    def is_due(self, served: int) -> bool:
        """Whether a new preconditioner is wanted, the last having served so many iterations."""
        if self._kind is None:
            return False
        return served < 0 or served >= _SERVES * self._kind.products(self._rank)

    def make(self, operator: SymmetricOperator, number: int, tensors: list[tf.Variable]) -> None:
        """Make the preconditioner of an operator."""
        assert self._kind is not None
        made = self._kind.make(operator, self._rank, [self._seed, number])
        for tensor, value in zip(tensors, made):
            tensor.assign(value)

    def solve(
        self, operator: SymmetricOperator, gradient: tf.Tensor, tensors: Any, **limits: float
    ) -> SteihaugResult:
        """Minimize the model."""
        read = [tensor.read_value() for tensor in tensors]
        solver = self._solver(operator)[0]
        return solver.solve(gradient, tensors=read, maxiter=self._maxiter, **limits)

    def negative_curvature(
        self, operator: SymmetricOperator, gradient: tf.Tensor, number: int
    ) -> tuple[tf.Tensor, float, int] | None:
        """Look for a direction along which the loss curves downwards, and does not rise.

        Conjugate gradients on a random right-hand side meet one if their Krylov space has one.

        Returns
        -------
        direction : tf.Tensor
            Of norm 1.
        curvature : float
            Along it.
        products : int
            That were needed.
        """
        dtype = gradient.dtype
        start = tf.random.stateless_normal(gradient.shape, [self._seed, number], dtype=dtype)
        start /= tf.norm(start)
        scale = norm_of(operator.product(start))
        far = 1e15  # where the last direction outweighs those before
        result = self._solver(operator)[1].solve(start, radius=far, tolerance=0.0, maxiter=_LOOK)
        if result.outcome != Outcome.NEGATIVE_CURVATURE:
            return None
        direction = result.step / tf.norm(result.step)
        if tf.tensordot(gradient, direction, 1) > 0:
            direction = -direction
        image = operator.product(direction)
        curvature = float(tf.tensordot(wide(direction), wide(image), 1))
        # Less is rounding.
        least = math.sqrt(float(np.finfo(dtype.as_numpy_dtype).eps)) * scale
        return (direction, curvature, result.iterations + 2) if curvature < -least else None

    def _solver(self, operator: SymmetricOperator) -> tuple[Steihaug, Steihaug]:
        """Return what solves with an operator, with and without preconditioner."""
        found = self._solvers.get(id(operator))
        if found is None:
            precondition = None if self._kind is None else self._kind.solve
            plain = Steihaug(operator)
            solver = plain if precondition is None else Steihaug(operator, precondition)
            # The operator is kept, lest another one get its number.
            found = self._solvers[id(operator)] = (operator, solver, plain)
        return found[1:]


def wide(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor in float64."""
    return tf.cast(tensor, tf.float64)


def norm_of(tensor: tf.Tensor) -> float:
    """Return the Euclidean norm, computed in float64."""
    return float(tf.norm(wide(tensor)))
