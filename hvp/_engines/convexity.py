"""Whether a loss is convex in the predictions of each example.

The Hessian of a mean loss in the predictions has a block for each example. The Lanczos method runs
on all blocks at once: a product with the whole matrix multiplies a vector of every block. The
eigenvalues that it finds lie inside the spectrum of the block, so that a negative one proves that
the block has one, and the outermost are found first.

Reference: G. H. Golub and C. F. Van Loan, "Matrix Computations", 4th edition, section 10.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Steps of the method, at most. As many as an example has predictions find all eigenvalues.
_STEPS = 12
# What the first vectors are drawn from.
_SEED = (41, 43)
# Negative eigenvalues count as zeros if they are smaller than the first part of the largest one of
# their block, or than the second part of the largest of all blocks.
_ZEROS = {tf.float64: (1e-9, 1e-13), tf.float32: (1e-4, 1e-5)}
_ZEROS_IN_HALF_PRECISION = (0.05, 0.02)


def is_convex(
    multiply: Callable[[Sequence[tf.Tensor]], Sequence[Any]],
    predictions: Sequence[tf.Tensor],
    examples: Any,
) -> tf.Tensor:
    """Return whether no block has a negative eigenvalue, up to rounding.

    `multiply` takes tensors shaped like the predictions and returns their products with the Hessian
    in the predictions, None for zeros. `examples` is the number of blocks: 1, or the length of the
    first axes as a tensor.
    """
    dtype = tf.float64 if predictions[0].dtype == tf.float64 else tf.float32
    sizes = [tf.size(part) // examples for part in predictions]

    def product(rows: tf.Tensor) -> tf.Tensor:
        pieces = tf.split(rows, sizes, axis=1, num=len(predictions))
        tangents = [
            tf.cast(tf.reshape(v, tf.shape(p)), p.dtype) for v, p in zip(pieces, predictions)
        ]
        products = [
            tf.zeros_like(v) if u is None else tf.cast(tf.reshape(u, tf.shape(v)), dtype)
            for u, v in zip(multiply(tangents), pieces)
        ]
        return tf.concat(products, axis=1)

    shape = [examples, tf.add_n(sizes)]
    v = _unit(tf.random.stateless_normal(shape, _SEED, dtype=dtype))[0]
    before, coupling = tf.zeros_like(v), tf.zeros(shape[:1], dtype)
    diagonal, off_diagonal = [], []
    for _ in range(_steps(predictions, examples)):
        off_diagonal.append(coupling)
        u = product(v) - coupling[:, tf.newaxis] * before
        diagonal.append(tf.reduce_sum(u * v, axis=1))
        before, (v, coupling) = v, _unit(u - diagonal[-1][:, tf.newaxis] * v)
    beside = tf.linalg.diag(tf.stack(off_diagonal[1:], axis=1), k=-1) if len(diagonal) > 1 else 0.0
    # eigvalsh reads the lower half alone.
    eigenvalues = tf.linalg.eigvalsh(tf.linalg.diag(tf.stack(diagonal, axis=1)) + beside)
    largest = tf.reduce_max(tf.abs(eigenvalues), axis=1)
    own, overall = _ZEROS.get(predictions[0].dtype, _ZEROS_IN_HALF_PRECISION)
    # Certain predictions have no curvature but rounding errors, of this size.
    scale = tf.maximum(tf.reduce_max(largest), 1 / tf.cast(examples, dtype))
    allowed = own * largest + overall * scale
    return tf.reduce_all(tf.reduce_min(eigenvalues, axis=1) >= -allowed)


def _unit(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Divide rows by their norms, and return both; rows of zeros stay as they are."""
    norms = tf.norm(rows, axis=1)
    return tf.math.divide_no_nan(rows, norms[:, tf.newaxis]), norms


def _steps(predictions: Sequence[tf.Tensor], examples: Any) -> int:
    """Return how many steps find all eigenvalues, if that is known and not too many."""
    is_one = isinstance(examples, int)
    shapes = [part.shape if is_one else part.shape[1:] for part in predictions]
    if not all(shape.is_fully_defined() for shape in shapes):
        return _STEPS
    return min(_STEPS, sum(shape.num_elements() for shape in shapes))
