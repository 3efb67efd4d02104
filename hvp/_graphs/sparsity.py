"""Which entries of the products of a linear graph depend on which entries of its vectors.

A set of entries is a row of a sparse boolean matrix, with one row for each entry of a tensor. An
operation that moves entries is run on their numbers, which tells where each of them goes. All
others belong to groups of entries that depend on each other: a sum has a group for each entry of
its result, a product of matrices one for each row or column. What is not known is one group.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import tensorflow as tf

from hvp._errors import TooLargeError
from hvp._graphs.graph import Graph, data_inputs, in_topological_order, with_index
from hvp._runtime.context import assigned

# Operations whose results are entries of their arguments, or zeros.
_MOVES = frozenset(
    """
    BatchToSpaceND BroadcastTo ConcatV2 ExpandDims GatherNd GatherV2 MatrixBandPart MatrixDiagPartV3
    MatrixDiagV3 MirrorPad Pack Pad Reshape ReverseSequence ReverseV2 Roll Slice SpaceToBatchND
    Split SplitV Squeeze StridedSlice StridedSliceGrad Tile Transpose Unpack
    """.split()
)
_ENTRYWISE = frozenset(
    """
    Add AddN AddV2 Cast CheckNumerics DivNoNan EluGrad Identity LeakyReluGrad Mul MulNoNan Neg
    PreventGradient RealDiv ReciprocalGrad InvGrad Relu6Grad ReluGrad RsqrtGrad Select SelectV2
    SeluGrad SigmoidGrad Snapshot SoftplusGrad SoftsignGrad SqrtGrad StopGradient Sub TanhGrad
    """.split()
)
_SUMS = frozenset(["Mean", "Sum"])
_PRODUCTS = frozenset(["BatchMatMul", "BatchMatMulV2", "MatMul"])
_SEGMENTS = frozenset(["SegmentSum", "UnsortedSegmentSum"])
_WITHOUT_ENTRIES = frozenset(["OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"])
# Patterns have at most so many entries.
_most_entries = contextvars.ContextVar("hvp_most_entries", default=2**27)


def patterns_of(entries: int) -> contextlib.AbstractContextManager[None]:
    """Give up patterns in this context that have more than so many entries on the way."""
    return assigned(_most_entries, min(entries, _most_entries.get()))


class Facts(NamedTuple):
    """What is known of an operation on entries of the vectors.

    `names` are those of its inputs and results in the graph; `attributes` are its own. `shapes` and
    `results` are the shapes of both. `integers` are the values of inputs that are integers, by
    place. `moved` are the results of a move of the numbers of all entries, counted from one.
    """

    kind: str
    names: tuple[list[str], list[str]]
    attributes: Any
    shapes: list[tuple[int, ...]]
    results: list[tuple[int, ...]]
    integers: dict[int, np.ndarray]
    moved: list[np.ndarray]


def pattern_of(
    graph: Graph,
    vectors: Mapping[str, tf.TensorSpec],
    known: Mapping[str, tf.Tensor],
    results: Sequence[str],
) -> list[Any]:
    """Return the patterns of tensors, each a sparse matrix of shape `(entries, n)`, or None.

    The graph is linear in the `vectors`, whose entries together are the columns. `known` are its
    other inputs. None stands for a tensor that depends on nothing. TooLargeError is raised for
    patterns that have no zeros to speak of.
    """
    sets: dict[str, Any] = {}
    total, first = sum(math.prod(spec.shape) for spec in vectors.values()), 0
    for name, spec in vectors.items():
        size = math.prod(spec.shape)
        ones = np.ones(size, bool), (np.arange(size), np.arange(first, first + size))
        sets[name], first = scipy.sparse.csr_array(ones, shape=(size, total)), first + size
    for facts in _facts(graph, vectors, known):
        given = {i: sets[name] for i, name in enumerate(facts.names[0]) if name in sets}
        for place, name in enumerate(facts.names[1]):
            if facts.kind in _MOVES:
                sets[name] = _gathered(facts, given, facts.moved[place])
            else:
                sets[name] = _united(facts, given, facts.results[place])
    return [sets.get(name) for name in results]


def _facts(
    graph: Graph, vectors: Mapping[str, tf.TensorSpec], known: Mapping[str, tf.Tensor]
) -> list[Facts]:
    """Run the graph once, and return what it tells of operations on entries of the vectors."""
    order = in_topological_order(graph.nodes)
    kept: list[tuple[Any, tuple[list[str], list[str]]]] = []

    def run(given: dict[str, tf.Tensor]) -> list[Any]:
        made = graph.imported(given, [f"{node.name}:0" for node in order])
        moving, found = set(vectors), []
        for node, tensor in zip(order, made):
            operation, names = tensor.op, [with_index(name) for name in data_inputs(node)]
            places = [i for i, name in enumerate(names) if name in moving]
            smooth = [i for i, t in enumerate(operation.outputs) if _has_entries(t)]
            if not places or not smooth or node.op in _WITHOUT_ENTRIES:
                continue
            results = [f"{node.name}:{i}" for i in smooth]
            moving.update(results)
            kept.append((operation, (names, results)))
            found.append(
                (
                    [_shape(t) for t in operation.inputs],
                    [_shape(operation.outputs[i]) for i in smooth],
                    {
                        str(i): t
                        for i, t in enumerate(operation.inputs)
                        if t.dtype.is_integer or t.dtype.is_bool
                    },
                    _moved(operation, places) if node.op in _MOVES else _patches(operation, places),
                )
            )
        return found

    zeros = {name: tf.zeros(spec.shape, spec.dtype) for name, spec in vectors.items()}
    found = tf.function(functools.partial(run), autograph=False)({**zeros, **known})
    facts = []
    for (operation, names), parts in zip(kept, found):
        shapes, results, integers, moved = tf.nest.map_structure(lambda t: t.numpy(), parts)
        facts.append(
            Facts(
                operation.type,
                names,
                operation.node_def.attr,
                [tuple(map(int, shape)) for shape in shapes],
                [tuple(map(int, shape)) for shape in results],
                {int(place): value for place, value in integers.items()},
                moved,
            )
        )
    return facts


def _has_entries(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant


def _shape(tensor: tf.Tensor) -> tf.Tensor:
    """Return the shape of a tensor; a list of tensors, or a handle, counts as one entry."""
    if tensor.dtype in (tf.variant, tf.resource):
        return tf.zeros([0], tf.int32)
    return tf.shape(tensor)


def _moved(operation: tf.Operation, places: Sequence[int]) -> list[tf.Tensor]:
    """Run an operation on the numbers of entries; other entries are zero.

    The numbers are in float64, for which TensorFlow has kernels of all operations that move
    entries, and which is exact.
    """
    first, inputs = tf.constant(1.0, tf.float64), []
    dtype = operation.inputs[places[0]].dtype
    for place, tensor in enumerate(operation.inputs):
        if place in places:
            size = tf.cast(tf.size(tensor), tf.float64)
            inputs.append(tf.reshape(tf.range(first, first + size), tf.shape(tensor)))
            first += size
        elif _has_entries(tensor):
            inputs.append(tf.zeros(tf.shape(tensor), tf.float64))
        else:
            inputs.append(tensor)
    known = {attribute.name: attribute.type for attribute in operation.op_def.attr}
    attributes = {k: v for k, v in operation.node_def.attr.items() if k in known}
    for name, kind in known.items():
        if kind == "type" and attributes[name].type == dtype.as_datatype_enum:
            attributes[name] = type(attributes[name])(type=tf.float64.as_datatype_enum)
    dtypes = [tf.float64 if _has_entries(t) else t.dtype for t in operation.outputs]
    graph = tf.compat.v1.get_default_graph()
    made = graph.create_op(operation.type, inputs, dtypes, attrs=attributes)
    return list(made.outputs)


def _patches(operation: tf.Operation, places: Sequence[int]) -> list[tf.Tensor]:
    """Return, for each position of a convolution, the numbers of the entries in its window."""
    place = {"Conv2D": 0, "Conv2DBackpropInput": 2}.get(operation.type)
    if place is None or list(places) != [place]:
        return []
    if operation.get_attr("data_format") != b"NHWC" or operation.get_attr("padding") == b"EXPLICIT":
        return []
    image = operation.inputs[0] if place == 0 else operation.outputs[0]
    height, width = operation.inputs[1].shape[:2]
    if height is None or width is None:
        return []
    size = tf.cast(tf.size(image), tf.float64)
    numbers = tf.reshape(tf.range(tf.ones([], tf.float64), 1 + size), tf.shape(image))
    return [
        tf.image.extract_patches(
            numbers,
            [1, height, width, 1],
            operation.get_attr("strides"),
            operation.get_attr("dilations"),
            operation.get_attr("padding").decode(),
        )
    ]


def _gathered(facts: Facts, given: Mapping[int, Any], numbers: np.ndarray) -> Any:
    """Return the sets of entries that are moved, by the numbers that they have now."""
    [total] = {pattern.shape[1] for pattern in given.values()}
    nothing = scipy.sparse.csr_array((1, total), dtype=bool)
    stacked = scipy.sparse.vstack([nothing, *given.values()], format="csr")
    return _rows(facts, stacked, numbers.astype(np.int64).ravel())


def _united(facts: Facts, given: Mapping[int, Any], shape: tuple[int, ...]) -> Any:
    """Return the sets of results, united over the groups of the entries that they depend on."""
    united = None
    for place, pattern in given.items():
        pairs = _pairs(facts, place, shape)
        if pairs is not None:
            ones = np.ones(len(pairs[0]), bool)
            member = scipy.sparse.csr_array((ones, pairs), (math.prod(shape), pattern.shape[0]))
            united = member @ pattern if united is None else united + member @ pattern
            continue
        groups, of_results = _groups(facts, place, shape)
        count = int(max(groups.max(initial=-1), of_results.max(initial=-1))) + 1
        inside = groups.ravel() >= 0
        ones = np.ones(int(inside.sum()), bool)
        pairs = groups.ravel()[inside], np.flatnonzero(inside)
        member = scipy.sparse.csr_array((ones, pairs), shape=(count, pattern.shape[0]))
        own = _rows(facts, member @ pattern, of_results.ravel())
        united = own if united is None else united + own
    return united


def _pairs(
    facts: Facts, place: int, result: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return which entries of a result depend on which ones of an input, as pairs of numbers.

    Return None for operations whose entries depend on each other in groups.
    """
    shape = facts.shapes[place]
    if facts.kind == "SparseTensorDenseMatMul" and place == 3:
        rows, columns = facts.integers[0].T[:: -1 if facts.attributes["adjoint_a"].b else 1]
        adjoint = facts.attributes["adjoint_b"].b
        given = _numbers(shape).T if adjoint else _numbers(shape)
        return _numbers(result)[rows].ravel(), given[columns].ravel()
    if facts.kind.startswith("Conv2D") and facts.moved:
        # Each position depends on its window, whatever the channels.
        windows = facts.moved[0].astype(np.int64)
        positions = math.prod(windows.shape[:-1])
        of_window = np.repeat(np.arange(positions), windows.shape[-1])
        inside = windows.ravel() > 0
        pairs = of_window[inside], windows.ravel()[inside] - 1
        channels = (result if facts.kind == "Conv2D" else shape)[-1]
        of_channels = pairs[0].reshape(-1, 1) * channels + np.arange(channels)
        each = of_channels.ravel(), np.repeat(pairs[1], channels)
        return each if facts.kind == "Conv2D" else each[::-1]
    return None


