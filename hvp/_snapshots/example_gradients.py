"""The gradient of a loss at each example, vectorized over the examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.batches import Batches
from hvp._data.elements import Elements, checked_loss
from hvp._derivatives.gradient import value_and_gradient
from hvp._errors import InvalidDataError, InvalidLossError, NonFiniteError
from hvp._graphs.compiled import Compiled
from hvp._graphs.parts import digest_of_graph
from hvp._graphs.vectorized import NotVectorizedError, vectorized
from hvp._keras.losses import kept_losses
from hvp._runtime.digest import digest
from hvp._runtime.interrupts import Uninterrupted
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables

# Examples of which a batch's loss is compared with the mean of their losses, and to what part.
_COMPARED, _CLOSE = 8, 1e-3
# Bytes of gradients, by default, in one call; a call works on several times as much.
_BYTES, _WORKING = 2**26, 4
# Of arrays, so many examples at a time are converted to tensors.
_SLICE = 4096


class ExampleGradients:
    """Losses of single examples, and their gradients as rows.

    An example's loss is that of a batch of it alone.

    Parameters
    ----------
    loss : callable
        Takes the elements of a batch; returns the mean over it.
    variables : nest
        What to differentiate with respect to.
    snapshot : Snapshot
        Of a loss that reads the same variables: what it knows to be written is put back.
    nbytes : int or None
        Of gradients in one call, at most.

    Attributes
    ----------
    at_once : int
        Examples in one call.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        variables: Any,
        snapshot: Snapshot,
        nbytes: int | None = None,
    ) -> None:
        self._loss, self._snapshot = checked_loss(loss), snapshot
        self._nest = collect_variables(variables)
        self._space = Space.of_variables(self._nest)
        each = self._space.size * self._space.dtype.size * _WORKING
        self.at_once = max(1, (nbytes or _BYTES * _WORKING) // each)
        self._functions: dict[Any, Compiled] = {}
        self._one_by_one = False

    def of(self, elements: Elements) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the losses of examples, of shape `(k,)`, and gradients, of shape `(k, n)`."""
        function = self._function(elements)
        with self._snapshot.preserving():
            losses, rows = function(*elements.tensors)
        return losses, rows

    def of_all(
        self, elements: Elements, what: str = "training example", first: int = 0
    ) -> np.ndarray:
        """Return the gradients of examples, however many, of shape `(k, n)`; all finite.

        Parameters
        ----------
        elements : Elements
            The examples.
        what : str
            What to call one in messages.
        first : int
            The number of the first of them.
        """
        count = elements.examples
        starts = range(0, count, self.at_once)
        parts = [elements.part(i, min(i + self.at_once, count)) for i in starts]
        rows = np.concatenate([self.of(part)[1].numpy() for part in parts])
        broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(broken):
            raise NonFiniteError(
                f"the gradient at {what} {first + broken[0]} is not finite, and at "
                f"{len(broken) - 1} others of its block",
                "finite data, and a loss that is differentiable there",
                "look for NaN and extreme entries, and labels out of range",
            )
        return rows

    def pieces(self, data: ExampleData) -> Iterator[tuple[int, tf.Tensor]]:
        """Go through the gradients of all examples, with the number of the first in each piece."""
        for first, part in data.blocks(self.at_once):
            yield first, tf.constant(self.of_all(part, f"{data.name} example", first))

    def prepare(self, elements: Elements) -> None:
        """Trace the loss for such examples, which raises what it raises there."""
        self._function(elements)

    def fingerprint(self, elements: Elements) -> str:
        """Return what tells the loss of such examples from others, but for values of variables."""
        traced = self._function(elements).graph
        outside = [tensor for tensor, _ in traced.captures if tensor.dtype != tf.resource]
        return " ".join([*map(digest, outside), digest_of_graph(traced.as_graph_def())])

    def check_mean(self, elements: Elements) -> None:
        """Refuse a loss of a batch that is not the mean of its examples' losses.

        The mean of the examples' gradients is compared with the gradient of the batch too. Should
        they differ because TensorFlow vectorizes the gradient wrongly, examples are taken one
        after the other from then on.
        """
        part = elements.part(0, min(_COMPARED, elements.examples))
        value, gradient = self._of_batch(part)
        together = float(value)
        losses, rows = self.of(part)
        if not self._are_close(rows, gradient):
            self._one_by_one = True
            self._functions.clear()
            losses, rows = self.of(part)
        alone = losses.numpy().astype(np.float64)
        scale = np.abs(alone).mean()
        if not abs(alone.mean() - together) <= _CLOSE * max(scale, abs(together)):
            total = abs(alone.sum() - together) <= _CLOSE * len(alone) * scale
            raise InvalidLossError(
                f"the loss of {len(alone)} examples is {together:.6g}, and the mean of their "
                f"losses {alone.mean():.6g}",
                "a loss that is the mean over the examples of a batch, each by itself",
                "take the mean, not the sum"
                if total
                else "take the mean; let layers not mix examples or draw (training=False)",
            )

    def _of_batch(self, elements: Elements) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the loss of a batch as a whole, and its gradient as one vector."""
        with Uninterrupted(), self._snapshot.preserving(), kept_losses(self._nest.source):
            return self._value_and_row(elements)

    def _value_and_row(self, elements: Elements) -> tuple[tf.Tensor, tf.Tensor]:
        variables = self._nest.variables
        value, parts = value_and_gradient(lambda: elements.call(self._loss), variables)
        return value, self._space.join(self._space.with_zeros(parts))

    def _are_close(self, rows: tf.Tensor, gradient: tf.Tensor) -> bool:
        """Whether rows have a vector for their mean, each variable's part by itself."""
        mean = tf.reduce_mean(rows, axis=0)
        if not tf.reduce_all(tf.math.is_finite(mean)):
            return True  # which is refused elsewhere, by the number of the example
        return self._space.agree(mean, gradient, tf.norm(rows))

    def _function(self, elements: Elements) -> Compiled:
        specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in elements.tensors]
        key = tuple((tuple(spec.shape), spec.dtype) for spec in specs)
        if key not in self._functions:

            def one(example: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
                batch = elements.with_tensors([tensor[tf.newaxis] for tensor in example])
                value, row = self._value_and_row(batch)
                return tf.cast(value, self._space.dtype), row

            def every(*tensors: tf.Tensor) -> Any:
                if not self._one_by_one:
                    with contextlib.suppress(NotVectorizedError):
                        return vectorized(one, list(tensors))
                dtype = self._space.dtype
                return tf.map_fn(one, list(tensors), fn_output_signature=(dtype, dtype))

            with Uninterrupted(), self._snapshot.preserving(), kept_losses(self._nest.source):
                self._functions[key] = Compiled(every, specs, False)
        return self._functions[key]


class ExampleData:
    """Examples in some order, however they are divided; gone through again and again.

    Parameters
    ----------
    data : tuple or dict of arrays, or iterable of such
        As for `HessianOperator`.
    name : {"training", "test"}
        What kind of examples they are.

    Attributes
    ----------
    count : int
        How many there are.
    first : Elements
        The first batch.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.name = name
        whole = isinstance(data, (tuple, dict))
        if whole:
            _refuse_ragged(tf.nest.flatten(data), name)
        self._batches = Batches(data, _SLICE if whole else None, None)
        self.count, first = 0, None
        for elements in self:
            _refuse_ragged(elements.leaves, name)
            first = first or elements
            self.count += elements.examples
        assert first is not None
        self.first: Elements = first

    def fingerprint(self) -> str:
        """Return what tells these examples from others; goes through them."""
        return " ".join(digest(tensor) for elements in self for tensor in elements.tensors)

    def __iter__(self) -> Iterator[Elements]:
        """Go through the batches."""
        return (batch.elements for batch in self._batches)

    def blocks(self, size: int) -> Iterator[tuple[int, Elements]]:
        """Go through blocks of at most so many examples, with the number of the first in each."""
        start = 0
        for elements in self:
            for i in range(0, elements.examples, size):
                yield start + i, elements.part(i, min(i + size, elements.examples))
            start += elements.examples

    def chosen(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, Elements]]:
        """Go through some of the examples, as they come; with their places in `numbers`."""
        start = 0
        for elements in self:
            inside = np.flatnonzero((numbers >= start) & (numbers < start + elements.examples))
            if len(inside):
                yield inside, elements.taken(numbers[inside] - start)
            start += elements.examples


def _refuse_ragged(leaves: list[Any], name: str) -> None:
    if any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves):
        raise InvalidDataError(
            f"the {name} data hold ragged or sparse tensors",
            "dense tensors, of which each example has a part of its own",
            "pad them: tensor.to_tensor(), tf.sparse.to_dense(tensor)",
        )
