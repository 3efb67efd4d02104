"""Progress bars, drawn by tqdm."""

from __future__ import annotations

import sys
from typing import Any

from hvp._errors import HvpError


def check_progress(progress: Any) -> None:
    """Raise `HvpError` if `progress` is invalid, or if a bar needs tqdm and it is not installed."""
    if progress not in (True, False, "always"):
        raise HvpError(f"the argument progress is {progress!r}", "True, False or 'always'")
    if progress:
        _tqdm()


def progress_bar(progress: Any, *, total: int | None = None, unit: str = "", done: int = 0) -> Any:
    """Return a bar that is shown if `progress` is ``"always"``, or if it is True on a terminal.

    The `done` steps of an earlier run do not count towards the speed. If nothing is shown, tqdm is
    not needed.
    """
    if not progress or (progress is True and not sys.stderr.isatty()):
        return _HiddenBar(done)
    return _tqdm()(total=total, unit=unit, initial=done, leave=False)


class _HiddenBar:
    """Shows nothing; implements the part of tqdm's interface that this package uses."""

    disable = True

    def __init__(self, done: int) -> None:
        self.n = done

    def __enter__(self) -> _HiddenBar:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def update(self, steps: int = 1) -> None:
        """Count steps."""
        self.n += steps

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Show nothing."""


def _tqdm() -> Any:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise HvpError(
            "a progress bar was requested, but tqdm is not installed",
            "tqdm, which draws the bars",
            "pip install tqdm, or pass progress=False",
        ) from error
    return tqdm
