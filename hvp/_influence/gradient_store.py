"""Gradients of the training examples, stored in a folder so that they are computed once.

The folder holds a description, `store.json`, and one array for each shard of examples. A shard is
written to a temporary file and renamed when it is complete. A process that was killed therefore
leaves complete shards only, and the next one continues from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import CheckpointError, HvpError
from hvp._influence.gradient_forms import GradientForm
from hvp._runtime.files import replacing

_DESCRIPTION = "store.json"
_VERSION = 2
_DERIVED = ("data", "rows", "width", "examples")
# A shard takes at most this many bytes.
_SHARD = 2**28
# So many bytes of rows are read at once.
_PIECE = 2**25


class GradientStore:
    """The rows of a matrix of gradients, one for each training example, in files.

    The `folder` is created if its parent exists. `fingerprint` returns digests of the weights, the
    data and the loss, by name. Call `open` before gradients are stored or read.
    """

    def __init__(
        self,
        folder: Any,
        examples: int,
        dtype: np.dtype[Any],
        form: GradientForm,
        fingerprint: Callable[[], dict[str, str]],
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise CheckpointError(
                f"the store of gradients is {type(folder).__name__}", "the path of a folder"
            )
        self._folder, self.form = Path(folder), form
        self._examples, self._dtype = examples, np.dtype(dtype)
        self._width = form.width
        self._rows = max(1, min(examples, _SHARD // (self._width * self._dtype.itemsize)))
        self._fingerprint = fingerprint

    @property
    def is_complete(self) -> bool:
        """Whether all gradients are stored."""
        return all(self._path(shard).exists() for shard in self._shards())

    def open(self) -> None:
        """Create the folder, or check that its contents are those of this store.

        Gradients of other weights, of other data or of another loss are refused, and so are other
        files.
        """
        description = {
            "version": _VERSION,
            "examples": self._examples,
            "width": self._width,
            "dtype": self._dtype.name,
            "rows": self._rows,
            "form of gradients": self.form.name,
            **self._fingerprint(),
        }
        try:
            self._folder.mkdir(exist_ok=True)
            path = self._folder / _DESCRIPTION
            if path.exists():
                self._refuse_another(json.loads(path.read_text()), description)
                return
            # What a process has left that was killed while it wrote.
            left = [file for file in self._folder.iterdir() if file.suffix == ".part"]
            if len(left) < len([*self._folder.iterdir()]):
                raise self._not_a_store()
            for file in left:
                file.unlink(missing_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(description, indent=1))
        except HvpError:
            raise
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the store of gradients {self._folder} cannot be used ({error})",
                "a folder that can be written to, whose parent exists",
            ) from error

    def fill(
        self, rows_of: Callable[[int, int], Iterator[tuple[int, np.ndarray]]]
    ) -> Iterator[int]:
        """Compute and store the missing gradients, and yield the number of examples done so far.

        `rows_of(start, end)` iterates over the rows of the examples from `start` to `end - 1`, in
        pieces that come with the number of their first example.
        """
        for shard in self._shards():
            path, start, end = self._path(shard), *self._range(shard)
            if not path.exists():
                array = np.empty((end - start, self._width), self._dtype)
                for first, rows in rows_of(start, end):
                    array[first - start : first - start + len(rows)] = rows
                self._save(path, array)
            yield end

    def pieces(self, size: int) -> Iterator[tuple[int, tf.Tensor]]:
        """Iterate over the gradients, of length `size`, as `ExampleGradients.pieces` does."""
        at_once = max(1, _PIECE // (max(self._width, size) * self._dtype.itemsize))
        for shard in self._shards():
            start, end = self._range(shard)
            try:
                array = np.load(self._path(shard), mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise self._damaged(shard) from error
            if array.shape != (end - start, self._width) or array.dtype != self._dtype:
                raise self._damaged(shard)
            for first in range(0, len(array), at_once):
                yield start + first, self.form.restored(array[first : first + at_once])

    def _save(self, path: Path, array: np.ndarray) -> None:
        try:
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HvpError(
                f"gradients cannot be written to {path} ({error.strerror})",
                f"room for {self._examples} x {self._width} numbers in all",
                "pass projection=, which keeps fewer numbers for each example",
            ) from error

    def _shards(self) -> range:
        return range(-(-self._examples // self._rows))

    def _range(self, shard: int) -> tuple[int, int]:
        return shard * self._rows, min((shard + 1) * self._rows, self._examples)

    def _path(self, shard: int) -> Path:
        return self._folder / f"gradients-{shard:05d}.npy"

    def _refuse_another(self, saved: Any, description: dict[str, Any]) -> None:
        if not isinstance(saved, dict) or saved.get("version") != _VERSION:
            raise self._not_a_store()
        names = {*saved, *description}
        differing = sorted(name for name in names if saved.get(name) != description.get(name))
        # These follow from others.
        differing = [name for name in differing if name not in _DERIVED] or differing
        if differing:
            raise CheckpointError(
                f"the store of gradients {self._folder} belongs to other {', '.join(differing)}",
                "gradients of the same loss, examples and weights, kept in the same form",
                "remove the folder, or make a new InfluenceFunctions with another one",
            )

    def _damaged(self, shard: int) -> CheckpointError:
        path = self._path(shard)
        return CheckpointError(
            f"the file {path} is damaged, or is not of this package",
            "a shard that is whole",
            "remove this file: its gradients are then computed again",
        )

    def _not_a_store(self) -> CheckpointError:
        return CheckpointError(
            f"the folder {self._folder} is not empty, and is not a store of gradients",
            "an empty or new folder, or one that InfluenceFunctions wrote",
            "pass another folder, or remove this one",
        )
