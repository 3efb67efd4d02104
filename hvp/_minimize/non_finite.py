"""Messages about trial points at which a loss or its gradient is not finite."""

from __future__ import annotations

import logging

_log = logging.getLogger("hvp")


def log_non_finite() -> None:
    """Log that the optimizer retreats from a trial point."""
    _log.info("the loss or its gradient is not finite at a trial point: the step shrinks")


def non_finite_message(count: int) -> str:
    """Return a sentence on `count` such points for the message of a run; empty for none."""
    if not count:
        return ""
    return (
        f" At {count} trial points the loss or its gradient was not finite, and the step was "
        "shortened."
    )
