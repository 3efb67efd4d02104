"""The same call for a loss, and for a compiled Keras model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hvp._errors import InvalidDataError
from hvp._keras.compiled_loss import CompiledModel

Self = TypeVar("Self", bound="FromKeras")


class FromKeras:
    """Base of the classes that can also be made from a Keras model with its compiled loss."""

    @classmethod
    def from_keras(
        cls: type[Self],
        model: Any,
        data: Any,
        *,
        variables: Any = None,
        training: bool = False,
        **options: Any,
    ) -> Self:
        """Create an object of this class for the loss that a Keras model was compiled with.

        Parameters
        ----------
        model : keras.Model
            A compiled model. Loss weights, multiple outputs and regularizers are handled as in
            `model.evaluate`.
        data : tuple of arrays, or iterable of such
            `(x, y)` or `(x, y, sample_weight)`, as for `model.fit`, or batches of these.
        variables : nest, optional
            The variables to differentiate with respect to; by default the model's trainable
            variables. For a smaller problem, pass those of the last layers only.
        training : bool, optional
            Whether layers behave as in training (dropout, batch normalization).
        **options
            All other arguments of the class.

        Returns
        -------
        object
            An object of this class.

        Raises
        ------
        InvalidLossError
            If the model is not compiled, or its loss is a sum over the batch instead of a mean; if
            an output has a mask and the data are divided without `weight`, or with it although
            another output has no mask; if `reduction` is ``"sum"`` and the model has regularizers;
            if the class takes predictions and their loss separately, and a layer adds a loss that
            depends on the data.
        HvpError
            As raised by the class.

        Notes
        -----
        Keras divides by the number of examples, even with sample weights. If it averages over
        something else (outputs with a mask), pass `weight` to say how much a batch counts.

        If the class takes predictions and their loss separately, and the model ends with a softmax
        or sigmoid, the predictions are the logits, from which Keras computes cross-entropies. These
        losses are convex in the logits. Regularizers of weights are then passed as
        `regularization`, and `likelihood` follows from the compiled loss, if that is a
        cross-entropy or the mean square error.

        Examples
        --------
        >>> import keras
        >>> import numpy as np
        >>> import hvp
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.compile(loss="mse")
        >>> x, y = np.eye(3), np.ones((3, 1))
        >>> hvp.HessianOperator.from_keras(model, (x, y), batch_size=2) @ np.ones(3)
        array([0.6666667, 0.6666667, 0.6666667], dtype=float32)
        >>> hvp.FisherOperator.from_keras(model, (x, y)) @ np.ones(3)
        array([0.6666667, 0.6666667, 0.6666667], dtype=float32)
        """
        if data is None:
            raise InvalidDataError("data is None", "(x, y), or batches of these, as for model.fit")
        compiled = CompiledModel(model, data, training, options)
        functions = cls._of_compiled(compiled, model if variables is None else variables)
        make: Any = cls
        return make(*functions, data, **compiled.options)

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        """Return the arguments that come before the data, and add others to the options."""
        return compiled.loss, variables
