"""Applying a function of one element to many elements at once.

`tf.vectorized_map` adds a first axis to operations. The product `(1, m, p) @ (p, q)`, of a sequence
of length `m` in a batch of one, becomes `(k, 1, m, p) @ (p, q)`. For these shapes, TensorFlow's
kernel from oneDNN writes beyond its buffers (float32, float16 and bfloat16; TensorFlow 2.16 to
2.21, on processors with AVX-512). The result is right, but sooner or later the process crashes. If
such a product would arise, products of many matrices by one are first written as products of two
matrices::

    (a, ..., m, p) @ (p, q)  =  reshape(reshape(left, (a ... m, p)) @ right, (a, ..., m, q))

which is no slower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import CALLS, CONTROL_FLOW, LOOPS
from hvp._graphs.graph import Graph
from hvp._graphs.inline import inline_calls
from hvp._graphs.private import SHAPES
from hvp._graphs.simplify import simplified
from hvp._graphs.sizes import graph_def_with_shapes

_PRODUCT = "BatchMatMulV2"
_DANGEROUS = (tf.float32, tf.float16, tf.bfloat16)


class NotVectorizedError(Exception):
    """TensorFlow cannot apply a function to many elements at once."""


def vectorized(function: Callable[[Any], Any], elements: Any) -> Any:
    """Apply a function along the first axis, like `tf.vectorized_map`, but only if it is safe.

    NotVectorizedError is raised if TensorFlow cannot vectorize the function safely. You can then
    use `tf.map_fn`, which applies the function to one element after the other and raises the
    function's own errors.

    An operation that TensorFlow cannot apply to all elements at once runs in a loop in the graph.
    TensorFlow's messages to its own developers about this, and about failures, are suppressed;
    failures are raised. Loops and lists of tensors are refused: TensorFlow accepts them, and fails
    when the graph runs.
    """
    results, dangerous = _vectorized(function, elements)
    if dangerous:
        results, dangerous = _vectorized(_folded(function, elements), elements)
    if dangerous:
        raise NotVectorizedError("a product of matrices for which TensorFlow's kernel is not safe")
    return results


def _vectorized(function: Callable[[Any], Any], elements: Any) -> tuple[Any, bool]:
    """Return the results, and whether a dangerous product was added to the graph."""
    graph, logger = tf.compat.v1.get_default_graph(), tf.get_logger()
    before = {operation.name for operation in graph.get_operations()}

    def without_loops(element: Any) -> Any:
        result = function(element)
        _refuse_loops(graph, [op for op in graph.get_operations() if op.name not in before])
        return result

    logger.addFilter(_is_relevant)
    try:
        results = tf.vectorized_map(without_loops, elements, warn=False)
    except NotVectorizedError:
        raise
    except Exception as error:  # of any kind, because TensorFlow's error handling itself may fail
        raise NotVectorizedError(f"{type(error).__name__}: {error}") from error
    finally:
        logger.removeFilter(_is_relevant)
    added = [operation for operation in graph.get_operations() if operation.name not in before]
    return results, _is_any_dangerous(graph, added)


def _refuse_loops(graph: tf.Graph, operations: Sequence[tf.Operation]) -> None:
    """Refuse loops and lists of tensors, also in the functions that operations call."""
    kinds = {operation.type for operation in operations}
    if kinds & (CONTROL_FLOW | CALLS):
        functions = graph.as_graph_def().library.function
        kinds |= {node.op for function in functions for node in function.node_def}
    found = sorted(kind for kind in kinds if kind in LOOPS or kind.startswith("TensorList"))
    if found:
        raise NotVectorizedError(f"there are operations of type {found[0]}")


def _is_any_dangerous(graph: tf.Graph, operations: Sequence[tf.Operation]) -> bool:
    for operation in operations:
        if operation.type == _PRODUCT and operation.inputs[0].dtype in _DANGEROUS:
            left, right = (tensor.shape for tensor in operation.inputs)
            if not operation.get_attr("adj_x") and _may_be_dangerous(left, right):
                return True
    if not any(operation.type in CONTROL_FLOW | CALLS for operation in operations):
        return False
    # In loops and branches, only the shapes of results are known.
    return any(
        node.op == _PRODUCT
        and not node.attr["adj_x"].b
        and tf.as_dtype(node.attr["T"].type) in _DANGEROUS
        and _may_be_dangerous(_shape_of_result(node), tf.TensorShape(None))
        for definition in graph.as_graph_def(add_shapes=True).library.function
        for node in definition.node_def
    )


def _may_be_dangerous(left: tf.TensorShape, right: tf.TensorShape) -> bool:
    """Return whether two operands may have the shapes `(k, 1, m, p)` and `([1, 1,] p, q)`."""
    if left.rank is not None and (left.rank != 4 or left[1] not in (1, None)):
        return False
    return right.rank is None or all(size in (1, None) for size in right[:-2])


def _shape_of_result(node: Any) -> tf.TensorShape:
    shapes = node.attr[SHAPES].list.shape
    return tf.TensorShape(shapes[0] if shapes else None)


def _folded(function: Callable[[Any], Any], elements: Any) -> Callable[[Any], Any]:
    """Return a function with products of many matrices by one as products of two."""
    specs = [tf.TensorSpec(x.shape[1:], x.dtype) for x in tf.nest.flatten(elements)]

    def flat(*parts: tf.Tensor) -> Any:
        return function(tf.nest.pack_sequence_as(elements, parts))

    concrete = tf.function(flat, autograph=False).get_concrete_function(*specs)
    outside = list(concrete.captured_inputs)
    names = [tensor.name for tensor in concrete.inputs]
    without_calls, rename = inline_calls(concrete.graph.as_graph_def())
    outputs = [rename(tensor.name) for tensor in concrete.outputs]
    inputs = [rename(name) for name in names]
    graph = Graph(without_calls).computing(outputs, inputs)

    def imported(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return graph.imported(dict(zip(inputs, tensors)), outputs)

    # This import infers the shapes of all tensors, which a GraphDef does not contain.
    all_specs = [tf.TensorSpec(t.shape, t.dtype) for t in concrete.inputs]
    shaped = tf.function(imported, autograph=False).get_concrete_function(*all_specs)
    arguments = [tensor.name for tensor in shaped.inputs]
    results = [tensor.name for tensor in shaped.outputs]
    simple = simplified(graph_def_with_shapes(shaped.graph), results)
    rewritten = simple.computing(results, arguments)

    def folded(element: Any) -> Any:
        known = dict(zip(arguments, [*tf.nest.flatten(element), *outside]))
        values = rewritten.imported(known, results)
        return tf.nest.pack_sequence_as(concrete.structured_outputs, values)

    return folded


def _is_relevant(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(words in message for words in ("while_loop", "pfor", "created at:"))
