"""A normal distribution of weights whose precision is a curvature and a prior."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._derivatives.gradient import value_and_gradient
from hvp._errors import HvpError
from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.penalty import penalty_diagonal
from hvp._laplace.weights import Weights

# Eigenvalues are zero up to so many rounding errors of the largest.
_ROUNDING_ERRORS = 8.0
# Two derivatives are the same up to this, relative to the largest.
_SAME = 1e-3


@dataclass
class Posterior:
    """The normal distribution of weights around their values, in terms of eigenvectors.

    Attributes
    ----------
    weights : Weights
        The weights, whose values are the mean.
    matrix : FactoredOperator
        The mean curvature of the examples.
    loss : float
        The sum over examples of the loss.
    count, normal : int
        How many examples there are, and how many targets with normal errors.
    is_diagonal : bool
        Whether each weight may have a prior of its own.
    noise : float
        The standard deviation of normal errors; one if there are none.
    """

    weights: Weights
    matrix: FactoredOperator
    loss: float
    count: int
    normal: int
    is_diagonal: bool
    noise: float = 1.0

    def __post_init__(self) -> None:
        parts = self.matrix.parts()
        self.sizes = [len(entries) for _, entries, _ in parts]
        self._order = np.concatenate([entries for _, entries, _ in parts])
        # The precision of the prior for each eigenvector, in this order.
        self.prior = np.ones(len(self._order))
        self._variances: tuple[Any, Any] = (None, None)

    @property
    def scale(self) -> float:
        """What the mean curvature is multiplied by."""
        return self.count / self.noise**2

    def precisions(self) -> np.ndarray:
        """Return the eigenvalues of the precision matrix."""
        self._refuse_singular(self.prior)
        return self.scale * self.matrix.scales() + self.prior

    def effective(self) -> float:
        """Return the number of parameters that the data determine, rather than the prior."""
        return float(np.sum(self.scale * self.matrix.scales() / self.precisions()))

    def function(
        self, of_precision: Callable[[np.ndarray], np.ndarray], prior: np.ndarray | None = None
    ) -> FactoredOperator:
        """Return a function of the precision matrix, with this or another prior."""
        prior = self.prior if prior is None else prior
        self._refuse_singular(prior)
        scale = self.scale

        def of_block(own: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
            return lambda values: of_precision(scale * values + own.reshape(values.shape))

        return self.matrix.rescaled([of_block(own) for own in self.split(prior)])

    def covariance(self, prior: np.ndarray | None = None) -> FactoredOperator:
        """Return the covariance matrix, with this or another prior."""
        return self.function(lambda precision: 1 / precision, prior)

    def output_variances(self, prior: float | None = None) -> Any:
        """Return the variances of outputs as a function of the inputs of the uncertain layer.

        Return None if the matrix has no such function.
        """
        if prior is not None:
            return self.covariance(np.full_like(self.prior, prior)).output_variances()
        state = self.noise, self.prior.tobytes()
        if state != self._variances[0]:
            self._variances = state, self.covariance().output_variances()
        return self._variances[1]

    def rotate(self, rows: Any) -> np.ndarray:
        """Return vectors, which are rows, in terms of the eigenvectors."""
        return self.matrix.rotate(tf.constant(rows)).numpy().astype(np.float64)

    def evidence(self, prior: np.ndarray, noise: float) -> tuple[float, np.ndarray, float]:
        """Return the evidence, and its derivatives in logarithms of precisions and of the noise."""
        squares = prior * self._of_weights(self.weights.flat()) ** 2
        precision = self.count / noise**2 * self.matrix.scales() + prior
        value, of_noise = -self.loss / noise**2, 0.0
        share = prior / precision
        if self.normal:
            value -= self.normal * (math.log(noise) + math.log(2 * math.pi) / 2)
            of_noise = 2 * self.loss / noise**2 - self.normal + float(np.sum(1 - share))
        with np.errstate(divide="ignore"):
            value += np.sum(np.log(prior) - squares - np.log(precision)) / 2
        return float(value), (1 - squares - share) / 2, of_noise

    def refresh(self, loss: float) -> None:
        """Take another loss; the matrix is that of the present weights."""
        self.loss, self._variances = loss, (None, None)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Split numbers for each eigenvector by blocks."""
        return np.split(values, np.cumsum(self.sizes)[:-1])

    def in_order_of_weights(self, values: np.ndarray) -> np.ndarray:
        """Return numbers for each eigenvector in the order of the weights."""
        ordered = np.empty_like(values)
        ordered[self._order] = values
        return ordered

    def _of_weights(self, values: np.ndarray) -> np.ndarray:
        return values.astype(np.float64)[self._order]

    def checked_prior(self, value: Any) -> np.ndarray:
        """Return precisions of the prior that a caller gave, one for each eigenvector."""
        prior, count = checked_precisions(value), len(self.sizes)
        shapes = [(), (count,), *([self.prior.shape] if self.is_diagonal else [])]
        if prior.shape not in shapes:
            raise HvpError(
                f"the prior precision has the shape {prior.shape}",
                f"one number, or one for each of {count} blocks; of each weight only if the "
                "curvature is 'diagonal'",
            )
        if prior.shape in shapes[:2]:
            return np.repeat(np.broadcast_to(prior, count), self.sizes)
        return self._of_weights(prior)

    def prior_of(self, penalty: Callable[[], Any]) -> np.ndarray:
        """Return the precisions of the prior that a penalty is."""
        nest, space = self.weights.nest, self.weights.space
        prior = np.ones_like(self.prior)
        diagonal = self.scale * self._of_weights(penalty_diagonal(penalty, nest))
        for place in self.split(np.arange(len(prior))):
            own = diagonal[place]
            if own.any():
                prior[place] = own if self.is_diagonal else own.mean()
        if not (np.isfinite(prior) & (prior >= 0)).all():
            raise HvpError(
                f"second derivatives of the penalty go down to {diagonal.min():.3g}",
                "a penalty that is the negative logarithm of a normal density",
                "pass prior_precision",
            )
        _, slopes = value_and_gradient(penalty, nest.variables)
        slope = self.scale * self._of_weights(space.join(space.with_zeros(slopes)).numpy())
        apart = np.abs(slope - diagonal * self._of_weights(self.weights.flat()))
        if apart.max() > _SAME * np.abs(slope).max():
            raise HvpError(
                f"the penalty has a first derivative that is {apart.max():.3g} from its second "
                "derivative times the weight, so that it is not a normal prior with mean zero",
                "a sum of squares of weights, such as the regularizer 'l2'",
                "pass prior_precision",
            )
        return prior

    def shown_prior(self) -> str:
        """Return the precisions of the prior as a text."""
        low, high = self.prior.min(), self.prior.max()
        return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"

    def _refuse_singular(self, prior: np.ndarray) -> None:
        unit = _ROUNDING_ERRORS * np.finfo(self.weights.space.dtype.as_numpy_dtype).eps
        for own, (names, _, values) in zip(self.split(prior), self.matrix.parts()):
            if (values[own == 0] <= unit * values.max()).any():
                raise HvpError(
                    f"the posterior of {', '.join(names)} has no precision in some direction: the "
                    "data do not determine it, and the prior precision is zero",
                    "a prior precision above zero",
                    "set prior_precision",
                )


def checked_precisions(value: Any) -> np.ndarray:
    """Return precisions as an array; raise `HvpError` if one is negative or not a number."""
    try:
        prior = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        prior = np.full((), np.nan)
    if not (np.isfinite(prior) & (prior >= 0)).all():
        raise HvpError(f"the prior precision is {value!r}", "finite numbers from zero on")
    return prior
