"""What the rest of the package uses of an operator, and its users do not."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._engines.linear_map import LinearMap
from hvp._engines.options import ROUNDING, Engine, Options
from hvp._engines.plan import DerivativeReport
from hvp._engines.restricted import Restricted, Selection
from hvp._engines.rule import Rule
from hvp._errors import HvpError, StaleOperatorError, quoted
from hvp._runtime.interrupts import Uninterrupted
from hvp._snapshots.nearby import Gradients
from hvp._snapshots.problem import Problem
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.nests import flattened, unflattened

_log = logging.getLogger("hvp")

# Compiled solvers and the like that are kept for one operator.
_MOST_CACHED = 64


class Core:
    """A snapshot shared by operators that differ in damping only, and what was computed from it.

    Parameters
    ----------
    snapshot : Snapshot
        The results and the linear map.
    evaluate_gradient : callable, optional
        Returns a snapshot of the gradient alone, of a new trace: for checks.
    problem : Problem, optional
        What the matrix is of, to evaluate it in another way.

    Attributes
    ----------
    snapshot : Snapshot
        The same.
    space : Space
        The space of its vectors.
    linear_map : LinearMap
        What multiplies.
    problem : Problem or None
        The same.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        evaluate_gradient: Callable[[], Snapshot] | None = None,
        *,
        problem: Problem | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.space = snapshot.plan.space
        self.linear_map: LinearMap = snapshot
        self._evaluate_gradient = evaluate_gradient
        self.problem = problem
        self._in_full: Core | None = None
        self._in_float64: Core | None = None
        self._cache: dict[Any, Any] = {}
        # Without a cycle: the residuals are to be freed with the last operator.
        self._blocks: weakref.WeakValueDictionary[Any, BlockCore] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def flatten(self, nest: Any) -> Any:
        """Concatenate a nest shaped like the variables into one vector; as the operator's own."""
        return flattened(self.space, nest)

    def unflatten(self, vector: Any) -> Any:
        """Split a vector, or a block of columns, into a nest; as the operator's own."""
        return unflattened(self.space, vector)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the object stored under a key, whatever the damping; make it at the first call.

        The objects that were used last are kept.
        """
        with self._lock:
            value = self._cache.pop(key) if key in self._cache else make()
            self._cache[key] = value  # at the end
            while len(self._cache) > _MOST_CACHED:
                del self._cache[next(iter(self._cache))]
            return value

    def block(self, places: Sequence[int]) -> BlockCore:
        """Return the core of a diagonal block, the same one while it is in use."""
        with self._lock:
            key = tuple(places)
            block = self._blocks.get(key) or BlockCore(self, places)
            self._blocks[key] = block
            return block

    @property
    def rounding(self) -> float:
        """The rounding unit of products."""
        low = ROUNDING.get(self.snapshot.facts.precision)
        return low or float(np.finfo(self.space.dtype.as_numpy_dtype).eps)

    @property
    def is_low(self) -> bool:
        """Whether products are computed in low precision."""
        return bool(self.snapshot.facts.precision)

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[Core]:
        """Evaluate the same matrix in full precision, and release what that keeps afterwards.

        If products are in full precision anyway, this is the object itself.

        Raises
        ------
        StaleOperatorError
            If a variable has changed since the operator was evaluated.
        HvpError
            If the loss draws random numbers that cannot be repeated.
        """
        if not self.is_low:
            yield self
            return
        self._refuse_another_matrix("in full precision", "leave out precision")
        assert self.problem is not None
        with self._lock:  # other threads wait, since the evaluation is shared and closed
            with self.snapshot.with_seeds():
                if self._in_full is None:
                    snapshot = self.problem.snapshot(on_stale="ignore", precision=None)
                    self._in_full = Core(snapshot, problem=self.problem)
                else:
                    self._in_full.snapshot.refresh()
            try:
                yield self._in_full
            finally:
                self._in_full.snapshot.close()

    @property
    def may_be_wide(self) -> bool:
        """Whether the matrix is float32 and can be evaluated in float64, but for missing kernels.

        Not on tapes, nor with devices of its own, nor of losses that draw random numbers, nor at
        values that the variables no longer have. Nor where memory is bounded, as float64 takes
        twice as much.
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
    def in_float64(self) -> Iterator[Core | None]:
        """Evaluate a float32 matrix in float64, and release what that keeps afterwards.

        Vectors and products stay float32; what is computed between them does not. Yields None if
        the matrix may not be wide, or if it cannot be evaluated so: the device may have no kernel
        for one of the operations, or too little memory.
        """
        if not self.may_be_wide:
            yield None
            return
        assert self.problem is not None
        wide: dict[str, Any] = {"precision": None, "jit_compile": False, "wide": True}
        with self._lock:  # other threads wait, since the evaluation is shared and closed
            try:
                try:
                    with self.snapshot.with_seeds():
                        if self._in_float64 is None:
                            snapshot = self.problem.snapshot(on_stale="ignore", **wide)
                            self._in_float64 = Core(snapshot)
                        else:
                            self._in_float64.snapshot.refresh()
                    zeros = tf.zeros([1, self.space.size], self.space.dtype)
                    self._in_float64.linear_map.apply(zeros)
                except (tf.errors.OpError, HvpError) as error:
                    _log.info("the operator cannot be evaluated in float64: %s", error)
                    yield None
                    return
                # On tapes, where a graph failed, it would be float32.
                is_wide = self._in_float64.snapshot.facts.engine == "graph"
                yield self._in_float64 if is_wide else None
            finally:
                if self._in_float64 is not None:
                    self._in_float64.snapshot.close()

    @contextlib.contextmanager
    def evaluated_alone(self, part: Problem) -> Iterator[Core]:
        """Evaluate a part of the data, at the present values, and release it afterwards."""
        engine: Engine = "tape" if self.snapshot.facts.engine == "tape" else "graph"
        part = dataclasses.replace(part, options=Options(on_stale="ignore", engine=engine))
        with self.snapshot.with_seeds():
            core = self._of_part(part.snapshot())
        try:
            yield core
        finally:
            core.snapshot.close()

    @contextlib.contextmanager
    def evaluated_with(self, rule: Rule) -> Iterator[Core]:
        """Evaluate another matrix of the same problem in the same way, and release it after.

        Raises
        ------
        StaleOperatorError
            If a variable has changed since the operator was evaluated.
        HvpError
            If the loss draws random numbers that cannot be repeated.
        """
        assert self.problem is not None
        self._refuse_another_matrix("with other targets", "")
        problem = dataclasses.replace(self.problem, rule=rule)
        with self.snapshot.with_seeds():
            core = Core(problem.snapshot(on_stale="ignore"))
            try:
                yield core
            finally:
                core.snapshot.close()

    def _of_part(self, snapshot: Snapshot) -> Core:
        return Core(snapshot)

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether it is known that no eigenvalue is negative."""
        return self.problem is not None and self.problem.is_positive_semidefinite

    def _refuse_another_matrix(self, how: str, instead: str) -> None:
        """Refuse to evaluate again where that would be another matrix.

        Parameters
        ----------
        how : str
            The way in which it would be evaluated, for the message.
        instead : str
            What to do instead, or an empty text.
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

    @property
    def cached_count(self) -> int:
        """How many objects are stored."""
        return len(self._cache)

    def gradients(self, places: Sequence[int] | None = None) -> Gradients | None:
        """Return the gradient as a function of the point, traced anew; None if there is none.

        Parameters
        ----------
        places : sequence of int, optional
            Of some variables alone: which they are.
        """
        if self._evaluate_gradient is None:
            return None
        return Gradients(self._evaluate_gradient, self.snapshot, places)

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, the data and the loss.

        They are the same in every process with this version of TensorFlow.
        """
        return self.snapshot.plan.fingerprint()

    @property
    def remarks(self) -> DerivativeReport | None:
        """What the graph of the loss tells about its derivatives; None if there is none."""
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


class BlockCore(Core):
    """The core of a diagonal block of an operator.

    Parameters
    ----------
    whole : Core
        That of the operator.
    places : sequence of int
        Which of its variables the block belongs to, in increasing order.

    Attributes
    ----------
    selection : Selection
        What the block is of the operator.
    """

    def __init__(self, whole: Core, places: Sequence[int]) -> None:
        super().__init__(whole.snapshot, problem=whole.problem)
        self._whole, self.selection = whole, Selection(whole.space, places)
        self.space = self.selection.space
        self.linear_map = Restricted(whole.linear_map, self.selection, self.selection)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables, in the order of the vectors."""
        return [self._whole.variables[place] for place in self.selection.places]

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[Core]:
        """Evaluate the same block in full precision, as `Core` does."""
        with self._whole.in_full_precision() as whole:
            yield self if whole is self._whole else BlockCore(whole, self.selection.places)

    @property
    def may_be_wide(self) -> bool:
        """Whether the whole matrix may be wide."""
        return self._whole.may_be_wide

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[Core | None]:
        """Evaluate the same block in float64, as `Core` does."""
        with self._whole.in_float64() as whole:
            yield None if whole is None else BlockCore(whole, self.selection.places)

    def gradients(self, places: Sequence[int] | None = None) -> Gradients | None:
        """Return the gradient as a function of the point, in the variables of the block alone."""
        own = self.selection.places
        return self._whole.gradients(own if places is None else [own[place] for place in places])

    def _of_part(self, snapshot: Snapshot) -> Core:
        return BlockCore(Core(snapshot), self.selection.places)

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, the data and the loss, and the name of the block."""
        return {**self._whole.fingerprint(), "block": ", ".join(self.space.names)}

    def unconnected(self) -> list[str]:
        """Return the names of the variables that the loss does not depend on."""
        own = set(self.variable_names)
        return [name for name in self._whole.unconnected() if name in own]

    def gradient(self) -> tf.Tensor:
        """Return the gradient as one vector, of the length of the block."""
        return self.selection.taken(self._whole.gradient())


@Uninterrupted()
def evaluated(rule: Rule, variables: Any, data: Any, options: Options) -> Core:
    """Evaluate a matrix at the values the variables have now.

    Parameters
    ----------
    rule : Rule
        The matrix.
    variables, data
        As for `HessianOperator`.
    options : Options
        The options of the call.
    """
    problem = Problem.of(rule, variables, data, options)
    return Core(
        problem.snapshot(),
        lambda: problem.snapshot(on_stale="ignore", products=False),
        problem=problem,
    )
