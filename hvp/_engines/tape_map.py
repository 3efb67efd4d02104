"""The tape engine: a rule evaluated on persistent tapes, multiplied operation by operation.

It works wherever TensorFlow's own eager gradients do, needs no graph, and is the reference that
the graph engine is tested against. Its residuals live on the tapes, so that a product costs one
eager backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.corrections import corrected_derivatives
from hvp._engines.linear_map import LinearMap
from hvp._engines.rule import Rule
from hvp._engines.taped import TapedFunction, refuse_missing_in
from hvp._graphs.place import Place
from hvp._runtime.interrupts import Uninterrupted
from hvp._vectors.space import Space


class TapeMap(LinearMap):
    """A rule's linear map at one point, held on the tapes of the rule's state.

    Parameters
    ----------
    rule : Rule
        How to multiply.
    state : object
        What the rule evaluated.
    domain, codomain : Space
        The spaces of vectors and of products.
    certain : bool
        Whether it was established beforehand that no operation on the way lacks a derivative.
    nbytes : int or None
        Upper bound on the memory of what the tapes hold.
    place : Place
        Where operations run.
    """

    def __init__(
        self,
        rule: Rule,
        state: Any,
        domain: Space,
        codomain: Space,
        *,
        certain: bool,
        nbytes: int | None,
        place: Place,
    ) -> None:
        self._rule, self._state, self._certain = rule, state, certain
        self._place = place
        self.domain, self.codomain, self.nbytes = domain, codomain, nbytes
        self._recorded: TapedFunction | None = None

    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply by a vector given as the parts of the domain."""
        with self._place.scope():
            return self.codomain.with_zeros(self._rule.multiply(self._state, parts))

    def transpose(self) -> LinearMap:
        """Return the transposed map; the first product with it records this one on a tape."""
        return _TransposedTapeMap(self)

    def recorded(self) -> TapedFunction:
        """Return the map as a function on a tape, recorded at the first call."""
        if self._recorded is None:
            with Uninterrupted():
                self._recorded = self._record()
        return self._recorded

    def close(self) -> None:
        """Release the tapes and everything on them."""
        self._state = self._recorded = None

    def _record(self) -> TapedFunction:
        # A linear map is its own derivative at every point, zero for one.
        zeros = self.domain.with_zeros([None] * len(self.domain.shapes))
        if self._certain:
            refuse_missing_in(lambda *parts: self.apply(parts), zeros)
        with corrected_derivatives():
            return TapedFunction(lambda: self.apply(zeros), zeros)


class _TransposedTapeMap(LinearMap):
    """The transpose of a map on tapes, recorded as a function of the vector."""

    def __init__(self, plain: TapeMap) -> None:
        self._plain = plain
        self.domain, self.codomain = plain.codomain, plain.domain
        self.nbytes = plain.nbytes

    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply by a vector given as the parts of the domain."""
        return self.codomain.with_zeros(self._plain.recorded().vjp(parts))

    def transpose(self) -> LinearMap:
        """Return the map itself."""
        return self._plain
