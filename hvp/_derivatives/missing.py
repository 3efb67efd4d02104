"""Tables of operations whose derivative TensorFlow leaves out, lacks, or has wrong.

Most of these operations are gradients of common operations, and occur in second derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MissingDerivative:
    """An operation with a nonzero derivative that TensorFlow cannot compute.

    The derivative by the inputs with these numbers is missing, or by all inputs if `inputs` is
    empty. By other inputs it is right or truly zero.
    """

    inputs: tuple[int, ...]
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
_STRINGS = "pass on the tensor, not its text"

# The remedy if a function is replaced by name, but the loss has an older reference to it.
BY_NAME = (
    "call {} by that name, and in a tf.function that has not been traced yet (pass its "
    "python_function)"
)

MISSING_DERIVATIVES = {
    # Registered as not differentiable. A tape returns None without a warning.
    "AsString": MissingDerivative((0,), _STRINGS),
    "CTCBeamSearchDecoder": MissingDerivative((0,), _DECODER),
    "CTCGreedyDecoder": MissingDerivative((0,), _DECODER),
    "DrawBoundingBoxes": MissingDerivative((0,), "leave drawing out of the loss"),
    "ExtractGlimpse": MissingDerivative((0,), "use slicing or tf.gather"),
    "FakeQuantWithMinMaxArgsGradient": MissingDerivative((0,), _QUANTIZE),
    "FakeQuantWithMinMaxVarsGradient": MissingDerivative((0,), _QUANTIZE),
    "FakeQuantWithMinMaxVarsPerChannelGradient": MissingDerivative((0,), _QUANTIZE),
    "GenerateBoundingBoxProposals": MissingDerivative(
        (0, 1, 2, 3), "treat proposals as constants, with tf.stop_gradient"
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
    "SerializeTensor": MissingDerivative((0,), _STRINGS),
    "SparseAddGrad": MissingDerivative((0,), _DENSE),
    "SparseConcat": MissingDerivative((), _DENSE),
    "StringFormat": MissingDerivative((), _STRINGS),
    # Registered, but without the derivative by these inputs, or with an approximate one.
    "Betainc": MissingDerivative((0, 1), _PARAMETER),
    "FusedBatchNorm": MissingDerivative((3, 4), _NORMALIZE),
    "FusedBatchNormV2": MissingDerivative((3, 4), _NORMALIZE),
    "FusedBatchNormV3": MissingDerivative((3, 4), _NORMALIZE),
    "ImageProjectiveTransformV2": MissingDerivative((0, 1), _RESIZE),
    "ImageProjectiveTransformV3": MissingDerivative((0, 1, 3), _RESIZE),
    "LookupTableFindV2": MissingDerivative((2,), "add the default value by a mask"),
    "QuantizeAndDequantizeV2": MissingDerivative((1, 2), _QUANTIZE),
    "QuantizeAndDequantizeV3": MissingDerivative((1, 2), _QUANTIZE),
    "QuantizeAndDequantizeV4": MissingDerivative((1, 2), _QUANTIZE),
    "ScaleAndTranslate": MissingDerivative((2, 3), _RESIZE),
    "PadV2": MissingDerivative((2,), "tf.pad with zeros, and add the constant by a mask"),
    "StatelessParameterizedTruncatedNormal": MissingDerivative((), _DRAWS),
    "Zeta": MissingDerivative((0,), _PARAMETER),
    # Registered, but computed in place and wrong; see the module `pools`.
    "MaxPoolGradV2": MissingDerivative((2,), _POOL),
    # Registered, but only the first derivative is right. The second is None, without a warning.
    "EagerPyFunc": MissingDerivative((), _PYTHON),
    # Not registered. A tape raises LookupError, which does not name the layer.
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

# What to use instead of some operations for which TensorFlow has no gradient at all. There are more
# of these operations.
WITHOUT_GRADIENT = {
    "ResizeArea": "use tf.nn.avg_pool2d, or tf.image.resize with antialias=True",
    "SparseDenseCwiseAdd": _DENSE,
}

# Operations whose first or second derivative by input 0 is wrong in TensorFlow at some values. At
# zeros in input 0, TensorFlow divides by the entries, or takes a wrong limit (one instead of a
# half, or zero). For equal values in output 0, it divides by their differences, and returns zero
# where these are zero. Each row says where, and what to do.
_APART = (
    "keep them apart (add small numbers, all different, to the diagonal), or write the loss with "
    "tf.linalg.trace, logdet, cholesky or solve, which need no eigenvalues"
)
_PRODUCT = "multiply the entries one by one, or add logarithms"
# What is right to first order, and at all values.
RIGHT_ONCE = frozenset({"EagerPyFunc", "SegmentProd", "UnsortedSegmentProd"})
WRONG_AT_VALUES = {
    "Eig": ("equal values", _APART),
    "SegmentProd": ("zeros", _PRODUCT),
    "SelfAdjointEigV2": ("equal values", _APART),
    "Svd": ("equal values", _APART),
    "UnsortedSegmentProd": ("zeros", _PRODUCT),
}

# Operations whose derivative is truly zero: the results do not depend on the values of the inputs,
# or are piecewise constant, or the caller stopped the gradient.
CONSTANT_OPERATIONS = frozenset(
    """
    Ceil Floor FloorDiv OnesLike Rint Round Sign StopGradient TruncateDiv
    ZerosLike
    """.split()
)
