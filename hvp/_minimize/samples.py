"""A matrix of a loss over a random sample of the examples, traced once for all samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import EXPECTED, Elements, check_first_axes
from hvp._engines.rule import Arguments, Evaluated, Parts, Rule
from hvp._errors import InvalidDataError
from hvp._runtime.arguments import check_count


class Samples(Rule):
    """A loss, and a matrix of it, over a sample of the examples that is redrawn for each step.

    The sample is held in variables, so that drawing another one does not retrace the loss. It
    consists of `size` examples, drawn without replacement from `data`, a tuple or dict of arrays.
    Errors call the argument for the size `name`.
    """

    def __init__(self, rule: Rule, data: Any, size: int, seed: int, name: str) -> None:
        if not isinstance(data, (tuple, dict)):
            raise InvalidDataError(
                f"{name} is given together with data of type {type(data).__name__}",
                EXPECTED,
                "pass the arrays themselves, so that examples can be drawn from them",
            )
        check_first_axes(data if isinstance(data, dict) else dict(enumerate(data)), "data")
        self._data = tf.nest.map_structure(np.asarray, data)
        count = len(tf.nest.flatten(self._data)[0])
        check_count(size, name)
        self._count, self._size, self._seed = count, min(int(size), count), seed
        self._slots = tf.nest.map_structure(
            lambda leaf: tf.Variable(leaf[: self._size], trainable=False), self._data
        )
        self._rule, self.is_hessian = rule, rule.is_hessian

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that hold the sample."""
        return tf.nest.flatten(self._slots)

    def draw(self, number: int) -> None:
        """Draw the sample with this number; the same number always gives the same sample."""
        rng = np.random.default_rng([self._seed, number])
        # The rows are sorted so that memory is read sequentially.
        rows = np.sort(rng.choice(self._count, self._size, replace=False, shuffle=False))
        tf.nest.map_structure(lambda slot, leaf: slot.assign(leaf[rows]), self._slots, self._data)

    def elements(self) -> Elements:
        """Return the current sample."""
        sample = tf.nest.map_structure(lambda slot: slot.read_value(), self._slots)
        by_name = isinstance(sample, dict)
        return Elements(sample if by_name else dict(enumerate(sample)), by_name)

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        """Evaluate on the current sample, whatever the batch is."""
        del batch
        return self._rule.evaluate(variables, self.elements())

    def multiply(self, state: Any, vector: Parts) -> Parts:
        """Multiply by a vector, linearly."""
        return self._rule.multiply(state, vector)
