"""Graphs that call Python, where TensorFlow has one thread for the operations of graphs."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import random

N = 6
X = random(0, 20, N, dtype="float64")
MATRIX = 2 * X.T @ X / 20 + np.eye(N)
ENGINES = [{"engine": "tape"}, {"batch_size": 7}, {"batch_size": 7, "memory_limit": 3000}]


@pytest.fixture
def one_thread(monkeypatch):
    """Say that there is one thread; `test_bare_install` runs with a single one."""
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")


def operator(w=None, **options):
    w = tf.Variable(np.ones(N)) if w is None else w

    def loss(x):
        return tf.reduce_mean(tf.linalg.matvec(x, w) ** 2) + tf.reduce_sum(w**2) / 2

    return hvp.HessianOperator(loss, w, (X,), **options)


@pytest.mark.parametrize("options", ENGINES)
@pytest.mark.few(1)
def test_solvers_run_without_graphs(one_thread, options):
    b = random(1, N, 2, dtype="float64")
    with operator(**options) as H:
        for M in (None, np.eye(N)):
            x = hvp.solve(H, b, method="cg", rtol=1e-10, M=M).x
            np.testing.assert_allclose(x, np.linalg.solve(MATRIX, b), rtol=1e-8)
        inverse = hvp.NeumannInverse(H, iterations=400)
        np.testing.assert_allclose(inverse @ b, np.linalg.solve(MATRIX, b), rtol=1e-6)
        result = hvp.NewtonCG(H).minimize(maxiter=20, gtol=1e-8)
        np.testing.assert_allclose(result.x, np.zeros(N), atol=1e-7)


@pytest.mark.parametrize("options", ENGINES)
def test_products_in_a_graph_are_refused(one_thread, options):
    with (
        operator(**options) as H,
        pytest.raises(hvp.HvpError, match=r"set_inter_op_parallelism_threads\(2\)"),
    ):
        tf.function(H.product)(tf.ones(N, tf.float64))


def test_an_evaluation_for_a_running_graph_is_refused(monkeypatch):
    w = tf.Variable(np.ones(N))
    with operator(w, on_stale="refresh") as H:
        product = tf.function(H.product)
        np.testing.assert_allclose(product(tf.ones(N, tf.float64)), MATRIX.sum(1), rtol=1e-10)
        w.assign(2 * w)
        monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")
        with pytest.raises(
            (hvp.HvpError, tf.errors.OpError), match="Evaluating the gradient again calls Python"
        ):
            product(tf.ones(N, tf.float64))
