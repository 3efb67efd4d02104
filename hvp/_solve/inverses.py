"""Inverses of a symmetric operator, exact or not, as operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.linalg
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, eigsh

from hvp._errors import HvpError, TooLargeError
from hvp._graphs.compiled import Compiled
from hvp._operators.operator import check_damping
from hvp._runtime.arguments import check_count
from hvp._solve.rows import Rows
from hvp._vectors.arrays import check_array

# Eigenvalues that are smaller than so many roundings of the largest are taken for zero.
_ROUNDING = 32
# Rows in one product when the dense matrix is put together.
_BLOCK = 64
# The largest eigenvalue, estimated to this, is raised by that factor to be above it surely.
_TOLERANCE, _ABOVE = 1e-2, 1.1


class _Inverse(LinearOperator):
    """What they have in common: a symmetric operator that works on columns.

    Parameters
    ----------
    rows : Rows
        The operator that is inverted.
    damping : float
        Added to the operator's own.
    """

    def __init__(self, rows: Rows, damping: float) -> None:
        self._rows = rows
        self.damping = rows.damping + check_damping(damping)
        super().__init__(np.dtype(rows.dtype.as_numpy_dtype), (rows.size, rows.size))

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self._matmat(np.asarray(x).reshape(-1, 1)).reshape(-1)

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        return self._apply(check_array(X, self.shape[0], self.dtype, ndims=(2,)))

    def _apply(self, X: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _adjoint(self) -> _Inverse:
        return self

    def _transpose(self) -> _Inverse:
        return self

    def _multiply(self, X: np.ndarray) -> np.ndarray:
        product = self._rows.multiply(tf.constant(np.ascontiguousarray(X.T))).numpy().T
        return product + np.asarray(self.damping, X.dtype) * X

    def _eigen(self, rank: int, tol: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the eigenvalues of largest absolute value, and eigenvectors as columns."""
        damped = LinearOperator(
            self.shape, lambda x: self._multiply(x.reshape(-1, 1)).ravel(), dtype=self.dtype
        )
        start = np.random.default_rng(0).standard_normal(self.shape[0]).astype(self.dtype)
        return eigsh(damped, k=rank, which="LM", tol=tol, v0=start)


