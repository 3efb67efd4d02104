"""Restoring the settings of Keras layers when they are traced later.

A layer that is called inside another layer gets settings from that layer: whether it is training,
and the precision in which to read variables. A derivative is traced after that other layer has
returned, and every trace is made in a separate thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hvp._keras.private import SCOPE_ATTRIBUTES, global_state, state_of_thread


class KerasScope:
    """The settings that are in force for Keras layers where the object is created.

    Attributes
    ----------
    key : tuple
        Equal for scopes in which layers compute the same.
    passes : bool
        Whether this is a stateless call, in which other values replace those of the variables, or
        the variables have no values yet. A trace then serves this call only.
    """

    def __init__(self) -> None:
        state = global_state()
        self._values = [state and state.get_global_attribute(name) for name in SCOPE_ATTRIBUTES]
        call, autocast, stateless = self._values
        self.key = (_training(call), str(getattr(autocast, "dtype", None)))
        self.passes = stateless is not None

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Put the settings in force again."""
        state = global_state()
        if state is None:
            yield
            return
        before = [state.get_global_attribute(name) for name in SCOPE_ATTRIBUTES]
        try:
            for name, value in zip(SCOPE_ATTRIBUTES, self._values):
                state.set_global_attribute(name, value)
            yield
        finally:
            for name, value in zip(SCOPE_ATTRIBUTES, before):
                state.set_global_attribute(name, value)


@contextlib.contextmanager
def carried_over() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yield a function that runs another one with this thread's Keras state, in another thread.

    When the context ends, this thread gets the state that the function left.
    """
    if global_state() is None:
        yield lambda function: function()
        return
    here = state_of_thread()
    left: dict[str, Any] = {}

    def there(function: Callable[[], Any]) -> Any:
        state_of_thread().update(before)
        try:
            return function()
        finally:
            left.update(state_of_thread())

    before = dict(here)
    try:
        yield there
    finally:
        here.update(left)


def _training(call: Any) -> Any:
    if call is None:
        return None
    return call.get_value("training") if hasattr(call, "get_value") else call.training
