"""The strategy that keeps copies of variables, and how many processes it connects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError


def strategy_of(variables: Iterable[tf.Variable]) -> tf.distribute.Strategy | None:
    """Return the strategy that keeps copies of the variables, if any; refuse a second one."""
    found: list[tf.distribute.Strategy] = []
    for variable in variables:
        if isinstance(variable, tf.distribute.DistributedValues):
            strategy = variable.distribute_strategy
            if not any(strategy is other for other in found):
                found.append(strategy)
    if len(found) > 1:
        raise HvpError(
            f"the variables belong to {len(found)} strategies",
            "variables that were made in the scope of one tf.distribute.Strategy, or of none",
        )
    return found[0] if found else None


def process_count(strategy: tf.distribute.Strategy | None) -> int:
    """Return the number of processes that a strategy connects, all with as many replicas."""
    if strategy is None:
        return 1
    return strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)


def copies(variable: tf.Variable) -> Sequence[tf.Variable]:
    """Return the copies of a variable that a strategy keeps in this process, or the variable."""
    return getattr(variable, "values", (variable,))


def local_copy(variable: Any) -> Any:
    """Return the first of these copies; within a replica, the variable, which is its copy there."""
    context = tf.distribute.get_replica_context()
    if context is not None and getattr(variable, "distribute_strategy", None) is context.strategy:
        return variable
    return copies(variable)[0]
