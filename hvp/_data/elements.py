"""One batch of data: checked, converted, and passed to functions as arguments."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._engines.rule import Arguments
from hvp._errors import HvpError, InvalidDataError, InvalidLossError, line_of
from hvp._graphs.parts import nbytes

EXPECTED = (
    "a tuple of arrays or tensors with a common first axis, such as (x, y), or a dict of them"
)


class Elements(Arguments):
    """The elements of one batch, as tensors: arguments of the loss; none, without data.

    Parameters
    ----------
    elements : dict
        Nests of tensors, by position or by name.
    by_name : bool
        Whether they are keyword arguments.
    """

    def __init__(self, elements: dict[Any, Any], by_name: bool) -> None:
        self._elements = elements
        self._by_name = by_name

    @property
    def by_key(self) -> dict[Any, Any]:
        """Nests of tensors, by position or by name."""
        return dict(self._elements)

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The tensors in it, parts of ragged and sparse ones one by one."""
        return tf.nest.flatten(self._elements, expand_composites=True)

    @property
    def examples(self) -> int:
        """The length of the first axes."""
        return int(tf.nest.flatten(self._elements)[0].shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(nbytes(tensor) for tensor in self.tensors)

    def with_tensors(self, tensors: Sequence[Any]) -> Elements:
        """Return the same with other tensors."""
        packed = tf.nest.pack_sequence_as(self._elements, tensors, expand_composites=True)
        return Elements(packed, self._by_name)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with the elements."""
        if self._by_name:
            named = {str(key): element for key, element in self._elements.items()}
            return called(function, **named)
        return called(function, *self._elements.values())

    def part(self, start: int, end: int) -> Elements:
        """Return some of the examples."""
        cut = tf.nest.map_structure(lambda leaf: leaf[start:end], self._elements)
        return Elements(cut, self._by_name)

    def taken(self, numbers: Any) -> Elements:
        """Return some of the examples, in this order."""
        cut = tf.nest.map_structure(lambda leaf: tf.gather(leaf, numbers), self._elements)
        return Elements(cut, self._by_name)

    @property
    def leaves(self) -> list[Any]:
        """The tensors in it, ragged and sparse ones whole."""
        return tf.nest.flatten(self._elements)

    def differs(self, other: Elements) -> str:
        """Tell how another batch is not of this kind; empty if it is."""
        try:
            tf.nest.assert_same_structure(self._elements, other._elements, expand_composites=False)
        except (TypeError, ValueError):
            return self._other_structure(other)
        for one, two in zip(self.tensors, other.tensors):
            if one.dtype != two.dtype:
                return f"it has {two.dtype.name} where that has {one.dtype.name}"
            if len(one.shape) != len(two.shape):
                return f"it has the shape {two.shape} where that has {one.shape}"
        return ""

    def _other_structure(self, other: Elements) -> str:
        ours, theirs = self._elements, other._elements
        if self._by_name != other._by_name or (self._by_name and set(ours) != set(theirs)):
            return f"it has {other._named()} where that has {self._named()}"
        if len(ours) != len(theirs):
            return f"it has {other._named()} where that has {self._named()}; labels may be missing"
        outlines = (tf.nest.map_structure(lambda leaf: "...", e) for e in (theirs, ours))
        return "it has the elements {} where that has {}".format(*outlines)

    def _named(self) -> str:
        """Tell what the elements are called, or how many there are."""
        if self._by_name:
            return "the entries " + ", ".join(map(repr, self._elements))
        return f"{len(self._elements)} element{'s' if len(self._elements) != 1 else ''}"


NO_DATA = Elements({}, by_name=False)


def called(function: Callable[..., Any], *elements: Any, **named: Any) -> Any:
    """Call a function; raise `InvalidDataError` if it takes other arguments."""
    try:
        return function(*elements, **named)
    except TypeError as error:
        try:
            signature = inspect.signature(getattr(function, "python_function", function))
        except (TypeError, ValueError):  # there is none of some functions not written in Python
            raise error from None
        try:
            signature.bind(*elements, **named)
        except TypeError:
            bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
            takes = signature.replace(parameters=bare, return_annotation=signature.empty)
            name = getattr(function, "__name__", type(function).__name__)
            given = "no data" if not named else f"data for {', '.join(named)}"
            if elements:
                given = f"data of {len(elements)} element{'s' if len(elements) > 1 else ''}"
            raise InvalidDataError(
                f"the function {name}{takes} is called with {given}",
                "an element of data for each of its arguments",
                "pass data=(x, y) for two, or a dict for arguments by name",
            ) from error
        raise


def checked_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what is no loss; return it, traced anew if it is a `tf.function`."""
    _check_loss(loss)
    if isinstance(loss, tf.types.experimental.PolymorphicFunction):
        # An older trace may hold operations whose second derivatives are wrong (`exact`).
        return tf.function(loss.python_function)
    return loss


def convert_batch(data: Any, name: str) -> Elements:
    """Convert a batch to tensors.

    Parameters
    ----------
    data : tuple or dict, or Elements
        Of nests of arrays and tensors; what was converted before is returned.
    name : str
        What to call it in messages.

    Raises
    ------
    InvalidDataError
        If it is of another kind, empty, or the first axes differ.
    """
    if isinstance(data, Elements):
        return data
    if isinstance(data, tf.data.Dataset) or not isinstance(data, (tuple, dict)):
        remedy = "for a single array pass (x,)" if hasattr(data, "shape") else "pass one batch"
        raise InvalidDataError(f"{name} is {type(data).__name__}", EXPECTED, remedy)
    elements = data if isinstance(data, dict) else dict(enumerate(data))
    if not tf.nest.flatten(elements):
        raise InvalidDataError(f"{name} has no elements", EXPECTED)
    batch = {key: _convert(element, f"{name}[{key!r}]") for key, element in elements.items()}
    check_first_axes(batch, name)
    return Elements(batch, isinstance(data, dict))


def explain_mixed_precision(
    error: Exception, data: Any, variable_dtypes: Callable[[], Sequence[tf.DType]]
) -> None:
    """Raise `InvalidDataError` if the loss may have failed because the data's precision differs.

    What the loss itself raised comes first: the precision is only a guess.

    Parameters
    ----------
    error : Exception
        What was raised.
    data : tuple, dict or None
        The batch.
    variable_dtypes : callable
        Tells the variables'.
    """
    if isinstance(data, Elements):
        data = data.by_key
    if isinstance(error, HvpError) or not isinstance(data, (tuple, dict)):
        return
    dtypes = variable_dtypes()
    elements = data if isinstance(data, dict) else dict(enumerate(data))
    for key, element in elements.items():
        for leaf in tf.nest.flatten(element):
            dtype = tf.as_dtype(leaf.dtype)
            if dtype.is_floating and dtype not in dtypes:
                wanted = dtypes[0].name
                reason = textwrap.shorten(line_of(error), 200, placeholder=" ...")
                raise InvalidDataError(
                    f"the loss raised {type(error).__name__}: {reason}",
                    "a loss that can be computed from the data",
                    f"look at the loss; perhaps it is because data[{key!r}] is {dtype.name} where "
                    f"the variables are {wanted}: then pass it as .astype({wanted!r})",
                ) from error


def _check_loss(loss: Any) -> None:
    expected = "a function that returns a scalar tensor"
    if isinstance(loss, str):
        raise InvalidLossError(
            f"the loss is the name {loss!r}",
            expected,
            "compile the model with it, and call from_keras(model, (x, y)); or pass "
            "lambda x, y: compute_loss(y, model(x))",
        )
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
            EXPECTED,
            "pass np.asarray(...) of it",
        )

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, tf.Variable) or isinstance(getattr(leaf, "value", None), tf.Variable):
            raise InvalidDataError(
                f"{name} is a variable, whose changes and derivatives a copy would not see",
                EXPECTED,
                "let the loss read the variable itself",
            )
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        try:
            return tf.convert_to_tensor(leaf)
        except (TypeError, ValueError) as error:
            raise InvalidDataError(
                f"{name} is {type(leaf).__name__}, of which TensorFlow makes no tensor", EXPECTED
            ) from error

    return tf.nest.map_structure(convert, element)


def check_first_axes(batch: dict[Any, Any], name: str) -> None:
    """Refuse elements that are not as many examples each."""
    lengths = {}
    for key, element in batch.items():
        for leaf in tf.nest.flatten(element):
            if len(leaf.shape) == 0:
                raise InvalidDataError(
                    f"{name}[{key!r}] is a scalar",
                    EXPECTED,
                    "batch the data, dataset.batch(n); or close over it in the loss",
                )
            lengths[f"{name}[{key!r}]"] = int(leaf.shape[0])
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InvalidDataError(
            f"the first axes differ: {shown}", "one length, the number of examples"
        )
    if 0 in lengths.values():
        raise InvalidDataError(f"{name} has no examples", "at least one")
