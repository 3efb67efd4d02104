"""The sizes of the values in a graph, and what it costs to compute them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import kept_whole, output_dtypes
from hvp._graphs.graph import Graph, Sizes, TensorName, data_inputs
from hvp._graphs.private import SHAPES

# Values of fewer bytes are small: they take little memory, and many of them can be computed at the
# same time.
_SMALL = 2**16
# Values that together have fewer bytes are few: time is worth more than memory.
_FEW = 2**28
# Operations whose results share the memory of their first input.
VIEWS = frozenset(
    "EnsureShape ExpandDims Identity PreventGradient Reshape Squeeze StopGradient".split()
)
# Operations whose results take no memory of their own: the values of variables share the variables'
# buffers, and tensors that a function uses from outside are there anyway.
BORROWED = frozenset(["Placeholder", "ReadVariableOp"])
# Entrywise operations, which are cheap next to a matrix product or convolution.
ENTRYWISE = frozenset(
    """
    Abs Add AddN AddV2 BiasAdd Cast Cos Div DivNoNan Elu EluGrad Equal Erf Erfc Exp Expm1 Greater
    GreaterEqual Inv InvGrad LeakyRelu LeakyReluGrad Less LessEqual Log Log1p LogicalAnd LogicalNot
    LogicalOr Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pow RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad
    Sigmoid SigmoidGrad Sign Sin Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square
    SquaredDifference Sub Tanh TanhGrad Xdivy Xlog1py Xlogy ZerosLike
    """.split()
)
# Those among them that take longer than it takes to write their result to memory.
EXPENSIVE = frozenset(
    """
    Cos Elu Erf Erfc Exp Expm1 Log Log1p Pow Selu Sigmoid Sin Softplus Tanh Xdivy Xlog1py Xlogy
    """.split()
)

# Stands for the size of an axis whose size is not known.
_UNKNOWN_SIZE = 32


def nbytes(tensor: Any) -> int:
    """Return the bytes of a tensor; axes of unknown size count as small."""
    shape, dtype = tf.TensorShape(tensor.shape), tf.as_dtype(tensor.dtype)
    if shape.rank is None or not dtype.size:
        return 0
    total = dtype.size
    for size in shape:
        total *= _UNKNOWN_SIZE if size is None else size
    return int(total)


def graph_def_with_shapes(graph: tf.Graph) -> Any:
    """Return the GraphDef of a graph, with the shapes of results.

    Functions that keep their names get no shapes: TensorFlow already knows these functions, and
    refuses another definition.
    """
    graph_def = graph.as_graph_def(add_shapes=True)
    kept = kept_whole(graph_def)
    if kept:
        plain = Graph(graph.as_graph_def()).functions
        for function in graph_def.library.function:
            if function.signature.name in kept:
                function.CopyFrom(plain[function.signature.name])
    return graph_def


def take_sizes(graph_def: Any, inputs: Mapping[str, tf.TensorSpec] | None = None) -> Sizes:
    """Return the sizes of all results, and remove from the graph the shapes that TensorFlow noted.

    `inputs` are tensors that the graph uses and that none of its operations computes. A result
    without a known shape counts as large as the largest input of its operation.
    """
    sizes: Sizes = {}
    for name, spec in (inputs or {}).items():
        node, index = TensorName.of(name)
        known = sizes.setdefault(node, [])
        known += [0] * (index + 1 - len(known))
        known[index] = nbytes(spec)
    unknown = []
    for node in graph_def.node:
        shapes = shapes_of(node)
        if _is_known(shapes):
            pairs = zip(shapes, output_dtypes(node))
            sizes[node.name] = [nbytes(tf.TensorSpec(shape, dtype)) for shape, dtype in pairs]
        else:
            unknown.append(node)
        node.attr.pop(SHAPES, None)
    for node in unknown:
        taken = (size_of(tensor, sizes) for tensor in data_inputs(node))
        sizes[node.name] = [max(taken, default=0)] * len(output_dtypes(node))
    return sizes


def add_shape(graph_def: Any, name: str, shape: Sequence[int]) -> Any:
    """Add a constant that holds the sizes of a shape, and return its node."""
    node = graph_def.node.add(name=name, op="Const")
    node.attr["dtype"].type = tf.int32.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(shape, tf.int32, [len(shape)]))
    note_shapes(node, [tf.TensorShape([len(shape)]).as_proto()])
    return node


def is_small(nbytes: int) -> bool:
    """Return whether a value of this many bytes is not worth any effort."""
    return nbytes < _SMALL


def are_few(nbytes: int) -> bool:
    """Return whether values that take this many bytes together are not worth any time."""
    return nbytes < _FEW


def size_of(tensor: str, sizes: Sizes) -> int:
    """Return the bytes of a tensor; zero if unknown."""
    node, index = TensorName.of(tensor)
    known = sizes.get(node, ())
    return known[index] if index < len(known) else 0


def shapes_of(node: Any) -> list[Any]:
    """Return the shapes that TensorFlow noted for the results of a node, if it did."""
    return list(node.attr[SHAPES].list.shape) if SHAPES in node.attr else []


def shape_of(tensor: str, nodes: Mapping[str, Any]) -> tf.TensorShape:
    """Return the shape that TensorFlow noted for a tensor, which may be unknown."""
    name, place = TensorName.of(tensor)
    shapes = shapes_of(nodes[name]) if name in nodes else []
    return tf.TensorShape(shapes[place] if place < len(shapes) else None)


def note_shapes(node: Any, shapes: Sequence[Any]) -> None:
    """Note the shapes of the results of a node, as TensorFlow does."""
    if shapes:
        del node.attr[SHAPES].list.shape[:]
        node.attr[SHAPES].list.shape.extend(shapes)


def _is_known(shapes: Any) -> bool:
    """Return whether shapes are known but for one axis each, such as that of the examples."""
    return bool(shapes) and not any(
        shape.unknown_rank or sum(dim.size < 0 for dim in shape.dim) > 1 for shape in shapes
    )
