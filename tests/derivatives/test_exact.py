"""Functions that TensorFlow differentiates wrong: replaced while a loss is linearized."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import Problem, crossed, derivatives_by_values, long, random
from tests.derivatives.nested_tapes import is_wrong_in_tensorflow

WAYS = {
    "graph": {},
    "graph, XLA": {"jit_compile": True},
    "tape": {"engine": "tape"},
    "recomputed": {},
}


def test_moments_bound_or_traced_earlier_are_refused_not_wrong():
    from tensorflow.nn import moments  # escapes the replacement by design

    z = tf.Variable(random(0, 5))

    def normalized(m):
        mean, variance = m(z, [0])
        return tf.reduce_sum(((z - mean) / tf.sqrt(variance + 0.1)) ** 3)

    with pytest.raises(hvp.SecondDerivativeError, match="moments"):
        hvp.HessianOperator(lambda: normalized(moments), z)
    inner = tf.function(lambda: normalized(tf.nn.moments))
    inner()
    with pytest.raises(hvp.SecondDerivativeError, match="python_function"):
        hvp.HessianOperator(lambda: inner(), z)
    # The loss itself is traced afresh.
    with hvp.HessianOperator(inner, z) as H:
        dense = H.to_dense()
    with hvp.HessianOperator(lambda: normalized(tf.nn.moments), z) as H:
        np.testing.assert_allclose(dense, H.to_dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["graph", "graph, XLA", "tape"])
@pytest.mark.parametrize("dtype", ["float64", long("complex128")])
@pytest.mark.few(1)
def test_norms_of_rows_that_the_loss_does_not_use(dtype, way):
    z = tf.Variable(random(0, 3, 4, dtype="float64"))
    factors = tf.cast([1.0, 2.0, -1.0, 0.5], dtype) * (1j if dtype == "complex128" else 1)

    def loss():
        norms = tf.math.reduce_euclidean_norm(tf.cast(z, dtype) * factors, axis=1)
        return tf.math.real(norms[1]) ** 3

    scaled = z.numpy()[1] * np.array([1, 2, -1, 0.5])
    norm, D = np.linalg.norm(scaled), np.diag([1, 4, 1, 0.25])
    slope = D @ z.numpy()[1]
    expected = np.zeros((12, 12))
    expected[4:8, 4:8] = 3 * norm * D + 3 / norm * np.outer(slope, slope)
    with hvp.HessianOperator(loss, z, **WAYS[way]) as H:
        np.testing.assert_allclose(H.to_dense(), expected, rtol=1e-12, atol=1e-14)
        assert H.value == pytest.approx(norm**3, rel=1e-14)
    # Once this fails, TensorFlow has fixed it.
    assert is_wrong_in_tensorflow(Problem(loss, z), expected)


def test_a_norm_bound_earlier_is_right_too():
    reduce_euclidean_norm = tf.math.reduce_euclidean_norm
    z = tf.Variable(random(0, 3, 4, dtype="float64"))
    x = z.numpy()[1]
    norm = np.linalg.norm(x)
    with hvp.HessianOperator(lambda: reduce_euclidean_norm(z, axis=1)[1] ** 3, z) as H:
        block = H.to_dense()[4:8, 4:8]
    np.testing.assert_allclose(block, 3 * norm * np.eye(4) + 3 / norm * np.outer(x, x), rtol=1e-12)


def test_a_norm_of_integers_is_tensorflows():
    z = tf.Variable(1.0)

    def loss():
        return z**2 * tf.cast(tf.math.reduce_euclidean_norm(tf.constant([3, 5])), "float32")

    with hvp.HessianOperator(loss, z) as H:
        assert H.to_dense() == [[10]]


def jacobian_of_cumulative_logsumexp(x, axis, exclusive, reverse):
    """Of the closed form: entry j has the part exp(x_j - y_i) in the sum i, if it is in it."""
    y = tf.math.cumulative_logsumexp(x, axis, exclusive, reverse).numpy()
    places = np.moveaxis(np.indices(x.shape), 0, -1).reshape(-1, x.ndim)
    sums, entries = places[:, np.newaxis], places[np.newaxis]
    before = entries[..., axis] - sums[..., axis]
    before = -before if reverse else before
    others = [i for i in range(x.ndim) if i != axis]
    among = (before < 0) | ((before == 0) & (not exclusive))
    among &= (entries[..., others] == sums[..., others]).all(-1)
    return np.where(among, np.exp(x.reshape(1, -1) - y.reshape(-1, 1)), 0)


@pytest.mark.parametrize(
    ("order", "way"), crossed([(0, False, False), (1, True, False), (1, False, True)], WAYS)
)
@pytest.mark.few(1)
def test_cumulative_logsumexp_at_the_solution_of_a_least_squares_fit(order, way):
    axis, exclusive, reverse = order
    z = tf.Variable(random(0, 3, 5, dtype="float64", scale=3))
    data = tf.math.cumulative_logsumexp(z, axis, exclusive, reverse)

    def residuals(z):
        fitted = tf.math.cumulative_logsumexp(z, axis, exclusive, reverse)
        return tf.where(tf.math.is_finite(data), fitted - data, 0)

    def loss():
        function = hvp.recompute(residuals) if way == "recomputed" else residuals
        return tf.reduce_sum(function(tf.convert_to_tensor(z)) ** 2) / 2

    jacobian = jacobian_of_cumulative_logsumexp(z.numpy(), axis, exclusive, reverse)
    with hvp.HessianOperator(loss, z, **WAYS[way]) as H:
        np.testing.assert_allclose(H.to_dense(), jacobian.T @ jacobian, rtol=1e-12, atol=1e-14)
    if way == "graph":
        # Once this fails, TensorFlow has fixed it.
        assert is_wrong_in_tensorflow(Problem(loss, z), jacobian.T @ jacobian)


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.few(1)
def test_the_jacobian_of_cumulative_logsumexp_of_unknown_size(engine):
    z = tf.Variable(random(0, 1, 7, dtype="float64"))
    jacobian = jacobian_of_cumulative_logsumexp(z.numpy(), 1, False, False)
    v = random(1, 1, 7, dtype="float64")

    def function():
        return tf.math.cumulative_logsumexp(tf.boolean_mask(z, z[0] > -100, axis=1), axis=1)

    with hvp.linearize(function, z, engine=engine) as linear:
        np.testing.assert_allclose(linear.jvp(v)[0], jacobian @ v[0], rtol=1e-12)
        np.testing.assert_allclose(linear.vjp(v)[0], v[0] @ jacobian, rtol=1e-12)


def test_cumulative_logsumexp_bound_earlier_is_right_too():
    cumulative_logsumexp = tf.math.cumulative_logsumexp
    z = tf.Variable(random(0, 5, dtype="float64"))
    jacobian = jacobian_of_cumulative_logsumexp(z.numpy(), 0, False, False)
    with hvp.linearize(lambda: cumulative_logsumexp(z), z) as linear:
        np.testing.assert_allclose(linear.jvp(z), jacobian @ z.numpy(), rtol=1e-12)
    # As in the partial likelihood of survival times: some entries have no part in the loss.
    events = tf.constant([1.0, 0, 1, 0, 1], "float64")
    shares = jacobian_of_cumulative_logsumexp(z.numpy(), 0, False, False)
    want = sum(e * (np.diag(p) - np.outer(p, p)) for e, p in zip(events.numpy(), shares))
    for function in (cumulative_logsumexp, lambda z: tf.math.cumulative_logsumexp(z)):

        def loss(function=function):
            return tf.reduce_sum(events * (function(z) - z))

        with hvp.HessianOperator(loss, z) as H:
            np.testing.assert_allclose(H.to_dense(), want, rtol=1e-12, atol=1e-15)


REPLACED_AT_ZERO = {
    "weighted cross entropy": (
        lambda x, y: tf.nn.weighted_cross_entropy_with_logits(y, x, pos_weight=2.0)
    ),
    "weighted cross entropy, version 1": (
        lambda x, y: tf.compat.v1.nn.weighted_cross_entropy_with_logits(
            targets=y, logits=x, pos_weight=2.0
        )
    ),
    "xdivy": lambda x, y: tf.math.xdivy(x, y),
    "xlog1py": lambda x, y: tf.math.xlog1py(x, y),
    "xlogy": lambda x, y: tf.math.xlogy(x, y),
}


@pytest.mark.parametrize("engine", [long("graph"), "tape"])
@pytest.mark.parametrize("name", REPLACED_AT_ZERO)
def test_second_derivatives_at_zero(name, engine):
    w = tf.Variable(np.array([0.0, 0.7, -0.4]))

    def loss():
        z = tf.convert_to_tensor(w)
        return tf.reduce_sum(REPLACED_AT_ZERO[name](z, z[1] + z**2 + 0.1 * z))

    with hvp.HessianOperator(loss, w, engine=engine) as H:
        slope, want = derivatives_by_values(Problem(loss, w))
        np.testing.assert_allclose(H.gradient, slope, atol=1e-8 * np.abs(slope).max())
        np.testing.assert_allclose(H.to_dense(), want, atol=1e-6 * np.abs(want).max())
        assert H.value == pytest.approx(loss().numpy(), rel=1e-14)
    # Once this fails, TensorFlow has fixed it.
    assert is_wrong_in_tensorflow(Problem(loss, w), want)


@pytest.mark.parametrize("name", ["xdivy", "xlog1py", "xlogy"])
def test_where_x_and_the_factor_are_zero_the_result_is_a_constant(name):
    """As with TensorFlow's own: the entropy of probabilities that are zero is finite."""
    w = tf.Variable(np.array([0.0, 0.7]))
    shift = {"xdivy": 0, "xlog1py": -1, "xlogy": 0}[name]

    def loss():
        return tf.reduce_sum(getattr(tf.math, name)(w, w**2 + shift))

    x = 0.7  # of 1 / x, and twice x log(x)
    second = 2 / x**3 if name == "xdivy" else 2 / x
    with hvp.HessianOperator(loss, w) as H:
        np.testing.assert_allclose(H.to_dense(), np.diag([0, second]), rtol=1e-12)
        assert H.value == pytest.approx(loss().numpy(), rel=1e-14)


