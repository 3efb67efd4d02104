"""Checks that a loss is a mean over examples, as it must be if batches are averaged."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements
from hvp._engines.rule import Rule
from hvp._errors import InvalidLossError
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.snapshot import Snapshot

# How many examples the loss is evaluated on.
EXAMPLES = 4
# A loss is a sum if it grows by the same amount when the examples are repeated, up to the part
# _SLACK, and by more than that part of itself. It is a mean if it differs by less.
_SLACK = 1e-3
# The loss of a batch couples examples if it differs by more from the mean over its parts.
_COUPLED = 1e-4
# What a loss raises that cannot be evaluated on so few examples.
_ON_FEW = (TypeError, ValueError, tf.errors.OpError)


@outside_strategies
def refuse_sum(rule: Rule, snapshot: Snapshot, few: Elements) -> None:
    """Raise `InvalidLossError` if a loss is a sum over the examples of a batch.

    The loss is evaluated on `few` examples, with the seeds that the snapshot used.
    """
    values = []
    with snapshot.with_seeds():
        for times in (1, 2, 3):
            try:
                examples = few.taken(np.tile(np.arange(few.examples), times))
                values.append(float(rule.value(examples)))
            except _ON_FEW:
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
def refuse_coupling(rule: Rule, snapshot: Snapshot, few: Elements) -> None:
    """Raise `InvalidLossError` if the loss of a batch depends on several examples at once."""
    facts, count = snapshot.facts, few.examples
    drawn = facts.remarks is not None and (facts.remarks.random or facts.remarks.repeated)
    if facts.draws or facts.seeds or drawn or count < 2:
        return  # other numbers are drawn for other batches

    def loss(start: int, end: int) -> float:
        return float(rule.value(few.part(start, end)))

    try:
        with snapshot.with_seeds():
            whole, again = loss(0, count), loss(0, count)
            # Halves may be alike, for example if half of each is masked.
            cuts = sorted({1, count // 2, count - 1})
            pairs = [(cut, loss(0, cut), loss(cut, count)) for cut in cuts]
    except _ON_FEW:
        return
    if whole != again:
        return
    for cut, first, last in pairs:
        mean = (cut * first + (count - cut) * last) / count
        size = max(abs(whole), abs(first), abs(last))
        if np.isfinite(mean) and abs(mean - whole) > _COUPLED * size:
            raise InvalidLossError(
                f"the loss of {count} examples is {whole:.6g}, and the mean of the losses of "
                f"two parts of them {mean:.6g}: it depends on several examples at once",
                "a mean over examples, each independent of the others, where batch_size, "
                "memory_limit or devices divide the data",
                "compare the shapes of labels and predictions first, because (n,) and (n, 1) give "
                "(n, n); else evaluate all data at once, without these options; or pass batches of "
                "your own, such as a list of (x, y), for the mean over these batches; or pass "
                "weight, if the loss divides by something other than the number of examples",
            )


@outside_strategies
def joint_and_mean_loss(
    rule: Rule, snapshot: Snapshot, few: Elements
) -> list[tuple[int, float, float]]:
    """Return numbers of examples, their loss together, and the mean of their separate losses.

    These are all of a few examples, then one fewer, down to two: the losses of examples that depend
    on each other may happen to agree. There are none if the loss cannot be evaluated on so few.
    """

    def loss(start: int, end: int) -> float:
        with snapshot.with_seeds():
            return float(rule.value(few.part(start, end)))

    try:
        alone = [loss(i, i + 1) for i in range(few.examples)]
        counts = range(few.examples, 1, -1)
        return [(count, loss(0, count), float(np.mean(alone[:count]))) for count in counts]
    except _ON_FEW:
        return []
