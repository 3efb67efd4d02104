"""The argument `curvature`: which matrix stands for the curvature of a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from hvp._data.data_sets import by_data_sets
from hvp._data.elements import checked_loss
from hvp._engines.gauss_newton import GaussNewtonRule
from hvp._engines.rule import HessianRule, Rule
from hvp._errors import HvpError, InvalidLossError
from hvp._operators.predictions import checked_model, checked_output_loss, refuse_dict

Curvature = Literal["hessian", "gauss-newton"]

# Options that divide the data into batches.
_DIVIDING = ("batch_size", "memory_limit", "devices")


def check_curvature(curvature: Any) -> None:
    """Refuse an argument `curvature` that names no matrix."""
    if curvature not in get_args(Curvature):
        names = " or ".join(map(repr, get_args(Curvature)))
        raise HvpError(
            f"the argument curvature is {curvature!r}",
            names,
            "to use another matrix, such as an hvp.FisherOperator, pass the operator itself: as "
            "the curvature of hvp.InfluenceFunctions, and elsewhere as the loss",
        )


def rule_of(loss: Any, curvature: Curvature, data: Any, options: Mapping[str, Any]) -> Rule:
    """Return the rule of the matrix of a loss, and refuse invalid arguments.

    For Gauss-Newton, `loss` is the pair of the model and the output loss. Some of the `options`
    divide the data into batches.
    """
    check_curvature(curvature)
    if isinstance(loss, Mapping):
        return by_data_sets(loss, lambda one: rule_of(one, curvature, (), options))
    is_pair = isinstance(loss, (tuple, list)) and len(loss) == 2
    if curvature == "hessian":
        if is_pair:
            raise InvalidLossError(
                "the loss is a pair, as curvature='gauss-newton' takes it",
                "a function that returns the loss",
                "pass curvature='gauss-newton', or one function",
            )
        return HessianRule(checked_loss(loss))
    if not is_pair:
        raise InvalidLossError(
            f"the loss is {type(loss).__name__}, which does not tell the model from the loss of "
            "its predictions",
            "a pair (model, output_loss), because curvature='gauss-newton'",
            "pass what hvp.GaussNewtonOperator takes; of a compiled Keras model use from_keras",
        )
    model, output_loss = loss
    return gauss_newton_rule(model, output_loss, data, options)


def gauss_newton_rule(
    model: Any, output_loss: Any, data: Any, options: Mapping[str, Any], *, convex: bool = False
) -> Rule:
    """Return the rule of a Gauss-Newton matrix, of functions that are checked here.

    Of dicts of functions, it is that of the sum over their data sets.
    """
    if isinstance(model, Mapping) and isinstance(output_loss, Mapping):
        pairs = {name: (one, output_loss.get(name)) for name, one in model.items()}
        return by_data_sets(
            pairs, lambda pair: gauss_newton_rule(pair[0], pair[1], (), options, convex=convex)
        )
    refuse_dict(data)
    divided = not isinstance(data, tuple) or any(options.get(o) is not None for o in _DIVIDING)
    return GaussNewtonRule(
        checked_model(model),
        checked_output_loss(output_loss),
        None if isinstance(options.get("weight"), Mapping) else options.get("weight"),
        divided=divided,
        convex=convex,
    )


def composed(loss: Any) -> Callable[..., Any]:
    """Return the loss, which may be a pair, as one function of the elements of a batch."""
    if callable(loss):
        return loss
    model, output_loss = loss

    def whole(inputs: Any, *others: Any) -> Any:
        predictions = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        return output_loss(predictions, *others)

    return whole
