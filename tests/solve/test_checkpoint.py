"""Checkpoints of runs that are killed, interrupted, or out of disk space."""

import functools
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._runtime.checkpoint import Checkpoint
from hvp._runtime.digest import digest
from tests import inside
from tests.cases import long
from tests.runtime.disk import files_of_at_most
from tests.solve.resumed import ill_conditioned, preconditioned
from tests.solve.systems import columns, matrix, operator

N = 150
MATRIX = np.arange(9.0).reshape(3, 3) / 9
# Solves to the end with a preconditioner. Then solves with a checkpoint at every opportunity, so
# slowly that it can be killed meanwhile.
RUN = """
    import sys
    import time
    import numpy as np
    import pytest
    from tests import inside
    from tests.solve.resumed import ill_conditioned, preconditioned

    _ = [object() for _ in range(1000)]  # changes the addresses of objects
    preconditioned("preconditioned.npz")
    patch = pytest.MonkeyPatch()
    inside.set_limit(patch, "seconds between saves", 0.0)
    inside.set_limit(patch, "iterations in one call", 4)
    inside.set_limit(patch, "columns of a solve", 6)
    inside.before_each(patch, "save of a checkpoint", lambda: time.sleep(0.04))
    result, _ = ill_conditioned(sys.argv[1], "killed.npz")
    np.save("result.npy", result.x)
"""


@pytest.mark.parametrize("method", ["block_cg", long("cg"), long("minres")])
@pytest.mark.long
def test_another_process_resumes_with_the_same_result(tmp_path, method, monkeypatch):
    inside.set_limit(monkeypatch, "columns of a solve", 6)
    whole, products = ill_conditioned(method)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), method],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "killed.npz").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.2)
    process.kill()
    process.wait()
    assert not (tmp_path / "result.npy").exists(), "the run ended before it was killed"
    # In this process it goes on, from what that one has saved.
    resumed, products_here = ill_conditioned(method, tmp_path / "killed.npz")
    np.testing.assert_array_equal(resumed.x, whole.x)
    assert resumed.products == whole.products  # including those before the checkpoint
    assert products_here < products
    # The other solution was complete, with a preconditioner that is an operator.
    result, products_here = preconditioned(tmp_path / "preconditioned.npz")
    assert result.converged
    assert result.products > 5
    assert products_here == 0


@pytest.fixture
def system(monkeypatch):
    inside.set_limit(monkeypatch, "seconds between saves", 0.0)
    inside.set_limit(monkeypatch, "iterations in one call", 4)
    return matrix(np.geomspace(1e-3, 1, N)), columns(N, 3)


def interrupt(H, b, path, calls=3, **options):
    """Solve, and press Ctrl-C after some calls of the graph."""
    interrupted = inside.interrupted("call of the graph of a Krylov method", calls)
    with interrupted, pytest.raises(KeyboardInterrupt):
        hvp.solve(H, b, checkpoint=path, **options)


def test_an_interrupt_saves(system, tmp_path, monkeypatch):
    A, b = system
    H, path = operator(A), tmp_path / "solve.npz"
    whole = hvp.solve(H, b, method="cg")
    inside.set_limit(monkeypatch, "seconds between saves", 1e9)
    interrupt(H, b, path, method="cg")
    before = H.stats.products
    assert path.exists()
    result = hvp.solve(H, b, method="cg", checkpoint=path)
    np.testing.assert_array_equal(result.x, whole.x)
    assert result.products == whole.products
    assert H.stats.products - before < whole.products
    again = hvp.solve(H, b, method="cg", checkpoint=path)  # finished: nothing is computed
    np.testing.assert_array_equal(again.x, whole.x)
    assert H.stats.products - before < whole.products


def test_an_interrupt_during_an_update_saves_nothing_inconsistent(system, tmp_path):
    A, b = system
    H = operator(A)
    whole = hvp.solve(H, b, method="cg", rtol=1e-8)
    for call in range(3):
        path = tmp_path / f"{call}.npz"
        try:
            with inside.interrupted("update of a solution", call):
                hvp.solve(H, b, method="cg", rtol=1e-8, checkpoint=path)
        except KeyboardInterrupt:
            pass
        else:
            assert call == 2  # the residual of the system is computed twice
        again = hvp.solve(H, b, method="cg", rtol=1e-8, checkpoint=path)
        np.testing.assert_array_equal(again.x, whole.x)
        np.testing.assert_array_equal(again.residual_norms, whole.residual_norms)


