"""What was made and may be asked for again, such as functions compiled for some shapes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class Recent(dict[Hashable, Any]):
    """Values by key, of which only the `most` that were used last are kept."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key; call `make` if there is none."""
        value = self.pop(key) if key in self else make()
        self[key] = value  # at the end
        while len(self) > self._most:
            del self[next(iter(self))]
        return value
