"""Tensors that compiled functions read, and that can be replaced between calls."""

from __future__ import annotations

import tensorflow as tf


class Slot:
    """A tensor that can be replaced, or let go.

    Parameters
    ----------
    tensor : tf.Tensor
        What it is at first.
    shape : tf.TensorShape
        Of every tensor it will be.
    """

    def __init__(self, tensor: tf.Tensor, shape: tf.TensorShape) -> None:
        self._shape = shape
        self.variable = tf.Variable(tensor, shape=tf.TensorShape(None), trainable=False)
        self._nothing = _nothing(tensor.dtype)

    def read(self) -> tf.Tensor:
        """Return the tensor."""
        value = self.variable.read_value()
        value.set_shape(self._shape)
        return value

    def assign(self, tensor: tf.Tensor) -> None:
        """Replace the tensor; those read before stay what they were."""
        # The variable's own method costs several times as much.
        tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=tensor)

    def empty(self) -> None:
        """Let the tensor go."""
        self.assign(self._nothing)


def _nothing(dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=-1, element_dtype=tf.float32
        )
    return tf.zeros([0], dtype)
