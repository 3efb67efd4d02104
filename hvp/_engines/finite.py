"""Checks whether evaluated values and gradients are finite."""

from __future__ import annotations

import tensorflow as tf

from hvp._engines.graph_program import Results
from hvp._errors import NonFiniteError, quoted
from hvp._vectors.variables import VariableNest


def check_finite(results: Results, nest: VariableNest, *, batch: int | None = None) -> None:
    """Raise NonFiniteError if a value or a gradient is not finite.

    The message names the variables of `nest` that are not finite themselves, if there are any, or
    else tells the number of the `batch`, if there are several.
    """
    if results.finite is not None and results.finite:
        return
    values = tf.nest.flatten(results.value)
    bad_values = not all(map(_is_finite, values))
    gradient = results.gradient or ()
    pairs = zip(nest.names, gradient)
    broken = [name for name, part in pairs if part is not None and not _is_finite(part)]
    if not (bad_values or broken):
        return
    lost = [name for name, v in zip(nest.names, nest.variables) if not _is_finite(v.read_value())]
    if lost:
        raise NonFiniteError(
            f"variables have entries that are not finite: {quoted(lost)}",
            "finite values",
            "assign the values of before they were lost, from a checkpoint for example",
        )
    if batch is not None:
        raise NonFiniteError(
            f"the {'loss' if bad_values else 'gradient'} of batch {batch} is not finite",
            "a loss that is finite and differentiable at this point, for every batch",
            f"look at batch {batch} of the data: NaN, infinite or extreme entries",
        )
    if bad_values:
        shown = f"{float(values[0])}" if len(values) == 1 and not values[0].shape.rank else "not"
        raise NonFiniteError(
            f"the loss is {shown}" if shown != "not" else "the function's values are not finite",
            "a finite loss" if shown != "not" else "finite values",
            "look for logarithms, roots or quotients that have no value at this point",
        )
    raise NonFiniteError(
        f"the gradient is not finite for {quoted(broken)}",
        "a loss that is differentiable at this point",
        "look for square roots, norms or logarithms of zero",
    )


def _is_finite(tensor: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(tensor)))
