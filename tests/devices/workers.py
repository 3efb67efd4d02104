"""A program that computes on workers of this machine, for tests: it ends with the word `whole`.

A process is connected to one cluster in its life, so this is one of its own.
"""

import faulthandler
import os
import random as python_random
import signal
import sys
import threading
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.devices.problem import AT, DENSE, IN, OUT, Network, V, X, Y, close, gradient

network = Network()


def loss(x, y):
    return tf.reduce_mean((network(x) - y) ** 2)


def right(H):
    close(H @ V, DENSE @ V)
    close(H @ V[:, 0], DENSE @ V[:, 0])


def operator(cluster, **options):
    return hvp.HessianOperator(loss, network, (X, Y), devices=cluster.devices, **options)


def raises(kind, text, function, within=30.0):
    start = time.monotonic()
    try:
        function()
    except kind as error:
        raised = error
    else:
        raise AssertionError(f"{text!r} was not raised")
    assert text in str(raised), raised
    assert time.monotonic() - start < within


def agreement(cluster):
    """Products, gradients and values over workers, and over a worker and this process."""
    agree(cluster, [(1, {}, 0), (3, {"batch_size": 5}, 0), (2, STREAMED, 0)])
    mixed = ["CPU:0", cluster.devices[1]]
    with hvp.HessianOperator(loss, network, (X, Y), devices=mixed, damping=1.0) as H:
        close(hvp.solve(H, V[:, 0], rtol=1e-10).x, np.linalg.solve(DENSE + np.eye(10), V[:, 0]))
        products = inside.products_of_devices(H, tf.constant(V[:, 0]))
        assert all("localhost" in product.device for product in products)
        [term, *_] = inside.held_by_devices(H)[cluster.devices[1]]
        for residual in term.residuals:
            assert "/job:worker/replica:0/task:1" in residual.device


STREAMED = {"batch_size": 2, "memory_limit": 1600}


def further_agreement(cluster):
    """The same with tapes, XLA and regularization."""
    penalty = {"regularization": lambda: 0.5 * tf.reduce_sum(network.w**2)}
    ridge = np.diag([0.0] * OUT + [1.0] * (IN * OUT))
    tapes = [(2, {"engine": "tape"}, 0), (3, {**STREAMED, "engine": "tape"}, 0)]
    agree(cluster, [*tapes, (2, {"jit_compile": True}, 0), (3, penalty, ridge)])


def agree(cluster, cases):
    for count, options, added in cases:
        devices = cluster.devices[:count]
        with hvp.HessianOperator(loss, network, (X, Y), devices=devices, **options) as H:
            want = DENSE + added
            close(H @ V, want @ V)
            close(H @ V[:, 0], want @ V[:, 0])
            close(tf.function(H.product)(tf.constant(V[:, 0])), want @ V[:, 0])
            close(H.gradient, gradient(AT) + np.dot(added, AT))
            H.refresh()
            close(H @ V[:, 0], want @ V[:, 0])
            assert ("memory_limit" in options) == (H.stats.batches_kept < H.stats.batches)


def one_call(cluster):
    """After the first product and the first block, one call serves all workers."""
    with pytest.MonkeyPatch.context() as patch:
        products = inside.count_joint_products(patch, local=False)
        with operator(cluster, batch_size=5) as H:
            right(H)
            assert not products
            right(H)
        assert [product.shape[-1] for product in products] == [len(DENSE)] * 2


def refusals(cluster):
    """What only this process has is named before anything runs elsewhere."""
    worker = cluster.devices[:1]
    keys = tf.constant([1, 2], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, [1.0, 2.0]), 0.0)
    w = tf.Variable([1.0, 2.0])
    looked_up = lambda k: tf.reduce_mean(table.lookup(k) * tf.reduce_sum(w**3))  # noqa: E731
    called = lambda k: tf.reduce_sum(w**3) * tf.py_function(lambda: 1.0, [], tf.float32)  # noqa: E731
    for function, what in ((looked_up, "lookup table"), (called, "tf.py_function")):
        raises(
            hvp.HvpError,
            what,
            lambda f=function: hvp.HessianOperator(f, w, (keys,), devices=worker),
        )
    for name in ("/job:worker/task:9/device:CPU:0", "/job:other/task:0/device:CPU:0"):
        raises(hvp.HvpError, "no device", lambda n=name: operator_of(w, n))
    with pytest.MonkeyPatch.context() as patch:
        inside.pretend_version(patch, "2.0")
        text = "task:0/device:CPU:0 runs TensorFlow 2."
        raises(hvp.HvpError, text, lambda: operator_of(w, cluster.devices[0]))
    raises(hvp.HvpError, "fits several", lambda: operator_of(w, "/job:worker/device:CPU:0"))
    raises(hvp.HvpError, "connected to a cluster", lambda: hvp.Cluster(1))


