"""Restoration of the settings of Keras layers that are traced later.

A layer that is called inside another layer gets settings from it: whether it is training, and the
precision in which to read variables. A derivative is traced after the outer layer has returned, and
every trace is made in a separate thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hvp._keras.private import SCOPE_ATTRIBUTES, global_state, state_of_thread


class KerasScope:
    """The settings that are in force for Keras layers where the object is created.

    In scopes with equal `key`, layers compute the same. In a stateless call, where other values
    replace those of the variables, or the variables have no values yet, `passes` is True: a trace
    then serves this call only.
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
    """Yield a function that runs another one in another thread, with this thread's Keras state.

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
