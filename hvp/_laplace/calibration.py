"""How well predicted probabilities agree with what happened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special

from hvp._errors import HvpError, InvalidDataError
from hvp._runtime.arguments import check_count
from hvp._runtime.figures import COLOR, OTHER, axes

# Probabilities of one example add up to one up to this.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Calibration:
    """How well predicted probabilities agree with what happened.

    Attributes
    ----------
    error : float
        The expected calibration error: the mean difference between confidence and frequency over
        the bins, weighted by what is in them [Guo]_.
    log_loss : float
        The mean negative log-likelihood of the targets.
    accuracy : float
        How often the most probable class was the right one; NaN for intervals.
    confidence, frequency, count : ndarray
        For each bin that is not empty, the mean probability of the most probable class, how often
        it was right, and the number of examples. For intervals, the probability of each interval,
        the fraction of targets that were inside, and the number of targets.
    point : Calibration or None
        That of the point estimate, to compare with.

    References
    ----------
    .. [Guo] C. Guo et al., "On calibration of modern neural networks", ICML 2017.
       https://arxiv.org/abs/1706.04599
    """

    error: float
    log_loss: float
    accuracy: float
    confidence: np.ndarray
    frequency: np.ndarray
    count: np.ndarray
    point: Calibration | None = None

    def __repr__(self) -> str:
        rate = "" if math.isnan(self.accuracy) else f", accuracy {self.accuracy:.3f}"
        shown = f"error {self.error:.4f}, log loss {self.log_loss:.4f}{rate}"
        if self.point is None:
            return f"Calibration({shown})"
        before = f"{self.point.error:.4f} and {self.point.log_loss:.4f}"
        return f"Calibration({shown}; of the point estimate {before})"

    def plot(self, ax: Any = None) -> Any:
        """Draw the frequencies over the confidences: a reliability diagram.

        The area of a point is the share of the examples in its bin. Points under the dotted line
        are predictions that were too sure.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; by default a new figure.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        HvpError
            If matplotlib is not installed.
        """
        ax = axes(ax)
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, linestyle=":")
        pairs = [("Laplace", self, COLOR)]
        if self.point is not None:
            pairs.insert(0, ("point estimate", self.point, OTHER))
        for name, one, color in pairs:
            label = f"{name if len(pairs) > 1 else 'predictions'}: error {one.error:.3f}"
            # Areas that show how many examples there are, over a line that joins them.
            ax.plot(one.confidence, one.frequency, color=color, linewidth=1, alpha=0.6)
            sizes = 8 + 120 * one.count / one.count.sum()
            ax.scatter(one.confidence, one.frequency, sizes, color=color, label=label, zorder=3)
        ax.set(xlabel="predicted probability", ylabel="how often it was right", xlim=(0, 1.02))
        ax.set_ylim(0, 1.02)
        ax.set_title("Reliability diagram", loc="left")
        ax.legend(frameon=False, fontsize="small", loc="upper left")
        return ax


def calibration(
    probabilities: Any, y: Any, *, bins: int = 15, point: Calibration | None = None
) -> Calibration:
    """Compare predicted probabilities of classes with the classes that were observed.

    Parameters
    ----------
    probabilities : array_like
        Of each class, of shape `(examples, classes)`, or of one, of shape `(examples,)` or
        `(examples, 1)`.
    y : array_like
        The classes as integers, of shape `(examples,)` or `(examples, 1)`, or as unit vectors.
    bins : int, optional
        The number of bins of equal width between zero and one.
    point : Calibration, optional
        Of another model, to compare with.

    Returns
    -------
    Calibration

    Raises
    ------
    InvalidDataError
        If the shapes do not fit, or the numbers are not probabilities.

    Examples
    --------
    Four predictions, all with a probability of 0.75, of which three were right:

    >>> import hvp
    >>> p = [[0.75, 0.25]] * 4
    >>> hvp.calibration(p, [0, 0, 0, 1])
    Calibration(error 0.0000, log loss 0.5623, accuracy 0.750)
    """
    check_count(bins, "bins")
    p, labels = np.asarray(probabilities, np.float64), np.asarray(y)
    if p.ndim == 1 or p.shape[1:] == (1,):
        p = np.stack([1 - p.reshape(-1), p.reshape(-1)], axis=1)
    if labels.shape == p.shape and labels.ndim == 2:
        if not (((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all()):
            raise InvalidDataError("the rows of the classes are no unit vectors", "unit vectors")
        labels = labels.argmax(axis=1)
    if p.ndim != 2 or not len(p) or labels.reshape(-1).shape != (len(p),):
        raise InvalidDataError(
            f"the probabilities have shape {p.shape}, and the classes {np.shape(y)}",
            "shapes (examples, classes) and (examples,)",
        )
    labels = labels.reshape(-1)
    others = labels[labels != np.round(labels)]
    if len(others):
        raise InvalidDataError(f"there is a class {others[0]}", "integers")
    labels = labels.astype(int)
    if not ((p >= 0).all() and (np.abs(p.sum(axis=1) - 1) <= _ROUNDING).all()):
        raise InvalidDataError("the numbers are not probabilities", "rows that add up to one")
    wrong = labels[(labels < 0) | (labels >= p.shape[1])]
    if len(wrong):
        raise InvalidDataError(f"there is a class {wrong[0]}", f"0 to {p.shape[1] - 1}")
    each, right = p.max(axis=1), p.argmax(axis=1) == labels
    places = np.minimum((each * bins).astype(int), bins - 1)
    count = np.bincount(places, minlength=bins)
    kept = count > 0
    confidence = np.bincount(places, each, bins)[kept] / count[kept]
    frequency = np.bincount(places, right, bins)[kept] / count[kept]
    tiny = np.finfo(np.float64).tiny
    return Calibration(
        error=float(np.average(np.abs(confidence - frequency), weights=count[kept])),
        log_loss=float(-np.log(np.maximum(p[np.arange(len(p)), labels], tiny)).mean()),
        accuracy=float(right.mean()),
        confidence=confidence,
        frequency=frequency,
        count=count[kept],
        point=point,
    )


def of_intervals(
    mean: np.ndarray, variance: np.ndarray, y: Any, bins: int, point: Calibration | None = None
) -> Calibration:
    """Compare central intervals of normal predictions with how many targets are inside."""
    targets = np.asarray(y, np.float64)
    if targets.size != mean.size:
        raise HvpError(f"the targets have shape {targets.shape}", f"that of outputs, {mean.shape}")
    distance = np.abs(targets.reshape(mean.shape) - mean) / np.sqrt(variance)
    levels = (np.arange(bins) + 0.5) / bins
    inside = scipy.special.erf(distance / math.sqrt(2)).reshape(-1, 1) <= levels
    frequency = inside.mean(axis=0)
    log_loss = np.mean(distance**2 + np.log(2 * np.pi * variance)) / 2
    count = np.full(bins, mean.size)
    error = float(np.abs(frequency - levels).mean())
    return Calibration(error, float(log_loss), math.nan, levels, frequency, count, point)
