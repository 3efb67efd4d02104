"""Variables that a strategy keeps in copies: in one process, and in two."""

import socket
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import relative_error
from tests.devices.problem import AT, DENSE, Network, V, X, Y, gradient

ALL = ["graph", "tape"]


@pytest.fixture
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def network(strategy):
    with strategy.scope():
        return Network()


@pytest.fixture
def loss(network):
    return lambda x, y: tf.reduce_mean((network(x) - y) ** 2)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("options", ["whole", "batches", "streamed", "data set", "recompute"])
@pytest.mark.few(1)
def test_all_replicas_take_part(strategy, network, loss, options, engine):
    if options == "recompute":
        again = hvp.recompute(network)
        loss = lambda x, y: tf.reduce_mean((again(x) - y) ** 2)  # noqa: E731
    options = {
        "whole": {"devices": strategy},
        "batches": {"batch_size": 5},
        "streamed": {"batch_size": 2, "memory_limit": 1600},
        "data set": {},
        "recompute": {"batch_size": 5},
    }[options]
    data = (X, Y)
    if not options:
        whole = tf.data.Dataset.from_tensor_slices(data).batch(5)
        data = strategy.experimental_distribute_dataset(whole)
    for scope in (strategy.scope(), tf.device(None)):
        with scope, hvp.HessianOperator(loss, network, data, engine=engine, **options) as H:
            assert H.stats.engine == engine
            assert relative_error(H @ V, DENSE @ V) < 1e-8
            assert relative_error(H.gradient, gradient(AT)) < 1e-8
            product = tf.function(H.product)(tf.constant(V[:, 0]))
            assert relative_error(product, DENSE @ V[:, 0]) < 1e-8
            devices = H.stats.devices
            assert len(devices) == 2
            streams = "memory_limit" in options
            assert streams or all(device.batches for device in devices)


def test_a_loss_of_whole_arrays_is_not_divided_unless_asked_for(network):
    total = hvp.HessianOperator(
        lambda x, y: tf.reduce_sum((network(x) - y) ** 2) / 46, network, (X, Y)
    )
    assert not total.stats.devices
    assert relative_error(total @ V, DENSE @ V) < 1e-8


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("options", [{}, {"batch_size": 5}])
@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.few(2)
def test_a_change_of_any_copy_is_noticed(strategy, network, loss, engine, options, replica):
    H = hvp.HessianOperator(loss, network, (X, Y), engine=engine, **options)
    multiply = tf.function(H.product)
    multiply(tf.ones(len(AT), tf.float64))
    copy = strategy.experimental_local_results(network.b)[replica]
    copy.assign(AT[:2] + 1)
    with pytest.raises(hvp.StaleOperatorError, match="have changed"):
        H @ V
    with pytest.raises((hvp.HvpError, tf.errors.UnknownError), match="have changed"):
        multiply(tf.ones(len(AT), tf.float64))
    with pytest.raises(hvp.HvpError, match=r"copies .* differ: 'Variable'"):
        H.refresh()
    network.b.assign(AT[:2])  # as the error advises
    H.refresh()
    assert relative_error(H @ V, DENSE @ V) < 1e-8


def test_optimizers_change_all_copies_and_use_all_devices(strategy, network, loss):
    hvp.minimize(loss, network, (X, Y), maxiter=2, batch_size=5)
    optimizer = hvp.NewtonCG(loss, network, (X, Y), batch_size=5)
    optimizer.minimize(maxiter=2)
    for variable in network.trainable_variables:
        first, second = strategy.experimental_local_results(variable)
        assert np.array_equal(first.numpy(), second.numpy())
    with hvp.HessianOperator(loss, network, (X, Y), batch_size=5) as H:
        after = hvp.solve(H.damped(1.0), H.gradient, rtol=1e-10).x
        dense = H.to_dense() + np.eye(len(AT))
        assert relative_error(dense @ after, H.gradient) < 1e-8


def test_variables_of_two_strategies_are_refused(network):
    other = tf.distribute.MirroredStrategy(["CPU:0", "CPU:2"])
    with other.scope():
        v = tf.Variable([1.0, 2.0], dtype=tf.float64)
    with pytest.raises(hvp.HvpError, match="2 strategies"):
        hvp.HessianOperator(lambda: tf.reduce_sum(v**2 * network.b), [v, network.b])


def free_addresses(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


@pytest.mark.skipif(sys.platform != "linux", reason="restricted to this machine on Linux alone")
@pytest.mark.long
def test_two_processes_get_the_same_bits():
    if keras.random.SeedGenerator(0).state.dtype == "uint32":
        pytest.skip("TensorFlow cannot broadcast the seeds of this version of Keras")
    addresses = free_addresses(2)
    command = [sys.executable, "-W", "ignore", "-m", "tests.devices.processes"]
    started = [
        subprocess.Popen(
            [*command, str(index), *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for index in range(2)
    ]
    try:
        first = started[0].communicate(timeout=300)
        second = started[1].communicate(timeout=300)  # which closes what it waits for
    finally:
        for process in started:
            process.kill()
            process.wait()
    for out, error in (first, second):
        assert out.endswith("whole\n"), out + error[-3000:]
    assert first[0] == second[0]
    assert "multiply by different vectors" in first[0]
    assert "make different calls" in first[0]


@pytest.mark.parametrize("scoped", [False, True])
def test_products_under_tapes_are_functions_of_variables_with_copies(strategy, scoped):
    with strategy.scope():
        w, k = (tf.Variable(x, dtype=tf.float64) for x in ([1.0, 2.0], 2.0))
        z = tf.Variable(3.0, dtype=tf.float64, trainable=False)
    H = hvp.HessianOperator(lambda: k * z**2 * tf.reduce_sum(w**4) / 12, w)
    v = tf.ones(2, tf.float64)
    with strategy.scope() if scoped else tf.device(None), tf.GradientTape() as tape:
        tape.watch([v] if scoped else [v, z])  # TensorFlow's tapes watch no copies there
        total = tf.reduce_sum(H.product(v))
    gradients = tape.gradient(total, [v, w, k, z])
    for found, expected in zip(gradients, ([18, 72], [36, 72], 45, None if scoped else 60)):
        if expected is None:
            assert found is None
        else:
            np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("in_graph", [False, True])
def test_tapes_in_each_replica(strategy, in_graph):
    with strategy.scope():
        w = tf.Variable([1.0, 2.0], dtype=tf.float64)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    gradient_of_weights(H, w)  # traced outside of the replicas

    def run():
        return strategy.run(lambda: gradient_of_weights(H, w))

    results = strategy.experimental_local_results((tf.function(run) if in_graph else run)())
    assert len(results) == 2
    for result in results:
        np.testing.assert_allclose(result, [2.0, 4.0])


def gradient_of_weights(H, w):
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(H.product(tf.ones(2, tf.float64)))
    return tape.gradient(total, w)
