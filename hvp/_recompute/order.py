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

    Calls are computed by `run`, and `recorded` is the operation that tapes record for them. Above
    order 0, each of the `results` is a derivative by the input of the order below whose index is in
    `present`; inputs whose derivative is zero have no result.
    """

    results: list[tf.TensorSpec]
    present: list[int]
    run: Any
    recorded: Recorded
    missing: FindMissing

    @property
    def cotangents(self) -> list[tf.TensorSpec]:
        """The types and shapes of the cotangents of the results."""
        return [spec for spec in self.results if has_derivatives(spec)]


def has_derivatives(tensor: Any) -> bool:
    """Whether a tensor, variable or spec is of a type that has derivatives."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def spec_of(tensor: Any) -> tf.TensorSpec:
    """Return the shape and type of a tensor or variable."""
    return tf.TensorSpec(tensor.shape, tensor.dtype)
