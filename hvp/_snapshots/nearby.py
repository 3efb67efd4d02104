"""The gradient at nearby points, from a trace that is independent of the operator's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.resources import Resource, restored
from hvp._vectors.scales import entry_scales


class Gradients:
    """A loss and its gradient, evaluated independently of the operator.

    `make` returns a snapshot with the gradient alone; it uses the seeds of `other`, the operator's
    snapshot. `places` are the indices of the variables to differentiate by; None stands for all.
    """

    def __init__(
        self,
        make: Callable[[], Snapshot],
        other: Snapshot,
        places: Sequence[int] | None = None,
    ) -> None:
        with other.with_seeds():
            snapshot = make()
        self._snapshot, self._other = snapshot, other
        self._all = other.plan.nest.variables
        self._places = range(len(self._all)) if places is None else places
        whole = other.plan.space
        self._space = whole if places is None else whole.subspace(places)
        self._variables = [self._all[place] for place in self._places]
        self.evaluations = 1

    def again(self) -> tuple[float, np.ndarray]:
        """Evaluate once more, at the current values of the variables."""
        with self._other.with_seeds():
            self._snapshot.refresh()
        self.evaluations += 1
        return self.last()

    def last(self) -> tuple[float, np.ndarray]:
        """Return the loss and its flat gradient from the last evaluation."""
        parts = self._snapshot.gradient()
        gradient = self._space.join([parts[place] for place in self._places]).numpy()
        return float(self._snapshot.value()), gradient

    def in_float64(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return the gradient in float64 as a function of a change of the variables.

        Return None if it cannot be evaluated in float64. The variables themselves do not change.
        """
        with self._other.with_seeds():
            gradient = self._snapshot.plan.in_float64()
        if gradient is None:
            return None
        space, sizes = self._space, np.cumsum(self._space.sizes)[:-1]
        at = [tf.cast(variable, tf.float64) for variable in self._all]

        def at_change(change: np.ndarray) -> np.ndarray:
            self.evaluations += 1
            moved = list(at)
            for place, part, shape in zip(self._places, np.split(change, sizes), space.shapes):
                moved[place] += part.reshape(shape)
            parts = gradient(moved)
            own = [parts[place] for place in self._places]
            zeros = (np.zeros(size) for size in space.sizes)
            return np.concatenate(
                [zero if part is None else part.numpy().ravel() for part, zero in zip(own, zeros)]
            )

        return at_change

    def parts(self, vector: np.ndarray) -> list[np.ndarray]:
        """Split an array of shape `(n,)` into one flat part for each variable."""
        return np.split(vector, np.cumsum(self._space.sizes)[:-1])

    def scales(self) -> np.ndarray:
        """Return the scale of each entry, of shape `(n,)`; see `entry_scales`."""
        return entry_scales(self._variables)

    @contextlib.contextmanager
    def moved(self, change: np.ndarray) -> Iterator[None]:
        """Move the variables by a vector, and restore them on exit."""
        parts = self._space.split(tf.constant(change, self._space.dtype))
        with restored([Resource.of(variable) for variable in self._variables]):
            for variable, part in zip(self._variables, parts):
                variable.assign_add(part)
            yield

    def close(self) -> None:
        """Release the snapshot."""
        self._snapshot.close()