class ExactInverse(_Inverse):
    """The inverse of an operator, by all of its eigenvalues.

    Of a singular matrix the pseudo-inverse, which gives the shortest of the best solutions.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        Symmetric. Costs `n` products, `n**2` numbers of memory and of the order of `n**3`
        operations, once.
    damping : float, optional
        Added to the operator's own.
    max_size : int, optional
        Refuse if `n` is larger.

    Attributes
    ----------
    eigenvalues : ndarray
        Of the damped operator, of shape `(n,)`, increasing, in float64.
    eigenvectors : ndarray
        Of shape `(n, n)`, one in each column.
    rank : int
        How many eigenvalues are not zero to rounding.

    Raises
    ------
    TooLargeError
        If `n` is larger than `max_size`.

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

    def __init__(self, H: Any, *, damping: float = 0.0, max_size: int = 4096) -> None:
        super().__init__(Rows(H), damping)
        size = self.shape[0]
        if size > max_size:
            raise TooLargeError(
                f"the exact inverse of a {size} x {size} matrix was asked for",
                f"at most {max_size} x {max_size}",
                "use conjugate gradients, or pass max_size",
            )
        dense = np.empty((size, size))
        for start in range(0, size, _BLOCK):
            columns = np.eye(size, min(_BLOCK, size - start), -start, self.dtype)
            dense[:, start : start + _BLOCK] = self._multiply(columns)
        self.eigenvalues, self.eigenvectors = scipy.linalg.eigh((dense + dense.T) / 2)
        largest = np.abs(self.eigenvalues).max()
        zero = np.abs(self.eigenvalues) <= _ROUNDING * np.finfo(self.dtype).eps * largest
        self.rank = int(size - zero.sum())
        self.is_nonzero = ~zero
        self._inverted = np.where(zero, 0, 1 / np.where(zero, 1, self.eigenvalues))

    @property
    def diagonal(self) -> np.ndarray:
        """The diagonal of the inverse, of shape `(n,)`, in float64.

        Of the Hessian of a negative log-likelihood, summed over the examples, its entries are the
        variances of the estimates (and their roots the standard errors). Costs `n**2` operations.
        """
        return np.einsum("ij,j,ij->i", self.eigenvectors, self._inverted, self.eigenvectors)

    def to_dense(self) -> np.ndarray:
        """Return the inverse as a matrix.

        Returns
        -------
        ndarray
            Of shape `(n, n)`, symmetric to the bit, in float64.

        Notes
        -----
        Costs of the order of `n**3` operations, and no products.
        """
        half = (self.eigenvectors * self._inverted) @ self.eigenvectors.T
        return (half + half.T) / 2

    def _apply(self, X: np.ndarray) -> np.ndarray:
        along = self.eigenvectors.T @ X.astype(np.float64)
        found = self.eigenvectors @ (self._inverted[:, np.newaxis] * along)
        return found.astype(self.dtype)


class NeumannInverse(_Inverse):
    """The inverse by a series, `sum((I - A / s)**j) / s` for `j` below the number of iterations.

    What LiSSA (Agarwal, Bullins and Hazan 2017 [ABH]_) samples, without the sampling, here for
    comparison: the part of eigenvalue `e` is found to `(1 - e / s)**iterations`, so that it takes a
    multiple of the condition number, of which conjugate gradients take the root.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        Symmetric; positive definite with the damping.
    damping : float, optional
        Added to the operator's own.
    iterations : int, optional
        Products for each vector.
    scale : float, optional
        The `s` above, at least half the largest eigenvalue; by default the largest, estimated.

    Attributes
    ----------
    scale : float
        The `s` above.

    Raises
    ------
    HvpError
        If the series does not converge: `scale` is too small, or the operator is not positive
        definite.

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

    def __init__(
        self,
        H: Any,
        *,
        damping: float = 0.0,
        iterations: int = 1000,
        scale: float | None = None,
    ) -> None:
        check_count(iterations, "iterations")
        super().__init__(Rows(H), damping)
        if scale is None:
            scale = _ABOVE * abs(self._largest()) or 1.0
        elif not (math.isfinite(scale) and scale > 0):
            raise HvpError(f"the argument scale is {scale}", "a positive number")
        self.scale = float(scale)
        self._iterations = iterations
        block = tf.TensorSpec([None, self.shape[0]], self._rows.dtype)
        count, number = tf.TensorSpec([], tf.int32), tf.TensorSpec([], self._rows.dtype)
        specs = [block, block, count, number, number]
        self._series = self._rows.kept(
            "neumann", lambda: Compiled(self._sum, specs, False, forgets=True)
        )

    def _largest(self) -> float:
        size = self.shape[0]
        if size < 3:
            return float(np.linalg.norm(self._multiply(np.eye(size, dtype=self.dtype)), 2))
        return float(self._eigen(1, _TOLERANCE)[0][0])

    def _sum(
        self, b: tf.Tensor, x: tf.Tensor, count: tf.Tensor, scale: tf.Tensor, damping: tf.Tensor
    ) -> tf.Tensor:
        def more(j: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return j + 1, x + (b - self._rows.multiply(x) - damping * x) / scale

        start = (tf.constant(0), x)
        return tf.while_loop(lambda j, x: j < count, more, start, parallel_iterations=1)[1]

    def _apply(self, X: np.ndarray) -> np.ndarray:
        b = tf.constant(np.ascontiguousarray(X.T))
        x = tf.zeros_like(b)
        scale, damping = (tf.constant(v, b.dtype) for v in (self.scale, self.damping))
        last, done = math.inf, 0
        while done < self._iterations:
            count = min(32, self._iterations - done)
            further = self._series(b, x, tf.constant(count), scale, damping)
            moved = float(tf.reduce_max(tf.norm(further - x, axis=1) / _or_one(tf.norm(b, axis=1))))
            # Each step is the one before, times a matrix of norm less than one if it converges.
            if not moved <= 1.01 * last + 1e-3 / self.scale:
                raise HvpError(
                    f"the Neumann series grows, by steps of {moved:.3g} after {done + count}",
                    "a positive definite operator, and a scale above half its largest eigenvalue",
                    f"raise damping (now {self.damping:g}) or scale (now {self.scale:g})",
                )
            x, last, done = further, moved, done + count
        return x.numpy().T


class ArnoldiInverse(_Inverse):
    """The inverse on the span of the eigenvectors of largest absolute value, zero elsewhere.

    The influence functions of Schioppa et al. (2022 [SZ]_) in their symmetric case, where Arnoldi's
    method is Lanczos'; by ARPACK, restarted until the eigenvalues have converged. Directions of
    little curvature, which count most in an exact inverse, are left out: compare before you rely on
    it.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        Symmetric.
    rank : int
        How many eigenvalues, less than `n`.
    damping : float, optional
        Added to the operator's own.
    tol : float, optional
        To which the eigenvalues are computed, relative to themselves.

    Attributes
    ----------
    eigenvalues : ndarray
        Of the damped operator, of shape `(rank,)`, by decreasing absolute value.

    References
    ----------
    .. [SZ] A. Schioppa, P. Zablotskaia, D. Vilar and A. Sokolov, "Scaling up influence functions",
       AAAI 2022. https://doi.org/10.1609/aaai.v36i8.20791

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0, 4.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> inverse = hvp.ArnoldiInverse(H, rank=2)
    >>> inverse.eigenvalues.round(4)
    array([16.,  9.], dtype=float32)
    >>> (inverse @ np.ones(4)).round(4) + 0.0
    array([0.    , 0.    , 0.1111, 0.0625], dtype=float32)
    """

    def __init__(self, H: Any, rank: int = 50, *, damping: float = 0.0, tol: float = 1e-4) -> None:
        check_count(rank, "rank")
        super().__init__(Rows(H), damping)
        size = self.shape[0]
        if rank >= size:
            raise HvpError(f"the rank is {rank}", f"less than n = {size}", "use ExactInverse")
        values, self._vectors = self._eigen(rank, tol)
        order = np.argsort(-np.abs(values), kind="stable")
        self.eigenvalues, self._vectors = values[order], self._vectors[:, order]
        if not np.all(self.eigenvalues):
            raise HvpError(
                f"of {rank} eigenvalues some are zero", "a rank that leaves them out", "lower rank"
            )

    def _apply(self, X: np.ndarray) -> np.ndarray:
        along = (self._vectors.T @ X) / self.eigenvalues[:, np.newaxis]
        return (self._vectors @ along).astype(self.dtype)


def _or_one(tensor: tf.Tensor) -> tf.Tensor:
    return tf.where(tensor > 0, tensor, tf.ones_like(tensor))
