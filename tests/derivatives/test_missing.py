"""A test for each row of the tables of `hvp._derivatives.missing`.

Each runs TensorFlow's operation itself: that its derivative is missing is first seen from a tape,
then that it is refused, then that nothing but its row is why.
"""

import functools
import runpy
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry, ops

import hvp
from hvp._derivatives import missing, suspects
from hvp._derivatives.missing import (
    CONSTANT_OPERATIONS,
    MISSING_DERIVATIVES,
    WRONG_AT_VALUES,
)
from tests.cases import Problem, derivatives_by_values, long, random, relative_error

# The documentation says of each row why it is not put right.
WHY = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "why_missing.py"))["WHY"]
raw = tf.raw_ops
IMAGE = tf.constant(random(0, 1, 4, 4, 3) ** 2 + 0.5)
SMALL = tf.constant(random(1, 1, 2, 2, 3) ** 2 + 0.5)
VECTOR = tf.constant([0.3, 0.5, 0.7, 0.9])
TWO = tf.constant([[0], [1]], tf.int64)
BOXES = tf.constant([[0.1, 0.1, 0.8, 0.8]])
PAIR = tf.constant([0, 1])
NUMBER = tf.constant(0.5)
OPTIONS = {"strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "VALID"}
RANDOM = {"seed": 1, "seed2": 1}


class Row:
    """An operation, and values for the inputs whose derivative it lacks, by their numbers."""

    def __init__(self, run, **inputs):
        self.run = run
        self.inputs = {int(name[1:]): value for name, value in inputs.items()}


def norm(version):
    """Batch normalization by a mean and a variance that depend on the variables."""
    function = getattr(raw, "FusedBatchNorm" + version)
    three = tf.constant([0.5, 1.0, 1.5])

    def run(mean, variance):
        return function(
            x=IMAGE, scale=three, offset=three, mean=mean, variance=variance, is_training=False
        )[0]

    return Row(run, _3=three, _4=three)


def transform(version):
    matrix = tf.constant([[1.0, 0.1, 0.2, 0.0, 1.0, 0.1, 0.0, 0.0]])
    options = {"fill_value": 0.0} if version == "V3" else {}
    function = getattr(raw, "ImageProjectiveTransform" + version)

    def run(x, by, value=0.0):
        more = {**options, "fill_value": value} if version == "V3" else options
        return function(
            images=x, transforms=by, output_shape=[4, 4], interpolation="BILINEAR", **more
        )

    filled = {"_3": NUMBER} if version == "V3" else {}
    return Row(run, _0=IMAGE, _1=matrix, **filled)


def cudnn(version):
    """The gradient of a cuDNN layer: it can be traced without a GPU, not run."""
    sequence, state = tf.constant(random(3, 3, 1, 2)), tf.constant(random(4, 1, 1, 2))
    weights = tf.constant(random(5, 64))
    lengths = {"sequence_lengths": [3]} if version == "V3" else {}
    made = {"host_reserved": tf.constant([0], tf.int8)} if version else {}

    def run(x):
        return getattr(raw, "CudnnRNNBackprop" + version)(
            **{"input": x},
            **lengths,
            **made,
            input_h=state,
            input_c=state,
            params=weights,
            output=sequence,
            output_h=state,
            output_c=state,
            output_backprop=sequence,
            output_h_backprop=state,
            output_c_backprop=state,
            reserve_space=weights,
        )[0]

    return Row(run, _0=sequence)


def sparse(x):
    return {"values": [x, x], "indices": [TWO, TWO], "shapes": [tf.constant([4], tf.int64)] * 2}


@functools.cache
def table():
    with tf.init_scope():
        return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1.0]), 0.0)


def quantized(version):
    function = getattr(raw, "QuantizeAndDequantize" + version)
    more = {"num_bits": 8} if version == "V3" else {}
    return Row(
        lambda low, high: function(
            input=VECTOR, input_min=low, input_max=high, range_given=True, **more
        ),
        _1=-NUMBER,
        _2=NUMBER,
    )


LOGITS = tf.constant(random(7, 4, 1, 3))


def truncated(draw):
    one = tf.ones([1])
    return Row(draw, _1=one, _2=one, _3=-one, _4=2 * one)


