"""A function made ready once, to be linearized at as many points as wanted."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Union

import tensorflow as tf

from hvp._digest import digest
from hvp._errors import (
    GraphModeError,
    HvpError,
    InvalidLossError,
    SecondDerivativeError,
    line_of,
    quoted,
)
from hvp._interrupts import Uninterrupted, put_back
from hvp._linearize.compiled import JitCompile
from hvp._linearize.exact import exact_functions
from hvp._linearize.flatten import Flattener
from hvp._linearize.float64 import WideGradient, gradient_in_float64
from hvp._linearize.graph import GraphEngine, GraphProgram
from hvp._linearize.graph_parts import digest_of_graph
from hvp._linearize.inline import KEPT_WHOLE
from hvp._linearize.keras_losses import kept_losses
from hvp._linearize.second_derivatives import Doubt, refuse_missing_derivatives
from hvp._linearize.split import UnsplittableError
from hvp._linearize.tape import TapeEngine
from hvp._linearize.trace import Resource, Trace, differ, trace
from hvp._linearize.variables import VariableNest, all_variables, collect_variables
from hvp._strategies import outside_strategies

Engine = Literal["graph", "tape"]
# What holds a linearization.
Linearized = Union[TapeEngine, GraphEngine]

_log = logging.getLogger("hvp")


class Remarks(NamedTuple):
    """What is known, before it runs, of a function that need not be wrong.

    Operations with a `tf.custom_gradient`; those whose derivative is wrong at some values, where
    they are refused; random draws, and those that are the same each time; whether Python code runs.
    """

    custom: list[Doubt]
    wrong_at_values: list[Doubt]
    random: list[Doubt]
    repeated: list[Doubt]
    python: bool


class Program:
    """A function of variables, and what was found out about it before it runs.

    The function is traced once, here, without running it. From its graph come the variables it
    reads and writes, and the operations whose derivative TensorFlow lacks. A function that
    cannot be traced is run all the same, with less known about it.

    Parameters
    ----------
    function : callable
        Takes the sequence of variables; returns `(auxiliary, outputs)`: any tensor or None, and a
        list of tensors to differentiate, None for those identically zero.
    variables : nest
        What to differentiate with respect to.
    engine : {"graph", "tape"}
        What is to hold a linearization; the tape serves where the graph cannot.
    jit_compile : bool or "auto"
        Whether XLA compiles the graph engine's products.
    inputs : sequence of tf.Variable
        Variables that hold what the function is called with: a linearization is not out of date
        when they change.
    products : bool
        Whether the derivative is wanted, or only the results.

    Attributes
    ----------
    nest : VariableNest
        The variables.
    flattener : Flattener
        Between them and one flat vector.
    reads : tuple of Resource
        What the results depend on: when one of these changes, a linearization is out of date.
    traces : int
        How often the function was traced.
    engine : str
        ``"graph"`` or ``"tape"``: what holds a linearization.
    note : str
        Why something is not as good as it could be; empty if nothing is.

    Raises
    ------
    GraphModeError
        If called while TensorFlow traces a graph.
    InvalidVariablesError
        If `variables` are not.
    SecondDerivativeError
        If an operation between variables and results has no derivative in TensorFlow.
    """

    def __init__(
        self,
        function: Callable[[Sequence[tf.Variable]], tuple[Any, list[tf.Tensor | None]]],
        variables: Any,
        engine: Engine = "graph",
        jit_compile: JitCompile = False,
        inputs: Sequence[tf.Variable] = (),
        products: bool = True,
    ) -> None:
        if engine not in ("graph", "tape"):
            raise HvpError(f"the argument engine is {engine!r}", "'graph' or 'tape'")
        if jit_compile not in (True, False, "auto"):
            raise HvpError(f"the argument jit_compile is {jit_compile!r}", "True, False or 'auto'")
        jit_compile = "auto" if jit_compile == "auto" else bool(jit_compile)
        if not tf.executing_eagerly():
            raise GraphModeError(
                "a function is to be linearized while TensorFlow traces a graph",
                "eager execution",
                "build the operator outside the tf.function and use its product inside",
            )
        self.nest: VariableNest = collect_variables(variables)
        self._given = variables
        self._products = products
        self.flattener = Flattener(self.nest)
        self._function = lambda: function(self.nest.variables)
        self.traces = 0
        self.note = self._unsaid = ""
        self._trace = self._try_to_trace()
        if self._trace is None:
            everything = tuple(Resource.of(v) for v in all_variables(variables))
            self.reads, self._preserved = everything, everything
        else:
            refuse_missing_derivatives(self._trace.doubts.missing)
            if isinstance(self._trace.graph.error, SecondDerivativeError):
                raise self._trace.graph.error  # a recomputed function's: a tape would meet it too
            given = {id(variable.handle) for variable in inputs}
            self.reads = tuple(r for r in self._trace.reads if id(r.handle) not in given)
            self._preserved = self._trace.writes
        if self.recomputes:
            gc.collect()  # what tracing leaves are graphs, in cycles; here memory is short
        self._graph = self._try_to_split(jit_compile) if engine == "graph" else None
        self.engine = "tape" if self._graph is None else "graph"
        if self.engine == "tape" and products and self._trace and self._trace.risky_pools:
            raise SecondDerivativeError(
                "TensorFlow's second derivative of max pooling, inside a tf.function, loop or "
                "branch, is wrong with padding='SAME' or windows of one entry, and the tape engine "
                "depends on it",
                "pools with padding='VALID', or outside of functions",
                "pass engine='graph', which puts it right"
                if engine == "tape"
                else f"call the function without tf.function; the graph engine {self.note}",
            )

    @property
    def works_in_graphs(self) -> bool:
        """Whether products can be added to a graph that is being traced."""
        return self.engine == "graph"

    @property
    def draws(self) -> bool:
        """Whether results depend on random draws whose state is not a variable."""
        return self._trace is not None and bool(self._trace.random)

    @property
    def remarks(self) -> Remarks | None:
        """What the graph of the function tells about its derivatives; None if it has none."""
        if self._trace is None:
            return None
        doubts = self._trace.doubts
        return Remarks(
            doubts.custom,
            doubts.wrong_at_values,
            self._trace.random,
            self._trace.repeated,
            self._trace.python,
        )

    @property
    def expected_nbytes(self) -> int:
        """Bytes a linearization will keep, as far as shapes tell before it is made."""
        if self._graph is not None:
            return self._graph.expected_nbytes
        return 0 if self._trace is None else self._trace.nbytes

    def nbytes(self, engine: Linearized) -> int | None:
        """Bytes a linearization keeps, at most; None if it cannot be told."""
        if isinstance(engine, GraphEngine):
            return engine.nbytes
        return None if self._trace is None else self._trace.nbytes

    @property
    def uses_xla(self) -> bool | None:
        """Whether XLA computes products; None before the first."""
        return False if self._graph is None else self._graph.uses_xla

    @property
    def recomputes(self) -> bool | None:
        """Whether the function computes some of its values again; None if it was not traced."""
        if self._trace is None:
            return None
        functions = self._trace.graph.graph_def.library.function
        return any(KEPT_WHOLE in function.signature.name for function in functions)

    def fingerprint(self) -> dict[str, str]:
        """Return digests of this function, and of what it reads now.

        Of the variables' values, of the tensors it uses from outside, and of its operations with
        the constants in its graph; the same in every process with this TensorFlow. Of a function
        that could not be traced only the variables are known.
        """
        found = {"weights": " ".join(digest(resource.read()) for resource in self.reads)}
        if self._trace is not None:
            graph = self._trace.graph
            outside = [
                t for t in graph.captures.values() if t.dtype not in (tf.resource, tf.variant)
            ]
            found["data"] = " ".join(map(digest, outside))
            found["loss"] = digest_of_graph(graph.graph_def)
        return found

    def in_float64(self, inputs: Sequence[tf.Variable] = ()) -> WideGradient | None:
        """Return the results as a function of the variables in float64, and of further inputs.

        None where they cannot be evaluated so.
        """
        if self._trace is None or set(self.nest.dtypes) != {tf.float32}:
            return None
        return gradient_in_float64(self._trace.graph, [*self.nest.variables, *inputs])

    @property
    def seeds(self) -> tuple[Resource, ...]:
        """Whole numbers that the function reads and changes: seeds, counters."""
        return tuple(r for r in self._preserved if self._trace and r.dtype.is_integer)

    def preserving(self) -> AbstractContextManager[None]:
        """Put the variables that the function writes back to what they were, afterwards."""
        return _preserved(self._preserved)

    @outside_strategies
    def linearize(self) -> tuple[Any, Linearized]:
        """Run the function at the variables' values now.

        Returns
        -------
        auxiliary : object
            What the function returned first.
        engine : GraphEngine or TapeEngine
            Its outputs, and their derivative as a linear map.
        """
        kept: list[Any] = []

        def outputs() -> Sequence[tf.Tensor | None]:
            auxiliary, results = self._function()
            kept.append(auxiliary)
            return results

        if self._graph is not None:  # which runs no Python of the function's
            with Uninterrupted(), _preserved(self._preserved), self._unassigned():
                self._refuse_wrong_values()
                return self._graph.linearize()
        with (
            Uninterrupted(),
            exact_functions(),
            kept_losses(self._given),
            _preserved(self._preserved),
            self._unassigned(),
        ):
            self._refuse_wrong_values()
            engine = TapeEngine(outputs, self.nest.variables, certain=self._trace is not None)
        if self._unsaid:
            _log.warning("the function %s", self._unsaid)
            self._unsaid = ""
        return kept.pop(), engine

    def _try_to_split(self, jit_compile: JitCompile) -> GraphProgram | None:
        """Make the graph engine's functions, or note why they cannot be made."""
        if self._trace is None:
            return None
        try:
            if self._trace.graph.error is not None:
                raise UnsplittableError(f"{self._trace.graph.error}") from self._trace.graph.error
            return GraphProgram(
                self._trace.graph,
                self.nest.variables,
                self.flattener,
                self.reads,
                jit_compile,
                self._add_note,
            )
        except (UnsplittableError, tf.errors.OpError, ValueError) as error:
            reason = line_of(error, -1)
            said = f"is computed operation by operation, by the tape engine ({reason})"
            self._add_note(said)
            self._unsaid = self.note
            return None

    @contextlib.contextmanager
    def _unassigned(self) -> Iterator[None]:
        """Refuse a function that changes a variable that it is to be differentiated by."""
        own = {id(v.handle): name for v, name in zip(self.nest.variables, self.nest.names)}
        written = [r for r in self._preserved if id(r.handle) in own]
        before = [resource.read() for resource in written]
        yield
        pairs = zip(written, before)
        names = [own[id(r.handle)] for r, value in pairs if differ(r.read(), value)]
        if names:
            raise InvalidLossError(
                f"the loss assigns variables that it is to be differentiated by: {quoted(names)}; "
                "its derivatives would be those at other values than the variables have",
                "a loss that leaves these variables as they are",
                "call layers with training=False, where they update them, or leave these "
                "variables out",
            )

    def _add_note(self, said: str) -> None:
        if said not in self.note:
            self.note = "; ".join(filter(None, [self.note, said]))

    def _refuse_wrong_values(self) -> None:
        """Refuse a point where a derivative TensorFlow gives would be wrong."""
        if self._trace is None or self._trace.at_wrong_values is None:
            return
        at_wrong_values = self._trace.at_wrong_values().numpy()
        doubtful = zip(self._trace.doubts.wrong_at_values, at_wrong_values)
        refuse_missing_derivatives([found for found, is_at in doubtful if is_at])

    def _traced(self) -> Trace:
        try:
            return trace(self._function, self.nest.variables, self._products)
        except ValueError as error:
            if "is not a valid root scope name" not in str(error):
                raise

        def scoped() -> Any:
            # Outermost, TensorFlow takes no name that begins with an underscore, as Keras calls
            # layers of classes whose names do.
            with tf.name_scope("function"):
                return self._function()

        return trace(scoped, self.nest.variables, self._products)

    def _try_to_trace(self) -> Trace | None:
        try:
            with exact_functions(), kept_losses(self._given):
                found = self._traced()
        except HvpError:
            raise
        except Exception as error:  # user code may raise anything when it meets a symbolic tensor
            reason = line_of(error, -1)
            self.note = (
                f"could not be traced ({type(error).__name__}: {reason}); missing second "
                "derivatives and changed frozen variables cannot all be detected"
            )
            self._unsaid = self.note  # until it runs, which it may not do either
            return None
        self.traces += 1
        notes = []
        if found.random:
            notes.append("draws random numbers, so that each refresh is of another function")
        if found.python:
            notes.append("runs Python code, where no variable is watched")
        self.note = "; ".join(notes)
        return found


@contextlib.contextmanager
def _preserved(resources: Sequence[Resource]) -> Iterator[None]:
    """Put variables back to what they were, whatever happens in between."""
    values = [resource.read() for resource in resources]
    try:
        yield
    finally:
        put_back((resource.write, value) for resource, value in zip(resources, values))
