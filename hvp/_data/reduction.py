"""How the results of batches are combined: as a mean, as a sum, or by stacking their values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap, added, scaled
from hvp._errors import InvalidLossError
from hvp._graphs.compiled import Compiled
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._vectors.space import Space

# The linear maps of a batch, or of its pieces in their order, with their weights.
WeightedMaps = Iterable[tuple[float, LinearMap]]


@dataclass(frozen=True)
class PartialSum:
    """The sum `sum_b w_b L_b` over some batches, a scalar in float64, and its gradient.

    The gradient has zeros for variables that no loss depends on; `connected` are the numbers of the
    others. In other processes, where an operation takes as long as a hundred here, the gradient is
    one vector.
    """

    value: tf.Tensor
    gradient: list[tf.Tensor]
    connected: frozenset[int]


class Mean:
    """The weighted sum over batches, which is divided by the weights for a mean.

    It is computed in `dtype`; by default in that of flat vectors. States are None at first.
    """

    # Results are losses, which must be finite.
    of_losses = True

    def __init__(self, space: Space, dtype: tf.DType | None = None) -> None:
        self.codomain, self._dtype, self._casts = space, dtype or space.dtype, dtype is None
        self._compiled: dict[Any, Compiled] = {}

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The shapes and types of a value and the parts of a gradient."""
        parts = [tf.TensorSpec(shape, self._dtype) for shape in self.codomain.shapes]
        return [tf.TensorSpec([], tf.float64), *parts]

    def add(
        self, state: Any, index: int, weight: float, results: Results, site: ExecutionTarget
    ) -> PartialSum:
        """Return the sum with further results, times their weight."""
        del index
        gradient = list(results.gradient or ())
        places = [i for i, part in enumerate(gradient) if part is not None]
        connected = frozenset(places) | (state.connected if state else frozenset())
        before = [state.value, *state.gradient] if state else []
        arguments = [
            tf.constant(weight, tf.float64),
            tf.cast(results.value, tf.float64),
            *(gradient[i] for i in places),
            *before,
        ]
        function = functools.partial(self._add, places, site.is_remote)
        if site.is_remote:
            key = *places, bool(state)
            if key not in self._compiled:

                def add(*tensors: tf.Tensor) -> list[tf.Tensor]:  # a partial function has no name
                    return function(*tensors)

                specs = [tf.TensorSpec(a.shape, a.dtype) for a in arguments]
                self._compiled[key] = Compiled(add, specs, False)
            value, *sums = self._compiled[key](*arguments, place=site)
        else:
            value, *sums = function(*arguments)
        return PartialSum(value, sums, connected)

    def bring(self, state: PartialSum, site: ExecutionTarget, home: str) -> PartialSum:
        """Move a sum here."""
        value, *gradient = [site.give(tensor, home) for tensor in (state.value, *state.gradient)]
        if site.is_remote:
            with tf.device(value.device):  # not where the sum came from
                parts = self.codomain.split(gradient[0])
                gradient = [tf.cast(part, self._dtype) for part in parts]
        return PartialSum(value, gradient, state.connected)

    def merge(self, states: Sequence[PartialSum]) -> PartialSum:
        """Add up sums."""
        if len(states) == 1:
            return states[0]
        return PartialSum(
            tf.add_n([one.value for one in states]),
            [tf.add_n(parts) for parts in zip(*(one.gradient for one in states))],
            frozenset().union(*(one.connected for one in states)),
        )

    def results(
        self, state: PartialSum, scale: float, regularization: Results | None = None
    ) -> Results:
        """Return the value and the gradient, with None for variables that it does not depend on."""
        scale_of_parts = tf.constant(scale, self._dtype)
        parts = [part * scale_of_parts for part in state.gradient]
        total = PartialSum(state.value * scale, parts, state.connected)
        if regularization is not None:
            total = self.add(total, -1, 1.0, regularization, LOCAL)
        dtypes = self.codomain.dtypes if self._casts else [self._dtype] * len(parts)
        pairs = enumerate(zip(total.gradient, dtypes))
        gradient = [tf.cast(g, d) if i in total.connected else None for i, (g, d) in pairs]
        return Results(total.value, gradient)

    @property
    def domain(self) -> Space:
        """The space of the variables: the map is symmetric."""
        return self.codomain

    def multiply(
        self, state: Any, index: int, maps: WeightedMaps, vector: tf.Tensor, *, adjoint: bool
    ) -> tf.Tensor:
        """Return the sum of products with one more batch."""
        del index
        for weight, one in maps:
            product = scaled(one.apply(vector, adjoint=adjoint), weight)
            state = product if state is None else added(state, product)
        return state

    def product(self, states: Sequence[tf.Tensor], *, adjoint: bool) -> tf.Tensor:
        """Return the sum of products."""
        del adjoint
        return states[0] if len(states) == 1 else tf.add_n(states)

    def _add(self, places: Sequence[int], is_flat: bool, *tensors: tf.Tensor) -> list[tf.Tensor]:
        weight, value, *rest = tensors
        parts, before = rest[: len(places)], rest[len(places) :]
        terms: list[Any] = [None] * len(self.codomain.shapes)
        times = tf.cast(weight, self._dtype)
        for place, part in zip(places, parts):
            terms[place] = tf.cast(part, self._dtype) * times
        if is_flat or not before:
            pairs = zip(terms, self.specs[1:])
            terms = [tf.zeros(s.shape, s.dtype) if t is None else t for t, s in pairs]
        sums = [weight * value, *([self.codomain.join(terms)] if is_flat else terms)]
        if before:
            sums = [b if new is None else b + new for b, new in zip(before, sums)]
        return sums


