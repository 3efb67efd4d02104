"""The gradient of a loss at each single example, vectorized over the examples."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements, checked_loss
from hvp._derivatives.gradient import value_and_gradient
from hvp._errors import HvpError, InvalidLossError, NonFiniteError, line_of
from hvp._graphs.compiled import Compiled
from hvp._graphs.graph import digest_of_graph
from hvp._graphs.vectorized import NotVectorizedError, vectorized
from hvp._influence.example_data import ExampleData
from hvp._influence.layer_gradients import MOST_SHAPES, LayerGradients
from hvp._keras.losses import preserved_losses
from hvp._keras.unrolled import unrolled
from hvp._runtime.digest import digest
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._runtime.recent import Recent
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables

# `check_mean` compares this many examples, to this relative accuracy.
_COMPARED, _RTOL = 8, 1e-3
# By default the gradients of one call take at most this many bytes. The call itself needs several
# times as much memory.
_GRADIENT_BYTES, _WORKING_FACTOR = 2**26, 4
# Tracing a step of a recurrent layer, with its gradient, takes about this many seconds.
_SECONDS_PER_STEP = 0.2


class ExampleGradients:
    """Losses of single examples, and their gradients as the rows of a matrix.

    The loss of an example is the loss of a batch that contains this example only. The `snapshot`
    evaluates a loss that reads the same variables; it restores state that this loss updates after
    each call. One call takes `at_once` examples, so that its working memory is at most `nbytes`.
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
        bytes_per_example = self._space.size * self._space.dtype.size * _WORKING_FACTOR
        self._nbytes = nbytes or _GRADIENT_BYTES * _WORKING_FACTOR
        self.at_once = max(1, self._nbytes // bytes_per_example)
        self._functions = Recent(MOST_SHAPES)
        self._is_vectorized, self._unrolls = True, False
        # The time that examples took one after the other; None once that is the best there is.
        self._seconds: float | None = 0.0

    def of(self, elements: Elements) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the losses of examples, of shape `(k,)`, and gradients, of shape `(k, n)`.

        TensorFlow cannot vectorize loops, such as those of recurrent layers. Their examples are
        computed one after the other, until that has taken about as long as to trace these layers
        with their steps written out.
        """
        steps = max([0, *(t.shape[1] or 0 for t in elements.tensors if t.shape.rank > 1)])
        if self._seconds is not None and self._seconds > steps * _SECONDS_PER_STEP:
            self._unroll(elements)
        function = self._function(elements)
        started = time.perf_counter()
        try:
            with self._snapshot.preserving():
                losses, rows = function(*elements.tensors)
        except tf.errors.InvalidArgumentError:
            if not self._is_vectorized:
                raise
            # What TensorFlow has vectorized may fail when it runs: some calls of tf.stack, for one.
            self._is_vectorized = False
            self._functions.clear()
            return self.of(elements)
        if self._seconds is not None and not self._is_vectorized:
            self._seconds += time.perf_counter() - started
        return losses, rows

    def _unroll(self, elements: Elements) -> None:
        """Write out the steps of recurrent layers from now on, if the gradients stay the same."""
        few, looped, self._seconds = elements.part(0, 1), self._functions, None
        _, expected = self.of(few)
        self._functions = Recent(MOST_SHAPES)
        self._is_vectorized = self._unrolls = True
        _, rows = self.of(few)
        if not (self._is_vectorized and self._space.agree(rows, expected, tf.norm(expected))):
            self._functions, self._is_vectorized, self._unrolls = looped, False, False

    def of_all(
        self, elements: Elements, kind: str = "training example", first: int = 0
    ) -> np.ndarray:
        """Return the gradients of any number of examples, of shape `(k, n)`.

        If a gradient is not finite, the error names its example by `kind` and by its number, where
        the first example has the number `first`.
        """
        count = elements.examples
        starts = range(0, count, self.at_once)
        parts = [elements.part(i, min(i + self.at_once, count)) for i in starts]
        rows = np.concatenate([self.of(part)[1].numpy() for part in parts])
        self.check_finite(rows, kind, first)
        return rows

    def check_finite(self, rows: np.ndarray, kind: str, first: int) -> None:
        """Raise `NonFiniteError` unless all rows are finite; the arguments are as for `of_all`."""
        broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(broken):
            others = len(broken) - 1
            raise NonFiniteError(
                f"the gradient at {kind} {first + broken[0]} is not finite"
                + (f", nor are those at {others} others of the same block" if others else ""),
                "finite data, and a loss that is differentiable at each example",
                "look for NaN and extreme entries, and for labels out of range",
            )

    def pieces(self, data: ExampleData) -> Iterator[tuple[int, tf.Tensor]]:
        """Iterate over pieces of the gradients, each with the number of its first example."""
        for first, part in data.blocks(self.at_once):
            deliver_interrupt()
            yield first, tf.constant(self.of_all(part, f"{data.name} example", first))

    @property
    def size(self) -> int:
        """The length of a gradient."""
        return self._space.size

    def by_layers(self, sample: Elements) -> LayerGradients | str:
        """Return the same gradients by the layers of the loss, or the reason why there are none.

        There are none if the layers cannot be found, or if their gradients at some examples of
        `sample` differ from those of the loss.
        """
        few = sample.part(0, min(_COMPARED, self.at_once, sample.examples))
        layers = LayerGradients(
            self._loss, self._nest, self._space, self._snapshot, self.of_all, self._nbytes
        )
        try:
            rows = layers.rows(few)
        except HvpError as error:
            return error.problem
        except Exception as error:  # the user's loss may raise anything at a symbolic tensor
            return f"the loss cannot be traced ({type(error).__name__}: {line_of(error, -1)})"
        exact = tf.constant(self.of_all(few))
        if self._space.agree(rows, exact, tf.norm(exact)):
            return layers
        return "the gradients of its layers are not those of the loss"

    def prepare(self, elements: Elements) -> None:
        """Trace the loss for examples like these; errors of the loss are raised here."""
        self._function(elements)

    def fingerprint(self, elements: Elements) -> str:
        """Return a fingerprint of the loss, which does not depend on the values of variables."""
        graph = self._function(elements).graph
        constants = [tensor for tensor, _ in graph.captures if tensor.dtype != tf.resource]
        return " ".join([*map(digest, constants), digest_of_graph(graph.as_graph_def())])

    def check_mean(self, elements: Elements) -> None:
        """Raise `InvalidLossError` unless the loss of a batch is the mean of its examples' losses.

        The mean of the examples' gradients is compared with the gradient of the batch as well. If
        these differ, TensorFlow may have vectorized the gradient incorrectly, and examples are
        processed one at a time from then on.
        """
        part = elements.part(0, min(_COMPARED, elements.examples))
        value, gradient = self._of_batch(part)
        batch_loss = float(value)
        losses, rows = self.of(part)
        if not self._has_mean(rows, gradient):
            self._is_vectorized = False
            self._functions.clear()
            losses, rows = self.of(part)
        example_losses = losses.numpy().astype(np.float64)
        mean, scale = example_losses.mean(), np.abs(example_losses).mean()
        if abs(mean - batch_loss) <= _RTOL * max(scale, abs(batch_loss)):
            return
        count = len(example_losses)
        is_sum = abs(example_losses.sum() - batch_loss) <= _RTOL * count * scale
        raise InvalidLossError(
            f"the loss of {count} examples is {batch_loss:.6g}, and the mean of their losses "
            f"{mean:.6g}",
            "a loss that is the mean over the examples of a batch, each of them independent of the "
            "others",
            "take the mean, not the sum"
            if is_sum
            else "compare the shapes of labels and predictions first, because (n,) and (n, 1) give "
            "(n, n); take the mean, without layers that mix examples or draw random numbers "
            "(training=False)",
        )

    def _of_batch(self, elements: Elements) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the loss of a whole batch, and its gradient as one vector."""
        with Uninterrupted(), self._snapshot.preserving(), preserved_losses(self._nest.source):
            return self._value_and_row(elements)

    def _value_and_row(self, elements: Elements) -> tuple[tf.Tensor, tf.Tensor]:
        variables = self._nest.variables
        value, parts = value_and_gradient(lambda: elements.call(self._loss), variables)
        return value, self._space.join(self._space.with_zeros(parts))

    def _has_mean(self, rows: tf.Tensor, gradient: tf.Tensor) -> bool:
        """Whether the mean of the rows agrees with a vector, for each variable separately."""
        mean = tf.reduce_mean(rows, axis=0)
        if not tf.reduce_all(tf.math.is_finite(mean)):
            return True  # `of_all` raises an error that names the example
        return self._space.agree(mean, gradient, tf.norm(rows))

    def _function(self, elements: Elements) -> Compiled:
        """Return the compiled function for examples with these shapes and types."""
        specs = elements.specs_of_any_number

        def of_example(example: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            batch = elements.with_tensors([tensor[tf.newaxis] for tensor in example])
            value, row = self._value_and_row(batch)
            return tf.cast(value, self._space.dtype), row

        def of_examples(*tensors: tf.Tensor) -> Any:
            if self._is_vectorized:
                try:
                    return vectorized(of_example, list(tensors))
                except NotVectorizedError:
                    self._is_vectorized = False
            dtype = self._space.dtype
            return tf.map_fn(of_example, list(tensors), fn_output_signature=(dtype, dtype))

        def compiled() -> Compiled:
            with contextlib.ExitStack() as stack:
                stack.enter_context(Uninterrupted())
                stack.enter_context(self._snapshot.preserving())
                stack.enter_context(preserved_losses(self._nest.source))
                if self._unrolls:
                    stack.enter_context(unrolled(self._nest.source))
                return Compiled(of_examples, specs, False)

        return self._functions.get_or_make(tuple(specs), compiled)
