"""Progress bars, by tqdm, where they are asked for and somebody can see them."""

from __future__ import annotations

import sys
from typing import Any

from hvp._errors import HvpError


def check_progress(progress: Any) -> None:
    """Refuse what is not a choice; know at once whether tqdm is there."""
    if progress not in (True, False, "always"):
        raise HvpError(f"the argument progress is {progress!r}", "True, False or 'always'")
    if progress:
        _tqdm()


def progress_bar(progress: Any, *arguments: Any, **options: Any) -> Any:
    """Return a bar of tqdm's: on a terminal, or anywhere if `progress` is ``"always"``.

    Parameters
    ----------
    progress : bool or "always"
        False for a bar that shows nothing.
    *arguments, **options
        Of `tqdm.tqdm`.
    """
    hidden = not progress or (progress is True and not sys.stderr.isatty())
    return _tqdm()(*arguments, leave=False, disable=hidden, **options)


def _tqdm() -> Any:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError as error:
        raise HvpError(
            "progress is asked for, and tqdm is not installed",
            "tqdm",
            "pip install 'hvp[examples]'",
        ) from error
    return tqdm