def test_numbers_and_complex_numbers_may_be_zero_too():
    w = tf.Variable(np.array([0.7, 0.0]))

    def loss():
        z = tf.complex(w[0], w[1])
        product = tf.math.xlogy(tf.complex(w[1], w[0]), z)
        return tf.math.xlogy(0.0, w[1]) + tf.math.xlogy(w[1], 2.0) + tf.math.real(product)

    with hvp.HessianOperator(loss, w) as H:
        slope, want = derivatives_by_values(Problem(loss, w))
        np.testing.assert_allclose(H.gradient, slope, atol=1e-8)
        np.testing.assert_allclose(H.to_dense(), want, atol=1e-6)
        assert H.value == pytest.approx(loss().numpy(), abs=1e-14)


FIRST_AT_ZERO = {
    "xdivy": (lambda x: tf.raw_ops.Xdivy(x=x, y=x + 4), 1 / 4),
    "xlog1py": (lambda x: tf.raw_ops.Xlog1py(x=x, y=x + 3), np.log(4.0)),
    "xlogy": (lambda x: tf.raw_ops.Xlogy(x=x, y=x + 3), np.log(3.0)),
}


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("name", FIRST_AT_ZERO)
def test_first_derivatives_at_zero_whatever_the_name(name, engine):
    function, want = FIRST_AT_ZERO[name]
    x = tf.Variable(np.float64(0))
    with hvp.linearize(lambda: function(tf.convert_to_tensor(x)), x, engine=engine) as linear:
        assert linear.jvp(np.array(1.0)).numpy() == pytest.approx(want)


