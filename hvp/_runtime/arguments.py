"""Checks of arguments that several parts of the package share."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hvp._errors import HvpError, InvalidOptionError


def check_count(value: Any, name: str, least: int = 1) -> None:
    """Raise `HvpError` unless a value is an integer that is at least `least`."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise HvpError(f"the argument {name} is {value!r}", f"an integer that is at least {least}")


def refuse_unknown(
    options: Collection[str],
    call: str,
    known: Collection[str],
    instead: Mapping[str, str] | None = None,
) -> None:
    """Raise `InvalidOptionError` for keyword arguments that do not exist.

    `call` is the public function or class that they were passed to. `instead` says, for some names,
    what to do instead of passing them.
    """
    unknown = sorted(set(options) - set(known))
    if not unknown:
        return
    name = unknown[0]
    alike = difflib.get_close_matches(name, known, 1)
    suggestion = f"pass {alike[0]}, if that is what you mean" if alike else "leave it out"
    raise InvalidOptionError(
        f"{call} has no argument {', '.join(unknown)}",
        f"its own arguments, or {', '.join(sorted(known))}",
        (instead or {}).get(name, suggestion),
    )
