"""One batch of data: checks, conversion to tensors, and calls of functions with it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._engines.rule import Arguments
from hvp._errors import HvpError, InvalidDataError, InvalidLossError, reason_of
from hvp._graphs.sizes import nbytes

FOR_ONE_ARRAY = "for a single array pass (x,), and with targets (x, y)"
EXPECTED = (
    "a tuple of arrays or tensors with a common first axis, such as (x, y), or a dict of them"
)


def rows_of(leaf: Any, start: int, end: int) -> Any:
    """Return some rows of an array, or of a tensor, which may be ragged or sparse."""
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:end]
    shape = leaf.dense_shape.numpy()
    first = [start, *[0] * (len(shape) - 1)]
    return tf.sparse.slice(leaf, first, [min(end, int(shape[0])) - start, *shape[1:]])


class Elements(Arguments):
    """The elements of one batch as tensors, which are the arguments of the loss.

    The elements are nests of tensors, keyed by position, or by name if they are keyword arguments.
    Without data there are none.
    """

    def __init__(self, elements: dict[Any, Any], by_name: bool) -> None:
        self._elements = elements
        self._by_name = by_name

    @property
    def by_key(self) -> dict[Any, Any]:
        """Nests of tensors, keyed by position or by name."""
        return dict(self._elements)

    def as_data(self) -> Any:
        """Return a tuple or dict of nests of tensors, in the form that users pass data."""
        return dict(self._elements) if self._by_name else tuple(self._elements.values())

    @property
    def tensors(self) -> list[tf.Tensor]:
        """All dense tensors, with ragged and sparse tensors split into their components."""
        return tf.nest.flatten(self._elements, expand_composites=True)

    @property
    def specs_of_any_number(self) -> list[tf.TensorSpec]:
        """Shapes and types of the tensors for any number of such examples."""
        return [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in self.tensors]

    @property
    def has_examples(self) -> bool:  # type: ignore[override]
        """Whether there are elements."""
        return bool(self._elements)

    @property
    def examples(self) -> int:
        """The number of examples, which is the length of the first axes; one without data."""
        leaves = tf.nest.flatten(self._elements)
        return int(leaves[0].shape[0]) if leaves else 1

    @property
    def nbytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(nbytes(tensor) for tensor in self.tensors)

    def with_tensors(self, tensors: Sequence[Any]) -> Elements:
        """Return elements of the same structure with other tensors."""
        packed = tf.nest.pack_sequence_as(self._elements, tensors, expand_composites=True)
        return Elements(packed, self._by_name)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with the elements."""
        if self._by_name:
            named = {str(key): element for key, element in self._elements.items()}
            return called(function, **named)
        return called(function, *self._elements.values())

    def first(self) -> Elements:
        """Return the first example alone."""
        return self.part(0, 1)

    def in_columns(self) -> Elements:
        """Return the same with tensors of shape `(n, 1)` for those of shape `(n,)`, if any."""

        def is_row(leaf: Any) -> bool:
            return isinstance(leaf, tf.Tensor) and leaf.shape.rank == 1

        def column(leaf: Any) -> Any:
            return leaf[:, tf.newaxis] if is_row(leaf) else leaf

        if not any(map(is_row, self.leaves)):
            return self
        return Elements(tf.nest.map_structure(column, self._elements), self._by_name)

    def part(self, start: int, end: int) -> Elements:
        """Return the examples from `start` up to `end`, exclusive."""
        elements = tf.nest.map_structure(lambda leaf: rows_of(leaf, start, end), self._elements)
        return Elements(elements, self._by_name)

    def taken(self, indices: Any) -> Elements:
        """Return the examples with these indices, in this order."""

        def taken(leaf: Any) -> Any:
            if isinstance(leaf, tf.SparseTensor):
                return tf.sparse.concat(0, [rows_of(leaf, i, i + 1) for i in map(int, indices)])
            return tf.gather(leaf, indices)

        return Elements(tf.nest.map_structure(taken, self._elements), self._by_name)

    def not_finite(self) -> list[Any]:
        """Return the positions or names of the elements with numbers that are not finite."""

        def is_bad(tensor: tf.Tensor) -> bool:
            if tensor.dtype.is_complex:
                return is_bad(tf.math.real(tensor)) or is_bad(tf.math.imag(tensor))
            return tensor.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(tensor)))

        return [
            key
            for key, element in self._elements.items()
            if any(map(is_bad, tf.nest.flatten(element, expand_composites=True)))
        ]

    @property
    def leaves(self) -> list[Any]:
        """All tensors, with ragged and sparse tensors whole."""
        return tf.nest.flatten(self._elements)

    def difference_from(self, other: Elements) -> str:
        """Describe a difference in structure, dtype or rank from another batch; empty if none.

        The phrase fits after "it has", such as "1 element instead of 2 elements".
        """
        try:
            tf.nest.assert_same_structure(other._elements, self._elements, expand_composites=False)
        except (TypeError, ValueError):
            return self._different_structure(other)
        for tensor, expected in zip(self.tensors, other.tensors):
            if tensor.dtype != expected.dtype:
                return f"the dtype {tensor.dtype.name} instead of {expected.dtype.name}"
            if len(tensor.shape) != len(expected.shape):
                return f"the shape {tensor.shape} instead of {expected.shape}"
        return ""

    def _different_structure(self, other: Elements) -> str:
        elements, expected = self._elements, other._elements
        difference = f"{self._summary()} instead of {other._summary()}"
        if self._by_name != other._by_name or (self._by_name and set(elements) != set(expected)):
            return difference
        if len(elements) != len(expected):
            return f"{difference}; labels may be missing"
        outlines = [tf.nest.map_structure(lambda leaf: "...", e) for e in (elements, expected)]
        return "elements of the structure {} instead of {}".format(*outlines)

    def _summary(self) -> str:
        """Return the names of the elements, or their number if they have no names."""
        if self._by_name:
            return "the entries " + ", ".join(map(repr, self._elements))
        return f"{len(self._elements)} element{'s' if len(self._elements) != 1 else ''}"


