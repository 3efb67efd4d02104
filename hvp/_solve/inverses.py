"""Inverses of a symmetric operator, exact and approximate, as operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, eigsh

from hvp._engines.array_map import ArrayMap
from hvp._errors import ConvergenceWarning, HvpError, TooLargeError
from hvp._graphs.compiled import Compiled
from hvp._graphs.python_calls import can_wait_for_python
from hvp._operators.damping import check_damping
from hvp._operators.matrix import Matrix
from hvp._operators.operator import Operator
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.arguments import check_count, check_number
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._runtime.user_warning import warn

# Eigenvalues below this many rounding units of the largest are taken for zero.
_ROUNDING = 32
# Standard errors are those of a minimum if a Newton step changes the log-likelihood by less. The
# estimates are then within a seventh of a standard error of it.
_DECREASE = 0.01
# Parameters with a larger entry in an eigenvector of norm one are named.
_SHARE = 0.1
# Columns in one product when the dense matrix is computed.
_BLOCK = 64
# Relative tolerance of the estimate of the largest eigenvalue, and the factor that makes the
# estimate an upper bound.
_TOLERANCE, _SAFETY = 1e-2, 1.1
# Iterations of the Neumann series in one call of the graph.
_ITERATIONS = 32


def _damped_product(matrix: Matrix, damping: float, X: np.ndarray) -> np.ndarray:
    """Multiply columns by a matrix whose own damping is replaced by another one."""
    deliver_interrupt()
    product = matrix.multiply(tf.constant(np.ascontiguousarray(X.T))).numpy().T
    return product + np.asarray(damping, X.dtype) * X


class ExactInverse(Operator):
    """The inverse of an operator, from all of its eigenvalues.

    With the eigenvalues `e` and the eigenvectors `Q` of the damped operator, the inverse is
    `Q @ diag(1 / e) @ Q.T`. Eigenvalues that are zero to rounding are left out, so that the inverse
    of a singular matrix is its pseudo-inverse, which gives the least-squares solution of smallest
    norm. For the standard errors of a fit, use `standard_errors`, which returns infinity for what a
    singular matrix does not determine, and raises an error for indefinite matrices.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        The symmetric operator to invert.
    damping : float, optional
        Multiple of the identity that is added to the operator's own damping.
    max_size : int, optional
        Upper bound on `n`.

    Attributes
    ----------
    eigenvalues : ndarray
        Eigenvalues of the damped operator, of shape `(n,)`, increasing, in float64.
    eigenvectors : ndarray
        Eigenvectors as columns, of shape `(n, n)`.
    rank : int
        Number of eigenvalues that are not zero to rounding.
    is_nonzero : ndarray of bool
        Whether each eigenvalue is not zero to rounding, of shape `(n,)`.

    Raises
    ------
    TooLargeError
        If `n` is larger than `max_size`.
    HvpError
        If the operator is not square and real, or the damping is invalid.

    Notes
    -----
    The construction costs `n` products, memory for three `n` by `n` matrices in float64, and
    `O(n**3)` operations.

    Whether an eigenvalue is zero does not depend on the units of the variables if the matrix is
    positive definite. If eigenvalues are zero to rounding next to the largest one, the matrix is
    scaled to ones on its diagonal, and the test is repeated. If it is positive definite then, all
    eigenvalues are computed to high relative accuracy by Jacobi's method [DV]_.

    References
    ----------
    .. [DV] J. Demmel and K. Veselic, "Jacobi's method is more accurate than QR", SIAM Journal on
       Matrix Analysis and Applications 13(4), 1204-1245, 1992. https://doi.org/10.1137/0613074

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> inverse = hvp.ExactInverse(H)
    >>> inverse.eigenvalues
    array([1., 4., 9.])
    >>> inverse @ [1.0, 1.0, 9.0]
    array([1.  , 0.25, 1.  ], dtype=float32)
    >>> inverse.diagonal.round(3)
    array([1.   , 0.25 , 0.111])
    """

    is_symmetric = True

    @Uninterrupted()
    def __init__(self, H: Any, *, damping: float = 0.0, max_size: int = 4096) -> None:
        matrix = symmetric_matrix(H, "ExactInverse")
        total, size = matrix.damping + check_damping(damping), matrix.size
        dtype = matrix.dtype.as_numpy_dtype
        if size > check_count(max_size, "max_size"):
            raise TooLargeError(
                f"the exact inverse was requested for a {size} x {size} matrix",
                f"a matrix of at most {max_size} x {max_size}",
                "use conjugate gradients, or pass a larger max_size",
            )
        # It is the inverse of this evaluation of the operator.
        make_sure = functools.partial(matrix.make_sure_evaluated, matrix.evaluations)
        dense = np.empty((size, size))
        with matrix.in_full_precision() as exact:
            for start in range(0, size, _BLOCK):
                columns = np.eye(size, min(_BLOCK, size - start), -start, dtype)
                dense[:, start : start + _BLOCK] = _damped_product(exact, total, columns)
        dense = (dense + dense.T) / 2
        self.eigenvalues, self.eigenvectors = scipy.linalg.eigh(dense)
        rounding = _ROUNDING * np.finfo(dtype).eps
        zero = np.abs(self.eigenvalues) <= rounding * np.abs(self.eigenvalues).max()
        if zero.any():
            graded = _eigen_of_graded(dense, rounding)
            if graded is not None:
                self.eigenvalues, self.eigenvectors = graded
                zero = self.eigenvalues == 0
        self._dense, self._make_sure, self._gradient = dense, make_sure, matrix.gradient_or_none
        self.rank = int(size - zero.sum())
        self.is_nonzero = ~zero
        self._reciprocals = np.where(zero, 0, 1 / np.where(zero, 1, self.eigenvalues))
        basis, reciprocals = self.eigenvectors, self._reciprocals

        def solve(rows: np.ndarray) -> np.ndarray:
            make_sure()
            return (rows.astype(np.float64) @ basis * reciprocals) @ basis.T

        self.damping = total
        super().__init__(ArrayMap(solve, matrix.space, matrix.linear_map.sources))

    @property
    def diagonal(self) -> np.ndarray:  # type: ignore[override]
        """The diagonal of the inverse, of shape `(n,)`, in float64.

        This costs `O(n**2)` operations. For a singular matrix, it is the diagonal of the
        pseudo-inverse.
        """
        self._make_sure()
        return np.einsum("ij,j,ij->i", self.eigenvectors, self._reciprocals, self.eigenvectors)

    def standard_errors(self) -> np.ndarray:
        """Return the standard errors: the square roots of the diagonal of the inverse.

        `H` must be the Hessian of a negative log-likelihood at its minimum, or its Gauss-Newton or
        Fisher matrix, for the sum over all examples. With a loss that is the mean over examples,
        pass ``reduction="sum"`` to the operator.

        Returns
        -------
        ndarray
            Shape `(n,)`, in float64, in the units of the variables; ``H.unflatten`` gives it their
            shapes. A parameter that the data do not determine, alone or together with others, has
            the standard error infinity.

        Raises
        ------
        HvpError
            If the matrix is not positive semi-definite, so that the variables are not at a minimum.

        Warns
        -----
        ConvergenceWarning
            If the gradient of `H` shows that the variables are not at a minimum, or if the matrix
            is so nearly singular that the errors depend on how accurate the minimum is.

        Notes
        -----
        The errors of `scipy.optimize.curve_fit` with ``absolute_sigma=True`` are those of the
        Gauss-Newton matrix of half the sum of squared residuals, each divided by its `sigma`.
        Without `absolute_sigma`, it multiplies them by the root of the sum of these squares,
        divided by the number of data minus the number of parameters.

        Examples
        --------
        >>> import tensorflow as tf
        >>> import hvp
        >>> x = tf.constant([9.8, 10.1, 10.4, 9.7])  # measured with an error of 0.2
        >>> mean = tf.Variable(10.0)
        >>> H = hvp.HessianOperator(lambda: tf.reduce_sum((x - mean) ** 2) / (2 * 0.2**2), mean)
        >>> hvp.ExactInverse(H).standard_errors().round(4)  # 0.2 / sqrt(4)
        array([0.1])
        """
        size, rounding = self.shape[0], _ROUNDING * np.finfo(self.dtype).eps
        used = np.any(self._dense, axis=0)
        variances = np.full(size, np.inf)
        if not used.any():
            return variances
        units = np.sqrt(np.abs(self._dense.diagonal()[used]))
        units[units == 0] = 1
        values, vectors = scipy.linalg.eigh(_scaled(self._dense, used, units))
        # Eigenvalues next to those that are positive only by rounding, or by what the gradient is
        # away from zero.
        smallest = np.sqrt(np.finfo(self.dtype).eps) * abs(values[-1])
        entries = np.flatnonzero(used)[np.abs(vectors[:, 0]) > _SHARE]
        combination = f"a combination of the parameters {', '.join(map(str, entries))}"
        if values[0] < -rounding * abs(values[-1]):
            raise HvpError(
                "the matrix is not positive semi-definite, so its inverse cannot be a covariance: "
                f"scaled to ones on its diagonal, it has the eigenvalue {values[0]:.3g}, for "
                f"{combination}",
                "the Hessian at a minimum of the negative log-likelihood",
                "minimize further, with hvp.NewtonCG(...).minimize(gtol=...) for example; if that "
                "changes nothing, the data may not determine this combination"
                if values[0] > -smallest
                else "minimize first, with hvp.minimize for example, and check the sign of the "
                "loss",
            )
        positive = values > rounding * values[-1]
        if positive.all() and values[0] < smallest:
            warn(
                f"hvp.ExactInverse: {combination} is hardly determined (scaled to ones on its "
                f"diagonal, the matrix has the eigenvalue {values[0]:.1g}), so the standard errors "
                "may be far too small or too large; compare with hvp.GaussNewtonOperator",
                ConvergenceWarning,
            )
        known = np.sum(vectors[:, ~positive] ** 2, axis=1) <= rounding
        inverse = np.sum(vectors[:, positive] ** 2 / values[positive], axis=1)
        variances[used] = np.where(known, inverse / units**2, np.inf)
        self._warn_of_gradient(used, units, values, vectors, positive)
        return np.sqrt(variances)

    def _warn_of_gradient(
        self, used: Any, units: np.ndarray, values: np.ndarray, vectors: np.ndarray, positive: Any
    ) -> None:
        """Warn if a Newton step would noticeably lower the loss."""
        gradient = self._gradient()
        if gradient is None:
            return
        along = vectors[:, positive].T @ (gradient.astype(np.float64)[used] / units)
        decrease = float(np.sum(along**2 / values[positive])) / 2
        if decrease > _DECREASE:
            warn(
                "hvp.ExactInverse: the variables are not at a minimum, where standard errors are "
                f"defined: by its gradient, the loss would fall by {decrease:.2g}; minimize first",
                ConvergenceWarning,
            )

    def to_dense(self, *, max_size: int | None = None) -> np.ndarray:
        """Return the inverse as a matrix.

        Parameters
        ----------
        max_size : int, optional
            Not used: the inverse is held as matrices of this size.

        Returns
        -------
        ndarray
            Shape `(n, n)`, exactly symmetric, in float64.

        Notes
        -----
        This costs `O(n**3)` operations and no products.
        """
        self._make_sure()
        del max_size
        inverse = (self.eigenvectors * self._reciprocals) @ self.eigenvectors.T
        return (inverse + inverse.T) / 2


def _scaled(matrix: np.ndarray, used: Any, units: np.ndarray) -> np.ndarray:
    """Return the used rows and columns of a matrix, divided by their units."""
    return matrix[np.ix_(used, used)] / units / units[:, np.newaxis]


def _eigen_of_graded(matrix: np.ndarray, rounding: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Return eigenvalues, and eigenvectors as columns, of a matrix in badly scaled units.

    Rows that are zero are eigenvectors. The other rows and columns are scaled to ones on the
    diagonal; return None unless the result is positive definite beyond rounding.
    """
    used = np.any(matrix, axis=0)
    diagonal = matrix.diagonal()[used]
    if not used.any() or not (diagonal > 0).all():
        return None
    units = np.sqrt(diagonal)
    scaled = _scaled(matrix, used, units)
    apart = scipy.linalg.eigvalsh(scaled)
    if apart[0] <= rounding * apart[-1]:
        return None
    # H = R' R, and R has columns of different scales, which one-sided rotations respect.
    factor = scipy.linalg.cholesky(scaled) * units
    values, _, vectors, work, _, info = scipy.linalg.lapack.dgejsv(factor, joba=0, jobu=0, jobv=0)
    if info:
        return None
    order = np.argsort(values)
    size, zeros = len(matrix), len(matrix) - len(order)
    eigenvectors = np.zeros((size, size))
    eigenvectors[~used, np.arange(zeros)] = 1
    eigenvectors[np.ix_(used, np.arange(zeros, size))] = vectors[:, order]
    eigenvalues = (values[order] * (work[0] / work[1])) ** 2
    return np.concatenate([np.zeros(zeros), eigenvalues]), eigenvectors


