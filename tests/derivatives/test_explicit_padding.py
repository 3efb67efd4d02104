"""Convolutions with explicit padding: right, and not by TensorFlow's slow kernel."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import Problem, dense_hessian, random, relative_error

# The paddings of the axes of space, and strides. On the CPU, TensorFlow has no gradient of dilated
# convolutions in float64.
CONVOLUTIONS = {
    "as same": (((1, 1), (1, 1)), 1),
    "uneven": (((0, 2), (1, 0)), 1),
    "strides that leave a rest": (((1, 1), (2, 1)), 2),
}


def problem(name, dtype, wrap=lambda f: f):
    paddings, strides = CONVOLUTIONS[name]
    kernels = [tf.Variable(random(i, 3, 3, 2, 2, dtype=dtype, scale=0.4)) for i in range(2)]
    x = random(2, 2, 6, 5, 2, dtype=dtype)

    def layer(h, kernel):
        padding = [(0, 0), *paddings, (0, 0)]
        return tf.tanh(tf.nn.conv2d(h, kernel, strides, padding))

    def loss():
        h = x
        for kernel in kernels:
            h = wrap(layer)(h, kernel)
        return tf.reduce_mean(h**2)

    return Problem(loss, kernels)


def slow_gradients(part):
    gradients = [node for node in part.all_nodes if node.op.startswith("Conv2DBackprop")]
    assert {node.op for node in gradients} == {"Conv2DBackpropInput", "Conv2DBackpropFilter"}
    return [node for node in gradients if node.attr["padding"].s == b"EXPLICIT"]


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.few(1)
def test_products_are_right_and_reach_no_slow_kernel(name):
    want = dense_hessian(problem(name, "float64"))
    for dtype, close in (("float32", 1e-5), ("float64", 1e-9)):
        padded = problem(name, dtype)
        with hvp.HessianOperator(padded.loss, padded.variables) as H:
            columns = np.stack([H @ e for e in np.eye(H.shape[0], dtype=dtype)], axis=1)
            assert relative_error(columns, want) < close
            assert relative_error(H.to_dense(), want) < close
            program = inside.program(H)
            assert not slow_gradients(program.once_part) + slow_gradients(program.product_part)


@pytest.mark.parametrize("wrap", [tf.function, hvp.recompute])
@pytest.mark.few(1)
def test_also_inside_functions_and_where_recomputed(wrap):
    want = dense_hessian(problem("uneven", "float64"))
    padded = problem("uneven", "float64", wrap)
    with hvp.HessianOperator(padded.loss, padded.variables) as H:
        assert relative_error(H.to_dense(), want) < 1e-9
        assert not slow_gradients(inside.program(H).product_part)
    with hvp.HessianOperator(padded.loss, padded.variables, engine="tape") as H:
        assert relative_error(H.to_dense(), want) < 1e-9
