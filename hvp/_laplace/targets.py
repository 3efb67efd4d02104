"""What a Laplace approximation knows of each kind of targets: their loss, and their predictions."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
import tensorflow as tf

from hvp._errors import HvpError

# The factor in MacKay's approximation of the mean of a sigmoid.
_PROBIT = np.pi / 8


class Targets(abc.ABC):
    """A distribution of targets given the outputs of a model, as a mean loss over examples."""

    # What `FisherOperator` calls it; None for a loss of the caller.
    likelihood: str | None = None

    @abc.abstractmethod
    def loss(self, outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Return the mean, over examples, of the negative log-likelihood up to a constant."""

    def constant(self, y: np.ndarray) -> float:
        """Return what the sum of the negative log-likelihoods has beside that."""
        del y
        return 0.0

    @abc.abstractmethod
    def mean(self, outputs: np.ndarray) -> np.ndarray:
        """Return the means of targets."""

    def averaged(self, outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """Return about the mean of `mean` over normal outputs with a diagonal covariance."""
        return self.mean(self.flattened(outputs, variance))

    def predictive(
        self, outputs: np.ndarray, variance: np.ndarray, y: Any, noise: float = 1.0
    ) -> float:
        """Return about the mean negative log-likelihood of targets under these normal outputs."""
        del noise
        changed = tf.constant(self.flattened(outputs, variance))
        return float(self.loss(changed, tf.convert_to_tensor(y)))

    def flattened(self, outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """Return the outputs whose distribution is about the mean of those of normal outputs."""
        del outputs, variance
        raise HvpError(
            "the predictions of a loss of the caller are not known",
            "one of the likelihoods with a name",
            "pass a name as likelihood",
        )


class CategoricalTargets(Targets):
    """Classes, of which the outputs are the logits."""

    likelihood = "categorical"

    def loss(self, outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if y.shape.rank == outputs.shape.rank and y.shape[-1] == outputs.shape[-1]:
            each = tf.nn.softmax_cross_entropy_with_logits(tf.cast(y, outputs.dtype), outputs)
        else:
            labels = tf.reshape(tf.cast(y, tf.int32), tf.shape(outputs)[:-1])
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
        return _per_example(each, outputs)

    def mean(self, outputs: np.ndarray) -> np.ndarray:
        return scipy.special.softmax(outputs, axis=-1)

    def flattened(self, outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return outputs / np.sqrt(1 + _PROBIT * variance)


class BernoulliTargets(Targets):
    """Zeros and ones, of which the outputs are the logits."""

    likelihood = "bernoulli"

    def loss(self, outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        labels = tf.reshape(tf.cast(y, outputs.dtype), tf.shape(outputs))
        each = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=outputs)
        return _per_example(each, outputs)

    def mean(self, outputs: np.ndarray) -> np.ndarray:
        return scipy.special.expit(outputs)

    def flattened(self, outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return outputs / np.sqrt(1 + _PROBIT * variance)


class PoissonTargets(Targets):
    """Counts, of whose means the outputs are the logarithms."""

    likelihood = "poisson"

    def loss(self, outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        counts = tf.reshape(tf.cast(y, outputs.dtype), tf.shape(outputs))
        return _per_example(tf.exp(outputs) - counts * outputs, outputs)

    def constant(self, y: np.ndarray) -> float:
        return float(scipy.special.gammaln(np.asarray(y, np.float64) + 1).sum())

    def mean(self, outputs: np.ndarray) -> np.ndarray:
        return np.exp(outputs)

    def flattened(self, outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return outputs + variance / 2


class GaussianTargets(Targets):
    """Numbers with normal errors, of which the outputs are the means, in units of the noise."""

    likelihood = "gaussian"

    def loss(self, outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        targets = tf.reshape(tf.cast(y, outputs.dtype), tf.shape(outputs))
        return _per_example((outputs - targets) ** 2 / 2, outputs)

    def mean(self, outputs: np.ndarray) -> np.ndarray:
        return outputs

    def averaged(self, outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
        del variance
        return outputs

    def predictive(
        self, outputs: np.ndarray, variance: np.ndarray, y: Any, noise: float = 1.0
    ) -> float:
        total = variance + noise**2
        squares = (outputs - np.reshape(y, outputs.shape)) ** 2
        return float(np.mean(squares / total + np.log(2 * np.pi * total)) / 2)


class OwnTargets(Targets):
    """Targets of a loss of the caller, of which nothing else is known."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss

    def loss(self, outputs: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return self._loss(outputs, y)

    def mean(self, outputs: np.ndarray) -> np.ndarray:
        return outputs

    def averaged(self, outputs: np.ndarray, variance: np.ndarray) -> np.ndarray:
        del variance
        return outputs


TARGETS: dict[str, Targets] = {
    one.likelihood: one
    for one in (CategoricalTargets(), BernoulliTargets(), PoissonTargets(), GaussianTargets())
    if one.likelihood
}


def _per_example(each: tf.Tensor, outputs: tf.Tensor) -> Any:
    return tf.reduce_sum(each) / tf.cast(tf.shape(outputs)[0], outputs.dtype)
