"""A rule's linear map at one point, held as the residuals of its traced graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._engines.graph_product import GraphProduct
from hvp._engines.graph_program import GraphProgram
from hvp._engines.linear_map import LinearMap
from hvp._graphs.compiled import Compiled
from hvp._graphs.parts import nbytes
from hvp._graphs.place import HERE, Place
from hvp._graphs.variants import variant_nbytes
from hvp._vectors.space import Space

# Upper bounds on the rows in one call of a block product, and on the bytes of residuals times rows.
# What a row computes on the way takes about what the residuals take: beyond the processor's cache
# a row takes longer than in a smaller block, up to a fourth.
_WIDEST = 64
_BLOCK_BYTES = 2**24


class GraphMap(LinearMap):
    """Compiled functions together with the residuals of one point.

    Parameters
    ----------
    program : GraphProgram
        The functions.
    residuals : sequence of tf.Tensor
        What the second function needs of the first.
    domain, codomain : Space
        The spaces of vectors and of products at this point.
    place : Place, optional
        Where the residuals are, and products are computed.

    Attributes
    ----------
    program, residuals, domain, codomain, place
        The same.
    """

    def __init__(
        self,
        program: GraphProgram,
        residuals: Sequence[tf.Tensor],
        domain: Space,
        codomain: Space,
        place: Place = HERE,
    ) -> None:
        self.program, self.place = program, place
        self.residuals = list(residuals)
        self.domain, self.codomain = domain, codomain

    @property
    def product(self) -> GraphProduct:
        """The compiled products."""
        return self.program.product

    @property
    def nbytes(self) -> int | None:  # type: ignore[override]
        """Bytes of the residuals without the variables' own values; None if it is unknown."""
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
        return max(1, min(_WIDEST, _BLOCK_BYTES // max(1, self.nbytes or 0)))

    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply by a vector given as the parts of the domain."""
        return list(self.run(self.product.parts, *parts))

    def apply_flat(self, flat: tf.Tensor) -> tf.Tensor:
        """Multiply by a flat vector, in one call."""
        if not self.product.has_flat:
            return super().apply_flat(flat)
        return self.run(self.product.flat, flat)

    def apply_if_current(self, flat: tf.Tensor) -> tf.Tensor | None:
        """Multiply by a flat vector, and compare variables in the same call if they are small."""
        if not self.product.tells_changes:
            return None
        product, changed = self.run(self.product.watched, flat)
        return None if changed else product

    def apply_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by each row of a block, many rows in one call."""
        if not self.product.has_flat:
            return super().apply_rows(rows)
        width = self.rows_at_once
        if width == 1:
            single = lambda part: self.apply_flat(part[0])[tf.newaxis]  # noqa: E731
            return _in_parts(single, rows, width, self.codomain)
        function = self.block_function()
        return _in_parts(lambda part: self.run_rows(function, part), rows, width, self.codomain)

    def block_function(self) -> Compiled:
        """Return the compiled product with the rows of a block."""
        with tf.init_scope():
            return self.product.rows(self.residuals, self.place)

    def run(self, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Call one of the compiled functions on a vector and the residuals."""
        return function(*tensors, *self.residuals, place=self.place)

    def run_rows(self, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Call one of the compiled functions on a block, given by its rows."""
        return self.run(function, *tensors)

    def transpose(self) -> LinearMap:
        """Return the transposed map, over the same residuals."""
        return _TransposedGraphMap(self)

    def close(self) -> None:
        """Release the residuals."""
        self.residuals = []


class _TransposedGraphMap(GraphMap):
    """The transpose of a `GraphMap`, which runs it."""

    def __init__(self, plain: GraphMap) -> None:
        super().__init__(plain.program, [], plain.codomain, plain.domain)
        self._plain = plain
        parts = zip(plain.domain.shapes, plain.domain.dtypes)
        zeros = itertools.islice(parts, self.program.zero_vector_count)
        self._zeros = [tf.zeros(shape, dtype) for shape, dtype in zeros]

    @property
    def product(self) -> GraphProduct:
        """The compiled products."""
        return self.program.transposed

    @property
    def nbytes(self) -> int | None:  # type: ignore[override]
        """Bytes of the residuals of the map itself."""
        return self._plain.nbytes

    def block_function(self) -> Compiled:
        """Return the compiled product with the rows of a block."""
        with tf.init_scope():
            return self.product.rows([*self._zeros, *self._plain.residuals], self._plain.place)

    def run(self, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Call one of the compiled functions on a vector and the residuals."""
        return self._plain.run(function, *tensors, *self._zeros)

    def run_rows(self, function: Compiled, *tensors: tf.Tensor) -> Any:
        """Call one of the compiled functions on a block, given by its rows."""
        return self._plain.run_rows(function, *tensors, *self._zeros)

    def transpose(self) -> LinearMap:
        """Return the map itself."""
        return self._plain


def _in_parts(
    function: Callable[[tf.Tensor], tf.Tensor], rows: tf.Tensor, at_most: int, space: Space
) -> tf.Tensor:
    """Apply a function to the rows of a block, some at a time, now or in the graph being traced.

    Parameters
    ----------
    function : callable
        Takes and returns a block, row by row.
    rows : tf.Tensor
        Of shape `(k, n)`.
    at_most : int
        Upper bound on the rows in one call.
    space : Space
        The space of the rows that it returns.
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
