"""Derivatives of roots and fixed points: closed forms, and differences."""

import numpy as np
import pytest
import tensorflow as tf

import hvp

rng = np.random.default_rng(0)
A = rng.standard_normal((5, 5)) + 4 * np.eye(5)
B = rng.standard_normal((5, 5)) / 8


@pytest.mark.parametrize("mode", ["variables", "tensors", "graph", "xla"])
@pytest.mark.few(1)
@pytest.mark.long
def test_a_linear_system_to_second_order(mode):
    t = tf.Variable(rng.standard_normal(5))
    w = tf.Variable(np.zeros(5))

    def equation(v=w):
        return tf.linalg.matvec(A, v) - tf.sin(t)

    def derivatives():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                start = w if mode == "variables" else tf.zeros(5, tf.float64)
                value = tf.reduce_sum(hvp.root(equation, start, t) ** 3)
            gradient = tape.gradient(value, t)
            first = gradient[0]
        return value, gradient, outer.gradient(first, t)

    if mode in ("graph", "xla"):
        derivatives = tf.function(derivatives, jit_compile=mode == "xla")
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            exact = tf.linalg.solve(A, tf.sin(t)[:, tf.newaxis])
            exact = tf.reduce_sum(exact**3)
        gradient = tape.gradient(exact, t)
        first = gradient[0]
    expected = exact, gradient, outer.gradient(first, t)
    for own, other in zip(derivatives(), expected):
        np.testing.assert_allclose(own, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("jit_compile", [None, False, True])
@pytest.mark.few(1)
def test_a_fixed_point_beside_its_iterations(jit_compile):
    weights = tf.Variable(B)
    x = tf.constant(rng.standard_normal((3, 5)))

    def layer(z):
        return tf.tanh(z @ weights + x)

    def derivatives():
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(
                hvp.fixed_point(layer, tf.zeros((3, 5), tf.float64), [weights, x]) ** 2
            )
        return value, *tape.gradient(value, [weights, x])

    if jit_compile is not None:
        derivatives = tf.function(derivatives, jit_compile=jit_compile)
    with tf.GradientTape() as tape:
        tape.watch(x)
        z = tf.zeros((3, 5), tf.float64)
        for _ in range(80):
            z = layer(z)
        value = tf.reduce_sum(z**2)
    expected = value, *tape.gradient(value, [weights, x])
    for own, other in zip(derivatives(), expected):
        np.testing.assert_allclose(own, other, rtol=1e-8, atol=1e-10)


def test_equality_constraints():
    """The minimum of a quadratic function with a linear constraint, as a root of its conditions."""
    Q = A @ A.T
    c, bound = tf.Variable(rng.standard_normal(5)), tf.Variable(0.7, dtype=tf.float64)
    constraint = rng.standard_normal(5)
    kkt = np.block([[Q, constraint[:, None]], [constraint[None], np.zeros((1, 1))]])

    def conditions(unknowns):
        w, multiplier = unknowns["w"], unknowns["multiplier"]
        return {
            "multiplier": tf.reduce_sum(constraint * w) - bound,
            "w": tf.linalg.matvec(Q, w) - c + multiplier * constraint,
        }

    start = {"w": np.zeros(5), "multiplier": tf.constant(0.0, tf.float64)}
    with tf.GradientTape(persistent=True) as tape:
        found = hvp.root(conditions, start, [c, bound])
        w = found["w"]
    jacobians = tape.jacobian(w, [c, bound], experimental_use_pfor=False)
    inverse = np.linalg.inv(kkt)
    np.testing.assert_allclose(w, (inverse @ [*c.numpy(), 0.7])[:5], rtol=1e-8)
    np.testing.assert_allclose(jacobians[0], inverse[:5, :5], atol=1e-8)
    np.testing.assert_allclose(jacobians[1], inverse[:5, 5], atol=1e-8)


def test_a_batch_of_any_size():
    weights = tf.Variable(B)

    @tf.function(input_signature=[tf.TensorSpec([None, 5], tf.float64)])
    def layer(x):
        return hvp.fixed_point(lambda z: tf.tanh(z @ weights + x), tf.zeros_like(x), [weights, x])

    for count in (2, 4):
        x = tf.constant(rng.standard_normal((count, 5)))
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = layer(x)
            value = tf.reduce_sum(z)
        np.testing.assert_allclose(z, tf.tanh(z @ weights + x), atol=1e-10)
        own = tape.gradient(value, weights).numpy()
        step = np.zeros((5, 5))
        step[1, 2] = 1e-6
        weights.assign_add(step)
        above = tf.reduce_sum(layer(x))
        weights.assign_sub(2 * step)
        below = tf.reduce_sum(layer(x))
        weights.assign_add(step)
        assert own[1, 2] == pytest.approx(float(above - below) / 2e-6, rel=1e-6)


def test_far_starts_and_no_root():
    t = tf.Variable(0.0, dtype=tf.float64)
    found = hvp.root(lambda w: tf.atan(w - t), tf.constant(30.0, tf.float64), t)
    assert abs(float(found)) < 1e-10
    with pytest.warns(hvp.ConvergenceWarning, match="Newton"):
        hvp.root(lambda w: w**2 + 1 + t, tf.constant(1.0, tf.float64), t)
    function = tf.function(lambda: hvp.root(lambda w: w**2 + 1 + t, tf.ones([], tf.float64), t))
    assert np.isnan(function())


def test_arguments():
    t = tf.Variable(1.0)
    with pytest.raises(hvp.HvpError, match="shapes"):
        hvp.root(lambda w: tf.zeros(2) * t, tf.constant(1.0), t)
    with pytest.raises(hvp.HvpError, match="function"):
        hvp.root(3, tf.constant(1.0), t)
    with pytest.raises(hvp.HvpError, match="maxiter"):
        hvp.fixed_point(lambda w: w * t, tf.constant(1.0), t, maxiter=0)


def _found(kind, of, w):
    """Return the number `of(t)` as a solution that is searched from `w`."""
    if kind == "root":
        return lambda v=w: v - of()
    if kind == "fixed_point":
        return lambda v=w: of() + 0 * v
    return lambda v=w: (v - of()) ** 2


@pytest.mark.parametrize("inner", ["variable", "tensor"])
@pytest.mark.parametrize("kind", ["root", "fixed_point", "argmin"])
@pytest.mark.few(2)
def test_derivatives_that_tensorflow_has_wrong_are_right(kind, inner):
    """TensorFlow's gradient of a cumulative product is zero at and behind a zero."""
    t, start = tf.Variable([0.0, 2.0, 3.0], dtype=tf.float64), tf.zeros([], tf.float64)
    w = tf.Variable(start)
    function = _found(kind, lambda: tf.reduce_sum(tf.math.cumprod(t)), w)
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as tape:
            value = getattr(hvp, kind)(function, w if inner == "variable" else start, t)
        slopes = tape.gradient(value, t)
        entries = tf.unstack(slopes)
    # The function is a + a b + a b c.
    np.testing.assert_allclose(slopes, [9, 0, 0], atol=1e-8)
    second = [outer.gradient(entry, t) for entry in entries]
    np.testing.assert_allclose(second, [[0, 4, 2], [4, 0, 0], [2, 0, 0]], atol=1e-7)
