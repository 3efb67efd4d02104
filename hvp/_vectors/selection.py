"""Selection of an operator's variables: by name, pattern or layer, or themselves."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import InvalidVariablesError
from hvp._vectors.variables import collect_variables

# How many names a message lists.
_SHOWN = 12


def select(chosen: Any, names: Sequence[str], variables: Sequence[tf.Variable]) -> list[int]:
    """Return the places of the chosen variables, in increasing order.

    `chosen` is a nest of variables, layers, modules and strings. A string is a pattern for one or
    several successive parts of a variable's path, such as ``"dense_2"``, ``"dense_*"`` or
    ``"dense/kernel"``. If it matches nothing, or something else is chosen, an
    `InvalidVariablesError` is raised.
    """
    places: set[int] = set()
    items = tf.nest.flatten(chosen)
    for item in items:
        places |= _named(item, names) if isinstance(item, str) else _of(item, names, variables)
    if not items:
        raise InvalidVariablesError("no variable is chosen", "at least one", _listed(names))
    return sorted(places)


def entries_of(chosen: Any, size: int, *, least: int = 0) -> np.ndarray:
    """Return the numbers of chosen entries of a vector, at least so many of them.

    If anything else is chosen, an `InvalidVariablesError` is raised.
    """
    entries = np.atleast_1d(np.asarray(chosen))
    inside = entries.dtype.kind in "iu" and ((entries >= 0) & (entries < size)).all()
    if entries.ndim != 1 or len(entries) < least or not inside:
        raise InvalidVariablesError(
            f"the entries of a vector of {size} are chosen by an array of {entries.dtype} of shape "
            f"{entries.shape}",
            f"integers from 0 to {size - 1}",
            "np.flatnonzero(mask) has the numbers of a mask",
        )
    return entries


def groups(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the places of each layer's variables, by the path of the layer.

    A variable that is in no layer is a group of its own.
    """
    result: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        result.setdefault(name.rpartition("/")[0] or name, []).append(place)
    return result


def _named(pattern: str, names: Sequence[str]) -> set[int]:
    found = {place for place, name in enumerate(names) if _fits(pattern, name)}
    if not found:
        raise InvalidVariablesError(
            f"no variable has {pattern!r} in its path", "a name or pattern", _listed(names)
        )
    return found


def _fits(pattern: str, name: str) -> bool:
    parts = name.split("/")
    ends = range(1, len(parts) + 1)
    return any(
        fnmatch.fnmatchcase("/".join(parts[start:end]), pattern)
        for end in ends
        for start in range(end)
    )


def _of(item: Any, names: Sequence[str], variables: Sequence[tf.Variable]) -> set[int]:
    place_of = {id(variable.handle): place for place, variable in enumerate(variables)}
    nest = collect_variables(item)
    missing = [
        name
        for name, variable in zip(nest.names, nest.variables)
        if id(variable.handle) not in place_of
    ]
    if missing:
        raise InvalidVariablesError(
            f"the variable {missing[0]!r} is none of the operator's",
            "its variables",
            _listed(names),
        )
    return {place_of[id(variable.handle)] for variable in nest.variables}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"choose among {', '.join(names[:_SHOWN])}{more}"
