"""Products in low precision: near the true ones, with residuals of half the size."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import CASES, Problem, dense_hessian, long, random, relative_error

# The largest relative error of a product with a random vector.
CLOSE = {"bfloat16": 0.02, "float16": 0.003}
# What has no matrix products, and what has all of them in loops.
WITHOUT_PRODUCTS = {"rosenbrock", "while_loop", "cond", "nested tf.functions", "custom_gradient"}
# The cases that are always compared; the others are compared by `make test-all`.
COMPARED = {"mlp", "cnn with batch normalization", "gather", "cond"}


@pytest.fixture(autouse=True)
def _low_precision(monkeypatch):
    inside.use_low_precision(monkeypatch)


@functools.cache
def dense_case(name):
    return dense_hessian(CASES[name]("float64"))


def operator(problem, **options):
    return hvp.HessianOperator(problem.loss, problem.variables, problem.data, **options)


def quadratic(dtype="float32"):
    """Half the mean square of `x @ w`, of which the Hessian is that of `x.T @ x`."""
    x, w = random(0, 40, 12, dtype=dtype), tf.Variable(random(1, 12, 3, dtype=dtype))
    return Problem(lambda x: tf.reduce_mean(tf.matmul(x, w) ** 2), w, (x,))


def quadratic_product(x, v):
    x = x.astype(np.float64)
    return (2 / (3 * len(x)) * x.T @ (x @ v.reshape(12, 3).astype(np.float64))).ravel()


def network(dtype="float32", wrap=lambda f: f):
    """A network of sine layers, whose Hessian is far from that of its output loss."""
    kernels = [tf.Variable(random(i, 8, 8, dtype=dtype, scale=0.5)) for i in range(3)]
    x = random(9, 24, 8, dtype=dtype)

    def loss(x):
        for kernel in kernels:
            x = wrap(lambda h, w=kernel: tf.sin(tf.matmul(h, w)))(x)
        return tf.reduce_mean(x**2)

    return Problem(loss, kernels, (x,))


def types_of_products(program):
    """The types of matrix products and convolutions of a product, also in functions."""
    nodes = program.product_part.all_nodes
    kinds = ("MatMul", "BatchMatMulV2", "Conv2D", "Einsum")
    return {tf.as_dtype(node.attr["T"].type).name for node in nodes if node.op.startswith(kinds)}


@pytest.mark.parametrize("precision", CLOSE)
def test_products_are_those_of_a_closed_form_in_low_precision(precision):
    problem, v = quadratic(), random(2, 36)
    want = quadratic_product(problem.data[0], v)
    with operator(problem, precision=precision) as low, operator(problem) as full:
        assert relative_error(full @ v, want) < 1e-6
        error = relative_error(low @ v, want)
        assert 1e-5 < error < CLOSE[precision]  # not by accident in float32
        assert low.stats.precision == precision
        assert full.stats.precision == "float32"
        assert types_of_products(inside.program(low)) == {precision}
        assert np.array_equal(low @ v, low @ v)
        assert low.value == full.value
        assert np.array_equal(low.gradient, full.gradient)


@pytest.mark.parametrize("name", [name if name in COMPARED else long(name) for name in CASES])
@pytest.mark.few(1)
def test_products_are_near_those_of_the_dense_hessian(name):
    dense = dense_case(name)
    with operator(CASES[name]("float32"), precision="bfloat16") as H:
        V = random(0, H.shape[0], 3)
        assert relative_error(H @ V[:, 0], dense @ V[:, 0]) < 0.05
        assert relative_error(H @ V, dense @ V) < 0.05
        assert H.dtype == np.float32
        if name not in WITHOUT_PRODUCTS:
            assert H.stats.precision == "bfloat16"


def test_large_residuals_take_half_the_memory(monkeypatch):
    inside.set_limit(monkeypatch, "bytes that are packed", 0)  # with the variables' values
    with operator(network(), precision="bfloat16") as low, operator(network()) as full:
        assert low.stats.residual_bytes <= 0.55 * full.stats.residual_bytes


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 7}, {"memory_limit": "16KiB"}, {"jit_compile": True}],
    ids=["one batch", "batches", "few kept", "XLA"],
)
@pytest.mark.parametrize("wrap", [lambda f: f, hvp.recompute], ids=["plain", "recomputed"])
@pytest.mark.few(1)
def test_batches_blocks_and_recomputed_parts(options, wrap):
    problem, wide = network(wrap=wrap), network("float64")
    want, V = dense_hessian(wide), random(5, 192, 4)
    with operator(problem, precision="bfloat16", **options) as H:
        assert H.stats.precision == "bfloat16"
        for product, column in ((H @ V[:, 0], V[:, 0]), (H @ V, V)):
            assert 1e-5 < relative_error(product, want @ column) < CLOSE["bfloat16"]
        in_graph = tf.function(lambda v: H.product(v))(tf.constant(V[:, 0]))
        assert relative_error(in_graph, want @ V[:, 0]) < CLOSE["bfloat16"]


def test_products_inside_recomputed_parts_are_in_low_precision():
    with operator(network(wrap=hvp.recompute), precision="bfloat16") as H:
        assert types_of_products(inside.program(H)) == {"bfloat16"}


@pytest.mark.parametrize("limits", ["plain", "few values in memory"])
@pytest.mark.few(1)
def test_a_model_of_convolutions_and_attention(limits, monkeypatch):
    if limits != "plain":
        inside.set_limit(monkeypatch, "bytes of many values", 0)
    layers = keras.layers
    image = layers.Input((8, 8, 2), dtype="float32")
    h = layers.Conv2D(4, 3, padding="same", activation="gelu")(image)
    h = layers.Conv2D(4, 3, strides=2, activation="tanh")(h)
    h = layers.Reshape((9, 4))(h)
    h = layers.MultiHeadAttention(2, 2)(h, h)
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
    x, y = random(3, 6, 8, 8, 2), np.array([0, 1, 2, 1, 0, 2])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with (
        hvp.HessianOperator.from_keras(model, (x, y), precision="bfloat16") as low,
        hvp.HessianOperator.from_keras(model, (x, y), engine="tape") as full,
    ):
        v = random(4, low.shape[0])
        assert types_of_products(inside.program(low)) == {"bfloat16"}
        assert relative_error(low @ v, full @ v) < 0.05


def test_gauss_newton_products_and_linearizations():
    problem, v = network(), random(6, 192)

    def model(x):
        for kernel in problem.variables:
            x = tf.sin(tf.matmul(x, kernel))
        return x

    def squares(predictions):
        return tf.reduce_mean(predictions**2)

    with (
        hvp.GaussNewtonOperator(model, squares, problem.variables, problem.data) as full,
        hvp.GaussNewtonOperator(
            model, squares, problem.variables, problem.data, precision="bfloat16"
        ) as low,
    ):
        assert low.stats.precision == "bfloat16"
        assert 1e-5 < relative_error(low @ v, full @ v) < CLOSE["bfloat16"]
    x = problem.data[0]
    with (
        hvp.linearize(lambda: model(x), problem.variables) as full,
        hvp.linearize(lambda: model(x), problem.variables, precision="bfloat16") as low,
    ):
        assert 1e-5 < relative_error(low.jvp(v), full.jvp(v)) < CLOSE["bfloat16"]
        u = full.value
        pairs = zip(low.vjp(u), full.vjp(u))
        assert all(1e-5 < relative_error(a, b) < CLOSE["bfloat16"] for a, b in pairs)


def test_wide_operators_are_rounded_too():
    problem, v = quadratic("float64"), random(2, 36, dtype="float64")
    with operator(problem, precision="bfloat16") as H:
        assert H.dtype == np.float64
        assert relative_error(H @ v, quadratic_product(problem.data[0], v)) < CLOSE["bfloat16"]


def test_small_products_and_residuals_stay_as_they_are(monkeypatch):
    monkeypatch.undo()
    inside.pretend_fast(monkeypatch, True)
    problem, v = quadratic(), random(2, 36)
    with operator(problem, precision="bfloat16") as H:
        assert H.stats.precision == "float32"
        assert relative_error(H @ v, quadratic_product(problem.data[0], v)) < 1e-6


def test_an_unknown_number_of_examples_hides_no_other_axis(monkeypatch):
    """As one matrix, a batch of sequences has as many rows as there are tokens."""
    monkeypatch.undo()
    inside.pretend_fast(monkeypatch, True)
    kernels = [tf.Variable(random(i, 128, 128, scale=0.1)) for i in range(4)]
    x, keep = random(9, 40, 64, 128), np.arange(40) < 30

    def loss(x, keep):
        h = tf.boolean_mask(x, keep)
        for kernel in kernels:
            h = tf.tanh(h @ kernel)
        return tf.reduce_mean(h**2)

    residuals = []
    for precision in (None, "bfloat16"):
        with hvp.HessianOperator(loss, kernels, (x, keep), precision=precision) as H:
            residuals.append(H.stats.residual_bytes)
    assert residuals[1] < 0.55 * residuals[0]


def test_a_device_that_is_not_faster_says_so(monkeypatch, caplog):
    inside.pretend_fast(monkeypatch, False)
    problem, v = quadratic(), random(2, 36)
    with operator(problem, precision="bfloat16") as H:
        assert H.stats.precision == "float32"
        remark = "computes products in float32: this device is not faster in bfloat16"
        assert remark in H.stats.note
        assert [record.getMessage() for record in caplog.records] == [f"the operator {remark}"]
        assert relative_error(H @ v, quadratic_product(problem.data[0], v)) < 1e-6


def test_the_tape_engine_says_that_it_computes_in_full_precision():
    problem, v = quadratic(), random(2, 36)
    with operator(problem, precision="bfloat16", engine="tape") as H:
        assert H.stats.precision == "float32"
        assert "in float32, on tapes" in H.stats.note
        assert relative_error(H @ v, quadratic_product(problem.data[0], v)) < 1e-6


def test_another_precision_is_refused():
    with pytest.raises(hvp.HvpError, match=r"precision is 'half'\. Expected 'bfloat16'"):
        operator(quadratic(), precision="half")


def test_whether_a_device_is_fast_is_measured(monkeypatch):
    monkeypatch.undo()
    # Of some 16-bit types TensorFlow has no products at all.
    assert inside.is_fast(tf.bfloat16) in (True, False)
    assert inside.is_fast(tf.qint16) is False
