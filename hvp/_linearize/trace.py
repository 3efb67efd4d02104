"""Tracing a function without running it: what it reads, what it writes, what lies between."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import SecondDerivativeError
from hvp._linearize.dataflow import RECOMPUTED_GRADIENT, Dataflow, Vertex, layer_of
from hvp._linearize.gradient import densify
from hvp._linearize.graph_parts import ancestors, cut_out, import_part
from hvp._linearize.missing_derivatives import BY_NAME, WRONG_AT_VALUES
from hvp._linearize.pools import has_risky_pools
from hvp._linearize.second_derivatives import Doubt, Doubts, doubt_of, find_doubts

_WRITES = re.compile(r"Assign\w*VariableOp|Resource\w*(Scatter|Apply|Assign)\w*|Rng\w+|Stateful\w+")
_RANDOM = re.compile(r"(Random|Truncated|ParameterizedTruncated|Multinomial)\w*")
_REPEATED = re.compile(
    r"Stateless(Random(Uniform|Normal|Gamma|Poisson|Binomial)|Truncated|Parameterized)\w*"
)
_READS = re.compile(r"ReadVariableOp|ResourceGather\w*|ResourceStridedSlice\w*")


@dataclass(frozen=True)
class Resource:
    """A variable's buffer that a traced function touches.

    Attributes
    ----------
    handle : tf.Tensor
        Of dtype resource.
    dtype : tf.DType
        Of the values in the buffer.
    name : str
        What to call it in messages.
    """

    handle: tf.Tensor
    dtype: tf.DType
    name: str

    @classmethod
    def of(cls, variable: tf.Variable, name: str | None = None) -> Resource:
        """Return the buffer of a variable."""
        return cls(variable.handle, variable.dtype, name or variable.name.partition(":")[0])

    def read(self) -> tf.Tensor:
        """Return the value now; later writes do not reach it."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def write(self, value: tf.Tensor) -> None:
        """Replace the value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


# Equal as bits, not as numbers: NaN is NaN, and 0.0 is not -0.0.
_BITS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def differ(value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Whether two tensors of one shape and type have different bits anywhere."""
    return tf.reduce_any(tf.not_equal(_bits(value), _bits(other)))


