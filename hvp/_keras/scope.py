"""What Keras layers are told by the layers around them, told again when they are traced later.

A layer that is called inside another's `call` learns from it whether this is training, and in which
precision to read variables. But a derivative is traced when that other layer has long returned, and
every trace is made in a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hvp._keras.private import SCOPE_ATTRIBUTES, global_state


class KerasScope:
    """What layers are told where this is made.

    Attributes
    ----------
    key : tuple
        Equal for scopes in which layers compute the same.
    passes : bool
        Whether other values stand for the variables here, or they have none yet, so that a trace
        is good for this call only.
    """

    def __init__(self) -> None:
        state = global_state()
        self._values = [state and state.get_global_attribute(name) for name in SCOPE_ATTRIBUTES]
        call, autocast, stateless = self._values
        self.key = (_training(call), str(getattr(autocast, "dtype", None)))
        self.passes = stateless is not None

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Tell layers the same again."""
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
    """Take all that Keras keeps for this thread over to another, and back."""
    state = global_state()
    if state is None:
        yield lambda function: function()
        return
    here = vars(state.GLOBAL_STATE_TRACKER)
    left: dict[str, Any] = {}

    def there(function: Callable[[], Any]) -> Any:
        vars(state.GLOBAL_STATE_TRACKER).update(before)
        try:
            return function()
        finally:
            left.update(vars(state.GLOBAL_STATE_TRACKER))

    before = dict(here)
    try:
        yield there
    finally:
        here.update(left)


def _training(call: Any) -> Any:
    if call is None:
        return None
    return call.get_value("training") if hasattr(call, "get_value") else call.training
