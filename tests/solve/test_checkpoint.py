"""Nothing is lost: runs that are killed, interrupted, or out of disk space."""

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
from hvp._solve import equations, krylov
from tests import inside
from tests.cases import FUZZ
from tests.solve.systems import columns, matrix, operator

N = 150
# Solves, and says how many products it needed; saves whenever it can.
RUN = """
    import sys
    import time
    import numpy as np
    import hvp
    from hvp._runtime import checkpoint
    from hvp._solve import equations, krylov
    from tests.solve.systems import columns, matrix, operator

    checkpoint.INTERVAL = 0.0
    krylov._LONGEST, equations._WIDEST = 4, 6
    save = checkpoint.Checkpoint.save

    def slowly(self, arrays):
        save(self, arrays)
        time.sleep(0.04)

    checkpoint.Checkpoint.save = slowly
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
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path, method, monkeypatch):
    path = tmp_path / "solve.npz"
    monkeypatch.setattr(equations, "_WIDEST", 6)
    A, b = matrix(np.geomspace(1e-3, 1, 300)), columns(300, 12)
    whole = hvp.solve(operator(A), b, method=method, rtol=1e-8)
    first = start(tmp_path, path, method, tmp_path / "first.npy")
    assert first.stdout.readline() == "ready\n"
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.3)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (tmp_path / "first.npy").exists(), "it ended before it was killed"
    second = start(tmp_path, path, method, tmp_path / "second.npy")
    counted, computed = map(int, second.communicate()[0].split()[1:])
    assert second.returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "second.npy"), whole.x)
    assert counted == whole.products  # what was saved included
    assert computed < whole.products


@pytest.fixture
def system(monkeypatch):
    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)
    monkeypatch.setattr(krylov, "_LONGEST", 4)
    return matrix(np.geomspace(1e-3, 1, N)), columns(N, 3)


def interrupted(monkeypatch, H, b, path, calls=3, **options):
    """Press Ctrl-C after some calls of the graph."""
    further = krylov.Krylov._take_out
    cycle = krylov.Krylov._told
    seen = []

    def told(self, *arguments):
        seen.append(1)
        if len(seen) > calls:
            raise KeyboardInterrupt
        return cycle(self, *arguments)

    monkeypatch.setattr(krylov.Krylov, "_told", told)
    with pytest.raises(KeyboardInterrupt):
        hvp.solve(H, b, checkpoint=path, **options)
    monkeypatch.setattr(krylov.Krylov, "_told", cycle)
    assert krylov.Krylov._take_out is further


def test_an_interrupt_saves(system, tmp_path, monkeypatch):
    A, b = system
    H, path = operator(A), tmp_path / "solve.npz"
    monkeypatch.setattr(checkpoint, "INTERVAL", 1e9)
    interrupted(monkeypatch, H, b, path, method="cg")
    before = H.stats.products
    assert path.exists()
    whole = hvp.solve(operator(A), b, method="cg")
    result = hvp.solve(H, b, method="cg", checkpoint=path)
    np.testing.assert_array_equal(result.x, whole.x)
    assert result.products == whole.products
    assert H.stats.products - before < whole.products
    again = hvp.solve(H, b, method="cg", checkpoint=path)  # done: nothing is computed
    np.testing.assert_array_equal(again.x, whole.x)
    assert H.stats.products - before < whole.products


@pytest.mark.parametrize("call", range(3))
def test_an_interrupt_in_the_middle_of_a_change_saves_nothing_wrong(
    system, tmp_path, monkeypatch, call
):
    A, b = system
    H, path = operator(A), tmp_path / "solve.npz"
    whole = hvp.solve(H, b, method="cg", rtol=1e-8)
    norms, calls = krylov.norms, []

    def interrupted(rows):
        calls.append(1)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return norms(rows)

    monkeypatch.setattr(krylov, "norms", interrupted)
    try:
        hvp.solve(H, b, method="cg", rtol=1e-8, checkpoint=path)
    except KeyboardInterrupt:
        pass
    else:
        assert call == 2  # there were two looks at the residuals
    monkeypatch.setattr(krylov, "norms", norms)
    again = hvp.solve(H, b, method="cg", rtol=1e-8, checkpoint=path)
    np.testing.assert_array_equal(again.x, whole.x)
    np.testing.assert_array_equal(again.residual_norms, whole.residual_norms)


def test_the_second_method_goes_on_too(system, tmp_path, monkeypatch):
    monkeypatch.setattr("hvp._solve.solve._DENSE", 0)
    _, b = system
    A = matrix(np.concatenate([-np.geomspace(1e-2, 1, 20), np.linspace(0.5, 3, N - 20)]))
    H, path = operator(A), tmp_path / "solve.npz"
    interrupted(monkeypatch, H, b, path, calls=12)
    result, whole = hvp.solve(H, b, checkpoint=path), hvp.solve(operator(A), b)
    assert result.method == whole.method == "block_cg, minres"
    np.testing.assert_array_equal(result.x, whole.x)
    np.testing.assert_array_equal(result.negative_curvature, whole.negative_curvature)
    np.testing.assert_array_equal(result.iterations, whole.iterations)


def quadratic(scale=1.0, start=0.0, data=0.0, power=2):
    """Return an operator of a loss with data, a constant, and an operation of one's choice."""
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
    "first guess": ({}, {"x0": np.ones(N)}),
    "maxiter": ({}, {"maxiter": 77}),
}


