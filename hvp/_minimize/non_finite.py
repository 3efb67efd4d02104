"""What is said where a loss or its gradient is not finite at a trial point."""

from __future__ import annotations

import logging

_log = logging.getLogger("hvp")


def log_non_finite() -> None:
    """Say in the log that a step is turned back from."""
    _log.info("the loss or its gradient is not finite at a trial point: the step shrinks")


def non_finite_said(count: int) -> str:
    """Return what to add to the message of a run that met so many; nothing for none."""
    if not count:
        return ""
    return (
        f" At {count} trial points the loss or its gradient was not finite, and the step was made "
        "shorter."
    )
