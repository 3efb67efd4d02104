"""Products under tapes: gradients in the vector are right, those in the variables an error."""

import numpy as np
import pytest
import tensorflow as tf

import hvp

W = np.array([1.0, 2.0, 3.0])


def operators():
    w = tf.Variable(W)

    def loss():
        return tf.reduce_sum(w**4)

    def of_data(x):
        return tf.reduce_mean(x) * loss()

    data = (np.ones(4),)
    H = hvp.HessianOperator(loss, w)
    J = hvp.linearize(lambda: w**3, w)
    kernel = tf.Variable(np.diag(W))
    K = hvp.KFAC(
        lambda x: x @ kernel,
        lambda p, y: tf.reduce_mean(tf.reduce_sum((p - y) ** 2, 1)) / 2,
        kernel,
        (np.ones((2, 3)), np.ones((2, 3))),
    ).block(kernel)
    return {
        "graph": (H.product, w, H),
        "nest": (lambda v: H.product(H.unflatten(v)), w, H),
        "tape": (hvp.HessianOperator(loss, w, engine="tape").product, w, None),
        "batches": (hvp.HessianOperator(of_data, w, data, batch_size=2).product, w, None),
        "block": (H.block([w]).product, w, H),
        "tf operator": (H.as_tf_operator().matvec, w, H),
        "jvp": (J.jvp, w, J),
        "vjp": (J.vjp, w, J),
        "factors": (lambda v: K.product(tf.reshape(v, [1, 3]) * tf.ones([3, 1], F)), kernel, K),
    }


F = tf.float64
NAMES = ["graph", "nest", "tape", "batches", "block", "tf operator", "jvp", "vjp", "factors"]


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_in_the_variables_is_an_error_and_that_in_the_vector_is_right(name):
    multiply, w, kept = operators()[name]
    v, u = tf.constant([1.0, -1.0, 2.0], F), tf.constant([0.5, 1.0, 3.0], F)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(v)
        product = multiply(v)
        total = tf.reduce_sum(product)
        both = total + tf.reduce_sum(w)
    diagonal = 3 * W**2 if name in ("jvp", "vjp") else 12 * W**2
    if name != "factors":
        np.testing.assert_allclose(tape.gradient(product, v, u), diagonal * u)
    for target in (total, both):
        with pytest.raises(hvp.SecondDerivativeError, match="third derivative"):
            np.asarray(tape.gradient(target, w))
    gradient = tape.gradient(total, [v, w])[1]
    with pytest.raises(hvp.SecondDerivativeError):
        w.assign_sub(gradient)
    # The remedy of the message.
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.stop_gradient(multiply(v)) * tf.ones_like(product) + w)
    assert np.all(np.asarray(tape.gradient(value, w)) > 0)
    del kept


@pytest.mark.parametrize("jit_compile", [None, True])
def test_functions_that_multiply(jit_compile):
    w = tf.Variable(W)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w)
    multiply = tf.function(lambda v: H.product(v), jit_compile=jit_compile)
    v = tf.Variable(np.ones(3))
    with tf.GradientTape() as tape, pytest.raises(hvp.SecondDerivativeError, match="open the tape"):
        tape.gradient(multiply(v.value()), w)

    @tf.function(jit_compile=jit_compile)
    def gradient(v):
        with tf.GradientTape() as tape:
            tape.watch(v)
            product = H.product(v)
        return tape.gradient(product, v)

    np.testing.assert_allclose(gradient(tf.ones(3, F)), 12 * W**2)


def test_an_operator_that_is_built_under_the_tape_has_third_derivatives():
    w = tf.Variable(W)
    with tf.GradientTape() as tape:
        H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w, engine="tape")
        product = tf.reduce_sum(H.product(tf.ones(3, F)))
    np.testing.assert_allclose(tape.gradient(product, w), 24 * W)
