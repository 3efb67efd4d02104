"""Where compiled functions run, and what stands there for the tensors that they captured."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from hvp._vectors.resources import Resource


class Place:
    """Where a function runs; this one leaves it to TensorFlow."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which TensorFlow runs operations there."""
        return contextlib.nullcontext()

    def captured(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return what a function reads there instead of the tensors that it captured."""
        return tensors

    def resource(self, resource: Resource) -> Resource:
        """Return the variable that stands there for one that a function captured."""
        return resource


HERE = Place()
