"""Files that are complete or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def temporary_of(path: Path) -> Path:
    """Return the name of a temporary file beside another one.

    It contains the process id, so that two processes never write to the same file.
    """
    return path.with_name(f"{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to a temporary file, and rename it when it is complete."""
    temporary = temporary_of(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
