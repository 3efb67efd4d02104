"""Checks and casts of NumPy arrays that enter or leave the package."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import GraphModeError, InvalidVectorError, NonFiniteError


def make_array(array: Any) -> np.ndarray:
    """Return `array` as an ndarray; raise `InvalidVectorError` if it cannot be converted."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, tf.Tensor) and not hasattr(array, "numpy"):
        raise GraphModeError(
            "v is a tensor that has no value yet, because TensorFlow is tracing a graph",
            "arrays, or tensors with values",
            "inside a tf.function call product(v)",
        )
    try:
        with warnings.catch_warnings():  # old NumPy versions only warn of ragged lists
            warnings.simplefilter("error")
            return np.asarray(array)
    except (TypeError, ValueError, Warning) as error:
        raise InvalidVectorError(
            f"v is a {type(array).__name__} that cannot be converted to an array",
            "a vector of real numbers",
            "for a nest like the variables call product(v), or flatten(v) first",
        ) from error


def refuse_graphs(what: str) -> None:
    """Raise `GraphModeError` while TensorFlow traces a graph, where there are no arrays."""
    if not tf.executing_eagerly():
        raise GraphModeError(
            f"{what} was asked for as an array while TensorFlow traces a graph",
            "eager execution, or products of tensors",
            "inside a tf.function call product(v) with a tensor; or ask outside of it",
        )


def check_array(
    array: Any, rows: int, dtype: np.dtype, *, ndims: tuple[int, ...], name: str = "v"
) -> np.ndarray:
    """Return a vector or block of columns as an ndarray of finite real numbers of one dtype.

    The first axis must have length `rows`, and the number of axes must be in `ndims`; if that is
    `(1, 2)`, a second axis must have length 1. Integers and booleans are cast as well, because
    scipy passes zeros of type int8. Anything else, and entries that are not finite after the cast,
    raise an `InvalidVectorError`, in which `name` stands for the array.
    """
    if not isinstance(array, np.ndarray):
        array = make_array(array)
    if array.dtype.kind not in "fiub" and array.dtype.name not in ("bfloat16",):
        remedy = (
            "multiply its real and imaginary parts separately" if array.dtype.kind == "c" else ""
        )
        raise InvalidVectorError(f"{name} is of type {array.dtype}", "real numbers", remedy)
    wrong_columns = array.ndim == 2 and ndims == (1, 2) and array.shape[1] != 1
    if array.ndim not in ndims or array.shape[0] != rows or wrong_columns:
        block = f"({rows}, k)" if 1 not in ndims else f"({rows},) or ({rows}, 1)"
        expected = f"({rows},)" if ndims == (1,) else block
        raise InvalidVectorError(f"{name} has shape {array.shape}", f"shape {expected}")
    if array.dtype == dtype:
        cast = array
    else:
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
    if not _all_finite(cast):
        raise InvalidVectorError(
            f"{name} has {int(np.sum(~np.isfinite(cast)))} entries that are not finite in {dtype}",
            "finite numbers",
            "look for the division or overflow that produced them",
        )
    return cast


def _all_finite(array: np.ndarray) -> bool:
    """Return `np.isfinite(array).all()`, usually without a temporary array."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(array, axis=None)
    # If the sum is finite, so is every entry. The sum of finite entries may still overflow.
    return math.isfinite(total) or bool(np.isfinite(array).all())


def check_product(product: np.ndarray) -> np.ndarray:
    """Return the product if it is finite; raise `NonFiniteError` otherwise."""
    if not _all_finite(product):
        raise NonFiniteError(
            f"the product has {int(np.sum(~np.isfinite(product)))} entries that are not finite",
            "a loss that is twice differentiable at this point, and no overflow",
            "look for norms and square roots near zero, or scale v down",
        )
    return product
