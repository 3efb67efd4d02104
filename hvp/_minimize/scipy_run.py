"""One run of a method of `scipy.optimize.minimize`."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
from scipy.optimize import OptimizeResult, OptimizeWarning

from hvp._errors import HvpError
from hvp._minimize.non_finite import log_non_finite, non_finite_message
from hvp._minimize.points import Points
from hvp._minimize.scipy_functions import ScipyFunctions
from hvp._runtime.progress import progress_bar

# scipy's methods that use a gradient, and how they use the Hessian: by products with vectors
# (`hessp`), as a `LinearOperator` or as a matrix (`hess`), or not at all.
METHODS = {
    "trust-krylov": "products",
    "trust-ncg": "products",
    "Newton-CG": "operator",
    "trust-constr": "operator",
    "trust-exact": "dense",
    "dogleg": "dense",
    "L-BFGS-B": "none",
    "TNC": "none",
    "BFGS": "none",
    "CG": "none",
    "SLSQP": "none",
}
# Methods that interpolate along lines, which an infinite value would break.
_LINE_SEARCHES = {"Newton-CG", *(name for name, hessian in METHODS.items() if hessian == "none")}
# Methods whose results have the gradient of an earlier point.
_LATE_GRADIENTS = {"Newton-CG", "SLSQP"}
# Values of `OptimizeResult.status`. scipy itself uses 99 for a callback that raised StopIteration.
_STOPPED_BY_CALLBACK, _BROKEN_DOWN = 99, 98
# What scipy says of an option that a method does not have. Python 3.13 adds "Did you mean ...?".
_UNKNOWN_OPTION = re.compile(
    r"Unknown solver options: (.*)"
    r"|_minimize_\w+\(\) got an unexpected keyword argument '(.*?)'(?:\. Did you mean .*)?"
)


class _BreakdownError(Exception):
    """Raised if the method asks for a product with a vector that is not finite."""


class ScipyRun:
    """One run of a method: the functions that scipy calls, and a record of the iterates.

    `method` is a key of `METHODS`. `unconstrained` tells whether there are neither bounds nor
    constraints. `best` is the point with the smallest loss so far, and `last` the last iterate.
    """

    def __init__(
        self,
        points: Points,
        method: str,
        callback: Callable[..., Any] | None,
        options: dict[str, Any],
        progress: Any,
        unconstrained: bool,
    ) -> None:
        self.unconstrained = unconstrained
        self._points, self._functions = points, ScipyFunctions(points)
        self._name, self._hessian = method, METHODS[method]
        self._searches_lines = method in _LINE_SEARCHES
        self._callback, self._options, self._progress = callback, options, progress
        self._callback_takes_result = callback is not None and _takes_result(callback)
        self._iterations = 0
        self.best = self.last = self._functions.x0
        self._best_value = self._functions.fun(self.best)
        self._best_gradient = self._functions.jac(self.best)

    def __call__(self, **arguments: Any) -> OptimizeResult:
        """Run the method; pass `bounds`, `constraints` and `tol` of `scipy.optimize.minimize`."""
        if self.unconstrained and not np.any(self._best_gradient):
            return self._completed(self._result(True, 0, "The gradient is zero at the start."))
        if self._options.get("maxiter") == 0:
            return self._completed(self._result(False, 1, "The option maxiter is zero."))
        with progress_bar(self._progress, unit=" iterations") as self._bar:
            try:
                # trust-krylov divides zero by zero when its Krylov space is exhausted; `hessp`
                # detects that.
                with np.errstate(invalid="ignore"), warnings.catch_warnings():
                    warnings.filterwarnings("error", "Unknown solver options", OptimizeWarning)
                    result = scipy.optimize.minimize(
                        self.fun,
                        self._functions.x0,
                        method=self._name,
                        callback=self._after_iteration,
                        options=self._options,
                        **self._derivatives(),
                        **arguments,
                    )
            except StopIteration:  # some methods do not catch it when a callback raises it
                message = "`callback` raised `StopIteration`."
                result = self._result(False, _STOPPED_BY_CALLBACK, message, self.last)
            except (OptimizeWarning, TypeError) as error:
                unknown = _UNKNOWN_OPTION.fullmatch(str(error))
                if unknown is None:
                    raise
                raise HvpError(
                    f"{self._name} has no option {unknown[1] or unknown[2]}",
                    "options of the method, by scipy's names",
                    f"scipy.optimize.show_options('minimize', {self._name!r}) lists them",
                ) from None
            except _BreakdownError:
                message = (
                    f"{self._name} broke down: a direction is not finite. Returned to the best "
                    "point."
                )
                result = self._result(False, _BROKEN_DOWN, message)
        return self._completed(result)

    def fun(self, x: np.ndarray) -> float:
        """Return the loss, or a value that makes the method retreat if the loss is not finite."""
        value = self._functions.fun(x)
        if math.isfinite(value):
            if value < self._best_value:
                self.best, self._best_value = np.array(x), value
                if self._searches_lines:
                    self._best_gradient = self._functions.jac(x)
            return value
        log_non_finite()
        return self._substitute(x)[0] if self._searches_lines else value

    def jac(self, x: np.ndarray) -> np.ndarray:
        """Return the gradient, or that of the substitute if it is not finite; see `fun`."""
        gradient = self._functions.jac(x)
        if self._searches_lines and not np.isfinite(gradient).all():
            return self._substitute(x)[1]
        return gradient

    def hessp(self, x: np.ndarray, p: np.ndarray) -> np.ndarray:
        """Return a product with the Hessian.

        If the vector is not finite, the method's own arithmetic has broken down. The run is then
        ended, since the method would never return.
        """
        if not np.isfinite(p).all():
            raise _BreakdownError
        return self._functions.hessp(x, p)

    def hess(self, x: np.ndarray) -> np.ndarray:
        """Return the Hessian as a matrix, or zeros if the loss is not finite.

        trust-exact factorizes the matrix before it rejects the point, and would fail on NaN.
        """
        hessian = self._functions.hess_dense(x)
        return hessian if math.isfinite(self._functions.fun(x)) else np.zeros_like(hessian)

    def _derivatives(self) -> dict[str, Any]:
        """Return the derivatives that the method uses, as arguments of scipy's `minimize`."""
        derivatives: dict[str, Any] = {"jac": self.jac}
        if self._hessian == "products":
            derivatives["hessp"] = self.hessp
        elif self._hessian == "operator":
            derivatives["hess"] = self._functions.hess
        elif self._hessian == "dense":
            derivatives["hess"] = self.hess
        return derivatives

    def _substitute(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient at `x` of a parabola that stands in for the loss.

        A line search interpolates, and so needs finite values where the loss is not finite. With
        `s = x - best` and `slope = g' s`, where `g` is the gradient at the best point, it sees the
        parabola

            `q(t) = f(best) + slope t + (rise - slope) t**2`, with `rise = abs(slope)`,

        at `t = 1`. This parabola has the value and the slope of the loss at the best point, and its
        minimum lies at a quarter of the step if the loss falls along the step. A positive lower
        bound on `rise` keeps it from being flat.
        """
        step = x - self.best
        slope = float(self._best_gradient @ step)
        rise = max(abs(slope), 1e-8 * (1 + abs(self._best_value)))
        return self._best_value + rise, (2 * rise - slope) / float(step @ step) * step

    def _after_iteration(self, x: np.ndarray, result: Any = None) -> Any:
        """Record and display the iterate, and call the user's callback.

        Only trust-constr passes a result. An argument by the name of scipy's would ask others for
        one, too, but they pass an array where bounds fix an entry.
        """
        state = result or OptimizeResult(x=np.array(x), fun=self._functions.fun(x))
        self.last = np.array(x)
        self._iterations += 1
        if not self._bar.disable:
            norm = float(np.linalg.norm(self._functions.jac(self.last)))
            self._bar.set_postfix_str(f"loss {float(state.fun):.6g}, gradient {norm:.3g}", False)
            self._bar.update()
        if self._callback is None:
            return None
        self._points.position.write(self.last)
        if self._callback_takes_result:
            return self._callback(intermediate_result=state)
        if self._name == "trust-constr":
            return self._callback(self.last.copy(), state)
        return self._callback(self.last.copy())

    def _result(
        self, success: bool, status: int, message: str, x: np.ndarray | None = None
    ) -> OptimizeResult:
        """Return a result for a run that scipy did not finish, by default at the best point."""
        x = self.best if x is None else x
        return OptimizeResult(
            x=x,
            fun=self._functions.fun(x),
            jac=self._functions.jac(x),
            success=success,
            status=status,
            message=message,
            nit=self._iterations,
            nfev=self._points.work.evaluations,
            njev=self._points.work.evaluations,
        )

    def _completed(self, result: OptimizeResult) -> OptimizeResult:
        """Add counts and times, and return to the best point if the loss is not finite."""
        # The result is rounded to the variables' types, so that it equals their values.
        result.x = self._points.position.rounded(np.asarray(result.x))
        is_finite = math.isfinite(self._functions.fun(result.x))
        if not is_finite:
            result.x, result.fun, result.success = self.best, self._best_value, False
        if not is_finite or self._name in _LATE_GRADIENTS:
            result.jac = self._functions.jac(result.x)
        if not is_finite:
            result.message = (
                f"{result.message} The loss is not finite there; returned to the best point."
            )
        elif not math.isfinite(result.fun):  # a diverging method may report a later value
            result.fun = self._functions.fun(result.x)
        work = self._points.work
        result.gradient_evaluations, result.products = work.evaluations, self._points.products
        result.evaluation_seconds = work.evaluation_seconds
        result.product_seconds = work.product_seconds
        result.non_finite = work.non_finite
        result.message += non_finite_message(work.non_finite)
        return result


def _takes_result(callback: Callable[..., Any]) -> bool:
    """Return whether scipy would call a callback with the keyword `intermediate_result`."""
    try:
        parameters = set(inspect.signature(callback).parameters)
    except ValueError:  # some built-in functions have no signature
        return False
    return parameters == {"intermediate_result"}
