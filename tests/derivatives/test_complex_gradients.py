"""Gradients of complex numbers, which XLA computes without the conjugates."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import Problem, dense_hessian, random

FUNCTIONS = {
    "reciprocal": tf.math.reciprocal,
    "sqrt": tf.sqrt,
    "rsqrt": tf.math.rsqrt,
    "quotient": lambda z: (z + 1) / (z * z + 3),
    "angle": lambda z: tf.complex(tf.math.angle(z), tf.math.real(z)),
    "in a loop": lambda z: tf.while_loop(
        lambda i, _: i < 2, lambda i, z: (i + 1, tf.sqrt(z + 2)), (0, z), maximum_iterations=2
    )[1],
}


def problem(*names):
    """A sum over functions, each of three variables of its own."""
    w = tf.Variable(random(0, 3 * len(names)).astype(np.float64) + 1.5)

    def loss():
        total = 0.0
        for name, part in zip(names, tf.split(w, len(names))):
            z = FUNCTIONS[name](tf.complex(tf.sin(part) + 2, part))
            total += tf.reduce_sum(tf.math.real(z * z) + tf.math.imag(z) ** 2)
        return total

    return Problem(loss, w)


# A loop, which XLA does not take, by itself.
@pytest.mark.parametrize("names", [list(FUNCTIONS)[:-1], ["in a loop"]], ids=["functions", "loop"])
@pytest.mark.few(1)
def test_products_are_right(names):
    complex_problem = problem(*names)
    want = dense_hessian(complex_problem)
    units = np.eye(len(want))
    for jit_compile in (False, True):
        options = {"jit_compile": jit_compile}
        with hvp.HessianOperator(complex_problem.loss, complex_problem.variables, **options) as H:
            np.testing.assert_allclose(H.to_dense(), want, atol=1e-8)
            columns = [H @ e for e in units]
            np.testing.assert_allclose(np.stack(columns, axis=1), want, atol=1e-8)
            if names == ["in a loop"]:
                continue
            assert H.stats.jit_compile is jit_compile
            product = tf.function(H.product, jit_compile=jit_compile)
            np.testing.assert_allclose(product(tf.constant(units[0])), want[:, 0], atol=1e-8)


def test_xla_still_has_them_wrong(monkeypatch):
    """When it has not, the module `complex_gradients` can go."""
    inside.use_tensorflow_operations(monkeypatch)
    complex_problem = problem("reciprocal")
    with hvp.HessianOperator(
        complex_problem.loss, complex_problem.variables, jit_compile=True
    ) as H:
        assert np.abs(H.to_dense() - dense_hessian(complex_problem)).max() > 1e-3
