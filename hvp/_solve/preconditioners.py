"""Positive definite approximations of a symmetric operator that are easily inverted.

Each kind has what makes its tensors from products with the operator, and what applies its inverse,
which also runs inside a graph. Neither scipy nor TensorFlow has one that is made from products
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

from hvp._errors import HvpError
from hvp._operators.operator import SymmetricOperator, check_damping
from hvp._runtime.arguments import check_count
from hvp._solve.rows import Rows
from hvp._vectors.arrays import check_array

# Random signs for the diagonal, and what its entries are at least, in units of their mean.
_SAMPLES = 16
_LEAST = 1e-2
# Eigenvalues of a sketch are rounding below so many units for each of its columns.
_ROUNDING = 8
# How far an indefinite operator is shifted, in units of the most negative eigenvalue of its sketch.
_SHIFT = 4
# An adaptive rank begins with so many columns, doubles, and ends where the last eigenvalue found is
# so many times the damping, or the rank so large a part of `n`.
_FIRST_RANK, _SMALL, _LARGEST_PART = 16, 10.0, 0.5

Tensors = Sequence[tf.Tensor]


@dataclass(frozen=True)
class Kind:
    """One kind of preconditioner.

    Attributes
    ----------
    make : callable
        Takes an operator, the rank wanted and a seed of two integers; returns tensors.
    shapes : callable
        Takes `n` and the rank; returns the tensors' shapes.
    solve : callable
        Takes a vector, or rows, and the tensors; returns the inverse times these.
    products : callable
        Takes the rank; tells how many products `make` needs.
    """

    make: Callable[[SymmetricOperator, int, Any], list[tf.Tensor]]
    shapes: Callable[[int, int], list[list[int]]]
    solve: Callable[[tf.Tensor, Tensors], tf.Tensor]
    products: Callable[[int], int]


# The key of a preconditioner of which only what it does is known.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Precondition:
    """What a method applies, in a graph.

    Attributes
    ----------
    key : hashable
        Of functions and shapes: those of one key share a graph, but for `UNKNOWN`.
    tensors : list of tf.Tensor
        Given to the graph.
    apply : callable
        Takes rows and the tensors; returns the inverse times the rows.
    """

    key: Hashable
    tensors: list[tf.Tensor]
    apply: Callable[[tf.Tensor, Tensors], tf.Tensor]


NO_PRECONDITION = Precondition(None, [], lambda rows, tensors: rows)


def _diagonal(rows: Rows, samples: int, seed: Any) -> np.ndarray:
    """Estimate the diagonal (Bekas, Kokiopoulou and Saad 2007)."""
    bits = tf.random.stateless_uniform((samples, rows.size), seed, 0, 2, tf.int32)
    signs = tf.cast(2 * bits - 1, rows.dtype)
    return tf.reduce_mean(signs * rows.multiply(signs), axis=0).numpy()


def _make_diagonal(operator: SymmetricOperator, rank: int, seed: Any) -> list[tf.Tensor]:
    del rank
    estimate = np.abs(_diagonal(Rows(operator), _SAMPLES, seed) + operator.damping)
    return [tf.constant(_bounded(estimate))]


def _bounded(estimate: np.ndarray) -> np.ndarray:
    least = _LEAST * estimate.mean()
    # All the same where the operator is zero.
    return np.maximum(estimate, least) if least > 0 else np.ones_like(estimate)


class _Sketch:
    """The largest eigenvalues of the positive part (Frangella, Tropp and Udell 2023).

    Parameters
    ----------
    rows : Rows
        The operator.
    seed : sequence of int
        Two.
    """

    def __init__(self, rows: Rows, seed: Any) -> None:
        self._rows, self._seed = rows, seed
        self._basis = np.zeros((0, rows.size), rows.dtype.as_numpy_dtype)
        self._images = self._basis.copy()

    def extend(self, rank: int) -> None:
        """Multiply as many random vectors as are wanting."""
        have = len(self._basis)
        seed = [int(self._seed[0]), int(self._seed[1]) + have]
        shape = (rank - have, self._rows.size)
        drawn = tf.random.stateless_normal(shape, seed, dtype=self._rows.dtype).numpy()
        for _ in range(2):  # once is not enough against rounding
            drawn -= (drawn @ self._basis.T) @ self._basis
        drawn = np.ascontiguousarray(scipy.linalg.qr(drawn.T, mode="economic")[0].T)
        self._basis = np.concatenate([self._basis, drawn])
        images = self._rows.multiply(tf.constant(drawn)).numpy()
        self._images = np.concatenate([self._images, images])

    def eigen(self) -> tuple[np.ndarray, np.ndarray]:
        """Return eigenvalues, decreasing, and eigenvectors as columns; what is not used is zero."""
        core = (self._basis @ self._images.T).astype(np.float64)
        values, vectors = scipy.linalg.eigh((core + core.T) / 2)
        eps = np.finfo(self._images.dtype).eps
        rounding = np.abs(values).max(initial=0) * len(values) * _ROUNDING * eps
        # Of an indefinite operator the method would find eigenvalues that are far too large: it
        # needs a shift that makes it definite, more or less, which is taken off afterwards.
        shift = -_SHIFT * values[0] if values[0] < -rounding else 0.0
        images = self._images + np.asarray(shift, self._images.dtype) * self._basis
        values = values + shift
        used = values > rounding
        roots = np.where(used, 1 / np.sqrt(np.where(used, values, 1)), 0)
        factor = (vectors * roots).T.astype(images.dtype) @ images
        squares, mixing = scipy.linalg.eigh((factor @ factor.T).astype(np.float64))
        squares, mixing = squares[::-1], mixing[:, ::-1]
        found = squares > 0
        scale = np.where(found, 1 / np.sqrt(np.where(found, squares, 1)), 0)
        left = ((mixing * scale).T.astype(factor.dtype) @ factor).T
        eigenvalues = np.where(found, squares - shift, 0)
        return np.maximum(eigenvalues, 0), np.ascontiguousarray(left)


def _make_nystrom(operator: SymmetricOperator, rank: int, seed: Any) -> list[tf.Tensor]:
    rows = Rows(operator)
    sketch = _Sketch(rows, seed)
    sketch.extend(rank)
    eigenvalues, vectors = sketch.eigen()
    factors = _factors(eigenvalues, operator.damping)
    return [tf.constant(vectors), tf.constant(factors, rows.dtype)]


def _factors(eigenvalues: np.ndarray, damping: float) -> np.ndarray:
    """Return what is added to the identity, to make the inverse, along each eigenvector."""
    shifted = eigenvalues + max(damping, 0.0)
    kept = eigenvalues > 0
    least = shifted[kept].min(initial=np.inf)
    return np.where(kept, least / np.where(kept, shifted, 1) - 1, 0)


def _solve_nystrom(given: tf.Tensor, tensors: Tensors) -> tf.Tensor:
    vectors, factors = tensors
    if given.shape.rank == 1:
        along = factors * tf.linalg.matvec(vectors, given, transpose_a=True)
        return given + tf.linalg.matvec(vectors, along)
    return given + tf.matmul((given @ vectors) * factors, vectors, transpose_b=True)


PRECONDITIONERS = {
    "diagonal": Kind(
        make=_make_diagonal,
        shapes=lambda size, rank: [[size]],
        solve=lambda vector, tensors: vector / tensors[0],
        products=lambda rank: _SAMPLES,
    ),
    "nystrom": Kind(
        make=_make_nystrom,
        shapes=lambda size, rank: [[size, rank], [rank]],
        solve=_solve_nystrom,
        products=lambda rank: rank,
    ),
}


class Preconditioner(LinearOperator):
    """What the preconditioners have in common: scipy's `M`, and part of a graph in `hvp.solve`.

    Parameters
    ----------
    kind : str
        Of `PRECONDITIONERS`.
    tensors : list of tf.Tensor
        Of that kind.
    size : int
        Of a vector.

    Attributes
    ----------
    products : int
        Of the operator, that were needed to make it.
    """

    products = 0

    def __init__(self, kind: str, tensors: list[tf.Tensor], size: int) -> None:
        self._solve = PRECONDITIONERS[kind].solve
        key = (kind, *(tuple(tensor.shape) for tensor in tensors))
        self.precondition = Precondition(key, tensors, self._solve)
        super().__init__(np.dtype(tensors[0].dtype.as_numpy_dtype), (size, size))

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        x = check_array(x, self.shape[0], self.dtype, ndims=(1, 2)).reshape(-1)
        return self._solve(tf.constant(x), self.precondition.tensors).numpy()

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        X = check_array(X, self.shape[0], self.dtype, ndims=(2,))
        return self._solve(tf.constant(X.T), self.precondition.tensors).numpy().T

    def _adjoint(self) -> Preconditioner:
        return self

    def _transpose(self) -> Preconditioner:
        return self


class NystromPreconditioner(Preconditioner):
    """A preconditioner that knows an operator's largest eigenvalues.

    With the eigenvalues `e` and eigenvectors `U` found, and the damping `mu`, it is the inverse of
    `U (e + mu) U.T / (e[-1] + mu) + I - U U.T` (Frangella, Tropp and Udell 2023 [FTU]_). Worth its
    products where a few eigenvalues are much larger than the rest, or it serves many times.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        What is to be solved with; symmetric. Negative eigenvalues are left as they are, and make
        those found less exact.
    rank : int, optional
        How many eigenvalues, and products. By default grows until the last one found is less than
        ten times the damping, or half of `n`.
    damping : float, optional
        Added to the operator's own, as in `solve`.
    seed : int, optional
        Of the random vectors.

    Attributes
    ----------
    eigenvalues : ndarray
        Those found, without damping, of shape `(rank,)`, decreasing.

    References
    ----------
    .. [FTU] Z. Frangella, J. A. Tropp and M. Udell, "Randomized Nystrom preconditioning", SIAM
       Journal on Matrix Analysis and Applications 44(2), 718-752, 2023.
       https://doi.org/10.1137/21M1466244

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> from scipy.sparse.linalg import cg
    >>> scales = np.concatenate([[1e4, 1e3, 1e2], np.ones(50)])
    >>> w = tf.Variable(np.ones(53))
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(scales * w**2) / 2, w)
    >>> M = hvp.NystromPreconditioner(H, rank=10)
    >>> x, info = cg(H, np.ones(53), M=M, maxiter=10)
    >>> info, np.allclose(scales * x, 1.0, atol=1e-3)
    (0, True)
    """

    def __init__(
        self, H: Any, rank: int | None = None, *, damping: float = 0.0, seed: int = 0
    ) -> None:
        rows = Rows(H)
        total = rows.damping + check_damping(damping)
        if rank is not None:
            check_count(rank, "rank")
            if rank > rows.size:
                raise HvpError(f"the rank is {rank}", f"at most n = {rows.size}")
        sketch = _Sketch(rows, (seed, 0))
        largest = max(1, int(_LARGEST_PART * rows.size)) if rank is None else rank
        size = min(_FIRST_RANK, largest) if rank is None else rank
        while True:
            sketch.extend(size)
            self.eigenvalues, vectors = sketch.eigen()
            if size >= largest or self.eigenvalues[-1] <= _SMALL * total:
                break
            size = min(2 * size, largest)
        self.products = size
        tensors = [tf.constant(vectors), tf.constant(_factors(self.eigenvalues, total), rows.dtype)]
        super().__init__("nystrom", tensors, rows.size)


class DiagonalPreconditioner(Preconditioner):
    """The inverse of the absolute values of an operator's diagonal.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        What is to be solved with; symmetric.
    samples : int, optional
        Products. The estimate's error falls as their square root (Bekas, Kokiopoulou and Saad
        2007 [BKS]_).
    damping : float, optional
        Added to the operator's own, as in `solve`.
    seed : int, optional
        Of the random signs.

    Attributes
    ----------
    diagonal : ndarray
        The estimate, of shape `(n,)`, damping included.

    References
    ----------
    .. [BKS] C. Bekas, E. Kokiopoulou and Y. Saad, "An estimator for the diagonal of a matrix",
       Applied Numerical Mathematics 57(11-12), 1214-1229, 2007.
       https://doi.org/10.1016/j.apnum.2007.01.003

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> hvp.DiagonalPreconditioner(H, damping=1.0).diagonal
    array([ 2.,  5., 10.], dtype=float32)
    """

    def __init__(
        self, H: Any, *, samples: int = _SAMPLES, damping: float = 0.0, seed: int = 0
    ) -> None:
        check_count(samples, "samples")
        rows = Rows(H)
        total = rows.damping + check_damping(damping)
        self.products = samples
        self.diagonal = _diagonal(rows, samples, (seed, 0))
        self.diagonal += np.asarray(total, self.diagonal.dtype)
        super().__init__("diagonal", [tf.constant(_bounded(np.abs(self.diagonal)))], rows.size)
