"""The same linear map as a `tf.linalg.LinearOperator`."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


class TensorFlowOperator(tf.linalg.LinearOperator):
    """A square, self-adjoint operator, defined by its products with blocks of columns.

    Parameters
    ----------
    multiply : callable
        Takes and returns a tensor of shape `(n, k)`.
    size : int
        The `n` above.
    dtype : tf.DType
        Of the entries.
    is_positive_definite : bool, optional
        The caller's word for it.
    name : str
        TensorFlow's name.
    """

    def __init__(
        self,
        multiply: Callable[[tf.Tensor], tf.Tensor],
        size: int,
        dtype: tf.DType,
        *,
        is_positive_definite: bool | None,
        name: str,
    ) -> None:
        parameters = {
            "multiply": multiply,
            "size": size,
            "dtype": dtype,
            "is_positive_definite": is_positive_definite,
            "name": name,
        }
        super().__init__(
            dtype=dtype,
            is_non_singular=is_positive_definite or None,
            is_self_adjoint=True,
            is_positive_definite=is_positive_definite,
            is_square=True,
            name=name,
            parameters=parameters,
        )
        self._multiply = multiply
        self._size = size

    def __repr__(self) -> str:
        definite = {None: "", True: ", positive definite", False: ", not positive definite"}
        return (
            f"<hvp {self.name}, a tf.linalg.LinearOperator, {self._size} x {self._size}, "
            f"{self.dtype.name}, self-adjoint{definite[self.is_positive_definite]}>"
        )

    def _shape(self) -> tf.TensorShape:
        return tf.TensorShape([self._size, self._size])

    def _shape_tensor(self) -> tf.Tensor:
        return tf.constant([self._size, self._size], tf.int32)

    @tf.autograph.experimental.do_not_convert
    def _matmul(self, x: tf.Tensor, adjoint: bool = False, adjoint_arg: bool = False) -> tf.Tensor:
        del adjoint  # self-adjoint
        x = tf.convert_to_tensor(x)
        if adjoint_arg:
            x = tf.linalg.matrix_transpose(x)
        if x.shape.rank == 2:
            return self._multiply(x)
        # Batches of blocks: their columns side by side, and back.
        rank = x.shape.rank
        forth = [rank - 2, *range(rank - 2), rank - 1]
        back = [*range(1, rank - 1), 0, rank - 1]
        wide = tf.transpose(x, forth)
        product = self._multiply(tf.reshape(wide, [self._size, -1]))
        return tf.transpose(tf.reshape(product, tf.shape(wide)), back)
