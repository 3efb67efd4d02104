"""A loss as the functions that `scipy.optimize.minimize` asks for."""

from __future__ import annotations

from typing import Any, Literal

from hvp._engines.options import Options, declared, without
from hvp._minimize.points import Points
from hvp._minimize.scipy_functions import ScipyFunctions
from hvp._runtime.guard import OneProcess, refuse_forks
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies

# The options of `HessianOperator` that also apply to a loss at many points.
OPERATOR_OPTIONS = without("on_stale", "progress")


@declared(OPERATOR_OPTIONS)
class ScipyObjective(ScipyFunctions, OneProcess):
    """A loss as the functions that `scipy.optimize.minimize` asks for.

    Value, gradient and Hessian-vector products at one point come from one evaluation. The last two
    points are cached, since trust-region methods try a point and go back. Use `minimize` unless you
    want to call scipy yourself.

    Parameters
    ----------
    loss : callable or HessianOperator
        As for `HessianOperator`. An operator stands for its loss, variables and data, and is left
        unchanged.
    variables, data
        As for `HessianOperator`.
    on_stale : {"raise", "refresh"}, optional
        What to do after a change of a variable that the loss reads but that is not minimized over:
        raise `StaleOperatorError` once, or evaluate the loss again.
    **options
        As for `HessianOperator`: {option_names}. The two points share `memory_limit`.

    Attributes
    ----------
    x0 : ndarray
        The values of the variables at construction, in float64, of shape `(n,)`.

    Raises
    ------
    HvpError
        As `HessianOperator`.

    Notes
    -----
    Vectors are float64 regardless of the variables' type, so that scipy computes in float64; only
    the loss is evaluated in the variables' type. The functions do not change the variables; use
    `assign` to write the solution to them. If the loss or its gradient is not finite, the value is
    infinite and the gradient is NaN.

    Examples
    --------
    Minimize Rosenbrock's function with one of scipy's trust-region methods:

    >>> import scipy.optimize
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([-1.2, 1.0], dtype=tf.float64)
    >>> rosenbrock = lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2
    >>> objective = hvp.ScipyObjective(rosenbrock, w)
    >>> result = scipy.optimize.minimize(
    ...     objective.fun, objective.x0, jac=objective.jac, hessp=objective.hessp,
    ...     method="trust-ncg", options={"gtol": 1e-8})
    >>> result.x.round(6)
    array([1., 1.])
    >>> objective.assign(result.x)

    The products needed no further evaluations of the gradient:

    >>> objective.gradient_evaluations == result.nfev, objective.products > result.nfev
    (True, True)
    """

    @outside_strategies
    @Uninterrupted()
    def __init__(
        self,
        loss: Any,
        variables: Any = None,
        data: Any = None,
        *,
        on_stale: Literal["raise", "refresh"] = "raise",
        **options: Any,
    ) -> None:
        refuse_forks()
        Options.of("ScipyObjective", options, OPERATOR_OPTIONS)
        super().__init__(Points.of(loss, variables, data, on_stale=on_stale, **options))

    def __repr__(self) -> str:
        return (
            f"ScipyObjective({self.x0.size} variables, {self.gradient_evaluations} gradient "
            f"evaluations, {self.products} products)"
        )

    @property
    def gradient_evaluations(self) -> int:
        """Number of evaluations of loss and gradient so far."""
        return self._points.work.evaluations

    @property
    def products(self) -> int:
        """Number of Hessian-vector products so far."""
        return self._points.products

    @property
    def non_finite(self) -> int:
        """Number of evaluations in which the loss or its gradient was not finite."""
        return self._points.work.non_finite

    @Uninterrupted()
    def assign(self, x: Any) -> None:
        """Write a vector to the variables.

        Parameters
        ----------
        x : array_like
            The vector, finite and of shape `(n,)`.
        """
        self._position.write(self._position.checked(x))

    def close(self) -> None:
        """Release the linearizations of the cached points."""
        self._points.forget()