# What the refusal says of them.
DIFFERS = {
    **dict.fromkeys(("damping", "rtol", "method", "maxiter"), "settings"),
    "a constant": "loss",
    "an operation": "loss",
    "data": "data",
    "first guess": "start",
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
    )  # another operator, of the same
    contents = path.read_bytes()
    change, options = OTHERS[other]
    H = quadratic(**change)
    before = H.stats.products
    with pytest.raises(hvp.CheckpointError, match=f"is of other .*{DIFFERS[other]}"):
        hvp.solve(H, **{**call, **options}, checkpoint=path)
    assert path.read_bytes() == contents
    assert H.stats.products - before <= (16 if "M" in options else 0)


def test_batches_have_a_fingerprint():
    def made(x, size=4, total="mean"):
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
    same = inside.fingerprint(made(x))
    assert inside.fingerprint(made(x)) == same
    assert inside.fingerprint(made(x).damped(1.0)) == same
    for changed, name in ((made(other), "data"), (made(x, total="sum"), "reduction")):
        differing = inside.fingerprint(changed)
        assert [key for key in same if same[key] != differing[key]] == [name]


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


def test_files_that_are_no_checkpoints(tmp_path):
    H, b = quadratic(), np.ones(N)
    for contents in (b"", b"something", b"PK\x03\x04broken"):
        path = tmp_path / "other.npz"
        path.write_bytes(contents)
        with pytest.raises(hvp.CheckpointError, match="no checkpoint of hvp's") as error:
            hvp.solve(H, b, method="cg", checkpoint=path)
        assert "pickle" not in str(error.value)
        assert path.read_bytes() == contents
    np.savez(tmp_path / "arrays.npz", x=np.ones(3))
    with pytest.raises(hvp.CheckpointError, match="no checkpoint of hvp's"):
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
    kept = Checkpoint(path, {"call": "this run"}, 0.0)
    kept.save({"x": np.arange(10.0)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept.save({"x": np.arange(10000.0)})
    print(caught[0].message)
    print(kept.load()["x"].sum())
"""


def test_a_full_disk_leaves_what_was_saved(tmp_path):
    """The limit on the size of files stands for a disk that is full."""
    script, path = tmp_path / "run.py", tmp_path / "file.npz"
    script.write_text(textwrap.dedent(FULL))
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said, found = done.stdout.splitlines()
    assert "could not save the checkpoint" in said
    assert "it goes on" in said
    assert float(found) == 45
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.npz", "run.py"]


def test_digests_tell_values_shapes_and_types():
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
    _ = [object() for _ in range(int(sys.argv[2]))]  # other addresses in each process
    M = aslinearoperator(np.diag(1 / factors**0.5))
    before = H.stats.products
    result = hvp.solve(H, np.ones(40), method="cg", M=M, checkpoint=sys.argv[1])
    print(result.converged, H.stats.products - before)
"""


def test_with_an_operator_as_preconditioner_it_resumes_in_another_process(tmp_path):
    script, path = tmp_path / "run.py", tmp_path / "solve.npz"
    script.write_text(textwrap.dedent(PRECONDITIONED))
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    said = [
        subprocess.run(
            [sys.executable, str(script), str(path), count],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for count in ("10", "1000")
    ]
    assert [converged for converged, _ in said] == ["True", "True"]
    assert int(said[0][1]) > 5
    assert int(said[1][1]) == 0


def test_due_after_the_interval(tmp_path):
    kept = Checkpoint(tmp_path / "file.npz", {"call": "this run"}, 0.05)
    assert not kept.due
    time.sleep(0.06)
    assert kept.due
    kept.save({})
    assert not kept.due