ROWS = {
    "AsString": Row(
        lambda x: raw.StringToNumber(string_tensor=raw.AsString(input=x), out_type=x.dtype),
        _0=VECTOR,
    ),
    "Betainc": Row(lambda a, b: raw.Betainc(a=a, b=b, x=VECTOR / 2), _0=VECTOR, _1=VECTOR),
    "CTCBeamSearchDecoder": Row(
        lambda x: (
            raw.CTCBeamSearchDecoder(
                inputs=x, sequence_length=[4], beam_width=2, top_paths=1
            ).log_probability
        ),
        _0=LOGITS,
    ),
    "CTCGreedyDecoder": Row(
        lambda x: raw.CTCGreedyDecoder(inputs=x, sequence_length=[4]).log_probability, _0=LOGITS
    ),
    "CropAndResizeGradBoxes": Row(
        lambda g, x: raw.CropAndResizeGradBoxes(grads=g, image=x, boxes=BOXES, box_ind=[0]),
        _0=SMALL,
        _1=IMAGE,
    ),
    "CudnnRNNBackprop": cudnn(""),
    "CudnnRNNBackpropV2": cudnn("V2"),
    "CudnnRNNBackpropV3": cudnn("V3"),
    "Dilation2DBackpropFilter": Row(
        lambda g: raw.Dilation2DBackpropFilter(
            input=IMAGE, filter=SMALL[0], out_backprop=g, **OPTIONS
        ),
        _2=tf.ones([1, 3, 3, 3]),
    ),
    "Dilation2DBackpropInput": Row(
        lambda g: raw.Dilation2DBackpropInput(
            input=IMAGE, filter=SMALL[0], out_backprop=g, **OPTIONS
        ),
        _2=tf.ones([1, 3, 3, 3]),
    ),
    "DrawBoundingBoxes": Row(
        lambda x: raw.DrawBoundingBoxes(images=x, boxes=BOXES[None]), _0=IMAGE
    ),
    "EagerPyFunc": Row(
        lambda x: tf.ensure_shape(tf.py_function(tf.sin, [x], tf.float32), x.shape), _0=VECTOR
    ),
    "ExtractGlimpse": Row(
        lambda x: raw.ExtractGlimpse(input=x, size=[2, 2], offsets=[[0.0, 0.0]]), _0=IMAGE
    ),
    "FakeQuantWithMinMaxArgsGradient": Row(
        lambda g: raw.FakeQuantWithMinMaxArgsGradient(gradients=g, inputs=VECTOR), _0=VECTOR
    ),
    "FakeQuantWithMinMaxVarsGradient": Row(
        lambda g: raw.FakeQuantWithMinMaxVarsGradient(gradients=g, inputs=VECTOR, min=0.0, max=1.0)[
            0
        ],
        _0=VECTOR,
    ),
    "FakeQuantWithMinMaxVarsPerChannelGradient": Row(
        lambda g: raw.FakeQuantWithMinMaxVarsPerChannelGradient(
            gradients=g, inputs=VECTOR, min=[0.0] * 4, max=[1.0] * 4
        )[0],
        _0=VECTOR,
    ),
    "FusedBatchNorm": norm(""),
    "FusedBatchNormV2": norm("V2"),
    "FusedBatchNormV3": norm("V3"),
    "GenerateBoundingBoxProposals": Row(
        lambda scores, deltas, info, anchors: (
            raw.GenerateBoundingBoxProposals(
                scores=scores,
                bbox_deltas=deltas,
                image_info=info,
                anchors=anchors,
                nms_threshold=0.5,
                pre_nms_topn=1,
                min_size=0.1,
                post_nms_topn=1,
            ).rois
        ),
        _0=tf.ones([1, 2, 2, 1]),
        _1=tf.zeros([1, 2, 2, 4]),
        _2=tf.constant([[8.0, 8.0, 1.0, 8.0, 8.0]]),
        _3=tf.ones([2, 2, 4]),
    ),
    "HSVToRGB": Row(lambda x: raw.HSVToRGB(images=x), _0=IMAGE / 10),
    "IgammaGradA": Row(lambda a, x: raw.IgammaGradA(a=a, x=x), _0=VECTOR, _1=VECTOR),
    "ImageProjectiveTransformV2": transform("V2"),
    "ImageProjectiveTransformV3": transform("V3"),
    "LinSpace": Row(lambda a, b: raw.LinSpace(start=a, stop=b, num=4), _0=NUMBER, _1=2 * NUMBER),
    "LookupTableFindV2": Row(
        lambda x: raw.LookupTableFindV2(
            table_handle=table().resource_handle, keys=["b"], default_value=x
        ),
        _2=NUMBER,
    ),
    "MaxPoolGradV2": Row(
        lambda g: raw.MaxPoolGradV2(
            orig_input=IMAGE,
            orig_output=IMAGE,
            grad=g,
            ksize=[1, 1, 1, 1],
            strides=[1, 1, 1, 1],
            padding="SAME",
        ),
        _2=IMAGE,
    ),
    "OneHot": Row(
        lambda on, off: raw.OneHot(indices=[1, 2], depth=3, on_value=on, off_value=off),
        _2=NUMBER,
        _3=NUMBER,
    ),
    "PadV2": Row(
        lambda c: raw.PadV2(input=VECTOR, paddings=[[1, 1]], constant_values=c), _2=NUMBER
    ),
    "ParameterizedTruncatedNormal": truncated(
        lambda mean, width, least, most: raw.ParameterizedTruncatedNormal(
            shape=[5], means=mean, stdevs=width, minvals=least, maxvals=most, **RANDOM
        )
    ),
    "PreventGradient": Row(lambda x: raw.PreventGradient(input=x), _0=VECTOR),
    "PyFunc": Row(
        lambda x: tf.reshape(tf.numpy_function(np.sin, [x], tf.float32), x.shape), _0=VECTOR
    ),
    "PyFuncStateless": Row(
        lambda x: tf.reshape(tf.numpy_function(np.sin, [x], tf.float32, stateful=False), x.shape),
        _0=VECTOR,
    ),
    "QuantizeAndDequantizeV2": quantized("V2"),
    "QuantizeAndDequantizeV3": quantized("V3"),
    "QuantizeAndDequantizeV4": quantized("V4"),
    "RaggedRange": Row(
        lambda a, b, d: raw.RaggedRange(starts=[a], limits=[b], deltas=[d]).rt_dense_values,
        _0=NUMBER,
        _1=8 * NUMBER,
        _2=NUMBER,
    ),
    "RandomGammaGrad": Row(
        lambda a, x: raw.RandomGammaGrad(alpha=a, sample=x), _0=VECTOR, _1=VECTOR
    ),
    "RandomShuffle": Row(lambda x: raw.RandomShuffle(value=x, **RANDOM), _0=VECTOR),
    "Range": Row(
        lambda a, b, d: raw.Range(start=a, limit=b, delta=d),
        _0=NUMBER,
        _1=8 * NUMBER,
        _2=NUMBER,
    ),
    "ReduceDataset": Row(
        lambda x: tf.data.Dataset.range(2).reduce(tf.zeros([4]), lambda total, _: total + x),
        _2=VECTOR,
    ),
    "ScaleAndTranslate": Row(
        lambda scale, shift: raw.ScaleAndTranslate(
            images=IMAGE, size=[3, 3], scale=scale, translation=shift, kernel_type="triangle"
        ),
        _2=tf.constant([0.7, 0.8]),
        _3=tf.constant([0.1, 0.2]),
    ),
    "SerializeTensor": Row(
        lambda x: raw.ParseTensor(serialized=raw.SerializeTensor(tensor=x), out_type=x.dtype),
        _0=VECTOR,
    ),
    "SparseAddGrad": Row(
        lambda g: raw.SparseAddGrad(
            backprop_val_grad=g, a_indices=TWO, b_indices=TWO, sum_indices=TWO
        )[0],
        _0=VECTOR[:2],
    ),
    "SparseConcat": Row(
        lambda x: raw.SparseConcat(**sparse(x), concat_dim=0).output_values, _2=VECTOR[:2]
    ),
    "StringFormat": Row(
        lambda x: raw.StringToNumber(
            string_tensor=raw.StringFormat(inputs=[x[0]], template="%s"), out_type=x.dtype
        ),
        _0=VECTOR,
    ),
    "StatelessParameterizedTruncatedNormal": truncated(
        lambda mean, width, least, most: raw.StatelessParameterizedTruncatedNormal(
            shape=[1], seed=[1, 2], means=mean, stddevs=width, minvals=least, maxvals=most
        )
    ),
    "Zeta": Row(lambda x: raw.Zeta(x=x, q=VECTOR), _0=VECTOR + 2),
}

