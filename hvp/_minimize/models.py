"""What a Newton step needs from a loss: values, gradients and a Hessian."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvp._data.elements import Elements
from hvp._engines.rule import Rule
from hvp._errors import HvpError
from hvp._minimize.points import Point, Points
from hvp._minimize.samples import Samples
from hvp._operators.matrix import Evaluation
from hvp._operators.symmetric import SymmetricOperator
from hvp._snapshots.problem import evaluate_loss


class WholeModel:
    """Loss, gradient and Hessian over the same data, from one evaluation at each point.

    `points` must have been evaluated at the current values of the variables.
    """

    def __init__(self, points: Points) -> None:
        self.points = points
        self._current: Point | None = points.at(points.position.read().numpy())

    @property
    def is_hessian(self) -> bool:
        """Whether `hessian` is the derivative of the gradient, rather than another matrix."""
        return self.points.is_hessian

    def begin(self) -> None:
        """Begin a run, using the present values of variables that are not minimized over."""
        if self.points.begin():
            self._current = None

    def current_point(self, iteration: int, moved: bool) -> Point:
        """Return the loss at the current values of the variables.

        `iteration` is the number of the step that needs it, and `moved` tells whether other code
        changed the variables since the last step.
        """
        del iteration
        point, self._current = self._current, None  # stays None if an exception is raised below
        if moved or point is None or self.points.forget_if_stale():
            point = self.points.visit(self.points.position.read())
        self._current = point
        return point

    def hessian(self, iteration: int) -> SymmetricOperator:
        """Return the Hessian at the current point."""
        del iteration
        assert self._current is not None
        return self._current.operator

    def trial_point(self, x: tf.Tensor) -> Point:
        """Evaluate the loss at a trial point, and leave the variables there."""
        return self.points.visit(x, keep=self._current)

    def accept(self, point: Point) -> None:
        """Make the trial point the current point."""
        self._current = point

    @property
    def products(self) -> int:
        """Number of Hessian-vector products so far."""
        return self.points.products

    def close(self) -> None:
        """Release the linearizations."""
        self._current = None
        self.points.forget()


class SampledModel(WholeModel):
    """A Hessian over a sample that is redrawn for each step.

    The loss and the gradient are over another sample of at least the same size, which is the same
    at both ends of a step, or over all examples if `gradient_batch_size` is None. `data` must be
    arrays, and `options` are those of `HessianOperator`.
    """

    def __init__(
        self,
        rule: Rule,
        variables: Any,
        data: Any,
        hessian_batch_size: int,
        gradient_batch_size: int | None,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        for name in ("weight", "reduction"):
            if options.get(name) not in (None, "mean"):
                raise HvpError(
                    f"{name} is given together with hessian_batch_size",
                    "the mean over examples that all count the same",
                )
        if gradient_batch_size is not None and gradient_batch_size < hessian_batch_size:
            raise HvpError(
                f"gradient_batch_size is {gradient_batch_size}, and hessian_batch_size is "
                f"{hessian_batch_size}",
                "a gradient over no fewer examples than the Hessian",
            )
        self._samples = Samples(rule, data, hessian_batch_size, 2 * seed, "hessian_batch_size")
        self._gradient_samples: Samples | None = None
        # A sample is evaluated in one piece.
        batching = ("batch_size", "memory_limit")
        sample_options = {key: value for key, value in options.items() if key not in batching}
        on_stale = {"on_stale": sample_options.pop("on_stale")}
        if gradient_batch_size is None:
            points = Points.of(rule, variables, data, products=False, **options)
        else:
            samples = Samples(rule, data, gradient_batch_size, 2 * seed + 1, "gradient_batch_size")
            self._gradient_samples = samples
            points = Points.of(
                samples,
                variables,
                products=False,
                inputs=samples.variables,
                **on_stale,
                **sample_options,
            )
        super().__init__(points)
        # `hessian` redraws the sample and refreshes this snapshot for each step.
        snapshot = evaluate_loss(
            self._samples,
            variables,
            on_stale="ignore",
            inputs=self._samples.variables,
            **sample_options,
        )
        self._operator = SymmetricOperator(Evaluation(snapshot))

    def elements(self) -> Elements:
        """Return this step's Hessian sample."""
        return self._samples.elements()

    def current_point(self, iteration: int, moved: bool) -> Point:
        """Return the loss at the current values, over this step's gradient sample."""
        if self._gradient_samples is not None:
            self._gradient_samples.draw(iteration)
            moved = True
        return super().current_point(iteration, moved)

    def hessian(self, iteration: int) -> SymmetricOperator:
        """Return the Hessian over this step's Hessian sample."""
        self._samples.draw(iteration)
        self._operator.refresh()
        return self._operator

    @property
    def products(self) -> int:
        """Number of Hessian-vector products so far."""
        return self._operator.stats.products

    def close(self) -> None:
        """Release the linearizations."""
        super().close()
        self._operator.close()
