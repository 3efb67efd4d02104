"""`tf.math.cumulative_logsumexp` written with operations that have derivatives of every order."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def cumulative_logsumexp(
    x: tf.Tensor, axis: int, *, exclusive: bool = False, reverse: bool = False
) -> tf.Tensor:
    """Return logarithms of cumulative sums of exponentials.

    They are summed in steps that each double the number of summands, so that `n` entries take
    `log2(n)` steps.

    Parameters
    ----------
    x : tf.Tensor
        Real.
    axis, exclusive, reverse
        As in `tf.math.cumulative_logsumexp`.

    Returns
    -------
    tf.Tensor
        Shaped and typed like `x`.
    """
    rank = x.shape.rank
    with tf.name_scope("CumulativeLogsumexp"):
        last = [i for i in range(rank) if i != axis % rank] + [axis % rank]
        summed = tf.transpose(x, last)
        if reverse:
            summed = tf.reverse(summed, [-1])
        if exclusive:
            nothing = tf.fill(tf.shape(summed[..., :1]), tf.constant(-float("inf"), x.dtype))
            summed = tf.concat([nothing, summed[..., :-1]], -1)
        summed = _cumulative(summed)
        if reverse:
            summed = tf.reverse(summed, [-1])
        back = [last.index(i) for i in range(rank)]
        return tf.ensure_shape(tf.transpose(summed, back), x.shape)


def _cumulative(y: tf.Tensor) -> tf.Tensor:
    """Sum along the last axis."""

    def doubled(count: Any, y: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """From sums of `count` entries (or all before) to sums of twice as many."""
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
