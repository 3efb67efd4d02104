"""Solutions as functions of right-hand sides and variables, and solutions inside graphs."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import hvp

rng = np.random.default_rng(0)
A = rng.standard_normal((6, 6))
A = A @ A.T + np.eye(6)
B = tf.constant(rng.standard_normal(6))


def made(damping=0.0, **options):
    """Return variables, and an operator whose Hessian is `A + diag(3 w**2)`."""
    w = tf.Variable(rng.standard_normal(6))

    def loss():
        quadratic = tf.reduce_sum(w * tf.linalg.matvec(tf.constant(A), w)) / 2
        return quadratic + tf.reduce_sum(w**4) / 4

    return w, hvp.HessianOperator(loss, w, **options).damped(damping)


def dense(w, damping=0.0):
    return A + tf.linalg.diag(3 * w**2) + damping * np.eye(6)


@pytest.mark.parametrize("method", ["auto", "cg", "minres", "exact"])
@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.few(1)
def test_in_the_right_hand_side_and_the_variables(method, engine):
    w, H = made(0.5, engine=engine)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(B)
        with tf.GradientTape() as tape:
            tape.watch(B)
            x = hvp.solve(H, B, method=method, rtol=1e-12).x
            value = tf.reduce_sum(x**3)
        found = tape.gradient(value, [B, w])
        first = found[0][0]
    with tf.GradientTape(persistent=True) as outer_exact:
        outer_exact.watch(B)
        with tf.GradientTape() as tape:
            tape.watch(B)
            exact = tf.linalg.solve(dense(w, 0.5), B[:, tf.newaxis])[:, 0]
            value = tf.reduce_sum(exact**3)
        expected = tape.gradient(value, [B, w])
        first_exact = expected[0][0]
    np.testing.assert_allclose(x, exact, rtol=1e-9)
    for own, other in zip(found, expected):
        np.testing.assert_allclose(own, other, rtol=1e-7, atol=1e-10)
    second = outer.gradient(first, [B, w])
    for own, other in zip(second, outer_exact.gradient(first_exact, [B, w])):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-9)


def test_columns_and_nests():
    w, H = made()
    columns = tf.constant(rng.standard_normal((6, 3)))
    with tf.GradientTape() as tape:
        tape.watch(columns)
        value = tf.reduce_sum(hvp.solve(H, columns, rtol=1e-12).x ** 2)
    found = tape.gradient(value, [columns, w])
    with tf.GradientTape() as tape:
        tape.watch(columns)
        value = tf.reduce_sum(tf.linalg.solve(dense(w), columns) ** 2)
    for own, other in zip(found, tape.gradient(value, [columns, w])):
        np.testing.assert_allclose(own, other, rtol=1e-7, atol=1e-10)

    a, b = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(a**2) + b**2, {"a": a, "b": b})
    right = {"a": tf.constant([4.0, 6.0]), "b": tf.constant(8.0)}
    with tf.GradientTape() as tape:
        tape.watch(right)
        x = hvp.solve(H, right).x
        value = tf.reduce_sum(x["a"]) * x["b"]
    slopes = tape.gradient(value, right)
    np.testing.assert_allclose(slopes["a"], [2, 2], rtol=1e-5)
    np.testing.assert_allclose(slopes["b"], 2.5, rtol=1e-5)


def test_the_step_of_newtons_method():
    w, H = made()
    with tf.GradientTape() as tape:
        step = hvp.solve(H, H.gradient_tensors(), rtol=1e-12).x
        value = tf.reduce_sum(step**2)
    own = tape.gradient(value, w)
    with tf.GradientTape() as tape:
        gradient = tf.linalg.matvec(tf.constant(A), w) + w**3
        exact = tf.linalg.solve(dense(w), gradient[:, tf.newaxis])
        value = tf.reduce_sum(exact**2)
    np.testing.assert_allclose(own, tape.gradient(value, w), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("constant", [False, True])
def test_forward_mode(constant):
    """A forward accumulator asks for the derivative where no tape can be opened."""
    w, H = made()
    tangent = tf.constant(rng.standard_normal(6))

    def right():
        return B if constant else w**2

    with tf.autodiff.ForwardAccumulator(w, tangent) as accumulator:
        x = hvp.solve(H, right(), rtol=1e-12).x
    with tf.autodiff.ForwardAccumulator(w, tangent) as exact:
        expected = tf.linalg.solve(dense(w), right()[:, tf.newaxis])[:, 0]
    np.testing.assert_allclose(accumulator.jvp(x), exact.jvp(expected), rtol=1e-7, atol=1e-10)


def test_sums_and_approximations_are_not_taken_for_constants():
    w, H = made()
    inverse = hvp.ExactInverse(2 * H)
    for combined in (2 * H, H + 0.5 * H.damped(1.0), H @ H):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(hvp.solve(combined, B, method="minres").x)
        with pytest.raises(hvp.SecondDerivativeError):
            np.asarray(tape.gradient(value, w))
    for approximate in (inverse, hvp.DiagonalPreconditioner(H), hvp.NystromPreconditioner(H)):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(B)
            value = tf.reduce_sum(approximate.product(B))
        expected = approximate @ np.ones(6)
        np.testing.assert_allclose(tape.gradient(value, B), expected, rtol=1e-9)
        with pytest.raises(hvp.SecondDerivativeError):
            np.asarray(tape.gradient(value, w))


def test_other_matrices_are_functions_of_the_right_hand_side_alone():
    w = tf.Variable(rng.standard_normal(6))
    x, y = rng.standard_normal((9, 6)), rng.standard_normal(9)
    G = hvp.GaussNewtonOperator(
        lambda x: tf.linalg.matvec(x, w), lambda z, y: tf.reduce_mean((z - y) ** 2), w, (x, y)
    ).damped(0.1)
    sparse = np.diag(np.arange(1.0, 7))
    for matrix, inverse in ((G, np.linalg.inv(G.to_dense())), (sparse, np.linalg.inv(sparse))):
        with tf.GradientTape() as tape:
            tape.watch(B)
            value = tf.reduce_sum(hvp.solve(matrix, B, rtol=1e-12).x ** 2)
        expected = 2 * inverse @ inverse @ B.numpy()
        np.testing.assert_allclose(tape.gradient(value, B), expected, rtol=1e-7)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(hvp.solve(G, B, rtol=1e-12).x ** 2)
    with pytest.raises(hvp.SecondDerivativeError):
        np.asarray(tape.gradient(value, w))


def test_arrays_stay_arrays_beside_a_tape():
    w, H = made()
    with tf.GradientTape():
        result = hvp.solve(H, B.numpy(), rtol=1e-12)
    assert isinstance(result.x, np.ndarray)
    np.testing.assert_allclose(result.x, np.linalg.solve(dense(w), B), rtol=1e-8)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("method", ["auto", "minres"])
@pytest.mark.few(1)
def test_inside_a_graph(jit_compile, method):
    w, H = made()

    @tf.function(jit_compile=jit_compile)
    def solved(b):
        with tf.GradientTape() as tape:
            tape.watch(b)
            result = hvp.solve(H, b, method=method, damping=0.2, rtol=1e-11)
            value = tf.reduce_sum(result.x**3)
        return result.x, result.converged, result.residual_norms, tape.gradient(value, b)

    x, converged, residual, slope = solved(B)
    inverse = np.linalg.inv(dense(w, 0.2))
    assert bool(converged)
    assert residual < 1e-10
    np.testing.assert_allclose(x, inverse @ B.numpy(), rtol=1e-8)
    np.testing.assert_allclose(slope, inverse @ (3 * x.numpy() ** 2), rtol=1e-8)
    np.testing.assert_allclose(solved(1e-200 * B)[0], 1e-200 * x, rtol=1e-8)
    few = tf.function(lambda b: hvp.solve(H, b, method=method, maxiter=2).iterations)
    assert few(B) == 2
    w.assign_add(tf.ones(6, tf.float64))
    H.refresh()
    np.testing.assert_allclose(solved(B)[0], np.linalg.solve(dense(w, 0.2), B.numpy()), rtol=1e-8)


@pytest.mark.parametrize("shape", [(6, 2), "nest"])
@pytest.mark.few(1)
def test_forms_inside_a_graph(shape):
    w, H = made()
    right = [B] if shape == "nest" else tf.constant(rng.standard_normal(shape))
    if shape == "nest":
        v = tf.Variable(w)
        H = hvp.HessianOperator(
            lambda: (
                tf.reduce_sum(v * tf.linalg.matvec(tf.constant(A), v)) / 2 + tf.reduce_sum(v**4) / 4
            ),
            [v],
        )
    x = tf.function(lambda b: hvp.solve(H, b, rtol=1e-11).x)(right)
    x, b = (x[0], B) if shape == "nest" else (x, right)
    columns = tf.reshape(b, [6, -1])
    np.testing.assert_allclose(
        tf.reshape(x, [6, -1]), np.linalg.solve(dense(w), columns), rtol=1e-8
    )


def test_what_does_not_converge_in_a_graph():
    _, H = made()

    @tf.function
    def solved(b):
        with tf.GradientTape() as tape:
            tape.watch(b)
            result = hvp.solve(H, b, rtol=1e-11, maxiter=2)
        return result.converged, tape.gradient(result.x, b)

    converged, slope = solved(B)
    assert not converged
    assert np.isnan(slope).all()


def test_what_graphs_cannot_do():
    _, H = made()
    for operator, options, match in (
        (H, {"M": "nystrom"}, "M is given"),
        (H, {"x0": B}, "x0 is given"),
        (H, {"method": "exact"}, "'exact'"),
        (A, {}, "ndarray"),
    ):
        with pytest.raises(hvp.GraphModeError, match=match):
            tf.function(functools.partial(hvp.solve, operator, **options))(B)
