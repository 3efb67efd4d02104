"""The outputs of a model for examples, and their derivatives in its uncertain weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements, convert_batch, refuse_infinite
from hvp._errors import HvpError, InvalidDataError, InvalidLossError
from hvp._graphs.compiled import Compiled
from hvp._laplace.models import features_of, outputs_of
from hvp._laplace.weights import Weights
from hvp._operators.example_rows import ExampleRows
from hvp._operators.jacobian import JacobianOperator
from hvp._runtime.guard import refuse_forks
from hvp._runtime.interrupts import deliver_interrupt
from hvp._runtime.progress import progress_bar
from hvp._runtime.recent import Recent

# Rows of Jacobians, or outputs, of one call take at most so many bytes.
_ROW_BYTES = 2**26
# Two outputs for one input are the same up to this, relative to the largest.
_SAME = 1e-3
# Examples at which a model is looked at.
_SEEN = 8


class Outputs:
    """The outputs of a model: logits, means, or logarithms of means.

    Attributes
    ----------
    function : callable
        The outputs as a function of the inputs.
    features : callable or None
        The inputs of the last layer, if it alone is uncertain, and its outputs are the model's.
    shape : tuple of int
        The shape of the outputs for one example; empty before `measure`.
    """

    def __init__(
        self,
        model: Any,
        weights: Weights,
        subset: Any,
        likelihood: str | None,
        progress: bool | Literal["always"],
    ) -> None:
        self.function = outputs_of(model, likelihood in ("categorical", "bernoulli"))
        is_last = isinstance(subset, str) and subset == "last-layer"
        self.features: Any = features_of(model) if is_last else None
        self.shape: tuple[int, ...] = ()
        self._weights, self._likelihood, self._progress = weights, likelihood, progress
        self._rows = ExampleRows(self._called, weights.nest)
        self._functions = Recent(4)

    def of(self, inputs: Elements) -> tf.Tensor:
        """Return the outputs for some inputs, from a graph: logits are found there."""
        specs = inputs.specs_of_any_number
        function = self._functions.get_or_make(
            tuple(specs),
            lambda: Compiled(lambda *x: inputs.with_tensors(x).call(self._called), specs, False),
        )
        return function(*inputs.tensors)

    def measure(self, inputs: Iterable[Any]) -> int:
        """Return how many examples there are, and see what the model returns for some."""
        count = 0
        for x in inputs:
            elements = convert_batch((x,), "x")
            if not count:
                self._see(elements.part(0, min(_SEEN, elements.examples)))
            count += elements.examples
        return count

    def pieces(self, x: Any, *, has_rows: bool = True) -> Iterator[tuple[Elements, np.ndarray]]:
        """Iterate over parts of inputs with their outputs, for rows of the Jacobian of each."""
        refuse_forks()
        refuse_infinite(x, "x")
        space = self._weights.space
        row = space.size if has_rows else 1
        step = max(1, _ROW_BYTES // (math.prod(self.shape) * row * space.dtype.size))
        is_set, is_first = isinstance(x, tf.data.Dataset), True
        with progress_bar(self._progress, unit=" examples") as bar:
            for given in x if is_set else [x]:
                inputs = given[0] if is_set and isinstance(given, tuple) else given
                elements = convert_batch((inputs,), "x")
                for start in range(0, elements.examples, step):
                    deliver_interrupt()
                    part = elements.part(start, min(start + step, elements.examples))
                    mean = self.of(part).numpy()
                    if is_first:
                        self._refuse_mixing(part, mean)
                    is_first = False
                    yield part, mean
                    bar.update(len(mean))
        if is_first:
            raise InvalidDataError("there are no inputs", "at least one")

    def features_for(self, part: Elements) -> np.ndarray:
        """Return the inputs of the last layer."""
        return part.call(self.features).numpy().astype(np.float64)

    def rows(self, part: Elements) -> np.ndarray:
        """Return the Jacobian of the outputs for some inputs, as an array."""
        rows = self._rows.of(part)
        if rows is None:
            with self.jacobian(part) as J:
                rows = J.to_dense(max_size=max(J.shape))
        return rows

    def jacobian(self, inputs: Elements) -> JacobianOperator:
        """Return the Jacobian of the outputs for some inputs, as an operator."""
        return JacobianOperator(self._called, self._weights.nest.source, inputs.as_data())

    def _called(self, x: Any) -> Any:
        return self.function(*x) if isinstance(x, tuple) else self.function(x)

    def _see(self, some: Elements) -> None:
        """Refuse probabilities; see whether the last layer's outputs are those of the model."""
        outputs = self.of(some).numpy()
        self.shape = outputs.shape[1:]
        if self._likelihood == "categorical":
            if not self.shape or self.shape[-1] < 2:
                raise InvalidLossError(
                    f"the outputs of the model for an example have the shape {self.shape}",
                    "a logit for each class on the last axis, for the likelihood 'categorical'",
                    "pass likelihood='bernoulli' if the output is the logit of ones",
                )
            sums = outputs.astype(np.float64).sum(axis=-1)
            if (outputs >= 0).all() and np.abs(sums - 1).max() < _SAME:
                raise InvalidLossError(
                    "the outputs of the model are probabilities",
                    "logits, or a Keras model that ends with a softmax",
                    "leave out the softmax",
                )
        if self.features is not None:
            own, (kernel, *bias) = some.call(self.features), self._weights.values()
            own = (tf.matmul(own, kernel) + (bias[0] if bias else 0)).numpy()
            is_last = own.shape == outputs.shape
            if not is_last or np.abs(own - outputs).max() > _SAME * np.abs(outputs).max():
                self.features = None  # something follows the layer

    def _refuse_mixing(self, part: Elements, mean: np.ndarray) -> None:
        alone = self.of(part.first()).numpy()
        if np.abs(alone - mean[:1]).max() > _SAME * np.abs(mean).max():
            raise HvpError(
                "the outputs for an input depend on the other inputs of the batch",
                "a model that treats examples independently",
                "pass a function that calls it with training=False",
            )
