"""Checks of models and of losses of their predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._data.elements import called, retraced
from hvp._errors import InvalidDataError, InvalidLossError


def refuse_dict(data: Any) -> None:
    """Refuse a dict as data, since nothing comes first in it."""
    if isinstance(data, dict):
        raise InvalidDataError(
            "the data are a dict, which has no first element to call the model with",
            "a tuple: the inputs first, then what the output loss takes",
            "pass (inputs, targets); several inputs are a tuple, ((a, b), targets)",
        )


def checked_model(model: Any) -> Callable[..., Any]:
    """Return a function of the model's inputs whose results are checked."""
    if not callable(model):
        raise InvalidLossError(
            f"the model is {type(model).__name__}, which cannot be called",
            "a Keras model, or a function that returns the predictions",
        )
    call = model if hasattr(model, "trainable_weights") else retraced(model)

    def predict(*inputs: Any) -> Any:
        return tf.nest.map_structure(_checked_prediction, called(call, *inputs))

    return predict


def _checked_prediction(part: Any) -> tf.Tensor:
    is_tensor = isinstance(part, (tf.Tensor, tf.Variable))
    if not (is_tensor and part.dtype.is_floating):
        kind = part.dtype.name if is_tensor else type(part).__name__
        raise InvalidLossError(
            f"the model returned a {kind}", "floating-point tensors, the predictions"
        )
    return tf.convert_to_tensor(part)


def checked_output_loss(output_loss: Any) -> Callable[..., Any]:
    """Refuse what cannot be a function of predictions and targets, in this order."""
    expected = "a function of the predictions and the targets that returns a scalar"
    if not callable(output_loss):
        raise InvalidLossError(f"the output loss is {type(output_loss).__name__}", expected)
    # By their attribute, since several versions of Keras may be around.
    if hasattr(output_loss, "reduction") and hasattr(output_loss, "get_config"):
        raise InvalidLossError(
            f"the output loss is the Keras loss {type(output_loss).__name__}, which takes the "
            "targets first",
            expected,
            "pass lambda predictions, y: keras_loss(y, predictions)",
        )
    return retraced(output_loss)
