# ruff: noqa: E501 - a table reads better
"""Operations whose first derivative is wrong in TensorFlow, against differences of values.

No derivative of TensorFlow's enters the expected gradients and Hessians.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import Problem, derivatives_by_values, long, random, relative_error

raw, F = tf.raw_ops, tf.float64
VALUES = random(3, 24, dtype="float64")


def square(w, *shape):
    return tf.reshape(w, shape)


def zero_at(w, index):
    """The numbers less the constant that makes one of them zero where derivatives are taken."""
    return w - VALUES[index]


def complex_matrix(w, shift=0.0):
    half = w.shape[0] // 2
    n = int(np.sqrt(half))
    real, imaginary = square(w[:half], n, n), square(w[half:], n, n)
    return tf.complex(real + shift * tf.eye(n, dtype=F), imaginary)


def least_squares(w, rows, columns):
    count = rows * columns
    return raw.MatrixSolveLs(
        matrix=square(w[:count], rows, columns),
        rhs=square(w[count : count + rows], rows, 1),
        l2_regularizer=w[-1] ** 2 + 0.1,
        fast=True,
    )


def to_dense(indices, values, default):
    return raw.SparseToDense(
        sparse_indices=tf.constant(indices),
        output_shape=[3],
        sparse_values=values,
        default_value=default,
        validate_indices=False,
    )


def moments(w, version, data_format):
    shape = [2, 2, 1, 2] if data_format == "NHWC" else [2, 2, 2, 1]
    mean_and_variance = getattr(raw, "FusedBatchNorm" + version)(
        x=tf.cast(square(w, *shape), tf.float32),
        scale=tf.ones(2),
        offset=tf.zeros(2),
        mean=tf.zeros(0),
        variance=tf.zeros(0),
        is_training=True,
        data_format=data_format,
    )[1:3]
    return tf.stack(mean_and_variance) ** 2


# The type of the operation: functions of so many numbers.
CASES = {
    "BesselI1": {"zero": (3, lambda w: tf.math.bessel_i1(zero_at(w, 1)) * tf.sin(w))},
    "BesselJ1": {"zero": (3, lambda w: tf.math.special.bessel_j1(2 * zero_at(w, 1)) ** 2 * tf.sin(w))},
    "Spence": {"one": (3, lambda w: tf.math.special.spence(1 + zero_at(w, 1) / 9) * tf.sin(w))},
    "Cumprod": {
        "zeros": (5, lambda w: tf.math.cumprod(zero_at(w, 1) * [1.0, 1.0, 2.0, 3.0, 1.0]) * tf.sin(w)),
        "exclusive": (4, lambda w: tf.math.cumprod(zero_at(w, 2), exclusive=True, reverse=True) * tf.sin(w)),
        "an axis": (6, lambda w: tf.math.cumprod(square(zero_at(w, 1), 2, 3), axis=0) * square(w, 2, 3)),
        "gradient of a product": (3, lambda w: tf.reduce_prod(zero_at(w, 1) + [0.0, 0.0, 1.0]) * tf.sin(w)),
        "complex": (6, lambda w: tf.math.real(tf.math.cumprod(tf.complex(w[:3], w[3:])))),
        "unknown size": (4, lambda w: tf.math.cumprod(tf.boolean_mask(zero_at(w, 1), w > -9)) ** 2),
    },
    "DynamicStitch": {
        "numbers": (4, lambda w: tf.dynamic_stitch([[0, 1], [1, 2]], [w[:2], w[2:] ** 2]) ** 2),
        "rows": (6, lambda w: tf.dynamic_stitch([0, [[1], [1]]], [w[:2], square(w[2:], 2, 1, 2)]) ** 2),
    },
    "IRFFT": {
        "cut": (10, lambda w: tf.signal.irfft(tf.complex(w[:5], w[5:]), [4]) ** 2),
    },
    "IRFFT2D": {
        "cut": (24, lambda w: tf.signal.irfft2d(tf.complex(square(w[:12], 3, 4), square(w[12:], 3, 4)), [2, 4]) ** 2),
    },
    "RFFT": {
        "cut": (5, lambda w: tf.abs(tf.signal.rfft(w, [3])) ** 2),
        "cut to one": (5, lambda w: tf.abs(tf.signal.rfft(w, [1])) ** 2),
    },
    "RFFT2D": {
        "cut": (12, lambda w: tf.abs(tf.signal.rfft2d(square(w, 3, 4), [2, 3])) ** 2),
    },
    "LogMatrixDeterminant": {
        "complex": (8, lambda w: tf.math.real(tf.linalg.slogdet(complex_matrix(w))[0])),
    },
    "MatrixDeterminant": {
        "singular": (9, lambda w: tf.linalg.det(square(tf.concat([w[:6], w[:3] + w[6:] - VALUES[6:9]], 0), 3, 3))),
        "zero": (9, lambda w: tf.linalg.det(square(zero_at(w, 4), 3, 3) * [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])),
        "two of rank one": (8, lambda w: tf.linalg.det(square(w, 2, 2, 2) * [[[1.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])),
        "complex": (8, lambda w: tf.math.real(tf.linalg.det(complex_matrix(w)))),
    },
    "MatrixDiagPartV3": {
        "padding": (5, lambda w: tf.linalg.diag_part(square(w[:4], 2, 2), k=(0, 1), padding_value=w[4]) ** 3),
    },
    "MatrixDiagV3": {
        "padding": (3, lambda w: tf.linalg.diag(w[:2], padding_value=w[2]) ** 3),
    },
    "MatrixSolveLs": {
        "more rows": (10, lambda w: least_squares(w, 3, 2)),
        "more columns": (9, lambda w: least_squares(w, 2, 3)),
    },
    "MatrixSquareRoot": {
        "complex": (8, lambda w: tf.math.imag(tf.linalg.sqrtm(complex_matrix(w, 3.0)))),
    },
    "Pow": {
        "exponent zero": (3, lambda w: zero_at(w, 0) ** tf.constant([0.0, 1.0, 3.0], F) * tf.sin(w)),
        "variable exponent": (3, lambda w: (1 + w**2) ** w),
        "variable exponent zero": (3, lambda w: (1 + w**2) ** (zero_at(w, 1) / 9)),
    },
    "RGBToHSV": {
        "zero": (3, lambda w: tf.image.rgb_to_hsv(square(tf.concat([w[:2] ** 2 + 0.1, zero_at(w, 2)[2:]], 0), 1, 1, 3))[..., 1:] ** 2),
        "others": (6, lambda w: tf.image.rgb_to_hsv(square(w / 20 + [0.9, 0.5, 0.2, 0.3, 0.4, 0.8], 1, 2, 3)) ** 2),
    },
    "SoftmaxCrossEntropyWithLogits": {
        "sums of labels": (6, lambda w: tf.nn.softmax_cross_entropy_with_logits([[0.0, 0.0], [1.0, 1.0], [0.3, 0.2]], square(w, 3, 2))),
        "labels": (12, lambda w: tf.nn.softmax_cross_entropy_with_logits(square(w[6:], 3, 2), square(w[:6], 3, 2))),
    },
    "SparseAdd": {
        "repeated": (5, lambda w: tf.sparse.add(
            tf.SparseTensor([[0, 1], [0, 1], [1, 0]], w[:3], [2, 3]), tf.SparseTensor([[0, 1], [1, 1]], w[3:], [2, 3])
        ).values ** 3),
    },
    "SparseToDense": {
        "default": (3, lambda w: to_dense([[1], [1]], w[:2], w[2]) ** 3),
        "matrix": (3, lambda w: tf.sparse.to_dense(tf.SparseTensor([[0, 1], [0, 1]], w[:2], [2, 2]), validate_indices=False) ** 3),
    },
    "SquaredDifference": {
        "complex": (4, lambda w: tf.math.imag(tf.complex(w[:2], w[:2] ** 2) * tf.math.squared_difference(
            tf.complex(w[:2], w[2:]), tf.complex(w[2:] * 2, w[:2])
        ))),
    },
    "TensorListGather": {
        "repeated": (4, lambda w: tf.TensorArray(F, 4).unstack(w).gather([0, 0, 1]) ** 3),
    },
    "TensorListScatterV2": {
        "repeated": (6, lambda w: tf.TensorArray(F, 3).scatter([0, 1, 1], square(w, 3, 2)).gather([0, 1]) ** 3),
    },
    "TensorScatterUpdate": {
        "numbers": (6, lambda w: tf.tensor_scatter_nd_update(w[:3] ** 2, [[0], [1], [1]], w[3:]) ** 3),
        "rows": (8, lambda w: tf.tensor_scatter_nd_update(square(w[:4], 2, 2), [[[1], [1]]], square(w[4:], 1, 2, 2)) ** 3),
    },
    "TridiagonalSolve": {
        "complex": (18, lambda w: tf.math.imag(tf.linalg.tridiagonal_solve(
            tf.complex(square(w[:9], 3, 3) + 3, square(w[9:], 3, 3)), tf.ones([3, 1], tf.complex128), partial_pivoting=False
        ))),
    },
}  # fmt: skip
NAMES = [(kind, name) for kind, some in CASES.items() for name in some]
WAYS = {
    "graph": {},
    "tape": {"engine": "tape"},
    "function": {},
    "recompute": {},
    "XLA": {"jit_compile": True},
}


@functools.cache
def truth(kind, name):
    w, loss = problem(kind, name)
    return derivatives_by_values(Problem(loss, w))


def problem(kind, name, way="graph"):
    count, function = CASES[kind][name]
    w = tf.Variable(VALUES[:count])
    if way == "function":
        function = tf.function(function)
    if way == "recompute":
        function = hvp.recompute(function)

    def loss():
        values = tf.cast(function(tf.convert_to_tensor(w)), F)
        numbers = tf.reshape(tf.range(1, 1 + tf.size(values)), tf.shape(values))
        return tf.reduce_sum(tf.cast(numbers, F) * values)

    return w, loss


def check(kind, name, way):
    gradient, hessian = truth(kind, name)
    w, loss = problem(kind, name, way)
    with hvp.HessianOperator(loss, w, **WAYS[way]) as H:
        scale = max(1.0, np.abs(hessian).max())
        assert np.abs(H.gradient - gradient).max() < 1e-7 * max(1.0, np.abs(gradient).max())
        assert np.abs(H.to_dense() - hessian).max() < 1e-6 * scale
        v = random(4, len(gradient), dtype="float64")
        assert np.abs(H @ v - hessian @ v).max() < 1e-5 * scale


@pytest.mark.parametrize(("kind", "name"), [p for p in NAMES if "TensorList" not in p[0]])
@pytest.mark.few(9)
def test_third_derivatives_are_right(kind, name):
    """Those along a line are compared with a polynomial through values of the function."""
    w, loss = problem(kind, name)
    start, u = w.numpy(), np.linspace(-1, 1, w.shape[0]) + 0.1
    u /= np.linalg.norm(u)
    third = np.asarray(hvp.third_order_product(lambda: tf.sin(loss() / 9), w, u, u)) @ u
    t = 0.05 * np.cos(np.pi * (np.arange(12) + 0.5) / 12)
    values = []
    for step in t:
        w.assign(start + step * u)
        values.append(np.sin(float(loss()) / 9))
    polynomial = np.polynomial.Chebyshev.fit(t, values, 11)
    expected = polynomial.deriv(3)(0.0)
    assert abs(expected) > 5e-5  # so that zero would not do
    assert third == pytest.approx(expected, rel=1e-4, abs=1e-6)


ENGINES = [pair + (way,) for pair in NAMES for way in ("graph", "tape")]


@pytest.mark.parametrize(
    ("kind", "name", "way"),
    [case if index % 8 in (0, 5) else long(*case) for index, case in enumerate(ENGINES)],
)
@pytest.mark.few(7)
def test_gradients_and_hessians_are_right(kind, name, way):
    check(kind, name, way)


OTHERS = [pair + (way,) for pair in NAMES for way in ("function", "recompute", "XLA")]


@pytest.mark.parametrize(
    ("kind", "name", "way"),
    [case if index % 8 == 0 else long(*case) for index, case in enumerate(OTHERS)],
)
@pytest.mark.few(1)
def test_they_are_right_in_other_ways(kind, name, way):
    check(kind, name, way)


@pytest.mark.parametrize("version", ["", "V2", "V3"])
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.few(1)
def test_mean_and_variance_of_a_fused_batch_normalization(version, data_format):
    """They are float32: the same moments by hand in float64 are the truth."""
    if data_format == "NCHW":
        pytest.skip("TensorFlow has no kernel of it for the CPU")
    w = tf.Variable(random(3, 8, dtype="float64"))
    axes = [0, 1, 2]

    def by_hand():
        x = tf.reshape(w, [2, 2, 1, 2])
        mean = tf.reduce_mean(x, axes)
        variance = tf.reduce_sum((x - mean) ** 2, axes) / 3
        return tf.reduce_sum(tf.stack([mean, variance]) ** 2)

    _, want = derivatives_by_values(Problem(by_hand, w))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(moments(w, version, data_format)), w)
    assert relative_error(H.to_dense(), want) < 1e-5


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_quantization_passes_derivatives_straight_through(engine):
    """Its derivative counts as one between the limits, and as zero beyond them."""
    w = tf.Variable([0.3, -0.4, 1.9])

    def loss():
        q = tf.quantization.quantize_and_dequantize_v2(w, -1.0, 1.0, range_given=True)
        return tf.reduce_sum(q**3)

    q = tf.quantization.quantize_and_dequantize_v2(w, -1.0, 1.0, range_given=True).numpy()
    H = hvp.HessianOperator(loss, w, engine=engine)
    np.testing.assert_allclose(H.to_dense(), np.diag(6 * q * [1, 1, 0]), rtol=1e-6)


def test_least_squares_over_many_matrices():
    """The public function takes another way for so many, in which a learned regularizer counts."""
    A, b = random(0, 3000, 6, 2, dtype="float64"), random(1, 3000, 6, 1, dtype="float64")
    scale_and_regularizer = tf.Variable(np.array([1.3, 0.7]))

    def loss():
        scale, regularizer = tf.unstack(scale_and_regularizer)
        x = tf.linalg.lstsq(A * scale, b, l2_regularizer=regularizer)
        return 100 * tf.reduce_mean(x**2)

    _, want = derivatives_by_values(Problem(loss, scale_and_regularizer), 1e-2)
    dense = hvp.HessianOperator(loss, scale_and_regularizer).to_dense()
    assert relative_error(dense, want) < 1e-5


@pytest.mark.long
def test_tensorflow_is_wrong():
    """Once this fails, TensorFlow has corrected one of them, and the correction can go."""
    for kind, name in NAMES:
        if (kind, name) in RIGHT:
            continue
        w, loss = problem(kind, name)
        gradient, hessian = truth(kind, name)

        @tf.function
        def derivatives(loss=loss, w=w):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    value = loss()
                first = inner.gradient(value, w, unconnected_gradients="zero")
            return first, outer.gradient(first, w, tf.ones_like(w), unconnected_gradients="zero")

        try:
            first, second = derivatives()
        except (LookupError, ValueError, tf.errors.OpError):
            continue  # it raises an error
        wrong = not np.allclose(first, gradient, atol=1e-5 * np.abs(gradient).max())
        wrong |= not np.allclose(second, hessian.sum(1), atol=1e-4 * max(1, np.abs(hessian).max()))
        assert wrong, (kind, name)


# Other cases of operations that are wrong in one.
RIGHT = {
    ("Cumprod", "unknown size"),
    ("Pow", "variable exponent"),
    ("Pow", "variable exponent zero"),
    ("RGBToHSV", "others"),
    ("SparseAdd", "repeated"),
}
