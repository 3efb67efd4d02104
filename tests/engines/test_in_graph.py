"""Products inside the caller's own graphs: no Python for each, and never of an old point."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import CASES, crossed, long, random, relative_error


def operator(dtype="float32", **options):
    w = [tf.Variable(random(0, 4, 3, dtype=dtype)), tf.Variable(random(1, 3, dtype=dtype))]
    x = tf.constant(random(2, 6, 4, dtype=dtype))
    H = hvp.HessianOperator(lambda: tf.reduce_mean(tf.tanh(x @ w[0] + w[1]) ** 2), w, **options)
    return H, w


def dense(H):
    """By eager products, one at a time."""
    return np.stack([H @ e for e in np.eye(H.shape[0], dtype=H.dtype)], axis=1)


def operations(concrete):
    graph_def = concrete.graph.as_graph_def()
    nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
    return [node.op for node in nodes]


@pytest.mark.parametrize("jit_compile", [None, True], ids=["plain", "xla"])
def test_a_loop_follows_refresh_without_another_trace(jit_compile):
    H, w = operator("float64")
    traces = []

    @tf.function(jit_compile=jit_compile)
    def power(v):
        traces.append(1)
        return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, H.product(v)), (0, v))[1]

    v = np.ones(15)
    for _ in range(3):
        want = np.linalg.matrix_power(dense(H), 3) @ v
        assert relative_error(power(tf.constant(v)), want) < 1e-12
        w[0].assign_add(0.1 * tf.ones((4, 3), tf.float64))
        H.refresh()
    assert len(traces) == 1
    assert H.stats.traces == 1


@pytest.mark.parametrize("jit_compile", [None, True], ids=["plain", "xla"])
@pytest.mark.parametrize("spoil", ["stale", "closed", "failed refresh"])
@pytest.mark.few(3)
def test_a_graph_never_answers_for_an_old_point(jit_compile, spoil):
    H, w = operator()

    @tf.function(jit_compile=jit_compile)
    def product(v):
        return H.product(v)

    v = tf.ones(15)
    right = product(v).numpy()
    assert relative_error(right, H @ v.numpy()) < 1e-6
    if spoil == "stale":
        w[1].assign_add([1.0, 0.0, 0.0])
    elif spoil == "closed":
        H.close()
    else:
        before = w[1].numpy()
        w[1].assign([np.nan, 0.0, 0.0])
        with pytest.raises(hvp.NonFiniteError):
            H.refresh()
        w[1].assign(before)
    name = "StaleOperatorError" if spoil == "stale" else "ClosedOperatorError"
    if jit_compile is None:
        with pytest.raises(tf.errors.OpError, match=name):
            product(v)
    else:
        try:
            assert np.isnan(product(v)).all()
        except tf.errors.OpError:  # the shapes of what is no longer there do not fit
            assert spoil != "stale"
    if spoil == "stale":
        w[1].assign_sub([1.0, 0.0, 0.0])  # back, to the bit or nearly
    H.refresh()
    assert relative_error(product(v), right) < 1e-5


def test_no_python_for_each_product(monkeypatch):
    """There is Python in one branch only, and that is taken when variables have changed."""
    asked = []
    inside.before_each(monkeypatch, "check for changed variables", lambda: asked.append(1))
    H, w = operator(on_stale="refresh")
    loop = tf.function(lambda v: tf.foldl(lambda v, _: H.product(v), tf.range(5), v))
    found = operations(loop.get_concrete_function(tf.TensorSpec([15])))
    assert "MatMul" in found
    assert found.count("EagerPyFunc") == 1
    del asked[:]
    loop(tf.ones(15))
    assert not asked
    w[0].assign_add(tf.ones((4, 3)))
    loop(tf.ones(15))
    assert len(asked) == 1


def test_a_stale_operator_refreshes_itself_in_a_graph_if_asked_to():
    H, w = operator("float64", on_stale="refresh")
    product = tf.function(lambda v: H.product(v))
    v = tf.ones(15, tf.float64)
    old = product(v).numpy()
    w[0].assign_add(tf.ones((4, 3), tf.float64))
    new = product(v).numpy()
    assert relative_error(new, H @ v.numpy()) < 1e-12
    assert relative_error(new, old) > 1e-3
    assert H.stats.gradient_evaluations == 2


def test_an_ignored_change_stays_ignored_in_a_graph():
    H, w = operator("float64", on_stale="ignore")
    product = tf.function(lambda v: H.product(v))
    v = tf.ones(15, tf.float64)
    old = H @ v.numpy()
    w[0].assign_add(tf.ones((4, 3), tf.float64))
    assert relative_error(product(v), old) < 1e-12


def test_products_in_graphs_are_counted():
    H, _ = operator()
    loop = tf.function(lambda v: tf.foldl(lambda v, _: H.product(v), tf.range(5), v))
    loop(tf.ones(15))
    loop(tf.ones(15))
    block = tf.function(lambda V: H.as_tf_operator().matmul(V))
    block(tf.ones((15, 4)))
    H @ np.ones(15)
    assert H.stats.products == 5 + 5 + 4 + 1


@pytest.mark.parametrize("damping", [long(0.0), 0.5])
def test_nests_and_blocks_in_a_graph(damping):
    H, w = operator("float64", damping=damping)
    want = dense(H)
    v = [tf.ones((4, 3), tf.float64), tf.ones(3, tf.float64)]
    nest = tf.function(lambda v: H.product(v))(v)
    assert relative_error(H.flatten(nest), want @ np.ones(15)) < 1e-12
    V = random(5, 15, 4, dtype="float64")
    operator_ = H.as_tf_operator()
    assert relative_error(tf.function(lambda V: operator_.matmul(V))(V), want @ V) < 1e-12
    unknown = tf.function(
        lambda V: operator_.matmul(V), input_signature=[tf.TensorSpec([15, None], tf.float64)]
    )
    assert relative_error(unknown(tf.constant(V)), want @ V) < 1e-12
    assert w[0].shape == (4, 3)


def test_products_mapped_over_rows():
    H, _ = operator("float64")
    V = random(5, 4, 15, dtype="float64")
    got = tf.function(lambda V: tf.map_fn(H.product, V))(tf.constant(V))
    assert relative_error(got, V @ dense(H)) < 1e-12


@pytest.mark.parametrize(
    ("jit_compile", "large", "on_stale"),
    crossed([None, True], [False, True], ["raise", "ignore"]),
)
@pytest.mark.few(1)
def test_a_product_in_a_graph_can_be_differentiated_by_its_vector(
    monkeypatch, jit_compile, large, on_stale
):
    """The gradient of v @ H v is 2 H v."""
    if large:
        inside.set_limit(monkeypatch, "bytes that are packed", 0)
    H, _ = operator("float64", on_stale=on_stale)
    v = tf.constant(random(7, 15, dtype="float64"))

    @tf.function(jit_compile=jit_compile)
    def gradient(v):
        with tf.GradientTape() as tape:
            tape.watch(v)
            quadratic = tf.tensordot(v, H.product(v), 1)
        return tape.gradient(quadratic, v)

    assert relative_error(gradient(v), 2 * (H @ v.numpy())) < 1e-12

    @tf.function(jit_compile=jit_compile)
    def gradient_of_gradient(v):
        with tf.GradientTape() as outer:
            outer.watch(v)
            with tf.GradientTape() as inner:
                inner.watch(v)
                nest = H.product(H.unflatten(v))
                quadratic = tf.tensordot(v, H.flatten(nest), 1)
            slope = inner.gradient(quadratic, v)
        return outer.gradient(slope, v, output_gradients=v)

    assert relative_error(gradient_of_gradient(v), 2 * (H @ v.numpy())) < 1e-12


def test_sizes_of_a_nest_may_be_unknown_until_it_runs():
    H, _ = operator("float64")
    specs = [tf.TensorSpec([None, None], tf.float64), tf.TensorSpec(None, tf.float64)]
    product = tf.function(lambda a, b: H.product([a, b]), input_signature=specs)
    got = product(tf.ones((4, 3), tf.float64), tf.ones(3, tf.float64))
    assert relative_error(H.flatten(got), dense(H) @ np.ones(15)) < 1e-12
    with pytest.raises(tf.errors.InvalidArgumentError):
        product(tf.ones((3, 4), tf.float64), tf.ones(3, tf.float64))


def test_a_loop_in_the_loss_inside_a_loop_around_the_product():
    """Lists of a loop's intermediate values are variables' values too."""
    case = CASES["while_loop"]("float64")
    H = hvp.HessianOperator(case.loss, case.variables)
    loop = tf.function(lambda v: tf.foldl(lambda v, _: H.product(v), tf.range(2), v))
    want = dense(H)
    assert relative_error(loop(tf.ones(4, tf.float64)), want @ want @ np.ones(4)) < 1e-12
    case.variables.assign_add(tf.ones(4, tf.float64))
    H.refresh()
    want = dense(H)
    assert relative_error(loop(tf.ones(4, tf.float64)), want @ want @ np.ones(4)) < 1e-12


def test_a_function_does_not_keep_the_evaluation():
    H, _ = operator()
    weak = weakref.ref(H)
    product = tf.function(lambda v: weak().product(v))
    product(tf.ones(15))
    snapshot = weakref.ref(inside.snapshot(H))
    del H
    gc.collect()
    assert snapshot() is None


def test_the_first_product_of_all_may_be_in_a_graph():
    for jit_compile in (True, "auto"):
        H, _ = operator("float64", jit_compile=jit_compile)
        got = tf.function(lambda v, H=H: H.product(v))(tf.ones(15, tf.float64))
        assert relative_error(got, dense(H) @ np.ones(15)) < 1e-12
