"""The loss that a Keras model was compiled with, as a function of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._errors import InvalidLossError


def loss_of_model(
    model: Any, *, training: bool | None, by_examples: bool, regularized: bool = True
) -> Callable[..., Any]:
    """Return the compiled loss.

    Parameters
    ----------
    model : keras.Model
        Compiled.
    training : bool or None
        Whether layers behave as in training.
    by_examples : bool
        Whether a batch counts as many times as it has examples, which a mask would make wrong.
    regularized : bool
        Whether the model's regularizers count.

    Returns
    -------
    callable
        Takes `x`, `y` and perhaps `sample_weight`; returns the mean.

    Raises
    ------
    InvalidLossError
        If the model is not compiled, or its loss is a sum over the batch, not a mean.
    """
    if not getattr(model, "compiled", False):
        raise InvalidLossError(
            f"the model is {type(model).__name__}, and has no compiled loss",
            "a Keras model that was compiled with a loss",
            "call model.compile(loss=...), or pass a loss yourself",
        )
    for part in tf.nest.flatten(model.loss):
        if getattr(part, "reduction", None) in ("sum", "none"):
            raise InvalidLossError(
                f"the compiled loss {part.name!r} has reduction {part.reduction!r}",
                "a mean over examples",
                "compile with the default reduction, and pass reduction='sum' here for a sum",
            )

    def loss(x: Any, y: Any, sample_weight: Any = None) -> Any:
        made = model(x, training=training)
        if by_examples and any(
            getattr(output, "_keras_mask", None) is not None for output in tf.nest.flatten(made)
        ):
            raise InvalidLossError(
                "an output of the model has a mask, so that Keras averages over what is not "
                "masked, and not over examples",
                "weight=, a function that tells how much a batch counts",
                "for token 0 as mask: weight=lambda x, y: tf.math.count_nonzero(x)",
            )
        value = model.compute_loss(x=x, y=y, y_pred=made, sample_weight=sample_weight)
        if not regularized and model.losses:
            value -= tf.add_n([tf.cast(part, value.dtype) for part in model.losses])
        return value

    return loss
