"""None is not zero: derivatives TensorFlow lacks raise, true zeros do not."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

import hvp
from hvp._linearize.second_derivatives import CONSTANT_OPERATIONS, MISSING_DERIVATIVES
from tests.cases import random


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


# TensorFlow 2.16 has no entry for it, and its own tapes raise where later ones answer None.
needs_silent_resize = pytest.mark.skipif(
    not is_registered("ResizeBilinearGrad"), reason="this TensorFlow raises by itself"
)


def image_variable():
    return tf.Variable(random(0, 1, 4, 4, 3) ** 2 + 0.5)


def crop(z):
    return tf.image.crop_and_resize(z, [[0.1, 0.1, 0.8, 0.8]], [0], (3, 3))


REFUSED = {
    "ResizeBilinearGrad": lambda z: tf.image.resize(z, (8, 8)),
    "ResizeNearestNeighborGrad": lambda z: tf.image.resize(z, (8, 8), "nearest"),
    "ResizeBicubicGrad": lambda z: tf.image.resize(z, (8, 8), "bicubic"),
    "ScaleAndTranslateGrad": lambda z: tf.image.resize(z, (8, 8), "lanczos3"),
    "LRNGrad": tf.nn.lrn,
    "SoftsignGrad": tf.nn.softsign,
    "CropAndResizeGradImage": crop,
    "HSVToRGB": lambda z: z + tf.image.hsv_to_rgb(z / 10),
    "RandomShuffle": lambda z: z + tf.random.shuffle(z),
    "FakeQuantWithMinMaxArgsGradient": tf.quantization.fake_quant_with_min_max_args,
    "EagerPyFunc": lambda z: tf.ensure_shape(tf.py_function(tf.sin, [z], tf.float32), z.shape),
    "PyFunc": lambda z: z + tf.reshape(tf.numpy_function(np.sin, [z], tf.float32), z.shape),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_missing_derivative_raises_when_the_operator_is_built(kind):
    z = image_variable()
    with pytest.raises(hvp.SecondDerivativeError, match=kind):
        hvp.HessianOperator(lambda: tf.reduce_mean(REFUSED[kind](z) ** 3), z)


@pytest.mark.parametrize("kind", ["ResizeBilinearGrad", "SoftsignGrad"])
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
        positive = tf.reduce_sum(z) > 0
        return tf.cond(positive, lambda: tf.reduce_sum(function(z)), lambda: 0.0)

    for within in (in_function, in_loop, in_branch):
        with pytest.raises(hvp.SecondDerivativeError, match=kind):
            hvp.HessianOperator(lambda f=within: tf.reduce_mean(f() ** 3), z)


@needs_silent_resize
def test_the_same_operations_off_the_way_are_no_obstacle():
    z, w = image_variable(), tf.Variable(2.0)

    def on_data():
        """Resizes an image that is no variable, in a function with a gradient by both."""
        mixed = tf.function(lambda image, w: tf.reduce_mean(tf.image.resize(image, (8, 8))) * w**3)
        return mixed(tf.ones((1, 4, 4, 3)), w)

    def beside():
        shown = tf.image.resize(z, (8, 8))
        return (
            tf.reduce_sum(z) * 0
            + w**3
            + tf.cast(tf.argmax(tf.reshape(shown, [-1])) * 0, tf.float32)
        )

    for loss in (on_data, beside):
        with hvp.HessianOperator(loss, [w]) as H:
            np.testing.assert_allclose(H @ np.ones(1), [12.0])


@needs_silent_resize
def test_a_resize_that_enters_linearly_has_a_true_zero():
    z = image_variable()
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.image.resize(z, (8, 8))), z) as H:
        np.testing.assert_array_equal(H @ np.ones(48), np.zeros(48))


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


@needs_silent_resize
def test_an_untraceable_loss_does_not_take_none_for_zero():
    z = image_variable()
    with (
        hvp.HessianOperator(
            lambda: tf.reduce_sum(tf.image.resize(z, (8, 8)) ** 3) * float(z.numpy()[0, 0, 0, 0]), z
        ) as H,
        pytest.raises(hvp.SecondDerivativeError, match="traced"),
    ):
        H @ np.ones(48)


def test_the_tables_agree_with_tensorflows_registry():
    """Fails first when TensorFlow learns a derivative, so that the table can lose a row."""
    registered = filter(is_registered, MISSING_DERIVATIVES)
    learned = {kind for kind in registered if registered_derivative(kind) is not None}
    assert learned == {"EagerPyFunc"}
    known = {*dir(tf.raw_ops), "PyFunc", "PyFuncStateless", "EagerPyFunc"}
    assert {*MISSING_DERIVATIVES, *CONSTANT_OPERATIONS} - known == set()
