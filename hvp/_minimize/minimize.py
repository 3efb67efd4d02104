"""`minimize`: scipy's optimizers, with the derivatives that each of them uses."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable
from typing import Any, Literal

from scipy.optimize import OptimizeResult

from hvp._engines.options import declared
from hvp._errors import HvpError, TooLargeError
from hvp._keras.compiled_loss import CompiledModel, check_options_of_fit
from hvp._minimize.curved_loss import check_operator, compiled_loss
from hvp._minimize.objective import OPERATOR_OPTIONS
from hvp._minimize.points import Points
from hvp._minimize.position import variables_size
from hvp._minimize.scipy_run import METHODS, ScipyRun
from hvp._operators.curvature import Curvature
from hvp._runtime.arguments import check_number
from hvp._runtime.guard import refuse_forks
from hvp._runtime.progress import check_progress
from hvp._runtime.strategies import outside_strategies

# Maximum number of variables for a dense Hessian, the default of `HessianOperator.to_dense`.
_MAX_DENSE = 4096
# Methods that take bounds or constraints into account.
_CONSTRAINED = {
    "bounds": ("trust-constr", "L-BFGS-B", "TNC", "SLSQP"),
    "constraints": ("trust-constr", "SLSQP"),
}


@declared(OPERATOR_OPTIONS)
@outside_strategies
def minimize(
    loss: Any,
    variables: Any = None,
    data: Any = None,
    method: str = "trust-krylov",
    *,
    curvature: Curvature = "hessian",
    x0: Any = None,
    bounds: Any = None,
    constraints: Any = (),
    tol: float | None = None,
    callback: Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    progress: bool | Literal["always"] = False,
    **more: Any,
) -> OptimizeResult:
    """Minimize a loss with one of scipy's methods, and assign the solution to the variables.

    Loss, gradient and Hessian-vector products at one point come from one evaluation. The last two
    points are cached, since trust-region methods go back.

    Parameters
    ----------
    loss : callable, pair of callables, or HessianOperator
        As for `HessianOperator`. An operator, such as one from `HessianOperator.from_keras`, stands
        for its loss, variables and data. The operator itself is left unchanged, and is stale
        afterwards.
    variables, data
        As for `HessianOperator`.
    method : str, optional
        One of scipy's methods that use a gradient. ``"trust-krylov"``, the default,
        ``"trust-ncg"``, ``"Newton-CG"`` and ``"trust-constr"`` use Hessian-vector products.
        ``"trust-exact"`` and ``"dogleg"`` use the Hessian as a matrix, for up to 4096 variables.
        ``"L-BFGS-B"``, ``"TNC"``, ``"BFGS"``, ``"CG"`` and ``"SLSQP"`` use the gradient only, and
        work for losses without second derivatives.
    curvature : {"hessian", "gauss-newton"}, optional
        The matrix that methods with second derivatives are given. With ``"gauss-newton"`` the loss
        is a pair `(model, output_loss)`, as for `GaussNewtonOperator`.
    x0 : array_like, optional
        Starting point of shape `(n,)`, in the order of `HessianOperator.flatten`. The default is
        the current values of the variables.
    bounds, constraints, tol, options
        As for `scipy.optimize.minimize`.
    callback : callable, optional
        As for `scipy.optimize.minimize`: it takes `x`, or the keyword `intermediate_result`; for
        ``"trust-constr"`` it takes `x` and a state. When it is called, the variables are at the
        current iterate; its own assignments to them have no effect. It may raise `StopIteration` to
        end the run.
    progress : bool or "always", optional
        Whether to show a tqdm progress bar with the loss and the gradient norm on a terminal;
        ``"always"`` shows it on any stream.
    **more
        Options of `HessianOperator`: {option_names}.
        The two points share `memory_limit`. All others are options of the method, by scipy's names:
        `maxiter` (`maxfun` for TNC), `gtol` (`xtol` for Newton-CG), and so on.

    Returns
    -------
    scipy.optimize.OptimizeResult
        scipy's result, and in addition `gradient_evaluations` (the number of evaluations of loss
        and gradient, one for each point visited), `products`, `seconds`, `evaluation_seconds`,
        `product_seconds`, and `non_finite` (the number of points at which the loss or its gradient
        was not finite).

    Raises
    ------
    HvpError
        As `HessianOperator`. Also if the method is none of those above, or if a dense Hessian would
        be too large.

    Notes
    -----
    If the function raises an error, it restores the variables. After a `KeyboardInterrupt` they are
    at the best point so far (with constraints: at the last iterate). scipy computes in float64; the
    loss is evaluated in the variables' type.

    A point at which the loss or its gradient is not finite is never accepted. Trust-region methods
    see an infinite value there and shrink the region. Line searches interpolate, so they see a
    parabola instead, which has the value and the slope of the loss at the best point so far and its
    minimum at a quarter of the step. Such points are reported in the log and in the result's
    message.

    Each method has its own stopping test, and `success` means that this test was met. Check the
    norm of `result.jac` as well (of `result.grad` for ``"trust-constr"``, where `jac` belongs to
    the constraints). If the gradient is zero at the start, every method stops, even at a saddle
    point; `NewtonCG` leaves it.

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
    name = _method_name(method)
    refuse_forks()
    hessian = METHODS[name]
    check_progress(progress)
    if not (callback is None or callable(callback)):
        raise HvpError(f"the argument callback is {callback!r}", "a function")
    operator_options = {key: more.pop(key) for key in list(more) if key in OPERATOR_OPTIONS}
    method_options = _merged_options(options, more)
    _check_constraints(name, bounds, constraints)
    for key, value in {"tol": tol, **method_options}.items():
        if isinstance(value, float) and math.isnan(value):
            raise HvpError(f"the argument {key} is {value}", "a number")
    loss = check_operator(loss, variables, data, curvature, operator_options)
    if hessian == "dense":
        _check_size(loss, variables, name)
    points = Points.of(loss, variables, data, x0, products=hessian != "none", **operator_options)
    unconstrained = bounds is None and not constraints
    run = ScipyRun(points, name, callback, method_options, progress, unconstrained)
    try:
        result = run(bounds=bounds, constraints=constraints, tol=tol)
        points.position.write(result.x)
    except KeyboardInterrupt:
        points.position.write(run.best if unconstrained else run.last)
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
    model, data, variables, training
        As for `HessianOperator.from_keras`.
    method : str, optional
        As for `minimize`.
    **options
        All other arguments of `minimize`.

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
    compiled = CompiledModel(model, data, training, options)
    variables = model if variables is None else variables
    return minimize(compiled_loss(compiled), variables, data, method, **compiled.options)


