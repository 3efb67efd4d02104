"""Derivatives that TensorFlow lacks or has wrong: right while linearizing, and only then."""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._derivatives.corrections import TENSORFLOWS
from tests.cases import (
    FUZZ,
    Problem,
    dense_hessian,
    long,
    random,
    relative_error,
)
from tests.derivatives.nested_tapes import is_wrong_in_tensorflow
from tests.derivatives.test_first_derivatives import CASES as FIRST_DERIVATIVES

raw = tf.raw_ops
ROWS = [0, 0, 0, 1, 1, 2, 4, 4]  # of segment 3 there are none
INDICES, SEGMENTS = [0, 2, 2, 5, 1], [0, 0, 1, 1, 3]
BOXES = [[0.1, 0.1, 0.8, 0.9], [0.0, 0.0, 1.0, 1.0]]


def rows(x):
    """Eight rows of five numbers, of an image's forty."""
    return tf.reshape(x, [8, 5])


def both(x):
    return tf.concat([x, tf.sin(x)], 0)


def ragged(x):
    return tf.RaggedTensor.from_row_lengths(tf.reshape(x, [-1]), [3, 0, 20, 17])


def grid(x):
    return tf.SparseTensor(
        [[i, j] for i in range(8) for j in range(5)], tf.reshape(x, [-1]), [8, 5]
    )


def kernel(x):
    return tf.sin(tf.reshape(tf.reshape(x, [-1])[:8], [2, 2, 2]))


def extreme_of_segments(x):
    most = tf.math.unsorted_segment_max(rows(x), [0, 0, 0, 1, 1, 2, 4, -1], 6)
    return mixed(tf.exp(most), 6)


def mixed(y, count):
    """What a row is comes to matter for all, also that of a segment without rows."""
    return tf.tanh(tf.matmul(random(2, 3, count, dtype="float64"), y))


def sparse(x):
    return tf.SparseTensor([[0, 0], [0, 2], [2, 1], [2, 2]], tf.reshape(x, [-1])[:4], [3, 3])


