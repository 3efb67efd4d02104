"""The connectionist temporal classification loss, against all its paths and TensorFlow's values."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import Problem, crossed, dense_hessian, long, random, relative_error

bound_earlier = tf.nn.ctc_loss
TIMES, CLASSES = 5, 3
LABELS, LABEL_LENGTHS = np.array([[1, 2], [2, 2], [1, 0]]), [2, 2, 1]
LOGIT_LENGTHS = [5, 4, 3]
X = random(0, TIMES, 3, 2)


def sparse(shift=0):
    places = [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0]]
    values = np.array([1, 2, 2, 2, 1], np.int32) + shift
    return tf.SparseTensor(places, values, [3, 2])


def by_batch(logits):
    return tf.transpose(logits, [1, 0, 2])


LOSSES = {
    "dense": lambda logits: tf.nn.ctc_loss(LABELS, logits, LABEL_LENGTHS, LOGIT_LENGTHS),
    "dense, batch first": lambda logits: tf.nn.ctc_loss(
        LABELS, by_batch(logits), LABEL_LENGTHS, LOGIT_LENGTHS, logits_time_major=False
    ),
    "sparse": lambda logits: tf.nn.ctc_loss(sparse(), logits, None, LOGIT_LENGTHS, blank_index=0),
    "version 1": lambda logits: tf.compat.v1.nn.ctc_loss(
        sparse(-1), tf.concat([logits[..., 1:], logits[..., :1]], -1), LOGIT_LENGTHS
    ),
    "Keras": lambda logits: keras.ops.ctc_loss(
        LABELS, by_batch(logits), np.array(LABEL_LENGTHS), np.array(LOGIT_LENGTHS)
    ),
}


def by_all_paths(logits):
    """Sum over every path whose labels, repetitions and blanks removed, are those wanted."""
    losses = []
    for b, (labels, length, times) in enumerate(zip(LABELS, LABEL_LENGTHS, LOGIT_LENGTHS)):
        scores = tf.nn.log_softmax(logits[:times, b])
        paths = [
            path
            for path in itertools.product(range(CLASSES), repeat=times)
            if [k for k, _ in itertools.groupby(path) if k] == list(labels[:length])
        ]
        of_each_time = [tf.gather(scores[t], [path[t] for path in paths]) for t in range(times)]
        losses.append(-tf.reduce_logsumexp(tf.add_n(of_each_time)))
    return tf.stack(losses)


def problem(function, dtype="float32"):
    w = tf.Variable(random(1, 2, CLASSES, dtype=dtype))
    x = tf.cast(X, dtype)
    return Problem(lambda: tf.reduce_mean(function(x @ w) ** 2), w)


@functools.cache
def dense_by_all_paths(power):
    return dense_hessian(problem(lambda logits: by_all_paths(logits) ** power, "float64"))


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        # Keras calls the dense one, batches first; below, it is recomputed and in batches.
        *[(name, "graph") for name in ("sparse", "version 1", "Keras")],
        ("sparse", "tape"),
        *[long(name, "graph") for name in ("dense", "dense, batch first")],
        *[long(name, "tape") for name in LOSSES if name != "sparse"],
    ],
)
@pytest.mark.few(1)
def test_it_is_right(name, engine):
    want = dense_by_all_paths(1.0)
    ctc = problem(LOSSES[name])
    with hvp.HessianOperator(ctc.loss, ctc.variables, engine=engine) as H:
        assert H.value == pytest.approx(float(ctc.loss()), rel=1e-6)  # TensorFlow's
        assert relative_error(H.to_dense(), want) < 1e-5
        v = random(2, H.shape[0])
        assert relative_error(H @ v, want @ v) < 1e-5


def by_columns(H):
    return np.stack([H @ e for e in np.eye(H.shape[0], dtype="float32")], axis=1)


@pytest.mark.long
def test_recomputed():
    recomputed = problem(hvp.recompute(LOSSES["dense"]))
    with hvp.HessianOperator(recomputed.loss, recomputed.variables) as H:
        assert relative_error(by_columns(H), dense_by_all_paths(1.0)) < 1e-5


@pytest.mark.long
def test_in_batches():
    w = tf.Variable(random(1, 2, CLASSES))

    def loss(x, labels, label_lengths, logit_lengths):
        each = tf.nn.ctc_loss(labels, x @ w, label_lengths, logit_lengths, logits_time_major=False)
        return tf.reduce_mean(each)

    data = (X.transpose(1, 0, 2), LABELS, np.array(LABEL_LENGTHS), np.array(LOGIT_LENGTHS))
    with hvp.HessianOperator(loss, w, data, batch_size=1) as H:  # traced once for all three
        assert relative_error(by_columns(H), dense_by_all_paths(0.5)) < 1e-5


def test_labels_that_do_not_fit_have_no_finite_loss():
    w = tf.Variable(random(1, 2, CLASSES))
    with pytest.raises(hvp.NonFiniteError, match="loss is inf"):
        hvp.HessianOperator(
            lambda: tf.reduce_sum(tf.nn.ctc_loss([[1, 1, 1]], X[:, :1] @ w, [3], [4])), w
        )


@pytest.mark.parametrize(("kind", "engine"), crossed(["dense", "sparse"], ["graph", "tape"]))
def test_bound_earlier_it_is_refused_when_built(kind, engine):
    # If this fails, TensorFlow has a second derivative of its own.
    labels, lengths = (LABELS, LABEL_LENGTHS) if kind == "dense" else (sparse(), None)
    bound = problem(
        lambda logits: bound_earlier(labels, logits, lengths, LOGIT_LENGTHS, blank_index=0)
    )
    with pytest.raises(hvp.SecondDerivativeError, match=r"tf\.nn\.ctc_loss by that name"):
        hvp.HessianOperator(bound.loss, bound.variables, engine=engine)
