"""A loss with the matrix that stands for its curvature, as optimizers take it."""

from __future__ import annotations

from typing import Any

from hvp._errors import HvpError
from hvp._keras.compiled_loss import compiled_parts, compiled_problem
from hvp._operators.curvature import Curvature, check_curvature, rule_of
from hvp._operators.operator import SymmetricOperator


def check_operator(
    loss: Any, variables: Any, data: Any, curvature: Curvature, options: dict[str, Any]
) -> Any:
    """Return an operator as it is, and the rule of any other loss.

    Parameters
    ----------
    loss, variables, data, curvature, options
        As the caller passed them.

    Raises
    ------
    HvpError
        If an operator is passed together with another curvature, and as `rule_of`.
    """
    if not isinstance(loss, SymmetricOperator):
        return loss if variables is None else rule_of(loss, curvature, data, options)
    check_curvature(curvature)
    if curvature != "hessian":
        raise HvpError(
            f"an operator is given, and curvature={curvature!r} beside it",
            "the operator alone, which is the curvature",
            "pass an hvp.GaussNewtonOperator",
        )
    return loss


def compiled_loss(
    model: Any,
    data: Any,
    variables: Any,
    training: bool,
    curvature: Curvature,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """Return the loss that a Keras model was compiled with, and its variables.

    Parameters
    ----------
    model, data, variables, training, curvature
        As the caller passed them.
    options : dict
        The other arguments. Regularizers of the model are added to them, if they are not part of
        the loss.

    Returns
    -------
    loss : callable or pair of callables
        As `curvature` requires it.
    variables : nest
        The variables.
    """
    check_curvature(curvature)
    if curvature == "hessian":
        return compiled_problem(model, data, variables, training, options)
    parts = compiled_parts(model, data, training, options)
    if parts.regularization is not None:
        options["regularization"] = parts.regularization
    return (parts.model, parts.output_loss), model if variables is None else variables
