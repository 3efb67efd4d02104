"""Products of tensors, eager and in graphs, and the TensorFlow operator."""

import logging

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import Problem, dense_hessian, random


@pytest.fixture
def nested():
    w = {"a": tf.Variable(random(0, 2, 3)), "b": [tf.Variable(random(1, 4))]}

    def loss():
        return tf.reduce_sum(w["a"] ** 4) / 12 + tf.reduce_sum(w["b"][0] ** 3) * w["a"][0, 0] / 6

    with hvp.HessianOperator(loss, w, damping=0.5) as H:
        yield H, w


def test_a_product_answers_in_the_form_it_is_asked(nested):
    H, w = nested
    dense = H.to_dense()
    v = random(2, 10)
    flat = H.product(tf.constant(v))
    assert tf.is_tensor(flat)
    np.testing.assert_allclose(flat, dense @ v, rtol=1e-5, atol=1e-6)
    nest = H.product(H.unflatten(v))  # arrays in, tensors out
    tf.nest.assert_same_structure(nest, tf.nest.map_structure(lambda x: 0, w))
    assert all(tf.is_tensor(part) for part in tf.nest.flatten(nest))
    np.testing.assert_allclose(H.flatten(nest), flat, rtol=1e-6)
    np.testing.assert_allclose(H.flatten(H.product(w)), dense @ H.flatten(w).numpy(), rtol=1e-5)


def test_one_variable_takes_its_shape_or_a_flat_vector():
    w = tf.Variable(random(0, 2, 3))
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w) as H:
        v = random(1, 2, 3)
        assert H.product(tf.constant(v)).shape == (2, 3)
        assert H.product(tf.constant(v.reshape(-1))).shape == (6,)
        np.testing.assert_allclose(H.product(v), w.numpy() ** 2 * v, rtol=1e-6)


@pytest.mark.parametrize(
    "v",
    [
        tf.ones(9),
        tf.ones((10, 1)),
        tf.ones(10, tf.complex64),
        tf.constant(["a"] * 10),
        {"a": tf.ones((2, 3))},
        {"a": tf.ones((3, 2)), "b": [tf.ones(4)]},
        {"a": tf.ones((2, 3)), "b": [None]},
        {"a": tf.ones((2, 3)), "b": [tf.ones(4, tf.complex64)]},
        [tf.ones((2, 3)), tf.ones(4)],
        "text",
        None,
    ],
)
def test_vectors_that_are_refused(nested, v):
    H, _ = nested
    before = H.stats.products
    with pytest.raises(hvp.InvalidVectorError):
        H.product(v)
    assert H.stats.products == before


def test_python_numbers_do_for_scalar_variables():
    w = [tf.Variable(2.0), tf.Variable(3.0)]
    with hvp.HessianOperator(lambda: w[0] ** 2 * w[1], w) as H:
        np.testing.assert_allclose(H.product([1.0, 1.0]), [10, 4])


def test_the_message_shows_both_structures(nested):
    H, _ = nested
    with pytest.raises(
        hvp.InvalidVectorError, match=r"\[\., \.\]\. Expected.*\{'a': \., 'b': \[\.\]\}"
    ):
        H.product([tf.ones((2, 3)), tf.ones(4)])


def test_autograph_is_not_asked_to_convert_products(nested, caplog):
    H, _ = nested
    tf.function(lambda v: H.product(v))(tf.ones(10))
    tf.function(lambda v: H.as_tf_operator().matvec(v))(tf.ones(10))
    assert "AutoGraph" not in caplog.text


def test_a_graph_that_uses_a_product_follows_refresh(nested):
    H, w = nested
    traces = []

    @tf.function
    def doubled(v):
        traces.append(1)
        return 2 * H.product(v)

    v = tf.constant(random(3, 10))
    np.testing.assert_allclose(doubled(v), 2 * H.product(v), rtol=1e-6)
    old = doubled(v)
    w["a"].assign_add(tf.ones((2, 3)))
    with pytest.raises(tf.errors.OpError, match="StaleOperatorError"):
        doubled(v)
    H.refresh()
    new = doubled(v)
    np.testing.assert_allclose(new, 2 * H.product(v), rtol=1e-6)
    assert not np.allclose(new, old, rtol=1e-2)
    assert len(traces) == 1
    H.close()
    with pytest.raises(tf.errors.OpError, match="ClosedOperatorError"):
        doubled(v)


