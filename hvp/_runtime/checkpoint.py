"""Checkpoints, which save the progress of a long computation to a file.

A save replaces the file atomically, so that it is never half written. Only the same call, with the
same data, weights and settings, can load it.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvp._errors import CheckpointError
from hvp._runtime.files import replacing, temporary_of
from hvp._runtime.user_warning import warn

# Seconds between saves.
INTERVAL = 30.0
_FINGERPRINT = "hvp_fingerprint"


class Checkpoint:
    """A file of arrays in a folder that already exists; `due` says when to save to it again.

    `fingerprint` holds digests of the data, weights and settings of this run by name, and under
    ``"call"`` the name of the function that saves. A file with another fingerprint is refused, by a
    `CheckpointError` that names the entries that differ. `interval` is in seconds.
    """

    def __init__(
        self, path: Any, fingerprint: Mapping[str, str], interval: float | None = None
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise CheckpointError(f"the checkpoint is {type(path).__name__}", "the path of a file")
        self._path = Path(path)
        self._fingerprint = dict(fingerprint)
        self._interval = INTERVAL if interval is None else interval
        self._last_save = time.monotonic()
        temporary = temporary_of(self._path)
        try:
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            raise CheckpointError(
                f"nothing can be written beside the checkpoint {self._path} ({error.strerror})",
                "a path in a folder that exists and can be written to",
            ) from error

    def load(self) -> dict[str, np.ndarray]:
        """Return the saved arrays, or an empty dict if there is no file."""
        try:
            with self._path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self._path} cannot be read ({error.strerror})", "a file"
            ) from error
        except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
            raise self._not_a_checkpoint() from error
        try:
            saved = json.loads(str(arrays.pop(_FINGERPRINT)))
            saved_call = saved.pop("call")
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise self._not_a_checkpoint() from error
        current = dict(self._fingerprint)
        call = current.pop("call")
        if saved_call != call:
            raise self._other_run(f"by {saved_call}, not {call}")
        if saved != current:
            names = {*saved, *current}
            differing = sorted(name for name in names if saved.get(name) != current.get(name))
            raise self._other_run(f"with other {', '.join(differing)}")
        return arrays

    def _other_run(self, difference: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self._path} was saved {difference}",
            "a checkpoint of the same call",
            "remove it to start over, or pass another path",
        )

    def _not_a_checkpoint(self) -> CheckpointError:
        return CheckpointError(
            f"the file {self._path} is not a checkpoint that hvp wrote, or is damaged",
            "a checkpoint that hvp wrote",
            "remove it to start over, or pass another path",
        )

    @property
    def due(self) -> bool:
        """Whether the interval since the last save has passed."""
        return time.monotonic() - self._last_save >= self._interval

    def save(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace the contents of the file; if that fails, warn and leave the file as it was."""
        try:
            with replacing(self._path) as temporary, temporary.open("wb") as file:
                fingerprint = np.array(json.dumps(self._fingerprint))
                entries: dict[str, Any] = {_FINGERPRINT: fingerprint, **arrays}
                write_npz(file, entries)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            warn(
                f"hvp could not save the checkpoint {self._path} ({error.strerror}); the "
                "computation continues, and the previous checkpoint is still there",
                RuntimeWarning,
            )
        finally:
            self._last_save = time.monotonic()


def write_npz(file: Any, arrays: dict[str, Any]) -> None:
    """Write arrays like `numpy.savez`, older versions of which leave the archive open on errors."""
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