# Of an image of float32, linear in it.
LINEAR = {
    "bilinear": lambda x: tf.image.resize(x, (7, 9)),
    "bilinear, smaller": lambda x: tf.image.resize(x, (2, 3)),
    "bilinear, aligned": lambda x: tf.compat.v1.image.resize_bilinear(x, (7, 9), True),
    "antialiased": lambda x: tf.image.resize(x, (3, 3), antialias=True),
    "bicubic": lambda x: tf.image.resize(x, (7, 9), method="bicubic"),
    "nearest": lambda x: tf.image.resize(x, (7, 9), method="nearest"),
    "lanczos": lambda x: tf.image.resize(x, (7, 9), method="lanczos3"),
    "crop": lambda x: tf.image.crop_and_resize(x, BOXES, [0, 0], [3, 3]),
    "crop, nearest": lambda x: tf.image.crop_and_resize(x, BOXES, [0, 0], [3, 3], "nearest"),
}
# Of an image of float64.
OTHERS = {
    "softsign": tf.nn.softsign,
    "pool with places": lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "VALID")[0],
    "pool with places in batches": lambda x: tf.nn.max_pool_with_argmax(
        both(x), 2, 2, "SAME", include_batch_in_index=True
    )[0],
    "pool with places by image": lambda x: tf.nn.max_pool_with_argmax(both(x), 2, 2, "SAME")[0],
    "fractional pool": lambda x: tf.nn.fractional_avg_pool(x, [1, 1.4, 1.3, 1], seed=1)[0],
    "fractional pool, overlapping": lambda x: tf.nn.fractional_avg_pool(
        x, [1, 1.4, 1.3, 1], overlapping=True, seed=1
    )[0],
    "fractional max pool": lambda x: tf.nn.fractional_max_pool(x, [1, 1.4, 1.3, 1], seed=1)[0],
    "fractional max pool, overlapping": lambda x: tf.nn.fractional_max_pool(
        x, [1, 1.4, 1.3, 1], overlapping=True, seed=1
    )[0],
    "sparse slice": lambda x: tf.sparse.slice(grid(x), [1, 0], [5, 4]).values,
    "sparse sum": lambda x: (
        tf.sparse.add(
            sparse(x), tf.SparseTensor([[0, 2], [1, 1], [2, 2]], tf.sin(x[0, 1, :3, 0]), [3, 3])
        ).values
    ),
    "sparse sum above a threshold": lambda x: (
        tf.sparse.add(sparse(x), sparse(tf.reverse(x, [1])), threshold=0.7).values
    ),
    "ragged map": lambda x: tf.map_fn(
        tf.reduce_sum, tf.sin(ragged(x)), fn_output_signature=x.dtype
    ),
    "dilation": lambda x: tf.nn.dilation2d(
        x, kernel(x), [1, 1, 1, 1], "SAME", "NHWC", [1, 1, 1, 1]
    ),
    "dilation with strides": lambda x: tf.nn.dilation2d(
        x, kernel(x), [1, 2, 1, 1], "VALID", "NHWC", [1, 1, 2, 1]
    ),
    "sparse segment sum": lambda x: tf.sparse.segment_sum(rows(x), INDICES, SEGMENTS),
    "sparse segment mean": lambda x: tf.sparse.segment_mean(rows(x), INDICES, SEGMENTS),
    "sparse segment sqrt n": lambda x: tf.sparse.segment_sqrt_n(
        rows(x), INDICES, SEGMENTS, num_segments=5
    ),
    **{
        f"sparse gradient of segment {kind}": lambda x, kind=kind: getattr(
            raw, f"SparseSegment{kind}"
        )(data=rows(x), indices=INDICES, segment_ids=SEGMENTS, sparse_gradient=True)
        for kind in ("Sum", "Mean", "SqrtN")
    },
    "embedding of sparse ids": lambda x: tf.nn.embedding_lookup_sparse(
        rows(x), tf.sparse.from_dense([[1, 2, 0], [3, 0, 0], [1, 1, 7]]), None, combiner="mean"
    ),
    "embedding of empty rows": lambda x: tf.nn.safe_embedding_lookup_sparse(
        rows(x), tf.sparse.from_dense([[1, 2, 0], [0, 0, 0], [1, 1, 7]]), None, combiner="mean"
    ),
    "filled rows": lambda x: (
        tf.sparse.fill_empty_rows(
            tf.SparseTensor([[0, 0], [2, 1], [2, 2]], tf.reshape(x, [-1])[:3], [5, 5]),
            x[0, 0, 0, 1],
        )[0].values
    ),
    "tanh of a segment sum": lambda x: tf.tanh(tf.math.segment_sum(rows(x), ROWS)),
    "tanh of an unsorted sum": lambda x: tf.tanh(
        tf.math.unsorted_segment_sum(rows(x), [0, 1, 1, 3, 3, 0, 0, 0], 5)
    ),
    "tanh of a scatter": lambda x: tf.tanh(
        tf.scatter_nd([[0], [1], [1], [3], [3], [0], [0], [0]], rows(x), [5, 5])
    ),
    "tanh of a scattered addition": lambda x: tf.tanh(
        tf.tensor_scatter_nd_add(rows(x), [[0], [1]], rows(x)[2:4])
    ),
    "tanh of a ragged sum": lambda x: tf.tanh(tf.reduce_sum(ragged(x), axis=1)),
    "segment mean": lambda x: mixed(tf.math.segment_mean(rows(x), ROWS), 5),
    "segment max": lambda x: mixed(tf.math.segment_max(rows(x), ROWS), 5),
    "segment min": lambda x: mixed(tf.math.segment_min(rows(x), ROWS), 5),
    "unsorted segment max": extreme_of_segments,
    "cross entropy by both": lambda x: tf.nn.softmax_cross_entropy_with_logits(
        tf.nn.softmax(tf.sin(rows(x))), rows(x)
    ),
    "sparse cross entropy": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(rows(x))[0]) % 3, tf.sin(rows(x))
    ),
    "sparse softmax": lambda x: tf.sparse.softmax(sparse(x)).values,
}
# Other sizes, options or callers of operations that other cases call.
ALIKE = {
    "bilinear, smaller",
    "antialiased",
    "pool with places",
    "embedding of sparse ids",
    "tanh of an unsorted sum",
    "tanh of a scattered addition",
    "sparse cross entropy",
}
# Which rows a case is about, where its operation has another name.
CASE_OF = {
    "CropAndResizeGradImage": "crop",
    "Dilation2D": "dilation",
    "FractionalAvgPoolGrad": "fractional pool",
    "FractionalMaxPoolGrad": "fractional max pool",
    "RaggedTensorToVariantGradient": "ragged map",
    "SparseAdd": "sparse sum",
    "SparseSliceGrad": "sparse slice",
    "MaxPoolGradWithArgmax": "pool with places by image",
    "ResizeBicubicGrad": "bicubic",
    "ResizeBilinear": "bilinear",
    "ResizeBilinearGrad": "bilinear",  # in functions
    "ResizeNearestNeighborGrad": "nearest",
    "ScaleAndTranslateGrad": "lanczos",
    "SegmentMax": "segment max",
    "SegmentMean": "segment mean",
    "SegmentMin": "segment min",
    "SoftmaxCrossEntropyWithLogits": "cross entropy by both",
    "SoftsignGrad": "softsign",
    "SparseFillEmptyRowsGrad": "filled rows",
    "SparseSegmentMeanGrad": "sparse segment mean",
    "SparseSegmentMeanGradV2": "sparse gradient of segment Mean",
    "SparseSegmentSqrtNGrad": "sparse segment sqrt n",
    "SparseSegmentSqrtNGradV2": "sparse gradient of segment SqrtN",
    "SparseSegmentSumGrad": "sparse segment sum",
    "SparseSegmentSumGradV2": "sparse gradient of segment Sum",
    "SparseSoftmax": "sparse softmax",
    "TanhGrad": "tanh of a segment sum",
    "UnsortedSegmentMax": "unsorted segment max",
    "UnsortedSegmentMin": "unsorted segment max",
}
ELSEWHERE = {  # tests of their own: here, in test_exact.py, test_batched_products.py and
    # test_first_derivatives.py
    *FIRST_DERIVATIVES,
    "QuantizeAndDequantizeV4",
    "FusedBatchNorm",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
    "FusedBatchNormGrad",
    "FusedBatchNormGradV2",
    "FusedBatchNormGradV3",
    "TensorListScatter",  # as the second version
    "TensorListScatterIntoExistingList",
    "BatchMatMulV2",
    "CumulativeLogsumexp",
    "EuclideanNorm",
    "FakeQuantWithMinMaxArgs",
    "FakeQuantWithMinMaxVars",
    "FakeQuantWithMinMaxVarsPerChannel",
    "LRNGrad",
    "SparseSoftmaxCrossEntropyWithLogits",  # right in TensorFlow, in more memory
    "Xdivy",
    "Xlog1py",
    "Xlogy",
}
WAYS = {
    "graph": {},
    "tape": {"engine": "tape"},
    "function": {},
    "loop": {},
    "recompute": {},
    "XLA": {"jit_compile": True},
}


