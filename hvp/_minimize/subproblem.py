"""The subproblems of a Newton step: minimizing the model, and finding negative curvature."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvp._minimize.residuals import ResidualSpace
from hvp._operators.symmetric import SymmetricOperator, evaluation_of
from hvp._solve.nystrom import nystrom_eigen, nystrom_factors
from hvp._solve.outcome import SolveOutcome
from hvp._solve.preconditioners import PRECONDITIONERS, Kind
from hvp._solve.recycled import merged
from hvp._solve.steihaug import Steihaug, SteihaugResult

# The preconditioner that is made of the directions of earlier steps.
RECYCLED = "recycled"

# A preconditioner is rebuilt once the iterations that used it number this many times the products
# that it cost.
_LIFETIME = 4
# Iterations spent on the search for negative curvature at a point with a small gradient.
_SEARCH_ITERATIONS = 20
# Radius for that search. It is so large that the last direction dominates the step.
_SEARCH_RADIUS = 1e15
# After so many steps it is said if recycling takes longer than the solves that it shortens.
_TIMED_STEPS = 10

_log = logging.getLogger("hvp")


class Subproblem:
    """Minimizes quadratic models, with or without a preconditioner.

    It is kept out of `NewtonCG`, since checkpoints save the attributes of a `tf.Module`. `kind` is
    a kind of preconditioner, a key of `PRECONDITIONERS`, `RECYCLED`, or None. `maxiter` bounds the
    iterations of conjugate gradients in one step. `seed` is for preconditioners and for the search
    for negative curvature. `residuals` takes the place of conjugate gradients. If it is `masked`,
    all methods take masks of the entries that steps may change.
    """

    def __init__(
        self,
        kind: str | Kind | None,
        rank: int,
        maxiter: int,
        seed: int,
        residuals: ResidualSpace | None = None,
        masked: bool = False,
    ) -> None:
        self._recycles, self._residuals, self._masked = kind == RECYCLED, residuals, masked
        named = "nystrom" if self._recycles else kind if residuals is None else None
        self._kind = PRECONDITIONERS[named] if isinstance(named, str) else named
        self._rank, self._maxiter, self._seed = rank, maxiter, seed
        # By the `id` of the operator, which the solvers keep alive so that it is not reused.
        self._solvers: dict[int, tuple[Steihaug, Steihaug]] = {}
        self._is_current = False
        self._steps, self._solve_seconds, self._recycle_seconds = 0, 0.0, 0.0

    def shapes(self, size: int) -> list[list[int]]:
        """Return the shapes of the preconditioner's tensors for `size` variables."""
        if self._residuals is not None:
            return self._residuals.shapes(size)
        if self._recycles:
            return [[size, self._rank], [self._rank]]
        return [] if self._kind is None else self._kind.shapes(size, self._rank)

    def needs_preconditioner(self, iterations: int) -> bool:
        """Return whether the preconditioner must be built or rebuilt.

        `iterations` is the number of iterations that used the current one; negative if there is
        none.
        """
        if self._kind is None or self._recycles:
            return False
        products = self._kind.products
        if products is None:
            return iterations < 0 or (self._kind.calls_python and not self._is_current)
        return iterations < 0 or iterations >= _LIFETIME * products(self._rank)

    def build_preconditioner(
        self, operator: SymmetricOperator, number: int, tensors: Sequence[tf.Variable]
    ) -> None:
        """Build the preconditioner of an operator, and overwrite `tensors` with it.

        The `number` of the step is part of the seed.
        """
        assert self._kind is not None
        values = self._kind.make(operator, self._rank, [self._seed, number])
        self._is_current = True
        for tensor, value in zip(tensors, values):
            tensor.assign(value)

    def solve(
        self,
        operator: SymmetricOperator,
        gradient: tf.Tensor,
        tensors: Sequence[tf.Variable],
        *,
        mask: tf.Tensor | None = None,
        tolerance: float,
        **limits: float,
    ) -> SteihaugResult:
        """Minimize the model; the limits are those of `Steihaug.solve`."""
        values = [tensor.read_value() for tensor in tensors]
        if self._residuals is not None:
            own = evaluation_of(operator).gradient()
            return self._residuals.solve(own, mask=mask, tensors=values, **limits)
        if self._recycles:
            factors = nystrom_factors(values[1].numpy(), limits.get("damping", 0.0))
            values[1] = tf.constant(factors, gradient.dtype)
        values += [] if mask is None else [mask]
        (solver, _), start = self._solvers_of(operator), time.perf_counter()
        result = solver.solve(
            gradient, tensors=values, tolerance=tolerance, maxiter=self._maxiter, **limits
        )
        self._solve_seconds += time.perf_counter() - start
        return result

    def predicted(
        self, operator: SymmetricOperator, gradient: tf.Tensor, step: tf.Tensor, damping: float
    ) -> float:
        """Return the decrease of the model along any step; it costs a product."""
        if self._residuals is not None:
            return self._residuals.predicted(step, damping)
        image = operator.product(step) + tf.constant(damping, step.dtype) * step
        slope = to_float64(gradient) + to_float64(image) / 2
        return -float(tf.tensordot(slope, to_float64(step), 1))

    def learn(self, result: SteihaugResult, accepted: bool, tensors: Sequence[tf.Variable]) -> None:
        """Keep of a step what later ones use, in `tensors`.

        This is the step itself if it was accepted, for its momentum; or, for `RECYCLED`, the
        eigenvectors as columns and the eigenvalues of what its directions show of the matrix. If
        that takes longer than the solves, a warning is logged, but it goes on: what a run computes
        must not depend on how busy the machine is.
        """
        self._is_current = not accepted
        if self._residuals is not None:
            step = result.step if accepted else tf.zeros_like(result.step)
            for tensor, value in zip(tensors, self._residuals.kept(step)):
                tensor.assign(value)
            return
        if not self._recycles or result.directions is None or result.images is None:
            return
        if not (np.isfinite(result.directions).all() and np.isfinite(result.images).all()):
            return
        start = time.perf_counter()
        vectors, values = (tensor.numpy() for tensor in tensors)
        before = vectors.T[values > 0]
        basis, images = merged(
            (before, values[values > 0, np.newaxis] * before),
            (result.directions, result.images),
            self._rank,
            has_changed=True,
        )
        values, vectors = nystrom_eigen(basis, images)
        room = self._rank - len(values)
        tensors[0].assign(np.pad(vectors, [(0, 0), (0, room)]))
        tensors[1].assign(np.pad(values, (0, room)).astype(vectors.dtype))
        self._recycle_seconds += time.perf_counter() - start
        self._steps += 1
        if self._steps == _TIMED_STEPS and self._recycle_seconds > self._solve_seconds:
            _log.warning(
                "in %d steps, recycling directions took %.2g s and conjugate gradients %.2g s; "
                "products are so fast that preconditioner=None or a lower rank may take less time",
                self._steps,
                self._recycle_seconds,
                self._solve_seconds,
            )

    def saddle_step(
        self,
        operator: SymmetricOperator,
        gradient: tf.Tensor,
        number: int,
        *,
        mask: tf.Tensor | None,
        radius: float,
    ) -> SteihaugResult | None:
        """Search for a direction of negative curvature, and step along it; return None without one.

        Conjugate gradients for a random right-hand side meet such a direction if their Krylov space
        contains one; the `number` of the step is part of the seed. With a unit vector `d` of
        curvature `c = d' H d < 0`, whose sign is such that `g' d <= 0`, the step goes to the
        boundary of the trust region:

            `p = radius d`,  and the model predicts the decrease `-g' p - c radius**2 / 2`.
        """
        dtype = gradient.dtype
        start = tf.random.stateless_normal(gradient.shape, [self._seed, number], dtype=dtype)
        start *= 1.0 if mask is None else mask
        if not tf.reduce_any(start != 0):
            return None  # nothing may move
        start /= tf.norm(start)
        scale = euclidean_norm(operator.product(start))
        _, plain = self._solvers_of(operator)
        result = plain.solve(
            start,
            radius=_SEARCH_RADIUS,
            tolerance=0.0,
            maxiter=_SEARCH_ITERATIONS,
            tensors=[] if mask is None else [mask],
        )
        if result.outcome != SolveOutcome.NEGATIVE_CURVATURE:
            return None
        direction = result.step / tf.norm(result.step)
        if tf.tensordot(gradient, direction, 1) > 0:
            direction = -direction
        image = operator.product(direction)
        curvature = float(tf.tensordot(to_float64(direction), to_float64(image), 1))
        rounding = math.sqrt(float(np.finfo(dtype.as_numpy_dtype).eps)) * scale
        if curvature >= -rounding:
            return None
        step = direction * tf.constant(radius, dtype)
        predicted = -float(tf.tensordot(gradient, step, 1)) - curvature * radius**2 / 2
        products = result.iterations + 2
        return SteihaugResult(step, SolveOutcome.NEGATIVE_CURVATURE, products, radius, predicted)

    def _solvers_of(self, operator: SymmetricOperator) -> tuple[Steihaug, Steihaug]:
        """Return the solvers with and without the preconditioner."""
        solvers = self._solvers.get(id(operator))
        if solvers is None:
            plain = Steihaug(operator, masked=self._masked)
            preconditioned = plain
            if self._kind is not None:
                preconditioned = Steihaug(
                    operator,
                    self._kind.solve,
                    self._rank if self._recycles else 0,
                    masked=self._masked,
                    calls_python=self._kind.calls_python,
                )
            solvers = self._solvers[id(operator)] = preconditioned, plain
        return solvers


def to_float64(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor in float64."""
    return tf.cast(tensor, tf.float64)


def euclidean_norm(tensor: tf.Tensor) -> float:
    """Return the Euclidean norm of a vector, computed in float64."""
    return float(tf.norm(to_float64(tensor)))