NO_DATA = Elements({}, by_name=False)


def called(function: Callable[..., Any], *elements: Any, **named: Any) -> Any:
    """Call a function; raise InvalidDataError if its signature does not fit the elements."""
    try:
        return function(*elements, **named)
    except TypeError as error:
        try:
            signature = inspect.signature(getattr(function, "python_function", function))
        except (TypeError, ValueError):  # some compiled functions have no signature
            raise error from None
        try:
            signature.bind(*elements, **named)
        except TypeError:
            parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
            shown = signature.replace(parameters=parameters, return_annotation=signature.empty)
            name = getattr(function, "__name__", type(function).__name__)
            arguments = "no data" if not named else f"data for {', '.join(named)}"
            if elements:
                arguments = f"data of {len(elements)} element{'s' if len(elements) > 1 else ''}"
            raise InvalidDataError(
                f"the function {name}{shown} is called with {arguments}",
                "one element of data for each argument of the function",
                "pass data=(x, y) for two arguments, or a dict for keyword arguments; several "
                "inputs of a model are a tuple, ((a, b), y)"
                if elements or named
                else "pass data=(x, y) for two arguments; a loss without data takes none, and "
                "reads the variables itself",
            ) from error
        raise


def checked_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Check a loss and return it; a `tf.function` is replaced by a new one without traces.

    InvalidLossError is raised if the loss cannot be called, is a Keras model, or is a Keras loss
    that does not call the model.
    """
    _check_loss(loss)
    return retraced(loss)


def retraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function; a `tf.function` is replaced by a new one without traces.

    Existing traces may contain operations whose second derivatives TensorFlow gets wrong.
    """
    if isinstance(function, tf.types.experimental.PolymorphicFunction):
        return tf.function(function.python_function)
    return function


def convert_batch(data: Any, name: str) -> Elements:
    """Convert a batch to tensors; `Elements` are returned unchanged.

    InvalidDataError, which calls the batch by its `name`, is raised if the batch is empty or not a
    tuple or dict, or if the first axes differ.
    """
    if isinstance(data, Elements):
        return data
    if isinstance(data, tf.data.Dataset) or not isinstance(data, (tuple, dict)):
        remedy = FOR_ONE_ARRAY if hasattr(data, "shape") else "pass one batch"
        raise InvalidDataError(f"{name} is {type(data).__name__}", EXPECTED, remedy)
    elements = data if isinstance(data, dict) else dict(enumerate(data))
    if not tf.nest.flatten(elements):
        raise InvalidDataError(f"{name} has no elements", EXPECTED)
    batch = {key: _convert(element, f"{name}[{key!r}]") for key, element in elements.items()}
    check_first_axes(batch, name)
    return Elements(batch, isinstance(data, dict))


