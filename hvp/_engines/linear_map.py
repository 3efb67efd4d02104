"""The interface of linear maps: what the engines provide and everything above them uses."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._vectors.resources import Resource
from hvp._vectors.space import Space

# Terms of a sum: numbers and maps.
Terms = Sequence[tuple[float, "LinearMap"]]


class LinearMap(abc.ABC):
    """A linear map between two spaces, held at one point.

    Only `apply` and `transpose` must be written; the other products have slow defaults.

    Attributes
    ----------
    domain, codomain : Space
        The spaces of its arguments and of its results.
    nbytes : int or None
        Upper bound on the memory that is held for products; None if it is not known.
    streams : bool
        Whether products evaluate something again, at the values that variables then have.
    batches_held : int
        How many batches the map holds terms of, if it is a sum over batches.
    residuals : sequence of tf.Tensor
        What products read, if it is held as tensors.
    """

    domain: Space
    codomain: Space
    nbytes: int | None = 0
    streams: bool = False
    batches_held: int = 0
    residuals: Sequence[tf.Tensor] = ()

    @abc.abstractmethod
    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply by a vector given as the parts of the domain."""

    @abc.abstractmethod
    def transpose(self) -> LinearMap:
        """Return the transposed map, over the same residuals."""

    def apply_flat(self, flat: tf.Tensor) -> tf.Tensor:
        """Multiply by a flat vector, of shape `(n,)`."""
        return self.codomain.join(self.apply(self.domain.split(flat)))

    def apply_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by each row of a block, of shape `(k, n)`."""
        return tf.stack([self.apply_flat(row) for row in tf.unstack(rows)])

    def apply_if_current(self, flat: tf.Tensor) -> tf.Tensor | None:
        """Multiply by a flat vector, if variables can be compared in the same call.

        None if they have changed since the map was evaluated, or if this map cannot tell.
        """
        del flat
        return None

    def store(
        self,
        current: Callable[[], Any],
        resources: Sequence[Resource],
        values: Sequence[tf.Tensor],
        copies: int = 0,
    ) -> Store | None:
        """Return what products inside graphs can read; None if they have to run Python.

        Parameters
        ----------
        current : bound method
            Makes sure, in Python, that there is a map and that it is current.
        resources : sequence of Resource
            The variables that the map depends on; none if changes do not matter.
        values : sequence of tf.Tensor
            Their values at its point.
        copies : int, optional
            How many of them, at the end, are further copies of variables, which it does not read.
        """
        del current, resources, values, copies
        return None

    def close(self) -> None:  # noqa: B027 - most combinations hold nothing themselves
        """Release what is held for products."""


class Store(abc.ABC):
    """What products inside graphs read: the residuals of a map, replaced at each new point."""

    @property
    @abc.abstractmethod
    def products(self) -> int:
        """How many products there were so far."""

    @abc.abstractmethod
    def map(self) -> LinearMap:
        """Return the map that reads these in the graph being traced."""

    @abc.abstractmethod
    def fill(self, held: LinearMap, values: Sequence[tf.Tensor]) -> None:
        """Take the residuals of a new point, and the values of variables to compare with."""

    @abc.abstractmethod
    def empty(self) -> None:
        """Let go of the residuals; products raise until there are others."""


class Sum(LinearMap):
    """The sum of linear maps times numbers: batches, regularization, damping.

    Parameters
    ----------
    terms : sequence of (float, LinearMap)
        Terms that are held. Closing the sum closes them.
    domain, codomain : Space
        Those of all terms.
    streamed : callable, optional
        Returns an iterator over further terms, which exist during one product only.
    """

    def __init__(
        self,
        terms: Terms,
        domain: Space,
        codomain: Space,
        streamed: Callable[[], Iterator[tuple[float, LinearMap]]] | None = None,
    ) -> None:
        self._held = list(terms)
        self.domain, self.codomain = domain, codomain
        self._streamed = streamed
        self.streams = streamed is not None or any(term.streams for _, term in self._held)

    @property
    def nbytes(self) -> int | None:  # type: ignore[override]
        """Upper bound on the memory of the terms that are held."""
        sizes = [term.nbytes for _, term in self._held]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Multiply by a vector; added up in the wider type, float16 would lose small terms."""
        wide = self.codomain.dtype
        sums: list[Any] = [None] * len(self.codomain.shapes)
        for weight, term in self.terms():
            products = [_times(tf.cast(part, wide), weight) for part in term.apply(parts)]
            sums = [p if s is None else _plus(s, p) for s, p in zip(sums, products)]
        dtypes = self.codomain.dtypes
        narrow = [s if s is None else tf.cast(s, dtype) for s, dtype in zip(sums, dtypes)]
        return self.codomain.with_zeros(narrow)

    def apply_flat(self, flat: tf.Tensor) -> tf.Tensor:
        """Multiply by a flat vector."""
        return self._sum(lambda term: term.apply_flat(flat), [self.codomain.size])

    def apply_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiply by each row of a block, all of them in one pass over the terms."""
        shape = [rows.shape[0], self.codomain.size]
        return self._sum(lambda term: term.apply_rows(rows), shape)

    def transpose(self) -> LinearMap:
        """Return the sum of the transposed terms."""
        return _TransposedSum(self)

    def close(self) -> None:
        """Release the terms that are held."""
        for _, term in self._held:
            term.close()
        self._held = []

    def terms(self) -> Iterator[tuple[float, LinearMap]]:
        """Iterate over all terms, those that are held and those that are streamed."""
        yield from self._held
        if self._streamed is not None:
            yield from self._streamed()

    def _sum(self, multiply: Callable[[LinearMap], tf.Tensor], shape: Sequence[Any]) -> tf.Tensor:
        total = None
        for weight, term in self.terms():
            product = _times(multiply(term), weight)
            total = product if total is None else _plus(total, product)
        return tf.zeros(shape, self.codomain.dtype) if total is None else total


class _TransposedSum(Sum):
    """The transpose of a sum, which goes through the same terms."""

    def __init__(self, plain: Sum) -> None:
        self._plain = plain
        super().__init__([], plain.codomain, plain.domain)
        self.streams = plain.streams

    @property
    def nbytes(self) -> int | None:  # type: ignore[override]
        return self._plain.nbytes

    def transpose(self) -> LinearMap:
        return self._plain

    def terms(self) -> Iterator[tuple[float, LinearMap]]:
        return ((weight, term.transpose()) for weight, term in self._plain.terms())


class Identity(LinearMap):
    """The identity of a space: what damping adds a multiple of."""

    def __init__(self, space: Space) -> None:
        self.domain = self.codomain = space

    def apply(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(parts)

    def apply_flat(self, flat: tf.Tensor) -> tf.Tensor:
        return flat

    def apply_rows(self, rows: tf.Tensor) -> tf.Tensor:
        return rows

    def transpose(self) -> LinearMap:
        return self


def damped(plain: LinearMap, damping: float) -> LinearMap:
    """Return a map plus a multiple of the identity."""
    if not damping:
        return plain
    terms = [(1.0, plain), (damping, Identity(plain.domain))]
    return Sum(terms, plain.domain, plain.codomain)


def _times(tensor: tf.Tensor, weight: float) -> tf.Tensor:
    if weight == 1:
        return tensor
    return tf.raw_ops.Mul(x=tensor, y=tf.constant(weight, tensor.dtype))


def _plus(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    # The operator `+` takes longer than many a small product's share of it.
    return tf.raw_ops.AddV2(x=one, y=other)
