"""Solves that one process begins and another one resumes."""

import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import aslinearoperator

import hvp
from tests.solve.systems import columns, matrix, operator


def ill_conditioned(method, checkpoint=None):
    """Return a solution that takes many iterations, and the number of products by this process."""
    H = operator(matrix(np.geomspace(1e-3, 1, 300)))
    result = hvp.solve(H, columns(300, 12), method=method, rtol=1e-8, checkpoint=checkpoint)
    return result, H.stats.products


def preconditioned(checkpoint):
    """Solve with an operator as the preconditioner, whose address differs in each process."""
    factors = np.geomspace(1, 1e3, 40)
    w = tf.Variable(np.ones(40))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(factors * w**2) / 2, w)
    M = aslinearoperator(np.diag(1 / factors**0.5))
    result = hvp.solve(H, np.ones(40), method="cg", M=M, checkpoint=checkpoint)
    return result, H.stats.products