@pytest.mark.parametrize(
    "module", [tf.nn, tf.compat.v1.nn, tf.autodiff], ids=lambda module: module.__name__
)
def test_another_thread_sees_tensorflow_as_it_is(module):
    """While a loss is traced here, which takes the replacements."""
    names = ["moments", "weighted_cross_entropy_with_logits", "ctc_loss"]
    names = ["ForwardAccumulator"] if module is tf.autodiff else names
    before = [getattr(module, name) for name in names]
    w, seen = tf.Variable(2.0), []

    def loss():
        seen.append([getattr(module, name) for name in names])
        thread = threading.Thread(
            target=lambda: seen.append([getattr(module, name) for name in names])
        )
        thread.start()
        thread.join()
        return w**2

    with hvp.HessianOperator(loss, w):
        here, there = seen
    assert there == before == [getattr(module, name) for name in names]
    if module is not tf.compat.v1.nn:  # where one function serves for both
        assert not set(here) & set(before)


def test_a_replaced_name_can_be_replaced_by_others(monkeypatch):
    def mine(*_):
        return "mine"

    with monkeypatch.context() as patch:
        patch.setattr(tf.nn, "moments", mine)
        assert tf.nn.moments() == "mine"
    assert tf.nn.moments is not mine


def test_a_cross_entropy_of_other_shapes_is_refused_as_by_tensorflow():
    w = tf.Variable(np.zeros(3))
    with pytest.raises(ValueError, match="same shape"):
        tf.nn.weighted_cross_entropy_with_logits(tf.zeros([2, 1], "float64"), w, 2.0)
    with pytest.raises(ValueError, match="compatible"):
        hvp.HessianOperator(
            lambda: tf.reduce_sum(
                tf.nn.weighted_cross_entropy_with_logits(tf.zeros([2, 1], "float64"), w, 2.0)
            ),
            w,
        )
