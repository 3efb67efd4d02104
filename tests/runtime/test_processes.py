"""Threads, forked and pickled operators, interrupts."""

import copy
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.sparse.linalg import cg

import hvp
from hvp._runtime.interrupts import Uninterrupted
from tests import inside
from tests.cases import FUZZ, dense_hessian, long, mlp, random

N = 6


def quartic():
    """A loss whose Hessian is a diagonal that is known."""
    w = tf.Variable(np.linspace(0.5, 1.5, N))
    return w, lambda: tf.reduce_sum(w**4) / 12


@functools.cache
def network():
    """Return a network, and its Hessian from differences of gradients."""
    problem = mlp("float64")
    return problem, dense_hessian(problem)


def in_threads(count, work):
    """Run something in several threads at once; raise what any of them raised."""
    errors, ready = [], threading.Barrier(count)

    def run(number):
        try:
            ready.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("batch_size", [None, long(5)])
@pytest.mark.few(1)
def test_products_from_several_threads_are_right(engine, batch_size):
    problem, dense = network()
    with hvp.HessianOperator(
        problem.loss, problem.variables, problem.data, engine=engine, batch_size=batch_size
    ) as H:
        n = H.shape[0]
        vectors = [random(i, n, dtype="float64") for i in range(4)]
        np.testing.assert_allclose(H @ vectors[0], dense @ vectors[0], rtol=1e-7, atol=1e-9)
        products = [H @ v for v in vectors]
        before = H.stats.products

        def work(number):
            v, product = vectors[number], products[number]
            for turn in range(3):
                if turn == 1:
                    H.refresh()  # to the same values
                np.testing.assert_allclose(H @ v, product, rtol=1e-10)
                block = H @ np.stack([v, -v], axis=1)
                np.testing.assert_allclose(block[:, 1], -product, rtol=1e-10, atol=1e-12)
                np.testing.assert_allclose(H.product(tf.constant(v)), product, rtol=1e-10)

        in_threads(4, work)
        assert H.stats.products == before + 4 * 3 * 4


def test_solutions_from_several_threads_are_right():
    w, loss = quartic()
    with hvp.HessianOperator(loss, w) as H:
        b = [random(i, N, dtype="float64") for i in range(2)]

        def work(number):
            for method in ("cg", "minres", "exact"):
                x = hvp.solve(H, b[number], method=method, rtol=1e-10).x
                np.testing.assert_allclose(x * w.numpy() ** 2, b[number], rtol=1e-8)
            x, _ = cg(H, b[number], rtol=1e-10)
            np.testing.assert_allclose(x * w.numpy() ** 2, b[number], rtol=1e-8)

        in_threads(2, work)


def test_a_linearization_serves_several_threads():
    w, _ = quartic()
    with hvp.linearize(lambda: w**3, w) as derivative:

        def work(number):
            v = random(number, N, dtype="float64")
            for _ in range(5):
                np.testing.assert_allclose(derivative.jvp(v), 3 * w.numpy() ** 2 * v)
                np.testing.assert_allclose(derivative.vjp(v), 3 * w.numpy() ** 2 * v)

        in_threads(4, work)


