"""Variables that pass tensors to compiled functions."""

from __future__ import annotations

import tensorflow as tf


class TensorCell:
    """Holds a tensor that compiled functions read, and that can be replaced between calls.

    All tensors in the cell are compatible with `shape`, which may be partly unknown.
    """

    def __init__(self, tensor: tf.Tensor, shape: tf.TensorShape) -> None:
        self._shape = shape
        self.variable = tf.Variable(tensor, shape=tf.TensorShape(None), trainable=False)
        self.nothing = _empty_tensor(tensor.dtype)

    def read(self) -> tf.Tensor:
        """Return the tensor."""
        value = self.variable.read_value()
        value.set_shape(self._shape)
        return value

    def assign(self, tensor: tf.Tensor) -> None:
        """Replace the tensor; tensors that were read before do not change."""
        # `tf.Variable.assign` takes several times as long.
        tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=tensor)

    def empty(self) -> None:
        """Release the tensor."""
        self.assign(self.nothing)


def _empty_tensor(dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=-1, element_dtype=tf.float32
        )
    return tf.zeros([0], dtype)
