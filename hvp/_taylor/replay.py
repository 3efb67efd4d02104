"""Adding an operation of one graph to another, with other inputs."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def replay(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Add an operation like `operation` to the graph being traced; return its results.

    Tapes do not record it. `tf.gradients`, and the gradient of the function that is traced, know
    it like any other.
    """
    known = {attribute.name for attribute in operation.op_def.attr}
    attributes = {k: v for k, v in operation.node_def.attr.items() if k in known}
    dtypes = [tensor.dtype for tensor in operation.outputs]
    graph = tf.compat.v1.get_default_graph()
    added = graph.create_op(operation.type, list(inputs), dtypes, attrs=attributes)
    return list(added.outputs)
