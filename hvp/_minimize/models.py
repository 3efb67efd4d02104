"""What a Newton step needs of a loss: value and gradient here and there, and a Hessian here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError
from hvp._minimize.points import Point, Points
from hvp._minimize.samples import Samples
from hvp._operators.core import Core
from hvp._operators.operator import SymmetricOperator
from hvp._snapshots.problem import evaluate_loss


class WholeModel:
    """Loss, gradient and Hessian over the same data, from one evaluation at each point.

    Parameters
    ----------
    points : Points
        Of the loss, evaluated where the variables are.
    """

    def __init__(self, points: Points) -> None:
        self.points = points
        self._here: Point | None = points.at(points.position.read().numpy())

    def here(self, iteration: int, moved: bool) -> Point:
        """Return where the variables are, as the next step sees it."""
        del iteration
        here, self._here = self._here, None  # should something raise
        if moved or here is None or not self.points.heed_changes():
            here = self.points.visit(self.points.position.read())
        self._here = here
        return here

    def operator(self, iteration: int) -> SymmetricOperator:
        """Return the Hessian there."""
        del iteration
        assert self._here is not None
        return self._here.operator

    def there(self, x: tf.Tensor) -> Point:
        """Evaluate at a trial point; the variables are left there."""
        return self.points.visit(x, keep=self._here)

    def accept(self, point: Point) -> None:
        """Make a trial point the one where the variables are."""
        self._here = point

    @property
    def products(self) -> int:
        """How many there were."""
        return self.points.products

    def close(self) -> None:
        """Release what is kept."""
        self._here = None
        self.points.forget()


class SampledModel(WholeModel):
    """A Hessian over examples drawn anew for each step, and a gradient over more, or all.

    Parameters
    ----------
    loss, variables, data
        As for `HessianOperator`; the data are arrays.
    hessian_batch_size : int
        Examples for the Hessian.
    gradient_batch_size : int or None
        Examples for loss and gradient, the same at both ends of a step; None for all.
    seed : int
        Of the draws.
    options : dict
        Of `HessianOperator`.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
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
                    f"{name} is given, and the Hessian is of samples",
                    "the mean over examples, each counting the same",
                )
        if gradient_batch_size is not None and gradient_batch_size < hessian_batch_size:
            raise HvpError(
                f"gradient_batch_size is {gradient_batch_size}, and hessian_batch_size is "
                f"{hessian_batch_size}",
                "the gradient over no fewer examples than the Hessian",
            )
        self._samples = Samples(loss, data, hessian_batch_size, 2 * seed, "hessian_batch_size")
        self._gradient_samples: Samples | None = None
        split = ("batch_size", "memory_limit")  # samples are not cut
        single = {key: value for key, value in options.items() if key not in split}
        if gradient_batch_size is None:
            points = Points.of(loss, variables, data, products=False, **options)
        else:
            drawn = Samples(loss, data, gradient_batch_size, 2 * seed + 1, "gradient_batch_size")
            self._gradient_samples = drawn
            points = Points.of(
                drawn.loss, variables, products=False, inputs=drawn.variables, **single
            )
        super().__init__(points)
        # Evaluated for each step, at the sample drawn for it.
        snapshot = evaluate_loss(
            self._samples.loss,
            variables,
            on_stale="ignore",
            inputs=self._samples.variables,
            **single,
        )
        self._operator = SymmetricOperator(Core(snapshot), 0.0)

    def here(self, iteration: int, moved: bool) -> Point:
        """Return where the variables are; over the sample of this step, if there are samples."""
        if self._gradient_samples is not None:
            self._gradient_samples.draw(iteration)
            moved = True
        return super().here(iteration, moved)

    def operator(self, iteration: int) -> SymmetricOperator:
        """Return the Hessian over the sample of this step."""
        self._samples.draw(iteration)
        self._operator.refresh()
        return self._operator

    @property
    def products(self) -> int:
        """How many there were."""
        return self._operator.stats.products

    def close(self) -> None:
        """Release what is kept."""
        super().close()
        self._operator.close()
