"""The gradient of a scalar loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.suspects import derivative_errors
from hvp._errors import InvalidLossError, InvalidVariablesError, quoted


def value_and_gradient(
    loss: Callable[[], Any], inputs: Sequence[tf.Variable | tf.Tensor]
) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
    """Evaluate a loss and its gradient.

    The gradients are dense tensors with the shapes of the inputs, or None for inputs that the loss
    does not depend on. A loss that is not a real scalar raises `InvalidLossError`, and an operation
    without a gradient `SecondDerivativeError`.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        with derivative_errors():  # calling a tf.function makes its gradient, too
            value = check_scalar(loss())
    with derivative_errors():
        gradient = tape.gradient(value, list(inputs))
    return value, [densify(g, x.shape) for g, x in zip(gradient, inputs)]


def densify(gradient: Any, shape: Sequence[int]) -> tf.Tensor | None:
    """Convert the `tf.IndexedSlices` of a gather to a tensor, by operations that tapes record."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if isinstance(shape, tf.TensorShape) and not shape.is_fully_defined():
        shape = gradient.dense_shape
    dense = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])
    return tf.reshape(dense, shape)


def without_dependence(names: Sequence[str]) -> InvalidVariablesError:
    """Return the error for a loss that depends on none of the variables."""
    return InvalidVariablesError(
        f"the loss depends on none of the variables {quoted(names)}",
        "a loss that reads at least one of them",
        "check that the loss uses these very variables, through TensorFlow operations; "
        "functions of NumPy and float() have no derivatives",
    )


def check_scalar(value: Any) -> tf.Tensor:
    """Refuse a loss that is not a real floating-point scalar tensor."""
    if not isinstance(value, (tf.Tensor, tf.Variable)):
        raise InvalidLossError(
            f"the loss returned {type(value).__name__}",
            "a scalar tensor",
            "return the tensor itself; .numpy(), float() and NumPy's functions disconnect it from "
            "the variables",
        )
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        raise InvalidLossError(
            f"the loss is of type {value.dtype.name}",
            "a real floating-point scalar",
            "take a real part or norm, or cast to float32",
        )
    # The rank is None only while tracing. The shape is then checked when the function runs.
    if value.shape.rank not in (0, None):
        raise InvalidLossError(
            f"the loss has shape {value.shape}",
            "a scalar",
            "take its mean: tf.reduce_mean(...); for residuals, the mean of their squares",
        )
    return value
