"""Preconditioners: positive definite approximations of a symmetric operator with a cheap inverse.

Each kind has a function that computes its tensors from products with the operator, and a function
that applies its inverse, eagerly or inside a graph. Neither scipy nor TensorFlow has a
preconditioner that needs only products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._engines.linear_map import LinearMap, Source, TensorFunction
from hvp._errors import HvpError, TooLargeError
from hvp._operators.damping import check_damping
from hvp._operators.matrix import BlockEvaluation, Matrix
from hvp._operators.operator import Operator
from hvp._operators.symmetric import (
    SymmetricOperator,
    evaluation_of,
    matrix_of,
    symmetric_matrix,
)
from hvp._runtime.arguments import check_count, check_seed
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._solve.nystrom import NystromSketch, nystrom_factors
from hvp._vectors.space import Space

# Number of random sign vectors for the estimate of the diagonal, and the lower bound on the
# entries of the estimate, relative to their mean.
_SAMPLES = 16
_MIN_ENTRY = 1e-2
# The lower bound on the eigenvalues of a block, relative to its largest.
_MIN_EIGENVALUE = 1e-6
# An adaptive rank begins at _FIRST_RANK and doubles until the smallest eigenvalue of the sketch is
# at most _SMALL times the damping.
_FIRST_RANK, _SMALL = 16, 10.0

Tensors = Sequence[tf.Tensor]


@dataclass(frozen=True)
class Kind:
    """A kind of preconditioner, made from an operator, a rank and a seed of two integers.

    `make` returns the tensors of the preconditioner, whose shapes `shapes` computes from `n` and
    the rank. `solve` applies the inverse to a vector or to rows. `products` is the number of
    products that `make` needs for a rank; None if the tensors serve every point, or are made by
    the caller at each. `calls_python` says that `solve` calls Python.
    """

    make: Callable[[SymmetricOperator, int, Any], list[tf.Tensor]]
    shapes: Callable[[int, int], list[list[int]]]
    solve: Callable[[tf.Tensor, Tensors], tf.Tensor]
    products: Callable[[int], int] | None = None
    calls_python: bool = False


# Key of a preconditioner that is an opaque operator of scipy's.
UNKNOWN = "unknown"


NO_PRECONDITION = TensorFunction(None, [], lambda rows, tensors: rows)


def _diagonal(matrix: Matrix, samples: int, seed: Any) -> np.ndarray:
    """Estimate the diagonal of the undamped operator as the mean of `z * (A z)` over random signs.

    See `DiagonalPreconditioner` for the reference.
    """
    bits = tf.random.stateless_uniform((samples, matrix.size), seed, 0, 2, tf.int32)
    signs = tf.cast(2 * bits - 1, matrix.dtype)
    return tf.reduce_mean(signs * matrix.multiply(signs), axis=0).numpy()


def _make_diagonal(operator: SymmetricOperator, rank: int, seed: Any) -> list[tf.Tensor]:
    del rank
    estimate = np.abs(_diagonal(matrix_of(operator), _SAMPLES, seed) + operator.damping)
    return [tf.constant(_bounded(estimate))]


def _bounded(estimate: np.ndarray) -> np.ndarray:
    """Bound the estimated diagonal away from zero; return ones if it is all zero."""
    lowest = _MIN_ENTRY * estimate.mean()
    return np.maximum(estimate, lowest) if lowest > 0 else np.ones_like(estimate)


def _make_nystrom(operator: SymmetricOperator, rank: int, seed: Any) -> list[tf.Tensor]:
    matrix = matrix_of(operator)
    sketch = NystromSketch(matrix, seed)
    sketch.extend(rank)
    factors = nystrom_factors(sketch.eigenvalues, operator.damping)
    return [tf.constant(sketch.eigenvectors), tf.constant(factors, matrix.dtype)]


def _solve_nystrom(rows: tf.Tensor, tensors: Tensors) -> tf.Tensor:
    vectors, factors = tensors
    if rows.shape.rank == 1:
        coefficients = factors * tf.linalg.matvec(vectors, rows, transpose_a=True)
        return rows + tf.linalg.matvec(vectors, coefficients)
    return rows + tf.matmul((rows @ vectors) * factors, vectors, transpose_b=True)


def _solve_diagonal(rows: tf.Tensor, tensors: Tensors) -> tf.Tensor:
    return rows / tensors[0]


def _solve_blocks(rows: tf.Tensor, tensors: Tensors) -> tf.Tensor:
    *inverses, order, back = tensors
    pieces = tf.split(tf.gather(rows, order, axis=-1), [i.shape[0] for i in inverses], axis=-1)
    if rows.shape.rank == 1:
        solved = [tf.linalg.matvec(inverse, piece) for inverse, piece in zip(inverses, pieces)]
    else:
        solved = [piece @ inverse for inverse, piece in zip(inverses, pieces)]
    return tf.gather(tf.concat(solved, axis=-1), back, axis=-1)


def nystrom_precondition(vectors: tf.Tensor, factors: tf.Tensor) -> TensorFunction:
    """Return the preconditioner `I + U diag(f) U^T`, with `U` of shape `(n, rank)`."""
    tensors = [vectors, factors]
    return TensorFunction(("nystrom", *(tuple(t.shape) for t in tensors)), tensors, _solve_nystrom)


PRECONDITIONERS = {
    "diagonal": Kind(
        make=_make_diagonal,
        shapes=lambda size, rank: [[size]],
        solve=_solve_diagonal,
        products=lambda rank: _SAMPLES,
    ),
    "nystrom": Kind(
        make=_make_nystrom,
        shapes=lambda size, rank: [[size, rank], [rank]],
        solve=_solve_nystrom,
        products=lambda rank: rank,
    ),
}


class PreconditionMap(LinearMap):
    """A preconditioner as a symmetric linear map."""

    def __init__(self, function: TensorFunction, space: Space, sources: Sequence[Source]) -> None:
        self._function, self._sources = function, sources
        self.domain = self.codomain = space

    @property
    def sources(self) -> Sequence[Source]:
        """Those of the operator."""
        return self._sources

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout."""
        if isinstance(vector, (list, tuple)):
            return self.codomain.split(self.apply(self.domain.join(vector)))
        return self._function.apply(vector, self._function.tensors)

    def as_function(self) -> TensorFunction:
        """Return the preconditioner for the graph of a solver."""
        return self._function


