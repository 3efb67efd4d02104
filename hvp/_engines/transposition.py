"""The transpose of a linear map whose product is a graph.

A product is linear in the vector, so that its transpose is its derivative. TensorFlow's graph of
that derivative repeats itself, as in any second derivative. It is therefore simplified like the
graph of a traced rule before it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvp._derivatives.corrections import corrected_derivatives
from hvp._derivatives.gradient import densify
from hvp._derivatives.replace import replace_operations
from hvp._graphs.concrete import captures
from hvp._graphs.graph import Graph, node_of
from hvp._graphs.inline import inline_calls
from hvp._graphs.matrix_products import for_many_vectors, on_all_cores
from hvp._graphs.schedule import in_order_if_large
from hvp._graphs.simplify import simplified
from hvp._graphs.sizes import graph_def_with_shapes

# Adds the product to the graph being traced, from the parts of the vector and the residuals;
# returns those parts of it that are not identically zero.
Connected = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def transposed_product(
    multiply: Connected,
    specs: Sequence[tf.TensorSpec],
    residuals: Sequence[tf.TensorSpec],
    zeros: int,
) -> tuple[Graph, Callable[..., list[tf.Tensor]]]:
    """Derive the transposed product from the graph of the product.

    `specs` describe the parts of the vector that the product takes. `zeros` is the number of
    vectors of zeros that the transposed product takes before the residuals: one for each of
    `specs`, or none.

    Return its graph, and a function that adds it to the graph being traced. The function takes the
    parts of the vector that are not multiplied by zeros, the vectors of zeros with the residuals,
    and whether TensorFlow will apply the product to many vectors at once.
    """
    weights: list[tf.Tensor] = []

    def transposed(*tensors: tf.Tensor) -> list[tf.Tensor]:
        # At zero, as good as anywhere: the product is linear.
        at = list(tensors[:zeros]) or [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        products = multiply(at, tensors[zeros:])
        weights[:] = [tf.compat.v1.placeholder(part.dtype, part.shape) for part in products]
        with corrected_derivatives():
            parts = tf.gradients(products, at, weights, unconnected_gradients="zero")
        # The derivative of a gather has rows with their numbers.
        dense = (densify(part, x.shape) for part, x in zip(parts, at))
        return [tf.identity(part) for part in dense]

    inputs = [*specs[:zeros], *residuals]
    concrete = tf.function(transposed, autograph=False).get_concrete_function(*inputs)
    flat, rename = inline_calls(replace_operations(graph_def_with_shapes(concrete.graph)))
    results = [rename(tensor.name) for tensor in concrete.outputs]
    vectors = [rename(tensor.name) for tensor in weights]
    graph = simplified(flat, results)
    plain = graph.computing(results, [*vectors, *(rename(t.name) for t in concrete.inputs)])
    part = on_all_cores(in_order_if_large(plain, results))
    for_many = for_many_vectors(plain, graph.descendants(map(node_of, vectors)))
    captured = {rename(inside.name): outside for inside, outside in captures(concrete)}
    names = [*vectors, *(rename(t.name) for t in concrete.inputs[: len(inputs)])]

    def multiply_transposed(
        vector: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor], many: bool = False
    ) -> list[tf.Tensor]:
        known = {**captured, **dict(zip(names, [*vector, *residuals]))}
        return (for_many if many else part).imported(known, results)

    return part, multiply_transposed
