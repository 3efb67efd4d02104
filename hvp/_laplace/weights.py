"""The weights that a Laplace approximation is of, and whether they have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import StaleOperatorError, quoted
from hvp._kronecker.block import Block
from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.factors import Factors
from hvp._laplace.models import chosen
from hvp._runtime.digest import digest
from hvp._vectors.resources import Resource
from hvp._vectors.space import Space
from hvp._vectors.variables import all_variables, collect_variables
from hvp._vectors.watch import Watch


class Weights:
    """The uncertain weights of a model: their values, and matrices that belong to these."""

    def __init__(self, model: Any, subset: Any) -> None:
        self.nest = collect_variables(chosen(model, subset))
        self.space = Space.of_variables(self.nest)
        own = getattr(model, "keras_model", model)
        source = own if hasattr(own, "trainable_variables") else self.nest.source
        # Seeds of layers are integers.
        self._held = [v for v in all_variables(source) if v.dtype.is_floating]
        self._watch = Watch([Resource.of(variable) for variable in self._held])
        self._factors: Factors | None = None
        self._matrix: FactoredOperator | None = None

    def values(self) -> list[tf.Tensor]:
        """Return the values of the uncertain weights."""
        return [tf.convert_to_tensor(variable) for variable in self.nest.variables]

    def flat(self) -> np.ndarray:
        """Return the values as one vector."""
        return self.space.join(self.values()).numpy()

    def assign(self, parts: Sequence[Any]) -> None:
        """Give the uncertain weights other values."""
        for variable, part in zip(self.nest.variables, parts):
            variable.assign(tf.cast(part, variable.dtype))

    def remember(self) -> None:
        """Take the present values of all weights for those of the curvature."""
        self._watch.set()

    def digests(self) -> list[str]:
        """Return digests of all weights, and of those that are uncertain."""
        return [digest(v.numpy()) for v in (*self._held, *self.nest.variables)]

    def matrix_of(self, blocks: list[Block], reads: Sequence[Resource] = ()) -> FactoredOperator:
        """Return a matrix with these blocks, which refuses other values of the weights.

        It is the same at every call, and has the blocks of the last. `reads` are the variables that
        it was computed from, some of which the model may not be known to have.
        """
        if self._factors is None or self._matrix is None:
            held = {id(resource.handle) for resource in self._watch.read}
            more = [r for r in reads if r.dtype.is_floating and id(r.handle) not in held]
            self._watch = Watch([*self._watch.read, *more])
            self._factors = Factors(lambda: blocks, watch=self._watch, check=self._make_sure)
            self._matrix = FactoredOperator(self.space, self.nest, self._factors, origin=self)
        else:
            self._factors.replace(lambda: blocks)
        return self._matrix

    def _make_sure(self) -> None:
        changed = self._watch.changed()
        if changed:
            raise StaleOperatorError(
                f"weights have changed: {quoted(changed)}",
                "the weights at which the curvature was computed",
                "call refresh()",
            )
