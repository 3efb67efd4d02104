"""A gradient traced in float32, evaluated in float64.

Differences of gradients test second derivatives without using any. In float32 the steps have to be
so large that networks of `relu` have kinks within them; in float64 they can be short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.replace import replace_operations
from hvp._engines.plan import WideGradient
from hvp._engines.trace import TracedGraph
from hvp._graphs.graph import Graph, data_inputs
from hvp._graphs.inline import inline_calls
from hvp._graphs.wide import widen

_FLOAT, _DOUBLE = tf.float32.as_datatype_enum, tf.float64.as_datatype_enum
# Operations that would give quite other numbers in float64; those are drawn as they were.
_DRAWS = ("Random", "Stateless", "Truncated", "Multinomial")

_HALF = {tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum}


def gradient_in_float64(
    traced: TracedGraph, variables: Sequence[tf.Variable]
) -> WideGradient | None:
    """Return the gradient of a rule traced in float32 as a function of `variables` in float64.

    All other variables are read once, here. The result is None for functions with loops, branches
    or recomputed parts, for parts in 16 bits, and for operations that do not exist in float64. An
    operation without a float64 kernel on the device raises when the gradient is called.
    """
    flat, rename = inline_calls(replace_operations(traced.graph_def))
    graph = Graph(flat)
    gradient_names = [rename(name) for name in (traced.gradient or ()) if name is not None]
    names = graph.ancestors(gradient_names)
    captures = {rename(name): tensor for name, tensor in traced.captures.items()}
    places = {id(variable.handle): i for i, variable in enumerate(variables)}
    read_places: dict[str, int] = {}
    known: dict[str, tf.Tensor] = {}
    for name in names:
        node, read = graph.nodes[name], f"{name}:0"
        if node.op == "ReadVariableOp":
            handle = captures.get(data_inputs(node)[0])
            if handle is None:
                return None
            if id(handle) in places:
                read_places[read] = places[id(handle)]
                continue
            dtype = tf.as_dtype(node.attr["dtype"].type)
            known[read] = _wide(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
        elif read in captures and captures[read].dtype != tf.resource:
            known[read] = _wide(captures[read])
    wide = graph.computing(gradient_names, [*read_places, *known])
    part = wide.graph_def
    if part.library.function or any("Resource" in node.op for node in part.node):
        return None
    if any(value.type in _HALF for node in part.node for value in node.attr.values()):
        return None
    for node in list(part.node):
        if node.op.startswith(_DRAWS):
            _widen_after(node, part)
        else:
            widen(node)
    order = list(read_places)

    def evaluate(*values: tf.Tensor) -> list[tf.Tensor]:
        return wide.imported({**known, **dict(zip(order, values))}, gradient_names)

    dtypes = [tf.float64 if v.dtype == tf.float32 else v.dtype for v in variables]
    specs = [tf.TensorSpec(variables[read_places[n]].shape, dtypes[read_places[n]]) for n in order]
    try:
        concrete = tf.function(evaluate, autograph=False).get_concrete_function(*specs)
    except (tf.errors.OpError, ValueError, TypeError):  # an operation that float64 does not have
        return None

    def gradient(values: Sequence[tf.Tensor]) -> list[Any]:
        results = iter(concrete(*(values[read_places[name]] for name in order)))
        return [None if name is None else next(results) for name in traced.gradient or ()]

    return gradient


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float64) if tensor.dtype == tf.float32 else tensor


def _widen_after(node: Any, part: Any) -> None:
    """Let a node draw numbers in float32, and cast them to float64."""
    if "dtype" not in node.attr or node.attr["dtype"].type != _FLOAT:
        return
    cast = part.node.add(name=node.name, op="Cast")
    node.name += "/float32"
    cast.input.append(node.name)
    cast.attr["SrcT"].type, cast.attr["DstT"].type = _FLOAT, _DOUBLE
