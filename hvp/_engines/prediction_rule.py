"""What rules of matrices `J^T B J` share, where `J` is the Jacobian of a model's predictions."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvp._derivatives.gradient import value_and_gradient
from hvp._derivatives.registry import dense
from hvp._engines.predictions import Predictions
from hvp._engines.rule import Arguments, Evaluated, Parts, Rule
from hvp._engines.taped import TapedFunction, TapedGradient
from hvp._errors import InvalidLossError
from hvp._graphs.refusals import refuse_unless

# How far two computations of the same vector may be apart, as a part of its Euclidean norm, and of
# what it was computed from: rounding is all that there is where predictions are certain. Some
# versions of Keras divide masked losses by the number of entries plus 1e-7.
_APART = {tf.float64: (1e-7, 2**-46), tf.float32: (1e-3, 2**-17)}
_IN_HALF = 0.1, 0.25


@dataclass(frozen=True)
class Output:
    """A loss of predictions, and its gradient in them on a tape.

    `loss` takes predictions and their batch.
    """

    taped: TapedGradient
    predictions: Parts
    batch: Arguments
    loss: Callable[[Parts, Arguments], Any]

    def are_close(self, one: Parts, other: Parts, scale: Any = 0) -> tf.Tensor:
        """Return whether two vectors, given by their parts, agree up to rounding.

        The type that counts is the least precise one: Keras computes losses in float32, whatever
        the model is in. `scale` is the size of what the first was computed from. The answer is True
        if the first is not finite, which is refused elsewhere.
        """
        if not one:
            return tf.constant(True)
        types = [self.taped.value.dtype, *(part.dtype for part in one)]
        relative, rounding = _APART.get(min(types, key=lambda dtype: dtype.size), _IN_HALF)
        apart = tf.linalg.global_norm([a - b for a, b in zip(one, other)])
        own, others = tf.linalg.global_norm(one), tf.linalg.global_norm(other)
        allowed = relative * (own + others) + tf.cast(rounding * scale, own.dtype)
        return (apart <= allowed) | ~tf.math.is_finite(own)


@dataclass(frozen=True)
class PredictionRule(Rule):
    """`J^T B J`: `J` the Jacobian of a model, `B` a matrix in the space of its predictions.

    `model` takes the first element of a batch, as several arguments if it is a tuple, and returns a
    nest of floating-point tensors, the predictions. `output_loss` takes these and the other
    elements, and returns a real scalar. `weight` takes the elements of a batch, and returns what
    the loss divides by; None stands for the number of examples.
    """

    model: Callable[..., Any]
    output_loss: Callable[..., Any]
    weight: Callable[..., Any] | None

    @property
    def multiplies_once(self) -> bool:
        """Whether `prepare` and `curve` multiply by the loss's Hessian once, together."""
        return True

    @abc.abstractmethod
    def prepare(self, output: Output) -> Any:
        """Evaluate what `curve` needs besides the vector."""

    @abc.abstractmethod
    def curve(self, prepared: Any, tangents: Parts) -> Parts:
        """Multiply tangents of the predictions by `B`."""

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        model, output = self.taped(variables, batch, once=self.multiplies_once)
        state = model, self.prepare(output)
        return Evaluated(output.taped.value, model.vjp(output.taped.outputs), state)

    def taped(
        self, variables: Sequence[tf.Variable], batch: Arguments, *, once: bool = False
    ) -> tuple[TapedFunction, Output]:
        """Return the model and the loss of its predictions on tapes.

        `once` says that the Hessian of the loss is multiplied a single time.
        """
        made: Any = None

        def predict(*elements: Any) -> list[tf.Tensor]:
            nonlocal made
            made = Predictions(self.predict(*elements))
            return made.tensors

        def loss(parts: Parts, of: Arguments) -> Any:
            return predictions.loss(self.output_loss, parts, of)

        model = TapedFunction(lambda: batch.call(predict), variables)
        predictions: Predictions = made
        # Of the results, and their logits, only what the loss reads has cotangents.
        chosen = [model.outputs[i] for i in predictions.choose(self.output_loss, batch)]
        model.outputs = chosen
        gradient = TapedGradient(lambda: loss(chosen, batch), chosen, once=once)
        constants = [tf.stop_gradient(part) for part in chosen]
        refuse_penalties(lambda: loss(constants, batch), variables)
        return model, Output(gradient, chosen, batch, loss)

    def value(self, batch: Arguments) -> Any:
        """Return the loss of a batch alone, without derivatives."""

        def loss(*elements: Any) -> Any:
            return self.output_loss(self.predict(*elements), *elements[1:])

        return batch.call(loss)

    def predict(self, *elements: Any) -> Any:
        """Return the model's predictions for the elements of a batch."""
        inputs = elements[:1]
        tupled = inputs and isinstance(inputs[0], tuple)
        return self.model(*(inputs[0] if tupled else inputs))

    def count(self, output: Output) -> tf.Tensor:
        """Return what the loss divides by, after checking that it does.

        The gradient in the first prediction must be that of the first example alone, divided by the
        number of examples.
        """
        within, alone = self._gradients_of_first(output)
        count, one = self._weights(output)
        refuse_unless(
            output.are_close([count * part for part in within], _times(one, alone)),
            InvalidLossError(
                "the output loss is not a mean of a loss for each example",
                "a mean over the first axis of the predictions, to which every example "
                "contributes a loss that depends on no other example",
                "use tf.reduce_mean; pass weight if the loss divides by something other than the "
                "number of examples",
            ),
        )
        return count

    def refuse_sum(self, output: Output) -> None:
        """Refuse a loss that is a sum over examples, as far as the first example tells."""
        try:
            within, alone = self._gradients_of_first(output)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            return  # A loss may be defined for all examples only, and is then no sum of theirs.
        if not within:
            return
        count, one = self._weights(output)
        whole, own = [count * part for part in within], _times(one, alone)
        is_mean = output.are_close(whole, own)
        self._refuse_broadcast(output, is_mean)
        refuse_unless(
            is_mean | tf.logical_not(output.are_close(within, alone)),
            InvalidLossError(
                "the output loss is a sum over examples",
                "a mean over examples",
                "use tf.reduce_mean, and pass reduction='sum' for the matrix of the sum",
            ),
        )

    def _refuse_broadcast(self, output: Output, is_mean: tf.Tensor) -> None:
        """Refuse a loss that is no mean, and would be one for targets that have columns, too."""
        shapes = [part.shape for part in output.predictions]
        if self.weight is not None or not all(s.rank == 2 and s[1] == 1 for s in shapes):
            return
        batch = output.batch.in_columns()
        if batch is output.batch:
            return
        try:
            taped = TapedGradient(
                lambda: output.loss(output.predictions, batch), output.predictions
            )
            whole, alone = self._gradients_of_first(replace(output, taped=taped, batch=batch))
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            return  # it takes no such targets
        count = self._weights(output)[0]
        refuse_unless(
            is_mean | tf.logical_not(output.are_close([count * part for part in whole], alone)),
            InvalidLossError(
                "the predictions have the shape (n, 1), targets the shape (n,), and the loss of an "
                "example depends on the targets of others",
                "the same shape of both: TensorFlow subtracts each from each otherwise",
                "pass y[:, np.newaxis] in place of y",
            ),
        )

    def _gradients_of_first(self, output: Output) -> tuple[Parts, Parts]:
        """Return the gradient in the first prediction: of the mean, and of its own loss."""
        _rows_of(output.predictions)
        first, batch = [part[:1] for part in output.predictions], output.batch.first()
        _, alone = value_and_gradient(lambda: output.loss(first, batch), first)
        pairs = [
            (within[:1], own)
            for within, own in zip(output.taped.outputs, alone)
            if within is not None and own is not None
        ]
        return [within for within, _ in pairs], [own for _, own in pairs]

    def _weights(self, output: Output) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what the losses of the batch, and of its first example, divide by."""
        dtype, rows = output.predictions[0].dtype, _rows_of(output.predictions)
        if self.weight is None:
            return tf.cast(rows, dtype), tf.ones([], dtype)
        batches = output.batch, output.batch.first()
        count, one = (tf.cast(batch.call(self.weight), dtype) for batch in batches)
        return count, one

    def multiply(self, state: tuple[TapedFunction, Any], vector: Parts) -> Parts:
        model, prepared = state
        return model.vjp(self.curve(prepared, model.jvp(vector)))


def refuse_penalties(loss: Callable[[], Any], variables: Sequence[tf.Variable]) -> None:
    """Refuse a loss of given predictions that depends on the variables as well.

    Its matrix would be that of the predictions alone, and its gradient as well.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variables)
        value = loss()
    slopes = tape.gradient(value, variables)
    # Keras adds its regularizers, which are subtracted again.
    are_zero = [tf.reduce_all(dense(slope) == 0) for slope in slopes if slope is not None]
    if are_zero:
        refuse_unless(
            tf.reduce_all(are_zero),
            InvalidLossError(
                "the output loss depends on the variables, and not only on predictions",
                "a loss of predictions and targets",
                "pass penalties of weights as regularization=",
            ),
        )


def _times(weight: tf.Tensor, gradients: Parts) -> Parts:
    """Multiply gradients by a weight; those of a mean with no weight at all are not numbers."""
    return [tf.where(weight == 0, tf.zeros_like(part), weight * part) for part in gradients]


def _rows_of(predictions: Sequence[tf.Tensor]) -> tf.Tensor:
    if any(part.shape.rank == 0 for part in predictions):
        raise InvalidLossError(
            "the model returned a scalar", "predictions whose first axis counts the examples"
        )
    return tf.shape(predictions[0])[0]
