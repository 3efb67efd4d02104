"""Checks of arguments that several parts of the package share."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvp._errors import HvpError


def check_count(value: Any, name: str, least: int = 1) -> None:
    """Raise `HvpError` unless a value is an integer that is at least `least`."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise HvpError(f"the argument {name} is {value!r}", f"an integer that is at least {least}")