minimize.from_keras = _minimize_keras  # type: ignore[attr-defined]


def _method_name(method: Any) -> str:
    """Return the name of a method in scipy's spelling."""
    names = {name.lower(): name for name in METHODS}
    name = names.get(str(method).lower())
    if name is None:
        alike = difflib.get_close_matches(str(method).lower(), names, 1)
        remedy = (
            "call scipy.optimize.minimize with hvp.ScipyObjective for methods without a gradient, "
            "or hvp.NewtonCG(...).minimize() for the method of hvp itself"
        )
        raise HvpError(
            f"the argument method is {method!r}",
            "one of scipy's methods that use a gradient: " + ", ".join(METHODS),
            f"pass method={names[alike[0]]!r}" if alike else remedy,
        )
    return name


def _check_constraints(name: str, bounds: Any, constraints: Any) -> None:
    """Reject bounds and constraints for methods that ignore them."""
    passed = {
        "bounds": bounds is not None,
        "constraints": not isinstance(constraints, (list, tuple)) or len(constraints) > 0,
    }
    for argument, methods in _CONSTRAINED.items():
        if passed[argument] and name not in methods:
            raise HvpError(
                f"the argument {argument} is passed with the method {name}",
                f"a method that takes {argument} into account: {', '.join(methods)}",
                f"pass method={methods[0]!r}, or leave out {argument}",
            )


def _merged_options(options: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """Return the method's options, from `options` and from keyword arguments."""
    if not (options is None or isinstance(options, dict)):
        raise HvpError(f"the argument options is {type(options).__name__}", "a dict")
    check_options_of_fit(more)
    if "args" in more:
        raise HvpError(
            "given: args",
            "the loss's arguments as data",
            "pass data=(x, y) for a loss of x and y, without the variables",
        )
    reserved = sorted({"jac", "hess", "hessp", "fun"} & set(more))
    if reserved:
        raise HvpError(
            f"given: {', '.join(reserved)}",
            "none of these arguments: the loss's derivatives are computed",
            "call scipy.optimize.minimize to minimize with derivatives of your own",
        )
    merged = {**(options or {}), **more}
    maxiter = merged.get("maxiter")
    if maxiter is not None:
        check_number(maxiter, "maxiter", finite=False)
    duplicates = sorted(set(options or {}) & set(more))
    if duplicates:
        raise HvpError(
            f"given twice, in options and as a keyword argument: {', '.join(duplicates)}",
            "each option once",
        )
    return merged


def _check_size(loss: Any, variables: Any, name: str) -> None:
    """Reject methods with a dense Hessian if there are too many variables."""
    size = variables_size(loss, variables)
    if size > _MAX_DENSE:
        raise TooLargeError(
            f"{name} needs the Hessian of {size} variables as a matrix",
            f"at most {_MAX_DENSE} variables",
            "use trust-krylov, which needs Hessian-vector products only; or, if most entries of "
            "the Hessian are zero, hvp.NewtonCG(..., preconditioner='sparse').minimize()",
        )