def test_a_product_in_a_graph_loop_of_a_nest(nested):
    H, w = nested

    @tf.function
    def power_iteration(v):
        for _ in tf.range(3):
            v = H.product(v)
        return v

    v = tf.nest.map_structure(lambda x: tf.ones(x.shape), w)
    got = H.flatten(power_iteration(v))
    want = np.linalg.matrix_power(H.to_dense(), 3) @ np.ones(10)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_unknown_shapes_in_a_graph_are_checked_when_they_run(nested):
    H, _ = nested

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def product(v):
        return H.product(v)

    np.testing.assert_allclose(product(tf.ones(10)), H.product(tf.ones(10)), rtol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError):
        product(tf.ones(9))


def test_a_wide_block_goes_in_pieces(nested, monkeypatch):
    H, _ = nested
    V = random(8, 10, 7)
    whole = H @ V
    calls = []
    product = inside.program(H).product
    rows = product.flat_rows

    class Counting:
        def __call__(self, block, *residuals, place):
            calls.append(block.shape[0])
            return rows(block, *residuals, place=place)

    monkeypatch.setattr(product, "flat_rows", Counting())
    three_rows = 3 * H.stats.residual_bytes
    inside.set_limit(monkeypatch, "bytes of rows times residuals", three_rows)
    np.testing.assert_allclose(H @ V, whole, rtol=1e-6, atol=1e-6)
    assert calls == [3, 3, 1]
    np.testing.assert_allclose(whole, H.to_dense() @ V, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.few(1)
@pytest.mark.long
def test_a_wide_block_in_a_graph_goes_in_pieces(nested, monkeypatch, known):
    H, _ = nested
    V = random(8, 10, 7)
    whole = H @ V
    before = H.stats.products
    three_rows = 3 * H.stats.residual_bytes
    inside.set_limit(monkeypatch, "bytes of rows times residuals", three_rows)

    @tf.function(input_signature=[tf.TensorSpec([7 if known else None, 10])])
    def product(rows):
        return inside.multiply_rows(H, rows)

    np.testing.assert_allclose(product(V.T), whole.T, rtol=1e-6, atol=1e-6)
    assert H.stats.products == before + 7
    loops = [
        op for op in product.get_concrete_function().graph.get_operations() if "While" in op.type
    ]
    assert len(loops) == 1
    if not known:
        assert product(V.T[:0]).shape == (0, 10)


def test_the_tensorflow_operator_is_the_same_matrix(nested):
    H, _ = nested
    operator = H.as_tf_operator()
    dense = H.to_dense()
    assert operator.shape == (10, 10)
    assert operator.dtype == tf.float32
    np.testing.assert_allclose(operator.to_dense(), dense, rtol=1e-5, atol=1e-5)
    x = random(4, 3, 2, 10, 4)
    np.testing.assert_allclose(operator.matmul(x), dense @ x, rtol=1e-4, atol=1e-4)
    transposed = np.swapaxes(x, -1, -2)
    np.testing.assert_allclose(
        operator.matmul(transposed, adjoint_arg=True), dense @ x, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        operator.matvec(transposed), (dense @ x).swapaxes(-1, -2), rtol=1e-4, atol=1e-4
    )
    in_graph = tf.function(lambda x: operator.matmul(x))(x[0, 0])
    np.testing.assert_allclose(in_graph, dense @ x[0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_tensorflows_conjugate_gradient(compiled):
    root = random(0, 9, 6)
    A = root.T @ root + np.eye(6, dtype="float32")
    w = tf.Variable(random(1, 6))
    b = tf.constant(random(2, 6))
    with hvp.HessianOperator(lambda: tf.tensordot(w, tf.linalg.matvec(A, w), 1) / 2, w) as H:
        operator = H.as_tf_operator(is_positive_definite=True)

        def solve():
            return tf.linalg.experimental.conjugate_gradient(operator, b, max_iter=50).x

        x = (tf.function(solve) if compiled else solve)()
        np.testing.assert_allclose(A @ x.numpy(), b, rtol=1e-3, atol=1e-3)
        assert H.stats.products >= 6
        with pytest.raises(ValueError, match="positive definite"):
            tf.linalg.experimental.conjugate_gradient(H.as_tf_operator(), b)


def test_products_are_not_recorded_on_the_operators_tape(nested):
    """A recorded product would keep every vector alive."""
    import gc
    import weakref

    H, _ = nested
    v = tf.constant(random(5, 10))
    gone = weakref.ref(v)
    H.product(v)
    del v
    gc.collect()
    assert gone() is None


def test_a_graph_does_not_keep_the_operator_alive():
    """TensorFlow keeps Python functions of a graph for as long as the process lives."""
    import gc
    import weakref

    w = tf.Variable(random(0, 4))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**3), w)
    snapshot = weakref.ref(inside.snapshot(H))
    in_graph = tf.function(H.product)
    in_graph(tf.ones(4))
    del H, in_graph
    gc.collect()
    assert snapshot() is None


def test_a_product_is_differentiable_by_its_vector(nested):
    """`grad of <u, H v>` by v is `H u`."""
    H, _ = nested
    u, v = tf.constant(random(6, 10)), tf.constant(random(7, 10))
    with tf.GradientTape() as tape:
        tape.watch(v)
        inner = tf.tensordot(u, H.product(v), 1)
    np.testing.assert_allclose(tape.gradient(inner, v), H.product(u), rtol=1e-5, atol=1e-5)


def test_blocks_of_convolutions_are_computed_without_a_word():
    """TensorFlow tells its own developers of a loop."""
    kernel = tf.Variable(random(0, 2, 2, 1, 1))
    x = random(1, 2, 4, 4, 1)

    def loss():
        hidden = tf.sin(tf.nn.conv2d(x, kernel, 1, "SAME"))
        return tf.reduce_sum(tf.sin(tf.nn.conv2d(hidden, kernel, 1, "SAME")))

    said = []
    handler = logging.Handler()
    handler.emit = said.append
    tf.get_logger().addHandler(handler)
    try:
        with hvp.HessianOperator(loss, kernel) as H:
            block = random(2, 4, 3)
            want = np.stack([H @ column for column in block.T], axis=1)
            np.testing.assert_allclose(H @ block, want, rtol=1e-4, atol=1e-5)
    finally:
        tf.get_logger().removeHandler(handler)
    assert said == []


@pytest.mark.few(0)
def test_blocks_where_vectorizing_forgets_shapes():
    """The diagonal of a matrix, under XLA: found by random programs."""
    w = tf.Variable(random(0, 2, 2, dtype="float64"))

    def loss():
        a = tf.matmul(w, w, transpose_a=True) + np.eye(2)
        return tf.reduce_sum(tf.linalg.triangular_solve(tf.linalg.cholesky(a), a) ** 3)

    block = random(1, 4, 3, dtype="float64")
    with hvp.HessianOperator(loss, w, jit_compile="auto") as H:
        want = dense_hessian(Problem(loss, w)) @ block
        np.testing.assert_allclose(H @ block, want, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("tensors", [True, False])
def test_a_block_of_columns_as_a_nest(tensors):
    variables = {"a": tf.Variable(tf.ones((2, 3))), "b": tf.Variable(2.0)}
    H = hvp.HessianOperator(lambda: tf.reduce_sum(variables["a"] ** 2) * variables["b"], variables)
    block = random(0, 7, 4)
    nest = H.unflatten(tf.constant(block) if tensors else block)
    assert tf.is_tensor(nest["a"]) == tensors
    assert nest["a"].shape == (2, 3, 4)
    assert nest["b"].shape == (4,)
    for column in range(4):
        one = H.unflatten(block[:, column])
        np.testing.assert_array_equal(nest["a"][..., column], one["a"])
        np.testing.assert_array_equal(nest["b"][..., column], one["b"])
    with pytest.raises(hvp.InvalidVectorError, match=r"\(4, 7\)"):
        H.unflatten(block.T)
