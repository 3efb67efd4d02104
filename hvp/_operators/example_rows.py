"""The Jacobian of a function of examples, from one backward pass over each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements
from hvp._derivatives.exact import exact_functions
from hvp._engines.taped import TapedFunction
from hvp._graphs.compiled import Compiled
from hvp._graphs.vectorized import NotVectorizedError, vectorized
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._runtime.recent import Recent
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest

# Examples have at most so many values each. Rows of one call take at most so many bytes; the call
# itself takes several times as much.
_MOST_VALUES, _ROW_BYTES = 16, 2**26


class ExampleRows:
    """Computes the Jacobian of a function whose values at an example depend on this example alone.

    A backward pass over a batch gives the sum over its examples of what a row of the Jacobian needs
    of one. `of` therefore takes one pass over all examples for each value of an *example*, where
    products with unit vectors take one for each value of the *batch*. Whoever calls it has to
    compare the result with a product: of a function that mixes examples it is wrong.
    """

    def __init__(self, function: Callable[..., Any], nest: VariableNest) -> None:
        self._function, self._nest = function, nest
        self._space = Space.of_variables(nest)
        self._functions = Recent(4)

    @Uninterrupted()
    def of(self, elements: Elements) -> np.ndarray | None:
        """Return the Jacobian at the current values, of shape `(values, n)`.

        Return None if TensorFlow cannot compute the rows of many examples at once, or if an example
        has many values.
        """
        specs = elements.specs_of_any_number
        try:
            function = self._functions.get_or_make(
                tuple(specs), lambda: Compiled(self._all_of(elements), specs, False)
            )
        except NotVectorizedError:
            return None
        sizes, count = [rows.shape[1] for rows in function.outputs], elements.examples
        at_once = max(1, _ROW_BYTES // (sum(sizes) * self._space.size * self._space.dtype.size))
        parts = []
        for start in range(0, count, at_once):
            deliver_interrupt()
            part = elements.part(start, min(start + at_once, count))
            parts.append([rows.numpy() for rows in function(*part.tensors)])
        rows = [one for of_output in zip(*parts) for one in of_output]
        return np.concatenate([one.reshape(-1, self._space.size) for one in rows])

    def _all_of(self, elements: Elements) -> Callable[..., list[tf.Tensor]]:
        """Return a function from the tensors of examples to their rows, for each output."""

        def of_example(example: list[tf.Tensor]) -> list[tf.Tensor]:
            batch = elements.with_tensors([tensor[tf.newaxis] for tensor in example])
            with exact_functions():
                taped = TapedFunction(
                    lambda: tf.nest.flatten(batch.call(self._function)), self._nest.variables
                )
                outputs: list[Any] = taped.outputs
                sizes = [math.prod(output.shape) for output in outputs]
                if sum(sizes) > _MOST_VALUES:
                    raise NotVectorizedError(f"an example has {sum(sizes)} values")
                rows = [
                    self._space.join(self._space.with_zeros(taped.vjp(cotangents)))
                    for cotangents in _unit_cotangents(outputs, sizes)
                ]
            ends = np.cumsum(sizes)
            return [tf.stack(rows[end - size : end]) for size, end in zip(sizes, ends)]

        return lambda *tensors: vectorized(of_example, list(tensors))


def _unit_cotangents(outputs: Sequence[tf.Tensor], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """Yield unit vectors in the space of some outputs, as lists in which None stands for zeros."""
    for place, (output, size) in enumerate(zip(outputs, sizes)):
        for unit in tf.unstack(tf.reshape(tf.eye(size, dtype=output.dtype), [size, *output.shape])):
            yield [unit if i == place else None for i in range(len(outputs))]