class Preconditioner(Operator):
    """Base class: an operator for scipy's `M`, and part of the graph in `hvp.solve`.

    `solve` takes a vector or rows, and the tensors, and applies the inverse. `kind` names it in the
    keys of graphs. `products` is the number of products that the construction needed.
    """

    is_symmetric = True
    products = 0

    def __init__(
        self,
        kind: str,
        solve: Callable[[tf.Tensor, Tensors], tf.Tensor],
        tensors: list[tf.Tensor],
        matrix: Matrix,
    ) -> None:
        key = (kind, *(tuple(tensor.shape) for tensor in tensors))
        function = TensorFunction(key, tensors, solve)
        super().__init__(PreconditionMap(function, matrix.space, matrix.linear_map.sources))


class NystromPreconditioner(Preconditioner):
    """A preconditioner from approximations of an operator's largest eigenvalues.

    The eigenvalues `e`, in decreasing order, and eigenvectors `U` are those of a randomized
    Nystrom approximation [FTU]_. With the damping `mu`, the preconditioner is the inverse of
    `U (e + mu) U.T / (e[-1] + mu) + I - U U.T`. It is worth its products if a few eigenvalues are
    much larger than the rest, or if you use it for many solves.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        The symmetric operator of the system. Negative eigenvalues are not preconditioned, and make
        the others less accurate.
    rank : int, optional
        Number of eigenvalues, and of products. By default the rank doubles, from 16, until the
        smallest eigenvalue is at most ten times the damping, or the rank is half of `n`.
    damping : float, optional
        Multiple of the identity that is added to the operator's own damping, as in `solve`.
    seed : int, optional
        Seed of the random vectors.

    Attributes
    ----------
    eigenvalues : ndarray
        The approximate eigenvalues without damping, of shape `(rank,)`, decreasing.
    products : int
        Number of products that were computed.

    Raises
    ------
    HvpError
        If the rank or the damping is invalid.

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

    @Uninterrupted()
    def __init__(
        self, H: Any, rank: int | None = None, *, damping: float = 0.0, seed: int = 0
    ) -> None:
        matrix, seed = symmetric_matrix(H, "NystromPreconditioner"), check_seed(seed)
        total = matrix.damping + check_damping(damping)
        if rank is not None:
            check_count(rank, "rank")
            if rank > matrix.size:
                raise HvpError(f"the rank is {rank}", f"at most n = {matrix.size}")

        sketch = NystromSketch(matrix, (seed, 0))
        if rank is None:
            sketch.grow(_FIRST_RANK, lambda: bool(sketch.eigenvalues[-1] <= _SMALL * total))
        else:
            sketch.extend(rank)
        self.eigenvalues, self.products = sketch.eigenvalues, sketch.rank
        tensors = [
            tf.constant(sketch.eigenvectors),
            tf.constant(nystrom_factors(self.eigenvalues, total), matrix.dtype),
        ]
        super().__init__("nystrom", _solve_nystrom, tensors, matrix)


class DiagonalPreconditioner(Preconditioner):
    """The inverse of the absolute values of an operator's diagonal.

    The diagonal of `H` is estimated by the mean of `z * (H @ z)` over vectors `z` of random signs
    [BKS]_. Entries below a hundredth of the mean absolute value are raised to that.

    Parameters
    ----------
    H : HessianOperator or scipy LinearOperator
        The symmetric operator of the system.
    samples : int, optional
        Number of random vectors, and of products. The error of the estimate decreases with its
        square root.
    damping : float, optional
        Multiple of the identity that is added to the operator's own damping, as in `solve`.
    seed : int, optional
        Seed of the random signs.

    Attributes
    ----------
    diagonal : ndarray
        The estimate of the damped operator's diagonal, of shape `(n,)`.
    products : int
        Number of products that were computed.

    Raises
    ------
    HvpError
        If the number of samples or the damping is invalid.

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

    @Uninterrupted()
    def __init__(
        self, H: Any, *, samples: int = _SAMPLES, damping: float = 0.0, seed: int = 0
    ) -> None:
        check_count(samples, "samples")
        matrix, seed = symmetric_matrix(H, "DiagonalPreconditioner"), check_seed(seed)
        total = matrix.damping + check_damping(damping)
        self.products = samples
        self.diagonal: Any = _diagonal(matrix, samples, (seed, 0))
        self.diagonal += np.asarray(total, self.diagonal.dtype)
        bounded = tf.constant(_bounded(np.abs(self.diagonal)))
        super().__init__("diagonal", _solve_diagonal, [bounded], matrix)


