"""One call of `NewtonCG.minimize`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from scipy.optimize import OptimizeResult

from hvp._errors import NonFiniteError
from hvp._minimize.newton_iteration import NewtonIteration
from hvp._minimize.newton_step import History, NewtonStep
from hvp._minimize.non_finite import non_finite_message
from hvp._minimize.points import Point
from hvp._minimize.subproblem import to_float64
from hvp._runtime.interrupts import deliver_interrupt

# Values of `OptimizeResult.status`.
_CONVERGED, _MAXITER, _ROUNDING, _NOT_FINITE, _AT_INFINITY, _STOPPED_BY_CALLBACK = 0, 1, 2, 3, 4, 99
_MESSAGE_OF_ZERO = (
    "The gradient is exactly zero at the start: the variables are at a stationary point, or the "
    "loss does not depend on them, as a Laplacian does not on the weights of a network of ReLUs."
)
_MESSAGE_AT_INFINITY = (
    "The gradient is small, but steps do not become shorter while it vanishes: the minimum appears "
    "to be at infinity, as that of a logistic regression whose classes are separate. Add a penalty "
    "on the weights."
)
# So many steps show it, each of which gains so much more than predicted, and is so much of the
# length of the step before. At a minimum of a power `p` it is the part `(p - 2) / (p - 1)`.
_ESCAPING, _GAIN, _AS_LONG = 3, 1.15, 0.97
# The run ends after this many rejected steps in a row below the rounding error of the loss.
_MAX_REJECTED = 3
# And after this many steps below that error which have not made the gradient smaller than before.
_MAX_IDLE = 20


class NewtonRun:
    """Takes steps until the gradient is small, and counts the work of this run."""

    def __init__(
        self, iteration: NewtonIteration, callback: Callable[[NewtonStep], Any] | None
    ) -> None:
        self._iteration, self._callback = iteration, callback
        self._start = time.perf_counter()
        self._history = History()
        self._lengths: list[float] = []
        # Counts before the run, which are subtracted from those after it.
        self._work = dataclasses.replace(iteration.model.points.work)
        self._products, self._cg_seconds = iteration.model.products, iteration.cg_seconds

    def __call__(
        self, bar: Any, gtol: float, rtol: float, maxiter: int, leave_saddles: bool
    ) -> OptimizeResult:
        """Take steps; the arguments are those of `NewtonCG.minimize`."""
        iteration, target, rejected = self._iteration, None, 0
        iteration.model.begin()
        # Another matrix does not tell whether the point is a saddle.
        leave_saddles = leave_saddles and iteration.model.is_hessian
        while True:
            deliver_interrupt()
            with iteration.position.restored(only_on_error=True):
                point = iteration.current_point()
                norm = point.gradient_norm
                if target is None:
                    target = max(gtol, rtol * norm)
                small, exceeded = norm <= target, len(self._history) >= maxiter
                if small and self._escapes():
                    return self._result(point, _AT_INFINITY, _MESSAGE_AT_INFINITY)
                never = not self._history and norm == 0
                if small and (exceeded or not leave_saddles):
                    message = _MESSAGE_OF_ZERO if never else "The gradient is small enough."
                    return self._result(point, _CONVERGED, message)
                if exceeded:
                    return self._result(
                        point, _MAXITER, "The maximum number of steps has been reached."
                    )
                if rejected >= _MAX_REJECTED or self._is_idle():
                    return self._result(
                        point, _ROUNDING, "Rounding errors of the loss allow no further step."
                    )
                if iteration.is_exhausted():
                    return self._result(
                        point, _ROUNDING, "No step lowers the loss, however short it is."
                    )
                start = iteration.position.read()
                try:
                    step = iteration.saddle_step(point) if small else iteration.step(point, target)
                except NonFiniteError as error:
                    if not self._history:
                        raise
                    return self._result(point, _NOT_FINITE, str(error))
            if step is None:
                return self._result(
                    point,
                    _CONVERGED,
                    _MESSAGE_OF_ZERO
                    if never
                    else "The gradient is small enough, and no negative curvature was found.",
                )
            rejected = 0 if step.accepted else rejected + step.from_gradients
            self._history.append(step)
            self._lengths.append(float(tf.norm(iteration.position.read() - start)))
            if not bar.disable:
                status = f"loss {step.loss:.6g}, gradient {step.gradient_norm:.3g}"
                bar.set_postfix_str(status, False)
                bar.update()
            if self._callback is not None:
                try:
                    self._callback(step)
                except StopIteration:
                    return self._result(
                        iteration.current_point(),
                        _STOPPED_BY_CALLBACK,
                        "`callback` raised `StopIteration`.",
                    )

    def _is_idle(self) -> bool:
        """Return whether the gradient stays the same in steps below the rounding of the loss."""
        last = self._history[-_MAX_IDLE:]
        if len(last) < _MAX_IDLE or not all(step.from_gradients for step in last):
            return False
        before = min(step.gradient_norm for step in self._history[: -_MAX_IDLE + 1])
        return min(step.gradient_norm for step in last) >= before

    def _escapes(self) -> bool:
        """Return whether the steps keep their length while the gradient vanishes.

        Near a minimum the quadratic model predicts the gain of a step ever more accurately. Where
        the loss falls like an exponential function, each step has the same length and gains 1.26
        times the prediction.
        """
        last = [s for s in zip(self._history, self._lengths) if s[0].accepted][-_ESCAPING:]
        inside = all(step.outcome == "converged" for step, _ in last)
        if len(last) < _ESCAPING or not inside:
            return False
        lengths = [length for _, length in last]
        gains_more = all(step.ratio > _GAIN for step, _ in last)
        return gains_more and all(b > _AS_LONG * a for a, b in zip(lengths, lengths[1:]))

    def _result(self, point: Point, status: int, message: str) -> OptimizeResult:
        iteration, before = self._iteration, self._work
        work = iteration.model.points.work
        non_finite = work.non_finite - before.non_finite
        return OptimizeResult(
            x=to_float64(iteration.position.read()).numpy(),
            fun=point.value,
            jac=point.gradient,
            success=status == _CONVERGED,
            status=status,
            message=message + non_finite_message(non_finite),
            nit=len(self._history),
            history=self._history,
            gradient_evaluations=work.evaluations - before.evaluations,
            products=iteration.model.products - self._products,
            non_finite=non_finite,
            seconds=time.perf_counter() - self._start,
            evaluation_seconds=work.evaluation_seconds - before.evaluation_seconds,
            cg_seconds=iteration.cg_seconds - self._cg_seconds,
        )