class NeumannInverse(Operator):
    """An approximate inverse by the Neumann series.

    For the damped operator `A`, a scale `s` and `m` iterations, the approximation is
    `sum((I - A / s)**j for j in range(m)) / s`. It is computed by the iteration
    `x_{j+1} = x_j + (b - A x_j) / s` from `x_0 = 0`.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        The symmetric operator to invert. It must be positive definite, with the damping.
    damping : float, optional
        Multiple of the identity that is added to the operator's own damping.
    iterations : int, optional
        Number of iterations, and of products with each vector.
    scale : float, optional
        The scale `s`, which must be larger than half the largest eigenvalue. By default it is an
        estimate of the largest eigenvalue, times 1.1.

    Attributes
    ----------
    scale : float
        The scale `s`.

    Raises
    ------
    HvpError
        If an argument is invalid. A product with the inverse raises it if the series grows, because
        `scale` is too small or the operator has negative eigenvalues. That an eigenvalue is zero is
        not noticed: along its eigenvector, the result is proportional to `iterations`.

    Notes
    -----
    LiSSA [ABH]_ samples this series; here it is computed without sampling, for comparison. Along an
    eigenvector of eigenvalue `e`, the relative error is `(1 - e / s)**m`. The number of iterations
    is therefore proportional to the condition number, while that of conjugate gradients is
    proportional to its square root.

    References
    ----------
    .. [ABH] N. Agarwal, B. Bullins and E. Hazan, "Second-order stochastic optimization for machine
       learning in linear time", Journal of Machine Learning Research 18(116), 1-40, 2017.
       https://jmlr.org/papers/v18/16-491.html

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> (hvp.NeumannInverse(H, iterations=200) @ [1.0, 4.0, 9.0]).round(4)
    array([1., 1., 1.], dtype=float32)
    """

    is_symmetric = True

    @Uninterrupted()
    def __init__(
        self,
        H: Any,
        *,
        damping: float = 0.0,
        iterations: int = 1000,
        scale: float | None = None,
    ) -> None:
        check_count(iterations, "iterations")
        matrix = symmetric_matrix(H, "NeumannInverse")
        total = matrix.damping + check_damping(damping)
        if scale is None:
            scale = _SAFETY * abs(_largest_eigenvalue(matrix, total)) or 1.0
        else:
            check_number(scale, "scale", positive=True)
        self.scale = float(scale)
        block = tf.TensorSpec([None, matrix.size], matrix.dtype)
        integer, number = tf.TensorSpec([], tf.int32), tf.TensorSpec([], matrix.dtype)
        specs, iterate = [block, block, integer, number, number], _iteration(matrix)

        def compiled() -> Compiled:
            return Compiled(iterate, specs, False, forgets=True)

        if matrix.in_python and not can_wait_for_python():
            advance = Compiled(iterate, specs, False, eager=True)
        else:
            advance = matrix.cached("neumann", compiled)
        arguments = iterations, self.scale, total
        self.damping = total

        def solve(rows: np.ndarray) -> np.ndarray:
            matrix.make_sure()
            return _neumann_series(advance, rows, *arguments)

        super().__init__(ArrayMap(solve, matrix.space, matrix.linear_map.sources))