def within(way, function):
    """The function, called in another way."""
    if way == "function":
        return tf.function(function)
    if way == "recompute":
        return hvp.recompute(function)
    if way == "loop":

        def loop(x):
            like = tf.zeros_like(function(x))
            return tf.while_loop(
                lambda i, _: i < 1, lambda i, _: (i + 1, function(x)), (0, like), None
            )[1]

        return loop
    return function


def problem_of(name, way="graph"):
    """The loss of a case, which calls the function in one of the ways."""
    linear = name in LINEAR
    x = tf.Variable(random(0, 1, 5, 4, 2, dtype="float32" if linear else "float64"))
    function = within(way, LINEAR[name] if linear else OTHERS[name])

    @tf.autograph.experimental.do_not_convert
    def loss():
        y = function(tf.convert_to_tensor(x))
        return tf.reduce_sum(tf.sin(y if linear else y + y**2))

    return Problem(loss, x)


@functools.cache
def hessian_of(name):
    """The closed form where the function is linear, and differences of gradients otherwise."""
    if name not in LINEAR:
        return dense_hessian(problem_of(name), step=1e-3)
    # Of sum(sin(A x)) it is -A' diag(sin(A x)) A.
    x = problem_of(name).variables.numpy().ravel()
    units = np.eye(40, dtype="float32").reshape(40, 1, 5, 4, 2)
    A = np.stack([np.ravel(LINEAR[name](unit)) for unit in units], axis=1).astype(np.float64)
    return -A.T @ (np.sin(A @ x)[:, np.newaxis] * A)


