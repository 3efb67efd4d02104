"""`tf.math.cumulative_logsumexp` written with operations that have derivatives of every order."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def cumulative_logsumexp(
    x: tf.Tensor, axis: int, *, exclusive: bool = False, reverse: bool = False
) -> tf.Tensor:
    """Return logarithms of cumulative sums of exponentials, like `tf.math.cumulative_logsumexp`.

    The rank of `x` has to be known. Each step doubles the number of summands, so that `n` entries
    take about `log2(n)` steps: if ``y[i]`` is the logarithm of the sum over the last ``c`` entries
    up to ``i``, that over ``2 c`` entries is ``logsumexp(y[i], y[i - c])``.
    """
    rank = x.shape.rank
    with tf.name_scope("CumulativeLogsumexp"):
        axis_last = [i for i in range(rank) if i != axis % rank] + [axis % rank]
        summed = tf.transpose(x, axis_last)
        if reverse:
            summed = tf.reverse(summed, [-1])
        if exclusive:
            empty = tf.fill(tf.shape(summed[..., :1]), tf.constant(-float("inf"), x.dtype))
            summed = tf.concat([empty, summed[..., :-1]], -1)
        summed = _cumulative(summed)
        if reverse:
            summed = tf.reverse(summed, [-1])
        inverse = [axis_last.index(i) for i in range(rank)]
        return tf.ensure_shape(tf.transpose(summed, inverse), x.shape)


def _cumulative(y: tf.Tensor) -> tf.Tensor:
    """Return logarithms of cumulative sums along the last axis."""

    def doubled(count: Any, y: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Turn sums of `count` entries (fewer at the beginning) into sums of twice as many."""
        both = tf.stack([y[..., count:], y[..., : tf.shape(y)[-1] - count]])
        return 2 * count, tf.concat([y[..., :count], tf.reduce_logsumexp(both, 0)], -1)

    size = y.shape[-1]
    if size is None:
        return tf.while_loop(
            lambda count, y: count < tf.shape(y)[-1],
            doubled,
            [tf.constant(1), y],
            shape_invariants=[tf.TensorShape([]), y.shape],
        )[1]
    count = 1
    while count < size:
        count, y = doubled(count, y)
    return y