def _largest_eigenvalue(matrix: Matrix, damping: float) -> float:
    """Estimate the eigenvalue of largest absolute value."""
    size, dtype = matrix.size, matrix.dtype.as_numpy_dtype
    if size < 3:  # too small for ARPACK
        return float(np.linalg.norm(_damped_product(matrix, damping, np.eye(size, dtype=dtype)), 2))

    def multiply(x: np.ndarray) -> np.ndarray:
        return _damped_product(matrix, damping, x.reshape(-1, 1)).ravel()

    start = np.random.default_rng(0).standard_normal(size).astype(dtype)
    if not multiply(start).any():
        return 0.0
    damped = LinearOperator((size, size), multiply, dtype=dtype)
    return float(eigsh(damped, k=1, which="LM", tol=_TOLERANCE, v0=start)[0][0])


def _iteration(matrix: Matrix) -> Callable[..., tf.Tensor]:
    """Return a function that adds `count` iterations to the solution, in a graph."""

    def iterate(
        b: tf.Tensor, x: tf.Tensor, count: tf.Tensor, scale: tf.Tensor, damping: tf.Tensor
    ) -> tf.Tensor:
        def add_residual(j: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return j + 1, x + (b - matrix.multiply(x) - damping * x) / scale

        start = (tf.constant(0), x)
        return tf.while_loop(lambda j, x: j < count, add_residual, start, parallel_iterations=1)[1]

    return iterate


def _neumann_series(
    advance: Compiled, B: np.ndarray, iterations: int, scale: float, damping: float
) -> np.ndarray:
    """Sum the series for the rows of an array."""
    b = tf.constant(B)
    x = tf.zeros_like(b)
    scales = [tf.constant(v, b.dtype) for v in (scale, damping)]
    b_norm = _or_one(tf.norm(b, axis=1))
    # Each of the first terms is at most as long as the first one, b / s.
    last_change, done = min(_ITERATIONS, iterations) / scale, 0
    while done < iterations:
        deliver_interrupt()
        count = min(_ITERATIONS, iterations - done)
        next_x = advance(b, x, tf.constant(count), *scales)
        change = float(tf.reduce_max(tf.norm(next_x - x, axis=1) / b_norm))
        # Each change is the one before times a power of I - A / s, whose norm is less than one
        # if the series converges.
        if not change <= 1.01 * last_change + 1e-3 / scale:
            raise HvpError(
                f"the Neumann series grows: after {done + count} iterations the relative "
                f"change is {change:.3g}",
                "a positive definite operator, and a scale above half its largest eigenvalue",
                f"raise damping (now {damping:g}) or scale (now {scale:g})",
            )
        x, last_change, done = next_x, change, done + count
    return x.numpy()


def _or_one(tensor: tf.Tensor) -> tf.Tensor:
    return tf.where(tensor > 0, tensor, tf.ones_like(tensor))