def check(names, way, blocks=True):
    """Check the diagonal blocks of the Hessian of a sum of cases, each of variables of its own."""
    problems = [problem_of(name, way) for name in names]
    variables = [problem.variables for problem in problems]
    v, units = np.tile(random(1, 40), len(names)), np.tile(np.eye(40), (len(names), 1))
    loss = tf.autograph.experimental.do_not_convert(lambda: sum(p.loss() for p in problems))
    with hvp.HessianOperator(loss, variables, **WAYS[way]) as H:
        assert H.stats.engine == WAYS[way].get("engine", "graph")
        products = np.split(H @ v, len(names))
        dense = np.split(H @ units, len(names)) if blocks else []
    for name, product in zip(names, products):
        want = hessian_of(name)
        assert relative_error(product, want @ v[:40]) < (1e-4 if name in LINEAR else 1e-8), name
    for name, block in zip(names, dense):
        assert relative_error(block, hessian_of(name)) < (1e-5 if name in LINEAR else 1e-8), name


# Blocks of these are multiplied column by column, and so would be those of others in their sum.
BY_COLUMNS = {"ragged map", "sparse segment sqrt n"}


def groups():
    """Cases of one dtype, ten at most in one operator."""
    for cases in (LINEAR, OTHERS):
        names = [name for name in cases if (FUZZ or name not in ALIKE) and name not in BY_COLUMNS]
        yield from (names[i : i + 10] for i in range(0, len(names), 10))
    yield from ([name] for name in OTHERS if name in BY_COLUMNS)


@pytest.mark.parametrize("names", list(groups()), ids=lambda names: f"{names[0]} to {names[-1]}")
@pytest.mark.few(1)
def test_they_are_right(names):
    check(names, "graph")
    # Blocks convert the same operations by either engine: these are tested below.
    check(names, "tape", blocks=False)


@pytest.mark.parametrize("name", sorted({*CASE_OF.values()}))
def test_tensorflow_lacks_it_or_has_it_wrong(name):
    # Once this fails, TensorFlow has learned it, or fixed it, and the row can go.
    assert is_wrong_in_tensorflow(problem_of(name), hessian_of(name))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *[("bilinear", way) for way in ("tape", "function", "loop", "recompute", "XLA")],
        ("softsign", "loop"),
        ("sparse segment mean", "function"),
        ("segment mean", "recompute"),
        ("segment max", "tape"),
        ("tanh of a scatter", "loop"),
        ("cross entropy by both", "recompute"),
        ("sparse sum", "recompute"),
        *[
            long(name, way)
            for name in [*LINEAR, *OTHERS]
            for way in ("tape", "function", "loop", "recompute", "XLA")
            # TensorFlow infers wrong shapes of fractional pools in loops.
            if not ("fractional" in name and way in ("loop", "XLA", "recompute"))
        ],
    ],
)
@pytest.mark.few(1)
def test_blocks_are_right_on_tapes_in_functions_in_loops_and_recomputed(name, way):
    check([name], way)


def test_every_correction_has_a_case():
    assert {*CASE_OF, *ELSEWHERE} == set(TENSORFLOWS)


def test_local_response_normalization():
    x = tf.Variable(random(0, 1, 2, 2, 6))
    radius, bias, alpha, beta = 2, 1.0, 0.5, 0.7

    def by_hand(x):
        apart = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
        near = tf.constant(apart <= radius, x.dtype)
        return x / (bias + alpha * tf.tensordot(x**2, near, 1)) ** beta

    wide = tf.Variable(tf.cast(x, tf.float64))
    want = dense_hessian(Problem(lambda: tf.reduce_sum(by_hand(wide) ** 3), wide))

    def loss():
        return tf.reduce_sum(tf.nn.lrn(x, radius, bias, alpha, beta) ** 3)

    for engine in ("graph", "tape"):
        with hvp.HessianOperator(loss, x, engine=engine) as H:
            assert relative_error(H.to_dense(), want) < 1e-5
    assert is_wrong_in_tensorflow(Problem(loss, x), want)


