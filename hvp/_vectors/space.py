"""Conversion between nests of tensors and flat vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import InvalidVectorError
from hvp._vectors.packing import reshaped
from hvp._vectors.variables import VariableNest

# NumPy or scipy.sparse do not support these types, so flat vectors use the next wider one.
_WIDENED = {tf.float16: tf.float32, tf.bfloat16: tf.float32}

# Two vectors agree if each part differs by at most this relative error, plus this number of
# rounding errors of the whole vector. Where TensorFlow's vectorization is wrong, results differ by
# 0.1 or more.
_RELATIVE_ERROR, _ROUNDING_ERRORS = 1e-2, 1e3

# TensorFlow ends the process where a tensor does not begin at a multiple of so many bytes.
_ALIGNED = 64


def rounding_of(dtype: tf.DType) -> float:
    """Return the distance from one to the next larger number of a floating-point type."""
    # NumPy does not know bfloat16.
    return 2.0**-7 if dtype == tf.bfloat16 else float(np.finfo(dtype.as_numpy_dtype).eps)


class Space:
    """The space of the vectors that a linear map takes or returns.

    A vector is a nest of tensors, its parts, or one flat tensor of `size` entries. Parts are
    numbered in `tf.nest` order, and the leaves of `structure` can be anything. The `dtype` of a
    flat vector is the widest of its parts, at least float32. With `is_part`, vectors are some of
    the parts of others.
    """

    def __init__(
        self,
        structure: Any,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[tf.DType],
        is_part: bool = False,
    ) -> None:
        self.structure = tf.nest.map_structure(lambda _: 0, structure)
        self.names = tuple(names)
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes)
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]
        self.size = sum(self.sizes)
        widened = {_WIDENED.get(dtype, dtype) for dtype in self.dtypes}
        self.dtype = max(widened, key=lambda dtype: dtype.size, default=tf.float32)
        # The lists are converted to tensors once. To convert them for each product would cost time,
        # and TensorFlow 2.16 would leak a few hundred bytes each time.
        self._eager_shapes = [tf.constant(shape, tf.int32, [len(shape)]) for shape in self.shapes]
        self._eager_sizes = tf.constant(self.sizes)
        self._flat = tf.constant([-1])
        self._is_part = is_part

    @classmethod
    def of_variables(cls, nest: VariableNest) -> Space:
        """Return the space of vectors that are shaped like variables."""
        return cls(nest.structure, nest.names, nest.shapes, nest.dtypes)

    @classmethod
    def of_tensors(cls, tensors: Sequence[Any]) -> Space | None:
        """Return the space of vectors shaped like tensors or specs; None if a shape is unknown."""
        shapes = [tf.TensorShape(tensor.shape) for tensor in tensors]
        if not all(shape.is_fully_defined() for shape in shapes):
            return None
        names = [f"output {index}" for index in range(len(shapes))]
        dimensions = [shape.as_list() for shape in shapes]
        return cls([0] * len(shapes), names, dimensions, [tensor.dtype for tensor in tensors])

    def subspace(self, places: Sequence[int]) -> Space:
        """Return the space of some of the parts, in which one part alone is a tensor."""
        structure = 0 if len(places) == 1 else [0] * len(places)
        of = [(self.names[i], self.shapes[i], self.dtypes[i]) for i in places]
        names, shapes, dtypes = zip(*of)
        return Space(structure, names, shapes, dtypes, is_part=True)

    @property
    def paths(self) -> list[str]:
        """The names of the parts, without the number that TensorFlow adds to those of variables."""
        return [name.partition(":")[0] for name in self.names]

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The shapes and types of the parts."""
        return [tf.TensorSpec(shape, dtype) for shape, dtype in zip(self.shapes, self.dtypes)]

    @property
    def flat_spec(self) -> tf.TensorSpec:
        """The shape and type of a flat vector."""
        return tf.TensorSpec([self.size], self.dtype)

    def with_zeros(self, parts: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
        """Replace each None by zeros."""
        specs = zip(parts, self.shapes, self.dtypes)
        return [tf.zeros(shape, dtype) if p is None else p for p, shape, dtype in specs]

    def join(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Concatenate parts into a flat vector of shape `(n,)`, cast to its dtype.

        Parts with one more axis in front, of length `k`, give the shape `(k, n)`.
        """
        is_block = len(parts[0].shape) > len(self.shapes[0])
        flat_shape = self._flat if tf.executing_eagerly() else tf.constant([-1])
        flat = []
        for part, size in zip(parts, self.sizes):
            shape = [tf.shape(part)[0], size] if is_block else flat_shape
            flat.append(reshaped(tf.cast(part, self.dtype), shape, rank=1 + is_block))
        return flat[0] if len(flat) == 1 else tf.concat(flat, axis=-1)

    def parts_of(self, vector: Any) -> list[tf.Tensor]:
        """Return the parts of a flat vector, or of one in parts."""
        return self.split(vector) if tf.is_tensor(vector) else list(vector)

    def split(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """Split a flat vector into parts with the shapes and dtypes of the variables.

        From shape `(k, n)`, the parts have one more axis in front, of length `k`.
        """
        eager, count = tf.executing_eagerly(), len(self.sizes)
        sizes = self._eager_sizes if eager else self.sizes
        pieces = [flat] if count == 1 else tf.split(flat, sizes, axis=-1, num=count)
        if len(flat.shape) == 2:
            shapes: Any = [[tf.shape(flat)[0], *shape] for shape in self.shapes]
        else:
            shapes = self._eager_shapes if eager else self.shapes
        return [
            tf.cast(reshaped(piece, shape, len(shape)), dtype)
            for piece, shape, dtype in zip(pieces, shapes, self.dtypes)
        ]

    def parts_of_array(self, flat: np.ndarray) -> list[tf.Tensor]:
        """Copy a flat array, once, to parts with the shapes and dtypes of the variables.

        `tf.constant` copies an array twice, and keeps one of the copies until it copies another
        array.
        """
        places = np.cumsum([0, *(-(-size * flat.itemsize // _ALIGNED) for size in self.sizes)])
        memory = np.empty((places[-1] + 1) * _ALIGNED, np.uint8)
        memory = memory[-memory.ctypes.data % _ALIGNED :]
        parts, end = [], 0
        for place, shape, size, dtype in zip(places, self.shapes, self.sizes, self.dtypes):
            first = place * _ALIGNED
            piece = memory[first : first + size * flat.itemsize].view(flat.dtype).reshape(shape)
            piece[...] = flat[end : end + size].reshape(shape)
            end += size
            tensor = tf.experimental.dlpack.from_dlpack(piece.__dlpack__()) if size else piece
            parts.append(tf.cast(tensor, dtype))
        return parts

    def array_of_parts(self, parts: list[tf.Tensor]) -> np.ndarray:
        """Copy parts to a flat array, and remove each from the list once it is copied."""
        flat = np.empty(self.size, self.dtype.as_numpy_dtype)
        end = self.size
        while parts:
            part = parts.pop()
            flat[end - self.sizes[len(parts)] : end] = tf.reshape(part, [-1]).numpy()
            end -= self.sizes[len(parts)]
        return flat

    def parts_of_nest(self, nest: Any, what: str = "v") -> list[Any]:
        """Flatten a nest, and check its structure and the shape and dtype of each part.

        In a subspace, the parts may be in a list or tuple, and a single part may also stand by
        itself.
        """
        if self._is_part and isinstance(nest, (list, tuple)) and len(nest) == len(self.sizes):
            nest = tf.nest.pack_sequence_as(self.structure, list(nest))
        try:
            tf.nest.assert_same_structure(self.structure, nest)
        except (ValueError, TypeError) as error:
            raise InvalidVectorError(
                f"{what} has the structure {outline(nest)}",
                f"the structure of the variables, {outline(self.structure)}",
            ) from error
        parts = [as_known(part) for part in tf.nest.flatten(nest)]
        for part, shape, name in zip(parts, self.shapes, self.names):
            check_numeric(part, what)
            # In a graph a size may be unknown until the graph runs.
            if not tf.TensorShape(part.shape).is_compatible_with(shape):
                raise InvalidVectorError(
                    f"the part of {what} for the variable {name!r} has shape {_shape(part)}",
                    f"the variable's shape {shape}",
                )
        return parts

    def is_flat(self, v: Any) -> bool:
        """Return whether `v` is a flat vector, which is then checked, and not a nest."""
        v = as_known(v)
        if not isinstance(v, (tf.Tensor, np.ndarray, tf.Variable)):
            return False
        check_numeric(v, "v")
        if not tf.nest.is_nested(self.structure):  # with one variable, a nest is also an array
            shape, dtype = self.shapes[0], self.dtypes[0]
            if v.shape == shape and (len(shape) != 1 or tf.as_dtype(v.dtype) == dtype):
                return False
        self.check_flat(v)
        return True

    def vector_of(self, v: Any) -> Any:
        """Return a vector as tensors of the right types: a flat one, or a list of parts."""
        if self.is_flat(v):
            return _of_shape(as_tensor(v, self.dtype), [self.size])
        given = zip(self.parts_of_nest(v), self.dtypes, self.shapes)
        return [_of_shape(as_tensor(part, dtype), shape) for part, dtype, shape in given]

    def check_flat(self, v: Any) -> None:
        """Raise `InvalidVectorError` if a flat vector is known to have another shape."""
        if not tf.TensorShape(v.shape).is_compatible_with([self.size]):
            raise InvalidVectorError(
                f"a flat vector of shape {tuple(v.shape)} was given",
                f"shape ({self.size},), or a nest like the variables",
            )

    def agree(self, vectors: tf.Tensor, reference: tf.Tensor, norm: tf.Tensor) -> bool:
        """Return whether two vectors, or two blocks of rows, agree up to rounding errors.

        The parts of each variable are compared separately, so that small parts count too. Rounding
        errors are relative to `norm`.
        """
        rounding = _ROUNDING_ERRORS * np.finfo(self.dtype.as_numpy_dtype).eps * norm
        parts = (tf.split(flat, self.sizes, -1) for flat in (vectors, reference))
        return all(
            bool(tf.norm(part - exact) <= _RELATIVE_ERROR * tf.norm(exact) + rounding)
            for part, exact in zip(*parts)
        )

    def nest_of_parts(self, parts: Sequence[Any]) -> Any:
        """Pack parts, in order, into the structure of the variables."""
        return tf.nest.pack_sequence_as(self.structure, parts)


def as_known(array: Any) -> Any:
    """Convert foreign arrays, Keras variables and floats to types that TensorFlow knows.

    Anything else is returned unchanged.
    """
    if isinstance(array, (tf.Tensor, np.ndarray, tf.Variable)):
        return array
    if isinstance(getattr(array, "value", None), tf.Variable):
        return array.value
    is_array = hasattr(array, "__array__") and hasattr(array, "shape")
    return np.asarray(array) if is_array or isinstance(array, float) else array


def as_tensor(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Convert an array to a tensor of a dtype."""
    # `tf.cast` returns a variable unchanged if it has the dtype already.
    return tf.convert_to_tensor(tf.cast(as_known(value), dtype))


def _of_shape(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Check a shape that is not fully known before the graph runs."""
    return tensor if tensor.shape.is_fully_defined() else tf.ensure_shape(tensor, shape)


def _shape(array: Any) -> str:
    shape = tf.TensorShape(array.shape)
    return "unknown" if shape.rank is None else str(tuple(shape))


def outline(nest: Any) -> str:
    """Return the structure of a nest as text, with a dot for each leaf."""
    text = str(tf.nest.map_structure(lambda _: ".", nest)).replace("'.'", ".")
    return text if len(text) <= 200 else text[:197] + "..."


def check_numeric(array: Any, what: str) -> None:
    """Raise `InvalidVectorError` unless a dense tensor or array holds real numbers or booleans."""
    try:
        if isinstance(array, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
            raise TypeError(type(array))
        dtype = tf.as_dtype(array.dtype)
    except (AttributeError, TypeError) as error:
        kind = getattr(array, "dtype", type(array).__name__)
        raise InvalidVectorError(f"{what} is of type {kind}", "real numbers") from error
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        remedy = "multiply its real and imaginary parts separately" if dtype.is_complex else ""
        raise InvalidVectorError(f"{what} is of type {dtype.name}", "real numbers", remedy)