def test_the_second_method_resumes_too(system, tmp_path, monkeypatch):
    inside.set_limit(monkeypatch, "size of a dense solve", 0)
    _, b = system
    A = matrix(np.concatenate([-np.geomspace(1e-2, 1, 20), np.linspace(0.5, 3, N - 20)]))
    H, path = operator(A), tmp_path / "solve.npz"
    interrupt(H, b, path, calls=12)
    result, whole = hvp.solve(H, b, checkpoint=path), hvp.solve(H, b)
    assert result.method == whole.method == "block_cg, minres"
    np.testing.assert_array_equal(result.x, whole.x)
    np.testing.assert_array_equal(result.negative_curvature, whole.negative_curvature)
    np.testing.assert_array_equal(result.iterations, whole.iterations)


def quadratic(scale=1.0, start=0.0, data=0.0, power=2):
    """Return the Hessian of a loss whose weights, data, constant and operation can be varied."""
    w = tf.Variable(np.full(N, 1.0 + start))
    x = np.arange(2.0 * N).reshape(2, N) / N + data
    return hvp.HessianOperator(
        lambda x: tf.reduce_mean(tf.linalg.matvec(x, w) ** 2) + scale * tf.reduce_sum(w**power),
        w,
        (x,),
    )


OTHERS = {
    "weights": ({"start": 1e-6}, {}),
    "data": ({"data": 1e-9}, {}),
    "a constant": ({"scale": 1.5}, {}),
    "an operation": ({"power": 4}, {}),
    "the right-hand side": ({}, {"b": np.ones(N)}),
    "damping": ({}, {"damping": 0.1}),
    "rtol": ({}, {"rtol": 1e-3}),
    "method": ({}, {"method": "minres"}),
    "preconditioner": ({}, {"M": "diagonal"}),
    "initial guess": ({}, {"x0": np.ones(N)}),
    "maxiter": ({}, {"maxiter": 77}),
}


# The part of the fingerprint that the error names for each.
DIFFERING_PARTS = {
    **dict.fromkeys(("damping", "rtol", "method", "maxiter"), "settings"),
    "a constant": "loss",
    "an operation": "loss",
    "data": "data",
    "initial guess": "start",
    "preconditioner": "preconditioner",
    "the right-hand side": "right-hand sides",
    "weights": "weights",
}


SYSTEM = {"b": np.arange(N, dtype=float), "method": "cg"}


