"""A loss at the points that an optimizer visits, the last few of them kept.

One trace serves all points. Each point that is kept has a linearization of its own, which stays
true while the variables move on.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvp._data.budget import Share
from hvp._errors import HvpError, NonFiniteError, StaleOperatorError
from hvp._minimize.position import Position
from hvp._operators.core import Core
from hvp._operators.operator import SymmetricOperator, core_of
from hvp._snapshots.problem import evaluate_loss
from hvp._snapshots.snapshot import Snapshot
from hvp._snapshots.watch import Watch
from hvp._vectors.variables import collect_variables


@dataclass
class Work:
    """What was done at all points.

    Attributes
    ----------
    evaluations : int
        Evaluations of loss and gradient.
    non_finite : int
        How many of them were not finite.
    evaluation_seconds, product_seconds : float
        How long they took, and how long products called from Python took.
    """

    evaluations: int = 0
    non_finite: int = 0
    evaluation_seconds: float = 0.0
    product_seconds: float = 0.0


class Point:
    """The loss at one point.

    Attributes
    ----------
    x : ndarray or None
        Where it is, in the variables' type; None before it is used.
    value : float
        The loss; infinite where it, or its gradient, is not finite.
    operator : SymmetricOperator
        The Hessian there.
    """

    def __init__(self, snapshot: Snapshot, work: Work) -> None:
        self.snapshot = snapshot
        self.operator = SymmetricOperator(Core(snapshot), 0.0)
        self._work = work
        self.x: np.ndarray | None = None
        self.value = math.inf
        self._gradient: np.ndarray | None = None
        self._tensor: tf.Tensor | None = None
        self._norm: float | None = None

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite here."""
        return math.isfinite(self.value)

    @property
    def gradient(self) -> np.ndarray:
        """The gradient, float64, of shape `(n,)`; NaN where it, or the loss, is not finite."""
        if self._gradient is None:
            if self.finite:
                self._gradient = self.operator.gradient.astype(np.float64)
            else:
                self._gradient = np.full(self.operator.shape[:1], np.nan)
        return self._gradient.copy()

    @property
    def gradient_tensor(self) -> tf.Tensor:
        """The gradient on the device, in the operator's type."""
        if self._tensor is None:
            self._tensor = core_of(self.operator).gradient()
        return self._tensor

    @property
    def gradient_norm(self) -> float:
        """The gradient's Euclidean norm."""
        if self._norm is None:
            self._norm = float(tf.norm(tf.cast(self.gradient_tensor, tf.float64)))
        return self._norm

    def product(self, v: np.ndarray) -> np.ndarray:
        """Multiply the Hessian here by a vector, in float64; NaN where the gradient is."""
        if not self.finite:
            return np.full(v.shape, np.nan)
        start = time.perf_counter()
        try:
            return self.operator.matvec(v).astype(np.float64, copy=False)
        finally:
            self._work.product_seconds += time.perf_counter() - start

    def evaluate(self, x: np.ndarray | None) -> None:
        """Evaluate where the variables are; what was kept of the point before is released."""
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
        """Take over what was evaluated already."""
        self.x, self.value = x, self.operator.value
        self._work.evaluations += 1

    def release(self) -> None:
        """Let go of what is kept."""
        self._forget()
        self.snapshot.close()

    def _forget(self) -> None:
        self.x, self.value = None, math.inf
        self._gradient = self._tensor = self._norm = None


