"""Checks that a loss is a mean over examples, as it must be if batches are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements
from hvp._engines.rule import Rule
from hvp._errors import InvalidLossError, quoted
from hvp._runtime.strategies import outside_strategies
from hvp._runtime.user_warning import warn
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.space import rounding_of

# How many examples the loss is evaluated on.
EXAMPLES = 4
# A loss is a sum if it grows by the same amount when the examples are repeated, up to the part
# _SLACK, and by more than that part of itself. It is a mean if it differs by less.
_SLACK = 1e-3
# The loss of a batch couples examples if it differs by more from the mean over its parts, and by
# more than so many rounding errors.
_COUPLED, _ROUNDING_ERRORS = 1e-4, 8


@outside_strategies
def refuse_sum(rule: Rule, snapshot: Snapshot, few: Elements) -> None:
    """Raise `InvalidLossError` if a loss is a sum over the examples of a batch.

    The loss is evaluated on `few` examples, with the seeds that the snapshot used.
    """
    repeated = [few.taken(np.tile(np.arange(few.examples), times)) for times in (1, 2, 3)]
    found = _losses(rule, snapshot, repeated)
    if found is None:
        return
    values, _ = found
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
    if count < 2:
        return
    if facts.is_random:  # other numbers for other batches
        updated = [resource.name for resource in facts.writes if resource.dtype.is_floating]
        if updated:
            warn(
                f"the loss draws random numbers, and updates {quoted(updated)}: whether it treats "
                "examples independently is not known; batch normalization in training does not",
                RuntimeWarning,
            )
        return
    # Halves may be alike, for example if half of each is masked.
    cuts = sorted({1, count // 2, count - 1})
    parts = [few.part(*ends) for cut in cuts for ends in ((0, cut), (cut, count))]
    found = _losses(rule, snapshot, [few, few, *parts])
    if found is None or found[0][0] != found[0][1]:
        return
    values, eps = found
    whole, tolerance = values[0], max(_COUPLED, _ROUNDING_ERRORS * eps)
    for cut, first, last in zip(cuts, values[2::2], values[3::2]):
        mean = (cut * first + (count - cut) * last) / count
        size = max(abs(whole), abs(first), abs(last))
        # A part whose loss is no number is one that divides by nothing.
        if np.isfinite(whole) and not abs(mean - whole) <= tolerance * size:
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


def _losses(
    rule: Rule, snapshot: Snapshot, parts: Sequence[Elements]
) -> tuple[list[float], float] | None:
    """Return the losses of some examples, with the snapshot's seeds, and their rounding unit.

    Return None, and warn, if the loss cannot be evaluated on so few.
    """
    losses = []
    try:
        for part in parts:
            with snapshot.with_seeds():
                losses.append(tf.convert_to_tensor(rule.value(part)))
    except Exception as error:  # the caller's loss may raise anything where examples are missing
        warn(
            f"the loss cannot be evaluated on {part.examples} examples ({type(error).__name__}): "
            "whether it is a mean over examples is not known",
            RuntimeWarning,
        )
        return None
    dtypes = {losses[0].dtype, *snapshot.plan.space.dtypes}
    return [float(loss) for loss in losses], max(rounding_of(t) for t in dtypes)


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
    except Exception:  # as above; what is not compared is not reported
        return []
