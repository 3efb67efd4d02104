"""Checks of the arguments of `NewtonCG`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvp._data.data_sets import Terms
from hvp._engines.gauss_newton import GaussNewtonRule
from hvp._errors import GraphModeError, HvpError
from hvp._minimize.norms import SPARSE
from hvp._minimize.subproblem import RECYCLED
from hvp._runtime.arguments import check_choice, check_flag, check_number
from hvp._solve.preconditioners import PRECONDITIONERS


def check_preconditioner(preconditioner: Any) -> None:
    """Check that the argument `preconditioner` is a name, an operator or a function."""
    kinds = (None, *PRECONDITIONERS, RECYCLED, SPARSE)
    is_given = callable(preconditioner) or hasattr(preconditioner, "shape")
    if not (is_given or preconditioner in kinds):
        raise HvpError(
            f"the argument preconditioner is {preconditioner!r}",
            f"{', '.join(map(repr, kinds))}, a LinearOperator, or a function that makes one",
        )


def check_space(
    space: Any,
    momentum: Any,
    geodesic: Any,
    loss: Any,
    preconditioner: Any,
    options: Mapping[str, Any],
) -> bool:
    """Return whether steps are found in the space of residuals, and check that they can be."""
    check_choice(space, "space", ("variables", "residuals"))
    check_number(momentum, "momentum", below=1)
    geodesic = check_flag(geodesic, "geodesic")
    if space == "variables":
        if momentum or geodesic:
            raise HvpError(
                "momentum or geodesic is given without space='residuals'",
                "both together",
                "pass space='residuals' and curvature='gauss-newton'",
            )
        return False
    rules = loss.rules.values() if isinstance(loss, Terms) else [loss]
    if not all(isinstance(rule, GaussNewtonRule) for rule in rules):
        raise HvpError(
            "space='residuals' is given without a model and the loss of its predictions",
            "a pair (model, output_loss) and curvature='gauss-newton'",
            "pass NewtonCG((model, output_loss), variables, data, curvature='gauss-newton', "
            "space='residuals')",
        )
    names = [n for n in ("reduction", "regularization") if options.get(n) not in (None, "mean")]
    if preconditioner is not None:
        names.append("preconditioner")
    if names:
        raise HvpError(
            f"{' and '.join(names)} is given together with space='residuals'",
            "a loss that is a mean over all examples, and no further term",
            "make a penalty part of the model: predictions that the output loss squares",
        )
    return True


def check_eager() -> None:
    """Raise `GraphModeError` if TensorFlow is tracing a graph."""
    if not tf.executing_eagerly():
        raise GraphModeError(
            "NewtonCG was called while TensorFlow traces a graph",
            "eager execution",
            "call it outside the tf.function",
        )
