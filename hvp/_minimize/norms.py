"""The norms of trust regions: units of the variables, and preconditioners of the caller."""

from __future__ import annotations

import functools
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
from hvp._solve.sparse import SparseInverse
from hvp._vectors.space import Space

# The name of sparse factors of the Hessian itself.
SPARSE = "sparse"
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
    if isinstance(preconditioner, str) and preconditioner == SPARSE:
        preconditioner = functools.partial(SparseInverse, positive=True)
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
    return _given(preconditioner, position)


def _bounds(box: Box) -> bool:
    """Return whether any entry has a bound."""
    return bool(tf.reduce_any(tf.math.is_finite(box.lower) | tf.math.is_finite(box.upper)))


def _given(preconditioner: Any, position: Position) -> Kind:
    """Return the kind of the caller's operator, or of what the caller's function makes."""
    size, dtype = position.size, np.dtype(position.dtype)
    kinds = (LinearOperator, np.ndarray)
    is_operator = isinstance(preconditioner, kinds) or scipy.sparse.issparse(preconditioner)
    current: list[LinearOperator] = []

    def make(operator: SymmetricOperator, rank: int, seed: Any) -> list[tf.Tensor]:
        current.clear()
        given = preconditioner if is_operator else preconditioner(operator)
        if not (isinstance(given, kinds) or scipy.sparse.issparse(given)):
            raise HvpError(
                f"the preconditioner is a function that returns {type(given).__name__}",
                "a LinearOperator or matrix that approximates the inverse of the Hessian",
            )
        made = aslinearoperator(given)
        if made.shape != (size, size):
            raise HvpError(
                f"the preconditioner has the shape {made.shape}",
                f"the shape ({size}, {size}), that of the inverse of the Hessian",
            )
        vectors = np.random.default_rng(seed).standard_normal((size, 2)).astype(dtype)
        products = vectors.T @ made.matmat(vectors)
        difference = abs(products[0, 1] - products[1, 0])
        lengths = products.diagonal()
        if not (lengths.min() > 0 and difference <= _ASYMMETRY * lengths.max()):
            raise HvpError(
                "the preconditioner is not symmetric and positive definite: of two random vectors, "
                f"u' M u = {lengths[0]:.3g}, v' M v = {lengths[1]:.3g}, and "
                f"|u' M v - v' M u| = {difference:.3g}",
                "an approximation of the inverse of a positive definite matrix",
            )
        current.append(made)
        return []

    def multiply(rows: np.ndarray) -> np.ndarray:
        return np.asarray(current[0].matmat(rows.T)).T

    space = Space([0], ["vector"], [(size,)], [tf.as_dtype(dtype)])
    product = ArrayMap(multiply, space)
    return Kind(
        make=make,
        shapes=lambda size, rank: [],
        solve=lambda vector, tensors: product.apply(vector),
        calls_python=True,
    )
