"""The Lanczos method, from several vectors at once, with full reorthogonalization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import tensorflow as tf

from hvp._spectra.probes import Probes

# An invariant space is exhausted where the next vector is this many rounding units of the largest.
_ROUNDING = 32
# A smaller weight is a rounding error.
NOTHING = 1e-14
# Vectors of one tensor. More would be copied too often, fewer multiplied one by one.
_CHUNK = 16


@dataclass(frozen=True)
class Quadrature:
    """Gauss quadratures of the spectral measures of several vectors.

    The measure of a unit vector `v` has the weight `(q' v)**2` at the eigenvalue of each
    eigenvector `q`. The quadrature integrates polynomials of a degree less than twice the number of
    nodes exactly.

    All arrays have the shape `(vectors, steps)`. The nodes are Ritz values, in increasing order;
    where a vector has fewer, one is repeated without weight. Each row of weights adds up to one. An
    eigenvalue is no farther from a node than the node's entry in `residuals`, the norms of the
    residuals of the Ritz vectors.
    """

    nodes: np.ndarray
    weights: np.ndarray
    residuals: np.ndarray


def quadratures(probes: Probes, starts: np.ndarray, steps: int) -> Quadrature:
    """Run the Lanczos method from several vectors, the rows of `starts`.

    Damping is included. At most `n` steps are of use.
    """
    steps = min(steps, probes.matrix.size)
    dtype = starts.dtype
    lengths = np.linalg.norm(starts.astype(np.float64), axis=1, keepdims=True)
    vectors = (starts / lengths).astype(dtype)
    chunks = [tf.constant(vectors)[:, tf.newaxis]]
    diagonal, beside = np.zeros((2, len(starts), steps))
    for step in range(steps):
        products = probes.multiply(vectors)
        diagonal[:, step] = np.sum(vectors * products, axis=1, dtype=np.float64)
        rest = tf.constant(products)[:, tf.newaxis]
        for _ in range(2):  # because of rounding
            rest -= tf.add_n([tf.matmul(tf.matmul(rest, c, transpose_b=True), c) for c in chunks])
        rest = rest[:, 0].numpy()
        norms = np.linalg.norm(rest.astype(np.float64), axis=1)
        scale = np.maximum(np.abs(diagonal).max(axis=1), beside.max(axis=1))
        exhausted = norms <= _ROUNDING * np.finfo(dtype).eps * scale
        beside[:, step] = np.where(exhausted, 0, norms)
        # What is exhausted goes on with zeros, which have no weight.
        vectors = np.divide(
            rest, norms[:, np.newaxis], out=np.zeros_like(rest), where=~exhausted[:, np.newaxis]
        ).astype(dtype)
        if step + 1 < steps:
            new, last = tf.constant(vectors)[:, tf.newaxis], chunks.pop()
            is_full = last.shape[1] == _CHUNK
            chunks += [last, new] if is_full else [tf.concat([last, new], axis=1)]
    results = []
    for a, b in zip(diagonal, beside):
        nodes, mixing = scipy.linalg.eigh_tridiagonal(a, b[: steps - 1])
        weights = mixing[0] ** 2
        # Nodes without weight, such as the zeros of a space that is exhausted, are not eigenvalues.
        nodes = np.where(weights > NOTHING, nodes, nodes[np.argmax(weights)])
        order = np.argsort(nodes, kind="stable")
        results.append((nodes[order], weights[order], np.abs(b[-1] * mixing[-1])[order]))
    nodes, weights, residuals = (np.array(part) for part in zip(*results))
    return Quadrature(nodes, weights, residuals)
