"""One iteration of the truncated Newton method."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvp._errors import NonFiniteError
from hvp._minimize.constraints import Box
from hvp._minimize.forcing import next_forcing
from hvp._minimize.models import WholeModel
from hvp._minimize.newton_state import NewtonState
from hvp._minimize.newton_step import NewtonStep
from hvp._minimize.non_finite import log_non_finite
from hvp._minimize.points import Point
from hvp._minimize.subproblem import Subproblem, euclidean_norm, to_float64
from hvp._minimize.trust_region import is_accepted, next_damping, next_radius
from hvp._operators.symmetric import SymmetricOperator, evaluation_of
from hvp._solve.outcome import SolveOutcome
from hvp._solve.steihaug import SteihaugResult
from hvp._vectors.resources import Resource
from hvp._vectors.watch import Watch

# A difference of two losses is trusted if it is at least this many units of rounding.
_ROUNDINGS = 100
# A model whose products are in low precision is minimized to this many of their rounding units.
_LOW_ROUNDINGS = 4


class NewtonIteration:
    """Takes steps, and adapts the trust region, the damping and the forcing term.

    `NewtonCG` and `NewtonRun` share this object. `state` holds everything that the next step
    depends on. `cg_seconds` is the time spent in conjugate gradients and in building
    preconditioners.
    """

    def __init__(
        self,
        model: WholeModel,
        subproblem: Subproblem,
        state: NewtonState,
        forcing: float | Literal["eisenstat-walker"],
        box: Box | None,
        scale: float | np.ndarray,
    ) -> None:
        self._box, self._scale = box, scale
        self.model, self.position = model, model.points.position
        self._subproblem, self._state, self._forcing = subproblem, state, forcing
        self._eps = float(np.finfo(self.position.dtype).eps)
        # Notices when somebody else changes the variables between two steps.
        self._watch = Watch([Resource.of(variable) for variable in self.position.variables])
        self._watch.set()
        self.cg_seconds = 0.0

    def current_point(self) -> Point:
        """Return the loss at the current values of the variables.

        Raise `NonFiniteError` if the loss or its gradient is not finite.
        """
        point = self.model.current_point(self._number, bool(self._watch.changed()))
        self._watch.set()
        if not point.finite:
            raise NonFiniteError(
                "the loss or its gradient is not finite where the variables are",
                "values at which both are finite",
            )
        return self._confined(point)

    def step(self, point: Point, target: float) -> NewtonStep:
        """Take one step.

        The gradient norm `target`, at which the run ends, bounds the forcing term.
        """
        gradient, norm = point.free_gradient, point.gradient_norm
        forcing = self._next_forcing(norm, target)
        if norm == 0:
            no_step = SteihaugResult(tf.zeros_like(gradient), SolveOutcome.CONVERGED, 0, 0.0, 0.0)
            return self._try(point, None, no_step, forcing)
        start = time.perf_counter()
        state, number = self._state, self._number
        hessian = self.model.hessian(number)
        if self._subproblem.needs_preconditioner(int(state.preconditioner_iterations)):
            self._subproblem.build_preconditioner(hessian, number, state.preconditioner)
            state.preconditioner_iterations.assign(0)
        solution = self._subproblem.solve(
            hessian,
            gradient,
            state.preconditioner,
            mask=point.free,
            radius=float(state.radius),
            tolerance=max(forcing, _model_error(hessian)) * norm,
            damping=float(state.damping),
        )
        self.cg_seconds += time.perf_counter() - start
        state.preconditioner_iterations.assign_add(solution.iterations)
        result = self._try(point, hessian, solution, forcing)
        start = time.perf_counter()
        self._subproblem.learn(solution, result.accepted, state.preconditioner)
        self.cg_seconds += time.perf_counter() - start
        return result

    def saddle_step(self, point: Point) -> NewtonStep | None:
        """Take a step along a direction of negative curvature; return None if none was found.

        The gradient at the point should be small.
        """
        state, number = self._state, self._number
        hessian = self.model.hessian(number)
        solution = self._subproblem.saddle_step(
            hessian, point.free_gradient, number, mask=point.free, radius=float(state.radius)
        )
        if solution is None:
            return None
        return self._try(point, hessian, solution, float(state.forcing))

    def is_exhausted(self) -> bool:
        """Return whether the trust region is so small that no step changes the variables."""
        radius = float(self._state.radius)
        if np.ndim(self._scale) == 0 and radius >= math.sqrt(self._eps):
            return False
        in_units = to_float64(self.position.read()) / self._scale
        return radius < self._eps * euclidean_norm(in_units)

    @property
    def _number(self) -> int:
        """The number of the next step, counted from 1."""
        return int(self._state.iterations) + 1

    def _try(
        self, point: Point, hessian: Any, solution: SteihaugResult, forcing: float
    ) -> NewtonStep:
        """Evaluate the loss at the trial point, accept or reject it, and adapt the state."""
        if solution.outcome == SolveOutcome.NOT_FINITE or not math.isfinite(solution.predicted):
            raise NonFiniteError(
                "a product with the Hessian is not finite",
                "a loss that is bounded below, and twice differentiable where the variables are",
                "look for norms and square roots near zero, and for overflow",
            )
        state = self._state
        ratio, end = math.nan, point
        accepted = from_gradients = False
        before = self.position.read()
        target = before + solution.step
        if self._box is not None and solution.predicted > 0:
            inside = self._box.clipped(target)
            stopped = inside != target
            if tf.reduce_any(stopped):
                solution = self._shortened(point, hessian, solution, inside - before, stopped)
                target = tf.where(solution.step != 0, inside, before)
        if solution.predicted > 0:
            trial = self._confined(self.model.trial_point(target))
            from_gradients = self._is_below_rounding(point, trial, solution)
            ratio = self._ratio(point, trial, solution, from_gradients)
            accepted = is_accepted(ratio)
            if accepted:
                end = trial
                self.model.accept(trial)
                state.gradient_norm.assign(point.gradient_norm)
                state.forcing.assign(forcing)
            else:
                self.position.write(before)
        self._adapt(ratio, solution)
        state.iterations.assign_add(1)
        self._watch.set()
        return NewtonStep(
            iteration=int(state.iterations),
            loss=end.value,
            gradient_norm=end.gradient_norm,
            accepted=accepted,
            ratio=ratio,
            radius=float(state.radius),
            damping=float(state.damping),
            forcing=forcing,
            cg_iterations=solution.iterations,
            outcome=str(solution.outcome),
            from_gradients=from_gradients,
        )

    def _confined(self, point: Point) -> Point:
        """Confine steps from a point, at which the variables are, to the box."""
        if self._box is not None and point.finite:
            point.confine(self._box.free(self.position.read(), point.gradient_tensor))
        return point

    def _shortened(
        self,
        point: Point,
        hessian: Any,
        solution: SteihaugResult,
        step: tf.Tensor,
        stopped: tf.Tensor,
    ) -> SteihaugResult:
        """Return a solution with a step that ends at bounds, and its predicted decrease.

        If the model does not decrease, since other entries have counted on those that bounds have
        `stopped`, only these move, as far as they may.
        """
        damping, gradient = float(self._state.damping), point.free_gradient
        alone = tf.where(stopped & (gradient * step < 0), step, tf.zeros_like(step))
        for shorter in (step, alone):
            predicted = self._subproblem.predicted(hessian, gradient, shorter, damping)
            if predicted > 0:
                break
        return dataclasses.replace(solution, step=shorter, predicted=predicted)

    def _is_below_rounding(self, point: Point, trial: Point, solution: SteihaugResult) -> bool:
        """Return whether the predicted decrease is lost in the rounding error of the losses."""
        if not trial.finite:
            return False
        rounding = _ROUNDINGS * self._eps * max(abs(point.value), abs(trial.value))
        # The terms of a sum may be far larger than the sum.
        is_equal = trial.value == point.value
        is_higher = trial.value - point.value > rounding
        return is_equal or (solution.predicted < rounding and not is_higher)

    def _ratio(
        self, point: Point, trial: Point, solution: SteihaugResult, from_gradients: bool
    ) -> float:
        """Return the decrease of the loss divided by the predicted decrease.

        If the difference of losses is below rounding, the decrease is computed from the gradients
        at both ends, by the trapezoidal rule: `-(g(x) + g(x + p))' p / 2`.
        """
        if not trial.finite:
            log_non_finite()
            return -math.inf
        if not from_gradients:
            return (point.value - trial.value) / solution.predicted
        gradients = to_float64(point.gradient_tensor) + to_float64(trial.gradient_tensor)
        decrease = -float(tf.tensordot(gradients, to_float64(solution.step), 1)) / 2
        interior = solution.outcome in (SolveOutcome.CONVERGED, SolveOutcome.MAXITER)
        if interior and trial.gradient_norm >= point.gradient_norm:
            decrease = min(decrease, 0.0)  # the gradient has reached its own rounding error
        return decrease / solution.predicted

    def _adapt(self, ratio: float, solution: SteihaugResult) -> None:
        """Adapt the trust region and the damping to the quality of the model."""
        if solution.norm == 0:
            return
        state = self._state
        on_boundary = solution.outcome in (SolveOutcome.BOUNDARY, SolveOutcome.NEGATIVE_CURVATURE)
        state.radius.assign(next_radius(float(state.radius), ratio, solution.norm, on_boundary))
        state.damping.assign(next_damping(float(state.damping), ratio))

    def _next_forcing(self, norm: float, target: float) -> float:
        if self._forcing != "eisenstat-walker":
            return float(self._forcing)
        state = self._state
        return next_forcing(norm, float(state.gradient_norm), float(state.forcing), target)


def _model_error(hessian: SymmetricOperator) -> float:
    """Return the relative size of gradients that a model in low precision cannot resolve."""
    evaluation = evaluation_of(hessian)
    return _LOW_ROUNDINGS * evaluation.rounding if evaluation.is_low else 0.0
