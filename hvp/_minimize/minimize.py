"""`minimize`: scipy's optimizers, each given the derivatives it truly takes."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.optimize
from scipy.optimize import OptimizeResult

from hvp._errors import HvpError, TooLargeError
from hvp._keras.compiled_loss import check_options_of_fit, compiled_problem
from hvp._minimize.non_finite import log_non_finite, non_finite_said
from hvp._minimize.objective import OPERATOR_OPTIONS, ScipyObjective
from hvp._minimize.points import Points
from hvp._minimize.position import variables_size
from hvp._runtime.guard import refuse_forks
from hvp._runtime.progress import check_progress, progress_bar
from hvp._runtime.strategies import outside_strategies

# Variables up to which a dense Hessian is made, as of `HessianOperator.to_dense`.
_DENSE = 4096
_STOPPED = 99  # scipy's status where a callback raised StopIteration
_BROKEN = 98


@dataclass(frozen=True)
class _Method:
    """What a method of scipy's takes.

    Attributes
    ----------
    hessian : str
        ``"products"``, ``"operator"``, ``"dense"`` or ``"none"``.
    searches : bool
        Whether it searches along lines by interpolation, which an infinite value would break.
    """

    hessian: str
    searches: bool = False


METHODS = {
    "trust-krylov": _Method("products"),
    "trust-ncg": _Method("products"),
    "Newton-CG": _Method("operator", searches=True),
    "trust-constr": _Method("operator"),
    "trust-exact": _Method("dense"),
    "dogleg": _Method("dense"),
    "L-BFGS-B": _Method("none", searches=True),
    "TNC": _Method("none", searches=True),
    "BFGS": _Method("none", searches=True),
    "CG": _Method("none", searches=True),
    "SLSQP": _Method("none", searches=True),
}


@outside_strategies
def minimize(
    loss: Any,
    variables: Any = None,
    data: Any = None,
    method: str = "trust-krylov",
    *,
    x0: Any = None,
    bounds: Any = None,
    constraints: Any = (),
    tol: float | None = None,
    callback: Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    progress: bool | Literal["always"] = False,
    **more: Any,
) -> OptimizeResult:
    """Minimize a loss by one of scipy's methods, and leave the variables at the solution.

    Loss, gradient and Hessian-vector products at one point come from one evaluation, and the last
    two points are kept, since trust-region methods go back.

    Parameters
    ----------
    loss : callable or HessianOperator
        As for `HessianOperator`. An operator, such as one of `HessianOperator.from_keras`, stands
        for its loss, variables and data, and is left as it is, stale afterwards.
    variables, data
        As for `HessianOperator`.
    method : str, optional
        One of scipy's that use a gradient: ``"trust-krylov"``, ``"trust-ncg"``, ``"Newton-CG"`` and
        ``"trust-constr"`` use products with the Hessian; ``"trust-exact"`` and ``"dogleg"`` all of
        it, up to 4096 variables; ``"L-BFGS-B"``, ``"TNC"``, ``"BFGS"``, ``"CG"`` and ``"SLSQP"``
        the gradient only, without asking for second derivatives.
    x0 : array_like, optional
        Where to begin, of shape `(n,)`, in the order of `HessianOperator.flatten`; where the
        variables are by default.
    bounds, constraints, tol, options
        As for `scipy.optimize.minimize`.
    callback : callable, optional
        As for `scipy.optimize.minimize`: takes `x`, or the keyword `intermediate_result`, and of
        ``"trust-constr"`` `x` and a state. The variables are at the point in question when it is
        called, what it writes to them has no effect; it ends the run by raising `StopIteration`.
    progress : bool or "always", optional
        Shows the iterations, the loss and the norm of its gradient, by tqdm, on a terminal; with
        ``"always"`` anywhere.
    **more
        Of `HessianOperator`: `batch_size`, `memory_limit` (of both points together), `reduction`,
        `regularization`, `weight`, `engine`, `jit_compile`, `recompute`. What is none of these is
        an option of the method, as scipy names them: `maxiter` (of TNC `maxfun`), `gtol` (of
        Newton-CG `xtol`), ...

    Returns
    -------
    scipy.optimize.OptimizeResult
        With, besides what scipy tells, `gradient_evaluations` (of loss and gradient, one for each
        point visited), `products`, `seconds`, `evaluation_seconds`, `product_seconds`, and
        `non_finite`: at how many points the loss or its gradient was not finite.

    Raises
    ------
    HvpError
        As `HessianOperator`. If the method is none of those above, or a dense Hessian would be too
        large.

    Notes
    -----
    If it raises, the variables are where they were; after a `KeyboardInterrupt` they are at the
    best point so far (with constraints: at the last iterate). scipy's arithmetic is float64; the
    loss is evaluated in the variables' type.

    A point where the loss or its gradient is not finite is never accepted. Trust-region methods see
    an infinite value there and shrink the region. Line searches interpolate; they see the parabola
    that has the value and slope of the best point so far, and its least value at a quarter of the
    step. Both are told in the log and in the result's message.

    Each method stops by its own test, and "success" means that it did: look at `result.jac` too
    (of ``"trust-constr"``, whose `jac` is of the constraints, `result.grad`). A gradient that is
    zero at the start ends every method, also at a saddle; `NewtonCG` leaves it.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([-1.2, 1.0], dtype=tf.float64)
    >>> rosenbrock = lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2
    >>> result = hvp.minimize(rosenbrock, w, method="trust-ncg", gtol=1e-8)
    >>> w.numpy().round(6), result.success
    (array([1., 1.]), True)
    """
    start = time.perf_counter()
    name = _method(method)
    refuse_forks()
    wanted = METHODS[name]
    check_progress(progress)
    settings = {key: more.pop(key) for key in list(more) if key in OPERATOR_OPTIONS}
    options = _merged(options, more)
    if wanted.hessian == "dense":
        _check_size(loss, variables, name)
    points = Points.of(loss, variables, data, x0, products=wanted.hessian != "none", **settings)
    run = _Run(points, name, callback, options, progress, free=bounds is None and not constraints)
    try:
        result = run(bounds=bounds, constraints=constraints, tol=tol)
        points.position.write(result.x)
    except KeyboardInterrupt:
        points.position.write(run.best if run.free else run.last)
        raise
    except BaseException:
        points.position.write(points.origin)
        raise
    finally:
        points.forget()
    result.seconds = time.perf_counter() - start
    return result


def _minimize_keras(
    model: Any,
    data: Any,
    method: str = "trust-krylov",
    *,
    variables: Any = None,
    training: bool = False,
    **options: Any,
) -> OptimizeResult:
    """Minimize the loss that a Keras model was compiled with: `hvp.minimize.from_keras`.

    Parameters
    ----------
    model : keras.Model
        Compiled. Loss weights, several outputs and regularizers count as in `model.evaluate`.
    data : tuple of arrays, or iterable of such
        `(x, y)` or `(x, y, sample_weight)`, as for `model.fit`, or batches of them.
    method : str, optional
        As for `minimize`.
    variables : nest, optional
        What to minimize over; the model's trainable variables by default.
    training : bool, optional
        Whether layers behave as in training (dropout, batch normalization).
    **options
        Of `minimize`.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As `minimize`.

    Raises
    ------
    HvpError
        As `minimize` and `HessianOperator.from_keras`.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hvp
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(loss="mse")
    >>> x = np.random.default_rng(0).standard_normal((20, 3))
    >>> result = hvp.minimize.from_keras(model, (x, x @ [1.0, -2.0, 0.5]), gtol=1e-4)
    >>> model.layers[0].kernel.numpy().round(3).ravel()
    array([ 1. , -2. ,  0.5], dtype=float32)
    """
    loss, variables = compiled_problem(model, data, variables, training, options)
    return minimize(loss, variables, data, method, **options)


minimize.from_keras = _minimize_keras  # type: ignore[attr-defined]


class _BreakdownError(Exception):
    """A method asked for something that is not finite."""


class _Run:
    """One run of a method: what it is given, and what is remembered of it.

    Attributes
    ----------
    best : ndarray
        The point with the least loss so far.
    last : ndarray
        The last iterate.
    """

    def __init__(
        self,
        points: Points,
        name: str,
        callback: Callable[..., Any] | None,
        options: dict[str, Any],
        progress: Any,
        free: bool,
    ) -> None:
        self.free = free
        self._points, self._name, self._method = points, name, METHODS[name]
        self._objective = ScipyObjective._of(points)
        self._callback, self._style = callback, _style(callback)
        self._options, self._progress = options, progress
        self._iterations = 0
        self.best = self.last = self._objective.x0
        self._least = self._objective.fun(self.best)
        self._slope = self._objective.jac(self.best)

    def __call__(self, **given: Any) -> OptimizeResult:
        """Run it."""
        objective, wanted = self._objective, self._method.hessian
        if self.free and not np.any(self._slope):
            return self._told(self._ended(True, 0, "The gradient is zero at the start."))
        if self._options.get("maxiter") == 0:
            return self._told(self._ended(False, 1, "No iterations were asked for."))
        derivatives: dict[str, Any] = {"jac": self.jac}
        if wanted == "products":
            derivatives["hessp"] = self.hessp
        elif wanted != "none":
            derivatives["hess"] = objective.hess if wanted == "operator" else self.hess
        with progress_bar(self._progress, unit=" iterations") as self._bar:
            try:
                # trust-krylov divides zero by zero where a Krylov space ends; seen below.
                with np.errstate(invalid="ignore"):
                    result = scipy.optimize.minimize(
                        self.fun,
                        objective.x0,
                        method=self._name,
                        callback=self._after_iteration,
                        options=self._options,
                        **derivatives,
                        **given,
                    )
            except StopIteration:  # from the callback, of methods that do not know it
                said = "`callback` raised `StopIteration`."
                result = self._ended(False, _STOPPED, said, self.last)
            except _BreakdownError:
                said = f"{self._name} came to a direction that is not finite; back at the best."
                result = self._ended(False, _BROKEN, said)
        return self._told(result)

    def fun(self, x: np.ndarray) -> float:
        """Return the loss, or what makes the method turn back."""
        value = self._objective.fun(x)
        if math.isfinite(value):
            if value < self._least:
                self.best, self._least = np.array(x), value
                if self._method.searches:
                    self._slope = self._objective.jac(x)
            return value
        log_non_finite()
        return self._parabola(x)[0] if self._method.searches else value

    def jac(self, x: np.ndarray) -> np.ndarray:
        """Return the gradient, or that of what makes the method turn back."""
        gradient = self._objective.jac(x)
        if self._method.searches and not np.isfinite(gradient).all():
            return self._parabola(x)[1]
        return gradient

    def hessp(self, x: np.ndarray, p: np.ndarray) -> np.ndarray:
        """Return a product; end the run where the method's own arithmetic has broken down.

        It would go on for ever.
        """
        if not np.isfinite(p).all():
            raise _BreakdownError
        return self._objective.hessp(x, p)

    def hess(self, x: np.ndarray) -> np.ndarray:
        """Return the dense Hessian; where there is none any will do, but no NaN.

        trust-exact looks at it before it turns back.
        """
        hessian = self._objective.hess_dense(x)
        return hessian if math.isfinite(self._objective.fun(x)) else np.zeros_like(hessian)

    def _parabola(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Return value and gradient at `x` of a parabola through the best point so far.

        With the slope there, and its least value at a quarter of the way.
        """
        step = x - self.best
        slope = float(self._slope @ step)
        rise = max(abs(slope), 1e-8 * (1 + abs(self._least)))
        return self._least + rise, (2 * rise - slope) / float(step @ step) * step

    def _after_iteration(self, intermediate_result: Any) -> Any:
        """Note the iterate, show it, call the caller's callback at it."""
        state = intermediate_result
        if isinstance(state, np.ndarray):  # from methods that give no more
            state = OptimizeResult(x=state.copy(), fun=self._objective.fun(state))
        self.last = np.array(state.x)
        self._iterations += 1
        if not self._bar.disable:
            norm = float(np.linalg.norm(self._objective.jac(self.last)))
            self._bar.set_postfix_str(f"loss {float(state.fun):.6g}, gradient {norm:.3g}", False)
            self._bar.update()
        if self._callback is None:
            return None
        self._points.position.write(self.last)
        if self._style == "result":
            return self._callback(intermediate_result=state)
        if self._name == "trust-constr":
            return self._callback(self.last.copy(), state)
        return self._callback(self.last.copy())

    def _ended(
        self, success: bool, status: int, message: str, x: np.ndarray | None = None
    ) -> OptimizeResult:
        """Return a result of our own, at the best point or another."""
        x = self.best if x is None else x
        return OptimizeResult(
            x=x,
            fun=self._objective.fun(x),
            jac=self._objective.jac(x),
            success=success,
            status=status,
            message=message,
            nit=self._iterations,
            nfev=self._points.work.evaluations,
            njev=self._points.work.evaluations,
        )

    def _told(self, result: OptimizeResult) -> OptimizeResult:
        """Add what was done, and make sure that the loss is finite where it ends."""
        result.x = np.asarray(result.x).astype(self._points.position.dtype).astype(np.float64)
        if not math.isfinite(self._objective.fun(result.x)):
            result.x, result.fun, result.success = self.best, self._least, False
            result.jac = self._objective.jac(result.x)
            result.message = f"{result.message} The loss is not finite there: back at the best."
        elif not math.isfinite(result.fun):  # lost by the method, after a step too far
            result.fun = self._objective.fun(result.x)
        work = self._points.work
        result.gradient_evaluations, result.products = work.evaluations, self._points.products
        result.evaluation_seconds = work.evaluation_seconds
        result.product_seconds = work.product_seconds
        result.non_finite = work.non_finite
        result.message += non_finite_said(work.non_finite)
        return result


