"""Checks of arguments that several parts of the package share."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hvp._errors import HvpError, InvalidOptionError


def check_choice(value: Any, name: str, choices: Collection[Any]) -> Any:
    """Return a value; raise `HvpError` unless it is one of the choices."""
    if value not in choices:
        raise HvpError(f"the argument {name} is {value!r}", " or ".join(map(repr, choices)))
    return value


def check_count(value: Any, name: str, least: int = 1) -> int:
    """Return an integer; raise `HvpError` unless the value is one that is at least `least`."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise HvpError(f"the argument {name} is {value!r}", f"an integer that is at least {least}")
    return int(value)


def check_number(
    value: Any,
    name: str,
    *,
    positive: bool = False,
    below: float = math.inf,
    finite: bool = True,
    instead: str = "",
) -> Any:
    """Return a number; raise `HvpError` unless it is real, nonnegative and less than `below`.

    With `positive`, zero is refused, too; without `finite`, infinity is not. `instead` is what else
    the caller takes, for the message.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    fits = is_number and (0 <= value < below or (not finite and value == math.inf))
    if not fits or (positive and value == 0):
        kind = "a finite number" if finite else "a number"
        least = "positive" if positive else "zero or positive"
        most = "" if below == math.inf else f" and less than {below:g}"
        expected = f"{kind}, {least}{most}"
        expected = f"{instead}, or {expected}" if instead else expected
        raise HvpError(f"the argument {name} is {value!r}", expected)
    return value


def check_seed(value: Any, below: float = math.inf) -> int:
    """Return a seed; raise `HvpError` unless it is a nonnegative integer less than `below`."""
    seed = check_count(value, "seed", least=0)
    if seed >= below:
        raise HvpError(f"the argument seed is {value!r}", f"an integer from 0 to {below - 1}")
    return seed


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
        f"one of {', '.join(sorted(known))}",
        (instead or {}).get(name, suggestion),
    )
