"""The norms of trust regions: units of the variables, and preconditioners of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from hvp._engines.array_map import ArrayMap
from hvp._errors import HvpError
from hvp._minimize.constraints import Box
from hvp._minimize.position import Position
from hvp._operators.symmetric import SymmetricOperator
from hvp._solve.preconditioners import Kind
from hvp._vectors.space import Space

# How far a preconditioner of the caller may be from a symmetric one, relative to its products.
_ASYMMETRY = 1e-3


def scale_of(x_scale: Any, preconditioner: Any, position: Position) -> np.ndarray | None:
    """Return the units of the entries, of shape `(n,)`; None if they all are one."""
    if x_scale is None:
        return None
    if preconditioner is not None:
        raise HvpError(
            "both x_scale and a preconditioner are given",
            "one of them, because each says in which norm steps are measured",
            "scale the preconditioner instead",
        )
    scale = position.vector_of(x_scale, "x_scale")
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise HvpError("x_scale has entries that are not positive and finite", "positive numbers")
    return scale


def kind_of(
    preconditioner: Any, scale: np.ndarray | None, box: Box | None, position: Position
) -> Any:
    """Return a kind of preconditioner, or its name if it is built in."""
    if scale is not None:
        squares = tf.constant(scale**2, position.dtype)
        return Kind(
            make=lambda operator, rank, seed: [squares],
            shapes=lambda size, rank: [[size]],
            solve=lambda rows, tensors: rows * tensors[0],
        )
    named = preconditioner is None or isinstance(preconditioner, str)
    separate = named and preconditioner in (None, "diagonal")
    if box is not None and not separate and _bounds(box):
        raise HvpError(
            "bounds are given together with a preconditioner that is not diagonal",
            "steps that can be cut off at the bounds of each entry",
            "pass preconditioner='diagonal', x_scale or none of them",
        )
    if named:
        return preconditioner
    return _Given(preconditioner, position).kind


def _bounds(box: Box) -> bool:
    """Return whether any entry has a bound."""
    return bool(tf.reduce_any(tf.math.is_finite(box.lower) | tf.math.is_finite(box.upper)))


class _Given:
    """A preconditioner of the caller: an operator, or a function that makes one at each point."""

    def __init__(self, given: Any, position: Position) -> None:
        kinds = (LinearOperator, np.ndarray)
        self._is_operator = isinstance(given, kinds) or scipy.sparse.issparse(given)
        self._given, self._size = given, position.size
        self._space = Space([0], ["vector"], [(position.size,)], [tf.as_dtype(position.dtype)])
        self._inverse: LinearOperator | None = None
        multiply = ArrayMap(self._multiply, self._space)
        self.kind = Kind(
            make=self._make,
            shapes=lambda size, rank: [],
            solve=lambda vector, tensors: multiply.apply(vector),
            calls_python=True,
        )

    def _make(self, operator: SymmetricOperator, rank: int, seed: Sequence[int]) -> list[tf.Tensor]:
        del rank
        self._inverse = None
        made = aslinearoperator(self._given if self._is_operator else self._given(operator))
        if made.shape != (self._size, self._size):
            raise HvpError(
                f"the preconditioner has the shape {made.shape}",
                f"the shape ({self._size}, {self._size}), that of the inverse of the Hessian",
            )
        one, other = np.random.default_rng(seed).standard_normal((2, self._size))
        images = [
            np.ravel(made.matvec(v.astype(self._space.dtype.as_numpy_dtype))) for v in (one, other)
        ]
        lengths = one @ images[0], other @ images[1]
        difference = abs(one @ images[1] - other @ images[0])
        if not (min(lengths) > 0 and difference <= _ASYMMETRY * max(lengths)):
            raise HvpError(
                "the preconditioner is not symmetric and positive definite: of two random vectors, "
                f"u' M u = {lengths[0]:.3g}, v' M v = {lengths[1]:.3g}, and "
                f"|u' M v - v' M u| = {difference:.3g}",
                "an approximation of the inverse of a positive definite matrix",
            )
        self._inverse = made
        return []

    def _multiply(self, rows: np.ndarray) -> np.ndarray:
        assert self._inverse is not None
        return np.asarray(self._inverse.matmat(rows.T)).T
