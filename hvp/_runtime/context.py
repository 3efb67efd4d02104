"""Values that hold in a context and the threads that copy it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def assigned(variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    """Give a variable a value in this context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
