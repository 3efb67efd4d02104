"""Float32 graphs computed in float64: the same results, of fewer rounding errors."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import CASES, LONG_CASES, dense_hessian, long, random, relative_error

NAMES = [long(name) if name in LONG_CASES else name for name in CASES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.few(1)
def test_products_are_those_of_the_float64_model(name):
    single, double = CASES[name]("float32"), CASES[name]("float64")
    for variable, wide in zip(single.tensorflow_variables(), double.tensorflow_variables()):
        wide.assign(tf.cast(variable, tf.float64))
    want = dense_hessian(double)
    with hvp.HessianOperator(single.loss, single.variables, single.data) as H:
        product = inside.multiply_in_float64(H, tf.eye(H.shape[0]))
        assert product.dtype == tf.float32
        assert relative_error(product.numpy(), want) < 2e-6


def test_only_the_result_is_rounded():
    # In float32, 1 + 1e-8 is 1, and the product is zero.
    w = tf.Variable([1.0, 2.0])
    one, small = tf.Variable(1.0, trainable=False), tf.Variable(1e-8, trainable=False)
    loss = lambda: tf.reduce_sum(((one + small) - one) * w**2)  # noqa: E731
    with hvp.HessianOperator(loss, w) as H:
        assert not (H @ np.eye(2, dtype="float32")).any()
        product = inside.multiply_in_float64(H, tf.eye(2)).numpy()
        assert np.allclose(product, 2e-8 * np.eye(2), rtol=1e-6, atol=0)


def test_operations_without_float64_stay_as_they_are():
    x = random(0, 2, 5, 5, 3)
    w = tf.Variable(random(1, 1, 1, 3, 4))

    def loss():
        # Local response normalization exists in float32 and narrower types only.
        return tf.reduce_sum(tf.tanh(tf.nn.conv2d(tf.nn.lrn(x), w, 1, "SAME")) ** 2)

    with hvp.HessianOperator(loss, w) as H:
        want = H @ np.eye(12, dtype="float32")
        assert relative_error(inside.multiply_in_float64(H, tf.eye(12)).numpy(), want) < 1e-5