# These run on no other device. But all can be traced.
FOR_A_GPU = {
    "CudnnRNNBackprop",
    "CudnnRNNBackpropV2",
    "CudnnRNNBackpropV3",
    "GenerateBoundingBoxProposals",
}
# Their derivative is there, but not the whole of it; or only once.
APPROXIMATE = {
    "EagerPyFunc",
    "ImageProjectiveTransformV2",
    "ImageProjectiveTransformV3",
    "MaxPoolGradV2",
    "QuantizeAndDequantizeV4",
    "StatelessParameterizedTruncatedNormal",
}


def test_every_row_has_a_test():
    assert set(ROWS) == set(MISSING_DERIVATIVES) == set(WHY)
    for kind, row in MISSING_DERIVATIVES.items():
        assert not row.inputs or set(ROWS[kind].inputs) == set(row.inputs), kind
    assert set(CONSTANTS) == CONSTANT_OPERATIONS
    assert set(AT_WRONG_VALUES) == set(WRONG_AT_VALUES)


def derivative(row, number, report):
    """Report a tape's derivative by one input; None also where it raises, naming what has none."""
    inputs = {n: tf.identity(value) for n, value in row.inputs.items()}
    with tf.GradientTape() as tape:
        tape.watch(inputs[number])
        result = row.run(*inputs.values())
    try:
        report(tape.gradient(result, inputs[number]))
    except LookupError:
        report(None)


