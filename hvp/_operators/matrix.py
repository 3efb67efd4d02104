"""Symmetric matrices, defined by their products: what the rest of the package uses of operators."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvp._engines.linear_map import LinearMap, damped
from hvp._engines.options import ROUNDING, Engine, Options
from hvp._engines.restricted import Entries, Restricted, Selection
from hvp._engines.rule import Rule
from hvp._engines.summary import DerivativeReport
from hvp._errors import HvpError, StaleOperatorError, quoted
from hvp._runtime.digest import digest
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.recent import Recent
from hvp._snapshots.nearby import Gradients
from hvp._snapshots.problem import Problem
from hvp._snapshots.snapshot import Snapshot

Self = TypeVar("Self", bound="Matrix")

_log = logging.getLogger("hvp")

# Compiled solvers and the like that are kept for one operator.
_MOST_CACHED = 64


class Matrix:
    """A symmetric matrix, defined by its products: what solvers and estimators use of an operator.

    `linear_map` gives the products without `damping`, a multiple of the identity. If
    `has_variables`, the vectors of `space` are those of variables. A matrix of a loss has the
    `snapshot` of its evaluation, and the `problem` from which it can be evaluated in another way.
    """

    has_variables = False
    is_low = False
    may_be_wide = False
    snapshot: Any = None
    problem: Problem | None = None

    def __init__(self, linear_map: LinearMap) -> None:
        self.linear_map, self.damping = linear_map, 0.0
        self.space = linear_map.domain
        self._undamped: Matrix | None = None
        # Shared by matrices that differ in damping.
        self._cache = Recent(_MOST_CACHED)
        self._lock = threading.RLock()

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of a matrix of a loss, in the order of the vectors."""
        return []

    def damped(self: Self, damping: float) -> Self:
        """Return the matrix plus a further multiple of the identity; it shares everything."""
        if not damping:
            return self
        twin = copy.copy(self)
        twin.damping = self.damping + damping
        twin._undamped = self  # a block is found again for as long as one of them lives
        return twin

    @property
    def damped_map(self) -> LinearMap:
        """The products, including damping."""
        return damped(self.linear_map, self.damping)

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.space.size

    @property
    def dtype(self) -> tf.DType:
        """The type of products."""
        return self.space.dtype

    @property
    def in_python(self) -> bool:
        """Whether Python runs for each product, even inside a graph."""
        return self.linear_map.calls_python

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it is known that no eigenvalue is negative, including damping."""
        return False

    def multiply(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply each row by the undamped matrix, eagerly or in the graph being traced."""
        return self.linear_map.apply(rows)

    def multiply_damped(self, vectors: np.ndarray) -> np.ndarray:
        """Multiply the rows of an array by the matrix including damping, outside of graphs."""
        return self.damped_map.apply(tf.constant(vectors)).numpy()

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the object stored under a key, for any damping; make it at the first call.

        Only the objects that were used last are kept.
        """
        with self._lock:
            return self._cache.get_or_make(key, make)

    @property
    def cached_count(self) -> int:
        """How many objects are stored."""
        return len(self._cache)

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[Matrix]:
        """Yield the matrix in full precision, which may be this one."""
        yield self

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[Matrix | None]:
        """Yield a float32 matrix computed in float64, or None if there is none."""
        yield None

    def make_sure(self) -> None:
        """Raise an error if the matrix is closed or stale."""

    @property
    def evaluations(self) -> int:
        """The number of times that it was evaluated, or evaluated again."""
        return self.linear_map.version

    def make_sure_evaluated(self, evaluations: int) -> None:
        """Raise `StaleOperatorError` if the point has changed since `evaluations` was this."""
        if self.evaluations != evaluations:
            raise _evaluated_again([])

    def gradient_or_none(self) -> np.ndarray | None:
        """Return the gradient of the loss, if there is a loss and its gradient is available."""
        return None

    def probe(self) -> np.ndarray:
        """Return a fixed random row, whose product distinguishes matrices."""
        row = np.random.default_rng(0).standard_normal((1, self.size))
        return row.astype(self.dtype.as_numpy_dtype)

    def fingerprint(self) -> dict[str, str]:
        """Return a fingerprint of the matrix that is the same in every process."""
        return {"operator": digest(self.multiply(tf.constant(self.probe())).numpy())}


def _evaluated_again(changed: Sequence[str]) -> StaleOperatorError:
    names = f" ({quoted(changed)})" if changed else ""
    return StaleOperatorError(
        f"the operator was evaluated again, or its variables have changed{names}, since this was "
        "computed from it",
        "the values of then",
        "compute it again from the operator, after a refresh() if variables have changed",
    )


class Evaluation(Matrix):
    """A matrix of a loss at the values that variables had, and what was computed from it.

    From `problem` the matrix can be evaluated in another way, and the gradient alone for checks.
    """

    has_variables = True
    snapshot: Snapshot

    def __init__(self, snapshot: Snapshot, problem: Problem | None = None) -> None:
        super().__init__(snapshot)
        self.snapshot, self.problem = snapshot, problem
        self.space = snapshot.plan.space
        # In full precision, and in float64; shared by matrices that differ in damping.
        self._others: dict[str, Evaluation] = {}
        # Without a cycle: the residuals are to be freed with the last operator.
        self._blocks: weakref.WeakValueDictionary[Any, BlockEvaluation]
        self._blocks = weakref.WeakValueDictionary()

    def block(self, selection: Selection | Entries) -> BlockEvaluation:
        """Return a diagonal block, which is the same object while it is in use."""
        with self._lock:
            key = type(selection), selection.entries.tobytes()
            block = self._blocks.get(key) or BlockEvaluation(self, selection)
            self._blocks[key] = block
            return block.damped(self.damping)

    @property
    def rounding(self) -> float:
        """The rounding unit of products."""
        low = ROUNDING.get(self.snapshot.facts.precision)
        return low or float(np.finfo(self.space.dtype.as_numpy_dtype).eps)

    @property
    def engine(self) -> str:
        """The engine that computes products."""
        return self.snapshot.facts.engine

    @property
    def is_low(self) -> bool:  # type: ignore[override]
        """Whether products are computed in low precision."""
        return bool(self.snapshot.facts.precision)

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[Evaluation]:
        """Evaluate the same matrix in full precision, and release its residuals afterwards.

        Yields this object if its products are in full precision anyway. Raises `StaleOperatorError`
        if a variable has changed since the evaluation, and `HvpError` if the loss draws random
        numbers that cannot be repeated.
        """
        if not self.is_low:
            yield self
            return
        self._refuse_another_matrix("in full precision", "leave out precision")
        with self._other("full", self.problem, precision=None) as other:
            yield other.damped(self.damping)

    @property
    def may_be_wide(self) -> bool:  # type: ignore[override]
        """Whether the matrix is float32 and can be evaluated in float64, if no kernel is missing.

        It cannot with tapes, with devices of its own, if the loss draws random numbers, or at
        values that the variables no longer have. It must not where memory is bounded, as float64
        takes twice as much.
        """
        facts = self.snapshot.facts
        if self.problem is None or self.space.dtype != tf.float32:
            return False
        options = self.problem.options
        is_bounded = options.memory_limit is not None or options.recompute is not False
        has_devices = options.devices is not None
        is_repeatable = not facts.draws and not self.snapshot.changed()
        return facts.engine == "graph" and is_repeatable and not is_bounded and not has_devices

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[Evaluation | None]:
        """Evaluate a float32 matrix in float64, and release its residuals afterwards.

        Vectors and products stay float32; only what is computed between them does not. Yields None
        if the matrix may not be wide, or if the device lacks a kernel or the memory.
        """
        if not self.may_be_wide:
            yield None
            return
        with contextlib.ExitStack() as stack:
            wide = self._other("float64", None, precision=None, jit_compile=False, wide=True)
            try:
                other = stack.enter_context(wide)
                other.multiply(tf.zeros([1, self.space.size], self.space.dtype))
            except (tf.errors.OpError, HvpError) as error:
                _log.info("the operator cannot be evaluated in float64: %s", error)
                yield None
                return
            # On tapes, where a graph failed, it would be float32.
            yield other.damped(self.damping) if other.engine == "graph" else None

    @contextlib.contextmanager
    def _other(self, name: str, problem: Problem | None, **options: Any) -> Iterator[Evaluation]:
        """Evaluate with other options at the present values, and release residuals afterwards."""
        assert self.problem is not None
        with self._lock:  # other threads wait, since the evaluation is shared and closed
            try:
                with self.snapshot.with_seeds():
                    if name not in self._others:
                        snapshot = self.problem.snapshot(on_stale="ignore", **options)
                        self._others[name] = Evaluation(snapshot, problem)
                    else:
                        self._others[name].snapshot.refresh()
                yield self._others[name]
            finally:
                if name in self._others:
                    self._others[name].snapshot.close()

    @contextlib.contextmanager
    def evaluated_alone(self, part: Problem) -> Iterator[Evaluation]:
        """Evaluate a part of the data at the present values, and release it afterwards."""
        engine: Engine = "tape" if self.snapshot.facts.engine == "tape" else "graph"
        part = dataclasses.replace(part, options=Options(on_stale="ignore", engine=engine))
        with self.snapshot.with_seeds():
            evaluation = self._of_part(part.snapshot())
        try:
            yield evaluation
        finally:
            evaluation.snapshot.close()

    @contextlib.contextmanager
    def evaluated_with(self, rule: Rule) -> Iterator[Evaluation]:
        """Evaluate another matrix of the same problem in the same way, and release it afterwards.

        The errors are those of `in_full_precision`.
        """
        assert self.problem is not None
        self._refuse_another_matrix("with other targets", "")
        problem = dataclasses.replace(self.problem, rule=rule)
        with self.snapshot.with_seeds():
            evaluation = Evaluation(problem.snapshot(on_stale="ignore"))
            try:
                yield evaluation
            finally:
                evaluation.snapshot.close()

    def _of_part(self, snapshot: Snapshot) -> Evaluation:
        return Evaluation(snapshot)

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it is known that no eigenvalue is negative, including damping."""
        known = self.problem is not None and self.problem.is_positive_semidefinite
        return known and self.damping >= 0

    def _refuse_another_matrix(self, how: str, instead: str) -> None:
        """Refuse to evaluate again if that would be another matrix.

        In the message, `how` is the way in which it would be evaluated, and `instead` a remedy or
        empty.
        """
        self.snapshot.make_sure()
        instead = f", or {instead}" if instead else ""
        if self.snapshot.facts.draws:
            raise HvpError(
                f"the loss draws random numbers, so it cannot be evaluated once more {how}",
                "a loss that is the same in every evaluation",
                f"draw with a Keras seed generator or tf.random.stateless_*{instead}",
            )
        changed = self.snapshot.changed()
        if changed:
            raise StaleOperatorError(
                f"variables that the loss reads have changed: {quoted(changed)}; the matrix can be "
                f"evaluated {how} at the variables' present values only",
                "the values at which the operator was evaluated",
                f"call refresh(){instead}",
            )

    def gradients(self, places: Sequence[int] | None = None) -> Gradients | None:
        """Return the gradient as a function of the point, traced anew; None if there is none.

        With `places`, it is that of some of the variables.
        """
        if self.problem is None:
            return None
        evaluate = functools.partial(self.problem.snapshot, on_stale="ignore", products=False)
        return Gradients(evaluate, self.snapshot, places)

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, the data and the loss.

        They are the same in every process with this version of TensorFlow.
        """
        return self.snapshot.plan.fingerprint()

    @property
    def remarks(self) -> DerivativeReport | None:
        """What the graph of the loss shows about its derivatives; None if there is no graph."""
        return self.snapshot.facts.remarks

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables, in the order of the vectors."""
        return list(self.snapshot.plan.nest.variables)

    @property
    def variable_names(self) -> list[str]:
        """Names of the variables, in the order of the vectors."""
        return self.space.paths

    def unconnected(self) -> list[str]:
        """Return the names of the variables that the loss does not depend on."""
        gradient = self.snapshot.gradient_parts()
        return [name for name, part in zip(self.variable_names, gradient) if part is None]

    def gradient(self) -> tf.Tensor:
        """Return the gradient as one vector, of shape `(n,)`."""
        return self.space.join(self.snapshot.gradient())

    def gradient_or_none(self) -> np.ndarray | None:
        """Return the gradient, unless it was released or is not available."""
        try:
            return self.gradient().numpy()
        except HvpError:
            return None

    def make_sure(self) -> None:
        """Raise an error if the matrix is closed or stale."""
        self.snapshot.value()

    @property
    def evaluations(self) -> int:
        """The number of times that it was evaluated."""
        return self.snapshot.statistics.gradient_evaluations

    def make_sure_evaluated(self, evaluations: int) -> None:
        """Raise `StaleOperatorError` if the point has changed since `evaluations` was this.

        What was computed from a matrix that is closed now remains valid.
        """
        snapshot = self.snapshot
        if snapshot.held is None:
            return
        changed = snapshot.changed() if snapshot.on_stale == "raise" else []
        if changed or self.evaluations != evaluations:
            raise _evaluated_again(changed)


