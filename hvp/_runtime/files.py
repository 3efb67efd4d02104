"""Files that are complete or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hvp._errors import CheckpointError


def temporary_of(path: Path) -> Path:
    """Return the name of a temporary file beside another one.

    It contains the process id, so that two processes never write to the same file.
    """
    return path.with_name(f"{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to a temporary file, and rename it when it is complete.

    Raise CheckpointError before that if there cannot be such a file.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise CheckpointError(f"{path} {problem}", "the name of a file in a folder that exists")
    temporary = temporary_of(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
