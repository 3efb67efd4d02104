"""`tf.nn.ctc_loss` with derivatives of every order.

TensorFlow computes the connectionist temporal classification loss together with its gradient, in a
kernel that has no second derivative. This module writes the forward recursion of Graves et al.
(ICML 2006, https://doi.org/10.1145/1143844.1143891) with differentiable operations. The states
``s = 0, ..., 2 L`` of a sequence of ``L`` labels are the labels with blanks before, between and
after them. Let ``e[t, s]`` be the log-probability that the label of state ``s`` is emitted at time
``t``, and ``a[t, s]`` that of all paths that are in state ``s`` at time ``t``. Then::

    a[0, s] = e[0, s]  for s < 2,  -inf otherwise
    a[t, s] = e[t, s] + logsumexp(a[t-1, s], a[t-1, s-1], a[t-1, s-2])

The third term is present only if state ``s`` is a label that differs from that of state ``s - 2``,
because the blank between two different labels may be left out. A path ends in the last label or the
last blank at the last time ``T``, so that the loss is ``-logsumexp(a[T, 2 L], a[T, 2 L - 1])``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_original_of_version_1 = tf.compat.v1.nn.ctc_loss
# The logarithm of probability zero. It is finite because derivatives at -inf would be NaN.
_IMPOSSIBLE = -1e30


def ctc_loss(
    labels: Any,
    logits: Any,
    label_length: Any,
    logit_length: Any,
    logits_time_major: bool = True,
    unique: Any = None,
    blank_index: int | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Return what `tf.nn.ctc_loss` returns; `unique`, which only saves time there, is unused."""
    del unique
    with tf.name_scope(name or "ctc_loss"):
        logits = tf.convert_to_tensor(logits)
        if isinstance(labels, tf.SparseTensor):
            if blank_index is None:
                raise ValueError("Argument `blank_index` must be provided when labels is sparse.")
            batch = tf.shape(logits)[1 if logits_time_major else 0]
            labels, label_length = _dense_labels(labels, batch)
        logits = logits if logits_time_major else tf.transpose(logits, [1, 0, 2])
        return _loss(labels, logits, label_length, logit_length, blank_index or 0)


def ctc_loss_of_version_1(
    labels: Any,
    inputs: Any = None,
    sequence_length: Any = None,
    preprocess_collapse_repeated: bool = False,
    ctc_merge_repeated: bool = True,
    ignore_longer_outputs_than_inputs: bool = False,
    time_major: bool = True,
    logits: Any = None,
) -> tf.Tensor:
    """Return what `tf.compat.v1.nn.ctc_loss` returns, for which the last class is blank."""
    if preprocess_collapse_repeated or not ctc_merge_repeated or ignore_longer_outputs_than_inputs:
        return _original_of_version_1(
            labels,
            inputs,
            sequence_length,
            preprocess_collapse_repeated,
            ctc_merge_repeated,
            ignore_longer_outputs_than_inputs,
            time_major,
            logits,
        )
    values = inputs if logits is None else logits
    return ctc_loss(labels, values, None, sequence_length, time_major, blank_index=-1)


def _dense_labels(labels: tf.SparseTensor, batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return sparse labels as a dense matrix, and the length of each row."""
    rows = labels.indices[:, 0]
    lengths = tf.math.unsorted_segment_sum(tf.ones_like(rows, tf.int32), rows, batch)
    return tf.sparse.to_dense(labels), lengths


def _loss(
    labels: Any, logits: tf.Tensor, label_length: Any, logit_length: Any, blank: int
) -> tf.Tensor:
    """Return the loss for dense labels and time-major logits."""
    dtype = logits.dtype
    wide = tf.cast(logits, tf.float32) if dtype.size < 4 else logits
    labels = tf.cast(labels, tf.int32)
    label_length, logit_length = (tf.cast(n, tf.int32) for n in (label_length, logit_length))
    classes = tf.shape(logits)[2]
    blank = blank + classes if blank < 0 else tf.constant(blank)
    # Blanks stand before, between and after the labels. States beyond the length of a sequence are
    # computed too, but no path from them leads to its end.
    batch, longest = tf.unstack(tf.shape(labels))
    pairs = tf.stack([tf.fill([batch, longest], blank), labels], axis=2)
    states = tf.concat([tf.reshape(pairs, [batch, 2 * longest]), tf.fill([batch, 1], blank)], 1)
    impossible = tf.constant(_IMPOSSIBLE, wide.dtype)
    # Whether the blank before a label may be left out.
    differs = tf.logical_and(states != blank, states != _shifted(states, 2, blank))
    by_batch = tf.transpose(tf.nn.log_softmax(wide), [1, 0, 2])
    # Padding may contain labels that are not classes.
    valid = tf.clip_by_value(states, 0, classes - 1)
    emissions = tf.transpose(tf.gather(by_batch, valid, axis=2, batch_dims=1), [1, 0, 2])
    running = tf.range(tf.shape(logits)[0])[:, tf.newaxis] < logit_length

    def step(before: tf.Tensor, now: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Return a[t] from a[t-1]; sequences that have ended do not change."""
        emission, runs = now
        skipping = tf.where(differs, _shifted(before, 2, impossible), impossible)
        paths = tf.stack([before, _shifted(before, 1, impossible), skipping])
        after = tf.reduce_logsumexp(paths, axis=0) + emission
        return tf.where(runs[:, tf.newaxis], tf.maximum(after, impossible), before)

    place = tf.range(tf.shape(states)[1])
    start = tf.where(place < 2, emissions[0], impossible)
    ends = tf.foldl(step, (emissions[1:], running[1:]), start)
    last = 2 * label_length[:, tf.newaxis]
    is_end = (place == last) | (place == last - 1)
    total = tf.reduce_logsumexp(tf.where(is_end, ends, impossible), axis=1)
    infinite = tf.constant(float("inf"), wide.dtype)
    return tf.cast(tf.where(total > impossible / 2, -total, infinite), dtype)


def _shifted(values: tf.Tensor, count: int, filling: Any) -> tf.Tensor:
    """Shift values to later states, with `filling` in the first states."""
    first = tf.fill([tf.shape(values)[0], count], tf.cast(filling, values.dtype))
    return tf.concat([first, values], axis=1)[:, : tf.shape(values)[1]]
