"""All private names of Keras that this package uses, each with the reason.

`tests/keras/test_private.py` tests what is expected of each of them, so that a change in Keras is
noticed there first.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Iterator
from typing import Any

# The lists of a layer's losses. Keras has no public way to read them without emptying them, or to
# restore them.
_LISTS_OF_LOSSES = ("_losses", "_loss_ids", "_eager_losses")
# The settings that a layer gets from the layers around it: whether it is training, the precision in
# which to read variables, and values in place of variables. Keras has no public way to read or set
# them. Without them, a Dropout layer inside a model would be active in the function and inactive in
# its derivative.
SCOPE_ATTRIBUTES = ("current_call_ctx", "autocast_scope", "stateless_scope")


_lock = threading.Lock()
_is_holding = contextvars.ContextVar("hvp_holds_models", default=False)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one thread at a time change models for the time of a trace.

    Threads that it starts in its own context, and waits for, belong to it.
    """
    if _is_holding.get():
        yield
        return
    with _lock:
        token = _is_holding.set(True)
        try:
            yield
        finally:
            _is_holding.reset(token)


def has_layers(value: Any) -> bool:
    """Whether a value is a layer or model of Keras 3 or tf_keras."""
    return hasattr(value, "_flatten_layers")


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """Return all layers of a model, including those inside other layers.

    The list is empty for a value that is not a model. The public attribute `layers` lists only the
    outermost layers.
    """
    return list(model._flatten_layers(include_self=include_self)) if has_layers(model) else []


def lists_of_losses(layer: Any) -> Iterator[Any]:
    """Yield the lists and sets of a layer's losses."""
    for name in _LISTS_OF_LOSSES:
        holder = getattr(layer, name, None)
        if isinstance(holder, (list, set)):
            yield holder


def losses_of(layer: Any) -> list[Any]:
    """Return the losses that a layer itself has added."""
    return list(getattr(layer, "_losses", ()))


def mask_of(value: Any) -> Any:
    """Return the mask of a tensor, which Keras passes from layer to layer as an attribute."""
    return getattr(value, "_keras_mask", None)


def set_mask(value: Any, mask: Any) -> None:
    """Attach a mask to a tensor, or remove it with None."""
    value._keras_mask = mask


def logits_of(value: Any) -> Any:
    """Return what a softmax or sigmoid was applied to, given its result; None for others.

    Keras attaches it to the result as an attribute, and its cross-entropies compute with it in
    place of the result.
    """
    return getattr(value, "_keras_logits", None)


def set_logits(value: Any, logits: Any) -> None:
    """Attach to a tensor what a softmax or sigmoid was applied to."""
    value._keras_logits = logits


def maker_of(tensor: Any) -> tuple[Any, Any]:
    """Return the operation that made a symbolic tensor of a functional model, and its call.

    Keras has no public way to walk through a functional model. The history of a tensor contains the
    operation and the number of its call. The `arguments` of a call can be filled with tensors in
    place of symbolic ones.
    """
    operation, index, _ = tensor._keras_history
    return operation, operation._inbound_nodes[index]


def global_state() -> Any:
    """Return the module of Keras' thread-local state; None if Keras is not imported."""
    if "keras" not in sys.modules:
        return None
    from keras.src.backend.common import global_state

    return global_state
