"""One batch of data, checked, and bound to the loss that reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError, InvalidLossError

_EXPECTED = (
    "a tuple of arrays or tensors with a common first axis, such as (x, y), or a dict of them"
)


def bind_batch(loss: Callable[..., Any], data: Any) -> Callable[[], Any]:
    """Return the loss as a function of nothing, its arguments the elements of `data`.

    Parameters
    ----------
    loss : callable
        Takes the elements of `data`.
    data : tuple, dict or None
        Elements become positional arguments, entries keyword arguments; arrays are converted to
        tensors once, here.

    Returns
    -------
    callable
        Takes nothing.

    Raises
    ------
    InvalidLossError
        If `loss` cannot be called, or is a model or a Keras loss, which does not call a model.
    InvalidDataError
        If `data` are of another kind, empty, or their first axes differ.
    """
    _check_loss(loss)
    if isinstance(loss, tf.types.experimental.PolymorphicFunction):
        # An older trace may hold operations whose second derivatives are wrong (`moments`).
        loss = tf.function(loss.python_function)
    if data is None:
        return loss
    if isinstance(data, tf.data.Dataset) or not isinstance(data, (tuple, dict)):
        mend = "for a single array pass (x,)" if hasattr(data, "shape") else "pass one batch"
        raise InvalidDataError(f"data is {type(data).__name__}", _EXPECTED, mend)
    elements = data if isinstance(data, dict) else dict(enumerate(data))
    if not tf.nest.flatten(elements):
        raise InvalidDataError("data has no elements", _EXPECTED)
    batch = {key: _convert(element, f"data[{key!r}]") for key, element in elements.items()}
    _check_first_axes(batch)
    if isinstance(data, dict):
        return lambda: loss(**{str(key): element for key, element in batch.items()})
    return lambda: loss(*batch.values())


def explain_mixed_precision(
    error: Exception, data: Any, variable_dtypes: Callable[[], Sequence[tf.DType]]
) -> None:
    """Raise `InvalidDataError` if the loss may have failed because the data's precision differs.

    Parameters
    ----------
    error : Exception
        What was raised.
    data : tuple, dict or None
        The batch.
    variable_dtypes : callable
        Tells the variables'.
    """
    if isinstance(error, HvpError) or data is None:
        return
    dtypes = variable_dtypes()
    elements = data if isinstance(data, dict) else dict(enumerate(data))
    for key, element in elements.items():
        for leaf in tf.nest.flatten(element):
            dtype = tf.as_dtype(leaf.dtype)
            if dtype.is_floating and dtype not in dtypes:
                wanted = dtypes[0].name
                raise InvalidDataError(
                    f"the loss raised {type(error).__name__}, and data[{key!r}] is {dtype.name} "
                    f"where the variables are {wanted}",
                    "one precision, or a loss that casts",
                    f"pass it as {wanted}, by .astype({wanted!r})",
                ) from error


def _check_loss(loss: Any) -> None:
    expected = "a function that returns a scalar tensor"
    if not callable(loss):
        raise InvalidLossError(
            f"the loss is {type(loss).__name__}, which cannot be called",
            expected,
            "pass the function, not its value: lambda: compute_loss()",
        )
    if hasattr(loss, "trainable_weights"):  # a Keras layer or model
        raise InvalidLossError(
            f"the loss is the model {type(loss).__name__} itself",
            expected,
            "pass lambda x, y: compute_loss(y, model(x))",
        )
    for package in ("keras", "tf_keras"):
        keras = sys.modules.get(package)
        if keras is not None and isinstance(loss, keras.losses.Loss):
            raise InvalidLossError(
                f"the loss is {type(loss).__name__}, which compares predictions and never calls "
                "the model",
                expected,
                "pass lambda x, y: keras_loss(y, model(x))",
            )


def _convert(element: Any, name: str) -> Any:
    """Convert the leaves of one element of the data to tensors."""
    if isinstance(element, (list, tuple)) and element and not hasattr(element[0], "shape"):
        raise InvalidDataError(
            f"{name} is a {type(element).__name__} of {type(element[0]).__name__}",
            _EXPECTED,
            "pass np.asarray(...) of it",
        )

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, tf.Variable) or isinstance(getattr(leaf, "value", None), tf.Variable):
            raise InvalidDataError(
                f"{name} is a variable, whose changes and derivatives a copy would not see",
                _EXPECTED,
                "let the loss read the variable itself",
            )
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        try:
            return tf.convert_to_tensor(leaf)
        except (TypeError, ValueError) as error:
            raise InvalidDataError(
                f"{name} is {type(leaf).__name__}, of which TensorFlow makes no tensor", _EXPECTED
            ) from error

    return tf.nest.map_structure(convert, element)


def _check_first_axes(batch: dict[Any, Any]) -> None:
    lengths = {}
    for key, element in batch.items():
        for leaf in tf.nest.flatten(element):
            if len(leaf.shape) == 0:
                raise InvalidDataError(
                    f"data[{key!r}] is a scalar", _EXPECTED, "close over it in the loss instead"
                )
            lengths[f"data[{key!r}]"] = int(leaf.shape[0])
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InvalidDataError(
            f"the first axes differ: {shown}", "one length, the number of examples"
        )
    if 0 in lengths.values():
        raise InvalidDataError("data has no examples", "at least one")
