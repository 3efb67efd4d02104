"""`tf.nn.ctc_loss` with derivatives of every order.

TensorFlow computes the connectionist temporal classification loss together with its gradient, by a
kernel that has no second derivative. Here the forward recursion of Graves et al. (2006), in
logarithms, is written in operations that can be differentiated.

References
----------
.. [1] A. Graves, S. Fernandez, F. Gomez and J. Schmidhuber, "Connectionist temporal
   classification: labelling unsegmented sequence data with recurrent neural networks", ICML 2006.
   https://doi.org/10.1145/1143844.1143891
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_original_of_version_1 = tf.compat.v1.nn.ctc_loss
# The logarithm of what is impossible: finite, since derivatives at minus infinity would be NaN.
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
    """Negative logarithm of the probability of labels, as `tf.nn.ctc_loss` gives it.

    Parameters
    ----------
    labels, logits, label_length, logit_length, logits_time_major, unique, blank_index, name
        As in `tf.nn.ctc_loss`; `unique`, which only saves time there, is not used.

    Returns
    -------
    tf.Tensor
        Of shape `(batch,)`, in the dtype of `logits`.
    """
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
    """Give the same, by the arguments of `tf.compat.v1.nn.ctc_loss`; the last class is blank."""
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
    rows = labels.indices[:, 0]
    lengths = tf.math.unsorted_segment_sum(tf.ones_like(rows, tf.int32), rows, batch)
    return tf.sparse.to_dense(labels), lengths


def _loss(
    labels: Any, logits: tf.Tensor, label_length: Any, logit_length: Any, blank: int
) -> tf.Tensor:
    dtype = logits.dtype
    wide = tf.cast(logits, tf.float32) if dtype.size < 4 else logits
    labels = tf.cast(labels, tf.int32)
    label_length, logit_length = (tf.cast(n, tf.int32) for n in (label_length, logit_length))
    classes = tf.shape(logits)[2]
    blank = blank + classes if blank < 0 else tf.constant(blank)
    # Blanks before, between and after the labels; labels beyond the length stay out of the sum.
    batch, longest = tf.unstack(tf.shape(labels))
    pairs = tf.stack([tf.fill([batch, longest], blank), labels], axis=2)
    states = tf.concat([tf.reshape(pairs, [batch, 2 * longest]), tf.fill([batch, 1], blank)], 1)
    impossible = tf.constant(_IMPOSSIBLE, wide.dtype)
    # A blank between two labels may be left out where they differ.
    differs = tf.logical_and(states != blank, states != _later(states, 2, blank))
    by_time = tf.transpose(tf.nn.log_softmax(wide), [1, 0, 2])
    known = tf.clip_by_value(states, 0, classes - 1)
    emitted = tf.transpose(tf.gather(by_time, known, axis=2, batch_dims=1), [1, 0, 2])
    running = tf.range(tf.shape(logits)[0])[:, tf.newaxis] < logit_length

    def step(before: tf.Tensor, now: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        emission, runs = now
        jumped = tf.where(differs, _later(before, 2, impossible), impossible)
        ways = tf.stack([before, _later(before, 1, impossible), jumped])
        after = tf.reduce_logsumexp(ways, axis=0) + emission
        return tf.where(runs[:, tf.newaxis], tf.maximum(after, impossible), before)

    place = tf.range(tf.shape(states)[1])
    start = tf.where(place < 2, emitted[0], impossible)
    ends = tf.foldl(step, (emitted[1:], running[1:]), start)
    last = 2 * label_length[:, tf.newaxis]
    is_end = (place == last) | (place == last - 1)
    total = tf.reduce_logsumexp(tf.where(is_end, ends, impossible), axis=1)
    infinite = tf.constant(float("inf"), wide.dtype)
    return tf.cast(tf.where(total > impossible / 2, -total, infinite), dtype)


def _later(values: tf.Tensor, count: int, filling: Any) -> tf.Tensor:
    """Shift values along the states, with something in place of what is not there."""
    first = tf.fill([tf.shape(values)[0], count], tf.cast(filling, values.dtype))
    return tf.concat([first, values], axis=1)[:, : tf.shape(values)[1]]
