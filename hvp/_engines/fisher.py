"""Rules of Fisher matrices.

The loss is the mean of `loss_i` over examples, with the gradients `g_i` in the variables. The
empirical Fisher matrix is the mean of `g_i g_i^T`. As `g_i = J_i^T r_i`, where `J_i` is the
Jacobian of the predictions for one example and `r_i` the gradient of its loss in them, a product
needs no gradient of a single example: it is the mean of `J_i^T r_i (r_i . J_i v)`.

The Fisher matrix itself is the expectation of this over targets drawn from the model's own
distribution. Where the loss is the negative log-likelihood of a distribution of `likelihoods`,
times a constant `c`, it is `J^T (c F) J` with `F` in closed form, or by drawing targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._engines.likelihoods import LIKELIHOODS, Likelihood
from hvp._engines.prediction_rule import Output, PredictionRule
from hvp._engines.rule import Parts
from hvp._errors import HvpError, InvalidLossError
from hvp._graphs.refusals import refuse_unless

# What the test vectors of `c` are drawn from.
_PROBE_SEED = (17, 29)


@dataclass(frozen=True)
class EmpiricalFisherRule(PredictionRule):
    """The mean of `g_i g_i^T` over examples, where `g_i` are the gradients of their losses."""

    is_positive_semidefinite = True

    def prepare(self, output: Output) -> tuple[Parts, tf.Tensor]:
        return output.taped.outputs, self.count(output)

    def curve(self, prepared: tuple[Parts, tf.Tensor], tangents: Parts) -> Parts:
        gradients, count = prepared
        along = [
            tf.reduce_sum(g * t, axis=range(1, len(g.shape)))
            for g, t in zip(gradients, tangents)
            if not (g is None or t is None)
        ]
        if not along:
            return [None] * len(gradients)
        scale = count * tf.add_n(along)
        return [g if g is None else _times_rows(scale, g) for g in gradients]


@dataclass(frozen=True)
class FisherRule(PredictionRule):
    """The Fisher matrix of a loss that is a negative log-likelihood times a constant.

    `likelihoods` names one distribution for each tensor of the predictions, or one for all of them.
    `samples` targets are drawn for each prediction; 0 takes their expectation instead. The draws
    depend on the data and on `seed`, an int or an int32 variable.
    """

    likelihoods: Sequence[str]
    samples: int = 0
    seed: Any = 0
    is_positive_semidefinite = True

    def prepare(self, output: Output) -> list[tuple[Likelihood, Any, tf.Tensor]]:
        self.count(output)
        predictions = output.predictions
        names = list(self.likelihoods) * (len(predictions) if len(self.likelihoods) == 1 else 1)
        if len(names) != len(predictions):
            raise HvpError(
                f"{len(names)} likelihoods are named for {len(predictions)} predictions",
                "one for each of them, or one for all",
            )
        families = [LIKELIHOODS[name] for name in names]
        known = [family.prepare(part) for family, part in zip(families, predictions)]
        constants = self._constants(output, names, families, known)
        if not self.samples:
            return list(zip(families, known, constants))
        drawn = []
        for index, (family, part) in enumerate(zip(families, predictions)):
            shape = tf.concat([[self.samples], tf.shape(part)], axis=0)
            drawn.append(family.scores(part, shape, self.seed_of(output, index)))
        return list(zip(families, drawn, constants))

    def seed_of(self, output: Output, index: int) -> tf.Tensor:
        """Return the seed for the draws of a tensor of the predictions for a batch."""
        return tf.stack([self.seed + 101 * index, output.batch.call(_checksum)])

    def curve(self, prepared: list[tuple[Likelihood, Any, tf.Tensor]], tangents: Parts) -> Parts:
        products = []
        for (family, known, constant), tangent in zip(prepared, tangents):
            multiply = family.outer if self.samples else family.multiply
            products.append(tangent if tangent is None else constant * multiply(known, tangent))
        return products

    def _constants(
        self,
        output: Output,
        names: Sequence[str],
        families: Sequence[Likelihood],
        known: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Find `c` for each tensor of the predictions, from the product with one vector."""
        vectors = [
            tf.random.stateless_normal(tf.shape(part), _PROBE_SEED, dtype=part.dtype)
            for part in output.predictions
        ]
        products = output.taped.vjp(vectors)
        constants = []
        for family, prepared, v, product, name in zip(families, known, vectors, products, names):
            fisher = family.multiply(prepared, v)
            if product is None:
                product = tf.zeros_like(fisher)
            c = tf.math.divide_no_nan(tf.reduce_sum(v * product), tf.reduce_sum(v * fisher))
            agree = output.are_close([product], [c * fisher], c * tf.norm(v))
            refuse_unless(agree & (c >= 0), _another_loss(name))
            constants.append(c)
        return constants


def _another_loss(likelihood: str) -> HvpError:
    return InvalidLossError(
        "the Hessian of the output loss with respect to the predictions is not a positive multiple "
        f"of the Fisher matrix of a {likelihood} distribution",
        "the mean of its negative log-likelihood, with the same weight for all examples",
        "pass another likelihood, or use hvp.GaussNewtonOperator, which takes any output loss",
    )


def _times_rows(scale: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    return tf.reshape(scale, [-1, *[1] * (len(rows.shape) - 1)]) * rows


def _checksum(*elements: Any) -> tf.Tensor:
    """Return an integer that depends on the data."""
    total = tf.constant(0, tf.int32)
    for tensor in tf.nest.flatten(elements, expand_composites=True):
        if tensor.dtype == tf.string:
            tensor = tf.strings.to_hash_bucket_fast(tensor, 2**31 - 1)
        elif tensor.dtype.is_floating:
            tensor = tf.bitcast(tf.cast(tensor, tf.float32), tf.int32)
        total += tf.reduce_sum(tf.cast(tensor, tf.int32))
    return total
