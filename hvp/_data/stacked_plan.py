"""The plan for a function of batches whose values are stacked: a Jacobian of all examples.

The maps of batches that do not fit into memory are evaluated again for each product, as those of
`BatchedPlan` are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._data.batched_plan import BatchedPlan
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap
from hvp._errors import InvalidLossError
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.space import Space


class StackedPlan(BatchedPlan):
    """The values of a function of batches, one batch after the other, with its pullback.

    Parameters
    ----------
    rule, nest, batches, options
        As for `BatchedPlan`. The domain of the rule's map has an axis of examples in front.
    """

    @outside_strategies
    def at_point(self) -> tuple[Results, LinearMap]:
        """Evaluate all batches at the current values of the variables; hold the maps that fit."""
        values: list[Any] = []
        with self._evaluated(lambda _, results: values.append(results.value)) as (held, used):
            for leaf in tf.nest.flatten(values[0]):
                if leaf.shape.rank == 0:
                    raise InvalidLossError(
                        "the function returned a scalar for a batch of data",
                        "values whose first axis counts the examples",
                        "return them in a shape such as (len(x), ...), or leave out batch_size",
                    )
            value = tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *values)
            terms = [term for _, term in held]
        stream = None
        if not self._all_held:
            first = len(terms)

            def stream() -> Iterator[LinearMap]:
                return (term for _, term in self._stream(first, 1.0))

        domain = Space.of_tensors(tf.nest.flatten(value))
        assert domain is not None
        return Results(value, None), Stacked(terms, domain, self.space, stream, used)

    def _check(self, results: Results, index: int) -> None:
        """Let a function have any values."""


class Stacked(LinearMap):
    """The pullback of a function of batches: the sum of theirs, each of its own rows.

    Its transpose stacks the products of batches, one after the other.

    Parameters
    ----------
    terms : sequence of LinearMap
        The maps of the batches that are held. Closing this closes them.
    domain : Space
        The space of the stacked values.
    codomain : Space
        The space of the variables.
    streamed : callable or None
        Returns an iterator over the maps of the other batches, which exist during one product only.
    nbytes : int
        Size of the maps that are held, with the data of their batches, in bytes.
    """

    def __init__(
        self,
        terms: Sequence[LinearMap],
        domain: Space,
        codomain: Space,
        streamed: Callable[[], Iterator[LinearMap]] | None,
        nbytes: int,
    ) -> None:
        self._held, self._streamed = list(terms), streamed
        self.domain, self.codomain = domain, codomain
        self.nbytes, self.batches_held = nbytes, len(self._held)
        self.streams = streamed is not None

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout."""
        if isinstance(vector, (list, tuple)):
            domain, codomain = self.domain, self.codomain
            domain, codomain = (codomain, domain) if adjoint else (domain, codomain)
            return codomain.split(self.apply(domain.join(vector), adjoint=adjoint))
        return self._stack(vector) if adjoint else self._sum(vector)

    def close(self) -> None:
        """Release the maps that are held."""
        for term in self._held:
            term.close()
        self._held = []

    def _terms(self) -> Iterator[LinearMap]:
        """Iterate over the maps of all batches, in their order."""
        yield from self._held
        if self._streamed is not None:
            yield from self._streamed()

    def _sum(self, vector: tf.Tensor) -> tf.Tensor:
        """Give each batch its rows of the parts, and add the products up."""
        parts, total = self.domain.split(vector), None
        axis = len(vector.shape) - 1
        starts = [0] * len(parts)
        for term in self._terms():
            own = []
            for i, (part, shape) in enumerate(zip(parts, term.domain.shapes)):
                end = starts[i] + shape[0]
                own.append(part[starts[i] : end] if axis == 0 else part[:, starts[i] : end])
                starts[i] = end
            product = term.apply(term.domain.join(own))
            total = product if total is None else total + product
        return total

    def _stack(self, vector: tf.Tensor) -> tf.Tensor:
        products = [term.domain.split(term.apply(vector, adjoint=True)) for term in self._terms()]
        axis = len(vector.shape) - 1
        return self.domain.join([tf.concat(parts, axis) for parts in zip(*products)])
