"""Why operations without a derivative are refused instead of corrected, for the documentation."""

_FIRST = "TensorFlow has no first derivative either"
_BY_ITSELF = "right through {}; refused if the operation is called directly"
WHY = {
    **dict.fromkeys(
        """
        AsString Betainc CTCBeamSearchDecoder CTCGreedyDecoder DrawBoundingBoxes ExtractGlimpse
        FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 GenerateBoundingBoxProposals HSVToRGB
        LinSpace LookupTableFindV2 OneHot PadV2 ParameterizedTruncatedNormal QuantizeAndDequantizeV2
        QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 RaggedRange RandomShuffle Range
        ReduceDataset ScaleAndTranslate SerializeTensor SparseConcat StringFormat Zeta
        """.split(),
        _FIRST,
    ),
    **dict.fromkeys(
        ("EagerPyFunc", "PyFunc", "PyFuncStateless"), "derivatives of Python code are not known"
    ),
    **dict.fromkeys(
        ("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"),
        "cuDNN has no second derivative of it",
    ),
    **dict.fromkeys(
        ("IgammaGradA", "RandomGammaGrad"),
        "TensorFlow has no function to write it with",
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
    "CropAndResizeGradBoxes": "right by the image; TensorFlow has no operation for it by the boxes",
    "MaxPoolGradV2": "its window is a tensor, and TensorFlow computes it in place",
    "PreventGradient": "right through ``tf.nn.ctc_loss`` if called by that name",
}
