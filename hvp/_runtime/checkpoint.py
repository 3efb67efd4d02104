"""What is done so far, in a file: written whole or not at all, and only read by the same run."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvp._errors import CheckpointError

# Seconds between saves.
INTERVAL = 30.0
_FINGERPRINT = "hvp_fingerprint"


class Checkpoint:
    """A file of arrays.

    Parameters
    ----------
    path : str or Path
        Of the file; its folder must be there.
    fingerprint : dict of str
        Texts that tell this run from others: of its data, weights and settings. What was saved
        under others is refused, by the names of those that differ; ``"call"`` is what saves.
    interval : float, optional
        Seconds after which `due` asks for the next save.

    Raises
    ------
    CheckpointError
        If nothing can be written there.
    """

    def __init__(
        self, path: Any, fingerprint: Mapping[str, str], interval: float | None = None
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise CheckpointError(f"the checkpoint is {type(path).__name__}", "the path of a file")
        self._path = Path(path)
        self._fingerprint = dict(fingerprint)
        self._interval = INTERVAL if interval is None else interval
        self._saved = time.monotonic()
        # Another process of the same run, were there one, would write to a file of its own.
        self._temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            self._temporary.touch()
            self._temporary.unlink()
        except OSError as error:
            raise CheckpointError(
                f"nothing can be written beside the checkpoint {self._path} ({error.strerror})",
                "a path in a folder that exists and can be written to",
            ) from error

    def load(self) -> dict[str, np.ndarray]:
        """Return the arrays that were saved; none if there is no file.

        Raises
        ------
        CheckpointError
            If the file is none of this package's, or of another run.
        """
        try:
            with self._path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self._path} cannot be read ({error.strerror})", "a file"
            ) from error
        except (ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
            raise self._not_ours() from error
        try:
            found = json.loads(str(arrays.pop(_FINGERPRINT)))
            of_call = found.pop("call")
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise self._not_ours() from error
        ours = dict(self._fingerprint)
        call = ours.pop("call")
        if found != ours or of_call != call:
            names = sorted({n for n in {*found, *ours} if found.get(n) != ours.get(n)})
            differs = f"other {', '.join(names)}" if of_call == call else f"{of_call}, not {call}"
            raise CheckpointError(
                f"the checkpoint {self._path} is of {differs}",
                "the checkpoint of the same call",
                "remove it to begin anew, or pass another path",
            )
        return arrays

    def _not_ours(self) -> CheckpointError:
        return CheckpointError(
            f"the file {self._path} is no checkpoint of hvp's, or is damaged",
            "a file that hvp wrote",
            "remove it to begin anew, or pass another path",
        )

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._saved >= self._interval

    def save(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace what is in the file; if that fails, warn, and leave the file as it was."""
        try:
            with self._temporary.open("wb") as file:
                fingerprint = np.array(json.dumps(self._fingerprint))
                everything: dict[str, Any] = {_FINGERPRINT: fingerprint, **arrays}
                np.savez(file, **everything)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._temporary, self._path)
        except OSError as error:
            warnings.warn(
                f"hvp could not save the checkpoint {self._path} ({error.strerror}): it goes on, "
                "and what was saved before is still there",
                RuntimeWarning,
                stacklevel=2,
            )
        finally:
            self._saved = time.monotonic()
            with contextlib.suppress(OSError):
                self._temporary.unlink()
