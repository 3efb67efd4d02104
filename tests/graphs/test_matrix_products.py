"""Products of matrices, in the form that TensorFlow computes fastest: right, and few."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._graphs.graph import Graph
from hvp._graphs.matrix_products import for_many_vectors, multiply_batches_as_one, on_all_cores
from hvp._graphs.sizes import graph_def_with_shapes, take_sizes
from hvp._graphs.vectorized import vectorized
from tests import inside
from tests.cases import random

M, P, Q, K = 3, 4, 2, 5


def part(dtype, transposed):
    """A graph that multiplies two placeholders."""
    with tf.Graph().as_default() as graph:
        left, right = (tf.raw_ops.Placeholder(dtype=dtype, shape=[None, None]) for _ in range(2))
        a, b = transposed
        product = tf.raw_ops.MatMul(a=left, b=right, transpose_a=a, transpose_b=b)
    definition = graph.as_graph_def()
    for node in list(definition.node):
        if node.op == "Placeholder":
            definition.node.remove(node)
    return Graph(definition), left.name, right.name, product.name


@pytest.mark.parametrize("transposed", [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("depends", ["left", "right"])
def test_they_are_right_and_one_operation(depends, dtype, transposed):
    def numbers(seed, *shape):
        real = random(seed, *shape, dtype="float64")
        return (real + 1j * real[::-1] if dtype == "complex128" else real).astype(dtype)

    definition, *names, product = part(dtype, transposed)
    rewritten = for_many_vectors(definition, {names[depends == "right"].partition(":")[0]})
    shapes = [(M, P), (P, Q)]
    operands = [
        numbers(i, *([K] if which == depends else []), *(s[::-1] if t else s))
        for i, (which, s, t) in enumerate(zip(("left", "right"), shapes, transposed))
    ]
    each, other = operands if depends == "left" else operands[::-1]

    @tf.function
    def products(each, other):
        def multiply(one):
            values = (one, other) if depends == "left" else (other, one)
            return rewritten.imported(dict(zip(names, values)), [product])[0]

        return vectorized(multiply, each)

    left, right = (
        np.swapaxes(operand, -1, -2) if t else operand for operand, t in zip(operands, transposed)
    )
    close = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(products(each, other), left @ right, rtol=close, atol=close)
    operations = products.get_concrete_function(each, other).graph.get_operations()
    assert not {"MatMul", "Transpose", "Reshape"} & {operation.type for operation in operations}
    of_all = [
        o
        for o in operations
        if o.type in ("Einsum", "BatchMatMulV2") and o.outputs[0].shape.rank == 3
    ]
    assert len(of_all) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_matrix_times_many_vectors_is_one_product(dtype):
    """Multiplied one after the other, each vector would read the whole matrix."""
    definition, left, right, product = part(dtype, (False, False))
    item = tf.as_dtype(dtype).size
    names = [name.partition(":")[0] for name in (left, right, product)]
    sizes = dict(zip(names, [[item * M * P], [item * P], [item * M]]))
    rewritten = for_many_vectors(Graph(definition.graph_def, sizes), {names[1]})
    assert [node.op for node in rewritten.all_nodes] == ["Einsum"]
    matrix, vectors = random(0, M, P, dtype=dtype), random(1, K, P, 1, dtype=dtype)

    @tf.function
    def products(matrix, vectors):
        return vectorized(
            lambda v: rewritten.imported({left: matrix, right: v}, [product])[0], vectors
        )

    np.testing.assert_allclose(products(matrix, vectors), matrix @ vectors, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "inner", "width", "op"),
    [
        (30, 20, 4, "Einsum"),
        (30, 20, 5, "BatchMatMulV2"),
        (1500, 2145, 10, "Einsum"),  # larger than the cache
        (1500, 2145, 16, "BatchMatMulV2"),
    ],
)
@pytest.mark.parametrize("is_left", [False, True])
def test_narrow_matrices_are_joined(rows, inner, width, op, is_left):
    """Ten classes of a linear model with many features: each vector would read all features."""
    definition, left, right, product = part("float32", (is_left, False))
    names = [name.partition(":")[0] for name in (left, right, product)]
    own, other = inner * width, rows * inner
    entries = [own, other] if is_left else [other, own]
    sizes = dict(zip(names, [[4 * n] for n in (*entries, rows * width)]))
    rewritten = for_many_vectors(Graph(definition.graph_def, sizes), {names[not is_left]})
    assert [node.op for node in rewritten.all_nodes] == [op]


def test_what_depends_on_no_vector_or_twice_stays():
    definition, left, right, _ = part("float32", (False, False))
    for dependent in (set(), {left.partition(":")[0], right.partition(":")[0]}):
        assert [node.op for node in for_many_vectors(definition, dependent).all_nodes] == ["MatMul"]


def rewritten_batches(left, right, adjoint):
    """The types of operations, and the values, of a rewritten batch of products."""
    with tf.Graph().as_default() as graph:
        a, b = (tf.raw_ops.Placeholder(dtype=x.dtype, shape=x.shape) for x in (left, right))
        product = tf.raw_ops.BatchMatMulV2(x=a, y=b, adj_x=adjoint[0], adj_y=adjoint[1])
    definition = graph_def_with_shapes(graph)
    multiply_batches_as_one(definition)
    part = Graph(definition).computing([product.name], [a.name, b.name])
    values = tf.function(
        lambda left, right: part.imported({a.name: left, b.name: right}, [product.name])[0]
    )(left, right)
    return [node.op for node in part.graph_def.node], values.numpy()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", [(K,), (2, K), (0, K)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_batch_times_one_matrix_is_one_product(dtype, batch, transposed):
    left = random(0, *batch, M, P, dtype=dtype)
    right = random(1, P, Q, dtype=dtype)
    given = right.T.copy() if transposed else right
    operations, values = rewritten_batches(left, given, (False, transposed))
    assert "BatchMatMulV2" not in operations
    assert operations.count("MatMul") == 1
    want = left.astype("float64") @ right.astype("float64")
    np.testing.assert_allclose(values, want, rtol=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize(
    ("left", "right", "adjoint"),
    [
        (random(0, K, P, M), random(1, P, Q), (True, False)),
        (random(0, K, M, P), random(1, K, P, Q), (False, False)),
        (random(0, M, P), random(1, P, Q), (False, False)),
        (random(0, K, M, P) * (1 + 2j), random(1, Q, P) * (2 - 1j), (False, True)),
    ],
    ids=["left transposed", "two batches", "two matrices", "complex"],
)
def test_other_batches_stay(left, right, adjoint):
    operations, values = rewritten_batches(left, right, adjoint)
    assert operations.count("BatchMatMulV2") == 1
    a = np.swapaxes(left, -1, -2) if adjoint[0] else left
    b = np.swapaxes(right, -1, -2).conj() if adjoint[1] else right
    np.testing.assert_allclose(values, a @ b, rtol=1e-5)


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"jit_compile": True}], ids=str)
@pytest.mark.few(1)
def test_the_tokens_of_a_layer_are_one_matrix(engine, options):
    if engine == "tape":
        options = {key: value for key, value in options.items() if key == "batch_size"}
    w = tf.Variable(random(0, 3, 4, dtype="float64"))
    u = tf.Variable(random(1, 4, 2, dtype="float64"))
    x = random(2, 4, 5, 3, dtype="float64")

    def loss(x):
        return tf.reduce_mean(tf.tanh(x @ w) @ u) + tf.reduce_mean((tf.tanh(x @ w) @ u) ** 2)

    with hvp.HessianOperator(loss, [w, u], data=(x,), engine=engine, **options) as H:
        dense = H.to_dense()
        if engine == "graph" and not options:
            program = inside.program(H)
            parts = program.once_part, program.product_part
            kinds = {node.op for part in parts for node in part.all_nodes}
            assert "MatMul" in kinds
            assert "BatchMatMulV2" not in kinds
    step = 1e-6
    theta = np.concatenate([w.numpy().ravel(), u.numpy().ravel()])

    def gradient(theta):
        w.assign(theta[:12].reshape(3, 4))
        u.assign(theta[12:].reshape(4, 2))
        with tf.GradientTape() as tape:
            value = loss(x)
        return np.concatenate([g.numpy().ravel() for g in tape.gradient(value, [w, u])])

    columns = [
        (gradient(theta + step * e) - gradient(theta - step * e)) / (2 * step) for e in np.eye(20)
    ]
    np.testing.assert_allclose(dense, np.stack(columns, 1), atol=1e-8)


def in_all_threads(shape, dtype, transposed):
    """The types of operations, and the error, of a product that may use all threads."""
    m, k, n = shape
    left, right = random(0, m, k, dtype=dtype), random(1, k, n, dtype=dtype)
    given = [x.T.copy() if t else x for x, t in zip((left, right), transposed)]
    with tf.Graph().as_default() as graph:
        a, b = (tf.raw_ops.Placeholder(dtype=x.dtype, shape=x.shape) for x in given)
        product = tf.raw_ops.MatMul(a=a, b=b, transpose_a=transposed[0], transpose_b=transposed[1])
    definition = graph_def_with_shapes(graph)
    sizes = take_sizes(definition)
    part = Graph(definition, sizes).computing([product.name], [a.name, b.name])
    part = on_all_cores(part)
    value = tf.function(
        lambda *values: part.imported(dict(zip((a.name, b.name), values)), [product.name])[0]
    )(*given)
    error = np.abs(value - left.astype("float64") @ right.astype("float64")).max()
    return {node.op for node in part.graph_def.node} - {"Const", "Reshape"}, error


@pytest.mark.parametrize("transposed", [*itertools.product([False, True], repeat=2)])
def test_a_product_of_matrices_that_fit_in_the_cache_runs_in_all_threads(transposed):
    operations, error = in_all_threads((512, 256, 256), "float32", transposed)
    assert operations == {"BatchMatMulV2"}
    assert error < 1e-3


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((256, 256, 256), "float32"),
        ((128, 512, 512), "float32"),
        ((1024, 512, 128), "float32"),
        ((512, 256, 256), "float64"),
        ((511, 256, 256), "float32"),
    ],
    ids=["small", "small batch", "larger than the cache", "float64", "odd"],
)
def test_other_products_stay_as_they_are(shape, dtype):
    operations, error = in_all_threads(shape, dtype, (False, False))
    assert operations == {"MatMul"}
    assert error < 1e-3


@pytest.mark.parametrize("options", [{}, {"batch_size": 64}, {"jit_compile": True}], ids=str)
@pytest.mark.few(1)
def test_products_of_a_layer_in_all_threads_agree_with_float64(options):
    weights = [tf.Variable(random(i, 256, 256, scale=1 / 16)) for i in range(2)]
    x = random(9, 512, 256)

    def loss(x):
        h = tf.tanh(x @ weights[0])
        return tf.reduce_mean(tf.reduce_sum(tf.tanh(h @ weights[1]) ** 2, axis=1))

    def exact(v):
        doubles = [tf.constant(w.numpy().astype("float64")) for w in weights]
        vector = [tf.constant(p.reshape(256, 256).astype("float64")) for p in np.split(v, 2)]
        with tf.autodiff.ForwardAccumulator(doubles, vector) as forward:
            with tf.GradientTape() as tape:
                tape.watch(doubles)
                h = tf.tanh(x.astype("float64") @ doubles[0])
                value = tf.reduce_sum(tf.tanh(h @ doubles[1]) ** 2) / 512
            gradient = tape.gradient(value, doubles)
        return np.concatenate([np.ravel(forward.jvp(g)) for g in gradient])

    with hvp.HessianOperator(loss, weights, data=(x,), **options) as H:
        if not options:
            kinds = {node.op for node in inside.program(H).product_part.graph_def.node}
            assert "BatchMatMulV2" in kinds
        block = random(5, H.shape[0], 2)
        want = np.stack([exact(column) for column in block.T], 1)
        scale = np.abs(want).max()
        np.testing.assert_allclose(H @ block[:, 0], want[:, 0], atol=1e-5 * scale)
        np.testing.assert_allclose(H @ block, want, atol=1e-5 * scale)
        each = tf.vectorized_map(lambda v: H.flatten(H.product(H.unflatten(v))), block.T)
        np.testing.assert_allclose(each, want.T, atol=1e-5 * scale)
