"""One batch of data, checked, and bound to the loss that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvp._errors import InvalidDataError, InvalidLossError

_EXPECTED = (
    "a tuple of arrays or tensors with a common first axis, such as (x, y), or a dict of them"
)


def bind_batch(loss: Callable[..., Any], data: Any) -> Callable[[], Any]:
    """Return the loss as a function of nothing, its arguments the elements of `data`.

    Parameters
    ----------
    loss : callable
        Takes the elements of `data`.
    data : tuple, dict or None
        Elements become positional arguments, entries keyword arguments; arrays are converted to
        tensors once, here.

    Returns
    -------
    callable
        Takes nothing.

    Raises
    ------
    InvalidLossError
        If `loss` cannot be called.
    InvalidDataError
        If `data` are of another kind, empty, or their first axes differ.
    """
    if not callable(loss):
        raise InvalidLossError(
            f"the loss is {type(loss).__name__}, which cannot be called",
            "a function that returns a scalar",
            "pass the function, not its value: lambda: compute_loss()",
        )
    if isinstance(loss, tf.types.experimental.PolymorphicFunction):
        # An older trace may hold operations whose second derivatives are wrong (`moments`).
        loss = tf.function(loss.python_function)
    if data is None:
        return loss
    if isinstance(data, tf.data.Dataset) or not isinstance(data, (tuple, dict)):
        mend = "for a single array pass (x,)" if hasattr(data, "shape") else "pass one batch"
        raise InvalidDataError(f"data is {type(data).__name__}", _EXPECTED, mend)
    batch = tf.nest.map_structure(_as_tensor, data)
    _check_first_axes(tf.nest.flatten(batch))
    if isinstance(batch, dict):
        return lambda: loss(**batch)
    return lambda: loss(*batch)


def _as_tensor(element: Any) -> Any:
    if isinstance(element, (tf.RaggedTensor, tf.SparseTensor)):
        return element
    try:
        return tf.convert_to_tensor(element)
    except (TypeError, ValueError) as error:
        raise InvalidDataError(
            f"an element of data is {type(element).__name__}, which is no tensor: {error}",
            _EXPECTED,
        ) from error


def _check_first_axes(elements: Iterable[Any]) -> None:
    elements = list(elements)
    if not elements:
        raise InvalidDataError("data has no elements", _EXPECTED)
    if any(len(element.shape) == 0 for element in elements):
        raise InvalidDataError(
            "an element of data is a scalar", _EXPECTED, "close over it in the loss instead"
        )
    lengths = [int(element.shape[0]) for element in elements]
    if len(set(lengths)) > 1:
        raise InvalidDataError(
            f"the elements of data have first axes of {lengths}", "one length, the examples'"
        )
    if lengths[0] == 0:
        raise InvalidDataError("data has no examples", "at least one")