class Stack:
    """The values of batches, one after the other, for a Jacobian of all examples.

    It has the methods of `Mean`.

    All of it is computed here, not on devices, where work that failed would be done again.
    """

    of_losses = False

    def __init__(self, space: Space) -> None:
        self.codomain = space
        self._domain: Space | None = None
        # For each batch, the first of its rows in each of the stacked values.
        self._starts: dict[int, list[int]] = {}

    def add(
        self, state: Any, index: int, weight: float, results: Results, site: ExecutionTarget
    ) -> dict[int, list[Any]]:
        """Add the values of one more piece to those of its batch, in place."""
        del weight, site
        values: dict[int, list[Any]] = {} if state is None else state
        values.setdefault(index, []).append(results.value)
        return values

    def bring(self, state: Any, site: ExecutionTarget, home: str) -> Any:
        """Return the state, which is here."""
        del site, home
        return state

    def merge(self, states: Sequence[Mapping[int, list[Any]]]) -> dict[int, list[Any]]:
        """Combine the values of all places."""
        return {index: values for state in states for index, values in state.items()}

    def results(
        self,
        state: Mapping[int, list[Any]],
        scale: float,
        regularization: Results | None = None,
    ) -> Results:
        """Return the stacked values."""
        del scale, regularization
        values, rows = [], [0] * len(tf.nest.flatten(next(iter(state.values()))[0]))
        for index in sorted(state):
            self._starts[index] = list(rows)
            for value in state[index]:
                leaves = tf.nest.flatten(value)
                if any(leaf.shape.rank == 0 for leaf in leaves):
                    raise InvalidLossError(
                        "the function returned a scalar for a batch of data",
                        "values whose first axis counts the examples",
                        "return them in a shape such as (len(x), ...), or leave out batch_size",
                    )
                rows = [row + leaf.shape[0] for row, leaf in zip(rows, leaves)]
                values.append(value)
        stacked = tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *values)
        self._domain = Space.of_tensors(tf.nest.flatten(stacked))
        return Results(stacked, None)

    @property
    def domain(self) -> Space:
        """The space of the stacked values."""
        assert self._domain is not None
        return self._domain

    def multiply(
        self, state: Any, index: int, maps: WeightedMaps, vector: tf.Tensor, *, adjoint: bool
    ) -> Any:
        """Give a batch its rows and add the products; or, for the adjoint, collect its rows."""
        if adjoint:
            rows = [one.domain.split(one.apply(vector, adjoint=True)) for _, one in maps]
            state = {} if state is None else state
            state[index] = rows
            return state
        parts, axis = self.domain.split(vector), len(vector.shape) - 1
        starts = list(self._starts[index])
        for _, one in maps:
            own = []
            for i, (part, shape) in enumerate(zip(parts, one.domain.shapes)):
                end = starts[i] + shape[0]
                own.append(part[starts[i] : end] if axis == 0 else part[:, starts[i] : end])
                starts[i] = end
            product = one.apply(one.domain.join(own))
            state = product if state is None else added(state, product)
        return state

    def product(self, states: Sequence[Any], *, adjoint: bool) -> tf.Tensor:
        """Return the sum of products, or the rows of all batches in their order."""
        if not adjoint:
            return states[0] if len(states) == 1 else tf.add_n(states)
        by_index = self.merge(states)
        rows = [parts for index in sorted(by_index) for parts in by_index[index]]
        axis = len(rows[0][0].shape) - len(self.domain.shapes[0])
        return self.domain.join([tf.concat(parts, axis) for parts in zip(*rows)])
