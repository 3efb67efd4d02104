"""The table of operations whose derivative TensorFlow drops, does not have, or has wrong.

Most are themselves gradients of common operations, so they are met at the second derivative.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MissingDerivative:
    """An operation TensorFlow cannot differentiate although its derivative is not zero.

    Attributes
    ----------
    inputs : tuple of int
        The inputs whose derivative is missing; of the others it is there, or truly zero. All
        inputs, if empty.
    remedy : str
        What to use in its place.
    """

    inputs: tuple[int, ...]
    remedy: str


@dataclass(frozen=True)
class WrongAtValues:
    """An operation that TensorFlow differentiates wrong at some values.

    Attributes
    ----------
    values : "zeros" or "equal values"
        Which: zeros in its first input, or values in its first output (eigenvalues, singular
        values) that are equal, or nearly.
    remedy : str
        What to do, or to use in its place.
    """

    values: str
    remedy: str


_RESIZE = (
    "resize with products by fixed interpolation matrices (tf.einsum), which has derivatives "
    "of every order"
)
_PYTHON = "write it with TensorFlow operations, or give it a tf.custom_gradient made of them"
_QUANTIZE = "leave fake quantization out"
_DENSE = "use dense tensors"
_DRAWS = "draw from a standard distribution, and shift and scale the draws"
_PARAMETER = "leave the derivative by the parameter out, with tf.stop_gradient"
_NORMALIZE = "write the normalization with tf.nn.batch_normalization"
_POOL = "use tf.nn.max_pool2d"
_DECODER = "leave decoding out of the loss, and use tf.nn.ctc_loss"
_CUDNN = "build the layer with use_cudnn=False"

# What to do where the name of a function is replaced, and the replacement did not reach.
BY_NAME = (
    "call {} by that name, and in a tf.function that has not been traced yet (pass its "
    "python_function)"
)

MISSING_DERIVATIVES = {
    # Registered as not differentiable: a tape answers None and says nothing.
    "CTCBeamSearchDecoder": MissingDerivative((0,), _DECODER),
    "CTCGreedyDecoder": MissingDerivative((0,), _DECODER),
    "DrawBoundingBoxes": MissingDerivative((0,), "leave drawing out of the loss"),
    "ExtractGlimpse": MissingDerivative((0,), "use slicing or tf.gather"),
    "FakeQuantWithMinMaxArgsGradient": MissingDerivative((0,), _QUANTIZE),
    "FakeQuantWithMinMaxVarsGradient": MissingDerivative((0,), _QUANTIZE),
    "FakeQuantWithMinMaxVarsPerChannelGradient": MissingDerivative((0,), _QUANTIZE),
    "GenerateBoundingBoxProposals": MissingDerivative(
        (0, 1, 2, 3), "take proposals for constants, with tf.stop_gradient"
    ),
    "HSVToRGB": MissingDerivative((0,), "write the conversion with TensorFlow arithmetic"),
    "LinSpace": MissingDerivative((0, 1), "start + (stop - start) * a constant tf.linspace(0, 1)"),
    "OneHot": MissingDerivative((2, 3), "off + (on - off) * tf.one_hot(indices, depth)"),
    "ParameterizedTruncatedNormal": MissingDerivative((1, 2, 3, 4), _DRAWS),
    "PyFunc": MissingDerivative((), _PYTHON),
    "PyFuncStateless": MissingDerivative((), _PYTHON),
    "RaggedRange": MissingDerivative((0, 1, 2), "start + delta * a range of integers, cast"),
    "RandomShuffle": MissingDerivative((0,), "shuffle indices and use tf.gather"),
    "Range": MissingDerivative((0, 1, 2), "start + delta * a tf.range of integers, cast"),
    "ReduceDataset": MissingDerivative((), "iterate in Python, or pass the data as tensors"),
    "SparseAddGrad": MissingDerivative((0,), _DENSE),
    "SparseConcat": MissingDerivative((), _DENSE),
    # Registered, but without the derivative by these inputs, or with an approximate one.
    "Betainc": MissingDerivative((0, 1), _PARAMETER),
    "FusedBatchNorm": MissingDerivative((3, 4), _NORMALIZE),
    "FusedBatchNormV2": MissingDerivative((3, 4), _NORMALIZE),
    "FusedBatchNormV3": MissingDerivative((3, 4), _NORMALIZE),
    "ImageProjectiveTransformV2": MissingDerivative((0,), _RESIZE),
    "ImageProjectiveTransformV3": MissingDerivative((0,), _RESIZE),
    "PadV2": MissingDerivative((2,), "tf.pad with zeros, and add the constant by a mask"),
    "StatelessParameterizedTruncatedNormal": MissingDerivative((), _DRAWS),
    "Zeta": MissingDerivative((0,), _PARAMETER),
    # Registered, but computed in place, and wrong: see the module `pools`.
    "MaxPoolGradV2": MissingDerivative((2,), _POOL),
    # Registered, but good for one first derivative: the second is None, in silence.
    "EagerPyFunc": MissingDerivative((), _PYTHON),
    # Not registered: a tape raises LookupError when it gets there, without naming the layer.
    "CropAndResizeGradBoxes": MissingDerivative((0, 1), _RESIZE),
    "CudnnRNNBackprop": MissingDerivative((), _CUDNN),
    "CudnnRNNBackpropV2": MissingDerivative((), _CUDNN),
    "CudnnRNNBackpropV3": MissingDerivative((), _CUDNN),
    "Dilation2DBackpropFilter": MissingDerivative((2,), _POOL),
    "Dilation2DBackpropInput": MissingDerivative((2,), _POOL),
    "IgammaGradA": MissingDerivative((0, 1), _PARAMETER),
    "PreventGradient": MissingDerivative((0,), BY_NAME.format("tf.nn.ctc_loss")),
    "RandomGammaGrad": MissingDerivative((0, 1), _DRAWS),
}

# Why rows are refused and not put right; the documentation shows it.
_FIRST = "TensorFlow has no first derivative either"
_BY_ITSELF = "right through {}; refused where the operation is called by itself"
WHY = {
    **dict.fromkeys(
        """
        Betainc CTCBeamSearchDecoder CTCGreedyDecoder DrawBoundingBoxes ExtractGlimpse
        FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 GenerateBoundingBoxProposals HSVToRGB
        LinSpace OneHot PadV2 ParameterizedTruncatedNormal RaggedRange RandomShuffle Range
        ReduceDataset SparseConcat Zeta
        """.split(),
        _FIRST,
    ),
    **dict.fromkeys(
        ("EagerPyFunc", "PyFunc", "PyFuncStateless"), "nothing is known of Python code"
    ),
    **dict.fromkeys(
        ("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"),
        "cuDNN has no second derivative of it",
    ),
    **dict.fromkeys(
        ("IgammaGradA", "RandomGammaGrad"),
        "TensorFlow has no function that it could be written with",
    ),
    **dict.fromkeys(
        (
            "ImageProjectiveTransformV2",
            "ImageProjectiveTransformV3",
            "StatelessParameterizedTruncatedNormal",
        ),
        "TensorFlow's first derivative is only approximate",
    ),
    **dict.fromkeys(
        ("Dilation2DBackpropFilter", "Dilation2DBackpropInput"),
        _BY_ITSELF.format("``tf.nn.dilation2d``"),
    ),
    **dict.fromkeys(
        (
            "FakeQuantWithMinMaxArgsGradient",
            "FakeQuantWithMinMaxVarsGradient",
            "FakeQuantWithMinMaxVarsPerChannelGradient",
        ),
        _BY_ITSELF.format("``tf.quantization``"),
    ),
    "SparseAddGrad": _BY_ITSELF.format("``tf.sparse.add``"),
    "CropAndResizeGradBoxes": "right by the image; by the boxes TensorFlow has no operation for it",
    "MaxPoolGradV2": "its window is a tensor, and TensorFlow computes it in place",
    "PreventGradient": "right through ``tf.nn.ctc_loss`` called by that name",
}

# What to use in place of operations that have no gradient in TensorFlow at all, of which there are
# more than these.
WITHOUT_GRADIENT = {
    "ResizeArea": "use tf.nn.avg_pool2d, or tf.image.resize with antialias=True",
    "SparseDenseCwiseAdd": _DENSE,
}

# Operations whose derivative by input 0, first or second, TensorFlow has wrong at some values.
# Zeros in it: there it divides by the entries, or takes one for a limit that is a half, or zero for
# what is not. Equal ones in output 0: it divides by their differences, and takes zero where it
# cannot.
_APART = (
    "keep them apart (add small numbers, all different, to the diagonal), or write the loss with "
    "tf.linalg.trace, logdet, cholesky or solve, which need none"
)
_PRODUCT = "multiply the entries one by one, or add logarithms"
WRONG_AT_VALUES = {
    "BesselI1": WrongAtValues("zeros", "use its series near zero: x / 2 + x**3 / 16"),
    "Cumprod": WrongAtValues("zeros", _PRODUCT),
    "Eig": WrongAtValues("equal values", _APART),
    "SegmentProd": WrongAtValues("zeros", _PRODUCT),
    "SelfAdjointEigV2": WrongAtValues("equal values", _APART),
    "Svd": WrongAtValues("equal values", _APART),
    "UnsortedSegmentProd": WrongAtValues("zeros", _PRODUCT),
}

# Through these no derivative flows, and truly none: the outputs do not move with the inputs'
# values, or only by jumps, or the caller asked for it to stop.
CONSTANT_OPERATIONS = frozenset(
    """
    Ceil Floor FloorDiv OnesLike Rint Round Sign StopGradient TruncateDiv
    ZerosLike
    """.split()
)
