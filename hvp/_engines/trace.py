"""Tracing a function without running it: what it reads, what it writes, what lies between."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._derivatives.missing import BY_NAME, RIGHT_ONCE, WRONG_AT_VALUES
from hvp._derivatives.pools import has_risky_pools
from hvp._derivatives.suspects import (
    SuspectOperation,
    Suspects,
    find_suspects,
    stopped_gradients,
    suspect_of,
)
from hvp._engines.rule import Evaluated, Rule
from hvp._engines.taped import DIFFERENTIATED
from hvp._errors import SecondDerivativeError
from hvp._graphs.compiled import Compiled
from hvp._graphs.concrete import (
    captured_resources,
    captures,
    concrete_function,
    is_read,
    is_written,
)
from hvp._graphs.dataflow import RECOMPUTED_GRADIENT, Dataflow, Vertex, layer_of
from hvp._graphs.graph import Graph
from hvp._graphs.private import is_of_tape
from hvp._graphs.sizes import BORROWED, VIEWS, graph_def_with_shapes
from hvp._vectors.resources import Resource
from hvp._vectors.variables import VariableNest

_RANDOM = re.compile(r"(Random|Truncated|ParameterizedTruncated|Multinomial)\w*")
_REPEATED = re.compile(
    r"Stateless(Random(Uniform|Normal|Gamma|Poisson|Binomial)|Truncated|Parameterized)\w*"
)


@dataclass(frozen=True)
class TracedGraph:
    """A rule in one graph, evaluated and multiplied by a vector; tensors by their names in it.

    Attributes
    ----------
    captures
        The tensors captured from outside, by their names inside.
    value
        The loss, or the values of a function.
    gradient
        The gradient of the loss, if the rule has one.
    vectors
        Placeholders for the parts of the vector.
    products
        The parts of the product; None where it is zero or was not traced.
    error
        Why there is no product, if there is none.
    transposed_suspects
        Finds the operations between `vectors` and `products` whose derivative is in doubt.
    recomputed
        The objects that hold the derivatives of recomputed functions in the graph. They must live
        as long as the graph.
    """

    graph_def: Any
    captures: dict[str, tf.Tensor]
    value: Any
    gradient: list[str | None] | None
    vectors: list[str]
    vector_specs: list[tf.TensorSpec]
    products: list[str | None]
    error: Exception | None
    transposed_suspects: Callable[[], Suspects]
    recomputed: list[Any]

    @property
    def results(self) -> list[str]:
        """The tensors to evaluate once per point, without duplicates."""
        gradient = [name for name in self.gradient or () if name is not None]
        return list(dict.fromkeys([*tf.nest.flatten(self.value), *gradient]))


@dataclass(frozen=True)
class Trace:
    """What is known of a function of no arguments from its graph.

    Attributes
    ----------
    reads
        Variables, trainable or not, whose values reach the function's results, except integers that
        the function itself updates (seeds of random draws, counters).
    writes
        Variables the function updates when it runs.
    captured
        All variables that the graph refers to.
    tables
        How many other objects of this process it refers to, such as lookup tables.
    suspects
        Operations between the differentiated variables and the results whose derivative TensorFlow
        lacks, or gets wrong at some values.
    at_wrong_values
        Runs the necessary part of the graph, and tells which of `suspects.wrong_at_values` are at
        such values now; None if there are no such operations.
    nbytes
        Bytes of the values on the way from the variables to the results, an upper bound of what a
        tape must keep; the body of a loop counts once, a partly unknown shape not at all.
    random
        Random draws that the results depend on and whose state is not a variable.
    repeated
        Random draws that are the same each time, from seeds that are put back.
    python
        Whether the results depend on Python code that runs with the graph.
    risky_pools
        Whether max pools in functions, loops or branches may be differentiated wrongly by
        TensorFlow.
    differentiates
        Whether the value itself contains derivatives.
    """

    graph: TracedGraph
    reads: tuple[Resource, ...]
    writes: tuple[Resource, ...]
    captured: tuple[Resource, ...]
    tables: int
    suspects: Suspects
    at_wrong_values: Compiled | None
    nbytes: int
    random: list[SuspectOperation]
    repeated: list[SuspectOperation]
    python: bool
    risky_pools: bool
    differentiates: bool


def trace(
    evaluate: Callable[[], Evaluated], rule: Rule, nest: VariableNest, products: bool
) -> Trace:
    """Trace a rule's evaluation and product together, without running them.

    The product is traced with placeholders for the vector, in the same graph as the evaluation that
    it continues. Only one graph shows what depends on the vector and what does not; the latter is
    then run once per point, even if the product's code computes it. `products` tells whether to
    trace the product too. Exceptions of the rule's evaluation are passed on.
    """
    whole = _TraceRecorder(evaluate, rule, nest.variables, products)
    concrete = concrete_function(whole)
    graph_def = graph_def_with_shapes(concrete.graph)
    flow = Dataflow(graph_def, concrete.graph)
    targets = [flow.vertex(output.name) for output in concrete.outputs]
    reaching = flow.reachable(targets, backward=True)
    reads, writes, captured = [], [], []
    places: dict[int, Vertex] = {}
    for resource, vertex in captured_resources(concrete, flow, nest.variables):
        captured.append(resource)
        written = is_written(flow, vertex)
        read = is_read(flow, vertex, reaching)
        if written:
            writes.append(resource)
        if read and not (written and resource.dtype.is_integer):
            reads.append(resource)
        places[id(resource.handle)] = vertex
    handles = [id(variable.handle) for variable in rule.weights(nest.variables)]
    sources = [places[handle] for handle in handles if handle in places]
    suspects = Suspects([], [], [])
    if products:
        suspects = _all_suspects(concrete.graph, flow, places)
        if rule.is_hessian:
            ends = whole.values(), whole.gradients()
            value, gradient = ([flow.vertex(name) for name in names] for names in ends)
            suspects.missing.extend(stopped_gradients(flow, sources, value, gradient))
    elif rule.is_hessian:
        suspects = find_suspects(flow, sources, [flow.vertex(name) for name in whole.values()])
        suspects = suspects.without(RIGHT_ONCE)
    return Trace(
        graph=whole.graph(concrete, graph_def, flow),
        reads=tuple(reads),
        writes=tuple(writes),
        captured=tuple(captured),
        tables=_count_handles(concrete) - len(captured),
        suspects=suspects,
        at_wrong_values=_at_wrong_values(concrete, graph_def, suspects.wrong_at_values),
        nbytes=_bytes_between(concrete.graph, flow, sources, reaching),
        python=any("PyFunc" in flow.types.get(vertex, "") for vertex in reaching),
        risky_pools=any(has_risky_pools(f.node_def) for f in graph_def.library.function),
        differentiates=any(
            is_of_tape(flow.names.get(v, ""))
            for v in flow.reachable([flow.vertex(name) for name in whole.values()], backward=True)
        ),
        random=sorted(
            suspect_of(flow, v) for v in reaching if _RANDOM.fullmatch(flow.types.get(v, ""))
        ),
        repeated=sorted(
            suspect_of(flow, v) for v in reaching if _REPEATED.fullmatch(flow.types.get(v, ""))
        ),
    )


class _TraceRecorder:
    """A rule to be traced, which records the tensors of its evaluation and product."""

    def __init__(
        self,
        evaluate: Callable[[], Evaluated],
        rule: Rule,
        variables: Sequence[tf.Variable],
        products: bool,
    ) -> None:
        self._evaluate, self._rule = evaluate, rule
        self._variables, self._with_products = list(variables), products

    def __call__(self) -> Any:
        at = self._evaluate()
        # As nodes of their own, so that each has a name of its own.
        self._value = tf.nest.map_structure(tf.identity, at.value)
        self._gradient = None if at.gradient is None else [_named(part) for part in at.gradient]
        domain = self._variables if at.domain is None else at.domain
        self._specs = [tf.TensorSpec(like.shape, like.dtype) for like in domain]
        self._vectors = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in self._specs]
        self._products: list[Any] = [None] * len(self._variables)
        self._error: Exception | None = None
        try:
            if self._with_products:
                self._products = list(self._rule.multiply(at.state, self._vectors))
        except Exception as error:  # a tape may still manage, or tell better what is wrong
            self._error = error
        return self._value, self._gradient

    def values(self) -> list[str]:
        """Return the names of the value's tensors in the last traced graph."""
        return [tensor.name for tensor in tf.nest.flatten(self._value)]

    def gradients(self) -> list[str]:
        """Return the names of the gradient's tensors in the last traced graph."""
        return [tensor.name for tensor in self._gradient or () if tensor is not None]

    def graph(self, concrete: Any, graph_def: Any, flow: Dataflow) -> TracedGraph:
        """Return the last traced graph."""
        vectors = [tensor.name for tensor in self._vectors]
        products = [_name(tensor) for tensor in self._products]

        def transposed_suspects() -> Suspects:
            sources = [flow.vertex(name) for name in vectors]
            return find_suspects(flow, sources, [flow.vertex(name) for name in products if name])

        return TracedGraph(
            graph_def=graph_def,
            captures={inside.name: outside for inside, outside in captures(concrete)},
            value=tf.nest.map_structure(_name, self._value),
            gradient=None if self._gradient is None else [_name(part) for part in self._gradient],
            vectors=vectors,
            vector_specs=self._specs,
            products=products,
            error=self._error or _missing_gradient(flow),
            transposed_suspects=transposed_suspects,
            recomputed=concrete.graph.get_collection(RECOMPUTED_GRADIENT),
        )


