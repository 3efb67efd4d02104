"""What a Laplace approximation knows of each kind of targets: their loss, and their predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special
import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError

# The factor in MacKay's approximation of the mean of a sigmoid.
_PROBIT = np.pi / 8
# Variances of logits are not taken for smaller than this part of the largest.
_ROUNDING = 1e-12


# Of each likelihood, which targets there are.
_POSSIBLE: dict[Any, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "categorical": (lambda y: y == np.round(y), "classes as integers"),
    "bernoulli": (lambda y: (y >= 0) & (y <= 1), "numbers from 0 to 1"),
    "poisson": (lambda y: y >= 0, "counts"),
}


@dataclass(frozen=True)
class Targets:
    """A distribution of targets given the outputs of a model.

    Attributes
    ----------
    likelihood : str or None
        What `FisherOperator` calls it; None for a loss of the caller.
    loss : callable
        The mean over examples of the negative log-likelihood of targets; for normal ones with the
        variance one, up to a constant.
    mean : callable
        The means of targets, given outputs.
    flattened : callable or None
        Of normal outputs and their variances, the outputs whose distribution is about the mean of
        theirs; None if that is not known.
    """

    likelihood: str | None
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    mean: Callable[[np.ndarray], np.ndarray] = np.asarray
    flattened: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None

    def check(self, y: Any) -> None:
        """Refuse targets that the likelihood gives no probability."""
        values = np.asarray(y)
        if self.likelihood not in _POSSIBLE or values.dtype.kind not in "fiub":
            return
        is_possible, expected = _POSSIBLE[self.likelihood]
        wrong = values[~is_possible(values)]
        if len(wrong):
            raise InvalidDataError(f"there is a target {wrong[0]:g}", expected)

    def multiple(self, shape: Sequence[int]) -> float:
        """Return how much larger `loss` is than that of Keras, for outputs of a shape.

        Keras averages over outputs and positions as well.
        """
        size = math.prod(shape)
        sizes = {"bernoulli": size, "gaussian": size / 2, "categorical": math.prod(shape[:-1])}
        return float(sizes.get(self.likelihood or "", 1))

    @property
    def is_gaussian(self) -> bool:
        """Whether targets have normal errors, whose size is not part of the loss."""
        return self.likelihood == "gaussian"

    def averaged(self, outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """Return about the mean of `mean` over normal outputs with a diagonal covariance."""
        return self.mean(outputs if self.flattened is None else self.flattened(outputs, variance))

    def predictive(self, outputs: np.ndarray, variance: np.ndarray, y: Any, noise: float) -> float:
        """Return about the mean negative log-likelihood of targets under these normal outputs."""
        if self.is_gaussian:
            total = variance + noise**2
            squares = (outputs - np.reshape(y, outputs.shape)) ** 2
            return float(np.mean(squares / total + np.log(2 * np.pi * total)) / 2)
        if self.flattened is None:
            raise HvpError(
                "the predictions of a loss of the caller are not known",
                "one of the likelihoods with a name",
                "pass a name as likelihood",
            )
        changed = tf.constant(self.flattened(outputs, variance))
        return float(self.loss(changed, tf.convert_to_tensor(y)))


def bridged(mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return the means of the Dirichlet distributions that normal logits are closest to.

    The logits are first restricted to those whose sum is zero, which changes no probability.
    """
    if mean.ndim != 2:
        raise HvpError(
            f"the outputs have shape {mean.shape}", "one vector of logits for each input"
        )
    sums = covariance.sum(axis=2)
    total = sums.sum(axis=1, keepdims=True)
    total[total == 0] = 1  # logits whose sum is zero anyway
    mean = mean - sums * mean.sum(axis=1, keepdims=True) / total
    variance = np.diagonal(covariance, axis1=1, axis2=2) - sums**2 / total
    largest = variance.max(axis=1, keepdims=True)
    variance = np.maximum(variance, _ROUNDING * largest + (largest == 0))
    classes = mean.shape[1]
    others = scipy.special.logsumexp(-mean, axis=1, keepdims=True)
    counts = (1 - 2 / classes + np.exp(mean + others) / classes**2) / variance
    # Of certain logits, the probabilities are known.
    return np.where(largest == 0, _softmax(mean), counts / counts.sum(axis=1, keepdims=True))


def _categorical(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    if y.shape.rank == outputs.shape.rank and y.shape[-1] == outputs.shape[-1]:
        each = tf.nn.softmax_cross_entropy_with_logits(tf.cast(y, outputs.dtype), outputs)
    else:
        labels = tf.reshape(tf.cast(y, tf.int32), tf.shape(outputs)[:-1])
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
    return _per_example(each, outputs)


def _bernoulli(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    labels = _shaped(y, outputs)
    each = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=outputs)
    return _per_example(each, outputs)


def _poisson(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    counts = _shaped(y, outputs)
    return _per_example(tf.exp(outputs) - counts * outputs + tf.math.lgamma(counts + 1), outputs)


def _gaussian(outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return _per_example((outputs - _shaped(y, outputs)) ** 2 / 2, outputs)


def _shaped(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(y, outputs.dtype), tf.shape(outputs))


def _per_example(each: tf.Tensor, outputs: tf.Tensor) -> Any:
    return tf.reduce_sum(each) / tf.cast(tf.shape(outputs)[0], outputs.dtype)


def _softmax(outputs: np.ndarray) -> np.ndarray:
    return scipy.special.softmax(outputs, axis=-1)


def _probit(outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
    return outputs / np.sqrt(1 + _PROBIT * variance)


def _of_exponentials(outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
    return outputs + variance / 2


# The outputs are the logits of classes, the logits of ones, logarithms of means, and means.
TARGETS = {
    "categorical": Targets("categorical", _categorical, _softmax, _probit),
    "bernoulli": Targets("bernoulli", _bernoulli, scipy.special.expit, _probit),
    "poisson": Targets("poisson", _poisson, np.exp, _of_exponentials),
    "gaussian": Targets("gaussian", _gaussian),
}
