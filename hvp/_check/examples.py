"""The step of a check that evaluates the loss on a few examples."""

from __future__ import annotations

from collections.abc import Iterator

from hvp._check.inspected_operator import InspectedOperator
from hvp._check.report import Finding
from hvp._data.elements import NO_DATA
from hvp._engines.prediction_rule import PredictionRule
from hvp._engines.rule import HessianRule
from hvp._snapshots.means import joint_and_mean_loss

# Relative difference that means in another order, and products of other shapes, may have.
_ROUNDINGS, _NOISES = 1000, 10


def examples(inspected: InspectedOperator) -> Iterator[Finding]:
    """Check that the loss of a few examples is the mean of their losses."""
    evaluation = inspected.evaluation
    problem = evaluation.problem
    if problem is None or problem.source is NO_DATA:
        return
    if not isinstance(problem.rule, (HessianRule, PredictionRule)):
        return
    if evaluation.snapshot.facts.is_random:
        text = "the loss draws random numbers: whether it is the mean over examples is not known"
        yield Finding("examples", "note", text)
        return
    losses = joint_and_mean_loss(problem.rule, evaluation.snapshot, problem.few_examples())
    if not losses:
        return
    for count, together, mean in losses:
        rounding = max(_ROUNDINGS * inspected.epsilon, _NOISES * inspected.noise)
        allowed = rounding * max(abs(together), abs(mean))
        if abs(together - mean) > allowed:
            is_sum = abs(together - count * mean) <= count * allowed
            yield _of_difference(count, together, mean, is_sum)
            return
    text = f"the loss of {losses[0][0]} examples is the mean of their losses"
    yield Finding("examples", "ok", text)


def _of_difference(count: int, together: float, mean: float, is_sum: bool) -> Finding:
    text = f"the loss of {count} examples is {together:.6g}, the mean of their losses {mean:.6g}"
    if is_sum:
        return Finding("examples", "note", f"{text}: it is a sum")
    text += (
        ": they have weights or depend on each other, as in batch normalization; if they should "
        "not, compare the shapes of labels and predictions, because (n,) and (n, 1) give (n, n)"
    )
    return Finding("examples", "warning", text)