def refuse_infinite(data: Any, name: str) -> None:
    """Raise InvalidDataError for a `tf.data.Dataset` that is known to have no end."""
    if isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise InvalidDataError(
            f"{name} is an infinite tf.data.Dataset",
            "a finite number of batches",
            "leave out repeat(), or take(n) batches",
        )


# What an error says about types.
_OF_TYPES = re.compile(r"\b(d?types?|double|half|(bfloat|float|u?int)\d*)\b")


def explain_dtypes(
    error: Exception, data: Any, variable_dtypes: Callable[[], Sequence[tf.DType]]
) -> None:
    """Raise InvalidDataError if the loss may have failed because dtypes differ.

    The message begins with the error of the loss, because the remedy is only a guess. An error that
    does not mention types is not explained.
    """
    if isinstance(error, HvpError) or not _OF_TYPES.search(str(error)):
        return
    if isinstance(data, Elements):
        data = data.by_key
    elements: Any = data if isinstance(data, dict) else {}
    if isinstance(data, tuple):
        elements = dict(enumerate(data))
    dtypes = variable_dtypes()
    precision = dtypes[0].name
    guess = ""
    for key, element in elements.items():
        for leaf in tf.nest.flatten(element):
            dtype = tf.as_dtype(leaf.dtype)
            if dtype.is_floating and dtype not in dtypes:
                guess = (
                    f"check the loss; the cause may be that data[{key!r}] is {dtype.name} while "
                    f"the variables are {precision}: if so, pass it as .astype({precision!r})"
                )
            elif dtype.is_integer and dtype.name in str(error) and not guess:
                guess = (
                    f"check the loss; the cause may be that data[{key!r}] is {dtype.name} and "
                    f"meets {precision}: if so, pass it as .astype({precision!r})"
                )
    if not guess and isinstance(error, tf.errors.OpError) and "OpKernel" not in str(error):
        guess = (
            f"check the tensors that the loss reads besides its arguments: the variables are "
            f"{precision}, and tf.cast(tensor, {precision!r}) converts a tensor"
        )
    if guess:
        reason = reason_of(error)
        raise InvalidDataError(
            f"the loss raised {type(error).__name__}: {reason}",
            "a loss that can be computed from the data",
            guess,
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


def refuse_list(element: Any, name: str) -> None:
    """Raise InvalidDataError if an element of the data is a list or tuple of numbers."""
    if isinstance(element, (list, tuple)) and element and not hasattr(element[0], "shape"):
        raise InvalidDataError(
            f"{name} is a {type(element).__name__} of {type(element[0]).__name__}",
            EXPECTED,
            "pass np.asarray(...) of it",
        )


def _convert(element: Any, name: str) -> Any:
    """Convert the leaves of one element of the data to tensors."""
    refuse_list(element, name)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, tf.Variable) or isinstance(getattr(leaf, "value", None), tf.Variable):
            raise InvalidDataError(
                f"{name} is a variable, and a copy would miss its changes and its derivatives",
                EXPECTED,
                "let the loss read the variable itself",
            )
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        try:
            return tf.convert_to_tensor(leaf)
        except (TypeError, ValueError) as error:
            raise InvalidDataError(
                f"{name} is {type(leaf).__name__}, which TensorFlow cannot convert to a tensor",
                EXPECTED,
            ) from error

    return tf.nest.map_structure(convert, element)


def check_first_axes(batch: dict[Any, Any], name: str) -> None:
    """Raise InvalidDataError unless all elements have the same, positive number of examples."""
    lengths = {}
    for key, element in batch.items():
        for leaf in tf.nest.flatten(element):
            if len(leaf.shape) == 0:
                raise InvalidDataError(
                    f"{name}[{key!r}] is a scalar",
                    EXPECTED,
                    "batch the data, dataset.batch(n); or close over it in the loss",
                )
            if leaf.shape[0] is not None:  # it is not known in a graph
                lengths[f"{name}[{key!r}]"] = int(leaf.shape[0])
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        single = name.startswith("batch")  # of a data set, whose elements may be single examples
        raise InvalidDataError(
            f"the first axes differ: {shown}",
            "one length, the number of examples",
            "if the elements of the data are single examples, batch them: dataset.batch(n)"
            if single
            else "",
        )
    if 0 in lengths.values():
        raise InvalidDataError(f"{name} has no examples", "at least one")