class BlockEvaluation(Evaluation):
    """A diagonal block of a matrix of a loss, for some of its variables or entries."""

    def __init__(self, whole: Evaluation, selection: Selection | Entries) -> None:
        super().__init__(whole.snapshot, problem=whole.problem)
        self.whole, self.selection, self.space = whole, selection, selection.space
        self.has_variables = isinstance(selection, Selection)
        self.linear_map = Restricted(whole.linear_map, selection, selection)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables, in the order of the vectors."""
        return [self.whole.variables[place] for place in self._places()]

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[Evaluation]:
        """Evaluate the same block in full precision, as `Evaluation` does."""
        with self.whole.in_full_precision() as whole:
            yield self if whole is self.whole else self._of(whole)

    @property
    def may_be_wide(self) -> bool:  # type: ignore[override]
        """Whether the whole matrix may be wide."""
        return self.whole.may_be_wide

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[Evaluation | None]:
        """Evaluate the same block in float64, as `Evaluation` does."""
        with self.whole.in_float64() as whole:
            yield None if whole is None else self._of(whole)

    def _of(self, whole: Evaluation) -> BlockEvaluation:
        return BlockEvaluation(whole, self.selection).damped(self.damping)

    def _places(self) -> list[int]:
        if isinstance(self.selection, Entries):
            raise HvpError(
                f"the block consists of {self.size} entries, chosen by their numbers",
                "a block of whole variables",
                "choose variables or layers",
            )
        return self.selection.places

    def gradients(self, places: Sequence[int] | None = None) -> Gradients | None:
        """Return the gradient as a function of the point, in the variables of the block alone."""
        own = self._places()
        return self.whole.gradients(own if places is None else [own[place] for place in places])

    def _of_part(self, snapshot: Snapshot) -> Evaluation:
        return self._of(Evaluation(snapshot))

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, the data and the loss, and of the entries of the block."""
        return {**self.whole.fingerprint(), "block": digest(self.selection.entries)}

    def unconnected(self) -> list[str]:
        """Return the names of the variables that the loss does not depend on."""
        own = set(self.variable_names)
        return [name for name in self.whole.unconnected() if name in own]

    def gradient(self) -> tf.Tensor:
        """Return the gradient as one vector, of the length of the block."""
        return self.selection.taken(self.whole.gradient())


@Uninterrupted()
def evaluated(rule: Rule, variables: Any, data: Any, options: Options) -> Evaluation:
    """Evaluate a matrix at the values the variables have now."""
    problem = Problem.of(rule, variables, data, options)
    return Evaluation(problem.snapshot(), problem)
