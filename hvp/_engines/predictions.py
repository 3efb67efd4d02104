"""Predictions of a model, and how a loss takes them.

Keras attaches the logits to the result of a last softmax or sigmoid, and its cross-entropies are
functions of these. A loss is therefore asked which of the two it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._derivatives.gradient import value_and_gradient
from hvp._engines.rule import Arguments
from hvp._errors import InvalidLossError
from hvp._keras.private import logits_of, mask_of, set_logits, set_mask

# A function of predictions, as a nest, and of the other elements of a batch.
OutputLoss = Callable[..., Any]


@dataclass(frozen=True)
class Prediction:
    """One tensor that a model returned.

    `logits` is what the last softmax or sigmoid was applied to, if the loss may read that instead.
    """

    value: tf.Tensor
    logits: tf.Tensor | None
    mask: tf.Tensor | None

    @classmethod
    def of(cls, value: tf.Tensor) -> Prediction:
        """Return a prediction with what Keras has attached to it."""
        logits = logits_of(value)
        if logits is None and not tf.executing_eagerly():
            # Keras looks for these, too, in a graph.
            made = (
                value.op.type in ("Softmax", "Sigmoid") if tf.is_symbolic_tensor(value) else False
            )
            logits = value.op.inputs[0] if made else None
        return cls(value, logits, mask_of(value))

    def with_value(self, value: tf.Tensor) -> tf.Tensor:
        """Return a tensor for the loss that is computed from `value`, of the first examples."""
        value = tf.identity(value)  # Nothing is attached to this.
        if self.mask is not None:
            set_mask(value, self.mask[: tf.shape(value)[0]])
        return value

    def with_logits(self, logits: tf.Tensor, value: tf.Tensor | None = None) -> tf.Tensor:
        """Return a tensor for a loss that is computed from `logits`, of the first examples."""
        value = self.with_value(self.value[: tf.shape(logits)[0]] if value is None else value)
        set_logits(value, logits)
        return value


class Predictions:
    """What a model returned; `tensors` are all tensors that a loss may be a function of."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs
        self._each = [Prediction.of(value) for value in tf.nest.flatten(outputs)]
        self._reads_logits: list[bool] = []
        logits = [each.logits for each in self._each if each.logits is not None]
        self.tensors = [each.value for each in self._each] + logits

    def choose(self, output_loss: OutputLoss, batch: Arguments) -> list[int]:
        """Find out what the loss reads of each prediction, the result or the logits.

        Return the places of the chosen tensors in `tensors`. A loss that reads both raises
        InvalidLossError.
        """
        given = [i for i, each in enumerate(self._each) if each.logits is not None]
        self._reads_logits = [False] * len(self._each)
        if given:
            count = len(self._each)

            def loss() -> Any:
                leaves = [
                    each.with_value(each.value)
                    if each.logits is None
                    else each.with_logits(each.logits, each.value)
                    for each in self._each
                ]
                return self._call(output_loss, leaves, batch)

            _, gradient = value_and_gradient(loss, self.tensors)
            for i, by_logits in zip(given, gradient[count:]):
                self._reads_logits[i] = by_logits is not None
                if by_logits is not None and gradient[i] is not None:
                    raise InvalidLossError(
                        "the output loss is a function of both the probabilities and the logits "
                        "of a last softmax or sigmoid",
                        "a function of one of them",
                        "return logits from the model, and apply the activation in the loss",
                    )
        places = dict(zip(given, range(len(self._each), len(self.tensors))))
        return [places[i] if reads else i for i, reads in enumerate(self._reads_logits)]

    def loss(self, output_loss: OutputLoss, parts: Sequence[tf.Tensor], batch: Arguments) -> Any:
        """Evaluate the loss at values of the chosen tensors, for the first examples of the data."""
        leaves = [
            each.with_logits(part) if reads else each.with_value(part)
            for each, part, reads in zip(self._each, parts, self._reads_logits)
        ]
        return self._call(output_loss, leaves, batch)

    def _call(self, output_loss: OutputLoss, leaves: Sequence[tf.Tensor], batch: Arguments) -> Any:
        packed = tf.nest.pack_sequence_as(self._outputs, leaves)
        return batch.call(lambda *elements: output_loss(packed, *elements[1:]))