class Points:
    """The loss wherever an optimizer goes.

    Parameters
    ----------
    snapshot : Snapshot
        Of the loss.
    kept : int
        How many points to keep.
    adopt : bool
        Whether the evaluation, which is one of where the variables are, serves for that point;
        if not it is left as it is.
    on_stale : {"raise", "refresh"}
        What happens when variables that the loss reads, and that are not trained, have changed.
    position : Position, optional
        Of the variables, if there is one already.

    Attributes
    ----------
    position : Position
        Of the variables.
    work : Work
        What was done so far.
    origin : tf.Tensor
        Where the variables were before all this.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        kept: int = 2,
        adopt: bool,
        on_stale: Literal["raise", "refresh"] = "raise",
        position: Position | None = None,
    ) -> None:
        plan = snapshot.plan
        self.position = position or Position(plan.nest)
        self.origin = self.position.read()
        self.work = Work()
        self._on_stale = on_stale
        trained = {id(variable.handle) for variable in plan.nest.variables}
        self._watch = Watch([r for r in plan.facts.reads if id(r.handle) not in trained])
        self._watch.set()
        self._counted = snapshot
        # The least recently used first.
        self._points = [Point(snapshot.another(), self.work) for _ in range(kept - adopt)]
        if adopt:
            snapshot.on_stale = "ignore"
            self._points.append(Point(snapshot, self.work))
            self._points[-1].adopt(self.position.read().numpy())

    @classmethod
    def of(
        cls,
        loss: Any,
        variables: Any = None,
        data: Any = None,
        x0: Any = None,
        *,
        kept: int = 2,
        products: bool = True,
        on_stale: Literal["raise", "refresh"] = "raise",
        **options: Any,
    ) -> Points:
        """Make them of a loss, variables and data, or of an operator that has all of these.

        Parameters
        ----------
        loss : callable or SymmetricOperator
            If an operator, it stands for `variables`, `data` and `options` too, and is itself left
            as it is.
        variables, data, **options
            As for `HessianOperator`; `memory_limit` is for all points together.
        x0 : array_like, optional
            Where to begin; where the variables are by default. They are left there.
        kept : int
            How many points to keep.
        products : bool
            Whether products are wanted.
        on_stale : {"raise", "refresh"}
            As above.

        Returns
        -------
        Points
            Evaluated at the beginning.

        Raises
        ------
        HvpError
            As `HessianOperator`; the variables are then where they were.
        """
        if on_stale not in ("raise", "refresh"):
            raise HvpError(f"the argument on_stale is {on_stale!r}", "'raise' or 'refresh'")
        if isinstance(loss, SymmetricOperator):
            _check_alone(loss, {"variables": variables, "data": data, **options})
            made = cls(core_of(loss).snapshot, kept=kept, adopt=False, on_stale=on_stale)
            with made.position.restored(only_if_it_fails=True):
                start = made.position.read().numpy() if x0 is None else made.position.checked(x0)
                if not made.at(start).finite:
                    raise NonFiniteError(*_NOT_FINITE)
                made.position.write(start)
            return made
        if variables is None:
            raise HvpError(
                "no variables are given",
                "those that the loss is a function of",
                "for a compiled Keras model pass hvp.HessianOperator.from_keras(model, data) alone",
            )
        if options.get("memory_limit") is not None:
            options["memory_limit"] = Share(options["memory_limit"], 1 / kept)
        position = Position(collect_variables(variables))
        origin = position.read()
        with position.restored(only_if_it_fails=True):
            if x0 is not None:
                position.write(position.checked(x0, "x0"))
            snapshot = evaluate_loss(
                loss, variables, data, on_stale="ignore", products=products, **options
            )
            made = cls(snapshot, kept=kept, adopt=True, on_stale=on_stale, position=position)
            made.origin = origin
            return made

    @property
    def products(self) -> int:
        """How many products there were, those in graphs included."""
        in_graphs = sum(point.snapshot.products_in_graphs for point in self._points)
        return self._counted.products_eager + in_graphs

    def at(self, x: np.ndarray) -> Point:
        """Return a point; it is evaluated if it is not kept.

        Parameters
        ----------
        x : ndarray
            Of shape `(n,)`, finite. The variables are put back to where they were.

        Returns
        -------
        Point
        """
        x = x.astype(self.position.dtype, copy=False)
        self.heed_changes()
        for point in reversed(self._points):
            if point.x is not None and np.array_equal(point.x, x):
                self._use(point)
                return point
        with self.position.restored():
            return self._evaluate(self._points[0], x, x.copy())

    def product(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Multiply the Hessian at a point by a vector, in float64; as `at`."""
        point = self.at(x)
        if not point.snapshot.streams:
            return point.product(v)
        with self.position.restored():  # batches are evaluated again, where the variables are
            self.position.write(point.x)
            return point.product(v)

    def visit(self, x: tf.Tensor, keep: Point | None = None) -> Point:
        """Evaluate at a point given as a tensor, which need not be finite.

        Parameters
        ----------
        x : tf.Tensor
            Of shape `(n,)`. The variables are left there.
        keep : Point, optional
            The point that must be kept.

        Returns
        -------
        Point
        """
        self.heed_changes()
        return self._evaluate(next(p for p in self._points if p is not keep), x, None)

    def forget(self) -> None:
        """Let go of all points."""
        for point in self._points:
            point.release()

    def _evaluate(self, point: Point, x: Any, key: np.ndarray | None) -> Point:
        self.position.write(x)
        point.evaluate(key)
        self._use(point)
        return point

    def _use(self, point: Point) -> None:
        self._points.remove(point)
        self._points.append(point)

    def heed_changes(self) -> bool:
        """Tell whether what is kept is still true; if not, forget it.

        It is not where variables that the loss reads, and that are not minimized over, have
        changed.

        Raises
        ------
        StaleOperatorError
            In that case, unless new evaluations are asked for.
        """
        changed = self._watch.changed()
        if not changed:
            return True
        self.forget()
        self._watch.set()
        if self._on_stale == "raise":
            raise StaleOperatorError(
                "variables that the loss reads, and that are not minimized over, have changed: "
                + ", ".join(map(repr, changed)),
                "one function from beginning to end",
                "leave them alone meanwhile, or begin anew after each change",
            )
        return False


_NOT_FINITE = ("the loss or its gradient is not finite at the start", "a start where both are")


def _check_alone(operator: SymmetricOperator, others: dict[str, Any]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise HvpError(
            f"an operator is given, and {', '.join(given)} beside it",
            "an operator alone, which has its loss, variables, data and options",
        )
    if operator.damping:
        raise HvpError(
            f"the operator has damping {operator.damping}, which its loss does not have",
            "an operator without damping",
            "add to the loss what is to be minimized: lam / 2 times the sum of squares",
        )
