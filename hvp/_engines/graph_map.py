"""A rule's linear map at one point, held as the residuals of its traced graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._engines.graph_product import GraphProduct
from hvp._engines.graph_program import GraphProgram
from hvp._engines.linear_map import LinearMap, by_parts
from hvp._graphs.compiled import Compiled
from hvp._graphs.sizes import nbytes
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._graphs.variants import variant_nbytes
from hvp._vectors.space import Space

# Upper bounds on the rows in one call of a block product, and on the bytes of residuals times rows.
# What a row computes on the way takes about what the residuals take.
_WIDEST = 64
_BLOCK_BYTES = 2**24
# Beyond that, which is about the processor's cache, more rows help only products of matrices.
_WIDEST_BEYOND_CACHE = 16
_BLOCK_BYTES_BEYOND_CACHE = 2**27
# Rows that are multiplied faster one by one, and the bytes of residuals up to which this holds.
_FEW = 3
_SMALL = 2**22


class GraphMap(LinearMap):
    """Compiled functions together with the residuals of one point.

    `domain` and `codomain` are the spaces of vectors and products at this point; `place` is where
    the residuals are and where products are computed. With `whole_blocks`, all rows of a block are
    multiplied in one call, however many there are.
    """

    def __init__(
        self,
        program: GraphProgram,
        residuals: Sequence[tf.Tensor],
        domain: Space,
        codomain: Space,
        place: ExecutionTarget = LOCAL,
        *,
        whole_blocks: bool = False,
    ) -> None:
        self.program, self.place, self._whole_blocks = program, place, whole_blocks
        self.residuals = list(residuals)
        self.domain, self.codomain = domain, codomain

    @property
    def nbytes(self) -> int | None:  # type: ignore[override]
        """Bytes of the residuals without the variables' own values; None if unknown."""
        total = 0
        for tensor, owned in zip(self.residuals, self.program.owned):
            if not owned:
                continue
            with tf.init_scope():  # a list tells its size when it is read, not while tracing
                size = variant_nbytes(tensor) if tensor.dtype == tf.variant else nbytes(tensor)
            if size is None:
                return None
            total += size
        return total

    @property
    def rows_at_once(self) -> int:
        """How many rows one call of a block product should have."""
        size = max(1, self.nbytes or 0)
        width = min(_WIDEST, _BLOCK_BYTES // size)
        if self.program.gains_from_width:
            width = max(width, min(_WIDEST_BEYOND_CACHE, _BLOCK_BYTES_BEYOND_CACHE // size))
        return max(1, width)

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout; parts and flat vectors take one call."""
        product = self.program.transposed if adjoint else self.program.product
        # The transposed product may take vectors of zeros.
        count = self.program.zero_vector_count if adjoint else 0
        zeros = self.domain.with_zeros([None] * count) if count else []
        if isinstance(vector, (list, tuple)):
            return list(self.run(product.parts, *vector, *zeros))
        if not product.has_flat:
            spaces = (self.codomain, self.domain) if adjoint else (self.domain, self.codomain)
            return by_parts(lambda parts: self.apply(parts, adjoint=adjoint), vector, *spaces)
        if len(vector.shape) == 1:
            return self.run(product.flat, vector, *zeros)
        return self._apply_to_rows(product, vector, zeros)

    def apply_if_current(self, flat: tf.Tensor) -> tf.Tensor | None:
        """Multiply by a flat vector, and compare variables in the same call if they are small.

        Return None if they have changed since the map was evaluated, or if this map cannot tell.
        """
        form = self.program.product
        if not form.tells_changes:
            return None
        product, changed = form.watched(flat, *self.residuals, place=self.place)
        return None if changed else product

    def run(self, function: Compiled, *tensors: tf.Tensor, in_rows: bool = False) -> Any:
        """Call one of the compiled functions on a vector, or on rows, and the residuals."""
        del in_rows
        return function(*tensors, *self.residuals, place=self.place)

    def _apply_to_rows(
        self, product: GraphProduct, rows: tf.Tensor, zeros: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Multiply by each row of a block, many rows in one call."""
        width, space = self.rows_at_once, product.codomain
        assert space is not None
        if rows.shape[0] == 0:
            return tf.zeros([0, space.size], space.dtype)
        single = lambda row: self.run(product.flat, row, *zeros)  # noqa: E731
        few = rows.shape[0] is not None and rows.shape[0] <= _FEW and (self.nbytes or 0) < _SMALL
        few = few and not self.place.is_remote  # where one call costs more than its product
        if few and not self._whole_blocks:
            return tf.stack([single(row) for row in tf.unstack(rows)])
        if width == 1 and not self._whole_blocks:
            return _in_parts(lambda part: single(part[0])[tf.newaxis], rows, 1, space)
        with tf.init_scope():
            function = product.rows([*zeros, *self.residuals], self.place)

        def several(part: tf.Tensor) -> tf.Tensor:
            return self.run(function, part, *zeros, in_rows=True)

        return several(rows) if self._whole_blocks else _in_parts(several, rows, width, space)

    def pattern(self) -> Any:
        """Return what the graph tells, given the integers among the residuals."""
        return self.program.pattern(self.residuals, self.domain.shapes, self.codomain.sizes)

    def close(self) -> None:
        """Release the residuals."""
        self.residuals = []


def _in_parts(
    function: Callable[[tf.Tensor], tf.Tensor], rows: tf.Tensor, at_most: int, space: Space
) -> tf.Tensor:
    """Apply a function to a block of shape `(k, n)`, at most `at_most` rows at a time.

    This works eagerly and in the graph being traced. `space` is the space of the results' rows.
    """
    count = rows.shape[0]
    if count is not None and count <= at_most:
        return function(rows)
    if tf.executing_eagerly():
        size = -(-count // -(-count // at_most))  # all alike but the last
        return tf.concat([function(rows[i : i + size]) for i in range(0, count, size)], axis=0)
    total = tf.shape(rows)[0]
    parts = tf.maximum(1, -(-total // at_most))
    size = -(-total // parts)
    results = tf.TensorArray(
        space.dtype, parts, infer_shape=False, element_shape=[None, space.size]
    )
    _, results = tf.while_loop(
        lambda part, _: part < parts,
        lambda part, done: (
            part + 1,
            done.write(part, function(rows[part * size : (part + 1) * size])),
        ),
        [tf.constant(0), results],
        parallel_iterations=1,
    )
    return tf.ensure_shape(results.concat(), [count, space.size])
