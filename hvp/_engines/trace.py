"""Tracing a function without running it: what it reads, what it writes, what lies between."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._derivatives.missing import BY_NAME, RIGHT_ONCE
from hvp._derivatives.pools import has_risky_pools
from hvp._derivatives.suspects import (
    SuspectOperation,
    Suspects,
    find_suspects,
    is_wrong_at,
    stopped_gradients,
    suspect_of,
)
from hvp._engines.rule import Evaluated, Rule
from hvp._engines.summary import DerivativeReport, TraceSummary
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
from hvp._graphs.dataflow import KEPT_WHOLE, RECOMPUTED_GRADIENT, Dataflow, Vertex, layer_of
from hvp._graphs.graph import Graph
from hvp._graphs.private import is_of_tape
from hvp._graphs.sizes import BORROWED, VIEWS, graph_def_with_shapes
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
    facts
        What it reads and writes, and what the graph tells about derivatives.
    missing
        Operations between the differentiated variables and the results whose derivative TensorFlow
        lacks.
    at_wrong_values
        Runs the necessary part of the graph, and tells which of `facts.remarks.wrong_at_values` are
        at such values now; None if there are no such operations.
    risky_pools
        Whether max pools in functions, loops or branches may be differentiated wrongly by
        TensorFlow.
    """

    graph: TracedGraph
    facts: TraceSummary
    missing: list[SuspectOperation]
    at_wrong_values: Compiled | None
    risky_pools: bool


def trace(
    evaluate: Callable[[], Evaluated], rule: Rule, nest: VariableNest, products: bool
) -> Trace:
    """Trace a rule's evaluation and product together, without running them.

    The product is traced with placeholders for the vector, in the same graph as the evaluation that
    it continues. Only one graph shows what depends on the vector and what does not; the latter is
    then run once per point, even if the product's code computes it. `products` tells whether to
    trace the product too. Exceptions of the rule's evaluation are passed on.
    """
    concrete, flow, graph = _recorded(evaluate, rule, nest.variables, products)
    graph_def = graph.graph_def
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
    values = [flow.vertex(name) for name in tf.nest.flatten(graph.value)]
    suspects = Suspects([], [], [])
    if products:
        suspects = _all_suspects(concrete.graph, flow, places)
        if rule.is_hessian:
            gradient = [flow.vertex(name) for name in graph.gradient or () if name is not None]
            suspects.missing.extend(stopped_gradients(flow, sources, values, gradient))
    elif rule.is_hessian:
        suspects = find_suspects(flow, sources, values).without(RIGHT_ONCE)
    random, repeated = (
        sorted(suspect_of(flow, v) for v in reaching if kinds.fullmatch(flow.types.get(v, "")))
        for kinds in (_RANDOM, _REPEATED)
    )
    python = any("PyFunc" in flow.types.get(vertex, "") for vertex in reaching)
    facts = TraceSummary(
        "graph",
        reads=tuple(reads),
        writes=tuple(writes),
        captured=tuple(captured),
        tensors=tuple(
            outside
            for _, outside in captures(concrete)
            if outside.dtype.is_floating or outside.dtype.is_complex
        ),
        seeds=tuple(resource for resource in writes if resource.dtype.is_integer),
        draws=bool(random),
        remarks=DerivativeReport(
            suspects.custom, suspects.wrong_at_values, random, repeated, python
        ),
        foreign=_foreign(python, _count_handles(concrete) - len(captured)),
        differentiates=any(
            is_of_tape(flow.names.get(v, "")) for v in flow.reachable(values, backward=True)
        ),
        recomputes=any(KEPT_WHOLE in f.signature.name for f in graph_def.library.function),
        traces=1,
        expected_nbytes=_bytes_between(concrete.graph, flow, sources, reaching),
    )
    return Trace(
        graph,
        facts,
        suspects.missing,
        _at_wrong_values(concrete, graph_def, suspects.wrong_at_values),
        any(has_risky_pools(f.node_def) for f in graph_def.library.function),
    )


def _recorded(
    evaluate: Callable[[], Evaluated],
    rule: Rule,
    variables: Sequence[tf.Variable],
    products: bool,
) -> tuple[Any, Dataflow, TracedGraph]:
    """Trace a rule, and record the tensors of its evaluation and product."""
    value: Any = None
    gradient: Any = None
    specs: list[tf.TensorSpec] = []
    vectors: list[tf.Tensor] = []
    product: list[Any] = []
    error: Exception | None = None

    def whole() -> Any:  # TensorFlow may run it twice; the last run counts
        nonlocal value, gradient, specs, vectors, product, error
        at = evaluate()
        # As nodes of their own, so that each has a name of its own.
        value = tf.nest.map_structure(tf.identity, at.value)
        gradient = None if at.gradient is None else [_named(part) for part in at.gradient]
        domain = variables if at.domain is None else at.domain
        specs = [tf.TensorSpec(like.shape, like.dtype) for like in domain]
        vectors = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in specs]
        product, error = [None] * len(variables), None
        try:
            if products:
                product = list(rule.multiply(at.state, vectors))
        except Exception as caught:  # a tape may still manage, or tell better what is wrong
            error = caught
        return value, gradient

    concrete = concrete_function(whole)
    graph_def = graph_def_with_shapes(concrete.graph)
    flow = Dataflow(graph_def, concrete.graph)
    names_of_vectors = [tensor.name for tensor in vectors]
    names_of_product = [_name(tensor) for tensor in product]

    def transposed_suspects() -> Suspects:
        sources = [flow.vertex(name) for name in names_of_vectors]
        return find_suspects(flow, sources, [flow.vertex(n) for n in names_of_product if n])

    return (
        concrete,
        flow,
        TracedGraph(
            graph_def=graph_def,
            captures={inside.name: outside for inside, outside in captures(concrete)},
            value=tf.nest.map_structure(_name, value),
            gradient=None if gradient is None else [_name(part) for part in gradient],
            vectors=names_of_vectors,
            vector_specs=specs,
            products=names_of_product,
            error=error or _missing_gradient(flow),
            transposed_suspects=transposed_suspects,
            recomputed=concrete.graph.get_collection(RECOMPUTED_GRADIENT),
        ),
    )


def _named(tensor: tf.Tensor | None) -> tf.Tensor | None:
    return None if tensor is None else tf.identity(tensor)


def _name(tensor: tf.Tensor | None) -> Any:
    return None if tensor is None else tensor.name


def _foreign(python: bool, tables: int) -> str:
    """Return what a function needs of this process besides variables and tensors, or nothing."""
    if python:
        return "Python code, by tf.py_function or tf.numpy_function"
    return "a lookup table, or another object that is not a variable" if tables else ""


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
    tensors = [tensor.name for op in operations for tensor in (op.inputs[0], op.outputs[0])]
    # Without what runs only for its effect.
    part = Graph(graph_def).computing(tensors)

    def at_wrong_values() -> tf.Tensor:
        known = {inside.name: outside for inside, outside in captures(concrete)}
        values = iter(part.imported(known, tensors))
        return tf.stack([is_wrong_at(op.type, next(values), next(values)) for op in operations])

    return Compiled(at_wrong_values, [], False, pure=True)


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
