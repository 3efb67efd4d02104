"""Forward accumulators inside losses: one is right, one within another is refused."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import (
    Problem,
    crossed,
    derivatives_by_values,
    jacobian_of_gradient,
    relative_error,
)

X = tf.constant(np.array([0.3, 0.5]))
W = np.array([0.7, -0.4, 1.1])


def network(w, x):
    return tf.reduce_sum(tf.tanh(w[0] * x + w[1]) * w[2])


def closed_forms(w):
    """Of the network: the sum of its derivatives by x, and its second derivatives by x."""
    y = tf.tanh(w[0] * X + w[1])
    return tf.reduce_sum(w[2] * w[0] * (1 - y**2)), -2 * w[2] * w[0] ** 2 * y * (1 - y**2)


def slope(w):
    with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as forward:
        y = network(w, X)
    return forward.jvp(y) ** 2


def forward_over_reverse(w):
    with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as forward:
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = network(w, X)
        gradient = tape.gradient(y, X)
    return tf.reduce_sum(forward.jvp(gradient) ** 2)


def reverse_over_forward(w):
    with tf.GradientTape() as tape:
        tape.watch(X)
        with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as forward:
            y = network(w, X)
        derivative = forward.jvp(y)
    return tf.reduce_sum(tape.gradient(derivative, X) ** 2)


def nested(w, accumulator=None):
    accumulator = accumulator or tf.autodiff.ForwardAccumulator
    with accumulator(X, tf.ones_like(X)) as outer:
        with accumulator(X, tf.ones_like(X)) as inner:
            y = network(w, X)
        derivative = inner.jvp(y)
    return outer.jvp(derivative) ** 2


CLOSED_FORMS = {
    slope: lambda w: closed_forms(w)[0] ** 2,
    forward_over_reverse: lambda w: tf.reduce_sum(closed_forms(w)[1] ** 2),
    reverse_over_forward: lambda w: tf.reduce_sum(closed_forms(w)[1] ** 2),
    nested: lambda w: tf.reduce_sum(closed_forms(w)[1]) ** 2,
}


@pytest.mark.parametrize(
    ("function", "engine"),
    crossed([slope, forward_over_reverse, reverse_over_forward], ["graph", "tape"]),
)
@pytest.mark.few(1)
def test_one_is_right(function, engine):
    w = tf.Variable(W)
    with hvp.HessianOperator(lambda: function(w), w, engine=engine) as H:
        gradient, dense = derivatives_by_values(Problem(lambda: CLOSED_FORMS[function](w), w))
        assert H.value == pytest.approx(float(CLOSED_FORMS[function](w)), rel=1e-12)
        np.testing.assert_allclose(H.gradient, gradient, rtol=1e-7)
        assert relative_error(H.to_dense(), dense) < 1e-6


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.few(1)
def test_one_within_another_is_refused(engine):
    w = tf.Variable(W)
    for _ in range(2):  # what was entered is left
        with pytest.raises(hvp.SecondDerivativeError, match="accumulator"):
            hvp.HessianOperator(lambda: nested(w), w, engine=engine)
    with hvp.HessianOperator(lambda: slope(w), w, engine=engine) as H:
        assert np.isfinite(H @ np.ones(3)).all()


def test_other_threads_may_nest_them_meanwhile():
    w, seen = tf.Variable(W), []

    def loss():
        other = threading.Thread(target=lambda: seen.append(float(nested(w))))
        other.start()  # while this thread linearizes
        other.join()
        return slope(w)

    with hvp.HessianOperator(loss, w):
        assert seen
        assert seen == [pytest.approx(float(CLOSED_FORMS[nested](w)), rel=1e-12)] * len(seen)


def test_tensorflow_has_it_wrong_in_graphs():
    # If this fails, TensorFlow has fixed it, and the module `forward` can go.
    w = tf.Variable(W)
    _, dense = derivatives_by_values(Problem(lambda: CLOSED_FORMS[nested](w), w))
    wrong = jacobian_of_gradient(Problem(lambda: nested(w), w))
    assert relative_error(wrong, dense) > 0.1
