"""Entries that stay where they are, and bounds of the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError
from hvp._minimize.position import Position


class Box(NamedTuple):
    """Bounds of the entries of the flat vector, infinite where there are none, and a mask.

    `movable` is one for entries that may move, and zero for those that are fixed.
    """

    lower: tf.Tensor
    upper: tf.Tensor
    movable: tf.Tensor

    def clipped(self, x: tf.Tensor) -> tf.Tensor:
        """Return the point of the box that is nearest, fixed entries apart."""
        inside = tf.clip_by_value(x, self.lower, self.upper)
        return tf.where(self.movable > 0, inside, x)

    def free(self, x: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Return a mask of the entries that may move in the direction in which the loss falls."""
        at_bound = ((x <= self.lower) & (gradient > 0)) | ((x >= self.upper) & (gradient < 0))
        return tf.where(at_bound, tf.zeros_like(x), self.movable)


def box_of(bounds: Any, fixed: Any, position: Position) -> Box | None:
    """Return the box of the arguments `bounds` and `fixed`; None if there is neither.

    Raise `HvpError` if they do not fit the variables, or if the variables are outside.
    """
    if bounds is None and fixed is None:
        return None
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):  # scipy.optimize.Bounds
        bounds = tuple(end[0] if np.size(end) == 1 else end for end in (bounds.lb, bounds.ub))
    if not (bounds is None or (isinstance(bounds, (tuple, list)) and len(bounds) == 2)):
        raise HvpError(
            f"the argument bounds is {type(bounds).__name__}",
            "a pair (lower, upper), each a number, a flat vector or a nest like the variables",
            "pass bounds=(0.0, float('inf')) for variables that are not negative",
        )
    pairs = [len(end) if isinstance(end, tuple) else 0 for end in bounds or ()]
    if position.size == 2 and pairs == [2, 2]:
        raise HvpError(
            f"bounds is {bounds!r} for two entries, which may be the pair (lower, upper), or a "
            "pair for each entry, as scipy's methods take it",
            "bounds that can be told apart",
            "pass scipy.optimize.Bounds(lower, upper), or two lists or arrays",
        )
    ends = bounds or (-np.inf, np.inf)
    lower, upper = (position.vector_of(end, "bounds") for end in ends)
    if not (lower <= upper).all():
        raise HvpError(
            f"{int((~(lower <= upper)).sum())} lower bounds are above the upper ones",
            "bounds=(lower, upper)",
        )
    mask = np.zeros(position.size) if fixed is None else position.vector_of(fixed, "fixed")
    if not np.isin(mask, (0, 1)).all():
        raise HvpError("the argument fixed has entries that are neither true nor false", "a mask")
    x = position.read().numpy()
    # In a narrower type a variable could not reach its bound.
    lower, upper = position.rounded(lower), position.rounded(upper)
    outside = int(np.sum(~((lower <= x) & (x <= upper))))
    if outside and not (mask != 0).all():
        raise HvpError(
            f"{outside} of {position.size} entries of the variables are outside of their bounds",
            "a start between them, with lower bounds that are not above the upper ones",
            "assign tf.clip_by_value(variable, lower, upper) to the variables first",
        )
    tensors = (tf.constant(array, position.dtype) for array in (lower, upper, mask == 0))
    return Box(*tensors)
