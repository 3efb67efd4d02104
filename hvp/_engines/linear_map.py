"""Linear maps: what the engines provide and everything above them uses.

A vector has one of three layouts, and a product has the layout of its vector:

parts
    A list of tensors, one for each variable or output.
flat
    One tensor of shape `(n,)`.
rows
    A tensor of shape `(k, n)`, for `k` vectors at once.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Union

import scipy.sparse
import tensorflow as tf

from hvp._derivatives.belonging import Check
from hvp._errors import StaleOperatorError, quoted
from hvp._graphs.python_calls import call_python
from hvp._vectors.space import Space

# Terms of a sum: numbers and maps.
Terms = Sequence[tuple[float, "LinearMap"]]
# What a tape may differentiate with respect to.
Source = Union[tf.Variable, tf.Tensor]


class TensorFunction(NamedTuple):
    """A linear map of rows as a function of tensors, for use in other graphs.

    `apply` takes rows and `tensors`, which are arguments of the graph, and returns the products
    with the rows. `key` identifies the function and the shapes of the tensors, so that what is
    compiled for one serves all others with the same key.
    """

    key: Hashable
    tensors: list[tf.Tensor]
    apply: Callable[[tf.Tensor, Sequence[tf.Tensor]], tf.Tensor]


class LinearMap(abc.ABC):
    """A linear map between two spaces.

    Attributes
    ----------
    domain, codomain
        The spaces of its arguments and of its results.
    made_of
        The maps that this one multiplies with.
    batches_held
        How many batches the map holds terms of, if it is a sum over batches.
    version
        A number that changes when products become those of another point.
    """

    domain: Space
    codomain: Space
    made_of: Sequence[LinearMap] = ()
    batches_held: int = 0
    version: int = 0

    @property
    def nbytes(self) -> int | None:
        """Upper bound on the memory held for products; None if unknown."""
        sizes = [part.nbytes for part in self.made_of]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def streams(self) -> bool:
        """Whether products evaluate something again, at the values that variables then have."""
        return any(part.streams for part in self.made_of)

    @property
    def calls_python(self) -> bool:
        """Whether Python runs for each product, even inside a graph."""
        return any(part.calls_python for part in self.made_of)

    @property
    def sources(self) -> Sequence[Source]:
        """What products are functions of besides the vector, as far as it is known."""
        return [source for part in self.made_of for source in part.sources]

    def same_point(self) -> Check:
        """Return a function that returns tensors, and refuses to if the point is another then.

        Where a graph is being traced, they are NaN in that case.
        """
        version, parts = self.version, [part.same_point() for part in self.made_of]

        def check(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            if self.version != version:
                raise evaluated_again()
            return functools.reduce(lambda given, part: part(given), parts, list(tensors))

        return check

    @abc.abstractmethod
    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout, now or in the graph being traced.

        With `adjoint`, multiply by the transpose.
        """

    @property
    def T(self) -> LinearMap:  # noqa: N802 - as NumPy and scipy call it
        """The transpose, which shares the residuals."""
        return Adjoint(self)

    def pattern(self) -> Any:
        """Return where the matrix may be nonzero, as a sparse boolean matrix; None if unknown."""
        return None

    def as_function(self) -> TensorFunction | None:
        """Return the map as a function of the tensors it holds; None if it cannot be one."""
        return None

    def close(self) -> None:  # noqa: B027 - most combinations hold nothing themselves
        """Release what is held for products."""


