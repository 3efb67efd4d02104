"""A function of tensors as a graph, through which series are pushed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from hvp._derivatives.corrections import corrected_graph
from hvp._derivatives.exact import exact_functions
from hvp._derivatives.missing import BY_NAME, MISSING_DERIVATIVES, WRONG_AT_VALUES
from hvp._derivatives.pools import may_keep_the_size
from hvp._derivatives.replace import replace_operations
from hvp._derivatives.suspects import is_wrong_at
from hvp._errors import HvpError, InvalidLossError, SecondDerivativeError, line_of
from hvp._graphs.concrete import captures, concrete_function
from hvp._graphs.dataflow import CALLS, CONTROL_FLOW, RECOMPUTED_GRADIENT, output_dtypes
from hvp._graphs.graph import (
    Graph,
    TensorName,
    data_inputs,
    in_topological_order,
    node_of,
    with_index,
)
from hvp._graphs.inline import inline_calls
from hvp._graphs.private import GRADIENT_TYPE, module_of_gradient
from hvp._graphs.simplify import simplified
from hvp._graphs.sizes import graph_def_with_shapes, shapes_of
from hvp._graphs.source_lines import source_line
from hvp._graphs.split import has_effects
from hvp._graphs.variable_reads import ON_VALUE, read_from_inputs
from hvp._taylor.curves import Curves
from hvp._taylor.rules import push
from hvp._taylor.series import Series

# `hvp._derivatives.pools` says what is wrong with some of them.
_POOLS = frozenset(["MaxPool", "MaxPool3D", "MaxPoolV2"])
# Modules whose gradients of functions are the derivatives of what these compute: of the swish
# function and of CTC losses. Others of TensorFlow's and Keras's pass by what is rounded.
_TRUSTED = frozenset(["tensorflow.python.ops.ctc_ops", "tensorflow.python.ops.nn_impl"])
# What changes the value of a variable, and what reads it.
_ASSIGNMENTS = ("Assign", "ResourceApply", "ResourceScatter", "ResourceStridedSliceAssign")
_READS = ("ReadVariable", "ResourceGather")
# The names of operations in a copy of a graph begin with it.
_SCOPE = "copy"


class TracedFunction:
    """The graph of `function(*inputs)`, split into what depends on its inputs and what does not.

    The values of `sources`, variables and tensors that the function may capture, count as further
    inputs. `structure` is that of the results.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[tf.TensorSpec],
        sources: Sequence[Any] = (),
    ) -> None:
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            # Existing traces may contain functions whose derivatives TensorFlow gets wrong.
            function = tf.function(function.python_function)
        with exact_functions():
            self.concrete = concrete_function(function, *specs)
        definition = graph_def_with_shapes(self.concrete.graph)
        flat, rename = inline_calls(replace_operations(definition))
        self.structure = self.concrete.structured_outputs
        leaves = tf.nest.flatten(self.structure)
        if not leaves or any(leaf is None for leaf in leaves):
            raise InvalidLossError(f"the function returns {self.structure!r}", "tensors")
        self._specs = list(specs)
        self._inputs = [rename(tensor.name) for tensor in self.concrete.inputs[: len(specs)]]
        self._results = [rename(tensor.name) for tensor in self.concrete.outputs]
        self._captured = {rename(t.name): outside for t, outside in captures(self.concrete)}
        self._refuse_reads_of_assigned(Graph(flat))
        self._shapes = {
            f"{node.name}:{place}": tf.TensorShape(shape)
            for node in flat.node
            for place, shape in enumerate(shapes_of(node))
        }
        self._sources = list(sources)
        self._inputs += self._values_of(sources, flat)
        graph = simplified(flat, self._results)
        graph = graph.computing(self._results, [*self._inputs, *self._captured])
        moving = graph.descendants(map(node_of, self._inputs))
        self._graph, order = graph, in_topological_order(graph.nodes)
        self._moving = [node.name for node in order if node.name in moving]
        self._fixed = graph.part(graph.nodes.keys() - moving)
        self._operations = self._with_shapes(graph)
        needed = {self._name(tensor) for op in self._operations for tensor in op.inputs}
        needed |= {*self._results}
        self._constants = sorted(name for name in needed if node_of(name) in self._fixed.nodes)

    def _refuse_reads_of_assigned(self, graph: Graph) -> None:
        """Refuse results that depend on what a variable is after it has been assigned.

        Assignments are left out, so that they would be computed from its value before.
        """
        assigned: dict[str, set[str]] = {}
        for name, node in graph.nodes.items():
            if node.op.startswith(_ASSIGNMENTS):
                assigned.setdefault(node.input[0], set()).add(name)
        for name, node in graph.computing(self._results).nodes.items():
            before = assigned.get(node.input[0]) if node.op.startswith(_READS) else None
            if before and before & _run_before(graph.nodes, name):
                line = source_line(self.concrete.graph, name) or name
                raise SecondDerivativeError(
                    f"the function reads a variable after it has assigned it ({line})",
                    "results that depend on variables as they were before the call",
                    "compute the new value as a tensor; if a layer draws random numbers, such as "
                    "dropout, call it once, or make several of it",
                )

    def _values_of(self, sources: Sequence[Any], flat: Any) -> list[str]:
        """Turn reads of variables, and tensors, into uses of inputs; return the names of these."""
        names, on_value, replaced = [], {}, {}
        for i, source in enumerate(sources):
            names.append(f"value_{i}:0")
            node = flat.node.add(name=f"value_{i}", op="Placeholder")
            node.attr["dtype"].type = source.dtype.as_datatype_enum
            handle = getattr(source, "handle", source)
            inside = [name for name, t in self._captured.items() if t is handle]
            if handle is source:
                replaced.update(dict.fromkeys(inside, names[-1]))
            else:
                on_value.update(dict.fromkeys(inside, (names[-1], source.dtype)))
        for node in flat.node if replaced else ():
            for i, name in enumerate(node.input):
                node.input[i] = replaced.get(with_index(name), name)
        self._results = [replaced.get(name, name) for name in self._results]
        for node in flat.node:
            used = [name for name in node.input if with_index(name) in on_value]
            if used and node.op not in {*ON_VALUE, *CONTROL_FLOW, *CALLS}:
                raise SecondDerivativeError(
                    f"a variable is used by {node.op} ({node.name}), through which a third "
                    "derivative is not supported",
                    "variables that are read outside of loops and branches",
                    "write a loop in Python, and a branch with tf.where",
                )
        read_from_inputs(flat, on_value)
        return names

    def _with_shapes(self, graph: Graph) -> list[tf.Operation]:
        """Return what depends on the inputs as operations of a graph that nobody runs.

        Constants are part of it, and placeholders stand for all other tensors that they take.
        """
        specs = [*self._specs, *(tf.TensorSpec(v.shape, v.dtype) for v in self._sources)]
        given = dict(zip(self._inputs, specs))
        constants = {name for name, node in self._fixed.nodes.items() if node.op == "Const"}
        part = graph.part({*self._moving, *constants})
        taken = [with_index(x) for node in part.graph_def.node for x in data_inputs(node)]
        outside = [name for name in dict.fromkeys(taken) if node_of(name) not in part.nodes]
        with tf.Graph().as_default() as self._scratch:
            tensors = {
                name: tf.raw_ops.Placeholder(
                    dtype=given[name].dtype if name in given else self._dtype(name),
                    shape=given[name].shape if name in given else self._shapes.get(name),
                )
                for name in outside
            }
            tf.graph_util.import_graph_def(part.graph_def, tensors, name=_SCOPE)
        self._names = {tensor.name: name for name, tensor in tensors.items()}
        return [self._scratch.get_operation_by_name(f"{_SCOPE}/{name}") for name in self._moving]

    def _dtype(self, name: str) -> tf.DType:
        """Return the type of a tensor that does not depend on the inputs."""
        if name in self._captured:
            return self._captured[name].dtype
        node, place = TensorName.of(name)
        return output_dtypes(self._fixed.nodes[node])[place]

    def _name(self, tensor: tf.Tensor) -> str:
        """Return the name of a tensor of the copy in the graph of the function."""
        return self._names.get(tensor.name) or tensor.name[len(_SCOPE) + 1 :]

    def push(self, inputs: Sequence[Series], curves: Curves) -> list[Series]:
        """Add the series of the results to the graph being traced.

        Gradients of them are right as well, whoever asks for these later.
        """
        for variable in self.concrete.variables:
            variable.value()  # so that tapes around the call watch it
        known = dict(zip(self._inputs, inputs))
        for name, outside in self._captured.items():
            known[name] = curves.constant(tf.compat.v1.get_default_graph().capture(outside))
        values = self._fixed.imported(self._captured, self._constants)
        known.update({n: curves.constant(v) for n, v in zip(self._constants, values)})
        with exact_functions(), corrected_graph():
            for operation in self._operations:
                inputs = [known[self._name(tensor)] for tensor in operation.inputs]
                self._refuse_unsupported(operation, inputs)
                try:
                    results = push(operation, inputs, curves)
                except LookupError as error:
                    self._refuse(operation, str(error), "replace the operation by others")
                except (TypeError, ValueError) as error:
                    if isinstance(error, HvpError):
                        raise
                    problem = f"the derivative of {operation.type} failed: {line_of(error)}"
                    self._refuse(operation, problem, "replace the operation by others")
                if operation.type in WRONG_AT_VALUES:
                    wrong = is_wrong_at(operation.type, inputs[0].value, results[0].value)
                    results = [_unless(wrong, result) for result in results]
                known.update({self._name(t): r for t, r in zip(operation.outputs, results)})
        return [known[name] for name in self._results]

    def check_examples(self) -> None:
        """Raise an error unless each example has a row of each result that depends on it alone.

        What the results depend on is evaluated at two random inputs, and at mixtures of them: those
        of the first whose numbers have a certain binary digit, for any two examples differ in one,
        and the others of the second. Where that is not finite it is done again at positive inputs.
        It is left out if the function draws numbers or reads tensors of another graph.
        """
        [spec] = self._specs
        count = spec.shape[0]
        for result in self.concrete.outputs:
            shape = result.shape
            if shape.rank == 0 or not shape[:1].is_compatible_with(spec.shape[:1]):
                raise InvalidLossError(
                    f"the function returns a tensor of shape {shape} for {count} examples",
                    "results with one row for each example",
                    "do not add up or average over the examples",
                )
        graph = self._graph
        symbolic = any(not hasattr(tensor, "numpy") for tensor in self._captured.values())
        draws = any(has_effects(node, graph.functions) for node in graph.graph_def.node)
        if symbolic or draws or count == 1:
            return
        [start] = self._inputs

        def imported(x: tf.Tensor) -> list[tf.Tensor]:
            return graph.imported({**self._captured, start: x}, self._results)

        # A partial function, because TensorFlow counts traces of one definition together.
        values = tf.function(functools.partial(imported), autograph=False)

        def evaluate(x: tf.Tensor) -> list[np.ndarray]:
            return [value.numpy() for value in values(x) if value.dtype.is_floating]

        with tf.init_scope():
            shape = [count or 4, *spec.shape[1:]]
            numbers = np.arange(shape[0])
            digits = 2 ** np.arange(int(numbers[-1]).bit_length())
            for stateless in (tf.random.stateless_normal, tf.random.stateless_uniform):
                x, other = (stateless(shape, [0, seed], dtype=spec.dtype) for seed in (1, 2))
                ends = list(zip(evaluate(x), evaluate(other)))
                for digit in digits:
                    rows = numbers & digit > 0
                    kept = rows.reshape(-1, *(1 for _ in shape[1:]))
                    for (one, two), both in zip(ends, evaluate(tf.where(kept, x, other))):
                        self._compare(one, one[rows], both[rows])
                        self._compare(two, two[~rows], both[~rows])
                if all(np.isfinite(value).all() for pair in ends for value in pair):
                    return

    def _compare(self, whole: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Raise an error if a row differs by more than rounding, where it is finite."""
        is_finite = np.isfinite(before) & np.isfinite(after)
        error = np.abs(np.where(is_finite, after, 0) - np.where(is_finite, before, 0)).max(
            initial=0
        )
        scale = np.abs(whole).max(initial=0, where=np.isfinite(whole))
        if error > np.sqrt(np.finfo(before.dtype).eps) * scale:
            raise InvalidLossError(
                "the function mixes examples: a row of its result changes with other rows of x "
                f"(by {error:.2g}, at random inputs)",
                "a function that treats the examples of the first axis independently",
                "use training=False for batch normalization, and no means over examples",
            )

    def _refuse_unsupported(self, operation: tf.Operation, inputs: Sequence[Series]) -> None:
        """Refuse what has no derivative, loops and branches, and gradients that users define."""
        missing = MISSING_DERIVATIVES.get(operation.type)
        moving = {i for i, series in enumerate(inputs) if not series.is_constant}
        if operation.type in CONTROL_FLOW | CALLS:
            problem = f"higher derivatives pass through {operation.type}"
            self._refuse(operation, problem, "write a loop in Python, and a branch with tf.where")
        if missing is not None and (moving & {*missing.inputs} or not missing.inputs):
            self._refuse(operation, f"{operation.type} has no derivative", missing.remedy)
        if moving and any(t.dtype in (tf.variant, tf.resource) for t in operation.outputs):
            problem = f"higher derivatives pass through {operation.type}, a list of tensors"
            remedy = "use tf.stack in place of a tf.TensorArray, and loops in Python (unroll=True)"
            self._refuse(operation, problem, remedy)
        if operation.type in _POOLS and may_keep_the_size(operation.node_def):
            problem = (
                f"TensorFlow's derivatives of {operation.type} with padding SAME, or with windows "
                "of one entry, can be wrong"
            )
            self._refuse(operation, problem, "use tf.pad with padding='VALID', or strided slices")
        if operation.type == "SquaredDifference" and any(map(_is_stopped_mean, operation.inputs)):
            problem = "the variances of a function that was traced before have wrong derivatives"
            self._refuse(operation, problem, BY_NAME.format("tf.nn.moments"))
        kind = operation.node_def.attr[GRADIENT_TYPE].s.decode() if _has_own(operation) else ""
        if kind.startswith(RECOMPUTED_GRADIENT):
            problem = "higher derivatives pass through hvp.recompute"
            self._refuse(operation, problem, "leave out hvp.recompute")
        if kind and module_of_gradient(kind) not in _TRUSTED:
            problem = "a tf.custom_gradient says how to differentiate once, and not along a curve"
            remedy = "write the function without tf.custom_gradient or tf.grad_pass_through"
            self._refuse(operation, problem, remedy)

    def _refuse(self, operation: tf.Operation, problem: str, remedy: str) -> NoReturn:
        name, line = operation.name[len(_SCOPE) + 1 :], self._line(operation)
        raise SecondDerivativeError(
            f"{problem} ({name}{', ' + line if line else ''})",
            "a function of operations that TensorFlow differentiates, without loops and branches",
            remedy,
        )

    def _line(self, operation: tf.Operation) -> str:
        return source_line(self.concrete.graph, operation.name[len(_SCOPE) + 1 :])


def _run_before(nodes: Mapping[str, Any], name: str) -> set[str]:
    """Return the names of the nodes that a node waits for."""
    found, queue = {name}, [name]
    while queue:
        new = {*map(node_of, nodes[queue.pop()].input)} - found
        found |= new
        queue += new
    return found


def _unless(is_wrong: tf.Tensor, series: Series) -> Series:
    """Make derivatives, and gradients of them, NaN at values at which TensorFlow has them wrong."""
    factor = tf.where(is_wrong, math.nan, 1.0)
    terms = (t if t is None else t * tf.cast(factor, t.dtype) for t in series.terms)
    return Series(series.value, tuple(terms))


def _is_stopped_mean(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is the stopped mean about which `tf.nn.moments` takes a variance."""
    stop = tensor.op
    return stop.type == "StopGradient" and stop.inputs[0].op.type == "Mean"


def _has_own(operation: tf.Operation) -> bool:
    """Return whether a gradient of its own is registered for an operation."""
    return operation.type == "IdentityN" and GRADIENT_TYPE in operation.node_def.attr
