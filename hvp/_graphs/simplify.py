"""What is done to every graph before it is split, cut or compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from hvp._graphs.broadcasts import broadcast_instead_of_repeating
from hvp._graphs.folding import fold_shapes
from hvp._graphs.graph import Graph, node_of
from hvp._graphs.matrix_products import multiply_batches_as_one
from hvp._graphs.merging import merge_equal_operations
from hvp._graphs.sizes import take_sizes


def simplified(
    graph_def: Any,
    results: Iterable[str],
    inputs: Mapping[str, tf.TensorSpec] | None = None,
) -> Graph:
    """Return a graph that computes the same with fewer operations, and knows the sizes of results.

    `graph_def` has no calls, notes the shapes of results, and is changed in place. `inputs` are
    tensors that none of its operations computes.
    """
    fold_shapes(graph_def)
    sizes = multiply_batches_as_one(graph_def)
    merge_equal_operations(graph_def, {*map(node_of, results)})
    broadcast_instead_of_repeating(graph_def, inputs)
    return Graph(graph_def, take_sizes(graph_def, inputs) | sizes)
