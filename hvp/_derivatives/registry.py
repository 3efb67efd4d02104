"""Gradients of our own in TensorFlow's registry, in force only while a function is linearized.

TensorFlow looks up the gradient of an operation by the operation's type. A gradient that is
registered here therefore also reaches functions that were imported under another name, and
whatever Keras calls.

The gradients are in force only in the context that linearizes, which is a thread's own. Everywhere
else TensorFlow answers as it did before.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.gradient import densify
from hvp._graphs.private import gradient_of_type, op_def_registry, replace_gradient_of_type

# Takes an operation, of which only what TensorFlow's own gradient uses is sure to be there, and the
# gradients of its results; returns those of its inputs.
GradientFunction = Callable[..., Sequence[Any]]

_in_force = contextvars.ContextVar("hvp_derivatives", default=False)
# The gradients that TensorFlow has, or what stands for those it lacks, of corrected operations.
TENSORFLOWS: dict[str, GradientFunction] = {}


@contextlib.contextmanager
def corrected_derivatives() -> Iterator[None]:
    """Differentiate with the gradients of this module, in this context."""
    token = _in_force.set(True)
    try:
        yield
    finally:
        _in_force.reset(token)


def is_linearizing() -> bool:
    """Whether the gradients of this module are in force in this context."""
    return _in_force.get()


def gradient_of(*kinds: str) -> Callable[[GradientFunction], GradientFunction]:
    """Put a gradient in the place of TensorFlow's for operations of some types."""

    def decorated(function: GradientFunction) -> GradientFunction:
        for kind in kinds:
            _put_in_force(kind, function)
        return function

    return decorated


def _put_in_force(kind: str, function: GradientFunction) -> None:
    def chosen(operation: Any, *upstream: Any) -> Sequence[Any]:
        if _in_force.get():
            return function(operation, *map(dense, upstream))
        return tensorflows(operation, *upstream)

    def missing(operation: Any, *upstream: Any) -> Sequence[Any]:
        raise LookupError(f"gradient registry has no entry for: {kind}")

    def none(operation: Any, *upstream: Any) -> Sequence[Any]:
        # A tape keeps no inputs of such an operation, not even how many there were.
        return [None] * len(op_def_registry.get(kind).input_arg)

    is_known, gradient = gradient_of_type(kind)
    if is_known:
        tensorflows = gradient or none
        replace_gradient_of_type(kind, chosen)
    else:
        tensorflows = missing
        tf.RegisterGradient(kind)(chosen)
    TENSORFLOWS[kind] = tensorflows


def dense(upstream: Any) -> Any:
    """Make rows that are scattered dense: not every gradient can take them."""
    if isinstance(upstream, tf.IndexedSlices):
        return densify(upstream, upstream.dense_shape)
    return upstream


def attributes(operation: Any, *names: str) -> dict[str, Any]:
    """Return attributes of an operation, as arguments to make another like it."""
    found = {name: operation.get_attr(name) for name in names}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def size_of(images: tf.Tensor) -> tf.Tensor:
    return tf.shape(images)[1:3]


def gradient_of_formula(
    formula: Callable[..., tf.Tensor], inputs: Sequence[tf.Tensor], upstream: tf.Tensor
) -> list[Any]:
    """Differentiate a formula that has the values of an operation, in place of the operation."""
    # In the gradient of a loop they belong to another graph, where a tape does not follow them.
    inputs = [tf.identity(tensor) for tensor in inputs]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        result = formula(*inputs)
    return tape.gradient(result, inputs, upstream)
