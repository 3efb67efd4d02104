"""The rule of the Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._engines.rule import Arguments, Evaluated, Parts, Rule
from hvp._engines.taped import TapedFunction, TapedGradient


@dataclass(frozen=True)
class GaussNewtonRule(Rule):
    """`J^T B J`: `J` the Jacobian of a model, `B` the Hessian of a loss in the predictions.

    Attributes
    ----------
    model : callable
        Takes the first element of a batch, as several arguments if it is a tuple; returns a nest
        of floating-point tensors, the predictions.
    output_loss : callable
        Takes the predictions and the other elements; returns a real scalar.
    """

    model: Callable[..., Any]
    output_loss: Callable[..., Any]

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        predictions: Any = None

        def predict(*elements: Any) -> list[tf.Tensor]:
            nonlocal predictions
            inputs = elements[:1]
            tupled = inputs and isinstance(inputs[0], tuple)
            predictions = self.model(*(inputs[0] if tupled else inputs))
            return tf.nest.flatten(predictions)

        def loss(*elements: Any) -> Any:
            packed = tf.nest.pack_sequence_as(predictions, model.outputs)
            return self.output_loss(packed, *elements[1:])

        model = TapedFunction(lambda: batch.call(predict), variables)
        output = TapedGradient(lambda: batch.call(loss), model.outputs, once=True)
        return Evaluated(output.value, model.vjp(output.outputs), (model, output))

    def multiply(self, state: tuple[TapedFunction, TapedGradient], vector: Parts) -> Parts:
        model, output = state
        return model.vjp(output.vjp(model.jvp(vector)))
