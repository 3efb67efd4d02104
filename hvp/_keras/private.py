"""The private names of Keras that are used, all of them, each with its reason.

`tests/keras/test_private.py` holds what is expected of each, and fails first when one moves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

# The lists in which a layer notes losses. Keras has no public way to read them without emptying
# them, or to put them back.
_LISTS_OF_LOSSES = ("_losses", "_loss_ids", "_eager_losses")
# What a layer learns from the layers around it: whether this is training, and in which precision to
# read variables. Keras has no public way to ask for these, or to set them. Without them a Dropout
# layer inside a model would be off in the derivative and on in the function.
SCOPE_ATTRIBUTES = ("current_call_ctx", "autocast_scope", "stateless_scope")


def has_layers(value: Any) -> bool:
    """Whether a value is a Keras layer or model, of whichever Keras."""
    return hasattr(value, "_flatten_layers")


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """Return all layers of a model, those inside of other layers too; none for what is no model.

    The public `layers` has the outermost ones only.
    """
    return list(model._flatten_layers(include_self=include_self)) if has_layers(model) else []


def lists_of_losses(layer: Any) -> Iterator[Any]:
    """Go through the lists and sets in which a layer notes losses."""
    for name in _LISTS_OF_LOSSES:
        holder = getattr(layer, name, None)
        if isinstance(holder, (list, set)):
            yield holder


def losses_of(layer: Any) -> list[Any]:
    """Return the losses that a layer has noted itself."""
    return list(getattr(layer, "_losses", ()))


def mask_of(value: Any) -> Any:
    """Return the mask that Keras hands on from layer to layer as an attribute of a tensor."""
    return getattr(value, "_keras_mask", None)


def set_mask(value: Any, mask: Any) -> None:
    """Attach a mask to a tensor, or take it off."""
    value._keras_mask = mask


def maker_of(tensor: Any) -> tuple[Any, Any]:
    """Return the operation that made a symbolic tensor of a functional model, and its call.

    Keras has no public way to walk through a functional model. The history of a tensor tells which
    operation made it in which of its calls, and a call's `arguments` take tensors in place of
    symbolic ones.
    """
    operation, index, _ = tensor._keras_history
    return operation, operation._inbound_nodes[index]


def global_state() -> Any:
    """Return Keras' module of what it keeps for each thread; None if Keras is not in use."""
    if "keras" not in sys.modules:
        return None
    from keras.src.backend.common import global_state

    return global_state
