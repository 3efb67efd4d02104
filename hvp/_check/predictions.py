"""The step of a check that compares a matrix `J^T B J` with differences of predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from hvp._check.inspected_operator import InspectedOperator, settled
from hvp._check.report import Finding
from hvp._derivatives.exact import pulled_back
from hvp._engines.fisher import EmpiricalFisherRule, FisherRule
from hvp._engines.prediction_rule import PredictionRule
from hvp._engines.predictions import Predictions
from hvp._engines.rule import Arguments
from hvp._errors import HvpError
from hvp._snapshots.problem import Problem
from hvp._vectors.resources import Resource, restored
from hvp._vectors.scales import entry_scales

# Lengths of the steps, in units of the best one for a smooth function.
_STEPS = (4.0, 1.0, 0.25)


def prediction_differences(inspected: InspectedOperator) -> Iterator[Finding]:
    """Compare `u' G v` with `t_u' B t_v`, where `t` are differences of predictions.

    Only the first batch is used. Its predictions are computed at four nearby points, by the model
    alone. `B t_v` is a difference of gradients of the output loss, and for an empirical Fisher
    matrix an outer product of them.
    """
    name, evaluation = "differences", inspected.evaluation
    problem = evaluation.problem
    rule = None if problem is None else problem.rule
    if problem is None or not isinstance(rule, PredictionRule):
        yield Finding(name, "note", "not compared: the matrix is none of a model's predictions")
        return
    if isinstance(rule, FisherRule) and rule.samples:
        yield Finding(name, "note", "not compared: the matrix is a random estimate")
        return
    if evaluation.snapshot.facts.draws:
        yield Finding(name, "warning", "not checked: the loss draws random numbers")
        return
    batch = problem.first_batch()
    alone = dataclasses.replace(problem, source=batch)
    # Each entry moves in proportion to its own scale, because scales may differ widely.
    rng, dtype = inspected.rng, evaluation.space.dtype.as_numpy_dtype
    scales = entry_scales(evaluation.variables)
    u, v = (scales * rng.standard_normal(len(scales)) for _ in range(2))
    u, v = u.astype(dtype), v.astype(dtype)
    try:
        product = _product(inspected, alone, u, v)
        with evaluation.snapshot.preserving():
            estimates = [_estimate(inspected, rule, batch, u, v, step) for step in _STEPS]
    except (HvpError, tf.errors.OpError) as error:
        yield Finding(name, "warning", f"not checked: {error}")
        return
    yield _compared(inspected, product, estimates)


def _product(
    inspected: InspectedOperator, alone: Problem, u: np.ndarray, v: np.ndarray
) -> tuple[float, float]:
    """Return `u' G v` for the first batch, and its scale."""
    evaluation = inspected.evaluation
    with evaluation.evaluated_alone(alone) as part:
        rows = tf.cast(np.stack([u, v]), part.linear_map.domain.dtype)
        Gu, Gv = part.linear_map.apply(rows).numpy().astype(np.float64)
    u, v = u.astype(np.float64), v.astype(np.float64)
    return float(u @ Gv), float(max(abs(u @ Gu), abs(v @ Gv)))


def _estimate(
    inspected: InspectedOperator,
    rule: PredictionRule,
    batch: Arguments,
    u: np.ndarray,
    v: np.ndarray,
    step: float,
) -> float:
    """Estimate `t_u' B t_v` by central differences of one step length."""
    made = _predictions(rule, batch)
    places = made.choose(rule.output_loss, batch)
    at = [made.tensors[place] for place in places]
    t_u, t_v = (_tangents(inspected, rule, batch, places, w, step) for w in (u, v))

    def gradient(shift: float) -> list[tf.Tensor]:
        parts = [p + tf.cast(shift * t, p.dtype) for p, t in zip(at, t_v)]
        return pulled_back(lambda: made.loss(rule.output_loss, parts, batch), parts)

    if isinstance(rule, EmpiricalFisherRule):
        scores = gradient(0.0)
        along = [
            sum(np.sum(_rows(g) * _rows(t), axis=1) for g, t in zip(scores, tangents))
            for tangents in (t_u, t_v)
        ]
        count = len(_rows(at[0])) if rule.weight is None else float(batch.call(rule.weight))
        return float(count * (along[0] @ along[1]))
    largest = max(float(np.abs(t).max(initial=0)) for t in t_v)
    h = step * _unit(inspected, at) / (largest or 1.0)
    ends = gradient(h), gradient(-h)
    curved = [(_wide(a) - _wide(b)) / (2 * h) for a, b in zip(*ends)]
    return float(sum(np.sum(t * c) for t, c in zip(t_u, curved)))


def _tangents(
    inspected: InspectedOperator,
    rule: PredictionRule,
    batch: Arguments,
    places: Sequence[int],
    direction: np.ndarray,
    step: float,
) -> list[np.ndarray]:
    """Return the derivative of the predictions along a direction, by a central difference."""
    evaluation = inspected.evaluation
    variables = evaluation.variables
    h = step * float(np.cbrt(inspected.epsilon))
    parts = evaluation.space.split(tf.constant(direction, evaluation.space.dtype))
    ends = []
    for sign in (1.0, -1.0):
        with restored([Resource.of(variable) for variable in variables]):
            for variable, part in zip(variables, parts):
                variable.assign_add(tf.cast(sign * h * part, variable.dtype))
            made = _predictions(rule, batch)
            ends.append([_wide(made.tensors[place]) for place in places])
    return [(a - b) / (2 * h) for a, b in zip(*ends)]


def _predictions(rule: PredictionRule, batch: Arguments) -> Predictions:
    return batch.call(lambda *elements: Predictions(rule.predict(*elements)))


def _unit(inspected: InspectedOperator, tensors: Sequence[tf.Tensor | tf.Variable]) -> float:
    """Return the best length of a step from these values."""
    largest = max(float(tf.reduce_max(tf.abs(tf.cast(t, tf.float64)))) for t in tensors)
    return float(np.cbrt(inspected.epsilon)) * max(1.0, largest)


def _compared(
    inspected: InspectedOperator, product: tuple[float, float], estimates: list[float]
) -> Finding:
    exact, size = product
    estimate, distance = settled(estimates)
    scale = max(size, abs(estimate)) or 1.0
    error = abs(exact - estimate) / scale
    return inspected.verdict(
        f"differences of predictions and a product of the first batch differ by {error:.1g}",
        error,
        distance / scale,
        causes="; possible causes are tf.stop_gradient, or a gradient written by hand",
    )


def _wide(tensor: tf.Tensor) -> np.ndarray:
    return tf.cast(tensor, tf.float64).numpy()


def _rows(tensor: tf.Tensor | np.ndarray) -> np.ndarray:
    wide = np.asarray(tensor, np.float64)
    return wide.reshape(len(wide), -1)
