"""Vectors whose outer products add up to the matrix `B` of each example's predictions.

With the Jacobian `J_n` of an example, the curvature is the mean of `J_n^T B_n J_n`. If `B_n` is the
sum of `s s^T` over some vectors `s`, this is the mean of the sums of `(J_n^T s) (J_n^T s)^T`, and
one backward pass for each `s` computes `J_n^T s` for all examples together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from hvp._engines.fisher import EmpiricalFisherRule, FisherRule
from hvp._engines.prediction_rule import Output, PredictionRule
from hvp._errors import HvpError, InvalidLossError
from hvp._graphs.refusals import refuse_unless
from hvp._graphs.vectorized import NotVectorizedError, vectorized

# Without a likelihood, the Hessian in the predictions of an example is written out up to this size.
_MOST_PREDICTIONS = 256
# Negative eigenvalues are zeros up to this part of the largest.
_ZEROS = {tf.float64: 1e-9}
_ZEROS_OTHERWISE = 1e-4


def roots(rule: PredictionRule, output: Output, signs: int) -> list[tf.Tensor]:
    """Return the vectors along a new first axis of each tensor of the predictions.

    The `rule` is that of a Fisher matrix, or of the Gauss-Newton matrix of any loss. Where an
    example has several predictions, `signs` random signs are drawn for each of them.
    """
    if isinstance(rule, EmpiricalFisherRule):
        gradients, count = rule.prepare(output)
        filled = _filled(gradients, output.predictions)
        scale = tf.sqrt(tf.cast(count, filled[0].dtype) * _examples(output))
        return [(tf.cast(scale, g.dtype) * g)[tf.newaxis] for g in filled]
    if isinstance(rule, FisherRule):
        return _of_likelihood(rule, output, signs)
    return _of_hessian(rule, output)


def _examples(output: Output) -> tf.Tensor:
    """Return the number of examples, which may differ from the number that the loss divides by."""
    first = output.predictions[0]
    return tf.cast(tf.shape(first)[0], first.dtype)


def _filled(parts: Sequence[tf.Tensor | None], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.zeros_like(t) if part is None else part for part, t in zip(parts, like)]


def _of_likelihood(rule: FisherRule, output: Output, signs: int) -> list[tf.Tensor]:
    prepared, count = rule.prepare(output), _examples(output)
    parts = []
    for index, (family, known, constant) in enumerate(prepared):
        vectors = known
        if not rule.samples:
            vectors = _signed(family.root(known), signs, rule.seed_of(output, index))
        scale = tf.cast(count, constant.dtype) * constant / max(1, rule.samples)
        parts.append(tf.sqrt(tf.cast(scale, vectors.dtype)) * vectors)
    return parts if rule.samples else _alone(parts)


def _signed(vectors: tf.Tensor, draws: int, seed: tf.Tensor) -> tf.Tensor:
    """Multiply each prediction of an example by random signs of its own.

    The predictions of a sequence have no curvature between them. One backward pass serves all of
    them if the products of two different ones are zero on average.
    """
    if len(vectors.shape) <= 3:
        return vectors
    repeated = tf.repeat(vectors, draws, axis=0) / tf.sqrt(tf.cast(draws, vectors.dtype))
    signs = tf.random.stateless_uniform(tf.shape(repeated)[:-1], seed)
    return repeated * tf.cast(tf.sign(signs - 0.5), vectors.dtype)[..., tf.newaxis]


def _alone(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenate the vectors of several predictions, padded with zeros for the others."""
    counts = [tf.shape(part)[0] for part in parts]
    padded = []
    for index, part in enumerate(parts):
        before, after = sum(counts[:index]), sum(counts[index + 1 :])
        paddings = [[before, after], *[[0, 0]] * (len(part.shape) - 1)]
        padded.append(part if len(parts) == 1 else tf.pad(part, paddings))
    return padded


def _of_hessian(rule: PredictionRule, output: Output) -> list[tf.Tensor]:
    """Factor the Hessian of the loss with respect to the predictions of each example."""
    predictions = output.predictions
    shapes = [part.shape[1:] for part in predictions]
    sizes = [shape.num_elements() for shape in shapes]
    if None in sizes or sum(sizes) > _MOST_PREDICTIONS:
        raise HvpError(
            f"an example has {'too many' if None in sizes else sum(sizes)} predictions, and the "
            "distribution of its targets is not known",
            f"a likelihood, or at most {_MOST_PREDICTIONS} predictions",
            "pass hvp.KFAC or hvp.EKFAC likelihood='categorical', 'bernoulli', 'gaussian' or "
            "'poisson' if the loss is its negative log-likelihood, with fisher='monte-carlo' where "
            "classes are many; or fisher='empirical'",
        )
    rule.count(output)  # which refuses a loss that is not a mean
    count = _examples(output)
    dtype, total = predictions[0].dtype, sum(sizes)

    def multiply(unit: tf.Tensor) -> tf.Tensor:
        pieces = tf.split(unit, sizes)
        vectors = [
            tf.zeros_like(p) + tf.cast(tf.reshape(u, s), p.dtype)
            for p, u, s in zip(predictions, pieces, shapes)
        ]
        products = _filled(output.taped.vjp(vectors), predictions)
        rows = [tf.reshape(tf.cast(p, dtype), [-1, size]) for p, size in zip(products, sizes)]
        return tf.concat(rows, axis=1)

    units = tf.eye(total, dtype=dtype)
    columns = None
    with contextlib.suppress(NotVectorizedError):
        columns = vectorized(multiply, units)
    if columns is None:
        columns = tf.map_fn(multiply, units)
    wide = tf.cast(tf.transpose(columns, [1, 0, 2]), tf.float32 if dtype.size < 4 else dtype)
    hessian = tf.cast(count, wide.dtype) * (wide + tf.linalg.matrix_transpose(wide)) / 2
    values, vectors = tf.linalg.eigh(hessian)
    largest = tf.reduce_max(tf.abs(values))
    least = _ZEROS.get(dtype, _ZEROS_OTHERWISE) * largest
    refuse_unless(
        (tf.reduce_min(values) >= -least) | ~tf.math.is_finite(largest),
        InvalidLossError(
            "the output loss is not convex in the predictions, so that its curvature is not a mean "
            "of outer products",
            "a convex output loss",
            "pass fisher='empirical', or another loss",
        ),
    )
    scaled = tf.cast(vectors * tf.sqrt(tf.maximum(values, 0))[:, tf.newaxis], dtype)
    pieces = tf.split(tf.transpose(scaled, [2, 0, 1]), sizes, axis=2)
    return [
        tf.cast(tf.reshape(piece, [total, -1, *shape]), p.dtype)
        for piece, shape, p in zip(pieces, shapes, predictions)
    ]