def _named(tensor: tf.Tensor | None) -> tf.Tensor | None:
    return None if tensor is None else tf.identity(tensor)


def _name(tensor: tf.Tensor | None) -> Any:
    return None if tensor is None else tensor.name


def _count_handles(concrete: Any) -> int:
    return sum(outside.dtype in (tf.resource, tf.variant) for _, outside in captures(concrete))


def _all_suspects(graph: tf.Graph, flow: Dataflow, places: Mapping[int, Vertex]) -> Suspects:
    """Find the suspect operations between all that the rule differentiates, and by what."""

    def vertices(ends: Sequence[Any]) -> list[Vertex]:
        known = [
            flow.vertex(end) if isinstance(end, str) else places.get(id(end.handle)) for end in ends
        ]
        return [vertex for vertex in known if vertex is not None]

    every = [
        find_suspects(flow, vertices(inputs), vertices(outputs))
        for inputs, outputs in graph.get_collection(DIFFERENTIATED)
    ]
    return Suspects(
        sorted({suspect for suspects in every for suspect in suspects.missing}),
        sorted({suspect for suspects in every for suspect in suspects.wrong_at_values}),
        sorted({suspect for suspects in every for suspect in suspects.custom}),
    )


def _missing_gradient(flow: Dataflow) -> Exception | None:
    """Return the error for a function whose gradient TensorFlow only left a name for.

    TensorFlow does so if a function was traced with a gradient of its own that has none, and the
    graph fails when it runs: `tf.nn.ctc_loss` with dense labels, for example.
    """
    places = [vertex for vertex, kind in flow.types.items() if kind == "SymbolicGradient"]
    if not places:
        return None
    return SecondDerivativeError(
        f"TensorFlow has no derivative of a function at {layer_of(flow.names[places[0]])!r}",
        "operations that have derivatives of every order",
        BY_NAME.format("tf.nn.ctc_loss") if "ctc" in flow.names[places[0]] else "",
    )


