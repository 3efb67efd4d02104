"""What a Laplace approximation takes from a model: outputs, uncertain weights, and features."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._engines.predictions import Prediction
from hvp._errors import HvpError, InvalidLossError
from hvp._kronecker.kfac import with_layers
from hvp._operators.predictions import of_inputs
from hvp._vectors.selection import select
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest, collect_variables


def outputs_of(model: Any, takes_logits: bool) -> Callable[..., Any]:
    """Return the outputs of a model as a function of its inputs, one tensor."""
    if not callable(model):
        raise HvpError(f"the model is {type(model).__name__}", "a function of inputs")

    call = of_inputs(model)

    def outputs(*inputs: Any) -> Any:
        value = call(*inputs)
        if not tf.is_tensor(value) or not value.shape.rank:
            raise InvalidLossError(
                f"the model returns {type(value).__name__} for a batch",
                "one tensor, whose first axis counts the examples",
            )
        logits = Prediction.of(value).logits if takes_logits else None
        return value if logits is None else logits

    own = getattr(model, "keras_model", model)
    return with_layers(outputs, own) if hasattr(own, "trainable_variables") else outputs


def chosen(model: Any, subset: Any) -> Any:
    """Return the variables that are uncertain."""
    model = getattr(model, "keras_model", model)
    named = subset if isinstance(subset, (list, tuple)) else [subset]
    if not all(isinstance(one, str) for one in named) or not named:
        return subset
    if not hasattr(model, "trainable_variables"):
        raise HvpError(
            f"the subset is {subset!r}, and the model is a function",
            "the variables that are uncertain",
            "pass subset=[w, b]",
        )
    if subset == "all":
        return model
    if subset == "last-layer":
        return _last_layer(model)
    nest: VariableNest = collect_variables(model)
    space = Space.of_variables(nest)
    places = select(subset, space.paths, nest.variables)
    return [model.trainable_variables[place] for place in places]


def _last_layer(model: Any) -> Any:
    layers = [layer for layer in getattr(model, "layers", ()) if layer.trainable_variables]
    if not layers:
        raise HvpError(
            "the subset is 'last-layer', and the model has no layers with trainable weights",
            "a Keras model",
            "pass the weights of the last layer: subset=[w, b]",
        )
    return layers[-1]


def features_of(model: Any) -> Callable[..., Any] | None:
    """Return the inputs of the last layer of a Keras model, if it is a dense one.

    Only a softmax or sigmoid may follow, of which the logits are taken. Whoever takes the inputs
    has to make sure that the outputs are those of this layer.
    """
    model = getattr(model, "keras_model", model)
    layer = _last_layer(model)
    # Models that are classes have none, and layers that other models call have theirs.
    ends: tuple[Any, Any] = getattr(model, "inputs", None), getattr(layer, "input", None)
    if any(end is None for end in ends) or len(ends[1].shape) != 2:
        return None
    operations = list(getattr(model, "operations", None) or model.layers)
    after = operations[operations.index(layer) + 1 :]
    if type(layer).__name__ != "Dense" or not all(map(_may_have_logits, [layer, *after])):
        return None
    keras = importlib.import_module(type(layer).__module__.partition(".")[0])  # or tf_keras
    try:
        inner = keras.Model(*ends)
    except ValueError:
        return None
    return lambda x: inner(x, training=False)


def _may_have_logits(layer: Any) -> bool:
    """Return whether a layer ends with a softmax, a sigmoid or no activation."""
    activation = getattr(layer, "activation", None)
    name = getattr(activation, "__name__", type(layer).__name__).lower()
    return name in ("linear", "softmax", "sigmoid")
