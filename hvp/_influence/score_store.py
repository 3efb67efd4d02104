"""Scores that are computed block by block, in memory or in a file, and resumed after a stop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from hvp._errors import CheckpointError, HvpError
from hvp._runtime.checkpoint import Checkpoint


class ScoreStore:
    """An array of scores, how much of it is complete, and the checkpoint that saves both.

    `rows` rows of `array` are complete, and `columns` columns of the block that follows them. With
    `out`, the array is a memory map of that file. `fingerprint` identifies the run, and is called
    only if there is a checkpoint.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        out: Any,
        checkpoint: Any,
        fingerprint: Callable[[], dict[str, str]],
    ) -> None:
        self.rows = self.columns = 0
        self._path = checkpoint
        self._checkpoint: Checkpoint | None = None
        saved: dict[str, np.ndarray] = {}
        if checkpoint is not None:
            self._checkpoint = Checkpoint(checkpoint, fingerprint())
            saved = self._checkpoint.load()
        if saved:
            self.rows, self.columns = (int(number) for number in saved["standing"])
        self.array: np.ndarray
        if out is not None:
            self.array = mapped_array(out, shape, dtype, resume=bool(saved))
        else:
            self.array = saved["scores"] if saved else np.empty(shape, dtype)

    def complete_columns(self, columns: int) -> None:
        """Record that a block is complete up to this column, and save if it is time to."""
        self.columns = columns
        if self._checkpoint is not None and self._checkpoint.due:
            self._save()

    def complete_rows(self, rows: int) -> None:
        """Record that the array is complete up to this row, and save."""
        self.rows, self.columns = rows, 0
        if self._checkpoint is not None:
            self._save()

    def flush(self) -> None:
        """Write a memory map to its file."""
        if isinstance(self.array, np.memmap):
            self.array.flush()

    @contextlib.contextmanager
    def solving(self, first: int) -> Iterator[Path | None]:
        """Yield the path of a checkpoint for the solution of the block that starts at row `first`.

        The file is removed when the block is complete, and after an error that would occur again.
        """
        if self._path is None:
            yield None
            return
        path = Path(f"{os.fspath(self._path)}.solve{first}")
        try:
            yield path
        except CheckpointError:  # the file may belong to another run
            raise
        except HvpError:
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)

    def _save(self) -> None:
        assert self._checkpoint is not None
        arrays = {"standing": np.array([self.rows, self.columns])}
        if isinstance(self.array, np.memmap):
            self.array.flush()
        else:
            arrays["scores"] = self.array
        self._checkpoint.save(arrays)


def mapped_array(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], resume: bool = False
) -> np.ndarray:
    """Return a memory map of a ``.npy`` file, which exists already if `resume`.

    The disk space is allocated at once: a process that writes to a memory map on a full disk is
    killed by the operating system. A file that cannot be written, or that holds another array, is
    refused.
    """
    if not isinstance(out, (str, os.PathLike)):
        raise HvpError(f"the argument out is {out!r}", "the path of a file")
    path = Path(out)
    try:
        if resume:
            array = open_memmap(path, mode="r+")
            if array.shape == shape and array.dtype == dtype:
                return array
            raise HvpError(
                f"the file {path} has shape {array.shape} and type {array.dtype}",
                f"the scores that belong to the checkpoint, of shape {shape} and type {dtype}",
                "remove the checkpoint to start again",
            )
        if path.exists():
            raise HvpError(
                f"the file {path} exists",
                "the name of a new file for the scores",
                "remove it, or pass another name",
            )
        array = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(file.fileno(), 0, size)
        return array
    except (OSError, ValueError) as error:
        raise HvpError(
            f"the scores cannot be written to {path} ({error})",
            f"a file with room for {' x '.join(map(str, shape))} numbers",
        ) from error
