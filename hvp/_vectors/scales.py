"""The scales of variables' entries, for steps in proportion to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# Entries whose decimal logarithms have a larger standard deviation are in different units. That of
# random numbers of a normal distribution is half of one.
_SPREAD = 1.5


def entry_scales(variables: Sequence[tf.Variable]) -> np.ndarray:
    """Return the scale of each entry, of shape `(n,)`: the root mean square of its variable.

    If the entries of a variable differ by orders of magnitude, like parameters in different units,
    each is its own scale. Variables that are all zero take the smallest scale of the others, or one
    if there is none.
    """
    scales = [_scales(np.abs(tf.cast(v, tf.float64).numpy().ravel())) for v in variables]
    positive = [scale.min() for scale in scales if scale.any()]
    least = min(positive) if positive else 1.0
    return np.concatenate([scale if scale.any() else scale + least for scale in scales])


def _scales(magnitudes: np.ndarray) -> np.ndarray:
    """Return the scales of a variable's entries; zeros if all of them are zero."""
    positive = magnitudes[magnitudes > 0]
    if positive.size and np.std(np.log10(positive)) > _SPREAD:
        return np.where(magnitudes > 0, magnitudes, positive.min())
    return np.full(magnitudes.shape, np.sqrt(np.mean(magnitudes**2)))