@pytest.mark.parametrize("kind", sorted(set(ROWS) - APPROXIMATE))
def test_tensorflow_has_no_such_derivative(kind):
    """Neither a derivative nor a message that names the layer and what to do."""
    row = ROWS[kind]
    for number in row.inputs:
        # Traced only: what is for a GPU cannot run here.
        made = []
        trace = functools.partial(derivative, row, number, made.append)
        tf.function(trace, autograph=False).get_concrete_function()
        assert made == [None], number


def asks(row, number):
    """The derivative of an operation by one input."""
    variables = {number: tf.Variable(row.inputs[number])}
    inputs = {**row.inputs, **variables}

    def function():
        return tf.reduce_sum(row.run(*(tf.convert_to_tensor(x) for x in inputs.values())) ** 2)

    return hvp.linearize(function, list(variables.values()))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.few(20)
def test_it_is_refused_when_built_because_of_its_row(kind, monkeypatch):
    row, missing = ROWS[kind], MISSING_DERIVATIVES[kind]
    for number in row.inputs:
        with pytest.raises(hvp.SecondDerivativeError) as caught:
            asks(row, number)
        assert f"wrong one, of {kind} at " in str(caught.value)
        assert "test_missing.py, line" in str(caught.value)
        assert caught.value.remedy == missing.remedy
    monkeypatch.delitem(MISSING_DERIVATIVES, kind)
    for number in row.inputs:
        try:
            asks(row, number)
        except hvp.SecondDerivativeError as error:  # TensorFlow's own, where it has one
            assert "wrong one, of" not in str(error)  # noqa: PT017
        except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError):
            assert kind in FOR_A_GPU


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_values_that_pass_through_text_are_refused(engine):
    w = tf.Variable([1.5, 2.5])

    def loss():
        return tf.reduce_sum(tf.strings.to_number(tf.strings.as_string(w)) ** 2 + w**2)

    for make in (hvp.HessianOperator, hvp.linearize):
        with pytest.raises(hvp.SecondDerivativeError, match="AsString"):
            make(loss, [w], engine=engine)


CONSTANTS = {
    "Ceil": tf.math.ceil,
    "Floor": tf.floor,
    "FloorDiv": lambda w: tf.math.floordiv(w, 0.3),
    "OnesLike": lambda w: raw.OnesLike(x=w),
    "Rint": tf.math.rint,
    "Round": tf.round,
    "Sign": tf.sign,
    "StopGradient": lambda w: tf.stop_gradient(w**2),
    "TruncateDiv": lambda w: raw.TruncateDiv(x=w, y=tf.constant(0.3, w.dtype)),
    "ZerosLike": lambda w: raw.ZerosLike(x=w),
}