class Adjoint(LinearMap):
    """The transpose of a linear map, which multiplies with that map."""

    def __init__(self, plain: LinearMap) -> None:
        self._plain, self.made_of = plain, [plain]

    @property
    def domain(self) -> Space:  # type: ignore[override]
        """The space of the map's products."""
        return self._plain.codomain

    @property
    def codomain(self) -> Space:  # type: ignore[override]
        """The space of the map's vectors."""
        return self._plain.domain

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout."""
        return self._plain.apply(vector, adjoint=not adjoint)

    def pattern(self) -> Any:
        """Return the transposed pattern."""
        pattern = self._plain.pattern()
        return None if pattern is None else pattern.T.tocsr()

    @property
    def T(self) -> LinearMap:  # noqa: N802
        """The map itself."""
        return self._plain


class Sum(LinearMap):
    """A weighted sum of linear maps between the same spaces, such as a map and its damping.

    Closing the sum closes its terms.
    """

    def __init__(self, terms: Terms, domain: Space, codomain: Space) -> None:
        self._terms, self.domain, self.codomain = list(terms), domain, codomain
        self.made_of = [term for _, term in self._terms]

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout, in one pass over the terms."""
        space = self.domain if adjoint else self.codomain
        if isinstance(vector, (list, tuple)):
            return self._apply_to_parts(vector, space, adjoint)
        total = None
        for weight, term in self._terms:
            product = scaled(term.apply(vector, adjoint=adjoint), weight)
            total = product if total is None else added(total, product)
        return tf.zeros([*vector.shape[:-1], space.size], space.dtype) if total is None else total

    def pattern(self) -> Any:
        """Return the union of the terms' patterns."""
        patterns = [term.pattern() for _, term in self._terms]
        if any(pattern is None for pattern in patterns):
            return None
        return sum(patterns[1:], patterns[0])

    def close(self) -> None:
        """Release the terms."""
        for _, term in self._terms:
            term.close()
        self._terms, self.made_of = [], []

    def _apply_to_parts(
        self, parts: Sequence[tf.Tensor], space: Space, adjoint: bool
    ) -> list[tf.Tensor]:
        """Add up in the wider type, because float16 would lose small terms."""
        sums: list[Any] = [None] * len(space.shapes)
        for weight, term in self._terms:
            products = [
                scaled(tf.cast(part, space.dtype), weight)
                for part in term.apply(parts, adjoint=adjoint)
            ]
            sums = [p if s is None else added(s, p) for s, p in zip(sums, products)]
        pairs = zip(sums, space.dtypes)
        return space.with_zeros([s if s is None else tf.cast(s, dtype) for s, dtype in pairs])


class Identity(LinearMap):
    """The identity of a space, of which damping adds a multiple."""

    def __init__(self, space: Space) -> None:
        self.domain = self.codomain = space

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Return the vector."""
        del adjoint
        return vector

    def pattern(self) -> Any:
        """Return the diagonal."""
        return scipy.sparse.csr_array(scipy.sparse.identity(self.domain.size, dtype=bool))


def evaluated_again(changed: Sequence[str] = ()) -> StaleOperatorError:
    """Return the error for a gradient of what an operator computed at another point.

    `changed` are the names of variables that have changed since, if the operator has not followed.
    """
    what = "the operator was evaluated again"
    if changed:
        what = f"the variables {quoted(changed)} have changed"
    return StaleOperatorError(
        f"{what} since what is differentiated was computed",
        "a gradient at the values of the product",
        "take the gradient before variables are assigned, or compute the product again",
    )


def damped(plain: LinearMap, damping: float) -> LinearMap:
    """Return a map plus a multiple of the identity."""
    if not damping:
        return plain
    terms = [(1.0, plain), (damping, Identity(plain.domain))]
    return Sum(terms, plain.domain, plain.codomain)


def by_parts(
    multiply: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    vector: Any,
    domain: Space,
    codomain: Space,
) -> Any:
    """Multiply by a vector in any layout, with a function that takes and returns parts."""
    if isinstance(vector, (list, tuple)):
        return multiply(vector)
    if len(vector.shape) == 1:
        return codomain.join(multiply(domain.split(vector)))
    return tf.stack([codomain.join(multiply(domain.split(row))) for row in tf.unstack(vector)])


def apply_in_python(find: Callable[[], LinearMap], vector: Any, space: Space, adjoint: bool) -> Any:
    """Add a product to the graph being traced, which calls Python to compute it.

    `find` returns the map to multiply with when the graph runs. The vector may have any layout.
    `space` is the space of the product.
    """
    if isinstance(vector, (list, tuple)):
        return call_python(lambda *parts: find().apply(parts, adjoint=adjoint), vector, space.specs)
    spec = tf.TensorSpec([*vector.shape[:-1], space.size], space.dtype)
    (product,) = call_python(lambda v: [find().apply(v, adjoint=adjoint)], [vector], [spec])
    return product


def scaled(tensor: tf.Tensor, weight: float) -> tf.Tensor:
    """Return a tensor times a number."""
    if weight == 1:
        return tensor
    return tf.raw_ops.Mul(x=tensor, y=tf.constant(weight, tensor.dtype))


def added(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the sum of two tensors."""
    # The operator `+` takes longer than many a small product's share of it.
    return tf.raw_ops.AddV2(x=one, y=other)
