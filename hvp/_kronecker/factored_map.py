"""Products with blocks whose eigenvectors are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvp._engines.linear_map import LinearMap, Source, TensorFunction
from hvp._graphs.compiled import Compiled
from hvp._graphs.private import is_for_xla
from hvp._kronecker.block import Block
from hvp._kronecker.factors import Factors, with_tensors
from hvp._runtime.digest import digest
from hvp._vectors.space import Space


class FactoredMap(LinearMap):
    """A symmetric block-diagonal linear map in terms of eigenvalues and eigenvectors.

    The blocks of `factors` cover all entries of the vectors. Maps with blocks of the same forms
    share `compiled`, their compiled functions.
    """

    def __init__(
        self,
        space: Space,
        factors: Factors,
        compiled: dict[str, Compiled],
        variables: Sequence[tf.Variable],
    ) -> None:
        self.domain = self.codomain = space
        self._factors, self.compiled, self._variables = factors, compiled, variables

    @property
    def sources(self) -> Sequence[Source]:
        """The variables of the model."""
        return self._variables

    @property
    def version(self) -> int:  # type: ignore[override]
        """How often the matrix was evaluated again."""
        return self._factors.root.version

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout; the map is its own adjoint."""
        if isinstance(vector, (list, tuple)):
            return self.codomain.split(self.apply(self.domain.join(vector)))
        is_flat = len(vector.shape) == 1
        rows = vector[tf.newaxis] if is_flat else vector
        product = self.run("multiply", rows)
        return product[0] if is_flat else product

    def as_function(self) -> TensorFunction:
        """Return the products as a function of eigenvectors and eigenvalues."""
        blocks = self._factors.current()
        compiled = self._compiled_for("multiply", blocks)
        tensors = [tensor for block in blocks for tensor in block.tensors]
        forms = [(b.kind, b.left is None, b.right is None, b.entries.shape) for b in blocks]
        entries = np.concatenate([block.entries.reshape(-1) for block in blocks])
        key = ("factored", digest(entries), repr(forms))
        return TensorFunction(key, tensors, lambda rows, tensors: compiled(rows, *tensors))

    def run(self, name: Literal["multiply", "rotate"], rows: tf.Tensor) -> tf.Tensor:
        """Apply a method of blocks to the entries of rows, now or in the graph being traced.

        Products are in the order of the rows, and rotated rows in that of the blocks.
        """
        if tf.executing_eagerly():
            blocks = self._factors.current()
            tensors = [tensor for block in blocks for tensor in block.tensors]
            return self._compiled_for(name, blocks)(rows, *tensors)
        tensors, is_stale = self._factors.in_graph()
        with tf.init_scope():
            compiled = self._compiled_for(name, self._factors.held())
        result = (compiled.inline if is_for_xla() else compiled)(rows, *tensors)
        return tf.where(is_stale, tf.cast(float("nan"), result.dtype), result)

    def _compiled_for(self, name: str, blocks: Sequence[Block]) -> Compiled:
        if name in self.compiled:
            return self.compiled[name]
        forms = [block.without_numbers() for block in blocks]
        order = np.concatenate([block.entries.reshape(-1) for block in forms])
        is_sorted = bool(np.all(order[1:] > order[:-1]))
        places = np.argsort(order)

        def run(rows: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            own = with_tensors(forms, iter(tensors))
            rows = rows if is_sorted else tf.gather(rows, order, axis=1)
            sizes = [block.size for block in own]
            pieces = tf.split(rows, sizes, axis=1) if len(sizes) > 1 else [rows]
            done = [getattr(block, name)(piece) for block, piece in zip(own, pieces)]
            whole = tf.concat(done, axis=1) if len(done) > 1 else done[0]
            return whole if is_sorted or name == "rotate" else tf.gather(whole, places, axis=1)

        rows = tf.TensorSpec([None, self.domain.size], self.domain.dtype)
        tensors = [tf.TensorSpec(t.shape, t.dtype) for block in blocks for t in block.tensors]
        self.compiled[name] = Compiled(run, [rows, *tensors], False)
        return self.compiled[name]
