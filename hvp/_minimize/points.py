"""A loss at the points that an optimizer visits, with the last few linearizations cached.

One trace serves all points. Each cached point has its own linearization, which stays valid when the
variables move on.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvp._data.budget import MemoryFraction
from hvp._errors import HvpError, NonFiniteError, StaleOperatorError
from hvp._minimize.position import Position
from hvp._operators.matrix import Evaluation
from hvp._operators.symmetric import BlockOperator, SymmetricOperator, evaluation_of
from hvp._runtime.arguments import check_choice
from hvp._runtime.interrupts import Uninterrupted
from hvp._snapshots.problem import evaluate_loss
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.variables import collect_variables
from hvp._vectors.watch import Watch


@dataclass
class WorkCounts:
    """Counts and times over all points.

    `evaluations` are those of loss and gradient; `non_finite` counts those in which either was not
    finite. `product_seconds` covers products that were called from Python.
    """

    evaluations: int = 0
    non_finite: int = 0
    evaluation_seconds: float = 0.0
    product_seconds: float = 0.0


class Point:
    """The loss and its Hessian at one point.

    `x` is the point in the variables' type, or None before the first evaluation. `value` is
    infinite if the loss or its gradient is not finite. `free` is the mask of entries that steps may
    change; None stands for all of them.
    """

    def __init__(self, snapshot: Snapshot, work: WorkCounts) -> None:
        self.snapshot = snapshot
        self.operator = SymmetricOperator(Evaluation(snapshot))
        self._work = work
        self.x: np.ndarray | None = None
        self.value = math.inf
        self._gradient: np.ndarray | None = None
        self._gradient_tensor: tf.Tensor | None = None
        self._gradient_norm: float | None = None
        self.free: tf.Tensor | None = None

    @property
    def finite(self) -> bool:
        """Whether the loss and its gradient are finite."""
        return math.isfinite(self.value)

    @property
    @Uninterrupted()
    def gradient(self) -> np.ndarray:
        """The gradient in float64; NaN if it or the loss is not finite."""
        if self._gradient is None:
            if self.finite:
                self._gradient = self.operator.gradient.astype(np.float64)
            else:
                self._gradient = np.full(self.operator.shape[:1], np.nan)
        return self._gradient.copy()

    @property
    def gradient_tensor(self) -> tf.Tensor:
        """The gradient on the device, in the operator's type."""
        if self._gradient_tensor is None:
            self._gradient_tensor = evaluation_of(self.operator).gradient()
        return self._gradient_tensor

    @property
    def free_gradient(self) -> tf.Tensor:
        """The gradient, with zeros for the entries that steps may not change."""
        gradient = self.gradient_tensor
        return gradient if self.free is None else gradient * self.free

    @property
    def gradient_norm(self) -> float:
        """The Euclidean norm of the free gradient."""
        if self._gradient_norm is None:
            self._gradient_norm = float(tf.norm(tf.cast(self.free_gradient, tf.float64)))
        return self._gradient_norm

    def confine(self, free: tf.Tensor) -> None:
        """Confine steps from this point to the entries where the mask `free` is one."""
        self.free, self._gradient_norm = free, None

    @Uninterrupted()
    def product(self, v: np.ndarray) -> np.ndarray:
        """Multiply the Hessian by a vector, in float64; return NaN unless the point is finite."""
        if not self.finite:
            return np.full(v.shape, np.nan)
        start = time.perf_counter()
        try:
            return self.operator.matvec(v).astype(np.float64, copy=False)
        finally:
            self._work.product_seconds += time.perf_counter() - start

    def evaluate(self, x: np.ndarray | None) -> None:
        """Evaluate the loss at the current values, and release the previous linearization.

        Pass the current values as `x` if the point is to be looked up by them later.
        """
        start = time.perf_counter()
        self._forget()
        try:
            self.snapshot.refresh()
            self.value = self.operator.value
        except NonFiniteError:
            self._work.non_finite += 1
        self.x = x
        self._work.evaluations += 1
        self._work.evaluation_seconds += time.perf_counter() - start

    def adopt(self, x: np.ndarray) -> None:
        """Take over the snapshot's existing evaluation, which is at `x`."""
        self.x, self.value = x, self.operator.value
        self._work.evaluations += 1

    def release(self) -> None:
        """Release the linearization."""
        self._forget()
        self.snapshot.close()

    def _forget(self) -> None:
        self.x, self.value = None, math.inf
        self._gradient = self._gradient_tensor = self._gradient_norm = self.free = None