def test_one_thread_at_a_time_is_what_makes_them_right():
    """Another thread waits while one is inside."""
    w, loss = quartic()
    with hvp.HessianOperator(loss, w) as H:
        done = threading.Event()
        with inside.snapshot(H).exclusively():
            thread = threading.Thread(target=lambda: (H @ np.ones(N), done.set()))
            thread.start()
            assert not done.wait(0.3)
        thread.join(10)
        assert done.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_forked_operator_says_what_to_do():
    w = tf.Variable([1.0, 2.0])

    def loss():
        return tf.reduce_sum(w**4)

    H = hvp.HessianOperator(loss, w)
    H @ np.ones(2)
    recomputed = hvp.recompute(lambda x: x**2)
    linear = hvp.linearize(lambda: w**2, w)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    X = tf.constant(np.eye(3, dtype=np.float32))
    K = hvp.KFAC.from_keras(model, (X, X[:, :1]))
    la = hvp.Laplace.from_keras(model, (X, X[:, :1]))
    uses = (
        lambda: H @ np.ones(2),
        lambda: H.product(w),
        lambda: H.value,
        lambda: H.gradient,
        lambda: H.refresh(),
        lambda: hvp.solve(H, np.ones(2)),
        lambda: linear.vjp(np.ones(2)),
        lambda: hvp.HessianOperator(loss, w),
        lambda: hvp.linearize(lambda: w**2, w),
        lambda: hvp.minimize(loss, w),
        lambda: hvp.NewtonCG(loss, w),
        lambda: hvp.ScipyObjective(loss, w),
        lambda: recomputed(w),
        lambda: hvp.check(H),
        lambda: K @ np.ones(4),
        lambda: K.inverse(1.0).to_dense(),
        lambda: hvp.trace(K),
        lambda: la.predict(X),
        lambda: la.sample(2),
        lambda: hvp.laplacian(lambda x: x**2, X),
        lambda: hvp.third_order_product(loss, w, w, w),
        lambda: H.close(),
    )
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends the child if it waits for a thread that it does not have
        try:
            for use in uses:
                os.write(writer, b"%s\n" % outcome_in_child(use).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert lines.read().splitlines() == ["refused"] * len(uses)
    os.waitpid(child, 0)
    np.testing.assert_allclose(H @ np.ones(2), [12, 48], rtol=1e-6)
    linear.close()


def outcome_in_child(use):
    try:
        use()
    except hvp.ProcessError as error:
        return "refused" if "spawn" in str(error) else str(error)
    except BaseException as error:
        return repr(error)
    return "worked"


def test_forked_before_it_is_used_there_is_nothing_to_refuse():
    w, loss = quartic()
    with inside.forked(before_use=True), hvp.HessianOperator(loss, w) as H:
        H @ np.ones(N)
        with inside.forked(), pytest.raises(hvp.ProcessError, match="forked"):
            H @ np.ones(N)


def test_pickles_and_deep_copies_say_what_to_do():
    w, loss = quartic()
    H = hvp.HessianOperator(loss, w)
    for unpicklable in (
        H,
        H + H,
        H.damped(1.0),
        hvp.linearize(lambda: w**3, w),
        hvp.ScipyObjective(H),
        hvp.NeumannInverse(H),
    ):
        for take in (pickle.dumps, copy.deepcopy):
            with pytest.raises(hvp.ProcessError, match="build it again"):
                take(unpicklable)


def test_a_shallow_copy_shares_what_is_evaluated():
    w, loss = quartic()
    with hvp.HessianOperator(loss, w) as H:
        twin = copy.copy(H)
        np.testing.assert_array_equal(twin @ np.ones(N), H @ np.ones(N))
        assert H.stats.gradient_evaluations == 1


@pytest.fixture
def interrupts():
    """Handle interrupts by noting them, and raising what Python would."""
    seen = []

    def handler(*_):
        seen.append("handled")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    yield seen
    assert signal.signal(signal.SIGINT, before) is handler


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.few(1)
def test_an_interrupt_leaves_the_operator_usable(batch_size, interrupts):
    """Interrupted at many moments, in products, solutions and refreshes."""
    problem, dense = network()
    H = hvp.HessianOperator(problem.loss, problem.variables, problem.data, batch_size=batch_size)
    n = H.shape[0]
    v = random(0, n, dtype="float64")
    np.testing.assert_allclose(H @ v, dense @ v, rtol=1e-7, atol=1e-9)
    product, values = H @ v, [w.numpy() for w in inside.variables(H)]

    def work():
        H @ v
        H @ np.stack([v, v], axis=1)
        hvp.solve(H.damped(10.0), v, method="cg", maxiter=20, rtol=1e-12)
        H.refresh()

    handler = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        # The first ones while TensorFlow traces: there an interrupt may leave it in a graph.
        for milliseconds in [
            20,
            50,
            100,
            200,
            400,
            *(range(1, 60, 2) if FUZZ else range(1, 25, 3)),
        ]:
            signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000)
            try:
                work()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert tf.executing_eagerly()
            assert signal.getsignal(signal.SIGINT) is handler
            try:
                again = H @ v
            except hvp.ClosedOperatorError as error:  # between two batches of a refresh
                assert batch_size
                assert "refresh()" in str(error)  # noqa: PT017
                H.refresh()
                again = H @ v
            np.testing.assert_allclose(again, product, rtol=1e-10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(interrupts) > 3
    for now, then in zip(inside.variables(H), values):
        np.testing.assert_array_equal(now, then)
    in_threads(2, lambda number: H @ v)  # no lock is left behind
    H.close()


def interrupting(w, seen, times=1):
    """A loss that is interrupted while it is evaluated; whether it then goes on is noted."""

    def loss(*_):
        for _ in range(times if seen is not None else 0):
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")
        return tf.reduce_sum(w**3)

    return loss


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_an_interrupt_waits_until_tensorflow_is_at_rest(interrupts, engine):
    w = tf.Variable([1.0, 2.0])
    with pytest.raises(KeyboardInterrupt):
        hvp.HessianOperator(interrupting(w, interrupts), w, engine=engine)
    assert set(interrupts[:-1]) == {"went on"}
    assert interrupts[-1] == "handled"
    with hvp.HessianOperator(interrupting(w, None), w, engine=engine) as H:
        np.testing.assert_allclose(H @ np.ones(2), [6, 12], rtol=1e-6)


def test_a_second_interrupt_does_not_wait(interrupts):
    w = tf.Variable([1.0, 2.0])
    with pytest.raises(KeyboardInterrupt):
        hvp.HessianOperator(interrupting(w, interrupts, times=9), w, engine="tape")
    assert interrupts == ["went on", "handled"]
    with hvp.HessianOperator(interrupting(w, None), w) as H:
        np.testing.assert_allclose(H @ np.ones(2), [6, 12], rtol=1e-6)


USES = {
    "product": lambda H: H @ np.ones(2),
    "block": lambda H: H @ np.ones((2, 3)),
    "dense matrix": lambda H: H.to_dense(),
    "solve": lambda H: hvp.solve(H, np.ones(2), method="cg"),
    "inverse": lambda H: hvp.NeumannInverse(H) @ np.ones(2),
    "preconditioner": lambda H: hvp.NystromPreconditioner(H, 1) @ np.ones(2),
    "check": hvp.check,
}


@pytest.mark.parametrize("use", USES)
def test_an_interrupt_waits_while_tensorflow_converts(use, interrupts, monkeypatch):
    """Where one arrives in the middle of `tf.constant`, TensorFlow may crash."""
    w = tf.Variable([1.0, 2.0])
    convert, seen = tf.constant, interrupts

    def constant(*arguments, **options):
        if len(seen) == 0:
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")
        return convert(*arguments, **options)

    with hvp.HessianOperator(lambda: tf.reduce_sum(w**3), w) as H:
        USES[use](H)  # what this traces is not interrupted anyway
        monkeypatch.setattr(tf, "constant", constant)
        with pytest.raises(KeyboardInterrupt):
            USES[use](H)
        assert seen == ["went on", "handled"]
        np.testing.assert_allclose(H @ np.ones(2), [6, 12], rtol=1e-6)


def test_an_interrupt_comes_between_batches(interrupts):
    w, evaluated = tf.Variable([1.0, 2.0]), []

    def loss(x):
        evaluated.append(1)
        if len(evaluated) == before + 2:
            signal.raise_signal(signal.SIGINT)
        return tf.reduce_mean(x) * tf.reduce_sum(w**3)

    before = 1000
    x = np.ones(20, np.float32)
    with hvp.HessianOperator(loss, w, (x,), batch_size=1, engine="tape") as H:
        before = len(evaluated)
        with pytest.raises(KeyboardInterrupt):
            H.refresh()
        assert len(evaluated) < before + 5
        H.refresh()
        np.testing.assert_allclose(H @ np.ones(2), [6, 12], rtol=1e-6)
    assert interrupts == ["handled"]


def test_an_interrupt_that_is_ignored_stays_so():
    w, seen = tf.Variable([1.0, 2.0]), []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with hvp.HessianOperator(interrupting(w, seen), w) as H:
            np.testing.assert_allclose(H @ np.ones(2), [6, 12], rtol=1e-6)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_no_signals_can_be_handled_nothing_is_done(monkeypatch):
    w = tf.Variable([1.0, 2.0])
    handler = signal.getsignal(signal.SIGINT)

    def refused(*_):
        raise ValueError("signal only works in main thread of the main interpreter")

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", refused)
        with hvp.HessianOperator(interrupting(w, None), w, engine="tape") as H:
            np.testing.assert_allclose(H @ np.ones(2), [6, 12], rtol=1e-6)
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupts_are_none_of_other_threads(interrupts):
    w = tf.Variable([1.0, 2.0])

    def work(number):
        handler = signal.getsignal(signal.SIGINT)
        with (
            hvp.HessianOperator(interrupting(w, None), w, engine="tape") as H,
            inside.snapshot(H).exclusively(),
        ):
            assert signal.getsignal(signal.SIGINT) is handler
            np.testing.assert_allclose(H @ np.ones(2), [6, 12], rtol=1e-6)

    in_threads(2, work)
    assert not interrupts


def test_interrupts_wait_for_this_thread_alone(interrupts):
    """What another thread is doing neither holds them up nor lets them through."""
    inside, done = threading.Event(), threading.Event()

    def work():
        with Uninterrupted():
            inside.set()
            done.wait(10)

    def interrupted_within():
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            interrupts.append("went on")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        inside.wait(10)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupts == ["handled"]
        with pytest.raises(KeyboardInterrupt):
            interrupted_within()
        assert interrupts == ["handled", "went on", "handled"]
    finally:
        done.set()
        thread.join()


def test_too_little_memory_is_an_error_in_words(monkeypatch):
    w = tf.Variable(tf.ones(4))

    def loss(x):
        return tf.reduce_mean((x @ w[:, tf.newaxis]) ** 2)

    def raises(*_, **__):  # TensorFlow itself would try for ten seconds
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    with pytest.raises(hvp.OutOfMemoryError, match=r"evaluating the function.*OOM when allocating"):
        hvp.linearize(raises, w)
    # A block that is too wide for the machine does not close the operator.
    with hvp.HessianOperator(loss, w, (np.ones((3, 4), "float32"),)) as H:
        with monkeypatch.context() as patch:
            patch.setattr(inside.held(H), "apply", raises)
            with pytest.raises(hvp.OutOfMemoryError, match="a product"):
                H @ np.ones((4, 2))
        np.testing.assert_allclose(H @ np.ones(4), 8 * np.ones(4))


# TensorFlow gives up at once if oneDNN is disabled; otherwise it tries for ten seconds.
LIMITED = """
import re, resource, sys
import numpy as np
import tensorflow as tf
import hvp

few = tf.Variable(tf.ones(4))

def huge():
    return tf.reduce_sum(few) ** 3 + tf.reduce_sum(tf.sin(tf.fill([2**44], few[0])))

try:
    hvp.HessianOperator(huge, few)
except hvp.OutOfMemoryError as error:
    message = str(error)
for part in (
    "hvp.recompute", "evaluating the gradient", "OOM when allocating", "with the examples as data"
):
    assert part in message, message

w = tf.Variable(np.linspace(-1, 1, 4 * 8000, dtype="float32").reshape(4, 8000))
x = np.ones((8000, 4), "float32")

def loss(x):  # over a tensor of 256 MB, if it is made of all examples at once
    return tf.reduce_mean(tf.reduce_mean(tf.tanh(x @ w), axis=1) ** 2)

first = hvp.HessianOperator(loss, w, (x[:8],))  # what it takes to begin at all
v = np.ones(first.shape[0], "float32")
first @ v
first.close()
used = int(re.search("VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, -1))
try:
    hvp.HessianOperator(loss, w, (x,)) @ v
except hvp.OutOfMemoryError as error:
    message = str(error)
assert "residuals" in message, message
limit = re.search("memory_limit='(\\w+)'", message)[1]
H = hvp.HessianOperator(loss, w, (x,), memory_limit=limit)
assert np.isfinite(np.linalg.norm(H @ v))
print("complete")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
def test_too_little_memory_is_explained_and_the_limit_that_is_advised_works():
    run = subprocess.run(
        [sys.executable, "-c", LIMITED],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stdout == "complete\n", run.stderr[-2000:]
