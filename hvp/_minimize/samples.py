"""Examples drawn anew for each step, for a loss that is traced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import EXPECTED, check_first_axes, checked_loss
from hvp._errors import InvalidDataError
from hvp._runtime.arguments import check_count


class Samples:
    """A loss over some of the examples.

    Parameters
    ----------
    loss : callable
        Takes the elements of `data`.
    data : tuple or dict of arrays
        All examples.
    size : int
        How many to draw, without replacement.
    seed : int
        Of the draws.
    name : str
        Of the argument that says how many.
    """

    def __init__(
        self, loss: Callable[..., Any], data: Any, size: int, seed: int, name: str
    ) -> None:
        if not isinstance(data, (tuple, dict)):
            raise InvalidDataError(
                f"{name} goes with data of type {type(data).__name__}",
                EXPECTED,
                "pass the arrays themselves, from which examples can be drawn",
            )
        check_first_axes(data if isinstance(data, dict) else dict(enumerate(data)), "data")
        self._data = tf.nest.map_structure(np.asarray, data)
        count = len(tf.nest.flatten(self._data)[0])
        check_count(size, name)
        self._count, self._size, self._seed = count, min(int(size), count), seed
        self._loss = checked_loss(loss)
        self._slots = tf.nest.map_structure(
            lambda leaf: tf.Variable(leaf[: self._size], trainable=False), self._data
        )

    @property
    def variables(self) -> list[tf.Variable]:
        """What holds the sample."""
        return tf.nest.flatten(self._slots)

    def draw(self, number: int) -> None:
        """Draw sample number so and so, the same each time."""
        rng = np.random.default_rng([self._seed, number])
        # In order: memory is then read from one end to the other.
        chosen = np.sort(rng.choice(self._count, self._size, replace=False, shuffle=False))
        tf.nest.map_structure(lambda slot, leaf: slot.assign(leaf[chosen]), self._slots, self._data)

    def loss(self) -> Any:
        """Return the loss over the sample drawn last."""
        read = tf.nest.map_structure(lambda slot: slot.read_value(), self._slots)
        return self._loss(**read) if isinstance(read, dict) else self._loss(*read)
