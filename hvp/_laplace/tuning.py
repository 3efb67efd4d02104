"""The choice of the precision of a prior, by the evidence or by validation data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.optimize
import tensorflow as tf

from hvp._data.elements import convert_batch, rows_of
from hvp._derivatives.exact import pulled_back
from hvp._errors import ConvergenceWarning, HvpError
from hvp._laplace.outputs import Outputs
from hvp._laplace.posterior import Posterior
from hvp._laplace.targets import Targets
from hvp._runtime.user_warning import warn

# Precisions that are tried for validation data: powers of ten, and their number.
_GRID = -3, 6, 91
# How much the evidence may worsen the mean log-likelihood of training data without a warning.
_MOST_GROWTH = 0.5
# Precisions are searched within this factor of one.
_FARTHEST = 1e12


def maximize_evidence(posterior: Posterior, by: str, noise: bool) -> float:
    """Choose precisions, and the noise, by the evidence, and return its logarithm."""
    size, sizes = len(posterior.prior), posterior.sizes
    blocks = np.repeat(np.arange(len(sizes)), sizes)
    places = {"all": np.zeros(size, int), "block": blocks, "weight": np.arange(size)}[by]

    def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
        sigma = math.exp(at[-1]) if noise else posterior.noise
        value, each, of_noise = posterior.evidence(np.exp(at[places]), sigma)
        slope = np.bincount(places, each)
        return -value, -np.append(slope, of_noise) if noise else -slope

    start = np.log(np.maximum(posterior.prior, 1 / _FARTHEST))
    start = np.bincount(places, start) / np.bincount(places)
    start = np.append(start, math.log(posterior.noise)) if noise else start
    ends = -math.log(_FARTHEST), math.log(_FARTHEST)
    found = scipy.optimize.minimize(
        negative, start, jac=True, method="L-BFGS-B", bounds=[ends] * len(start)
    )
    posterior.prior = np.exp(found.x[places])
    if noise:
        posterior.noise = math.exp(found.x[-1])
    return -float(found.fun)


def validate(posterior: Posterior, outputs: Outputs, targets: Targets, x: Any, y: Any) -> float:
    """Choose a precision for all weights by the likelihood of validation data."""
    convert_batch((x, y), "the data")  # as many targets as inputs
    grid, scaled = np.logspace(*_GRID), posterior.scale * posterior.matrix.scales()
    start, losses = 0, np.zeros(len(grid))
    is_last = outputs.features is not None and posterior.output_variances() is not None
    for part, mean in outputs.pieces(x, has_rows=not is_last):
        if is_last:
            features = outputs.features_for(part)
            variances = (posterior.output_variances(value)(features) for value in grid)
        else:
            squares = posterior.rotate(outputs.rows(part)) ** 2
            variances = (squares @ (1 / (scaled + value)) for value in grid)
        own = rows_of(y, start, start + len(mean))
        for place, variance in enumerate(variances):
            shaped = variance.reshape(mean.shape)
            losses[place] += len(mean) * targets.predictive(mean, shaped, own, posterior.noise)
        start += len(mean)
    if not np.isfinite(losses).any():
        raise HvpError("no prediction has a finite likelihood", "targets as in the training")
    best = int(np.nanargmin(losses))
    posterior.prior = np.full_like(posterior.prior, grid[best])
    if best == len(grid) - 1:
        warn(
            f"hvp.Laplace: predictions are best with the prior precision {grid[best]:.0e}, the "
            "largest that is tried, and so with no uncertainty. Either the model is as sure as "
            "it should be, or these are data that it was trained on, or too much like them",
            ConvergenceWarning,
        )
    return float(losses[best] / start)


def refuse_distance(
    posterior: Posterior, outputs: Outputs, targets: Targets, pairs: Iterable[tuple[Any, Any]]
) -> None:
    """Refuse weights that are not near the maximum of the posterior of these examples."""
    weights = posterior.weights

    def slope_of(x: Any, y: Any) -> np.ndarray:
        """Return the gradient of the sum of the losses of a batch."""
        inputs = convert_batch((x,), "x")
        slopes = pulled_back(lambda: targets.loss(outputs.of(inputs), y), weights.nest.variables)
        own = weights.space.join([tf.convert_to_tensor(part) for part in slopes])
        return inputs.examples * own.numpy()

    slope: Any = sum(slope_of(x, y) for x, y in pairs)
    slope, values = posterior.rotate([slope, weights.flat()])
    precision, effective = posterior.precisions(), posterior.effective()
    squared = np.sum((slope / posterior.noise**2 + posterior.prior * values) ** 2 / precision)
    if squared > effective:
        raise HvpError(
            "the weights are not at the maximum of the posterior for the prior precision "
            f"{posterior.shown_prior()}: that is {math.sqrt(squared):.3g} standard deviations of "
            f"the posterior away, and may be {math.sqrt(effective):.3g}",
            "weights that were trained with this prior until they converged",
            "pass data that were not trained on, tune_prior_precision((x, y)); or train with "
            "the penalties that weight_decay() returns, to the end: "
            "hvp.minimize(hvp.HessianOperator.from_keras(model, data))",
        )


def warn_of_caution(
    posterior: Posterior, targets: Targets, mean: np.ndarray, variance: np.ndarray, y: Any
) -> None:
    """Warn if training data are less likely than they can be where the loss is quadratic."""
    alone, averaged = (
        targets.predictive(mean, v, y, posterior.noise) for v in (0 * mean, variance)
    )
    most = posterior.effective() / (2 * posterior.count)
    if averaged - alone > min(most, _MOST_GROWTH):
        warn(
            "hvp.Laplace: the evidence chose a prior with which predictions are too cautious. "
            f"The mean negative log-likelihood of training data is {averaged:.3g}, and "
            f"{alone:.3g} with the weights alone; a quadratic loss would allow a growth of "
            f"{most:.3g}, and {_MOST_GROWTH} is much. Pass data that were not trained on: "
            "tune_prior_precision((x, y))",
            ConvergenceWarning,
        )
