"""The loss that a Keras model was compiled with, as a function of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError, InvalidLossError
from hvp._keras.private import layers_of, losses_of, mask_of


@dataclass(frozen=True)
class CompiledModel:
    """A compiled Keras model with its data, as the arguments of a call that takes functions.

    `training` says whether layers behave as in training. `options` are the other arguments of the
    call; some may be added, and an argument of `model.fit` raises an `HvpError`.
    """

    keras_model: Any
    data: Any
    training: bool | None
    options: dict[str, Any]

    def __post_init__(self) -> None:
        check_options_of_fit(self.options)

    @property
    def loss(self) -> Callable[..., Any]:
        """The compiled loss of a batch, including the model's regularizers."""
        model = self.keras_model
        loss = loss_of_model(model, training=self.training, by_examples=self._counts_examples)
        if self.options.get("reduction") == "sum" and model.losses:
            raise InvalidLossError(
                "reduction='sum' would multiply the model's regularizers, too",
                "a model without regularizers, or reduction='mean'",
                "pass a loss without the regularizers to HessianOperator, and them as "
                "regularization=",
            )
        return loss

    @property
    def model(self) -> Callable[..., Any]:
        """The predictions as a function of the inputs; a tuple of these is several arguments."""

        def predictions(*inputs: Any) -> Any:
            x = inputs if len(inputs) > 1 else inputs[0]
            return self.keras_model(x, training=self.training)

        return predictions

    @property
    def output_loss(self) -> Callable[..., Any]:
        """The compiled loss of predictions, without regularizers.

        It takes the outputs, `y` and optionally `sample_weight`, and raises `InvalidLossError` if a
        layer adds a loss that depends on the data.
        """
        model = self.keras_model
        of_outputs = loss_of_outputs(model, by_examples=self._counts_examples, regularized=False)

        def output_loss(outputs: Any, y: Any, sample_weight: Any = None) -> Any:
            for layer in layers_of(model):
                if losses_of(layer):
                    raise InvalidLossError(
                        f"the layer {layer.name!r} adds a loss that depends on the data, which is "
                        "no function of the model's outputs",
                        "a loss of the outputs, and regularizers of weights",
                        "remove its activity regularizer or add_loss, or use hvp.HessianOperator",
                    )
            return of_outputs(outputs, y, sample_weight)

        return output_loss

    @property
    def regularization(self) -> Callable[[], Any] | None:
        """The sum of the weights' regularizers and what the caller adds; None if there are none."""
        weights = self.keras_model.trainable_variables
        regularized = [v for v in weights if getattr(v, "regularizer", None)]
        added = self.options.get("regularization")

        def regularization() -> Any:
            terms = [variable.regularizer(variable) for variable in regularized]
            return sum(terms) if added is None else sum(terms) + added()

        return regularization if regularized else added

    @property
    def likelihoods(self) -> list[str] | None:
        """The distributions that the compiled losses are likelihoods of; None if not known."""
        _check_compiled(self.keras_model, has_loss=True)
        losses = self.keras_model.loss
        named = isinstance(losses, dict) and getattr(self.keras_model, "outputs", None)
        if named and not isinstance(self.keras_model.output, dict):
            # Losses by name, for outputs in the order of a list.
            losses = [losses.get(name) for name in self.keras_model.output_names]
        names = _names_of(losses)
        known = all(name in _LIKELIHOODS for name in names)
        return [_LIKELIHOODS[name] for name in names] if known else None

    @property
    def loss_weight(self) -> float:
        """What the loss of a model with one output is multiplied by."""
        [weight] = tf.nest.flatten(self.keras_model.get_compile_config().get("loss_weights"))
        return 1.0 if weight is None else float(weight)

    @property
    def _counts_examples(self) -> bool | None:
        """Whether batches are weighted by their numbers of examples; None if there is only one."""
        split = ("batch_size", "memory_limit", "hessian_batch_size", "devices")
        whole = isinstance(self.data, (tuple, dict))
        whole = whole and all(self.options.get(name) is None for name in split)
        # Other processes have other examples.
        whole = whole and not _has_other_processes(self.keras_model)
        return None if whole else self.options.get("weight") is None


