"""One order of derivative of a recomputed function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import tensorflow as tf

from hvp._derivatives.suspects import SuspectOperation
from hvp._recompute.recorded import Recorded

# Takes the places of some inputs of an order (None for all of them), and returns the operations
# between these inputs and the results that have no derivative.
FindMissing = Callable[[Optional[frozenset[int]]], list[SuspectOperation]]


@dataclass(frozen=True, eq=False)
class Order:
    """One order of derivative of a function.

    Attributes
    ----------
    results : list of tf.TensorSpec
        Types and shapes of the results of a call.
    present : list of int
        Above order 0: for each result, the place of the input of the order below that it is the
        derivative by. Inputs whose derivative is zero have no result.
    run : ConcreteFunction
        Computes the results from all inputs of a call.
    recorded : Recorded
        The operation that tapes record for a call.
    missing : callable
        Finds operations without a derivative between inputs and results.
    """

    results: list[tf.TensorSpec]
    present: list[int]
    run: Any
    recorded: Recorded
    missing: FindMissing

    @property
    def cotangents(self) -> list[tf.TensorSpec]:
        """Types and shapes of the cotangents of the results."""
        return [spec for spec in self.results if has_derivatives(spec)]


def has_derivatives(tensor: Any) -> bool:
    """Whether a tensor, variable or spec is of a type that has derivatives."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def spec_of(tensor: Any) -> tf.TensorSpec:
    """Return the shape and type of a tensor or variable."""
    return tf.TensorSpec(tensor.shape, tensor.dtype)
