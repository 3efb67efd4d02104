"""A batch of matrices times one: no gradient by the one matrix is a batch of gradients."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import Problem, dense_hessian, random, relative_error

BATCH, ROWS, INNER, OUTER = 7, 3, 4, 2
# How the loss multiplies a batch by a matrix, and the shape of the matrix.
PRODUCTS = {
    "plain": (tf.matmul, (INNER, OUTER)),
    "transposed": (lambda x, w: tf.matmul(x, w, transpose_b=True), (OUTER, INNER)),
    "two axes of a batch": (lambda x, w: tf.matmul(x[:, tf.newaxis], w), (INNER, OUTER)),
    "the batch transposed": (
        lambda x, w: tf.matmul(tf.transpose(x, [0, 2, 1]), w, transpose_a=True),
        (INNER, OUTER),
    ),
    "complex": (
        lambda x, w: tf.math.real(tf.matmul(_complex(x), _complex(w))),
        (INNER, OUTER),
    ),
    "complex, adjoint": (
        lambda x, w: tf.math.imag(tf.matmul(_complex(x), _complex(w), adjoint_b=True)),
        (OUTER, INNER),
    ),
}


def _complex(x):
    return tf.complex(tf.sin(x), tf.cos(x))


def problem(name, dtype="float64", wrap=lambda f: f):
    multiply, shape = PRODUCTS[name]
    first = tf.Variable(random(0, INNER, INNER, dtype=dtype))
    second = tf.Variable(random(1, *shape, dtype=dtype))
    x = random(2, BATCH, ROWS, INNER, dtype=dtype)

    def loss():
        hidden = wrap(lambda h: tf.tanh(tf.matmul(h, first)))(x)
        return tf.reduce_mean(tf.tanh(multiply(hidden, second)) ** 2)

    return Problem(loss, [first, second])


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("wrap", [lambda f: f, hvp.recompute], ids=["plain", "recomputed"])
@pytest.mark.few(1)
def test_products_are_right_on_both_engines(name, wrap):
    want = dense_hessian(problem(name))
    case = problem(name, wrap=wrap)
    with hvp.HessianOperator(case.loss, case.variables) as H:
        assert relative_error(H.to_dense(), want) < 1e-9
        columns = np.stack([H @ e for e in np.eye(H.shape[0])], axis=1)
        assert relative_error(columns, want) < 1e-9
    with hvp.HessianOperator(case.loss, case.variables, engine="tape") as H:
        assert relative_error(H.to_dense(), want) < 1e-9


@pytest.mark.parametrize("name", ["plain", "transposed", "two axes of a batch"])
def test_no_matrix_is_repeated_for_each_member_of_the_batch(name):
    case = problem(name)
    with hvp.HessianOperator(case.loss, case.variables) as H:
        program = inside.program(H)
        operations = [node.op for node in program.product_part.graph_def.node]
        assert "BroadcastTo" not in operations
        assert "MatMul" in operations
