"""`tf.math.cumulative_logsumexp` with right derivatives of every order.

TensorFlow's gradient of it takes logarithms of the upstream gradient, `dy`, in its positive and
its negative part apart. To first order that is right. Its derivative by `dy` is lost, or NaN, where
`dy` is zero: so are the products of a least squares fit at its solution, and every `jvp`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_original = tf.math.cumulative_logsumexp


def cumulative_logsumexp(
    x: Any, axis: Any = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
) -> tf.Tensor:
    """Logarithms of cumulative sums of exponentials, as TensorFlow gives them but for rounding.

    In steps that each double the number of summands: the logarithm of `n`, for `n` entries.

    Parameters
    ----------
    x, axis, exclusive, reverse, name
        As in `tf.math.cumulative_logsumexp`.

    Returns
    -------
    tf.Tensor
        Shaped and typed like `x`.
    """
    x = tf.convert_to_tensor(x)
    axis = tf.get_static_value(axis)
    rank = x.shape.rank
    if not x.dtype.is_floating or axis is None or rank is None or not -rank <= axis < rank:
        return _original(x, axis, exclusive, reverse, name)
    with tf.name_scope(name or "CumulativeLogsumexp"):
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
