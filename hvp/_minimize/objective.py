"""A loss as the functions that `scipy.optimize.minimize` asks for."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from scipy.sparse.linalg import LinearOperator

from hvp._minimize.points import Point, Points
from hvp._runtime.guard import OneProcess, refuse_forks
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.arrays import make_array

# Options of `HessianOperator` that have a meaning for a loss at many points.
OPERATOR_OPTIONS = frozenset(
    "batch_size memory_limit reduction regularization weight engine jit_compile recompute".split()
)


class ScipyObjective(OneProcess):
    """A loss as the functions that `scipy.optimize.minimize` asks for.

    Value, gradient and Hessian-vector products at one point come from one evaluation, and the last
    two points are kept: trust-region methods try a point and go back. `minimize` does the rest too;
    this class is for those who call scipy themselves.

    Parameters
    ----------
    loss : callable or HessianOperator
        As for `HessianOperator`; an operator stands for its loss, variables and data, and is left
        as it is.
    variables, data, **options
        As for `HessianOperator`: `batch_size`, `memory_limit` (of both points together),
        `reduction`, `regularization`, `weight`, `engine`, `jit_compile`, `recompute`.
    on_stale : {"raise", "refresh"}, optional
        What happens after a variable has changed that the loss reads and that is not minimized
        over: `StaleOperatorError` once, or new evaluations.

    Attributes
    ----------
    x0 : ndarray
        Where the variables were at the beginning, float64, of shape `(n,)`.

    Raises
    ------
    HvpError
        As `HessianOperator`.

    Notes
    -----
    Vectors are float64 whatever the variables are: scipy's arithmetic is then done in float64, and
    only the loss is evaluated in the variables' type. Each function leaves the variables as it
    found them; `assign` writes to them. Where the loss or its gradient is not finite, the value is
    infinite and the gradient NaN.

    Examples
    --------
    Rosenbrock's function, by one of scipy's trust-region methods:

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

    The products took no further evaluations:

    >>> objective.gradient_evaluations == result.nfev, objective.products > result.nfev
    (True, True)
    """

    @outside_strategies
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
        check_options(options, "ScipyObjective")
        self._set(Points.of(loss, variables, data, on_stale=on_stale, **options))

    @classmethod
    def _of(cls, points: Points) -> ScipyObjective:
        self = cls.__new__(cls)
        self._set(points)
        return self

    def _set(self, points: Points) -> None:
        self._points = points
        self._position = points.position
        self.x0 = self._position.read().numpy().astype(np.float64)

    def __repr__(self) -> str:
        return (
            f"ScipyObjective({self.x0.size} variables, {self.gradient_evaluations} gradient "
            f"evaluations, {self.products} products)"
        )

    @property
    def gradient_evaluations(self) -> int:
        """How often loss and gradient were evaluated."""
        return self._points.work.evaluations

    @property
    def products(self) -> int:
        """How many products with vectors there were."""
        return self._points.products

    @property
    def non_finite(self) -> int:
        """At how many of the points evaluated the loss or its gradient was not finite."""
        return self._points.work.non_finite

    def fun(self, x: Any) -> float:
        """Return the loss.

        Parameters
        ----------
        x : array_like
            Of shape `(n,)`.

        Returns
        -------
        float
            Infinite where the loss or its gradient is not finite, or `x` is not.
        """
        point = self._at(x)
        return math.inf if point is None else point.value

    def jac(self, x: Any) -> np.ndarray:
        """Return the gradient.

        Parameters
        ----------
        x : array_like
            Of shape `(n,)`.

        Returns
        -------
        ndarray
            Of shape `(n,)`, float64.
        """
        point = self._at(x)
        return np.full(self.x0.shape, np.nan) if point is None else point.gradient

    def fun_and_jac(self, x: Any) -> tuple[float, np.ndarray]:
        """Return both, for ``jac=True``.

        Parameters
        ----------
        x : array_like
            Of shape `(n,)`.

        Returns
        -------
        float, ndarray
        """
        return self.fun(x), self.jac(x)

    def hessp(self, x: Any, p: Any) -> np.ndarray:
        """Return the product of the Hessian at `x` with `p`, for ``trust-ncg``, ``trust-krylov``.

        Parameters
        ----------
        x, p : array_like
            Of shape `(n,)`; finite.

        Returns
        -------
        ndarray
            Of shape `(n,)`, float64.
        """
        return self._points.product(self._position.checked(x), np.asarray(p))

    def hess(self, x: Any) -> LinearOperator:
        """Return the Hessian at `x`, for ``Newton-CG`` and ``trust-constr``.

        Parameters
        ----------
        x : array_like
            Of shape `(n,)`.

        Returns
        -------
        LinearOperator
            float64. Answers for `x` for as long as it is used, wherever scipy has gone meanwhile;
            if that is more than one point further, at the cost of another evaluation.
        """
        return _HessianAt(self, np.array(x, np.float64))

    def hess_dense(self, x: Any) -> np.ndarray:
        """Return the Hessian at `x` as a matrix, for ``trust-exact`` and ``dogleg``.

        Parameters
        ----------
        x : array_like
            Of shape `(n,)`.

        Returns
        -------
        ndarray
            Of shape `(n, n)`, float64: `n` products.

        Raises
        ------
        TooLargeError
            If `n` is more than 4096.
        """
        x = self._position.checked(x)
        with self._position.restored():
            self._position.write(x)  # where batches may be evaluated again
            point = self._points.at(x)
            if not point.finite:
                return np.full((x.size, x.size), np.nan)
            return point.operator.to_dense().astype(np.float64)

    def assign(self, x: Any) -> None:
        """Write a vector to the variables.

        Parameters
        ----------
        x : array_like
            Of shape `(n,)`; finite.
        """
        self._position.write(self._position.checked(x))

    def close(self) -> None:
        """Release what is kept of the points."""
        self._points.forget()

    def _at(self, x: Any) -> Point | None:
        """Return the point at x; None if that is not finite."""
        x = make_array(x)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            return None
        return self._points.at(self._position.checked(x))


class _HessianAt(LinearOperator):
    """The Hessian at one point, which is remembered by where it is."""

    def __init__(self, objective: ScipyObjective, x: np.ndarray) -> None:
        super().__init__(np.dtype(np.float64), (x.size, x.size))
        self._objective, self._x = objective, x

    def _matvec(self, v: np.ndarray) -> np.ndarray:
        return self._objective.hessp(self._x, v.reshape(-1))

    def _adjoint(self) -> LinearOperator:
        return self


def check_options(options: dict[str, Any], name: str) -> None:
    """Refuse keyword arguments that are none."""
    unknown = sorted(set(options) - OPERATOR_OPTIONS)
    if unknown:
        raise TypeError(f"{name} got unexpected keyword arguments: {', '.join(unknown)}")