class BlockDiagonalPreconditioner(Preconditioner):
    """The inverses of diagonal blocks, usually those of the layers.

    Entries that couple different blocks are left out. Each block is computed as a dense matrix, and
    its eigenvalues are replaced by their absolute values, so that the preconditioner is positive
    definite; those below `1e-6` times the largest of the block are raised to that.

    Parameters
    ----------
    H : HessianOperator or operator like it
        The symmetric operator of the system.
    blocks : list, optional
        The blocks, each as `H.block` takes it. Together they must contain each entry exactly once.
        By default they are those of `H.blocks()`.
    damping : float, optional
        Multiple of the identity that is added to the operator's own damping, as in `solve`.
    max_size : int, optional
        The largest block to accept. A block of size `m` takes `m` products, `m**2` numbers, and of
        the order of `m**3` operations.

    Attributes
    ----------
    products : int
        Number of products that were computed, which is `n`.

    Raises
    ------
    TooLargeError
        If a block is larger than `max_size`.
    HvpError
        If an entry is in no block, or in several, or the damping is invalid.

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable(3.0, name="b")
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(a**4) + 5 * b**2, [a, b])
    >>> M = hvp.BlockDiagonalPreconditioner(H)
    >>> M @ (H @ np.ones(3))
    array([1., 1., 1.], dtype=float32)
    """

    @Uninterrupted()
    def __init__(
        self, H: Any, blocks: Any = None, *, damping: float = 0.0, max_size: int = 2048
    ) -> None:
        if not isinstance(H, SymmetricOperator):
            raise HvpError(
                f"the operator is {type(H).__name__}",
                "an operator of this package, which knows its variables",
                "pass scipy a preconditioner of your own",
            )
        damping = check_damping(damping)
        check_count(max_size, "max_size")
        if blocks is not None and (isinstance(blocks, str) or not isinstance(blocks, Iterable)):
            raise HvpError(f"the argument blocks is {blocks!r}", "a list of blocks")
        chosen = list(H.blocks().values()) if blocks is None else [H.block(b) for b in blocks]
        parts = [_entries_of(part) for part in chosen]
        order = np.concatenate(parts) if parts else np.zeros(0, int)
        if not np.array_equal(np.sort(order), np.arange(H.shape[0])):
            counts = np.bincount(order, minlength=H.shape[0])
            problem = "in no block" if (counts == 0).any() else "in several blocks"
            raise HvpError(f"an entry is {problem}", "blocks that have each entry once")
        for part in chosen:
            if part.shape[0] > max_size:
                raise TooLargeError(
                    f"a block is of size {part.shape[0]}: {part!r}",
                    f"at most {max_size}",
                    "pass smaller blocks, a larger max_size, or use hvp.DiagonalPreconditioner",
                )
        inverses = []
        for part in chosen:
            deliver_interrupt()
            inverse = _positive_inverse(part.to_dense(max_size=max_size), damping)
            inverses.append(tf.constant(inverse.astype(H.dtype)))
        self.products = H.shape[0]
        places = [tf.constant(order, tf.int32), tf.constant(np.argsort(order), tf.int32)]
        super().__init__("blocks", _solve_blocks, [*inverses, *places], evaluation_of(H))


def _entries_of(block: SymmetricOperator) -> np.ndarray:
    evaluation = evaluation_of(block)
    assert isinstance(evaluation, BlockEvaluation)
    return evaluation.selection.entries


def _positive_inverse(matrix: np.ndarray, damping: float) -> np.ndarray:
    """Invert a symmetric matrix plus damping, with the absolute values of its eigenvalues."""
    wide = matrix.astype(np.float64)
    eigenvalues, vectors = np.linalg.eigh((wide + wide.T) / 2 + damping * np.eye(len(wide)))
    sizes = np.abs(eigenvalues)
    largest = sizes.max(initial=0.0)
    sizes = np.maximum(sizes, _MIN_EIGENVALUE * largest) if largest else np.ones_like(sizes)
    return (vectors / sizes) @ vectors.T
