"""The life cycle of a linearized loss: when it is evaluated, how long that stays true."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import tensorflow as tf

from hvp._errors import (
    ClosedOperatorError,
    GraphModeError,
    HvpError,
    InvalidVariablesError,
    NonFiniteError,
    StaleOperatorError,
    quoted,
)
from hvp._guard import Guard, OneProcess, refuse_forks
from hvp._interrupts import Uninterrupted
from hvp._linearize.graph import GraphEngine, Run
from hvp._linearize.program import Linearized, Program
from hvp._operators.batched_program import BatchedEngine, BatchedProgram
from hvp._operators.in_graph import InGraph, is_for_xla
from hvp._operators.memory import out_of_memory
from hvp._operators.staleness import Watch
from hvp._operators.statistics import Statistics

OnStale = Literal["raise", "refresh", "ignore"]


class Evaluation(OneProcess):
    """A loss, its gradient, and the gradient's derivative, at the variables' values of one moment.

    Parameters
    ----------
    make_program : callable
        Takes nothing; returns the traced gradient.
    on_stale : {"raise", "refresh", "ignore"}
        What to do when something is asked for after a variable the loss reads has changed.

    Attributes
    ----------
    program : Program or BatchedProgram
        The traced gradient.
    """

    def __init__(
        self, make_program: Callable[[], Program | BatchedProgram], on_stale: OnStale
    ) -> None:
        if on_stale not in ("raise", "refresh", "ignore"):
            raise HvpError(
                f"the argument on_stale is {on_stale!r}", "'raise', 'refresh' or 'ignore'"
            )
        self.on_stale = on_stale
        # Without a cycle: what is dropped is to be freed at once.
        self._guard = Guard(functools.partial(_no_memory, weakref.ref(self)))
        self._doing = "tracing the loss"
        self._counts = Statistics()
        self._engine: Linearized | BatchedEngine | None = None
        self._value: tf.Tensor | None = None
        self._in_graph: InGraph | None = None
        self._absent = "the operator is closed"
        with self._guard, Uninterrupted():
            self.program = make_program()
        self._watch = Watch(self.program.reads)
        self.refresh()

    def another(self) -> Evaluation:
        """Return an evaluation of the same program, for another point: empty until a `refresh`.

        What it does counts with what this one does, and it answers for its point whatever becomes
        of the variables.
        """
        twin = copy.copy(self)
        twin.on_stale = "ignore"
        twin._engine = twin._value = twin._in_graph = None
        twin._absent = "nothing was evaluated yet"
        twin._watch = Watch(self.program.reads)
        return twin

    def preserving(self) -> AbstractContextManager[None]:
        """Put the variables that the loss writes back to what they were, afterwards."""
        return self.program.preserving()

    @property
    def products_eager(self) -> int:
        """Products outside graphs, those of evaluations made by `another` included."""
        return self._counts.products

    @property
    def products_in_graphs(self) -> int:
        """Products inside graphs, of this evaluation alone."""
        return self._in_graph.products if self._in_graph else 0

    @property
    def streams(self) -> bool:
        """Whether products evaluate batches again, at the values the variables then have."""
        return isinstance(self._engine, BatchedEngine) and self._engine.streams

    @property
    def statistics(self) -> Statistics:
        """Counts, as they are now."""
        return dataclasses.replace(
            self._counts,
            products=self.products_eager + self.products_in_graphs,
            residual_bytes=0
            if self._engine is None
            else self.program.nbytes(cast(Any, self._engine)),
            traces=self.program.traces,
            engine=self.program.engine,
            jit_compile=self.program.uses_xla,
            note=self.program.note,
            **self._batch_counts(),
        )

    @property
    def standing(self) -> str:
        """What keeps the operator from being used, if anything: closed, or stale."""
        if self._engine is None:
            return "closed"
        looks = self.on_stale != "ignore" and tf.executing_eagerly()
        return "stale" if looks and self._watch.changed() else ""

    @property
    def batches_said(self) -> str:
        """How many batches there are; empty where the data are one."""
        counts = self._batch_counts()
        return f"{counts['batches']} batches" if counts else ""

    def _batch_counts(self) -> dict[str, Any]:
        if not isinstance(self.program, BatchedProgram):
            return {}
        kept = self._engine.batches_kept if isinstance(self._engine, BatchedEngine) else 0
        return {
            "batches": self.program.batches,
            "batches_kept": kept,
            "batch_evaluations": self.program.batch_evaluations,
        }

    def refresh(self) -> None:
        """Evaluate at the values the variables have now.

        What is kept of the point before is released first, so that the two never have to fit in
        memory together. If this raises, the evaluation holds nothing until a `refresh` succeeds.
        """
        self._refuse_graphs("refresh")
        with self._guard, self._guard.lock, Uninterrupted():
            self._evaluate()

    def _evaluate(self) -> None:
        self._release("the last refresh failed")
        self._doing = "evaluating the gradient"
        value, engine = self.program.linearize()
        # Which puts them back; and of batches only now all are known.
        self._seeds = [resource.read() for resource in self.program.seeds]
        if self.program.reads != self._watch.resources:
            self._watch = Watch(self.program.reads)
        self._doing = "a product"
        self._counts.gradient_evaluations += 1
        self._check(value, engine)
        self._watch.set(engine.watched)
        self._value, self._engine = value, engine
        if self._in_graph is not None:
            self._in_graph.fill(cast(GraphEngine, engine))

    def close(self) -> None:
        """Release what is kept."""
        with self._guard, self._guard.lock:
            self._release("the operator is closed")

    @staticmethod
    def _refuse_graphs(what: str) -> None:
        if not tf.executing_eagerly():
            raise GraphModeError(
                f"the operator's {what} is asked for while TensorFlow traces a graph",
                "eager execution",
                "ask outside of the tf.function: inside, an operator has products only",
            )

    def exclusively(self) -> AbstractContextManager[Any]:
        """Let other threads wait."""
        refuse_forks()
        return self._guard.lock

    @contextlib.contextmanager
    def with_seeds(self) -> Iterator[None]:
        """Put seeds and counters back to what they were when it was evaluated."""
        with self.preserving():
            for resource, value in zip(self.program.seeds, self._seeds):
                resource.write(value)
            yield

    def value(self) -> tf.Tensor:
        """Return the loss, a scalar."""
        self._refuse_graphs("value")
        with self._guard, self._guard.lock:
            self._current()
            return self._value

    def gradient(self) -> list[tf.Tensor]:
        """Return the gradient, a tensor for each variable."""
        pairs = zip(self.gradient_parts(), self.program.nest.variables)
        return [tf.zeros(v.shape, v.dtype) if g is None else g for g, v in pairs]

    def gradient_parts(self) -> list[tf.Tensor | None]:
        """Return the gradient, None for variables that the loss does not depend on."""
        self._refuse_graphs("gradient")
        with self._guard, self._guard.lock:
            return list(self._current().outputs)

    def product(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply the Hessian by one vector, in parts shaped and typed like the variables."""
        if not tf.executing_eagerly():
            engine, run = self._to_graph()
            return engine.vjp(parts, run)
        with self._guard, self._guard.lock:
            result = self._current().vjp(parts)
            self._counts.products += 1
        return result

    def product_flat(self, flat: tf.Tensor) -> tf.Tensor:
        """Multiply by one flat vector, of shape `(n,)`."""
        if not tf.executing_eagerly():
            engine, run = self._to_graph()
            return engine.vjp_flat(flat, self.program.flattener, run)
        with self._guard, self._guard.lock:
            result = self._product_flat(flat)
            self._counts.products += 1
        return result

    def _product_flat(self, flat: tf.Tensor) -> tf.Tensor:
        there = self._engine
        if isinstance(there, GraphEngine) and there.program.can_watch and self.on_stale != "ignore":
            result, changed = there.watched_vjp_flat(flat)
            if not changed:
                return result
        return self._current().vjp_flat(flat, self.program.flattener)

    def product_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by the rows of a block, of shape `(k, n)`."""
        if not tf.executing_eagerly():
            engine, run = self._to_graph(rows=True)
            if is_for_xla():  # where blocks of several sizes would be compiled each
                with tf.init_scope():
                    function = engine.program.rows_product(engine.residuals)
                return run(function, rows)
            return engine.vjp_flat_rows(rows, self.program.flattener, run)
        with self._guard, self._guard.lock:
            result = self._current().vjp_flat_rows(rows, self.program.flattener)
            self._counts.products += int(rows.shape[0])
        return result

    @property
    def works_in_graphs(self) -> bool:
        """Whether products may be called for while a graph is traced."""
        return self.program.works_in_graphs

    def _to_graph(self, rows: bool = False) -> tuple[GraphEngine, Run]:
        """Return the engine, and what adds its products to the graph being traced."""
        with tf.init_scope(), self._guard, self._guard.lock:
            engine = cast(GraphEngine, self._current())
        if self._in_graph is None:
            watch = None if self.on_stale == "ignore" else self._watch
            self._in_graph = InGraph(self._now, watch, engine)
        return engine, functools.partial(self._in_graph.run, rows)

    def _now(self) -> None:
        """Make sure of the same from inside a graph, in a thread of TensorFlow's."""
        with self._guard, self._guard.lock:
            self._current()

    def _current(self) -> Linearized | BatchedEngine:
        """Return the engine, having made sure that it is there and true."""
        if self._engine is None:
            raise ClosedOperatorError(
                self._absent, "an operator that is open", "call refresh() or make a new one"
            )
        if self.on_stale != "ignore":
            changed = self._watch.changed()
            if changed and self.on_stale == "raise":
                raise StaleOperatorError(
                    f"variables that the loss reads have changed: {quoted(changed)}",
                    "the values at which the operator was evaluated",
                    "call refresh(), or pass on_stale='refresh'",
                )
            if changed:
                self.refresh()
        return self._engine

    def _release(self, reason: str) -> None:
        self._absent = reason
        if self._engine is not None:
            self._engine.close()
        self._engine = self._value = None
        if self._in_graph is not None:
            self._in_graph.empty()
        self._watch.release()

    def _check(self, value: tf.Tensor, engine: Linearized | BatchedEngine) -> None:
        names, gradient = self.program.nest.names, engine.outputs
        if all(g is None for g in gradient):
            raise InvalidVariablesError(
                f"the loss depends on none of the variables {quoted(names)}",
                "a loss that reads at least one of them",
                "check that the loss uses these very variables, through TensorFlow operations",
            )
        if engine.finite is not None and engine.finite:
            return
        if not tf.math.is_finite(value):
            raise NonFiniteError(f"the loss is {float(value)}", "a finite loss")
        broken = [
            name
            for name, g in zip(names, gradient)
            if g is not None and not tf.reduce_all(tf.math.is_finite(g))
        ]
        if broken:
            raise NonFiniteError(
                f"the gradient is not finite for {quoted(broken)}",
                "a loss that is differentiable at this point",
                "look for square roots, norms or logarithms of zero",
            )


def _no_memory(reference: Callable[[], Evaluation | None], error: Exception) -> HvpError:
    evaluation = reference()
    if evaluation is None:
        return out_of_memory(error, "an operator", None)
    program = evaluation.__dict__.get("program")  # there is none, if it was being traced
    nbytes = None if program is None else program.expected_nbytes
    return out_of_memory(error, evaluation._doing, nbytes)