_LIKELIHOODS = {
    "sparse_categorical_crossentropy": "categorical",
    "categorical_crossentropy": "categorical",
    "binary_crossentropy": "bernoulli",
    "mean_squared_error": "gaussian",
    "mse": "gaussian",
}


def _names_of(losses: Any) -> list[str]:
    return [
        loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
        for loss in tf.nest.flatten(losses)
    ]


def _has_other_processes(model: Any) -> bool:
    """Whether a strategy connects this process with others, which have other examples."""
    values = [getattr(variable, "value", variable) for variable in getattr(model, "variables", ())]
    kept = [value for value in values if isinstance(value, tf.distribute.DistributedValues)]
    strategies = [value.distribute_strategy for value in kept]
    return any(s.num_replicas_in_sync > len(s.extended.worker_devices) for s in strategies)


def check_options_of_fit(options: Mapping[str, Any]) -> None:
    """Refuse arguments of `model.fit`, and name alternatives."""
    for name in [name for name in _OF_FIT if name in options]:
        raise HvpError(
            f"the argument {name} is one of model.fit's arguments",
            "arguments of this call",
            _OF_FIT[name],
        )


_OF_FIT = {
    "class_weight": "pass weights of the examples as data: (x, y, sample_weight), with "
    "sample_weight = np.array([class_weight[label] for label in y])",
    "sample_weight": "pass it as data: (x, y, sample_weight)",
    "epochs": "pass maxiter= for the iterations of an optimizer",
    "validation_data": "evaluate the model on it afterwards",
}


def _check_kind(loss: Any, outputs: Any, labels: Any) -> None:
    """Refuse one-hot labels where Keras expects integers, and integers in place of one-hot ones."""
    shape, own = (tf.TensorShape(getattr(tensor, "shape", None)) for tensor in (outputs, labels))
    names = _names_of(loss)
    if len(names) != 1 or None in (shape.rank, own.rank):
        return
    [name] = names
    is_one_hot = own.rank == shape.rank and own[-1] == shape[-1] and own[-1] not in (None, 1)
    if name == "sparse_categorical_crossentropy" and is_one_hot:
        kinds = "one-hot labels", "integers"
        remedy = "pass np.argmax(y, axis=-1), or compile with 'categorical_crossentropy'"
    elif name == "categorical_crossentropy" and own.rank == shape.rank - 1:
        kinds = "integers", "one-hot labels"
        remedy = (
            "pass keras.utils.to_categorical(y), or compile with 'sparse_categorical_crossentropy'"
        )
    else:
        return
    raise InvalidDataError(
        f"the labels have the shape {own} of {kinds[0]}, and the loss is {name}", kinds[1], remedy
    )


def _masks(model: Any, outputs: Any) -> list[bool]:
    """Return which of the outputs that have a loss have a mask."""
    losses, flat = model.loss, tf.nest.flatten(outputs)
    if isinstance(losses, dict):
        names = sorted(outputs) if isinstance(outputs, dict) else model.output_names
        losses = [losses.get(name) for name in names]
    if isinstance(losses, (list, tuple)):
        flat = [output for output, loss in zip(flat, losses) if loss is not None]
    return [mask_of(output) is not None for output in flat]


def _check_labels(model: Any, outputs: Any, labels: Any) -> None:
    """Refuse labels without outputs, and outputs without labels."""
    if not (isinstance(outputs, dict) and isinstance(labels, dict)):
        return
    losses = model.loss
    required = set(losses) if isinstance(losses, dict) else set(outputs)
    unknown, missing = set(labels) - set(outputs), required - set(labels)
    if unknown or missing:
        raise InvalidDataError(
            f"the labels have the keys {sorted(labels)}, and the model's outputs {sorted(outputs)}",
            f"labels for {sorted(required)}",
            f"rename {sorted(unknown)} to {sorted(missing)}" if unknown and missing else "",
        )


