"""None is not zero: derivatives TensorFlow lacks raise, true zeros do not."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import hvp
from hvp._derivatives.missing import CONSTANT_OPERATIONS, MISSING_DERIVATIVES
from tests.cases import Problem, dense_hessian, derivatives_by_values, random, relative_error


def registered_derivative(kind):
    """TensorFlow's gradient function of an operation; KeyError if it has no entry at all.

    The registry has no public name, and is used in tests only.
    """
    registry = getattr(ops, "gradient_registry", None) or ops._gradient_registry
    try:
        return registry.lookup(kind)
    except LookupError:
        raise KeyError(kind) from None


def is_registered(kind):
    try:
        registered_derivative(kind)
    except KeyError:
        return False
    return True


def image_variable():
    return tf.Variable(random(0, 1, 4, 4, 3) ** 2 + 0.5)


# Registered in TensorFlow, but without the derivative by some inputs, or a second one.
IN_PART = {
    "Betainc",
    "EagerPyFunc",
    "FusedBatchNorm",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
    "ImageProjectiveTransformV2",
    "ImageProjectiveTransformV3",
    "PadV2",
    "QuantizeAndDequantizeV2",
    "QuantizeAndDequantizeV3",
    "QuantizeAndDequantizeV4",
    "ScaleAndTranslate",
    "StatelessParameterizedTruncatedNormal",
    "MaxPoolGradV2",
    "Zeta",
}


def over_a_dataset(z):
    data = tf.data.Dataset.from_tensor_slices([1.0, 2.0])
    return data.reduce(tf.zeros([]), lambda total, x: total + x * tf.reduce_sum(z**2)) + z


def normalize_by_variables(z):
    ones = tf.ones(3)
    x, mean, variance = z**2, tf.reduce_mean(z, [0, 1, 2]), tf.reduce_mean(z**2, [0, 1, 2])
    normalized, _, _ = tf.compat.v1.nn.fused_batch_norm(
        x, ones, ones, mean, variance, is_training=False
    )
    return normalized


REFUSED = {
    "Betainc": lambda z: tf.math.betainc(z, z + 1, tf.fill(z.shape, 0.3)),
    "FusedBatchNormV3": normalize_by_variables,
    "PadV2": lambda z: tf.pad(z, [[0, 0], [1, 1], [1, 1], [0, 0]], constant_values=z[0, 0, 0, 0]),
    "Range": lambda z: z[0, 0, 0, 0] + tf.range(z[0, 0, 0, 1], 9.0),
    "ReduceDataset": over_a_dataset,
    "Zeta": lambda z: tf.math.zeta(z + 2, z + 1),
    "IgammaGradA": lambda z: tf.math.igamma(z, tf.fill(z.shape, 0.7)),
    "HSVToRGB": lambda z: z + tf.image.hsv_to_rgb(z / 10),
    "RandomShuffle": lambda z: z + tf.random.shuffle(z),
    "EagerPyFunc": lambda z: tf.ensure_shape(tf.py_function(tf.sin, [z], tf.float32), z.shape),
    "PyFunc": lambda z: z + tf.reshape(tf.numpy_function(np.sin, [z], tf.float32), z.shape),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_missing_derivative_raises_when_the_operator_is_built(kind):
    z = image_variable()
    with pytest.raises(hvp.SecondDerivativeError, match=kind):
        hvp.HessianOperator(lambda: tf.reduce_mean(REFUSED[kind](z) ** 3), z)


@pytest.mark.parametrize("kind", ["HSVToRGB", "IgammaGradA"])
def test_it_is_found_inside_functions_loops_and_branches(kind):
    z = image_variable()
    function = REFUSED[kind]

    def in_function():
        return tf.function(function)(z)

    def in_loop():
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, a: (i + 1, a + tf.reduce_sum(function(z) ** 2)), (0, 0.0)
        )[1]

    def in_branch():
        return tf.cond(tf.reduce_sum(z) > 0, lambda: tf.reduce_sum(function(z)), lambda: 0.0)

    for within in (in_function, in_loop, in_branch):
        with pytest.raises(hvp.SecondDerivativeError, match=kind) as caught:
            hvp.HessianOperator(lambda f=within: tf.reduce_mean(f() ** 3), z)
        assert f"({line_of(within)})" in str(caught.value)


def line_of(function):
    """The line of the one statement in a function."""
    return f"{Path(__file__).name}, line {function.__code__.co_firstlineno + 1}"


def test_layers_and_lines_are_named():
    class Gamma(keras.layers.Layer):
        def call(self, x):
            return tf.math.igamma(tf.exp(x), tf.ones_like(x))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Gamma(name="last")])
    with pytest.raises(hvp.SecondDerivativeError) as caught:
        hvp.HessianOperator(lambda: tf.reduce_sum(model(tf.ones((1, 3))) ** 2), model)
    assert "/last" in str(caught.value)
    assert line_of(Gamma.call) in str(caught.value)


def test_a_recomputed_function_is_looked_into_when_the_operator_is_built():
    z = image_variable()
    segment = hvp.recompute(lambda x: tf.math.igamma(x, 0.7) * x)
    with pytest.raises(hvp.SecondDerivativeError, match="IgammaGradA"):
        hvp.HessianOperator(lambda: tf.reduce_sum(segment(z) ** 2), z)


def test_the_same_operations_off_the_way_are_no_obstacle():
    z, w = image_variable(), tf.Variable(2.0)

    def on_data():
        """Converts an image that is no variable, in a function with a gradient by both."""
        mixed = tf.function(lambda image, w: tf.reduce_mean(tf.image.hsv_to_rgb(image)) * w**3)
        return mixed(tf.ones((1, 4, 4, 1)) * [0.0, 0.0, 1.0], w)  # white

    def beside():
        shown = tf.image.hsv_to_rgb(z / 10)
        return (
            tf.reduce_sum(z) * 0
            + w**3
            + tf.cast(tf.argmax(tf.reshape(shown, [-1])) * 0, tf.float32)
        )

    for loss in (on_data, beside):
        with hvp.HessianOperator(loss, [w]) as H:
            np.testing.assert_allclose(H @ np.ones(1), [12.0])


def test_what_enters_linearly_has_a_true_zero():
    z = image_variable()
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.image.resize(z, (8, 8))), z) as H:
        np.testing.assert_array_equal(H @ np.ones(48), np.zeros(48))


PRODUCTS = {
    "of segments": lambda w: tf.exp(tf.reduce_sum(tf.math.segment_prod(w, [0, 0, 1]))),
    "in a function": lambda w: tf.function(
        lambda: tf.reduce_sum(tf.math.segment_prod(w, [0, 0, 1]) ** 2)
    )(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_entries_are_right_away_from_zero_and_refused_at_it(name):
    w = tf.Variable(np.array([0.5, 2.0, -3.0]))
    loss = PRODUCTS[name]
    if name == "in a function":  # where the entries cannot be looked at
        with pytest.raises(hvp.SecondDerivativeError, match="SegmentProd"):
            hvp.HessianOperator(lambda: loss(w), w)
        return
    with hvp.HessianOperator(lambda: loss(w), w) as H:
        assert relative_error(H.to_dense(), dense_hessian(Problem(lambda: loss(w), w))) <= 1e-10
        w.assign([0.0, 2.0, 3.0])
        with pytest.raises(hvp.SecondDerivativeError, match="SegmentProd"):
            H.refresh()


def test_methods_with_gradients_alone_refuse_what_has_a_wrong_gradient():
    """Or none; but not what is right once, and wrong twice."""
    w = tf.Variable(np.array([0.3, 2.0, 3.0]))

    def squares(values):
        return tf.reduce_sum((values - 1) ** 2)

    def drawn():
        return squares(tf.raw_ops.Betainc(a=w, b=w, x=w / 8))

    def of_python():
        return squares(tf.numpy_function(np.square, [w], tf.float64) + w)

    w.assign([1e-3, 2.0, 3.0])
    for loss, kind in ((drawn, "Betainc"), (of_python, "PyFunc")):
        for method in ("BFGS", "L-BFGS-B"):
            with pytest.raises(hvp.SecondDerivativeError, match=kind):
                hvp.minimize(loss, w, method=method)
    w.assign([2.0, 0.0, 2.0])
    with pytest.raises(hvp.SecondDerivativeError, match="SelfAdjointEigV2"):
        hvp.minimize(
            lambda: squares(tf.linalg.eigvalsh(tf.reshape(tf.gather(w, [0, 1, 1, 2]), (2, 2)))),
            w,
            method="BFGS",
        )
    for right in (
        lambda: squares(tf.py_function(tf.square, [w], tf.float64)),
        lambda: squares(tf.math.bessel_i1(w) + 1),
        lambda: squares(tf.math.segment_prod(w, [0, 0, 1])),
        lambda: squares(tf.math.segment_prod(w + 1, [0, 0, 1])),
        lambda: (tf.reduce_sum(tf.math.cumprod(w)) - 4) ** 2,
        lambda: (tf.reduce_prod(w) - 4) ** 2 + w[1] ** 2,
    ):
        w.assign([0.0, 2.0, 3.0])
        gradient = hvp.minimize(right, w, method="BFGS", maxiter=0).jac
        w.assign([0.0, 2.0, 3.0])
        want, _ = derivatives_by_values(Problem(right, w))
        np.testing.assert_allclose(gradient, want, atol=1e-8 * np.abs(want).max())
    w.assign([0.0, 2.0, 3.0])
    assert (
        hvp.minimize(lambda: (tf.reduce_sum(tf.math.cumprod(w)) - 4) ** 2, w, method="BFGS").fun
        < 1e-8
    )


def test_integers_carry_no_derivatives():
    """A matching or an order that depends on the variables is a constant of them."""
    w = tf.Variable([0.3, -1.2, 2.5])

    def loss():
        order = tf.ensure_shape(tf.numpy_function(np.argsort, [w**2], tf.int64), [3])
        shuffled = tf.random.shuffle(tf.argsort(w))
        sorted_cubes = tf.gather(w, order) ** 3 * tf.constant([1.0, 2.0, 3.0])
        return tf.reduce_sum(sorted_cubes) + tf.reduce_sum(tf.gather(w, shuffled) ** 2)

    with hvp.HessianOperator(loss, w) as H:
        want = 6 * w.numpy() * [1, 2, 3] + 2
        np.testing.assert_allclose(H.to_dense(), np.diag(want), rtol=1e-6)
        assert "random" in H.stats.note
        assert "Python" in H.stats.note


@pytest.mark.parametrize("which", ["labels", "logits"])
def test_cross_entropy_by_one_of_its_arguments_is_right(which):
    w = tf.Variable(random(0, 4))
    other = tf.nn.softmax(tf.constant(random(1, 4)))

    def loss():
        labels, logits = (tf.nn.softmax(w), other) if which == "labels" else (other, w)
        return tf.nn.softmax_cross_entropy_with_logits(labels, logits)

    def by_hand():
        labels, logits = (tf.nn.softmax(w), other) if which == "labels" else (other, w)
        return -tf.reduce_sum(labels * tf.nn.log_softmax(logits))

    with hvp.HessianOperator(loss, w) as H, hvp.HessianOperator(by_hand, w) as expected:
        np.testing.assert_allclose(H.to_dense(), expected.to_dense(), atol=1e-6)


def test_recomputed_gradients_are_refused_with_the_mend():
    w = tf.Variable(random(0, 4))
    segment = tf.recompute_grad(lambda x: tf.sin(x) * w)
    with pytest.raises(hvp.SecondDerivativeError, match=r"without tf\.recompute_grad"):
        hvp.HessianOperator(lambda: tf.reduce_sum(segment(w)), w) @ np.ones(4)


def test_a_first_derivative_that_is_not_registered_is_named():
    w = tf.Variable(random(0, 1, 4, 4, 1))

    def loss():
        return tf.reduce_sum(tf.image.resize(w, (2, 2), "area") ** 2)

    for function in (loss, lambda: tf.function(loss)()):
        with pytest.raises(hvp.SecondDerivativeError, match=r"ResizeArea.*avg_pool2d") as caught:
            hvp.HessianOperator(function, w)
        if function is loss:
            assert line_of(loss) in str(caught.value)
    # What the loss itself raises is not taken for it.
    with pytest.raises(KeyError, match="unknown"):
        hvp.HessianOperator(lambda: {}["unknown"], w, engine="tape")


def test_own_gradient_of_a_resize_is_trusted():
    z = image_variable()
    interpolate = tf.constant(random(1, 8, 4))

    def resize_by_products(z):
        return tf.einsum("ai,bj,nijc->nabc", interpolate, interpolate, z)

    @tf.custom_gradient
    def resize(z):
        unused_by_the_gradient = 0 * tf.image.resize(z, (8, 8))
        result = resize_by_products(z) + unused_by_the_gradient
        return result, lambda u: tf.einsum("ai,bj,nabc->nijc", interpolate, interpolate, u)

    v = random(2, 48)
    with hvp.HessianOperator(lambda: tf.reduce_sum(resize(z) ** 3), z) as H:
        got = H @ v
    with hvp.HessianOperator(lambda: tf.reduce_sum(resize_by_products(z) ** 3), z) as H:
        np.testing.assert_allclose(got, H @ v, rtol=1e-4, atol=1e-3)


def test_true_zeros_are_not_complained_about():
    z = tf.Variable([0.3, -1.2, 2.5])

    def loss():
        jumps = tf.floor(z) + tf.round(z) + tf.sign(z) + tf.cast(z > 0, tf.float32)
        chosen = tf.one_hot(tf.argmax(z), 3)
        return tf.reduce_sum(jumps * z**2 + chosen * z + tf.nn.relu(z) + tf.stop_gradient(z) * z)

    with hvp.HessianOperator(loss, z) as H:
        jumps = np.floor(z) + np.round(z) + np.sign(z) + (z.numpy() > 0)
        np.testing.assert_allclose(H.to_dense(), np.diag(2 * jumps), rtol=1e-6)


def test_an_untraceable_loss_does_not_take_none_for_zero():
    z = image_variable()

    @tf.custom_gradient
    def squared(x):  # right once
        return x**2, lambda upstream: 2 * tf.stop_gradient(upstream * x)

    with (
        hvp.HessianOperator(
            lambda: tf.reduce_sum(squared(z)) * float(z.numpy()[0, 0, 0, 0]), z
        ) as H,
        pytest.raises(hvp.SecondDerivativeError, match="traced"),
    ):
        H @ np.ones(48)


def test_the_tables_agree_with_tensorflows_registry():
    """Fails first when TensorFlow learns a derivative, so that the table can lose a row."""
    registered = filter(is_registered, MISSING_DERIVATIVES)
    learned = {kind for kind in registered if registered_derivative(kind) is not None}
    assert learned - IN_PART <= {"PreventGradient"}  # whose gradient function raises
    known = {*dir(tf.raw_ops), "PyFunc", "PyFuncStateless", "EagerPyFunc"}
    assert {*MISSING_DERIVATIVES, *CONSTANT_OPERATIONS} - known == set()
