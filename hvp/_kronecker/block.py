"""A block `Q diag(s) Q^T`, where `Q` is the Kronecker product of two bases of eigenvectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.linalg
import tensorflow as tf

# Below this size numpy's function for eigenvalues is as fast as scipy's.
_SMALL = 16
# Stands for a tensor that is passed later.
_NOTHING = np.empty(0)


@dataclass(frozen=True)
class Block:
    """A symmetric block of weights that are `K` matrices of shape `(I, O)`.

    Its product with matrices `V` is `P ((P^T V Q) * scales) Q^T`. The eigenvectors of the two
    factors are the columns of `P`, in `left` of shape `(K, I, I)`, and of `Q`, in `right` of shape
    `(K, O, O)`; None stands for unit vectors. An exact block has `O = 1`, and a diagonal has no
    eigenvectors either. A low-rank block has `K = O = 1`, the eigenvectors `P = 1 - A B^T` with `A`
    and `B` in `left` of shape `(2, I, r)`, and the same eigenvalue for all but the first `r`.

    The eigenvalues `scales` are in float64 and of shape `(K, I, O)`; `tensor` holds them in the
    type of the vectors, of shape `(K, I, 1, O)`. The indices `entries` of the weights in the flat
    vector have the shape `(K, I, O)` as well. The `kind` is ``"kronecker"``, ``"exact"``,
    ``"diagonal"`` or ``"low-rank"``.
    """

    names: tuple[str, ...]
    kind: str
    entries: np.ndarray
    left: tf.Tensor | None
    right: tf.Tensor | None
    scales: np.ndarray
    tensor: tf.Tensor

    @classmethod
    def of(
        cls,
        names: tuple[str, ...],
        kind: str,
        entries: np.ndarray,
        bases: Sequence[np.ndarray | None],
        scales: np.ndarray,
        dtype: tf.DType,
    ) -> Block:
        """Return a block of arrays, with `left` and `right` as the `bases`."""
        left, right = (None if b is None else tf.constant(b, dtype) for b in bases)
        return cls(names, kind, entries, left, right, scales, _tensor(scales, dtype))

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The tensors that products read."""
        return [t for t in (self.left, self.right, self.tensor) if t is not None]

    def with_tensors(self, tensors: Iterator[tf.Tensor]) -> Block:
        """Return the block with other tensors in place of `tensors`, for products in a graph."""
        left, right = (None if b is None else next(tensors) for b in (self.left, self.right))
        return replace(self, left=left, right=right, tensor=next(tensors))

    def without_numbers(self) -> Block:
        """Return a block of the same form without numbers, for `with_tensors`."""
        left, right = (None if b is None else _NOTHING for b in (self.left, self.right))
        return replace(self, left=left, right=right, scales=np.empty(0), tensor=_NOTHING)

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.entries.size

    @property
    def nbytes(self) -> int:
        """The memory of eigenvectors and eigenvalues, in bytes."""
        sizes = [int(np.prod(tensor.shape)) * tensor.dtype.size for tensor in self.tensors]
        return sum(sizes) + self.scales.nbytes

    def scaled(self, function: Callable[[np.ndarray], np.ndarray], dtype: tf.DType) -> Block:
        """Return the block with a function applied to its eigenvalues."""
        return self.with_scales(function(self.scales), dtype)

    def with_scales(self, scales: np.ndarray, dtype: tf.DType) -> Block:
        """Return the block with other eigenvalues."""
        return replace(self, scales=scales, tensor=_tensor(scales, dtype))

    def diagonal(self) -> np.ndarray:
        """Return the diagonal entries, of shape `(K, I, O)`, in float64."""
        diagonal = self.scales
        if self.kind == "low-rank" and self.left is not None:
            first, second = self.left.numpy().astype(np.float64)
            rest = diagonal[0, -1, 0]
            rank = np.flatnonzero(diagonal[0, :, 0] != rest).max(initial=-1) + 1
            vectors = np.eye(len(first), rank) - first @ second[:rank].T
            return rest + (vectors**2 @ (diagonal[0, :rank] - rest))[np.newaxis]
        if self.left is not None:
            diagonal = self.left.numpy().astype(np.float64) ** 2 @ diagonal
        if self.right is not None:
            squares = self.right.numpy().astype(np.float64) ** 2
            diagonal = diagonal @ squares.transpose(0, 2, 1)
        return diagonal

    def output_variances(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return the variances of `x @ W` for the covariance of `W`, as a function of `x`.

        Its shape is `(m, I)`, and that of the variances `(m, O)`.
        """
        left, variances = self.left, self.scales[0]
        if self.right is not None:  # by TensorFlow's threads: there may be thousands of outputs
            scales = tf.constant(variances, self.right.dtype)
            squares = tf.square(self.right[0])
            variances = tf.matmul(scales, squares, transpose_b=True).numpy()
        basis = None if left is None else left[0].numpy().astype(np.float64)
        return lambda inputs: (inputs if basis is None else inputs @ basis) ** 2 @ variances

    def multiply(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by each row, of shape `(k, K I O)`."""
        groups, size, width = self.entries.shape
        count = tf.shape(rows)[0]
        matrices = tf.transpose(tf.reshape(rows, [count, groups, size, width]), [1, 2, 0, 3])
        matrices = self._from_left(matrices, adjoint=True)
        matrices = self._from_right(matrices, adjoint=False)
        matrices *= self.tensor
        matrices = self._from_right(matrices, adjoint=True)
        matrices = self._from_left(matrices, adjoint=False)
        return tf.reshape(tf.transpose(matrices, [2, 0, 1, 3]), [count, groups * size * width])

    def rotate(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply each row by the transposed eigenvectors."""
        groups, size, width = self.entries.shape
        count = tf.shape(rows)[0]
        matrices = tf.transpose(tf.reshape(rows, [count, groups, size, width]), [1, 2, 0, 3])
        matrices = self._from_left(matrices, adjoint=True)
        matrices = self._from_right(matrices, adjoint=False)
        return tf.reshape(tf.transpose(matrices, [2, 0, 1, 3]), [count, groups * size * width])

    def _from_left(self, matrices: tf.Tensor, *, adjoint: bool) -> tf.Tensor:
        if self.left is None:
            return matrices
        shape = tf.shape(matrices)
        flat = tf.reshape(matrices, [shape[0], shape[1], -1])
        if self.kind == "low-rank":
            left, right = tf.unstack(self.left[::-1] if adjoint else self.left)
            inner = tf.matmul(right, flat[0], transpose_a=True)
            return tf.reshape(flat[0] - tf.matmul(left, inner), shape)
        return tf.reshape(_product(self.left, flat, adjoint_left=adjoint), shape)

    def _from_right(self, matrices: tf.Tensor, *, adjoint: bool) -> tf.Tensor:
        if self.right is None:
            return matrices
        shape = tf.shape(matrices)
        flat = tf.reshape(matrices, [shape[0], -1, shape[3]])
        return tf.reshape(_product(flat, self.right, adjoint_right=adjoint), shape)


def _tensor(scales: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(scales[:, :, np.newaxis], dtype)


def _product(
    left: tf.Tensor, right: tf.Tensor, *, adjoint_left: bool = False, adjoint_right: bool = False
) -> tf.Tensor:
    """Multiply the matrices of each group; a single group as plain matrices, which is faster."""
    if 1 in (left.shape[0], right.shape[0]):
        one = tf.matmul(left[0], right[0], transpose_a=adjoint_left, transpose_b=adjoint_right)
        return one[tf.newaxis]
    return tf.matmul(left, right, transpose_a=adjoint_left, transpose_b=adjoint_right)


def reflected(vectors: np.ndarray) -> np.ndarray:
    """Return `A` and `B` of a low-rank block with these orthonormal eigenvectors, up to signs.

    `1 - A B^T` is the product of Householder reflections that a QR decomposition of them takes.
    """
    (packed, factors), _ = scipy.linalg.qr(vectors, mode="raw")
    kept = factors != 0
    left = (np.tril(packed, -1) + np.eye(*packed.shape))[:, kept]
    inner = np.triu(left.T @ left, 1) + np.diag(1 / factors[kept])
    return np.stack([left, left @ np.linalg.inv(inner).T])


def eigen(moment: np.ndarray, *, full: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the eigenvalues, of shape `(K, d)`, and eigenvectors of a factor of each group.

    A factor that is not `full` is a diagonal, of shape `(K, d)`, and has no eigenvectors. Negative
    eigenvalues are rounding errors, and become zeros.
    """
    if not full:
        return np.maximum(moment.astype(np.float64), 0), None
    values, vectors = zip(*(_eigh(one) for one in moment))
    return np.maximum(np.stack(values), 0), np.stack(vectors)


def _eigh(moment: np.ndarray) -> Any:
    symmetric = moment + moment.T
    symmetric *= 0.5
    # In its own precision: in float64 large factors of float32 models would take twice as long.
    if len(symmetric) < _SMALL:  # old versions of scipy leave too little room for one row
        values, vectors = np.linalg.eigh(symmetric)
    else:
        values, vectors = scipy.linalg.eigh(
            symmetric, overwrite_a=True, check_finite=False, driver="evd"
        )
    return values.astype(np.float64), vectors


def exact(entries: np.ndarray) -> np.ndarray:
    """Arrange the entries of an exact or diagonal block."""
    return entries.reshape(1, -1, 1)