def _at_wrong_values(
    concrete: Any, graph_def: Any, suspects: list[SuspectOperation]
) -> Compiled | None:
    """Make a function that tells which operations are at values where their derivative is wrong."""
    if not suspects:
        return None
    operations = [concrete.graph.get_operation_by_name(suspect.name) for suspect in suspects]
    at_zeros = [WRONG_AT_VALUES[suspect.kind].values == "zeros" for suspect in suspects]
    tensors = [
        (operation.inputs if at_zero else operation.outputs)[0].name
        for operation, at_zero in zip(operations, at_zeros)
    ]
    # Without what runs only for its effect.
    part = Graph(graph_def).computing(tensors)

    def at_wrong_values() -> tf.Tensor:
        known = {inside.name: outside for inside, outside in captures(concrete)}
        values = part.imported(known, tensors)
        return tf.stack(
            [
                tf.reduce_any(tf.equal(value, 0)) if at_zero else _are_equal(value, operation.type)
                for value, at_zero, operation in zip(values, at_zeros, operations)
            ]
        )

    return Compiled(at_wrong_values, [], False, pure=True)


def _are_equal(values: tf.Tensor, kind: str) -> tf.Tensor:
    """Return whether two eigen- or singular values are too close to divide by their difference.

    TensorFlow takes `x / (x**2 + 1e-20)` for the reciprocal of a difference `x`, of squares in a
    singular value decomposition.
    """
    values = values**2 if kind == "Svd" else values
    apart = tf.abs(values[..., tf.newaxis] - values[..., tf.newaxis, :])
    largest = tf.reduce_max(tf.abs(values), -1)[..., tf.newaxis, tf.newaxis]
    near = apart <= tf.maximum(10 * np.finfo(apart.dtype.as_numpy_dtype).eps * largest, 1e-7)
    return tf.reduce_any(tf.linalg.set_diag(near, tf.zeros_like(values, tf.bool)))


def _bytes_between(
    graph: tf.Graph, flow: Dataflow, sources: list[Vertex], reaching: set[Vertex]
) -> int:
    depends = flow.reachable(sources) & reaching
    shared = VIEWS | BORROWED | {"IdentityN"}
    total = 0
    for operation in graph.get_operations():
        if operation.type in shared or flow.vertex(operation.name) not in depends:
            continue
        for output in operation.outputs:
            if output.dtype.size and output.shape.is_fully_defined():
                total += output.dtype.size * output.shape.num_elements()
    return total