QUANTIZED = {
    "args": lambda x, low, high: tf.quantization.fake_quant_with_min_max_args(
        x, -1.0, 0.8, num_bits=16
    ),
    "vars": lambda x, low, high: tf.quantization.fake_quant_with_min_max_vars(
        x, low[0], high[0], num_bits=16
    ),
    "channels": lambda x, low, high: tf.quantization.fake_quant_with_min_max_vars_per_channel(
        x, low, high, num_bits=16
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_fake_quantization_passes_gradients_straight_through(name):
    x = tf.Variable(random(0, 10, 2, scale=1.2))
    low, high = tf.Variable([-1.0, -1.1]), tf.Variable([0.8, 0.7])
    variables = [x] if name == "args" else [x, low, high]
    factors = tf.range(1.0, 11.0)[:, tf.newaxis]

    def loss():
        return tf.reduce_sum(factors * tf.sin(QUANTIZED[name](x, low, high)))

    column = [0, 1] if name == "channels" else [0, 0]
    limits = low.numpy()[column], high.numpy()[column]
    quantized = np.clip(x.numpy(), *limits)
    J = np.zeros((20, 24))
    for row, (value, j) in enumerate(zip(x.numpy().ravel(), 10 * [0, 1])):
        below, above = value < limits[0][j], value > limits[1][j]
        J[row, 20 + column[j] if below else 22 + column[j] if above else row] = 1
    second = (-np.sin(quantized) * factors).numpy().ravel()
    want = (J.T @ (second[:, np.newaxis] * J))[: 20 if name == "args" else 24]
    want = want[:, : len(want)]
    for engine in ("graph", "tape"):
        with hvp.HessianOperator(loss, variables, engine=engine) as H:
            assert relative_error(H.to_dense(), want) < 1e-3  # 16 bits
    assert is_wrong_in_tensorflow(Problem(loss, variables), want)


def test_elsewhere_tensorflow_answers_as_it_did():
    x = tf.Variable(random(0, 1, 4, 4, 1))

    def second(function):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = tf.reduce_sum(function(x) ** 2)
            gradient = inner.gradient(y, x)
        try:
            return outer.gradient(gradient, x)
        except LookupError as error:  # TensorFlow 2.16, of a resize too
            return str(error)

    def loss():
        inside = threading.Thread(target=lambda: seen.append(second(resize)))
        inside.start()  # another thread, while this one linearizes
        inside.join()
        return tf.reduce_sum(resize(x) ** 2)

    def resize(x):
        return tf.image.resize(x, (8, 8))

    seen = [second(resize)]
    with hvp.HessianOperator(loss, x) as H:
        assert np.abs(H @ np.ones(16, "float32")).max() > 0.1
    seen.append(second(resize))
    assert len(set(seen)) == 1
    assert seen[0] is None or "no entry for: ResizeBilinearGrad" in seen[0]
    assert "no entry for: SoftsignGrad" in second(tf.nn.softsign)


def normalized(kind):
    """Batch normalization by one operation, or written out."""

    def written_out(x, scale, offset):
        mean = tf.reduce_mean(x, [0, 1, 2], keepdims=True)
        deviation = x - mean
        variance = tf.reduce_mean(deviation**2, [0, 1, 2], keepdims=True)
        return deviation * tf.math.rsqrt(variance + 0.01) * scale + offset

    def fused(x, scale, offset):
        operation = getattr(raw, kind)
        empty = tf.zeros([0])
        return operation(x=x, scale=scale, offset=offset, mean=empty, variance=empty, epsilon=0.01)[
            0
        ]

    return fused if kind else written_out


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["graph", "tape", "function"])
@pytest.mark.parametrize("kind", ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"])
@pytest.mark.long
def test_gradient_penalties_through_fused_batch_normalization(kind, way):
    """The Hessian of a loss that contains a gradient in the examples: third derivatives."""
    x = random(0, 2, 1, 2, 2)

    def problem(kind, dtype):
        numbers = (random(1, 2, 2), random(2, 2), random(3, 2))
        variables = [tf.Variable(tf.cast(number, dtype)) for number in numbers]
        images = tf.constant(x.astype(dtype))

        def outputs(images):
            kernel, scale, offset = variables
            return tf.tanh(normalized(kind)(tf.tanh(images @ kernel), scale, offset))

        def loss():
            with tf.GradientTape() as tape:
                tape.watch(images)
                y = within(way, outputs)(images)
            return tf.reduce_mean(tape.gradient(y, images) ** 2)

        return Problem(loss, variables)

    fused = problem(kind, "float32")
    options = {"engine": "tape"} if way == "tape" else {}
    H = hvp.HessianOperator(fused.loss, fused.variables, **options)
    want = dense_hessian(problem("", "float64"))
    assert relative_error(H.to_dense(), want) < 1e-5
    assert is_wrong_in_tensorflow(fused, want)
