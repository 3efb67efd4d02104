"""Exact diagonals of Gauss-Newton and Fisher matrices, from the predictions of each example."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.batches import Batches
from hvp._data.elements import NO_DATA, Elements
from hvp._derivatives.exact import exact_functions
from hvp._engines.fisher import EmpiricalFisherRule, FisherRule
from hvp._engines.gauss_newton import GaussNewtonRule
from hvp._engines.options import Options
from hvp._engines.rule import HessianRule, Parts
from hvp._graphs.compiled import Compiled
from hvp._graphs.vectorized import NotVectorizedError, vectorized
from hvp._keras.losses import preserved_losses
from hvp._operators.matrix import BlockEvaluation, Evaluation, evaluated
from hvp._operators.sparse import recovered, sparsity_of
from hvp._runtime.interrupts import deliver_interrupt

# So many predictions of an example are taken at once. Their gradients, for all examples of a call,
# take at most so many bytes; the call itself takes several times as much.
_AT_ONCE, _BYTES, _MOST_EXAMPLES = 4, 2**26, 256


def example_diagonal(matrix: Evaluation) -> np.ndarray | None:
    """Return the diagonal without damping, in float64, or None if it is not known in this way.

    The matrix is the mean of `J_i^T B_i J_i` over examples `i`. With `j` a row of `J_i` and `b` the
    same row of `B_i J_i`, the diagonal is the sum of all `j * b`, and takes two backward passes for
    each prediction of an example. In the same way the product with a random vector is summed, and
    compared with that of the matrix: where examples are not independent, these differ.
    """
    if isinstance(matrix, BlockEvaluation):
        of_whole = example_diagonal(matrix.whole)
        return None if of_whole is None else matrix.selection.taken(tf.constant(of_whole)).numpy()
    problem, space = matrix.problem, matrix.space
    if problem is None or matrix.is_low or problem.options.devices is not None:
        return None
    if not _is_known(problem.rule) or problem.source is NO_DATA:
        return None
    probe = matrix.probe()[0]
    totals = np.zeros((2, space.size))
    added = problem.options.regularization
    if added is not None:
        of_added = evaluated(HessianRule(added), problem.variables, None, Options())
        pattern = of_added.linear_map.pattern()
        if pattern is None:
            return None
        whole = recovered(sparsity_of(pattern, True), of_added.linear_map, probe.dtype)
        totals += whole.diagonal(), whole @ probe
    weights, sums = 0.0, np.zeros((2, space.size))
    try:
        for elements in _parts(problem.source):
            deliver_interrupt()
            weight, *of_part = _summed(matrix, elements, probe)
            weights, sums = weights + weight, sums + of_part
    except NotVectorizedError:
        return None
    totals += sums if problem.total else sums / (weights or 1)
    expected = matrix.multiply(tf.constant(probe[np.newaxis])).numpy()[0]
    allowed = np.sqrt(np.finfo(probe.dtype).eps) / 4 * np.linalg.norm(expected)
    return totals[0] if np.linalg.norm(totals[1] - expected) <= allowed else None


def _is_known(rule: Any) -> bool:
    """Return whether `B` of an example is known to be the Hessian of its loss, or `r r^T`."""
    is_drawn = isinstance(rule, FisherRule) and rule.samples
    return isinstance(rule, (GaussNewtonRule, EmpiricalFisherRule, FisherRule)) and not is_drawn


def _parts(source: Elements | Batches) -> Iterator[Elements]:
    batches: Iterable[Elements]
    batches = [source] if isinstance(source, Elements) else (b.elements for b in source)
    for batch in batches:
        for start in range(0, batch.examples, _MOST_EXAMPLES):
            yield batch.part(start, min(start + _MOST_EXAMPLES, batch.examples))


def _summed(matrix: Evaluation, elements: Elements, probe: np.ndarray) -> Any:
    """Return the sums over examples of weights, diagonals and products with `probe`."""
    specs, source = elements.specs_of_any_number, matrix.snapshot.plan.nest.source
    sizes: list[int] = []

    def compiled() -> tuple[Compiled, int]:
        row, index = tf.TensorSpec(probe.shape, probe.dtype), tf.TensorSpec([], tf.int32)
        with matrix.snapshot.preserving(), preserved_losses(source):
            made = Compiled(_of_examples(matrix, elements, sizes), [row, index, *specs], False)
        return made, sizes[0]

    function, size = matrix.cached(("diagonal", *specs), compiled)
    at_once = min(_AT_ONCE, size) * matrix.size * matrix.dtype.size
    step, total = max(1, _BYTES // at_once), np.zeros(3, object)
    vector = tf.constant(probe)
    for start in range(0, elements.examples, step):
        part = elements.part(start, min(start + step, elements.examples)).tensors
        for first in range(0, size, _AT_ONCE):
            deliver_interrupt()
            with matrix.snapshot.preserving():
                weight, *sums = function(vector, tf.constant(first), *part)
            total = total + np.array([float(weight) if first == 0 else 0.0, *sums], object)
    return total


def _of_examples(
    matrix: Evaluation, elements: Elements, sizes: list[int]
) -> Callable[..., list[tf.Tensor]]:
    """Return a function that sums over examples, for a few of their predictions at a time.

    The number of predictions of an example is added to `sizes`.
    """
    problem, space, variables = matrix.problem, matrix.space, matrix.variables
    assert problem is not None
    rule: Any = problem.rule

    def of_example(example: list[tf.Tensor], probe: tf.Tensor, first: tf.Tensor) -> list[tf.Tensor]:
        batch = elements.with_tensors([tensor[tf.newaxis] for tensor in example])
        model, output = rule.taped(variables, batch)
        weight = tf.ones([], space.dtype)
        if rule.weight is not None:
            weight = tf.cast(batch.call(rule.weight), space.dtype)

        def row(cotangents: Parts) -> tf.Tensor:
            return space.join(space.with_zeros(model.vjp(cotangents)))

        pairs = []
        if isinstance(rule, EmpiricalFisherRule):
            sizes.append(1)
            pairs.append((row(output.taped.outputs),) * 2)
        else:
            shapes = [part.shape for part in output.predictions]
            if not all(shape.is_fully_defined() for shape in shapes):
                raise NotVectorizedError("predictions of unknown shape")
            count = sum(shape.num_elements() for shape in shapes)
            sizes.append(count)
            for i in range(min(_AT_ONCE, count)):
                unit = tf.one_hot(first + i, count, dtype=space.dtype)
                cotangents = _split(unit, output.predictions)
                pairs.append((row(cotangents), row(output.taped.vjp(cotangents))))
        diagonal = tf.add_n([left * right for left, right in pairs])
        along = [tf.reduce_sum(left * probe) * right for left, right in pairs]
        return [weight, weight * diagonal, weight * tf.add_n(along)]

    def of_examples(probe: tf.Tensor, first: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
        with exact_functions():
            each = vectorized(lambda example: of_example(example, probe, first), list(tensors))
        return [tf.reduce_sum(tf.cast(rows, tf.float64), axis=0) for rows in each]

    return of_examples


def _split(vector: tf.Tensor, like: Parts) -> list[tf.Tensor]:
    parts = tf.split(vector, [math.prod(part.shape) for part in like])
    return [tf.cast(tf.reshape(p, part.shape), part.dtype) for p, part in zip(parts, like)]
