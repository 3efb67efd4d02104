"""Gradients of this package in TensorFlow's registry, in force while a function is linearized.

TensorFlow looks up the gradient of an operation by its type. A registered gradient is therefore
used however the function that runs the operation was imported, and in Keras too. The context that
linearizes belongs to one thread; everywhere else, TensorFlow's own gradients are used.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.gradient import densify
from hvp._graphs.private import gradient_of_type, op_def_registry, replace_gradient_of_type
from hvp._runtime.context import assigned

# Takes an operation and the gradients of its results, returns the gradients of its inputs. A tape
# keeps only those inputs and results of the operation that TensorFlow's own gradient uses.
GradientFunction = Callable[..., Sequence[Any]]

_PREFIX = "hvp."
_in_force = contextvars.ContextVar("hvp_derivatives", default=False)
# TensorFlow's own gradients of corrected operations. Where it has none, a function that does the
# same as TensorFlow without a gradient.
TENSORFLOWS: dict[str, GradientFunction] = {}


def corrected_derivatives() -> contextlib.AbstractContextManager[None]:
    """Use the registered gradients in this context."""
    return assigned(_in_force, True)


def corrected_graph() -> contextlib.AbstractContextManager[None]:
    """Give what is added to the current graph the registered gradients, for whoever asks later.

    That is so in the gradients themselves, too.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph.gradient_override_map({kind: _PREFIX + kind for kind in TENSORFLOWS})


def is_linearizing() -> bool:
    """Whether the registered gradients are in force in this context."""
    return _in_force.get()


def gradient_of(*kinds: str) -> Callable[[GradientFunction], GradientFunction]:
    """Register a function as the gradient of operations of some types."""

    def decorated(function: GradientFunction) -> GradientFunction:
        for kind in kinds:
            _register(kind, function)
        return function

    return decorated


def _register(kind: str, function: GradientFunction) -> None:
    def chosen(operation: Any, *upstream: Any) -> Sequence[Any]:
        if _in_force.get():
            return function(operation, *map(dense, upstream))
        return tensorflows(operation, *upstream)

    @tf.RegisterGradient(_PREFIX + kind)
    def corrected(operation: Any, *upstream: Any) -> Sequence[Any]:
        with corrected_derivatives(), corrected_graph():
            return function(operation, *map(dense, upstream))

    def missing(operation: Any, *upstream: Any) -> Sequence[Any]:
        raise LookupError(f"gradient registry has no entry for: {kind}")

    def none(operation: Any, *upstream: Any) -> Sequence[Any]:
        # A tape does not keep the inputs of such an operation, nor their number.
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
    """Convert `tf.IndexedSlices`, which some gradient functions do not accept, to a tensor."""
    if isinstance(upstream, tf.IndexedSlices):
        return densify(upstream, upstream.dense_shape)
    return upstream


def attributes(operation: Any, *names: str) -> dict[str, Any]:
    """Return attributes of an operation as arguments of a function of `tf.raw_ops`."""
    values = {name: operation.get_attr(name) for name in names}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def size_of(images: tf.Tensor) -> tf.Tensor:
    """Return the height and width of images."""
    return tf.shape(images)[1:3]


def gradient_of_formula(
    formula: Callable[..., tf.Tensor], inputs: Sequence[tf.Tensor], upstream: tf.Tensor
) -> list[Any]:
    """Return the gradient of a formula that computes the same as an operation."""
    # In the gradient of a loop, the inputs belong to another graph, where a tape does not follow
    # them.
    inputs = [tf.identity(tensor) for tensor in inputs]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        result = formula(*inputs)
    return tape.gradient(result, inputs, upstream)