def _bits(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_bool or value.dtype == tf.string:
        return value
    return tf.bitcast(value, _BITS.get(value.dtype.size, tf.int64))


@dataclass(frozen=True)
class TracedGraph:
    """A function and its transposed derivative in one graph; tensors by their names in it.

    Attributes
    ----------
    graph_def : GraphDef
        The graph.
    captures : dict
        What is captured from outside: the tensor there, by its name inside.
    auxiliary : str or None
        What the function returned beside its outputs.
    outputs : list of (str or None)
        What is differentiated.
    cotangents : list of str
        Placeholders, one for each output that is not None.
    vjp : list of (str or None)
        The transposed derivative applied to the cotangents, for each variable; None where it is
        zero, or was not wanted.
    error : Exception or None
        Why there is no transposed derivative, if there is none.
    transposed_doubts : callable
        Finds the operations between cotangents and `vjp` whose derivative is in doubt.
    recomputed : list
        What has the derivatives of recomputed functions in the graph, to be kept with it.
    """

    graph_def: Any
    captures: dict[str, tf.Tensor]
    auxiliary: str | None
    outputs: list[str | None]
    cotangents: list[str]
    vjp: list[str | None]
    error: Exception | None
    transposed_doubts: Callable[[], Doubts]
    recomputed: list[Any]


@dataclass(frozen=True)
class Trace:
    """What is known of a function of no arguments from its graph.

    Attributes
    ----------
    graph : TracedGraph
        The graph, transposed derivative included.
    reads : tuple of Resource
        Variables, trainable or not, whose values reach the function's results, except integers
        that the function itself updates (seeds of random draws, counters).
    writes : tuple of Resource
        Variables the function updates when it runs.
    doubts : Doubts
        Operations between the differentiated variables and the results whose derivative TensorFlow
        lacks, or has wrong at some values.
    at_wrong_values : callable or None
        Tells, by running the part of the graph that is needed, which of `doubts.wrong_at_values`
        are at such values now; None if there are none of them.
    nbytes : int
        Bytes of the values on the way from the variables to the results, an upper bound of
        what a tape must keep; the body of a loop counts once, a partly unknown shape not at all.
    random : list of Doubt
        Random draws that the results depend on, of which the state is no variable.
    repeated : list of Doubt
        Random draws that are the same each time, from seeds that are put back.
    python : bool
        Whether the results depend on Python code that runs with the graph.
    risky_pools : bool
        Whether functions, loops or branches have max pools in them that TensorFlow itself may
        differentiate wrong.
    """

    graph: TracedGraph
    reads: tuple[Resource, ...]
    writes: tuple[Resource, ...]
    doubts: Doubts
    at_wrong_values: Callable[[], tf.Tensor] | None
    nbytes: int
    random: list[Doubt]
    repeated: list[Doubt]
    python: bool
    risky_pools: bool


def trace(
    function: Callable[[], Any], variables: Sequence[tf.Variable], transposed: bool = True
) -> Trace:
    """Trace a function and its transposed derivative, without running them.

    Parameters
    ----------
    function : callable
        Takes nothing; returns `(auxiliary, outputs)`: a tensor or None, and a list of tensors, None
        where one is identically zero.
    variables : sequence of tf.Variable
        Those it is to be differentiated with respect to.
    transposed : bool
        Whether the transposed derivative is wanted.

    Returns
    -------
    Trace

    Raises
    ------
    Exception
        Whatever the function raises when it is traced.
    """
    whole = _Whole(function, variables, transposed)
    concrete = concrete_function(whole)
    graph_def = concrete.graph.as_graph_def()
    flow = Dataflow(graph_def, concrete.graph)
    targets = [flow.vertex(output.name) for output in concrete.outputs]
    reaching = flow.reachable(targets, backward=True)
    captures = captured_resources(concrete, flow, variables)
    reads, writes, sources = [], [], []
    differentiated = {id(variable.handle) for variable in variables}
    for resource, vertex in captures:
        written = is_written(flow, vertex)
        read = is_read(flow, vertex, reaching)
        if written:
            writes.append(resource)
        if read and not (written and resource.dtype.is_integer):
            reads.append(resource)
        if id(resource.handle) in differentiated:
            sources.append(vertex)
    doubts = find_doubts(flow, sources if transposed else [], targets)
    return Trace(
        graph=whole.graph(concrete, graph_def, flow),
        reads=tuple(reads),
        writes=tuple(writes),
        doubts=doubts,
        at_wrong_values=_at_wrong_values(concrete, graph_def, doubts.wrong_at_values),
        nbytes=_bytes_between(concrete.graph, flow, sources, reaching),
        python=any("PyFunc" in flow.types.get(vertex, "") for vertex in reaching),
        risky_pools=any(has_risky_pools(f.node_def) for f in graph_def.library.function),
        random=sorted(
            doubt_of(flow, v) for v in reaching if _RANDOM.fullmatch(flow.types.get(v, ""))
        ),
        repeated=sorted(
            doubt_of(flow, v) for v in reaching if _REPEATED.fullmatch(flow.types.get(v, ""))
        ),
    )


class _Whole:
    """A function to be traced, which notes the tensors of its transposed derivative."""

    def __init__(
        self, function: Callable[[], Any], variables: Sequence[tf.Variable], transposed: bool
    ) -> None:
        self._function = function
        self._variables = list(variables)
        self._transposed = transposed

    def __call__(self) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            self._auxiliary, outputs = self._function()
            # As nodes of their own, so that each has a name of its own.
            self._outputs = [None if o is None else tf.identity(o) for o in outputs]
        present = [output for output in self._outputs if output is not None]
        self._cotangents = [tf.compat.v1.placeholder(o.dtype, o.shape) for o in present]
        self._vjp: list[Any] = [None] * len(self._variables)
        self._error: Exception | None = None
        try:
            if present and self._transposed:
                vjp = tape.gradient(present, self._variables, self._cotangents)
                self._vjp = [densify(g, v.shape) for g, v in zip(vjp, self._variables)]
        except Exception as error:  # a tape may still manage, or tell better what is wrong
            self._error = error
        return self._auxiliary, self._outputs

    def graph(self, concrete: Any, graph_def: Any, flow: Dataflow) -> TracedGraph:
        """Return the graph that was traced last."""
        cotangents = [tensor.name for tensor in self._cotangents]
        vjp = [None if tensor is None else tensor.name for tensor in self._vjp]

        def transposed_doubts() -> Doubts:
            sources = [flow.vertex(name) for name in cotangents]
            return find_doubts(flow, sources, [flow.vertex(name) for name in vjp if name])

        return TracedGraph(
            graph_def=graph_def,
            captures={inside.name: outside for inside, outside in captures(concrete)},
            auxiliary=None if self._auxiliary is None else self._auxiliary.name,
            outputs=[None if tensor is None else tensor.name for tensor in self._outputs],
            cotangents=cotangents,
            vjp=vjp,
            error=self._error or _missing_gradient(flow),
            transposed_doubts=transposed_doubts,
            recomputed=concrete.graph.get_collection(RECOMPUTED_GRADIENT),
        )


def _missing_gradient(flow: Dataflow) -> Exception | None:
    """Return the error for a function whose gradient TensorFlow only left a name for.

    It does so where a function was traced with a gradient of its own that has none, and the graph
    fails when it runs: of `tf.nn.ctc_loss` with dense labels, for one.
    """
    places = [vertex for vertex, kind in flow.types.items() if kind == "SymbolicGradient"]
    if not places:
        return None
    return SecondDerivativeError(
        f"TensorFlow has no derivative of a function at {layer_of(flow.names[places[0]])!r}",
        "operations that can be differentiated as often as is asked",
        BY_NAME.format("tf.nn.ctc_loss") if "ctc" in flow.names[places[0]] else "",
    )


def concrete_function(function: Callable[..., Any], *specs: Any) -> Any:
    """Trace as plain Python; with AutoGraph only where there is control flow on tensors.

    AutoGraph warns about every function whose source it cannot find (a lambda, a prompt).
    """
    try:
        return tf.function(function, autograph=False).get_concrete_function(*specs)
    except tf.errors.OperatorNotAllowedInGraphError:
        return tf.function(function, autograph=True).get_concrete_function(*specs)


def _at_wrong_values(
    concrete: Any, graph_def: Any, doubts: list[Doubt]
) -> Callable[[], tf.Tensor] | None:
    """Make a function that tells which operations are at values where their derivative is wrong."""
    if not doubts:
        return None
    nodes = {node.name: node for node in graph_def.node}
    operations = [concrete.graph.get_operation_by_name(doubt.name) for doubt in doubts]
    at_zeros = [WRONG_AT_VALUES[doubt.kind].values == "zeros" for doubt in doubts]
    tensors = [
        (operation.inputs if at_zero else operation.outputs)[0].name
        for operation, at_zero in zip(operations, at_zeros)
    ]
    # Without what runs only for its effect.
    part = cut_out(graph_def, ancestors(nodes, tensors), keep_controls=False)

    @tf.function(autograph=False)
    def at_wrong_values() -> tf.Tensor:
        known = {inside.name: outside for inside, outside in captures(concrete)}
        values = import_part(part, known, tensors)
        return tf.stack(
            [
                tf.reduce_any(tf.equal(value, 0)) if at_zero else _are_equal(value, operation.type)
                for value, at_zero, operation in zip(values, at_zeros, operations)
            ]
        )

    return at_wrong_values


def _are_equal(values: tf.Tensor, kind: str) -> tf.Tensor:
    """Whether two eigenvalues or singular values are too near each other to divide by that.

    TensorFlow takes `x / (x**2 + 1e-20)` for the reciprocal of a difference `x`, of squares in a
    singular value decomposition.
    """
    values = values**2 if kind == "Svd" else values
    apart = tf.abs(values[..., tf.newaxis] - values[..., tf.newaxis, :])
    largest = tf.reduce_max(tf.abs(values), -1)[..., tf.newaxis, tf.newaxis]
    near = apart <= tf.maximum(10 * np.finfo(apart.dtype.as_numpy_dtype).eps * largest, 1e-7)
    return tf.reduce_any(tf.linalg.set_diag(near, tf.zeros_like(values, tf.bool)))


def captures(concrete: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Pair each placeholder for something captured with the tensor it stands for."""
    captured = concrete.captured_inputs
    return list(zip(concrete.inputs[len(concrete.inputs) - len(captured) :], captured))


def captured_resources(
    concrete: Any, flow: Dataflow, variables: Sequence[tf.Variable]
) -> list[tuple[Resource, Vertex]]:
    """Pair each variable the function captured with its vertex in the graph."""
    known = {id(v.handle): Resource.of(v) for v in (*concrete.variables, *variables)}
    found = []
    for inside, outside in captures(concrete):
        if outside.dtype != tf.resource:
            continue
        vertex = flow.vertex(inside.name)
        resource = known.get(id(outside)) or _unnamed_resource(outside, flow, vertex)
        if resource is not None:
            found.append((resource, vertex))
    return found


def is_written(flow: Dataflow, vertex: Vertex) -> bool:
    """Whether the graph updates a variable."""
    return any(_WRITES.fullmatch(flow.types[user]) for user in flow.users(vertex))


def is_read(flow: Dataflow, vertex: Vertex, reaching: set[Vertex]) -> bool:
    """Whether one of some operations reads a variable."""
    return any(_READS.fullmatch(flow.types[user]) for user in flow.users(vertex) & reaching)


def _unnamed_resource(handle: tf.Tensor, flow: Dataflow, vertex: Vertex) -> Resource | None:
    """Make out a variable known by its handle only; None for what is none, such as a table."""
    for user in flow.users(vertex):
        kind = flow.types[user]
        if kind.startswith("Rng"):
            return Resource(handle, tf.int64, "random generator state")
        if _WRITES.fullmatch(kind) or _READS.fullmatch(kind):
            dtype = flow.dtypes.get(user)
            if dtype is not None:
                return Resource(handle, dtype, "unnamed variable")
    return None


def _bytes_between(
    graph: tf.Graph, flow: Dataflow, sources: list[Vertex], reaching: set[Vertex]
) -> int:
    depends = flow.reachable(sources) & reaching
    shared = {
        "Identity",
        "IdentityN",
        "Reshape",
        "ReadVariableOp",
        "ExpandDims",
        "Squeeze",
        "StopGradient",
    }
    total = 0
    for operation in graph.get_operations():
        if operation.type in shared or flow.vertex(operation.name) not in depends:
            continue
        for output in operation.outputs:
            if output.dtype.size and output.shape.is_fully_defined():
                total += output.dtype.size * output.shape.num_elements()
    return total
