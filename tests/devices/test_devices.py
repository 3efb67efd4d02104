"""Several devices of one process: the same matrix, each batch held where it was dealt to."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import Problem, dense_hessian, pairwise, random, relative_error
from tests.data.test_execution import IN, OUT, N, Network, X, Y, mean_square

CPUS = ["CPU:0", "CPU:1", "CPU:2"]
BATCHES = {
    "one": {},
    "ragged": {"batch_size": 5},
    "streamed": {"batch_size": 2, "memory_limit": 1600},
}


@pytest.fixture(scope="module")
def dense():
    network = Network()
    return dense_hessian(Problem(mean_square(network), network, (X, Y)))


def gradient_of(network, loss):
    with tf.GradientTape() as tape:
        value = loss(X, Y)
    parts = tape.gradient(value, [network.b, network.w])
    return float(value), np.concatenate([part.numpy().ravel() for part in parts])


@pytest.mark.parametrize(
    ("count", "batches", "engine"), pairwise([1, 2, 3], list(BATCHES), ["graph", "tape"])
)
@pytest.mark.few(1)
def test_products_blocks_values_and_gradients(dense, count, batches, engine):
    network = Network()
    loss = mean_square(network)
    value, gradient = gradient_of(network, loss)
    H = hvp.HessianOperator(
        loss, network, (X, Y), devices=CPUS[:count], engine=engine, **BATCHES[batches]
    )
    block = random(4, *dense.shape[:1], 5, dtype="float64")
    with H:
        assert H.stats.engine == engine
        assert relative_error(H @ block, dense @ block) < 1e-12
        assert relative_error(H @ block[:, 0], dense @ block[:, 0]) < 1e-12
        multiply = tf.function(H.product)
        assert relative_error(multiply(tf.constant(block[:, 1])), dense @ block[:, 1]) < 1e-12
        parts = H.product(H.unflatten(block[:, 2]))
        assert relative_error(H.flatten(parts), dense @ block[:, 2]) < 1e-12
        assert abs(H.value - value) < 1e-12
        assert relative_error(H.gradient, gradient) < 1e-12
        stats = H.stats
        assert sum(device.batches for device in stats.devices) == stats.batches_kept
        assert (batches == "streamed") == (stats.batches_kept < stats.batches)


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.few(1)
def test_weights_and_regularization(dense, engine, reduction):
    network = Network()
    weight = lambda x, y: tf.reduce_sum(x**2)  # noqa: E731
    penalty = lambda: 0.5 * tf.reduce_sum(network.w**2)  # noqa: E731
    H = hvp.HessianOperator(
        mean_square(network),
        network,
        (X, Y),
        batch_size=5,
        weight=weight,
        regularization=penalty,
        reduction=reduction,
        devices=CPUS,
        engine=engine,
    )
    weights, total = 0.0, np.zeros_like(dense)
    for start in range(0, N, 5):
        x, y = X[start : start + 5], Y[start : start + 5]
        total += (x**2).sum() * dense_hessian(Problem(mean_square(network), network, (x, y)))
        weights += (x**2).sum()
    want = total if reduction == "sum" else total / weights
    want = want + np.diag([0.0] * OUT + [1.0] * (IN * OUT))
    with H:
        assert relative_error(H.to_dense(), want) < 1e-12


def test_each_device_holds_its_own_and_the_client_nothing():
    network = Network()
    with hvp.HessianOperator(mean_square(network), network, (X, Y), devices=CPUS[1:]) as H:
        for name, maps in inside.held_by_devices(H).items():
            for tensor in (residual for one in maps for residual in one.residuals):
                assert tensor.device.endswith(name)


def test_a_product_moves_two_vectors_and_an_evaluation_each_variable_once():
    network = Network()
    frozen = tf.Variable(random(5, OUT, dtype="float64"), trainable=False)
    loss = lambda x, y: tf.reduce_mean((network(x) + frozen - y) ** 2)  # noqa: E731
    H = hvp.HessianOperator(loss, network, (X, Y), devices=CPUS[1:], batch_size=3)
    n, size = H.shape[0], H.dtype.itemsize
    with H:
        for site in inside.sites(H):
            assert site.variable_bytes == (n + OUT) * size
        for _ in range(2):
            before = [(site.sent, site.received) for site in inside.sites(H)]
            H @ np.ones(n)
            for site, (sent, received) in zip(inside.sites(H), before):
                assert site.sent - sent == n * size
                assert site.received - received == n * size
        before = [(site.sent, site.variable_bytes) for site in inside.sites(H)]
        network.b.assign_add([1.0, 0.0])
        H.refresh()
        for site, (sent, variables) in zip(inside.sites(H), before):  # only what changed, no data
            assert site.variable_bytes - variables == OUT * size
            assert site.sent - sent == OUT * size


def test_each_device_gets_a_part_of_arrays_under_a_limit_too(dense):
    network = Network()
    options = {"devices": CPUS, "memory_limit": "1GB"}
    with hvp.HessianOperator(mean_square(network), network, (X, Y), **options) as H:
        assert [device.batches for device in H.stats.devices] == [1, 1, 1]
        assert relative_error(H.to_dense(), dense) < 1e-12


def test_changes_are_noticed_and_refreshed(dense):
    network = Network()
    H = hvp.HessianOperator(mean_square(network), network, (X, Y), devices=CPUS)
    v = np.ones(H.shape[0])
    H @ v
    network.w.assign(0.5 * network.w)
    with pytest.raises(hvp.StaleOperatorError):
        H @ v
    H.refresh()
    want = dense_hessian(Problem(mean_square(network), network, (X, Y)))
    assert relative_error(H @ v, want @ v) < 1e-12
    H.close()
    with pytest.raises(hvp.ClosedOperatorError):
        H @ v


def test_an_old_point_stays_what_it_was_while_others_are_visited(dense):
    network = Network()
    H = hvp.HessianOperator(mean_square(network), network, (X, Y), devices=CPUS, on_stale="ignore")
    v = np.ones(H.shape[0])
    network.w.assign(0.5 * network.w)
    assert relative_error(H @ v, dense @ v) < 1e-12


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.few(1)
def test_dropout_has_the_same_masks_in_all_products_of_an_evaluation(engine):
    model = keras.Sequential(
        [keras.Input((IN,)), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5, seed=1)]
    )
    loss = lambda x: tf.reduce_mean(model(x, training=True) ** 4)  # noqa: E731
    data = (X.astype("f4"),)
    with hvp.HessianOperator(loss, model, data, devices=CPUS, engine=engine) as H:
        v = random(6, H.shape[0])
        np.testing.assert_allclose(H @ v, H @ v, rtol=1e-6)
        # The same seed for each part of the data, as if they were batches on one device.
        with hvp.HessianOperator(loss, model, data, batch_size=8, engine=engine) as one:
            np.testing.assert_allclose(H @ v, one @ v, rtol=1e-4, atol=1e-6)


@pytest.mark.few(0)
def test_recompute_and_float16():
    layers = [keras.layers.Dense(size, "tanh", dtype="float64") for size in (6, 6)]
    last = keras.layers.Dense(OUT, dtype="float64")
    model = keras.Sequential([keras.Input((IN,), dtype="float64"), *layers, last])
    loss = lambda x, y: tf.reduce_mean((model(x) - y) ** 2)  # noqa: E731
    want = dense_hessian(Problem(loss, model, (X, Y)))
    with hvp.HessianOperator(loss, model, (X, Y), devices=CPUS, recompute=True) as H:
        assert H.stats.engine == "graph"
        assert relative_error(H.to_dense(), want) < 1e-9
    w = tf.Variable([0.5, 2.0], dtype=tf.float16)
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w, devices=CPUS) as H:
        np.testing.assert_allclose(H @ np.ones(2), [3, 48], rtol=1e-2)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 5, "regularization": lambda: 0.0},
        {"batch_size": 2, "memory_limit": 1600},
        {"recompute": True},
        {"jit_compile": True},
        {"weight": lambda x, y: tf.reduce_sum(x**2), "batch_size": 5},
    ],
)
@pytest.mark.few(1)
def test_one_call_that_multiplies_on_all_devices(dense, options, narrow, monkeypatch):
    network, options, want = Network(), dict(options), dense
    loss = mean_square(network)
    if "regularization" in options:
        options["regularization"] = lambda: 0.5 * tf.reduce_sum(network.w**2)
        want = dense + np.diag([0.0] * OUT + [1.0] * (IN * OUT))
    if "weight" in options:
        parts = [(X[start : start + 5], Y[start : start + 5]) for start in range(0, N, 5)]
        weights = [(x**2).sum() for x, _ in parts]
        each = [dense_hessian(Problem(loss, network, part)) for part in parts]
        want = sum(w * matrix for w, matrix in zip(weights, each)) / sum(weights)
    if options.pop("recompute", False):
        predict = hvp.recompute(lambda x: tf.tanh(network(x) @ network.w[:OUT]))
        loss = lambda x, y: tf.reduce_mean((predict(x) - y) ** 2)  # noqa: E731
        want = dense_hessian(Problem(loss, network, (X, Y)))
    if narrow:
        inside.set_limit(monkeypatch, "bytes of rows times residuals", 1)
    products = inside.count_joint_products(monkeypatch, local=True)
    block = random(4, len(want), 5, dtype="float64")
    with hvp.HessianOperator(loss, network, (X, Y), devices=CPUS, **options) as H:
        for _ in range(2):
            for _ in range(2):
                assert relative_error(H @ block, want @ block) < 1e-12
                assert relative_error(H @ block[:, 0], want @ block[:, 0]) < 1e-12
            assert len(products) >= 2
            assert all(product is not None for product in products)
            products.clear()
            H.refresh()


@pytest.mark.long
def test_the_uses_of_an_operator(dense):
    network = Network()
    loss, n = mean_square(network), len(dense)
    A = dense + np.eye(n)
    with hvp.HessianOperator(loss, network, (X, Y), devices=CPUS, damping=1.0) as H:
        for method in ("cg", "minres", "block_cg"):
            x = hvp.solve(H, np.eye(n)[:, :2], method=method, rtol=1e-10).x
            assert relative_error(x, np.linalg.solve(A, np.eye(n)[:, :2])) < 1e-8
        assert hvp.check(H).ok
    influence = hvp.InfluenceFunctions(loss, network, (X, Y), damping=1.0, devices=CPUS)
    alone = hvp.InfluenceFunctions(loss, network, (X, Y), damping=1.0)
    found, want = (i.scores((X[:2], Y[:2])) for i in (influence, alone))
    assert relative_error(found, want) < 1e-8
    start = [network.b.numpy(), network.w.numpy()]
    for run in (
        lambda **options: hvp.minimize(loss, network, (X, Y), maxiter=6, **options).fun,
        lambda **options: hvp.NewtonCG(loss, network, (X, Y), **options).minimize(maxiter=6).fun,
    ):
        values = []
        for options in ({}, {"devices": CPUS}):
            network.b.assign(start[0])
            network.w.assign(start[1])
            values.append(run(**options))
        assert abs(values[0] - values[1]) < 1e-9 < gradient_of(network, loss)[0]
    predict = lambda x: network(x)  # noqa: E731
    half = lambda p, y: tf.reduce_mean((p - y) ** 2)  # noqa: E731
    with (
        hvp.GaussNewtonOperator(predict, half, network, (X, Y)) as one,
        hvp.GaussNewtonOperator(predict, half, network, (X, Y), devices=CPUS) as three,
    ):
        assert relative_error(three.to_dense(), one.to_dense()) < 1e-12


def test_tables_and_python_are_there_for_devices_of_this_process():
    w = tf.Variable([2.0, 3.0])
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2], tf.int64), [10.0, 20.0]),
        default_value=0.0,
    )
    loss = lambda k: tf.reduce_mean(table.lookup(k) * tf.reduce_sum(w**3))  # noqa: E731
    with hvp.HessianOperator(loss, w, (np.array([1, 2]),), devices=CPUS[1:]) as H:
        np.testing.assert_allclose(H @ np.ones(2), [180, 270])


def test_names_of_devices():
    w = tf.Variable([2.0, 3.0])
    loss = lambda: tf.reduce_sum(w**3)  # noqa: E731
    logical = tf.config.list_logical_devices("CPU")
    for devices in ("cpu:1", "/cpu:1", "/device:CPU:1", ["CPU:1"], logical[1], logical[1:2]):
        with hvp.HessianOperator(loss, w, devices=devices) as H:
            assert [device.name for device in H.stats.devices] == ["/device:CPU:1"]
            np.testing.assert_allclose(H @ np.ones(2), [12, 18])


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([], "is empty"),
        (["GPU:7"], "no device 'GPU:7'"),
        (["/job:worker/task:1/device:CPU:0"], "experimental_connect_to_cluster"),
        (["CPU:0", "/cpu:0"], "named twice"),
        ([3], r"The argument devices is \[3\]"),
        (3, "The argument devices is 3"),
        (["CPU:x:y:z"], "does not name a device"),
    ],
)
def test_devices_that_are_refused(devices, said):
    w = tf.Variable([1.0])
    with pytest.raises(hvp.HvpError, match=said):
        hvp.HessianOperator(lambda: tf.reduce_sum(w**3), w, devices=devices)


def test_what_goes_wrong_on_a_device_is_raised_here():
    w = tf.Variable([1.0, 2.0])
    x = np.ones((6, 2), "f4")
    x[4, 1] = np.nan
    loss = lambda x: tf.reduce_mean((x * w) ** 4)  # noqa: E731
    with pytest.raises(hvp.NonFiniteError, match="batch 2"):
        hvp.HessianOperator(loss, w, (x,), batch_size=2, devices=CPUS)
    np.testing.assert_array_equal(w.numpy(), [1, 2])
    for timeout in (0, -1, "soon", True):
        with pytest.raises(hvp.HvpError, match="device_timeout"):
            hvp.HessianOperator(loss, w, (x,), devices=CPUS, device_timeout=timeout)


@pytest.mark.filterwarnings("ignore:the device:RuntimeWarning")
@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("batches", ["ragged", "streamed"])
@pytest.mark.few(1)
def test_devices_are_lost_at_any_moment_and_nothing_counts_twice(
    dense, engine, batches, monkeypatch
):
    network = Network()
    loss = mean_square(network)
    value, gradient = gradient_of(network, loss)
    rng = np.random.default_rng(0)
    left = set()

    def lost(name):
        if len(left) == 1 or rng.random() > 0.25:
            return False
        left.remove(name)
        return True

    options = {"devices": CPUS, "engine": engine, "on_stale": "ignore", **BATCHES[batches]}
    V = random(4, *dense.shape[:1], 3, dtype="float64")
    losses = 0
    with hvp.HessianOperator(loss, network, (X, Y), **options) as H:
        inside.lose_devices(monkeypatch, lost)
        for _ in range(4):
            inside.find_lost_devices(H)
            left = {device.name for device in H.stats.devices}
            H.refresh()
            assert abs(H.value - value) < 1e-12
            assert relative_error(H.gradient, gradient) < 1e-12
            for _ in range(2):
                assert relative_error(H @ V, dense @ V) < 1e-12
                assert relative_error(H @ V[:, 0], dense @ V[:, 0]) < 1e-12
            losses += 3 - len(left)
        inside.find_lost_devices(H)
    assert losses > 3
