"""Checks of models and of losses of their predictions."""

from __future__ import annotations

import functools
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
    call = of_inputs(model) if hasattr(model, "trainable_weights") else retraced(model)

    def predict(*inputs: Any) -> Any:
        predictions = called(call, *inputs)
        return checked_floating(predictions, "the model", "floating-point tensors, the predictions")

    return predict


def of_inputs(model: Any) -> Callable[..., Any]:
    """Return a model as a function of its inputs, which functional Keras models take as a tuple."""
    is_functional = hasattr(model, "output_names") and hasattr(model, "inputs")
    if not is_functional or len(model.inputs or ()) < 2:
        return model
    return lambda *inputs: model(inputs if len(inputs) > 1 else inputs[0])


def checked_floating(results: Any, what: str, expected: str = "floating-point tensors") -> Any:
    """Return a nest of what a function returned as tensors, which are of floating type."""

    def checked(leaf: Any) -> tf.Tensor:
        is_tensor = isinstance(leaf, (tf.Tensor, tf.Variable))
        if not (is_tensor and leaf.dtype.is_floating):
            kind = leaf.dtype.name if is_tensor else type(leaf).__name__
            raise InvalidLossError(f"{what} returned a {kind}", expected)
        return tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(checked, results)


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
    return functools.partial(called, retraced(output_loss))
