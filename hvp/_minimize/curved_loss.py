"""A loss with the matrix of its curvature, as optimizers take it."""

from __future__ import annotations

from typing import Any

from hvp._errors import HvpError
from hvp._keras.compiled_loss import CompiledModel
from hvp._operators.curvature import Curvature, check_curvature, rule_of
from hvp._operators.symmetric import SymmetricOperator


def check_operator(
    loss: Any, variables: Any, data: Any, curvature: Curvature, options: dict[str, Any]
) -> Any:
    """Return an operator as it is, and the rule of any other loss.

    Like `rule_of`, raise `HvpError`; also if an operator is passed together with another curvature.
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


def compiled_loss(compiled: CompiledModel) -> Any:
    """Return the loss that a Keras model was compiled with, as the option `curvature` requires it.

    The model's regularizers are added to the options if they are not part of the loss.
    """
    options = compiled.options
    curvature = options.get("curvature", "hessian")
    check_curvature(curvature)
    if curvature == "hessian":
        return compiled.loss
    if compiled.regularization is not None:
        options["regularization"] = compiled.regularization
    return compiled.model, compiled.output_loss
