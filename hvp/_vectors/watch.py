"""Detection of variables that changed after the loss was evaluated.

TensorFlow has no public version counter, so the value that each variable had is stored. A value
read from a variable shares the variable's buffer, and TensorFlow never writes into a buffer that
somebody else still holds. Storing the value therefore costs no memory while nothing changes, and as
long as the variable returns the same buffer its value is the same. If it returns another buffer
(because it was assigned to, or because rows were scattered into it once, after which every read is
a copy), the values are compared bit for bit on the device. This detects any change, whoever made
it, and an assignment of equal values does not count as a change.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvp._vectors.resources import Resource, address, differ


class Watch:
    """Compares variables with the values they had when the watch was last set.

    Parameters
    ----------
    read : sequence of Resource
        What to watch.
    copies : sequence of (int, Resource), optional
        Further copies of variables, on other devices, with the numbers of the variables.

    Attributes
    ----------
    resources : tuple of Resource
        All that is watched: what is read, and then the copies.
    values : list of tf.Tensor
        What to compare these with.
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
        """Take some values of what is read, or those of now, as those to compare with."""
        values = [resource.read() for resource in self.read] if values is None else values
        copies = [resource.read() for resource in self.resources[len(self.read) :]]
        self.values, self._addresses = [*values, *copies], None

    def disagreeing(self) -> list[str]:
        """Return the names of variables whose copies had different values when this was set."""
        copies = self.values[len(self.read) :]
        pairs = zip(self._originals, copies)
        numbers = {number for number, copy in pairs if differ(copy, self.values[number])}
        return [self.read[number].name for number in sorted(numbers)]

    def release(self) -> None:
        """Forget the values."""
        self.values, self._addresses = [], None

    def changed(self) -> list[str]:
        """Return the names of the variables whose values differ.

        Costs a look at each variable's address, and a read of those that moved. On devices other
        than the CPU it costs a read of all.
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
