"""What the rest of the package uses of an operator, and its users do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._engines.linear_map import LinearMap, damped
from hvp._engines.plan import Remarks
from hvp._engines.rule import Rule
from hvp._snapshots.nearby import Gradients
from hvp._snapshots.problem import problem_of
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.space import check_numeric


class Core:
    """A snapshot shared by operators that differ in damping only, and what was computed from it.

    Parameters
    ----------
    snapshot : Snapshot
        The results and the linear map.
    evaluate_gradient : callable, optional
        Returns a snapshot of the gradient alone, of a new trace: for checks.

    Attributes
    ----------
    snapshot : Snapshot
        The same.
    space : Space
        The space of its vectors.
    """

    def __init__(
        self, snapshot: Snapshot, evaluate_gradient: Callable[[], Snapshot] | None = None
    ) -> None:
        self.snapshot = snapshot
        self.space = snapshot.plan.space
        self._evaluate_gradient = evaluate_gradient
        self._cache: dict[Any, Any] = {}

    def map(self, damping: float = 0.0) -> LinearMap:
        """Return the linear map to multiply with here, plus a multiple of the identity."""
        return damped(self.snapshot.map(), damping)

    def flatten(self, nest: Any) -> Any:
        """Concatenate a nest shaped like the variables into one vector; as the operator's own."""
        parts = self.space.parts_of_nest(nest, "the nest")
        flat = self.space.join([tf.convert_to_tensor(part) for part in parts])
        return flat.numpy() if all(isinstance(part, np.ndarray) for part in parts) else flat

    def unflatten(self, vector: Any) -> Any:
        """Split a vector, or a block of columns, into a nest; as the operator's own."""
        is_tensor = tf.is_tensor(vector)
        vector = vector if is_tensor else np.asarray(vector)
        check_numeric(vector, "the vector")
        if len(vector.shape) == 2 and vector.shape[0] == self.space.size:
            rows = self.space.split(tf.cast(tf.transpose(vector), self.space.dtype))
            parts = [tf.transpose(part, [*range(1, len(part.shape)), 0]) for part in rows]
        else:
            self.space.check_flat(vector)
            parts = self.space.split(tf.cast(vector, self.space.dtype))
        return self.space.nest_of_parts(parts if is_tensor else [p.numpy() for p in parts])

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the object stored under a key, whatever the damping; make it at the first call."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @property
    def cached_count(self) -> int:
        """How many objects are stored."""
        return len(self._cache)

    def gradients(self) -> Gradients | None:
        """Return the gradient as a function of the point, traced anew; None if there is none."""
        if self._evaluate_gradient is None:
            return None
        return Gradients(self._evaluate_gradient, self.snapshot)

    def fingerprint(self) -> dict[str, str]:
        """Return digests of the weights, the data and the loss.

        They are the same in every process with this version of TensorFlow.
        """
        return self.snapshot.plan.fingerprint()

    @property
    def remarks(self) -> Remarks | None:
        """What the graph of the loss tells about its derivatives; None if there is none."""
        return self.snapshot.facts.remarks

    @property
    def variable_names(self) -> list[str]:
        """Names of the variables, in the order of the vectors."""
        return [name.partition(":")[0] for name in self.space.names]

    def unconnected(self) -> list[str]:
        """Return the names of the variables that the loss does not depend on."""
        gradient = self.snapshot.gradient_parts()
        return [name for name, part in zip(self.variable_names, gradient) if part is None]

    def gradient(self) -> tf.Tensor:
        """Return the gradient as one vector, of shape `(n,)`."""
        return self.space.join(self.snapshot.gradient())


def evaluated(rule: Rule, variables: Any, data: Any, **options: Any) -> Core:
    """Evaluate a matrix at the values the variables have now.

    Parameters
    ----------
    rule : Rule
        The matrix.
    variables, data, **options
        As for `HessianOperator`.
    """
    problem, settings = problem_of(rule, variables, data, **options)
    alone = dataclasses.replace(settings, on_stale="ignore", products=False)
    return Core(problem.snapshot(settings), lambda: problem.snapshot(alone))