def _method(method: Any) -> str:
    found = {name.lower(): name for name in METHODS}.get(str(method).lower())
    if found is None:
        raise HvpError(
            f"the argument method is {method!r}",
            "a method of scipy's that uses a gradient: " + ", ".join(METHODS),
            "for methods without a gradient call scipy.optimize.minimize with hvp.ScipyObjective; "
            "for hvp.NewtonCG, its own minimize()",
        )
    return found


def _merged(options: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    if not (options is None or isinstance(options, dict)):
        raise HvpError(f"the argument options is {type(options).__name__}", "a dict")
    check_options_of_fit(more)
    ours = sorted({"jac", "hess", "hessp", "args", "fun"} & set(more))
    if ours:
        raise HvpError(
            f"given: {', '.join(ours)}",
            "none of these: the loss's derivatives are computed",
            "for functions of your own call scipy.optimize.minimize",
        )
    maxiter = {**(options or {}), **more}.get("maxiter")
    if maxiter is not None and maxiter < 0:
        raise HvpError(f"the option maxiter is {maxiter}", "zero or more")
    twice = sorted(set(options or {}) & set(more))
    if twice:
        raise HvpError(
            f"given twice, in options and by themselves: {', '.join(twice)}", "each option once"
        )
    return {**(options or {}), **more}


def _check_size(loss: Any, variables: Any, name: str) -> None:
    size = variables_size(loss, variables)
    if size > _DENSE:
        raise TooLargeError(
            f"{name} needs the Hessian of {size} variables as a matrix",
            f"at most {_DENSE} variables",
            "use trust-krylov, which needs products only",
        )


def _style(callback: Callable[..., Any] | None) -> str:
    """How scipy would call it: with a result, or with where it is."""
    if callback is None:
        return ""
    return "result" if set(_parameters(callback)) == {"intermediate_result"} else "x"


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # of something built in
        return []
