"""Operations whose derivative TensorFlow drops in silence or does not have.

TensorFlow answers None both where a derivative is zero and where nobody wrote it down, and a
tape leaves such a term out of a sum without a word. The table below lists operations whose
derivative is *not* zero but is registered as missing, or not registered at all; most of them
are themselves gradients of common operations, so they are met at the second derivative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hvp._errors import SecondDerivativeError
from hvp._linearize.dataflow import Dataflow, Edge, Vertex, layer_of


@dataclass(frozen=True)
class MissingDerivative:
    """An operation TensorFlow cannot differentiate although its derivative is not zero.

    Attributes
    ----------
    inputs : tuple of int
        The inputs whose derivative is missing; of the others it truly is zero.
    remedy : str
        What to use in its place.
    """

    inputs: tuple[int, ...]
    remedy: str


_RESIZE = (
    "resize with products by fixed interpolation matrices (tf.einsum), which has derivatives "
    "of every order"
)
_PYTHON = "write it with TensorFlow operations, or give it a tf.custom_gradient made of them"
_CUDNN = "build the layer with use_cudnn=False"

MISSING_DERIVATIVES = {
    # Registered as not differentiable: a tape answers None and says nothing.
    "ResizeBilinearGrad": MissingDerivative((0,), _RESIZE),
    "HSVToRGB": MissingDerivative((0,), "write the conversion with TensorFlow arithmetic"),
    "ExtractGlimpse": MissingDerivative((0,), "use slicing or tf.gather"),
    "DrawBoundingBoxes": MissingDerivative((0,), "leave drawing out of the loss"),
    "FakeQuantWithMinMaxArgsGradient": MissingDerivative((0,), "leave fake quantization out"),
    "FakeQuantWithMinMaxVarsGradient": MissingDerivative((0,), "leave fake quantization out"),
    "FakeQuantWithMinMaxVarsPerChannelGradient": MissingDerivative(
        (0,), "leave fake quantization out"
    ),
    "RandomShuffle": MissingDerivative((0,), "shuffle indices and use tf.gather"),
    "RandomCrop": MissingDerivative((0,), "use slicing at random offsets"),
    "LinSpace": MissingDerivative((0, 1), "start + (stop - start) * a constant tf.linspace(0, 1)"),
    "OneHot": MissingDerivative((2, 3), "off + (on - off) * tf.one_hot(indices, depth)"),
    "PyFunc": MissingDerivative((), _PYTHON),
    "PyFuncStateless": MissingDerivative((), _PYTHON),
    # Registered, but good for one first derivative: the second is None, in silence.
    "EagerPyFunc": MissingDerivative((), _PYTHON),
    # Not registered: a tape raises LookupError when it gets there, without naming the layer.
    "ResizeNearestNeighborGrad": MissingDerivative((0,), "use tf.repeat along both axes"),
    "ResizeBicubicGrad": MissingDerivative((0,), _RESIZE),
    "ScaleAndTranslateGrad": MissingDerivative((0,), _RESIZE),
    "LRNGrad": MissingDerivative((0, 1, 2), "write the normalization with tf.nn.avg_pool"),
    "SoftsignGrad": MissingDerivative((0, 1), "write x / (1 + tf.abs(x))"),
    "CropAndResizeGradImage": MissingDerivative((0,), _RESIZE),
    "CropAndResizeGradBoxes": MissingDerivative((0, 1), _RESIZE),
    "Dilation2DBackpropInput": MissingDerivative((2,), "use tf.nn.max_pool2d"),
    "Dilation2DBackpropFilter": MissingDerivative((2,), "use tf.nn.max_pool2d"),
    "FractionalAvgPoolGrad": MissingDerivative((1,), "use tf.nn.avg_pool2d"),
    "FractionalMaxPoolGrad": MissingDerivative((2,), "use tf.nn.max_pool2d"),
    "CudnnRNNBackprop": MissingDerivative((), _CUDNN),
    "CudnnRNNBackpropV2": MissingDerivative((), _CUDNN),
    "CudnnRNNBackpropV3": MissingDerivative((), _CUDNN),
}

# Not an operation, but a pattern of several: see `_moments_differentiated_twice`.
_MOMENTS = "tf.nn.moments"
_REMEDIES = {kind: missing.remedy for kind, missing in MISSING_DERIVATIVES.items()}
_REMEDIES[_MOMENTS] = (
    "call tf.nn.moments by that name, and in a tf.function that has not been traced yet (pass "
    "its python_function)"
)

# Through these no derivative flows, and truly none: the outputs do not move with the inputs'
# values, or only by jumps, or the caller asked for it to stop.
CONSTANT_OPERATIONS = frozenset(
    [
        "ArgMax",
        "ArgMin",
        "BroadcastGradientArgs",
        "Bucketize",
        "Ceil",
        "Equal",
        "Floor",
        "Greater",
        "GreaterEqual",
        "InTopK",
        "InTopKV2",
        "IsFinite",
        "IsInf",
        "IsNan",
        "Less",
        "LessEqual",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Multinomial",
        "NotEqual",
        "OnesLike",
        "Rank",
        "Rint",
        "Round",
        "Shape",
        "ShapeN",
        "Sign",
        "Size",
        "StatelessMultinomial",
        "StopGradient",
        "TensorListElementShape",
        "TensorListLength",
        "VariableShape",
        "ZerosLike",
    ]
)


def find_missing_derivatives(
    flow: Dataflow, sources: Iterable[Vertex], targets: Iterable[Vertex]
) -> list[tuple[str, str]]:
    """List the operations between sources and targets that TensorFlow cannot differentiate.

    Parameters
    ----------
    flow : Dataflow
        Of the traced function whose derivative is wanted.
    sources : iterable of Vertex
        Where the variables enter.
    targets : iterable of Vertex
        The function's results.

    Returns
    -------
    list of (str, str)
        The operations' names and types.
    """

    def passes(edge: Edge) -> bool:
        kind = flow.types.get(edge.target)
        return kind not in CONSTANT_OPERATIONS and flow.differentiable(edge)

    depends = flow.reachable(sources, passes=passes)
    matters = flow.reachable(targets, passes=passes, backward=True)
    found = []
    for vertex in depends & matters:
        kind = flow.types.get(vertex, "")
        if kind not in MISSING_DERIVATIVES:
            continue
        inputs = MISSING_DERIVATIVES[kind].inputs
        entering = [edge for edge in flow.incoming[vertex] if edge.source in depends]
        if any(not inputs or edge.input_index in inputs for edge in entering):
            found.append((flow.names[vertex], kind))
    found += _moments_differentiated_twice(flow, depends, matters)
    return sorted(set(found))


def _moments_differentiated_twice(
    flow: Dataflow, depends: set[Vertex], matters: set[Vertex]
) -> list[tuple[str, str]]:
    """Find variances about `stop_gradient(mean)` whose gradient is among the results.

    The function `mean((x - stop_gradient(mean(x)))**2)` may be differentiated once, not twice (see
    the module `moments`). It was differentiated already where the stopped mean is used for
    anything that matters besides the variance.
    """
    found = []
    for vertex, kind in flow.types.items():
        if kind != "StopGradient":
            continue
        made_from = flow.producers(vertex)
        if not any(flow.types.get(v) == "Mean" and v in depends for v in made_from):
            continue
        users = flow.users(vertex)
        variances = {v for v in users if flow.types[v] == "SquaredDifference"}
        if variances and (users - variances) & matters:
            found.append((flow.names[vertex], _MOMENTS))
    return found


def refuse_missing_derivatives(found: list[tuple[str, str]]) -> None:
    """Raise `SecondDerivativeError`, naming each operation and what to use in its place."""
    if not found:
        return
    places = ", ".join(f"{kind} at {layer_of(name)!r}" for name, kind in found[:5])
    if len(found) > 5:
        places += f", and {len(found) - 5} more"
    remedies = dict.fromkeys(_REMEDIES[kind] for _, kind in found)
    raise SecondDerivativeError(
        f"TensorFlow has no derivative, or a wrong one, of {places}; a term that is not zero would "
        "be left out, and the product would be wrong",
        "operations that can be differentiated",
        "; ".join(remedies),
    )
