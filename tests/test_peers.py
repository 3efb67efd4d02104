"""The same matrices as in other frameworks, on the same weights, in float64.

A test runs where its framework is installed: pip install -e '.[peers]'.
"""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import peers

OPTIONS = [{"engine": "graph"}, {"engine": "tape"}, {"jit_compile": True}, {"batch_size": 2}]


@pytest.fixture(scope="module", params=["jax", "torch"])
def matrices(request, tmp_path_factory):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    path = tmp_path_factory.mktemp("peers") / "matrices.npz"
    subprocess.run([sys.executable, peers.__file__, request.param, str(path)], check=True)
    return np.load(path)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("matrix", peers.MATRICES)
@pytest.mark.parametrize("network", peers.SHAPES)
def test_it_is_the_same(matrices, network, matrix, options):
    if "batch_size" in options and network == "attention":
        pytest.skip("attends to all examples")
    xp = SimpleNamespace(
        array=tf.constant, tanh=tf.tanh, exp=tf.exp, log=tf.math.log, sqrt=tf.sqrt,
        mean=tf.reduce_mean, sum=lambda x: tf.reduce_sum(x, -1, keepdims=True),
        turned=tf.linalg.matrix_transpose,
    )  # fmt: skip
    variables = [tf.Variable(weights) for weights in peers.WEIGHTS[network]]

    def model(x):
        return peers.logits(xp, network, variables, x)

    def loss(z, y):
        chosen = tf.gather(z, y, axis=1, batch_dims=1)
        return tf.reduce_mean(tf.reduce_logsumexp(z, 1) - chosen)

    data = peers.X, peers.LABELS
    if matrix == "hessian":
        H = hvp.HessianOperator(lambda x, y: loss(model(x), y), variables, data, **options)
    elif matrix == "jacobian":
        H = hvp.JacobianOperator(model, variables, data[:1], **options)
    else:
        H = hvp.GaussNewtonOperator(model, loss, variables, data, **options)
    with H:
        dense = H.to_dense()
    np.testing.assert_allclose(dense, matrices[f"{network} {matrix}"], atol=1e-12)