def operator_of(w, name):
    return hvp.HessianOperator(lambda: tf.reduce_sum(w**3), w, devices=[name])


def fetching(cluster):
    """Large vectors are fetched by workers: the same, also when one dies."""
    with pytest.MonkeyPatch.context() as patch:
        inside.set_limit(patch, "bytes that a worker fetches", 1)
        agree(cluster, [(3, {"batch_size": 5}, 0), (2, STREAMED, 0)])
        loss_of_one(cluster)


def fetching_kills(cluster):
    """Thirty moments in which workers fetch vectors."""
    with pytest.MonkeyPatch.context() as patch:
        inside.set_limit(patch, "bytes that a worker fetches", 1)
        kills(cluster)


def loss_of_one(cluster):
    """A worker that dies costs time, not answers."""
    H = operator(cluster, batch_size=5)
    right(H)
    cluster.kill(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right(H)
    assert any(w.category is RuntimeWarning and "task:1" in str(w.message) for w in caught)
    assert H.stats.devices[1].lost
    assert not H.stats.devices[0].lost
    assert H.stats.devices[1].batches == 0
    fits()
    right(H)
    cluster.kill(2)
    right(H)
    # They come back one by one.
    for index, lost in ((1, [False, False, True]), (2, [False, False, False])):
        cluster.restart(index)
        H.refresh()
        assert [bool(device.lost) for device in H.stats.devices] == lost
        assert H.stats.devices[index].batches
        right(H)
        fits()


def losses(cluster):
    """Workers that leave no room, that do not answer, and all at once."""
    H = operator(cluster, batch_size=5)
    # What the others have no room for is evaluated for each product.
    with operator(cluster, batch_size=2) as whole:
        one = whole.stats.residual_bytes / whole.stats.batches
    # Room for the four of twelve that each has, and for one at work, which takes three times that.
    with operator(cluster, batch_size=2, memory_limit=7.5 * one) as limited:
        right(limited)
        assert limited.stats.batches_kept == limited.stats.batches
        cluster.kill(1)
        right(limited)
        right(limited)
        assert limited.stats.batches_kept < limited.stats.batches
        cluster.restart(1)
    # One that does not answer, and does not break the connection either.
    patient = operator(cluster, device_timeout=3.0)
    right(patient)
    os.kill(cluster.pid(2), signal.SIGSTOP)
    start = time.monotonic()
    right(patient)
    assert 2.5 < time.monotonic() - start < 20
    assert "3 seconds" in patient.stats.devices[2].lost
    os.kill(cluster.pid(2), signal.SIGCONT)
    patient.refresh()
    right(patient)
    before = [variable.numpy() for variable in (network.b, network.w)]
    for index in range(3):
        cluster.kill(index)
    for _ in range(2):  # it misses them again
        raises(hvp.DeviceError, "o device is left", lambda: H @ V)
    raises(hvp.DeviceError, "o device is left", H.refresh)
    raises(hvp.ClosedOperatorError, "last refresh failed", lambda: H @ V)
    for variable, value in zip((network.b, network.w), before):
        np.testing.assert_array_equal(variable, value)
    for index in range(3):
        cluster.restart(index)
    H.refresh()
    right(H)


def threads(cluster):
    """Operators in two threads: both recover, though one may leave a worker, or take it back."""
    stopped, errors, rounds = threading.Event(), [], [0, 0]

    def work(index):
        H = operator(cluster, batch_size=[2, 5][index])
        try:
            while not stopped.is_set():
                right(H)
                if rounds[index] % 4 == 0:
                    H.refresh()
                rounds[index] += 1
        except Exception as error:  # raised below, in the thread of the test
            errors.append(error)

    def some_rounds():
        wanted, end = [count + 8 for count in rounds], time.monotonic() + 60
        while any(have < want for have, want in zip(rounds, wanted)):
            if errors:
                raise errors[0]
            assert time.monotonic() < end, rounds
            time.sleep(0.05)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    try:
        some_rounds()
        for victim in (1, 0, 2):
            cluster.kill(victim)
            some_rounds()
            cluster.restart(victim)
            some_rounds()
    finally:
        stopped.set()
        for worker in workers:
            worker.join()


def draws(cluster):
    """Random numbers that cannot be drawn again are not drawn again in silence."""
    w = tf.Variable([1.0, 2.0])
    drawn = lambda x: tf.reduce_mean(tf.random.normal([2]) * (x * w) ** 4)  # noqa: E731
    with hvp.HessianOperator(drawn, w, (np.ones((4, 2), "f4"),), devices=cluster.devices) as H:
        H @ np.ones(2)
        cluster.kill(0)
        for _ in range(2):  # not a product with the other batches alone
            raises(hvp.DeviceError, "draws random numbers", lambda: H @ np.ones(2))
        cluster.restart(0)
        H.refresh()
        H @ np.ones(2)


def kills(cluster):
    """Thirty moments, some of them with no worker left."""
    dice = python_random.Random(8)
    H = operator(cluster, batch_size=2, device_timeout=20.0)
    doing = {
        "evaluating": H.refresh,
        "a product": lambda: H @ V[:, 0],
        "a block": lambda: H @ V,
        "a solve": lambda: hvp.solve(H.damped(1.0), V[:, 0], method="cg", rtol=1e-10),
        "building": lambda: operator(cluster, batch_size=5).close(),
        "between": lambda: None,
    }
    for moment in range(30):
        what = list(doing)[moment % len(doing)]
        victims = range(3) if moment % 10 == 9 else dice.sample(range(3), dice.choice([1, 2]))
        delay = 0.0 if what == "between" else dice.uniform(0.0, 0.06)
        timers = [threading.Timer(delay, cluster.kill, [index]) for index in victims]
        for timer in timers:
            timer.start()
        start = time.monotonic()
        told = ""
        try:
            doing[what]()
            for timer in timers:
                timer.join()
            right(H)
            x = hvp.solve(H.damped(1.0), V[:, 0], method="cg", rtol=1e-10).x
            close(x, np.linalg.solve(DENSE + np.eye(10), V[:, 0]))
        except (hvp.DeviceError, hvp.ClosedOperatorError) as error:
            told = type(error).__name__
        assert not told or len(victims) == 3, (what, told)
        took = time.monotonic() - start
        print(f"{moment:2d} {what:12s} {len(victims)} killed {took:6.2f} s {told}", flush=True)
        assert took < 60
        for timer in timers:
            timer.join()
        if moment % 5 == 0:
            fits()
        for index in victims:
            cluster.restart(index)
        H.refresh()
        right(H)


def fits():
    """Keras, which waits for all operations anywhere, does not wait for lost workers."""
    model = keras.Sequential([keras.Input((IN,)), keras.layers.Dense(OUT)])
    model.compile(loss="mse")
    training = threading.Thread(target=lambda: model.fit(X, Y, verbose=0), daemon=True)
    training.start()
    training.join(60)
    assert not training.is_alive()


def pipes(process):
    """The pipes that a process has open."""
    found = [f"/proc/{process}/fd/{name}" for name in os.listdir(f"/proc/{process}/fd")]
    return {os.readlink(name) for name in found if os.path.exists(name)}


def left_behind(cluster):
    """No process, no thread and no pipe stays."""
    pids = [cluster.pid(index) for index in range(3)]
    shared = set().union(*(pipes(pid) for pid in pids)) & pipes("self")
    shared = {name for name in shared if name.startswith("pipe")} - pipes(os.getppid())
    assert len(shared) >= 2 * len(pids), shared
    H = operator(cluster)
    cluster.kill(2)
    right(H)
    fits()
    cluster.close()
    cluster.close()
    fits()
    raises(hvp.DeviceError, "its cluster was closed", lambda: H @ V)
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        raise AssertionError(f"process {pid} is still there")
    for _ in range(50):
        threads = [t.name for t in threading.enumerate() if t.name.startswith("hvp")]
        if not threads:
            break
        time.sleep(0.1)
    assert not threads, threads
    assert not shared & pipes("self"), (shared, shared & pipes("self"))


def only_this_machine(cluster):
    """Servers, and this process, take connections over the loopback interface alone."""
    import socket

    from hvp._devices import loopback

    for descriptor in loopback.listening():
        with socket.socket(fileno=os.dup(descriptor)) as one:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).startswith(b"lo")
    assert loopback.listening()


def main(names):
    faulthandler.dump_traceback_later(800, exit=True)
    with hvp.Cluster(3) as cluster:
        for name in names:
            start = time.monotonic()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the device", RuntimeWarning)
                globals()[name](cluster)
            print(f"{name} {time.monotonic() - start:.1f} s", flush=True)
        left_behind(cluster)
    print("whole", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
