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
from hvp._engines.linear_map import LinearMap, by_parts
from hvp._engines.rule import Rule
from hvp._engines.taped import TapedFunction, refuse_missing_in
from hvp._graphs.target import ExecutionTarget
from hvp._runtime.interrupts import Uninterrupted
from hvp._vectors.space import Space


class TapeMap(LinearMap):
    """A rule's linear map at one point, held on the tapes of the rule's state.

    `nbytes` is an upper bound on the memory of what the tapes hold; it is known if a trace has
    established that no operation on the way lacks a derivative. `place` is where operations run.
    """

    nbytes: int | None = None

    def __init__(
        self,
        rule: Rule,
        state: Any,
        domain: Space,
        codomain: Space,
        *,
        nbytes: int | None,
        place: ExecutionTarget,
    ) -> None:
        self._rule, self._state, self._place = rule, state, place
        self.domain, self.codomain, self.nbytes = domain, codomain, nbytes
        self._recorded: TapedFunction | None = None

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout; the first transposed product records the map."""
        if adjoint:
            return by_parts(self._apply_adjoint, vector, self.codomain, self.domain)
        return by_parts(self._apply, vector, self.domain, self.codomain)

    def close(self) -> None:
        """Release the tapes and everything on them."""
        self._state = self._recorded = None

    def _apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with self._place.scope():
            return self.codomain.with_zeros(self._rule.multiply(self._state, parts))

    def _apply_adjoint(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self._recorded is None:
            with Uninterrupted():
                self._recorded = self._record()
        return self.domain.with_zeros(self._recorded.vjp(parts))

    def _record(self) -> TapedFunction:
        # A linear map is its own derivative at every point, zero for one.
        zeros = self.domain.with_zeros([None] * len(self.domain.shapes))
        if self.nbytes is not None:
            refuse_missing_in(lambda *parts: self._apply(parts), zeros)
        with corrected_derivatives():
            return TapedFunction(lambda: self._apply(zeros), zeros)