def loss_of_model(
    model: Any, *, training: bool | None, by_examples: bool | None, regularized: bool = True
) -> Callable[..., Any]:
    """Return the compiled loss, a mean, as a function of `x`, `y` and perhaps `sample_weight`.

    With `by_examples`, batches are weighted by their numbers of examples. Models whose outputs have
    masks are then refused, because Keras averages over unmasked entries. If it is False, batches
    have other weights, which cannot serve outputs with a mask and others; None stands for a single
    batch. `InvalidLossError` is raised if the model is not compiled, or if its loss is a sum over
    the batch.
    """
    _check_compiled(model)
    of_outputs = loss_of_outputs(model, by_examples=by_examples, regularized=regularized)

    def loss(x: Any, y: Any, sample_weight: Any = None) -> Any:
        return of_outputs(model(x, training=training), y, sample_weight, x=x)

    return loss


def loss_of_outputs(
    model: Any, *, by_examples: bool | None, regularized: bool = True
) -> Callable[..., Any]:
    """Return the compiled loss as a function of outputs, `y` and perhaps `sample_weight`.

    The arguments and errors are otherwise those of `loss_of_model`.
    """
    _check_compiled(model, has_loss=not regularized)

    def loss(outputs: Any, y: Any, sample_weight: Any = None, *, x: Any = None) -> Any:
        _check_labels(model, outputs, y)
        _check_kind(model.loss, outputs, y)
        if by_examples and any(mask_of(output) is not None for output in tf.nest.flatten(outputs)):
            raise InvalidLossError(
                "an output of the model has a mask, so that Keras averages over unmasked entries "
                "instead of examples",
                "weight=, a function that returns the weight of a batch",
                "if token 0 is masked, pass weight=lambda x, y: tf.math.count_nonzero(x), with "
                "x[0] or x['name'] for one of several inputs; in place of an optimizer, which "
                "takes no weight, use hvp.keras.optimizers.SOAP",
            )
        if by_examples is False and len(set(_masks(model, outputs))) == 2:
            raise InvalidLossError(
                "one output of the model has a mask, and another has none, so that Keras averages "
                "one over unmasked entries, and the other over examples",
                "losses that a single weight of a batch serves",
                "leave out batch_size, memory_limit and devices, to evaluate all data at once; or "
                "take the outputs one by one: keras.Model(model.inputs, model.outputs[0])",
            )
        kinds = [getattr(part, "reduction", None) for part in tf.nest.flatten(model.loss)]
        if by_examples and sample_weight is not None and "mean_with_sample_weight" in kinds:
            raise InvalidLossError(
                "the compiled loss averages over the weights of examples, and not over examples",
                "weight=, a function that returns the weight of a batch",
                "pass weight=lambda x, y, sample_weight: tf.reduce_sum(sample_weight)",
            )
        try:
            value = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight)
        except ValueError as error:
            if "No loss to compute" not in str(error):
                raise
            raise _without_loss() from error
        if not regularized and model.losses:
            value -= tf.add_n([tf.cast(part, value.dtype) for part in model.losses])
        return value

    return loss


def _without_loss() -> InvalidLossError:
    return InvalidLossError(
        "the model was compiled without a loss, and has no losses of its own",
        "a Keras model that was compiled with a loss",
        "call model.compile(loss=...), or pass a loss yourself",
    )


def _check_compiled(model: Any, *, has_loss: bool = False) -> None:
    """Refuse a model that is not compiled, or sums; with `has_loss`, one without a loss of outputs.

    Keras would take the regularizers alone for the loss of such a model.
    """
    # Models of tf_keras have no such attribute, but they do have a loss once they are compiled.
    if not getattr(model, "compiled", getattr(model, "loss", None) is not None):
        raise InvalidLossError(
            f"the model is {type(model).__name__}, and has no compiled loss",
            "a Keras model that was compiled with a loss",
            "call model.compile(loss=...), or pass a loss yourself",
        )
    if has_loss and model.loss is None:
        raise _without_loss()
    for part in tf.nest.flatten(model.loss):
        if getattr(part, "reduction", None) in ("sum", "none"):
            raise InvalidLossError(
                f"the compiled loss {part.name!r} has reduction {part.reduction!r}",
                "a mean over examples",
                "compile with the default reduction; for the sum over all examples, pass "
                "reduction='sum' to hvp",
            )
