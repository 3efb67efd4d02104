"""Whether a scalar in a graph is a mean over examples, as far as its operations tell."""

from __future__ import annotations

import tensorflow as tf

from hvp._graphs.dataflow import Dataflow, Vertex

# Operations on scalars that lie between a mean and the loss.
_SCALAR = frozenset("Add AddN AddV2 Cast EnsureShape Identity Mul Neg RealDiv Sub".split())
# What they may read besides.
_GIVEN = frozenset(["Const", "Placeholder", "ReadVariableOp"])


def lengths_averaged(flow: Dataflow, graph: tf.Graph, value: Vertex) -> tuple[int | None, ...]:
    """Return the numbers of rows of the means that a scalar is computed from.

    They are the lengths of the first axes of the means' inputs, None where unknown. The tuple is
    empty if the scalar is computed from anything else, such as a sum. `value` is the operation that
    computes the scalar in `flow`, and `graph` is the same graph, which knows the shapes.
    """
    lengths: list[int | None] = []
    seen, pending = {value}, [value]
    while pending:
        vertex = pending.pop()
        kind = flow.types.get(vertex, "Identity")  # the ports of calls have no type
        if kind in _GIVEN:
            continue
        if kind == "Mean" and not vertex[0]:
            shape = graph.get_operation_by_name(vertex[1]).inputs[0].shape
            lengths.append(shape[0] if shape.rank else None)
            continue
        if kind not in _SCALAR:
            return ()
        sources = {edge.source for edge in flow.incoming[vertex]} - seen
        seen |= sources
        pending += sources
    return tuple(lengths)
