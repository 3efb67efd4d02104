"""Checks of arguments that several parts of the package share."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hvp._errors import HvpError, InvalidOptionError


def check_count(value: Any, name: str, least: int = 1) -> int:
    """Return an integer; raise `HvpError` unless the value is one that is at least `least`."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise HvpError(f"the argument {name} is {value!r}", f"an integer that is at least {least}")
    return int(value)


def check_number(value: Any, name: str, *, positive: bool = False, below: float = math.inf) -> Any:
    """Return a number; raise `HvpError` unless it is finite, nonnegative and less than `below`.

    With `positive`, zero is refused, too.
    """
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < below or (positive and value == 0):
        least = "positive" if positive else "zero or positive"
        most = "" if below == math.inf else f" and less than {below:g}"
        raise HvpError(f"the argument {name} is {value!r}", f"a finite number, {least}{most}")
    return value


def check_seed(value: Any) -> int:
    """Return a seed; raise `HvpError` unless it is an integer from 0 to 2**31 - 1."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not 0 <= value < 2**31:
        raise HvpError(f"the argument seed is {value!r}", "an integer from 0 to 2**31 - 1")
    return int(value)


def check_flag(value: Any, name: str) -> bool:
    """Return a flag; raise `HvpError` unless it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise HvpError(f"the argument {name} is {value!r}", "True or False")
    return bool(value)


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
