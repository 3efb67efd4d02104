"""Checkpoints of runs that are killed, interrupted, or out of disk space."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._runtime import checkpoint
from hvp._runtime.checkpoint import Checkpoint
from hvp._runtime.digest import digest
from hvp._solve import equations, krylov, solve
from tests import inside
from tests.cases import FUZZ
from tests.solve.systems import columns, matrix, operator

N = 150
# Solves with a checkpoint at every opportunity, and prints the number of products.
RUN = """
    import sys
    import time
    import numpy as np
    import hvp
    from hvp._runtime import checkpoint
    from hvp._solve import equations, krylov
    from tests.solve.systems import columns, matrix, operator

    checkpoint.INTERVAL = 0.0
    krylov._MAX_ITERATIONS, equations._MAX_COLUMNS = 4, 6
    save = checkpoint.Checkpoint.save

    def save_slowly(self, arrays):
        save(self, arrays)
        time.sleep(0.04)

    checkpoint.Checkpoint.save = save_slowly
    path, method, out = sys.argv[1:]
    H = operator(matrix(np.geomspace(1e-3, 1, 300)))
    print("ready", flush=True)
    result = hvp.solve(H, columns(300, 12), method=method, rtol=1e-8, checkpoint=path)
    np.save(out, result.x)
    print(result.products, H.stats.products)