class Points:
    """The loss as a function of the point, with a cache of the last `capacity` points.

    With `adopt`, the cache takes over `snapshot`, which must have been evaluated at the current
    values; otherwise the snapshot is left unchanged. `on_stale` says what to do after a change of a
    variable that the loss reads but that is not minimized over. `origin` holds the values of the
    variables before the first step.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        capacity: int = 2,
        adopt: bool,
        on_stale: Literal["raise", "refresh"] = "raise",
        position: Position | None = None,
    ) -> None:
        plan = snapshot.plan
        self.position = position or Position(plan.nest)
        self.origin = self.position.read()
        self.work = WorkCounts()
        self._on_stale = on_stale
        trained = {id(variable.handle) for variable in plan.nest.variables}
        self._watch = Watch([r for r in plan.facts.reads if id(r.handle) not in trained])
        self._watch.set()
        # All snapshots of one plan share the count of eager products.
        self._snapshot = snapshot
        # The cache is ordered by use; the least recently used point comes first.
        self._points = [Point(snapshot.another(), self.work) for _ in range(capacity - adopt)]
        if adopt:
            snapshot.on_stale = "ignore"
            self._points.append(Point(snapshot, self.work))
            self._points[-1].adopt(self.position.read().numpy())
        self._earlier_products = self._count_products()  # an operator may have been used before

    @classmethod
    def of(
        cls,
        loss: Any,
        variables: Any = None,
        data: Any = None,
        x0: Any = None,
        *,
        capacity: int = 2,
        products: bool = True,
        on_stale: Literal["raise", "refresh"] = "raise",
        **options: Any,
    ) -> Points:
        """Evaluate a loss at its starting point.

        A rule as `loss` stands for another matrix than the Hessian. An operator stands for
        `variables`, `data` and `options` too, and is left unchanged. Otherwise these are as for
        `HessianOperator`; the points share `memory_limit`. The variables are set to `x0`, if it is
        given, and restored if an error is raised. `products` tells whether Hessian-vector products
        will be needed.
        """
        check_choice(on_stale, "on_stale", ("raise", "refresh"))
        if isinstance(loss, SymmetricOperator):
            _check_alone(loss, {"variables": variables, "data": data, **options})
            if isinstance(loss, BlockOperator):
                raise HvpError(
                    "the operator is a block of another one, which has more variables",
                    "an operator of the variables to minimize over",
                    "pass the loss and these variables",
                )
            points = cls(
                evaluation_of(loss).snapshot, capacity=capacity, adopt=False, on_stale=on_stale
            )
            position = points.position
            with position.restored(only_on_error=True):
                start = position.read().numpy() if x0 is None else position.checked(x0)
                if not points.at(start).finite:
                    raise NonFiniteError(*_NOT_FINITE)
                position.write(start)
            return points
        if variables is None:
            raise HvpError(
                "no variables are given",
                "the variables that the loss is a function of",
                "for a compiled Keras model pass hvp.HessianOperator.from_keras(model, data) alone",
            )
        if options.get("memory_limit") is not None:
            options["memory_limit"] = MemoryFraction(options["memory_limit"], 1 / capacity)
        position = Position(collect_variables(variables))
        origin = position.read()
        with position.restored(only_on_error=True):
            if x0 is not None:
                position.write(position.checked(x0, "x0"))
            snapshot = evaluate_loss(
                loss, variables, data, on_stale="ignore", products=products, **options
            )
            points = cls(
                snapshot, capacity=capacity, adopt=True, on_stale=on_stale, position=position
            )
            points.origin = origin
            return points

    @property
    def is_hessian(self) -> bool:
        """Whether products are with the derivative of the gradient."""
        return self._snapshot.is_hessian

    @property
    def products(self) -> int:
        """Number of products at all points so far, including those inside graphs."""
        return self._count_products() - self._earlier_products

    def _count_products(self) -> int:
        in_graphs = sum(point.snapshot.products_in_graphs for point in self._points)
        return self._snapshot.products_eager + in_graphs

    @Uninterrupted()
    def at(self, x: np.ndarray) -> Point:
        """Return the loss at a finite point of shape `(n,)`, evaluated there unless it is cached.

        The variables are restored afterwards.
        """
        x = x.astype(self.position.dtype, copy=False)
        self.forget_if_stale()
        for point in reversed(self._points):
            if point.x is not None and np.array_equal(point.x, x):
                self._mark_used(point)
                return point
        with self.position.restored():
            return self._evaluate(self._points[0], x, x.copy())

    @Uninterrupted()
    def product(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Multiply the Hessian at `x` by a vector, in float64; see `at`."""
        point = self.at(x)
        if not point.snapshot.streams:
            return point.product(v)
        # Streamed batches are evaluated again for each product, at the variables' current values.
        with self.position.restored():
            self.position.write(point.x)
            return point.product(v)

    def visit(self, x: tf.Tensor, keep: Point | None = None) -> Point:
        """Evaluate the loss at a point, which need not be finite, and leave the variables there.

        The point `keep` stays in the cache.
        """
        self.forget_if_stale()
        return self._evaluate(next(p for p in self._points if p is not keep), x, None)

    def forget(self) -> None:
        """Release the linearizations of all points."""
        for point in self._points:
            point.release()

    def begin(self) -> bool:
        """Release all points if they are stale, without an error; return whether they were."""
        is_stale = bool(self._watch.changed())
        if is_stale:
            self.forget()
            self._watch.set()
        return is_stale

    def forget_if_stale(self) -> bool:
        """Release all points if they are stale, and return whether they were.

        They are stale once a variable has changed that the loss reads but that is not minimized
        over. Raise `StaleOperatorError` then, if `on_stale` is "raise".
        """
        changed = self._watch.changed()
        if self.begin() and self._on_stale == "raise":
            raise StaleOperatorError(
                "variables that the loss reads, and that are not minimized over, have changed: "
                + ", ".join(map(repr, changed)),
                "the same function throughout the minimization",
                "leave these variables alone during a run, or start a new run after each change, "
                "or pass on_stale='refresh'",
            )
        return bool(changed)

    def _evaluate(self, point: Point, x: Any, key: np.ndarray | None) -> Point:
        self.position.write(x)
        point.evaluate(key)
        self._mark_used(point)
        return point

    def _mark_used(self, point: Point) -> None:
        self._points.remove(point)
        self._points.append(point)


_NOT_FINITE = (
    "the loss or its gradient is not finite at the start",
    "a starting point at which both are finite",
)


def _check_alone(operator: SymmetricOperator, others: dict[str, Any]) -> None:
    """Reject other arguments next to an operator, which already has its own."""
    names = [name for name, value in others.items() if value is not None]
    if names:
        raise HvpError(
            f"an operator is given, and {', '.join(names)} beside it",
            "the operator alone, which has its own loss, variables, data and options",
        )
    if operator.damping:
        raise HvpError(
            f"the operator has damping {operator.damping}, which is not part of its loss",
            "an operator without damping",
            "add the penalty to the loss itself: lam / 2 times the sum of squares",
        )
