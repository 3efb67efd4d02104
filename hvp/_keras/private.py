"""All private names of Keras that this package uses, each with the reason.

`tests/keras/test_private.py` tests what is expected of each, so that changes in Keras are noticed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError

# The lists of a layer's losses. Keras has no public way to read them without emptying them, or to
# restore them.
_LISTS_OF_LOSSES = ("_losses", "_loss_ids", "_eager_losses")
# Where Keras attaches the mask of a tensor, which it passes from layer to layer, and what a softmax
# or sigmoid was applied to, from which its cross-entropies compute.
_MASK, _LOGITS = "_keras_mask", "_keras_logits"
# The settings that a layer gets from the layers around it: whether it is training, the precision in
# which to read variables, and values in place of variables. Keras has no public way to read or set
# them. Without them, a Dropout layer inside a model would be active in the function and inactive in
# its derivative.
SCOPE_ATTRIBUTES = ("current_call_ctx", "autocast_scope", "stateless_scope")


_lock = threading.Lock()
_is_holding = contextvars.ContextVar("hvp_holds_models", default=False)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let only one thread at a time change models while it traces.

    Threads that it starts in its own context and waits for count as the same thread.
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


def refuse_other_names() -> None:
    """Raise `HvpError` if Keras keeps masks, logits or losses under other names than these.

    An attribute that has moved looks like one that is not set, and would change the loss without an
    error. The first call therefore looks for them in a known model.
    """
    if "keras" in sys.modules and _missing_names():
        raise HvpError(
            f"this version of Keras has no {', '.join(_missing_names())}, where hvp looks for "
            "masks, logits and losses",
            "a version of Keras that hvp has been tested with",
            "install another version of Keras, or another version of hvp",
        )


@functools.cache
def _missing_names() -> tuple[str, ...]:
    """Return the missing names; in a thread, as Keras and TensorFlow have thread-local state."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_find_missing_names).result()


def _find_missing_names() -> tuple[str, ...]:
    import keras

    if keras.backend.backend() != "tensorflow":  # its layers are not part of any loss here
        return ()
    # Names and zeros: the models and random numbers of the user stay as they would be.
    options = {"activity_regularizer": "l2", "kernel_initializer": "zeros", "dtype": "float32"}
    masked = keras.layers.Masking(name="hvp_masking", dtype="float32")(tf.zeros((1, 1, 1)))
    layer = keras.layers.Dense(2, "softmax", name="hvp_dense", **options)
    result = layer(tf.zeros((1, 1)))
    pairs = ((masked, _MASK), (result, _LOGITS), (layer, _LISTS_OF_LOSSES[0]))
    missing = [name for value, name in pairs if getattr(value, name, None) is None]
    return tuple(missing or ([] if getattr(layer, _LISTS_OF_LOSSES[0]) else _LISTS_OF_LOSSES[:1]))


def has_layers(value: Any) -> bool:
    """Whether a value is a layer or model of Keras 3 or tf_keras."""
    return hasattr(value, "_flatten_layers")


def layers_of(model: Any, *, include_self: bool = True) -> list[Any]:
    """Return all layers of a model, also those inside other layers; none for other values.

    The public attribute `layers` lists only the outermost layers.
    """
    return list(model._flatten_layers(include_self=include_self)) if has_layers(model) else []


def lists_of_losses(layer: Any) -> Iterator[Any]:
    """Yield the lists and sets of a layer's losses."""
    for name in _LISTS_OF_LOSSES:
        holder = getattr(layer, name, None)
        if isinstance(holder, (list, set)):
            yield holder


def losses_of(layer: Any) -> list[Any]:
    """Return the losses that the layer itself has added."""
    refuse_other_names()
    return list(getattr(layer, _LISTS_OF_LOSSES[0], ()))


def mask_of(value: Any) -> Any:
    """Return the mask of a tensor; None if it has none."""
    refuse_other_names()
    return getattr(value, _MASK, None)


def set_mask(value: Any, mask: Any) -> None:
    """Attach a mask to a tensor, or remove it with None."""
    setattr(value, _MASK, mask)


def logits_of(value: Any) -> Any:
    """Return what a softmax or sigmoid was applied to, given its result; None for other tensors."""
    refuse_other_names()
    return getattr(value, _LOGITS, None)


def set_logits(value: Any, logits: Any) -> None:
    """Attach to a tensor what a softmax or sigmoid was applied to."""
    setattr(value, _LOGITS, logits)


def maker_of(tensor: Any) -> tuple[Any, Any]:
    """Return the operation that made a symbolic tensor of a functional model, and its call.

    Keras has no public way to walk through a functional model. The history of a tensor contains the
    operation and the number of its call.
    """
    operation, index, _ = tensor._keras_history
    return operation, operation._inbound_nodes[index]


def inputs_of_call(node: Any, values: Any) -> tuple[Any, Any]:
    """Return the arguments of a call in a functional model, with tensors for the symbolic ones."""
    return node.arguments.fill_in(values)


def global_state() -> Any:
    """Return the module of Keras' thread-local state; None if Keras is not imported."""
    if "keras" not in sys.modules:
        return None
    from keras.src.backend.common import global_state

    return global_state


def state_of_thread() -> dict[str, Any]:
    """Return the state of Keras itself in this thread."""
    return vars(global_state().GLOBAL_STATE_TRACKER)
