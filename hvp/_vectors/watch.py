"""Detection of variables that changed after the loss was evaluated.

TensorFlow has no public version counter, so the value of each variable is stored. A value that is
read shares the variable's buffer, and TensorFlow never writes into a buffer that anything else
holds. Storing the value therefore costs no memory while nothing changes, and as long as the
variable returns the same buffer its value is the same. If it returns another buffer (because it was
assigned to, or because rows were scattered into it once, after which every read is a copy), the
values are compared bit for bit on the device. This detects any change, whatever made it, and an
assignment of equal values does not count as a change.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvp._vectors.resources import Resource, address, differ


class Watch:
    """Compares variables with the values they had when the watch was last set.

    `copies` are further copies of variables on other devices, each with the number of its variable
    in `read`. `resources` are those in `read`, then the copies; `values` are to be compared with
    them.
    """

    def __init__(
        self, read: Sequence[Resource], copies: Sequence[tuple[int, Resource]] = ()
    ) -> None:
        self.read = tuple(read)
        self._originals = [number for number, _ in copies]
        self.resources = (*self.read, *(copy for _, copy in copies))
        self.values: list[tf.Tensor] = []
        self._addresses: list[int | None] | None = None

    @property
    def has_copies(self) -> bool:
        """Whether variables have copies on other devices."""
        return bool(self._originals)

    def set(self, values: Sequence[tf.Tensor] | None = None) -> None:
        """Set the values to compare with: those of now, unless some are passed for `read`."""
        values = [resource.read() for resource in self.read] if values is None else values
        copies = [resource.read() for resource in self.resources[len(self.read) :]]
        self.values, self._addresses = [*values, *copies], None

    def disagreeing(self) -> list[str]:
        """Return the names of variables whose copies differed when the watch was set."""
        copies = self.values[len(self.read) :]
        pairs = zip(self._originals, copies)
        numbers = {number for number, copy in pairs if differ(copy, self.values[number])}
        return [self.read[number].name for number in sorted(numbers)]

    def release(self) -> None:
        """Forget the values."""
        self.values, self._addresses = [], None

    def changed(self) -> list[str]:
        """Return the names of the variables whose values differ.

        On the CPU, values are only compared if the address of a variable's buffer differs.
        """
        if self._addresses is None:
            self._addresses = [address(value) for value in self.values]
        names = []
        for resource, value, place in zip(self.resources, self.values, self._addresses):
            now = resource.read()
            if place is not None and address(now) == place:
                continue
            if differ(now, value):
                names.append(resource.name)
        return list(dict.fromkeys(names))
