"""The plan for one batch of data, or for a function that takes none."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from hvp._derivatives.exact import exact_functions
from hvp._derivatives.suspects import refuse_missing_derivatives
from hvp._engines.float64 import gradient_in_float64
from hvp._engines.graph_map import GraphMap
from hvp._engines.graph_program import GraphProgram, Results
from hvp._engines.linear_map import LinearMap
from hvp._engines.options import Options
from hvp._engines.plan import Plan, WideGradient
from hvp._engines.rule import Arguments, Evaluated, Rule, Within
from hvp._engines.summary import TraceSummary
from hvp._engines.tape_map import TapeMap
from hvp._engines.taped import doubtful_nones
from hvp._engines.trace import Trace, trace
from hvp._errors import (
    GraphModeError,
    HvpError,
    InvalidLossError,
    SecondDerivativeError,
    line_of,
    quoted,
)
from hvp._graphs.graph import digest_of_graph
from hvp._graphs.low_precision import is_fast, recomputed_in
from hvp._graphs.split import UnsplittableError
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._keras.losses import preserved_losses
from hvp._runtime.digest import digest
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.resources import Resource, differ, restored
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest, all_variables

_log = logging.getLogger("hvp")


class SinglePlan(Plan):
    """A rule on one batch, analysed before it runs.

    The rule is traced once, here, without running it. Its graph tells which variables it reads and
    writes, and for which operations TensorFlow lacks the derivative. A function that cannot be
    traced is run all the same, with less known about it.

    `batch` returns the batch, in the graph being traced; without it the functions take no data.
    `inputs` are variables that hold the batch: a linear map is not out of date when they change.
    The constructor raises GraphModeError while TensorFlow traces a graph, and SecondDerivativeError
    if an operation between variables and results has no derivative.
    """

    def __init__(
        self,
        rule: Rule,
        nest: VariableNest,
        options: Options,
        batch: Callable[[], Arguments] = Arguments,
        inputs: Sequence[tf.Variable] = (),
    ) -> None:
        if not tf.executing_eagerly():
            raise GraphModeError(
                "a function is to be linearized while TensorFlow traces a graph",
                "eager execution",
                "build the operator outside the tf.function and use its product inside",
            )
        self.nest, self.space = nest, Space.of_variables(nest)
        self._rule, self._options, self._batch = rule, options, batch
        self._note = self._unsaid = ""
        self._precision = self._fast_precision()
        self._trace = self._try_to_trace()
        wants_low = options.precision is not None and options.products
        if wants_low and options.engine == "graph" and self._precision is None:
            self._add_and_log(
                f"computes products in {self.space.dtype.name}: this device is not faster in "
                f"{options.precision}"
            )
        self._facts = self._static_facts(inputs)
        if self._trace is not None:
            refuse_missing_derivatives(self._trace.missing)
            if isinstance(self._trace.graph.error, SecondDerivativeError):
                raise self._trace.graph.error  # a recomputed function's: a tape would meet it too
        if self._facts.recomputes:
            gc.collect()  # what tracing leaves are graphs, in cycles; here memory is short
        self._program = self._try_to_split() if options.engine == "graph" else None
        if self._program is None:
            if rule.needs_graph:
                raise InvalidLossError(
                    f"the model or the loss {self._note}; but {rule.evaluates} can be evaluated in "
                    "graphs only",
                    "functions that tf.function can trace",
                    "write them with TensorFlow operations only",
                )
            self._facts = dataclasses.replace(self._facts, engine="tape")
            if wants_low:
                self._add_and_log(f"computes products in {self.space.dtype.name}, on tapes")
            self._refuse_risky_pools()
        else:
            expected = self._program.expected_nbytes
            low = self._program.precision
            self._facts = dataclasses.replace(
                self._facts, expected_nbytes=expected, precision=low.name if low else ""
            )

    @property
    def facts(self) -> TraceSummary:
        """What is known about the rule so far."""
        uses_xla = False if self._program is None else self._program.product.uses_xla
        return dataclasses.replace(self._facts, uses_xla=uses_xla, note=self._note)

    @outside_strategies
    def at_point(self, place: ExecutionTarget = LOCAL) -> tuple[Results, LinearMap]:
        """Run the rule's evaluation at the current values of the variables.

        It runs at `place`, with the variables that stand there. The tape engine, however, runs
        Python, which reads and writes the variables themselves.
        """
        own = LOCAL if self._program is None else place
        writes = [own.resource(resource) for resource in self._facts.writes]
        with Uninterrupted(), place.scope(), restored(writes), self._unassigned(own):
            if self._program is None:
                return self._on_tapes(place)
            self._refuse_wrong_values(place)
            results, residuals = self._program.evaluate(place)  # which runs no Python of the loss
        vectors = self._program.product.domain or Space.of_tensors(tf.nest.flatten(results.value))
        assert vectors is not None
        return results, GraphMap(self._program, residuals, vectors, self.space, place)

    def _on_tapes(self, place: ExecutionTarget) -> tuple[Results, LinearMap]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(exact_functions())
            stack.enter_context(preserved_losses(self.nest.source))
            self._refuse_wrong_values()
            if self._trace is None:
                stack.enter_context(doubtful_nones())
            at = self._evaluate()
        if self._unsaid:
            _log.warning("the function %s", self._unsaid)
            self._unsaid = ""
        domain = self.space if at.domain is None else Space.of_tensors(at.domain)
        assert domain is not None
        nbytes = self._trace.facts.expected_nbytes if self._trace else None
        own = TapeMap(self._rule, at.state, domain, self.space, nbytes=nbytes, place=place)
        return Results(at.value, None if at.gradient is None else list(at.gradient)), own

    def fingerprint(self) -> dict[str, str]:
        """Return digests of this function, and of what it reads now.

        They cover the values of variables, the tensors used from outside, and the operations with
        the constants in the graph; they are the same in every process with this TensorFlow. If the
        function could not be traced, they cover only the variables.
        """
        digests = {"weights": " ".join(digest(resource.read()) for resource in self._facts.reads)}
        if self._trace is not None:
            graph = self._trace.graph
            outside = [
                t for t in graph.captures.values() if t.dtype not in (tf.resource, tf.variant)
            ]
            digests["data"] = " ".join(map(digest, outside))
            digests["loss"] = digest_of_graph(graph.graph_def)
        return digests

    def in_float64(self, inputs: Sequence[tf.Variable] = ()) -> WideGradient | None:
        """Return the gradient as a function of the variables and `inputs` in float64, or None."""
        if self._trace is None or set(self.nest.dtypes) != {tf.float32}:
            return None
        return gradient_in_float64(self._trace.graph, [*self.nest.variables, *inputs])

    def _evaluate(self) -> Evaluated:
        return self._rule.evaluate(self.nest.variables, self._batch())

    def _static_facts(self, inputs: Sequence[tf.Variable]) -> TraceSummary:
        """Collect what the trace tells, or what holds for a function without one."""
        traced = self._trace
        if traced is None:
            everything = tuple(Resource.of(v) for v in all_variables(self.nest.source))
            return TraceSummary("graph", everything, everything, everything)
        facts, handles = traced.facts, {id(variable.handle) for variable in inputs}
        reads, captured = (
            tuple(resource for resource in some if id(resource.handle) not in handles)
            for some in (facts.reads, facts.captured)
        )
        return dataclasses.replace(facts, reads=reads, captured=captured)

    def _try_to_split(self) -> GraphProgram | None:
        """Return the graph engine's functions, or note why there are none."""
        if self._trace is None:
            return None
        graph = self._trace.graph
        try:
            if graph.error is not None:
                raise UnsplittableError(f"{graph.error}") from graph.error
            return GraphProgram(
                graph,
                self.space,
                self._facts.reads,
                self._options.jit_compile,
                self.add_note,
                self._precision,
                self._options.wide,
                watches=self._options.on_stale != "ignore",
            )
        except (UnsplittableError, tf.errors.OpError, ValueError) as error:
            reason = line_of(error, -1)
            remark = f"is computed operation by operation, by the tape engine ({reason})"
            self.add_note(remark)
            self._unsaid = self._note
            return None

    def _fast_precision(self) -> tf.DType | None:
        """Return the requested low precision, if it is fast here."""
        options = self._options
        if options.precision is None or not options.products or options.engine != "graph":
            return None
        precision = tf.as_dtype(options.precision)
        return precision if is_fast(precision) else None

    def _refuse_risky_pools(self) -> None:
        """Refuse the tape engine for pools that TensorFlow itself may differentiate wrongly."""
        if not (self._options.products and self._trace and self._trace.risky_pools):
            return
        raise SecondDerivativeError(
            "TensorFlow's second derivative of max pooling, inside a tf.function, loop or branch, "
            "is wrong with padding='SAME' or windows of one entry, and the tape engine depends on "
            "it",
            "pools with padding='VALID', or outside of functions",
            "pass engine='graph', which puts it right"
            if self._options.engine == "tape"
            else f"call the function without tf.function; the graph engine {self._note}",
        )

    @contextlib.contextmanager
    def _unassigned(self, place: ExecutionTarget) -> Iterator[None]:
        """Refuse a function that changes a variable that it is to be differentiated by."""
        own = {id(v.handle): name for v, name in zip(self.nest.variables, self.nest.names)}
        written = [r for r in self._facts.writes if id(r.handle) in own]
        there = [place.resource(resource) for resource in written]
        before = [resource.read() for resource in there]
        yield
        pairs = zip(written, there, before)
        names = [own[id(r.handle)] for r, now, value in pairs if differ(now.read(), value)]
        if names:
            raise InvalidLossError(
                f"the loss assigns variables that it is to be differentiated by: {quoted(names)}; "
                "its derivatives would be those at other values than the variables have",
                "a loss that leaves these variables as they are",
                "call layers with training=False, where they update them, or leave these "
                "variables out",
            )

    def add_note(self, remark: str) -> None:
        """Add to what `facts` says about the function."""
        if remark not in self._note:
            self._note = "; ".join(filter(None, [self._note, remark]))

    def _add_and_log(self, remark: str) -> None:
        self.add_note(remark)
        _log.warning("the operator %s", remark)

    def _refuse_wrong_values(self, place: ExecutionTarget = LOCAL) -> None:
        """Refuse a point where TensorFlow would give a wrong derivative."""
        remarks = self._facts.remarks
        if remarks is None or self._trace is None or self._trace.at_wrong_values is None:
            return
        at_wrong_values = self._trace.at_wrong_values(place=place).numpy()
        doubtful = zip(remarks.wrong_at_values, at_wrong_values)
        refuse_missing_derivatives([suspect for suspect, is_at in doubtful if is_at])

    def _traced(self) -> Trace:
        rule = self._rule
        if self._precision is not None:
            rule = Within(rule, multiplying=functools.partial(recomputed_in, self._precision))
        arguments = rule, self.nest, self._options.products
        try:
            return trace(self._evaluate, *arguments)
        except ValueError as error:
            if "is not a valid root scope name" not in str(error):
                raise

        def scoped() -> Evaluated:
            # Outermost, TensorFlow takes no name that begins with an underscore, as Keras calls
            # layers of classes whose names do.
            with tf.name_scope("function"):
                return self._evaluate()

        return trace(scoped, *arguments)

    def _try_to_trace(self) -> Trace | None:
        try:
            with exact_functions(), preserved_losses(self.nest.source):
                traced = self._traced()
        except HvpError:
            raise
        except Exception as error:  # user code may raise anything when it meets a symbolic tensor
            reason = line_of(error, -1)
            self._note = (
                f"could not be traced ({type(error).__name__}: {reason}); missing second "
                "derivatives and changed frozen variables cannot all be detected"
            )
            self._unsaid = self._note  # until it runs, which it may not do either
            return None
        notes = []
        if traced.facts.draws:
            notes.append("draws random numbers, so that each refresh is of another function")
        if traced.facts.remarks is not None and traced.facts.remarks.python:
            notes.append("runs Python code, where no variable is watched")
        frozen = self._frozen(traced)
        if frozen:
            notes.append(f"holds values of {quoted(frozen)} as constants, which refresh() keeps")
        self._note = "; ".join(notes)
        return traced

    def _frozen(self, traced: Trace) -> list[str]:
        """Return the names of variables whose values the loss holds as constants."""
        graph = traced.graph
        constants = [
            tensor.numpy()
            for tensor in graph.captures.values()
            if tensor.dtype.is_floating and tensor.shape.num_elements() > 1
        ]
        constants += [
            tf.make_ndarray(node.attr["value"].tensor)
            for node in graph.graph_def.node
            if node.op == "Const" and len(node.attr["value"].tensor.tensor_content) > 4
        ]
        frozen = []
        for variable, name in zip(self.nest.variables, self.nest.names):
            shape, dtype = tuple(variable.shape), variable.dtype.as_numpy_dtype
            alike = [c for c in constants if c.shape == shape and c.dtype == dtype]
            if alike:
                value = Resource.of(variable).read().numpy()
                varies = bool(np.ptp(value)) if value.size else False
                if varies and any(np.array_equal(constant, value) for constant in alike):
                    frozen.append(name)
        return frozen