@functools.cache
def original():
    """Return the operator of the run that saves the checkpoint."""
    return quadratic()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint, and the solution in it."""
    path = tmp_path_factory.mktemp("saved") / "solve.npz"
    return path, hvp.solve(original(), **SYSTEM, checkpoint=path).x


def test_another_operator_of_the_same_loss_resumes(saved):
    path, solution = saved
    H = quadratic()
    np.testing.assert_array_equal(hvp.solve(H, **SYSTEM, checkpoint=path).x, solution)
    assert H.stats.products == 0


@pytest.mark.parametrize("other", OTHERS)
def test_the_checkpoint_of_another_run_is_refused(other, saved):
    path, _ = saved
    contents = path.read_bytes()
    change, options = OTHERS[other]
    H = quadratic(**change) if change else original()
    before = H.stats.products
    with pytest.raises(hvp.CheckpointError, match=rf"other\b.*\b{DIFFERING_PARTS[other]}\b"):
        hvp.solve(H, **{**SYSTEM, **options}, checkpoint=path)
    assert path.read_bytes() == contents
    assert H.stats.products - before <= (16 if "M" in options else 0)


def test_batches_have_a_fingerprint():
    def hessian(x, size=4, total="mean"):
        w = tf.Variable(np.ones(3))
        return hvp.HessianOperator(
            lambda x: tf.reduce_mean(tf.linalg.matvec(x, w) ** 2),
            w,
            (x,),
            batch_size=size,
            reduction=total,
        )

    x = np.arange(30.0).reshape(10, 3)
    other = x.copy()
    other[7, 1] += 1e-12
    original = inside.fingerprint(hessian(x))
    assert inside.fingerprint(hessian(x)) == original
    assert inside.fingerprint(hessian(x).damped(1.0)) == original
    for H, part in ((hessian(other), "data"), (hessian(x, total="sum"), "reduction")):
        fingerprint = inside.fingerprint(H)
        assert [key for key in original if original[key] != fingerprint[key]] == [part]


def _loop(function, w, count=3):
    return tf.while_loop(lambda i, a: i < count, lambda i, a: (i + 1, function(a)), (0, w))[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda w: tf.nn.leaky_relu(w, 0.5), lambda w: tf.nn.leaky_relu(w, 0.25)),
        (lambda w: tf.matmul(w, w), lambda w: tf.matmul(w, w, transpose_b=True)),
        (lambda w: tf.exp(w - MATRIX), lambda w: tf.exp(MATRIX - w)),
        (lambda w: tf.sin(tf.cos(w)), lambda w: tf.cos(tf.sin(w))),
        (
            lambda w: _loop(lambda a: tf.nn.leaky_relu(a, 0.5), w),
            lambda w: _loop(lambda a: tf.nn.leaky_relu(a, 0.25), w),
        ),
    ],
    ids=["attribute", "boolean", "order of inputs", "wiring", "body of a loop"],
)
def test_losses_of_the_same_operations_have_different_fingerprints(one, other):
    def fingerprint(function):
        w = tf.Variable(MATRIX)
        return inside.fingerprint(hvp.HessianOperator(lambda: tf.reduce_sum(function(w) ** 2), w))

    expected = fingerprint(one)
    assert fingerprint(one) == expected
    differing = fingerprint(other)
    assert [key for key in expected if expected[key] != differing[key]] == ["loss"]


def test_every_loss_and_every_weight_is_in_the_fingerprint():
    points = {name: (np.arange(6.0).reshape(6, 1),) for name in ("equation", "boundary")}

    def of_losses(power):
        w = tf.Variable(np.ones(1))
        losses = {
            "equation": lambda x: tf.reduce_mean((x * w) ** 2),
            "boundary": lambda x: tf.reduce_mean((x * w) ** power),
        }
        return inside.fingerprint(hvp.HessianOperator(losses, w, points, batch_size=2))

    assert of_losses(2)["loss"] == of_losses(2)["loss"] != of_losses(4)["loss"]

    def of_weights(weight):
        w = tf.Variable(np.ones(1))
        H = hvp.HessianOperator(
            lambda x: tf.reduce_mean((x * w) ** 2),
            w,
            [(np.ones(2),), (np.zeros(3),)],
            weight=weight,
        )
        return inside.fingerprint(H)

    one = of_weights(lambda x: 2 * tf.size(x))
    assert of_weights(lambda x: 2 * tf.size(x)) == one
    other = of_weights(lambda x: tf.size(x) ** 2)
    assert [key for key in one if one[key] != other[key]] == ["data"]


def test_the_exact_method_has_a_checkpoint_too(tmp_path):
    path, b = tmp_path / "solve.npz", np.arange(float(N))
    H = original()
    first = hvp.solve(H, b, method="exact", checkpoint=path)
    products = H.stats.products
    again = hvp.solve(H, b, method="exact", checkpoint=path)
    np.testing.assert_array_equal(again.x, first.x)
    assert H.stats.products == products
    with pytest.raises(hvp.CheckpointError):
        hvp.solve(H, 2 * b, method="exact", checkpoint=path)
    with pytest.raises(hvp.CheckpointError):
        hvp.solve(H, b, method="exact", checkpoint=3)


def test_files_that_are_not_checkpoints(tmp_path):
    H, b = original(), np.ones(N)
    for contents in (b"", b"something", b"PK\x03\x04broken"):
        path = tmp_path / "other.npz"
        path.write_bytes(contents)
        with pytest.raises(hvp.CheckpointError, match=r"(no|not a) checkpoint") as error:
            hvp.solve(H, b, method="cg", checkpoint=path)
        assert "pickle" not in str(error.value)
        assert path.read_bytes() == contents
    np.savez(tmp_path / "arrays.npz", x=np.ones(3))
    with pytest.raises(hvp.CheckpointError, match=r"(no|not a) checkpoint"):
        hvp.solve(H, b, method="cg", checkpoint=tmp_path / "arrays.npz")
    with pytest.raises(hvp.CheckpointError, match="a folder that exists"):
        hvp.solve(H, b, method="cg", checkpoint=tmp_path / "nowhere" / "file.npz")
    with pytest.raises(hvp.CheckpointError, match="The checkpoint is bool"):
        hvp.solve(H, b, method="cg", checkpoint=True)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """A limit on the size of files simulates a full disk."""
    path = tmp_path / "file.npz"
    file = Checkpoint(path, {"call": "this run"}, 0.0)
    file.save({"x": np.arange(10.0)})
    with files_of_at_most(20000), pytest.warns(RuntimeWarning) as caught:
        file.save({"x": np.arange(10000.0)})
    message = str(caught[0].message)
    assert "could not save the checkpoint" in message
    assert "the computation continues" in message
    assert file.load()["x"].sum() == 45
    assert [p.name for p in tmp_path.iterdir()] == ["file.npz"]


def test_digests_depend_on_values_shapes_and_types():
    x = np.arange(6.0)
    others = [x, x.reshape(2, 3), x.astype("float32"), x[::-1]]
    assert len(set(map(digest, others))) == len(others)
    assert digest(np.asfortranarray(x.reshape(2, 3))) == digest(x.reshape(2, 3))


def test_due_after_the_interval(tmp_path):
    file = Checkpoint(tmp_path / "file.npz", {"call": "this run"}, 0.05)
    assert not file.due
    time.sleep(0.06)
    assert file.due
    file.save({})
    assert not file.due
