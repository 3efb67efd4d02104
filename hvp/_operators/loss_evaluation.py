"""From what the caller gives to what can be evaluated: a loss, bound to its data, traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError, RecomputeError
from hvp._linearize.compiled import JitCompile
from hvp._linearize.gradient import value_and_gradient
from hvp._linearize.program import Engine, Program
from hvp._linearize.variables import collect_variables
from hvp._operators.batched_program import BatchedProgram
from hvp._operators.batches import Batches
from hvp._operators.data import Elements, bind_batch, checked_loss, explain_mixed_precision
from hvp._operators.evaluation import Evaluation, OnStale
from hvp._operators.memory import Budget
from hvp._progress import check_progress
from hvp._recompute.keras_segments import in_segments


def evaluate_loss(
    loss: Callable[..., Any],
    variables: Any,
    data: Any = None,
    *,
    batch_size: int | None = None,
    memory_limit: int | str | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    regularization: Callable[[], Any] | None = None,
    weight: Callable[..., Any] | None = None,
    progress: bool | Literal["always"] = False,
    on_stale: OnStale = "raise",
    engine: Engine = "graph",
    jit_compile: JitCompile = False,
    recompute: bool | int | Sequence[Any] = False,
    products: bool = True,
    inputs: Sequence[tf.Variable] = (),
) -> Evaluation:
    """Evaluate a loss and its gradient over its data, at the values the variables have now.

    Parameters
    ----------
    loss, variables, data, batch_size, memory_limit, reduction, regularization, weight, progress, \
    on_stale, engine, jit_compile, recompute
        As for `HessianOperator`.
    products : bool
        Whether Hessian-vector products are wanted too.
    inputs : sequence of tf.Variable
        Variables whose changes are none of the loss, but of what it is called with.

    Returns
    -------
    Evaluation

    Raises
    ------
    HvpError
        As `HessianOperator`.
    """
    if reduction not in ("mean", "sum"):
        raise HvpError(f"the argument reduction is {reduction!r}", "'mean' or 'sum'")
    for name, function in (("regularization", regularization), ("weight", weight)):
        if not (function is None or callable(function)):
            raise HvpError(
                f"the argument {name} is {type(function).__name__}", "a function, or None"
            )
    check_progress(progress)
    if data is None and not (batch_size is None and memory_limit is None and weight is None):
        raise InvalidDataError(
            "batch_size, memory_limit or weight is given, and no data",
            "data that can be divided",
            "pass data=(x, y), and a loss that takes x and y",
        )
    wanted = recompute is not False
    if wanted:
        loss = in_segments(loss, variables, recompute)
    options: dict[str, Any] = {"engine": engine, "jit_compile": jit_compile, "products": products}
    one = data is None or isinstance(data, (tuple, dict, Elements))
    if one and batch_size is None and memory_limit is None and weight is None:
        total = reduction == "sum"
        bound = bind_batch(loss, data, regularization=regularization, total=total)

        def make() -> Any:
            return Program(value_and_gradient(bound), variables, inputs=inputs, **options)
    else:
        loss, budget = checked_loss(loss), Budget(memory_limit)
        batches = Batches(data, batch_size, weight)
        options.update(regularization=regularization, total=reduction == "sum")
        options.update(budget=budget, progress=progress)

        def make() -> Any:
            return BatchedProgram(loss, variables, batches, **options)

    try:
        evaluation = Evaluation(make, on_stale)
    except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
        explain_mixed_precision(error, data, lambda: collect_variables(variables).dtypes)
        raise
    if wanted and evaluation.program.recomputes is False:
        evaluation.close()
        raise RecomputeError(
            "the argument recompute has no effect: the loss does not call the model",
            "a loss that calls the model it is differentiated by",
            "call the model itself, not a tf.function of it that was traced before",
        )
    return evaluation