@pytest.mark.parametrize("kind", CONSTANTS)
@pytest.mark.few(3)
def test_true_zeros_are_taken_for_zeros_because_of_their_row(kind, monkeypatch):
    """What lacks a derivative is no obstacle where it takes a constant."""
    w = tf.Variable(random(8, 4).astype(np.float64) + 0.7)
    function = CONSTANTS[kind]

    def loss():
        lacks = tf.cast(ROWS["HSVToRGB"].run(tf.reshape(function(w)[:3], [1, 1, 1, 3])), w.dtype)
        return tf.reduce_sum(function(w) * w**3) + tf.reduce_sum(lacks) * tf.reduce_sum(w**2)

    with hvp.HessianOperator(loss, w) as H:
        constants = function(w).numpy()
        lacks = ROWS["HSVToRGB"].run(tf.reshape(constants[:3], [1, 1, 1, 3])).numpy().sum()
        want = np.diag(6 * constants * w.numpy() + 2 * lacks)
        np.testing.assert_allclose(H.to_dense(), want, rtol=1e-12, atol=1e-12)
    fewer = CONSTANT_OPERATIONS - {kind}
    monkeypatch.setattr(suspects, "CONSTANT_OPERATIONS", fewer)
    with pytest.raises(hvp.SecondDerivativeError, match="HSVToRGB"):
        hvp.HessianOperator(loss, w)


DISCRETE = {
    "argmax": lambda w: tf.one_hot(tf.argmax(w), 4, dtype=w.dtype),
    "cast to integers": lambda w: tf.cast(tf.cast(10 * w, tf.int32), w.dtype),
    "comparison": lambda w: tf.cast(w > 0.5, w.dtype),
    "searchsorted": lambda w: tf.cast(tf.searchsorted(tf.sort(w), w), w.dtype),
    "bucketize": lambda w: tf.cast(raw.Bucketize(input=w, boundaries=[0.0, 0.5]), w.dtype),
    "relu": lambda w: tf.cast(tf.nn.relu(w) > 0, w.dtype),
}


@pytest.mark.parametrize("kind", DISCRETE)
def test_discrete_values_are_not_complained_about(kind):
    w = tf.Variable(random(8, 4).astype(np.float64) + 0.7)
    with hvp.HessianOperator(lambda: tf.reduce_sum(DISCRETE[kind](w) * w**3), w) as H:
        want = np.diag(6 * DISCRETE[kind](w).numpy() * w.numpy())
        np.testing.assert_allclose(H.to_dense(), want, rtol=1e-12)


def test_the_second_derivative_of_relu_is_zero():
    w = tf.Variable(random(8, 4).astype(np.float64))
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.nn.relu(w) * 4 + w**3), w) as H:
        np.testing.assert_allclose(H.to_dense(), np.diag(6 * w.numpy()), rtol=1e-12)


def symmetric(w):
    return tf.reshape(tf.gather(w, [0, 1, 1, 2]), (2, 2))


# At values where TensorFlow has it wrong, and where it has not. Of some the name
# is replaced: they are called as an older trace would call them.
_ZERO, _OTHER = [0.0, 2.0, -3.0], [0.5, 2.0, -3.0]
_EQUAL, _APART = [2.0, 0.0, 2.0], [2.0, 0.0, 2.5]
AT_WRONG_VALUES = {
    "Eig": (
        lambda w: tf.math.real(tf.linalg.eigvals(symmetric(w)) ** 3),
        _EQUAL,
        _APART,
    ),
    "SegmentProd": (
        lambda w: tf.math.segment_prod(tf.gather(w, [0, 0, 1, 1, 2]), [0, 0, 1, 1, 1]),
        _ZERO,
        _OTHER,
    ),
    "SelfAdjointEigV2": (lambda w: tf.linalg.eigvalsh(symmetric(w)) ** 3, _EQUAL, _APART),
    "Svd": (lambda w: tf.linalg.svd(symmetric(w), compute_uv=False) ** 4, _EQUAL, _APART),
    "UnsortedSegmentProd": (
        lambda w: tf.math.unsorted_segment_prod(tf.gather(w, [0, 1, 2, 0]), [0, 1, 1, 0], 2),
        _ZERO,
        _OTHER,
    ),
}


