"""Warnings that point to the user's code."""

from __future__ import annotations

import inspect
import warnings

# Code of these packages may lie between the user's code and what warns.
_BETWEEN = frozenset("concurrent contextlib functools hvp numpy scipy tensorflow threading".split())


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the innermost line of the user's code."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
