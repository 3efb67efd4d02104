"""Rules of matrices `J^T B J`, where `J` is the Jacobian of a model's predictions."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._engines.rule import Arguments, Evaluated, Parts, Rule
from hvp._engines.taped import TapedFunction, TapedGradient


@dataclass(frozen=True)
class Output:
    """A loss of predictions, and its gradient in them.

    Attributes
    ----------
    taped : TapedGradient
        The loss and its gradient, whose Jacobian can be multiplied.
    predictions : sequence of tf.Tensor
        The predictions.
    batch : Arguments
        The batch that they are of.
    loss : callable
        Takes predictions, and the batch that they are of; returns the loss.
    """

    taped: TapedGradient
    predictions: Parts
    batch: Arguments
    loss: Callable[[Parts, Arguments], Any]


@dataclass(frozen=True)
class PredictionRule(Rule):
    """`J^T B J`: `J` the Jacobian of a model, `B` a matrix in the space of its predictions.

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

    @abc.abstractmethod
    def prepare(self, output: Output) -> Any:
        """Evaluate what `curve` needs besides the vector."""

    @abc.abstractmethod
    def curve(self, prepared: Any, tangents: Parts) -> Parts:
        """Multiply tangents of the predictions by `B`."""

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        predictions: Any = None

        def predict(*elements: Any) -> list[tf.Tensor]:
            nonlocal predictions
            inputs = elements[:1]
            tupled = inputs and isinstance(inputs[0], tuple)
            predictions = self.model(*(inputs[0] if tupled else inputs))
            return tf.nest.flatten(predictions)

        def loss(parts: Parts, of: Arguments) -> Any:
            packed = tf.nest.pack_sequence_as(predictions, parts)
            return of.call(lambda *elements: self.output_loss(packed, *elements[1:]))

        model = TapedFunction(lambda: batch.call(predict), variables)
        output = TapedGradient(lambda: loss(model.outputs, batch), model.outputs, once=True)
        prepared = self.prepare(Output(output, model.outputs, batch, loss))
        return Evaluated(output.value, model.vjp(output.outputs), (model, prepared))

    def multiply(self, state: tuple[TapedFunction, Any], vector: Parts) -> Parts:
        model, prepared = state
        return model.vjp(self.curve(prepared, model.jvp(vector)))


@dataclass(frozen=True)
class GaussNewtonRule(PredictionRule):
    """The generalized Gauss-Newton matrix: `B` is the Hessian of the output loss."""

    def prepare(self, output: Output) -> TapedGradient:
        return output.taped

    def curve(self, prepared: TapedGradient, tangents: Parts) -> Parts:
        return prepared.vjp(tangents)