@pytest.mark.parametrize("engine", [long("graph"), "tape"])
@pytest.mark.parametrize("kind", AT_WRONG_VALUES)
@pytest.mark.few(1)
def test_what_is_wrong_at_some_values_is_refused_there_because_of_its_row(
    kind, engine, monkeypatch
):
    function, wrong, right = AT_WRONG_VALUES[kind]
    w = tf.Variable(np.array(right))

    def loss():
        return tf.reduce_sum(function(tf.convert_to_tensor(w)))

    with hvp.HessianOperator(loss, w, engine=engine) as H:
        want = derivatives_by_values(Problem(loss, w))[1]
        np.testing.assert_allclose(H.to_dense(), want, atol=1e-6 * np.abs(want).max())
        w.assign(wrong)
        with pytest.raises(hvp.SecondDerivativeError, match=f"{kind} at"):
            H.refresh()
    with pytest.raises(hvp.SecondDerivativeError, match=f"{kind} at"):
        hvp.HessianOperator(loss, w, engine=engine)
    monkeypatch.delitem(missing.WRONG_AT_VALUES, kind)
    try:
        with hvp.HessianOperator(loss, w, engine=engine) as H:
            dense = H.to_dense()
    except hvp.NonFiniteError:
        return
    assert relative_error(dense, derivatives_by_values(Problem(loss, w))[1]) > 0.01


def test_inside_a_function_where_values_cannot_be_looked_at_it_is_refused_and_said():
    w = tf.Variable(np.array(_APART))
    eigenvalues = tf.function(lambda w: tf.linalg.eigvalsh(symmetric(w)))
    with pytest.raises(hvp.SecondDerivativeError, match="inside functions, loops"):
        hvp.HessianOperator(lambda: tf.reduce_sum(eigenvalues(w) ** 3), w)


def test_constants_are_not_looked_at():
    """Labels are often zero: only where the first input depends on the variables is it wrong."""
    w = tf.Variable(np.array([0.5, 2.0]))
    labels = tf.constant([0.0, 1.0], "float64")
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.raw_ops.Xlogy(x=labels, y=w)), w) as H:
        np.testing.assert_allclose(H.to_dense(), np.diag(-labels / w.numpy() ** 2))


# Registered in TensorFlow as having no derivative, and taking and giving numbers, but with no place
# in a loss: what was of TensorFlow 1, counts and places, training steps, and handles.
WITHOUT_A_PLACE = set(
    """
    Assign AssignAdd AssignSub EditDistance LoadAndRemapMatrix LookupTableFind LookupTableFindV2
    RandomCrop SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 ScatterAdd ScatterDiv
    ScatterMul ScatterNdAdd ScatterNdSub ScatterNdUpdate ScatterSub SdcaOptimizer SdcaOptimizerV2
    StackPush StatelessRandomBinomial StatelessRandomPoisson TPUReplicatedInput TensorArrayGradV3
    TensorArrayGradWithShape XlaVariadicReduce
    """.split()
)


def test_every_operation_a_tape_is_silent_about_is_in_a_table():
    """When TensorFlow registers another one as without a derivative, this fails."""
    registry = getattr(ops, "gradient_registry", None) or ops._gradient_registry
    silent = set()
    for kind in registry.list():
        definition = op_def_registry.get(kind)
        if definition is None or registry.lookup(kind) is not None:
            continue  # those of the module `derivatives` among them
        if _has_numbers(definition, "input_arg") and _has_numbers(definition, "output_arg"):
            silent.add(kind)
    assert silent - WITHOUT_A_PLACE - CONSTANT_OPERATIONS - set(MISSING_DERIVATIVES) == set()
    assert "SparseAddGrad" in silent


def _has_numbers(definition, where):
    """Whether an operation takes, or gives, tensors a derivative could be of."""
    numbers = {t.as_datatype_enum for t in (tf.float16, tf.bfloat16, tf.float32, tf.float64)}
    for argument in getattr(definition, where):
        name = argument.type_attr or argument.type_list_attr
        if not name:
            if argument.type in numbers:
                return True
            continue
        allowed = next(a for a in definition.attr if a.name == name).allowed_values.list.type
        if not allowed or numbers & set(allowed):
            return True
    return False
