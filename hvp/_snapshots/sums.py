"""Losses that are sums over examples, where a mean is needed."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements
from hvp._engines.rule import HessianRule
from hvp._errors import InvalidLossError
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.snapshot import Snapshot

# The loss is evaluated on so many examples, once, twice and three times over. It is a sum if it
# grows by the same amount both times, up to the part _SLACK, and by more than that part of itself.
_EXAMPLES, _SLACK = 4, 1e-3


@outside_strategies
def refuse_sum(rule: HessianRule, snapshot: Snapshot, batch: Elements) -> None:
    """Raise `InvalidLossError` if a loss is a sum over the examples of a batch.

    Parameters
    ----------
    rule : HessianRule
        The loss.
    snapshot : Snapshot
        The loss as it was evaluated, with the seeds that it used.
    batch : Elements
        Examples.
    """
    count = min(_EXAMPLES, batch.examples)
    values = []
    with snapshot.with_seeds():
        for times in (1, 2, 3):
            try:
                examples = batch.taken(np.tile(np.arange(count), times))
                values.append(float(examples.call(rule.loss)))
            except (TypeError, ValueError, tf.errors.OpError):
                return  # a loss of batches of one size is no sum over any number of examples
    growth = np.diff(values)
    size = np.abs(values).max()
    if abs(growth[0]) > _SLACK * size and abs(growth[1] - growth[0]) <= _SLACK * abs(growth[0]):
        raise InvalidLossError(
            "the loss is a sum over examples: it grows in proportion to their number",
            "a mean over the examples of a batch, since batches are averaged, or are multiplied by "
            "their numbers of examples if reduction='sum'",
            "use tf.reduce_mean, and pass reduction='sum' for the Hessian of the sum over all "
            "examples",
        )


@outside_strategies
def together_and_apart(
    rule: HessianRule, snapshot: Snapshot, batch: Elements
) -> tuple[int, float, float] | None:
    """Compare the loss of a few examples with the losses of each.

    Parameters
    ----------
    rule, snapshot, batch
        As for `refuse_sum`.

    Returns
    -------
    tuple of an int and two floats, or None
        The number of examples, the loss of all of them, and the mean of their losses; None if the
        loss cannot be evaluated on so few examples.
    """
    count = min(_EXAMPLES, batch.examples)

    def loss(start: int, end: int) -> float:
        with snapshot.with_seeds():
            return float(batch.part(start, end).call(rule.loss))

    try:
        return count, loss(0, count), float(np.mean([loss(i, i + 1) for i in range(count)]))
    except (TypeError, ValueError, tf.errors.OpError):
        return None
