"""The private names of TensorFlow that are used, all of them, each with its reason.

`tests/graphs/test_private.py` holds what is expected of each, and fails first when one moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# `tf.custom_gradient` is the public way to record an operation with a gradient of its own. But its
# derivatives refer to tensors of the graph in which it was called, so that a `tf.function` with one
# inside can be differentiated from outside once, not twice. And only
# `GradientTape.stop_recording` is public, which stops the tape it belongs to, whereas here every
# tape and forward accumulator has to look away.
from tensorflow.python.eager import record

# The definitions of operations tell which are stateful, and how many results of which types each
# has, which a FunctionDef leaves out.
from tensorflow.python.framework import op_def_registry, ops

# There is no public way to know that a graph is being traced for XLA, which cannot call Python,
# not even in a branch that is never taken.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

__all__ = [
    "call_flat",
    "gradient_of_type",
    "is_for_xla",
    "op_def_registry",
    "record",
    "replace_gradient_of_type",
]


def is_for_xla() -> bool:
    """Whether the graph being traced is for XLA."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def call_flat(concrete: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Call a concrete function on eager tensors of the right types and shapes.

    Its public `__call__` binds arguments by name and checks each, which takes about as long as a
    small product.
    """
    return concrete._call_flat(list(tensors), concrete.captured_inputs)


def gradient_of_type(kind: str) -> tuple[bool, Any]:
    """Return whether TensorFlow knows of a gradient for a type of operation, and which.

    It may know that there is none, which is None.
    """
    registry = _gradient_registry()
    return (True, registry.lookup(kind)) if kind in registry.list() else (False, None)


def replace_gradient_of_type(kind: str, gradient: Any) -> None:
    """Replace the gradient that TensorFlow has; `tf.RegisterGradient` only adds new ones."""
    registry = _gradient_registry()
    registry._registry[kind] = {**registry._registry[kind], "type": gradient}


def _gradient_registry() -> Any:
    return getattr(ops, "gradient_registry", None) or ops._gradient_registry
