"""A product of the graph engine in its compiled forms: by parts, by flat vectors, by blocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._graphs.compiled import Compiled, JitCompile
from hvp._graphs.private import is_for_xla
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._graphs.vectorized import NotVectorizedError, vectorized
from hvp._runtime.interrupts import Uninterrupted
from hvp._vectors.space import Space

# Rows of the block that is compared with single products.
_COMPARED_ROWS = 2

# Takes the parts of a vector and the residuals; adds the product to the graph being traced.
Multiply = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], list[tf.Tensor]]


@dataclass(frozen=True)
class Compilation:
    """How products are compiled.

    Each function takes `residuals` besides vectors. `jit_compile` applies to products with one
    vector; `report` is called with a message if a function cannot be compiled as requested. Blocks
    are multiplied one vector after the other if `by_columns` is set, and are compiled by XLA only
    if `xla_for_blocks` is: it takes minutes for convolutions over a further axis. With
    `light_optimization`, TensorFlow spends less time on optimizing products. `is_large` says that
    the graph takes longer to import than a function that calls it takes to trace. `changed` takes
    the residuals and tells, in the graph, whether variables have changed since; None if residuals
    do not tell.
    """

    residuals: Sequence[tf.TensorSpec]
    jit_compile: JitCompile
    report: Callable[[str], None]
    by_columns: bool
    xla_for_blocks: bool
    light_optimization: bool
    is_large: bool
    changed: Callable[..., tf.Tensor] | None


class GraphProduct:
    """Products with a linear map whose graph is known.

    `multiply` takes the parts of a vector, as described by `specs`, and the residuals, and adds the
    product to the graph being traced. `multiply_each` does the same, written so that TensorFlow
    applies it well to all rows of a block at once. A space is None if its shapes are not fully
    known; there are then no products with flat vectors, and `has_flat` is False. `tells_changes` is
    True if `watched` exists.
    """

    def __init__(
        self,
        multiply: Multiply,
        specs: Sequence[tf.TensorSpec],
        domain: Space | None,
        codomain: Space | None,
        compilation: Compilation,
        multiply_each: Multiply | None = None,
    ) -> None:
        self._multiply, self._specs, self._compilation = multiply, list(specs), compilation
        self._multiply_each = multiply_each or multiply
        self.domain, self.codomain = domain, codomain
        self.has_flat = domain is not None and codomain is not None
        self.tells_changes = self.has_flat and compilation.changed is not None
        self._by_columns = compilation.by_columns
        self._rows_are_right: bool | None = None

    @functools.cached_property
    def parts(self) -> Compiled:
        """The product from the parts of a vector and the residuals."""
        count = len(self._specs)

        def multiply(*tensors: tf.Tensor) -> list[tf.Tensor]:
            return self._multiply(tensors[:count], tensors[count:])

        return self._compiled(multiply, self._specs)

    @functools.cached_property
    def flat(self) -> Compiled:
        """The product from and to one flat vector."""
        return self._compiled(self._multiply_flat, [self._spaces[0].flat_spec])

    @functools.cached_property
    def watched(self) -> Compiled:
        """`flat`, and whether variables have changed since the residuals were computed."""
        changed = self._compilation.changed
        assert changed is not None

        def multiply(flat: tf.Tensor, *residuals: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self._multiply_flat(flat, *residuals), changed(*residuals)

        return self._compiled(multiply, [self._spaces[0].flat_spec])

    def make(self) -> None:
        """Trace the form that the others use, so that errors show up now."""
        _ = self._base

    @property
    def _base(self) -> Compiled:
        """The form that is traced from the graph of the product itself."""
        return self.parts if self._calls_parts or not self.has_flat else self.single

    @property
    def _calls_parts(self) -> bool:
        """Whether the other forms call the product by parts instead of tracing it again."""
        return self._compilation.is_large and self._compilation.jit_compile is False

    @property
    def single(self) -> Compiled:
        """The form used for single flat vectors."""
        return self.watched if self.tells_changes else self.flat

    @property
    def uses_xla(self) -> bool | None:
        """Whether XLA computes products with one vector; None before the first product."""
        forms = [self.__dict__[name] for name in _SINGLE if name in self.__dict__]
        return next((form.uses_xla for form in forms if form.uses_xla is not None), None)

    def rows(self, residuals: Sequence[tf.Tensor], place: ExecutionTarget = LOCAL) -> Compiled:
        """Return the product with the rows of a block of shape `(k, n)`.

        The first call multiplies a block of random rows with `residuals`, those of one point, and
        compares it with products of single vectors. `tf.vectorized_map` converts some operations
        wrongly, without an error; if it did so here, rows are multiplied one by one from then on.
        """
        if self._rows_are_right is None:
            with Uninterrupted():
                self._rows_are_right = self._compare_rows(residuals, place)
            if self._rows_are_right is False:
                self._by_columns = True
                del self.flat_rows
                self._compilation.report(
                    "multiplies blocks one column after the other: TensorFlow's vectorized_map "
                    "computes them wrongly"
                )
        return self.flat_rows

    @property
    def is_compared(self) -> bool:
        """Whether blocks were compared with single vectors, so that `rows` computes nothing."""
        return self._rows_are_right is not None

    @functools.cached_property
    def flat_rows(self) -> Compiled:
        """The product with each row of a block of shape `(k, n)`."""
        self._by_columns |= any(map(is_converted_wrongly, self._base.graph.get_operations()))
        how, domain = self._compilation, self._spaces[0]
        jit_compile = how.jit_compile if how.xla_for_blocks else False
        specs = [tf.TensorSpec([None, domain.size], domain.dtype), *how.residuals]
        return Compiled(self._multiply_rows, specs, jit_compile, how.report, pure=True)

    @property
    def _spaces(self) -> tuple[Space, Space]:
        assert self.domain is not None
        assert self.codomain is not None
        return self.domain, self.codomain

    def _compiled(self, function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Compiled:
        how = self._compilation
        inputs = [*specs, *how.residuals]
        return Compiled(
            function,
            inputs,
            how.jit_compile,
            how.report,
            light_optimization=how.light_optimization,
            pure=True,
        )

    def _multiply_flat(self, flat: tf.Tensor, *residuals: tf.Tensor) -> tf.Tensor:
        domain, codomain = self._spaces
        if self._calls_parts and not is_for_xla():
            return codomain.join(self.parts(*domain.split(flat), *residuals))
        return codomain.join(self._multiply(domain.split(flat), residuals))

    def _multiply_rows(self, rows: tf.Tensor, *residuals: tf.Tensor) -> tf.Tensor:
        domain, codomain = self._spaces

        def multiply_each(row: tf.Tensor) -> tf.Tensor:
            return codomain.join(self._multiply_each(domain.split(row), residuals))

        def multiply(row: tf.Tensor) -> tf.Tensor:
            return self._multiply_flat(row, *residuals)

        # All rows in one operation where TensorFlow knows how, else in a loop in the graph.
        if not self._by_columns:
            with contextlib.suppress(NotVectorizedError):
                return vectorized(multiply_each, rows)
        signature = tf.TensorSpec([codomain.size], codomain.dtype)
        return tf.map_fn(multiply, rows, fn_output_signature=signature)

    def _compare_rows(self, residuals: Sequence[tf.Tensor], place: ExecutionTarget) -> bool | None:
        """Return whether a block product agrees with single ones; None if those are not finite."""
        function = self.flat_rows
        if self._by_columns:
            return True
        domain, codomain = self._spaces
        rows = tf.random.stateless_normal((_COMPARED_ROWS, domain.size), (1, 2), dtype=domain.dtype)
        block = function(rows, *residuals, place=place)
        singles = [self.single(row, *residuals, place=place) for row in tf.unstack(rows)]
        single = tf.stack([one[0] for one in singles] if self.tells_changes else singles)
        if not tf.reduce_all(tf.math.is_finite(single)):
            return None
        return codomain.agree(block, single, tf.norm(single))


_SINGLE = ("watched", "flat", "parts")


def is_converted_wrongly(operation: tf.Operation) -> bool:
    """Return whether `tf.vectorized_map` converts an operation of a traced product wrongly.

    It treats the filter gradient of a grouped convolution for many cotangents as if these were
    channels of one, ordered by vector and then by group, where TensorFlow expects groups first.
    """
    if operation.type != "Conv2DBackpropFilter":
        return False
    axis = 1 if operation.get_attr("data_format") == b"NCHW" else 3
    channels, kernel = operation.inputs[0].shape, operation.outputs[0].shape
    known = channels.rank == 4 and kernel.rank == 4 and channels[axis] and kernel[2]
    return not known or channels[axis] != kernel[2]
