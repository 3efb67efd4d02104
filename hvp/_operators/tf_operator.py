"""The same linear map as a `tf.linalg.LinearOperator`."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


class TensorFlowOperator(tf.linalg.LinearOperator):
    """An operator that is defined by its products with blocks of columns.

    `multiply` takes a tensor of shape `(n, k)`, and whether to multiply by the transpose; it
    returns one of shape `(m, k)`. `is_positive_definite` is the caller's claim, which is not
    checked.
    """

    def __init__(
        self,
        multiply: Callable[..., tf.Tensor],
        shape: tuple[int, int],
        dtype: tf.DType,
        *,
        is_self_adjoint: bool,
        is_positive_definite: bool | None,
        name: str,
    ) -> None:
        parameters = {
            "multiply": multiply,
            "shape": shape,
            "dtype": dtype,
            "is_self_adjoint": is_self_adjoint,
            "is_positive_definite": is_positive_definite,
            "name": name,
        }
        super().__init__(
            dtype=dtype,
            is_non_singular=is_positive_definite or None,
            is_self_adjoint=is_self_adjoint or None,
            is_positive_definite=is_positive_definite,
            is_square=shape[0] == shape[1],
            name=name,
            parameters=parameters,
        )
        self._multiply, self._dimensions = multiply, shape

    def __repr__(self) -> str:
        rows, columns = self._dimensions
        definite = {None: [], True: ["positive definite"], False: ["not positive definite"]}
        properties = [self.dtype.name, *(["self-adjoint"] if self.is_self_adjoint else [])]
        properties += definite[self.is_positive_definite]
        return (
            f"<hvp {self.name}, a tf.linalg.LinearOperator, {rows} x {columns}, "
            f"{', '.join(properties)}>"
        )

    def _shape(self) -> tf.TensorShape:
        return tf.TensorShape(self._dimensions)

    def _shape_tensor(self) -> tf.Tensor:
        return tf.constant(self._dimensions, tf.int32)

    @tf.autograph.experimental.do_not_convert
    def _matmul(self, x: tf.Tensor, adjoint: bool = False, adjoint_arg: bool = False) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        if adjoint_arg:
            x = tf.linalg.matrix_transpose(x)
        if x.shape.rank == 2:
            return self._multiply(x, adjoint)
        # Batches of blocks: their columns side by side, and back.
        rank = x.shape.rank
        forth = [rank - 2, *range(rank - 2), rank - 1]
        back = [*range(1, rank - 1), 0, rank - 1]
        wide = tf.transpose(x, forth)
        rows, columns = self._dimensions
        product = self._multiply(tf.reshape(wide, [rows if adjoint else columns, -1]), adjoint)
        shape = tf.concat([[columns if adjoint else rows], tf.shape(wide)[1:]], axis=0)
        return tf.transpose(tf.reshape(product, shape), back)
