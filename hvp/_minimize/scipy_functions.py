"""Value, gradient and Hessian of a loss as float64 functions of a vector, as scipy calls them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator

from hvp._minimize.points import Point, Points
from hvp._vectors.arrays import make_array


class ScipyFunctions:
    """The functions that `ScipyObjective` and `minimize` pass to scipy.

    `x0` holds the values of the variables at construction, in float64.
    """

    def __init__(self, points: Points) -> None:
        self._points = points
        self._position = points.position
        self.x0: np.ndarray = self._position.read().numpy().astype(np.float64)

    def fun(self, x: Any) -> float:
        """Return the loss.

        Parameters
        ----------
        x : array_like
            The point, of shape `(n,)`.

        Returns
        -------
        float
            The loss. It is infinite if the loss, its gradient or `x` is not finite.
        """
        point = self._point(x)
        return math.inf if point is None else point.value

    def jac(self, x: Any) -> np.ndarray:
        """Return the gradient.

        Parameters
        ----------
        x : array_like
            The point, of shape `(n,)`.

        Returns
        -------
        ndarray
            The gradient in float64, of shape `(n,)`.
        """
        point = self._point(x)
        return np.full(self.x0.shape, np.nan) if point is None else point.gradient

    def fun_and_jac(self, x: Any) -> tuple[float, np.ndarray]:
        """Return the loss and the gradient, for ``jac=True``.

        Parameters
        ----------
        x : array_like
            The point, of shape `(n,)`.

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
            The point and the vector, finite and of shape `(n,)`.

        Returns
        -------
        ndarray
            The product in float64, of shape `(n,)`.
        """
        return self._points.product(self._position.checked(x), np.asarray(p))

    def hess(self, x: Any) -> LinearOperator:
        """Return the Hessian at `x`, for ``Newton-CG`` and ``trust-constr``.

        Parameters
        ----------
        x : array_like
            The point, of shape `(n,)`.

        Returns
        -------
        LinearOperator
            The Hessian in float64. It stays the Hessian at `x` after scipy moves on to other
            points. If `x` is no longer one of the two cached points, the next product evaluates the
            gradient again.
        """
        x = np.array(x, np.float64)

        def multiply(v: np.ndarray) -> np.ndarray:
            return self.hessp(x, v.reshape(-1))

        shape, dtype = (x.size, x.size), np.float64
        return LinearOperator(shape, matvec=multiply, rmatvec=multiply, dtype=dtype)

    def hess_dense(self, x: Any) -> np.ndarray:
        """Return the Hessian at `x` as a matrix, for ``trust-exact`` and ``dogleg``.

        Parameters
        ----------
        x : array_like
            The point, of shape `(n,)`.

        Returns
        -------
        ndarray
            The Hessian in float64, of shape `(n, n)`. It takes `n` products.

        Raises
        ------
        TooLargeError
            If `n` is more than 4096.
        """
        x = self._position.checked(x)
        with self._position.restored():
            self._position.write(x)  # streamed batches are evaluated at the current values
            point = self._points.at(x)
            if not point.finite:
                return np.full((x.size, x.size), np.nan)
            return point.operator.to_dense().astype(np.float64)

    def _point(self, x: Any) -> Point | None:
        """Return the point at `x`, or None if `x` is not finite."""
        x = make_array(x)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            return None
        return self._points.at(self._position.checked(x))
