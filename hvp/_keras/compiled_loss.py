"""The loss that a Keras model was compiled with, as a function of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError, InvalidLossError
from hvp._keras.private import mask_of


def compiled_problem(
    model: Any, data: Any, variables: Any, training: bool | None, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Any]:
    """Return the compiled loss, and the variables it is to be differentiated by.

    Parameters
    ----------
    model : keras.Model
        Compiled.
    data : tuple of arrays, or iterable of such
        What it is to be evaluated on.
    variables : nest or None
        The model's trainable variables if None.
    training : bool or None
        Whether layers behave as in training.
    options : mapping
        Other arguments of the call, of which some divide the data.

    Raises
    ------
    HvpError
        As `loss_of_model`; if an option is one of `model.fit`.
    """
    check_options_of_fit(options)
    split = ("batch_size", "memory_limit", "hessian_batch_size")
    whole = isinstance(data, (tuple, dict)) and all(options.get(s) is None for s in split)
    by_examples = not whole and options.get("weight") is None
    loss = loss_of_model(model, training=training, by_examples=by_examples)
    if options.get("reduction") == "sum" and model.losses:
        raise InvalidLossError(
            "reduction='sum' would multiply the model's regularizers too",
            "a model without regularizers, or reduction='mean'",
            "pass a loss without them to HessianOperator, and them as regularization=",
        )
    return loss, model if variables is None else variables


def check_options_of_fit(options: Mapping[str, Any]) -> None:
    """Refuse arguments of `model.fit`, and say what there is instead."""
    for name in [name for name in _OF_FIT if name in options]:
        raise HvpError(
            f"the argument {name} is given, which is one of model.fit",
            "arguments of this call",
            _OF_FIT[name],
        )


_OF_FIT = {
    "class_weight": "pass weights of the examples as data: (x, y, sample_weight), with "
    "sample_weight = np.array([class_weight[label] for label in y])",
    "sample_weight": "pass it as data: (x, y, sample_weight)",
    "epochs": "pass maxiter= for the iterations of an optimizer",
    "validation_data": "evaluate on it afterwards",
}


def _check_labels(model: Any, outputs: Any, labels: Any) -> None:
    """Refuse labels for outputs that the model does not have, and outputs without labels."""
    if not (isinstance(outputs, dict) and isinstance(labels, dict)):
        return
    losses = model.loss
    wanted = set(losses) if isinstance(losses, dict) else set(outputs)
    unknown, missing = set(labels) - set(outputs), wanted - set(labels)
    if unknown or missing:
        raise InvalidDataError(
            f"the labels have the keys {sorted(labels)}, and the model's outputs {sorted(outputs)}",
            f"labels for {sorted(wanted)}",
            f"rename {sorted(unknown)} to {sorted(missing)}" if unknown and missing else "",
        )


def loss_of_model(
    model: Any, *, training: bool | None, by_examples: bool, regularized: bool = True
) -> Callable[..., Any]:
    """Return the compiled loss.

    Parameters
    ----------
    model : keras.Model
        Compiled.
    training : bool or None
        Whether layers behave as in training.
    by_examples : bool
        Whether a batch counts as many times as it has examples, which a mask would make wrong.
    regularized : bool
        Whether the model's regularizers count.

    Returns
    -------
    callable
        Takes `x`, `y` and perhaps `sample_weight`; returns the mean.

    Raises
    ------
    InvalidLossError
        If the model is not compiled, or its loss is a sum over the batch, not a mean.
    """
    if not getattr(model, "compiled", False):
        raise InvalidLossError(
            f"the model is {type(model).__name__}, and has no compiled loss",
            "a Keras model that was compiled with a loss",
            "call model.compile(loss=...), or pass a loss yourself",
        )
    for part in tf.nest.flatten(model.loss):
        if getattr(part, "reduction", None) in ("sum", "none"):
            raise InvalidLossError(
                f"the compiled loss {part.name!r} has reduction {part.reduction!r}",
                "a mean over examples",
                "compile with the default reduction, and pass reduction='sum' here for a sum",
            )

    def loss(x: Any, y: Any, sample_weight: Any = None) -> Any:
        made = model(x, training=training)
        _check_labels(model, made, y)
        if by_examples and any(mask_of(output) is not None for output in tf.nest.flatten(made)):
            raise InvalidLossError(
                "an output of the model has a mask, so that Keras averages over what is not "
                "masked, and not over examples",
                "weight=, a function that tells how much a batch counts",
                "for token 0 as mask: weight=lambda x, y: tf.math.count_nonzero(x)",
            )
        value = model.compute_loss(x=x, y=y, y_pred=made, sample_weight=sample_weight)
        if not regularized and model.losses:
            value -= tf.add_n([tf.cast(part, value.dtype) for part in model.losses])
        return value

    return loss
