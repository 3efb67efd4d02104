"""Distributions of targets, given predictions: what Fisher matrices are expectations over.

Each is an exponential family whose natural parameters are the predictions, so that its Fisher
matrix is the Hessian of the negative log-likelihood, whatever the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Likelihood:
    """A distribution of the targets of one prediction, with independent entries.

    `prepare` computes what `multiply` needs of the predictions: here the variances of the targets.
    `scores` draws targets, and returns the gradients of their log-likelihoods; it takes the
    predictions, their shape preceded by the number of draws, and a seed of two integers.
    """

    prepare: Callable[[tf.Tensor], Any]
    scores: Callable[[tf.Tensor, Any, tf.Tensor], tf.Tensor]

    def multiply(self, prepared: Any, tangents: tf.Tensor) -> tf.Tensor:
        """Multiply by the Fisher matrix in the predictions."""
        return prepared * tangents

    def root(self, prepared: Any) -> tf.Tensor:
        """Return vectors whose outer products add up to the Fisher matrix of each prediction.

        A prediction is a position along all axes but the last. The result is shaped like the
        predictions, preceded by the number of vectors.
        """
        axes = len(prepared.shape) - 1
        if axes == 0:
            return tf.sqrt(prepared)[tf.newaxis]
        size = tf.shape(prepared)[-1]
        unit = tf.reshape(tf.eye(size, dtype=prepared.dtype), [size, *[1] * axes, size])
        return unit * tf.sqrt(prepared)

    def outer(self, scores: tf.Tensor, tangents: tf.Tensor) -> tf.Tensor:
        """Multiply by the mean, over draws, of the outer products of scores.

        Products of different entries are zero on average where entries are independent, and are
        left out.
        """
        return tf.reduce_mean(scores**2, axis=0) * tangents


class Categorical(Likelihood):
    """Classes, whose logits are the last axis of the predictions."""

    def multiply(self, prepared: tf.Tensor, tangents: tf.Tensor) -> tf.Tensor:
        mean = tf.reduce_sum(prepared * tangents, axis=-1, keepdims=True)
        return prepared * (tangents - mean)

    def root(self, prepared: tf.Tensor) -> tf.Tensor:
        # diag(p) - p p^T is the sum over classes of p_c (e_c - p) (e_c - p)^T.
        axes = len(prepared.shape) - 1
        unit = tf.eye(tf.shape(prepared)[-1], dtype=prepared.dtype)
        probabilities = tf.transpose(prepared, [axes, *range(axes)])[..., tf.newaxis]
        units = tf.reshape(unit, [tf.shape(unit)[0], *[1] * axes, tf.shape(unit)[0]])
        return tf.sqrt(probabilities) * (units - prepared)

    def outer(self, scores: tf.Tensor, tangents: tf.Tensor) -> tf.Tensor:
        along = tf.reduce_sum(scores * tangents, axis=-1, keepdims=True)
        return tf.reduce_mean(scores * along, axis=0)


def _categorical(predictions: tf.Tensor, shape: Any, seed: tf.Tensor) -> tf.Tensor:
    # The largest of logits with Gumbel noise is a draw.
    tiny = predictions.dtype.as_numpy_dtype(1e-30)
    uniform = tf.random.stateless_uniform(shape, seed, tiny, 1, predictions.dtype)
    classes = tf.argmax(predictions - tf.math.log(-tf.math.log(uniform)), axis=-1)
    drawn = tf.one_hot(classes, tf.shape(predictions)[-1], dtype=predictions.dtype)
    return drawn - tf.nn.softmax(predictions)


def _bernoulli(predictions: tf.Tensor, shape: Any, seed: tf.Tensor) -> tf.Tensor:
    uniform = tf.random.stateless_uniform(shape, seed, 0, 1, predictions.dtype)
    probability = tf.sigmoid(predictions)
    return tf.cast(uniform < probability, predictions.dtype) - probability


def _normal(predictions: tf.Tensor, shape: Any, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed, dtype=predictions.dtype)


def _poisson(predictions: tf.Tensor, shape: Any, seed: tf.Tensor) -> tf.Tensor:
    mean = tf.exp(predictions)
    return tf.random.stateless_poisson(shape, seed, mean, predictions.dtype) - mean


LIKELIHOODS: dict[str, Likelihood] = {
    # Zeros and ones; the predictions are the logits of ones.
    "bernoulli": Likelihood(lambda logits: tf.sigmoid(logits) * tf.sigmoid(-logits), _bernoulli),
    "categorical": Categorical(tf.nn.softmax, _categorical),
    # Normal errors, all of one variance; the predictions are the means.
    "gaussian": Likelihood(tf.ones_like, _normal),
    # Counts; the predictions are the logarithms of their means.
    "poisson": Likelihood(tf.exp, _poisson),
}
