"""How an operation combines a weight with the data, in the form that Kronecker factors need.

Where an operation multiplies the data by a matrix `W`, `y_t = a_t W` at each position `t` of an
example, the gradient of the example in `W` is the sum of `a_t g_t^T` over positions, where `a_t` is
the input and `g_t` the gradient in the output. Grouped convolutions have several such matrices, the
groups, and so have einsums in which an axis of the weight is one of the data and of the result.

An operation that multiplies or adds entry by entry has a gradient that is summed over positions.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import tensorflow as tf

from hvp._graphs.graph import data_inputs, with_index
from hvp._graphs.weights import Use, WeightedGraph

# What a tensor passes through without a change to its entries.
PASSED = frozenset(["Reshape", "Identity", "Squeeze", "ExpandDims", "EnsureShape"])
_CONVOLUTIONS = frozenset(["Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2dNative"])
_TRANSPOSED = frozenset(["Conv2DBackpropInput", "Conv3DBackpropInputV2"])
_ADDITIONS = frozenset(["Add", "AddV2", "BiasAdd", "Sub", "BroadcastTo"])


class MatrixForm(abc.ABC):
    """An operation that multiplies the tensors `inputs` by matrices: `K` groups of shape `(I, O)`.

    Its result is the tensor `output`.
    """

    inputs: Sequence[str]
    output: str

    @abc.abstractmethod
    def rows(self, data: Sequence[tf.Tensor], examples: Any) -> tf.Tensor:
        """Return the inputs of the matrices, of shape `(K, examples, T, I)`."""

    def rows_with_ones(self, data: Sequence[tf.Tensor], examples: Any) -> tf.Tensor:
        """Return `rows` with a column of ones at the end, for the bias."""
        rows = self.rows(data, examples)
        return tf.concat([rows, tf.ones_like(rows[..., :1])], axis=-1)

    @abc.abstractmethod
    def columns(self, gradient: tf.Tensor, examples: Any) -> tf.Tensor:
        """Arrange the gradient in the result as `(K, examples, T, O)`."""

    @abc.abstractmethod
    def arrange(self, view: np.ndarray) -> np.ndarray:
        """Arrange entries of the weight as `(K, I, O)`."""

    def bias(self, entries: np.ndarray, groups: int) -> np.ndarray | None:
        """Arrange a bias as `(K, O)`, or return None unless it has one entry for each column."""
        del entries, groups
        return None


@dataclass(frozen=True)
class EinsumForm(MatrixForm):
    """A product of matrices, or an einsum.

    `data`, `weight` and `result` have a letter for each axis. Axes of one entry along which the
    weight is repeated have none, and do not count in `shape`, the sizes of the weight's axes.
    """

    inputs: Sequence[str]
    output: str
    data: str
    weight: str
    result: str
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls, inputs: Sequence[str], output: str, letters: Sequence[str], shape: Sequence[int]
    ) -> EinsumForm | None:
        """Return the form, or None if the einsum is not a product of matrices."""
        data, weight, result = letters
        kept = [
            (x, size)
            for x, size in zip(weight, shape)
            if size != 1 or not (x in data and x in result)
        ]
        weight = "".join(x for x, _ in kept)
        form = cls(inputs, output, data, weight, result, tuple(size for _, size in kept))
        unique = all(len(set(letters)) == len(letters) for letters in (data, weight, result))
        known = set(data) | set(weight)
        summed = [x for x in known if x not in result and (x in data) != (x in weight)]
        return form if unique and not summed and form.shared and set(result) <= known else None

    def rows(self, data: Sequence[tf.Tensor], examples: Any) -> tf.Tensor:
        return self._arranged(data[0], self.data, self._contracted, examples)

    def columns(self, gradient: tf.Tensor, examples: Any) -> tf.Tensor:
        return self._arranged(gradient, self.result, self._free, examples)

    def arrange(self, view: np.ndarray) -> np.ndarray:
        parts = self._groups, self._contracted, self._free
        order = [self.weight.index(letter) for part in parts for letter in part]
        sizes = dict(zip(self.weight, self.shape))
        shape = [math.prod(sizes[letter] for letter in part) for part in parts]
        return view.reshape(self.shape).transpose(order).reshape(shape)

    def bias(self, entries: np.ndarray, groups: int) -> np.ndarray | None:
        is_last = not self._groups and self.result.endswith(self._free)
        return entries.reshape(1, -1) if is_last else None

    @property
    def _groups(self) -> str:
        return "".join(x for x in self.weight if x in self.data and x in self.result)

    @property
    def _contracted(self) -> str:
        return "".join(x for x in self.weight if x in self.data and x not in self.result)

    @property
    def _free(self) -> str:
        free = [x for x in self.weight if x not in self.data and x in self.result]
        return "".join(sorted(free, key=self.result.index))

    @property
    def shared(self) -> str:
        """The axes of the data that are not axes of the weight; the first one is the examples."""
        return "".join(x for x in self.data if x in self.result and x not in self.weight)

    def _arranged(self, tensor: tf.Tensor, letters: str, last: str, examples: Any) -> tf.Tensor:
        order = [letters.index(x) for x in self._groups + self.shared + last]
        sizes = dict(zip(letters, tf.unstack(tf.shape(tensor), len(letters))))
        groups, width = (_product(sizes[x] for x in part) for part in (self._groups, last))
        if order != sorted(order):
            tensor = tf.transpose(tensor, order)
        return tf.reshape(tensor, [groups, examples, -1, width])


@dataclass(frozen=True)
class ConvolutionForm(MatrixForm):
    """A convolution of any number of axes, with strides, dilations, padding and groups.

    The window has the sizes `kernel`. The `padding` is ``"SAME"``, or the numbers of zeros before
    and after each axis. A depthwise convolution has one group for each channel of the data. Where
    the operation `is_transposed`, it is the transpose of this convolution, and windows are taken
    from the gradient.
    """

    inputs: Sequence[str]
    output: str
    kernel: tuple[int, ...]
    groups: int
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: Any
    channels_first: bool
    is_depthwise: bool = False
    is_transposed: bool = False

    def rows(self, data: Sequence[tf.Tensor], examples: Any) -> tf.Tensor:
        return self._points(data[0]) if self.is_transposed else self._windows(data[0])

    def rows_with_ones(self, data: Sequence[tf.Tensor], examples: Any) -> tf.Tensor:
        if self.groups > 1 or self.is_transposed:
            return super().rows_with_ones(data, examples)
        return self._windows(data[0], ones=True)

    def columns(self, gradient: tf.Tensor, examples: Any) -> tf.Tensor:
        return self._windows(gradient) if self.is_transposed else self._points(gradient)

    def arrange(self, view: np.ndarray) -> np.ndarray:
        *kernel, first, last = view.shape
        size = math.prod(kernel)
        if self.is_transposed:
            return view.reshape(1, size * first, last).swapaxes(1, 2)
        if self.is_depthwise:
            return view.reshape(size, first, last).swapaxes(0, 1)
        groups = view.reshape(size * first, self.groups, last // self.groups)
        return groups.swapaxes(0, 1)

    def bias(self, entries: np.ndarray, groups: int) -> np.ndarray | None:
        return None if self.is_transposed else entries.reshape(groups, -1)

    def _points(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the channels of each position, of shape `(K, N, T, channels / K)`."""
        tensor = self._channels_last(tensor)
        shape = tf.shape(tensor)
        points = tf.reshape(tensor, [shape[0], -1, self.groups, shape[-1] // self.groups])
        if self.groups == 1:
            return tf.reshape(points, [1, shape[0], -1, shape[-1]])
        return tf.transpose(points, [2, 0, 1, 3])

    def _windows(self, tensor: tf.Tensor, *, ones: bool = False) -> tf.Tensor:
        """Return the window of each position, of shape `(K, N, T, window * channels / K)`."""
        tensor = self._channels_last(tensor)
        axes = len(self.kernel)
        sizes = tf.unstack(tf.shape(tensor), axes + 2)
        if tensor.shape[1:].is_fully_defined():
            sizes = [sizes[0], *tensor.shape[1:]]
        pads, counts = [], []
        for axis in range(axes):
            before, after, count = self._extent(axis, sizes[axis + 1])
            pads.append([before, after])
            counts.append(count)
        padded = tf.pad(tensor, [[0, 0], *pads, [0, 0]])
        pieces = []
        for offset in np.ndindex(*self.kernel):
            window = [slice(None)] + [
                slice(o * d, o * d + (n - 1) * s + 1, s)
                for o, d, n, s in zip(offset, self.dilations, counts, self.strides)
            ]
            pieces.append(padded[tuple(window)])
        size, channels = len(pieces), sizes[-1] // self.groups
        if self.groups == 1:
            pieces += [tf.ones_like(pieces[0][..., :1])] if ones else []
            width = size * channels + ones
            return tf.reshape(tf.concat(pieces, axis=-1), [1, sizes[0], -1, width])
        # (N, ..., window, channels), with the channels of each group together.
        windows = tf.stack(pieces, axis=-2)
        windows = tf.reshape(windows, [sizes[0], -1, size, self.groups, channels])
        windows = tf.transpose(windows, [3, 0, 1, 2, 4])
        return tf.reshape(windows, [self.groups, sizes[0], -1, size * channels])

    def _channels_last(self, tensor: tf.Tensor) -> tf.Tensor:
        if not self.channels_first:
            return tensor
        return tf.transpose(tensor, [0, *range(2, len(self.kernel) + 2), 1])

    def _extent(self, axis: int, size: Any) -> tuple[Any, Any, Any]:
        """Return the padding before and after an axis, and the number of windows along it."""
        stride = self.strides[axis]
        reach = (self.kernel[axis] - 1) * self.dilations[axis] + 1
        if self.padding == "SAME":
            count = -(-size // stride)
            total = (count - 1) * stride + reach - size
            total = max(total, 0) if isinstance(total, int) else tf.maximum(total, 0)
            return total // 2, total - total // 2, count
        before, after = self.padding[axis]
        return before, after, (size + before + after - reach) // stride + 1


@dataclass(frozen=True)
class GatherForm(MatrixForm):
    """Rows that are looked up in a table: an embedding."""

    inputs: Sequence[str]
    output: str

    def rows(self, data: Sequence[tf.Tensor], examples: Any) -> tf.Tensor:
        """Return the indices of the rows, of shape `(1, examples, T)`."""
        return tf.reshape(tf.cast(data[0], tf.int64), [1, examples, -1])

    def columns(self, gradient: tf.Tensor, examples: Any) -> tf.Tensor:
        return tf.reshape(gradient, [1, examples, -1, tf.shape(gradient)[-1]])

    def arrange(self, view: np.ndarray) -> np.ndarray:
        return view[np.newaxis]


@dataclass(frozen=True)
class EntrywiseForm:
    """An entrywise product or sum with `sign` times a weight that enters in this `shape`."""

    inputs: Sequence[str]
    output: str
    shape: tuple[int, ...]
    sign: float

    def products(self, data: Sequence[tf.Tensor], gradient: tf.Tensor) -> tf.Tensor:
        """Return the gradient at each position, in the shape of the result."""
        return self.sign * (gradient * data[0] if data else gradient)

    def gradients(self, data: Sequence[tf.Tensor], gradient: tf.Tensor, examples: Any) -> tf.Tensor:
        """Return the gradient of each example, of shape `(examples, size)`."""
        product = self.products(data, gradient)
        rank = len(product.shape)
        shape = (1,) * (rank - len(self.shape)) + self.shape
        axes = [axis for axis in range(1, rank) if shape[axis] == 1]
        summed = tf.reduce_sum(product, axis=axes, keepdims=True) if axes else product
        # The examples may share their axis with positions.
        return tf.reduce_sum(tf.reshape(summed, [examples, -1, math.prod(self.shape)]), axis=1)


Form = Union[MatrixForm, EntrywiseForm]


def form_of(use: Use, graph: WeightedGraph) -> Form | None:
    """Return the form of a use of a weight, or None if the use has no known form."""
    node = use.node
    if use.view is None:
        return None
    inputs = [with_index(tensor) for tensor in data_inputs(node)]
    output = f"{node.name}:0"
    others = [tensor for place, tensor in enumerate(inputs) if place != use.place]
    if node.op in ("ResourceGather", "GatherV2"):
        return _gather(use, graph, inputs)
    if use.is_scaled or node.op in _ADDITIONS or node.op in ("Mul", "RealDiv"):
        return _entrywise(use, graph, others)
    if node.op in _CONVOLUTIONS | _TRANSPOSED:
        return _convolution(use, inputs, graph)
    letters = _letters(use, graph)
    if letters is None:
        return None
    return EinsumForm.of(others, output, letters, use.view.shape)


def _gather(use: Use, graph: WeightedGraph, inputs: Sequence[str]) -> Form | None:
    node = use.node
    axis = 0 if node.op == "ResourceGather" else graph.constant(inputs[2])
    is_rows = axis is not None and int(axis) == 0 and node.attr["batch_dims"].i == 0
    fits = use.view is not None and use.view.ndim == 2 and not use.is_scaled
    return GatherForm([inputs[1]], f"{node.name}:0") if is_rows and fits else None


def _entrywise(use: Use, graph: WeightedGraph, others: Sequence[str]) -> Form | None:
    node, output = use.node, f"{use.node.name}:0"
    assert use.view is not None
    shape = use.view.shape
    rank = graph.shape(output).rank
    if rank is None or rank < 1:
        return None
    if node.op == "BiasAdd" and node.attr["data_format"].s.startswith(b"NC"):
        shape = (*shape, *[1] * (rank - 2))
    # The first axis has the examples: a weight with entries for each has another meaning.
    if len(shape) > rank or (len(shape) == rank and shape[0] != 1):
        return None
    if node.op == "Mul":
        return EntrywiseForm(others, output, shape, 1.0)
    if node.op in _ADDITIONS:
        sign = -1.0 if node.op == "Sub" and use.place == 1 else 1.0
        return EntrywiseForm([], output, shape, sign)
    return None


def _letters(use: Use, graph: WeightedGraph) -> tuple[str, str, str] | None:
    """Return letters for the axes of the data, the weight and the result of a product."""
    node, flags = use.node, use.node.attr
    if node.op == "MatMul":
        left = "ki" if flags["transpose_a"].b else "ik"
        right = "jk" if flags["transpose_b"].b else "kj"
        result = "ij"
    elif node.op in ("BatchMatMulV2", "BatchMatMul"):
        ranks = [graph.shape(with_index(tensor)).rank for tensor in data_inputs(node)]
        if None in ranks:
            return None
        left, right, result = _batched(ranks, flags["adj_x"].b, flags["adj_y"].b)
    elif node.op == "Einsum":
        equation = flags["equation"].s.decode()
        if "." in equation or equation.count(",") != 1:
            return None
        terms, result = equation.split("->")
        left, right = terms.split(",")
    else:
        return None
    data, weight = (right, left) if use.place == 0 else (left, right)
    return data, weight, result


def _batched(ranks: Sequence[int], adjoint_x: bool, adjoint_y: bool) -> tuple[str, str, str]:
    batch = "abcdefgh"[: max(ranks) - 2]
    left = batch[len(batch) - ranks[0] + 2 :] + ("ki" if adjoint_x else "ik")
    right = batch[len(batch) - ranks[1] + 2 :] + ("jk" if adjoint_y else "kj")
    return left, right, batch + "ij"


def _convolution(use: Use, inputs: Sequence[str], graph: WeightedGraph) -> Form | None:
    node = use.node
    if use.place != 1 or use.view is None:
        return None
    is_transposed = node.op in _TRANSPOSED
    view, attributes = use.view, node.attr
    channels_first = attributes["data_format"].s.startswith(b"NC")
    axes = view.ndim - 2
    window = slice(2, 2 + axes) if channels_first else slice(1, 1 + axes)
    strides, dilations = (tuple(attributes[x].list.i) for x in ("strides", "dilations"))
    dilations = dilations or (1,) * (axes + 2)
    padding: Any = attributes["padding"].s.decode()
    if padding == "VALID":
        padding = [(0, 0)] * axes
    elif padding == "EXPLICIT":
        pads = list(attributes["explicit_paddings"].list.i)
        padding = [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)][window]
    data = inputs[2] if is_transposed else inputs[0]
    channels = graph.shape(data)[1 if channels_first else -1]
    is_depthwise = node.op == "DepthwiseConv2dNative"
    if channels is None:
        return None
    groups = channels if is_depthwise else channels // view.shape[-1 if is_transposed else -2]
    if is_transposed and groups != 1:
        return None
    kernel, output = tuple(view.shape[:axes]), f"{node.name}:0"
    source = graph.producer(data, PASSED)
    if source is not None and source.op == "SpaceToBatchND":
        return _dilated(source, output, kernel, groups, use, graph)
    return ConvolutionForm(
        [data],
        output,
        kernel,
        groups,
        strides[window],
        dilations[window],
        padding,
        channels_first,
        is_depthwise,
        is_transposed,
    )


def _dilated(
    before: Any,
    product: str,
    kernel: tuple[int, ...],
    groups: int,
    use: Use,
    graph: WeightedGraph,
) -> Form | None:
    """Return the form of a dilated convolution, for which TensorFlow makes examples from positions.

    Positions at regular distances are moved to the axis of the examples, and back.
    """
    after = graph.consumer(product, PASSED)
    attributes = use.node.attr
    if after is None or after.op != "BatchToSpaceND" or attributes["padding"].s != b"VALID":
        return None
    inputs = [with_index(data_inputs(node)[i]) for node in (before, after) for i in (1, 2)]
    values = [value for value in map(graph.constant, inputs) if value is not None]
    if len(values) < len(inputs) or set(attributes["strides"].list.i) != {1}:
        return None
    blocks, paddings, _, crops = values
    axes = len(blocks)
    if math.prod(kernel[: len(kernel) - axes]) != 1 or crops[:, 0].any():
        return None
    padding = [(int(b), int(a - c)) for (b, a), (_, c) in zip(paddings, crops)]
    return ConvolutionForm(
        [with_index(data_inputs(before)[0])],
        f"{after.name}:0",
        kernel[len(kernel) - axes :],
        groups,
        (1,) * axes,
        tuple(int(block) for block in blocks),
        padding,
        channels_first=False,
        is_depthwise=use.node.op == "DepthwiseConv2dNative",
    )


def _product(sizes: Any) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total