def _rows(facts: Facts, pattern: Any, numbers: np.ndarray) -> Any:
    """Return rows of a pattern, unless they have too many entries."""
    count = int(np.diff(pattern.indptr)[numbers].sum())
    if count > _most_entries.get():
        raise TooLargeError(
            f"the pattern has more than {_most_entries.get()} entries on the way, at the operation "
            f"{facts.kind} ({facts.names[1][0]})",
            "a matrix most of whose entries are zero, made by operations that are followed: "
            "slices, gathers, sums, products of entries and of matrices",
            "write it with slices, or pass pattern=..., or use products",
        )
    return pattern[numbers]


def _groups(facts: Facts, place: int, result: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the groups of the entries of an input, and those that results depend on."""
    shape, kind = facts.shapes[place], facts.kind
    numbers, of_result = _numbers(shape), _numbers(result)
    if kind in _ENTRYWISE or (kind == "BiasAdd" and _is_last(facts)):
        return numbers, np.broadcast_to(numbers, result)
    if kind in _SUMS:
        kept = list(shape)
        for axis in np.ravel(facts.integers[1]):
            kept[axis] = 1
        return np.broadcast_to(of_result.reshape(kept), shape), of_result
    if kind == "BiasAddGrad" and _is_last(facts):
        return np.broadcast_to(of_result, shape), of_result
    if kind in _PRODUCTS:
        name = (("transpose_a", "transpose_b") if kind == "MatMul" else ("adj_x", "adj_y"))[place]
        summed = -2 if (place == 0) == facts.attributes[name].b else -1
        kept = list(shape)
        kept[summed] = 1
        ids = _numbers(kept)
        free = np.expand_dims(np.squeeze(ids, summed), -1 if place == 0 else -2)
        return np.broadcast_to(ids, shape), np.broadcast_to(free, result)
    if kind in _SEGMENTS and place == 0:
        ids, rest = facts.integers[1], math.prod(result[1:])
        groups = ids.reshape(-1, 1) * rest + np.arange(rest)
        return np.where(ids.reshape(-1, 1) >= 0, groups, -1), of_result
    if kind == "ScatterNd" and place == 1:
        indices = facts.integers[0]
        depth = indices.shape[-1]
        places = np.ravel_multi_index(tuple(np.moveaxis(indices, -1, 0)), result[:depth])
        rest = math.prod(result[depth:])
        return places.reshape(-1, 1) * rest + np.arange(rest), of_result
    return np.zeros(shape, np.int64), np.zeros(result, np.int64)


def _is_last(facts: Facts) -> bool:
    """Return whether channels are the last axis."""
    return facts.attributes["data_format"].s != b"NCHW"


def _numbers(shape: Sequence[int]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)