"""


def start(tmp_path, path, method, out):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(script), str(path), method, str(out)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


@pytest.mark.parametrize("method", ["block_cg", "cg", "minres"] if FUZZ else ["block_cg"])
def test_a_killed_run_resumes_with_the_same_result(tmp_path, method, monkeypatch):
    path = tmp_path / "solve.npz"
    monkeypatch.setattr(equations, "_MAX_COLUMNS", 6)
    A, b = matrix(np.geomspace(1e-3, 1, 300)), columns(300, 12)
    whole = hvp.solve(operator(A), b, method=method, rtol=1e-8)
    first = start(tmp_path, path, method, tmp_path / "first.npy")
    assert first.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.3)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (tmp_path / "first.npy").exists(), "the run ended before it was killed"
    # In this process it goes on, from what that one has saved.
    H = operator(A)
    resumed = hvp.solve(H, b, method=method, rtol=1e-8, checkpoint=path)
    np.testing.assert_array_equal(resumed.x, whole.x)
    assert resumed.products == whole.products  # including those before the checkpoint
    assert H.stats.products < whole.products


@pytest.fixture
def system(monkeypatch):
    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)
    monkeypatch.setattr(krylov, "_MAX_ITERATIONS", 4)
    return matrix(np.geomspace(1e-3, 1, N)), columns(N, 3)


def interrupt(monkeypatch, H, b, path, calls=3, **options):
    """Solve, and press Ctrl-C after some calls of the graph."""
    parameters = krylov.Krylov._parameters
    count = 0

    def interrupting(self, *arguments):
        nonlocal count
        count += 1
        if count > calls:
            raise KeyboardInterrupt
        return parameters(self, *arguments)

    monkeypatch.setattr(krylov.Krylov, "_parameters", interrupting)
    with pytest.raises(KeyboardInterrupt):
        hvp.solve(H, b, checkpoint=path, **options)
    monkeypatch.setattr(krylov.Krylov, "_parameters", parameters)


def test_an_interrupt_saves(system, tmp_path, monkeypatch):
    A, b = system
    H, path = operator(A), tmp_path / "solve.npz"
    monkeypatch.setattr(checkpoint, "INTERVAL", 1e9)
    interrupt(monkeypatch, H, b, path, method="cg")
    before = H.stats.products
    assert path.exists()
    whole = hvp.solve(operator(A), b, method="cg")
    result = hvp.solve(H, b, method="cg", checkpoint=path)
    np.testing.assert_array_equal(result.x, whole.x)
    assert result.products == whole.products
    assert H.stats.products - before < whole.products
    again = hvp.solve(H, b, method="cg", checkpoint=path)  # finished: nothing is computed
    np.testing.assert_array_equal(again.x, whole.x)
    assert H.stats.products - before < whole.products


@pytest.mark.parametrize("call", range(3))
def test_an_interrupt_during_an_update_saves_nothing_inconsistent(
    system, tmp_path, monkeypatch, call
):
    A, b = system
    H, path = operator(A), tmp_path / "solve.npz"
    whole = hvp.solve(H, b, method="cg", rtol=1e-8)
    norms, calls = krylov.norms, []

    def interrupting(rows):
        calls.append(1)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return norms(rows)

    monkeypatch.setattr(krylov, "norms", interrupting)
    try:
        hvp.solve(H, b, method="cg", rtol=1e-8, checkpoint=path)
    except KeyboardInterrupt:
        pass
    else:
        assert call == 2  # the residual of the system is computed twice
    monkeypatch.setattr(krylov, "norms", norms)
    again = hvp.solve(H, b, method="cg", rtol=1e-8, checkpoint=path)
    np.testing.assert_array_equal(again.x, whole.x)
    np.testing.assert_array_equal(again.residual_norms, whole.residual_norms)


def test_the_second_method_resumes_too(system, tmp_path, monkeypatch):
    monkeypatch.setattr(solve, "_DENSE", 0)
    _, b = system
    A = matrix(np.concatenate([-np.geomspace(1e-2, 1, 20), np.linspace(0.5, 3, N - 20)]))
    H, path = operator(A), tmp_path / "solve.npz"
    interrupt(monkeypatch, H, b, path, calls=12)
    result, whole = hvp.solve(H, b, checkpoint=path), hvp.solve(operator(A), b)
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


@pytest.mark.parametrize("other", OTHERS)
def test_the_checkpoint_of_another_run_is_refused(other, tmp_path):
    path, call = tmp_path / "solve.npz", {"b": np.arange(N, dtype=float), "method": "cg"}
    result = hvp.solve(quadratic(), **call, checkpoint=path)
    np.testing.assert_array_equal(
        hvp.solve(quadratic(), **call, checkpoint=path).x, result.x
    )  # another operator with the same weights, data and loss
    contents = path.read_bytes()
    change, options = OTHERS[other]
    H = quadratic(**change)
    before = H.stats.products
    with pytest.raises(hvp.CheckpointError, match=rf"other\b.*\b{DIFFERING_PARTS[other]}\b"):
        hvp.solve(H, **{**call, **options}, checkpoint=path)
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


def test_the_exact_method_has_a_checkpoint_too(tmp_path):
    path, b = tmp_path / "solve.npz", np.arange(float(N))
    first = hvp.solve(quadratic(), b, method="exact", checkpoint=path)
    H = quadratic()
    again = hvp.solve(H, b, method="exact", checkpoint=path)
    np.testing.assert_array_equal(again.x, first.x)
    assert H.stats.products == 0
    with pytest.raises(hvp.CheckpointError):
        hvp.solve(H, 2 * b, method="exact", checkpoint=path)
    with pytest.raises(hvp.CheckpointError):
        hvp.solve(H, b, method="exact", checkpoint=3)


def test_files_that_are_not_checkpoints(tmp_path):
    H, b = quadratic(), np.ones(N)
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


FULL = """
    import resource, sys, warnings
    import numpy as np
    from hvp._runtime.checkpoint import Checkpoint

    path = sys.argv[1]
    file = Checkpoint(path, {"call": "this run"}, 0.0)
    file.save({"x": np.arange(10.0)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        file.save({"x": np.arange(10000.0)})
    print(caught[0].message)
    print(file.load()["x"].sum())
"""


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """A limit on the size of files simulates a full disk."""
    script, path = tmp_path / "run.py", tmp_path / "file.npz"
    script.write_text(textwrap.dedent(FULL))
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run(
        [sys.executable, str(script), str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    message, total = run.stdout.splitlines()
    assert "could not save the checkpoint" in message
    assert "the computation continues" in message
    assert float(total) == 45
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.npz", "run.py"]


def test_digests_depend_on_values_shapes_and_types():
    x = np.arange(6.0)
    others = [x, x.reshape(2, 3), x.astype("float32"), x[::-1]]
    assert len(set(map(digest, others))) == len(others)
    assert digest(np.asfortranarray(x.reshape(2, 3))) == digest(x.reshape(2, 3))


PRECONDITIONED = """
    import sys
    import numpy as np
    import tensorflow as tf
    from scipy.sparse.linalg import aslinearoperator
    import hvp

    factors = np.geomspace(1, 1e3, 40)
    w = tf.Variable(np.ones(40))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(factors * w**2) / 2, w)
    _ = [object() for _ in range(int(sys.argv[2]))]  # changes the addresses of objects
    M = aslinearoperator(np.diag(1 / factors**0.5))
    before = H.stats.products
    result = hvp.solve(H, np.ones(40), method="cg", M=M, checkpoint=sys.argv[1])
    print(result.converged, H.stats.products - before)
"""


def test_an_operator_as_preconditioner_resumes_in_another_process(tmp_path):
    script, path = tmp_path / "run.py", tmp_path / "solve.npz"
    script.write_text(textwrap.dedent(PRECONDITIONED))
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    outputs = [
        subprocess.run(
            [sys.executable, str(script), str(path), count],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for count in ("10", "1000")
    ]
    assert [converged for converged, _ in outputs] == ["True", "True"]
    assert int(outputs[0][1]) > 5
    assert int(outputs[1][1]) == 0


def test_due_after_the_interval(tmp_path):
    file = Checkpoint(tmp_path / "file.npz", {"call": "this run"}, 0.05)
    assert not file.due
    time.sleep(0.06)
    assert file.due
    file.save({})
    assert not file.due
