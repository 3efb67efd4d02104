"""Checks of arguments that several parts of the package have."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvp._errors import HvpError


def check_count(value: Any, name: str, least: int = 1) -> None:
    """Refuse what is not a whole number, or too small."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < least:
        raise HvpError(f"the argument {name} is {value!r}", f"a whole number, at least {least}")
