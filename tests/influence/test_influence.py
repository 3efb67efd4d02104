"""Influence functions, compared with closed forms and with retraining."""

import functools
import os
import re
import subprocess
import sys
import textwrap
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator

import hvp
from hvp._influence.score_store import mapped_array
from tests import inside
from tests.cases import long
from tests.influence.regression import (
    RIDGE,
    TEST,
    X_TEST,
    Y_TEST,
    N,
    P,
    T,
    X,
    Y,
    closed_form,
    ridge,
)
from tests.runtime.disk import files_of_at_most


@functools.cache
def shared(solver="auto"):
    """Return linear regression at its minimum, and its influence functions, traced once.

    The weights are not changed by any test.
    """
    w, loss, bare, data = ridge()
    return w, hvp.InfluenceFunctions(loss, w, data, test_loss=bare, solver=solver)


@pytest.mark.parametrize(
    "solver", [*map(long, ["auto", "cg", "minres"]), "exact", "block_cg", "neumann"]
)
@pytest.mark.few(1)
def test_linear_regression_has_the_closed_form(solver):
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(
        loss, w, data, test_loss=bare, solver=solver, damping=0.2, rtol=1e-12
    )
    H, train, test = closed_form(w)
    inverse = np.linalg.inv(H + 0.2 * np.eye(P))
    close = {"rtol": 1e-8, "atol": 1e-10}
    np.testing.assert_allclose(influence.scores(TEST), test @ inverse @ train.T / N, **close)
    own = np.einsum("ip,pq,iq->i", train, inverse, train) / N
    np.testing.assert_allclose(influence.self_influence(), own, **close)
    change = inverse @ train[[3, 8, 20]].sum(axis=0) / N
    np.testing.assert_allclose(influence.parameter_change([3, 8, 20]), change, **close)
    np.testing.assert_allclose(influence.group([8, 3, 20], TEST), test @ change, **close)
    mask = np.isin(np.arange(N), [3, 8, 20])
    np.testing.assert_allclose(influence.group(mask), train @ change, **close)


def test_separate_regularization_belongs_to_no_example():
    w, _, bare, data = ridge()
    influence = hvp.InfluenceFunctions(
        bare, w, data, regularization=lambda: RIDGE / 2 * tf.reduce_sum(w**2)
    )
    H, train, test = closed_form(w, penalized=False)
    expected = test @ np.linalg.inv(H) @ train.T / N
    np.testing.assert_allclose(influence.scores(TEST), expected, rtol=1e-8)


def test_signs_and_sizes_match_retraining():
    """For linear regression, retraining has a closed form."""
    w, influence = shared()
    scores = influence.scores(TEST)
    before = (X_TEST @ w.numpy() - Y_TEST) ** 2 / 2
    for i in range(N):
        rest = np.arange(N) != i
        A = X[rest].T @ X[rest] / (N - 1) + RIDGE * np.eye(P)
        retrained = np.linalg.solve(A, X[rest].T @ Y[rest] / (N - 1))
        actual = retrained - w.numpy()
        predicted = influence.parameter_change(i)
        assert predicted @ actual > 0.95 * np.linalg.norm(predicted) * np.linalg.norm(actual)
        assert np.linalg.norm(predicted - actual) < 0.5 * np.linalg.norm(actual)
        after = (X_TEST @ retrained - Y_TEST) ** 2 / 2
        change = after - before
        large = np.abs(change) > 0.3 * np.abs(change).max()
        assert (np.sign(change) == np.sign(scores[:, i]))[large].all()


def test_logistic_regression_has_the_closed_form():
    labels = (Y > 0).astype("float64")
    w = tf.Variable(np.zeros(P))

    def bare(x, y):
        logits = tf.linalg.matvec(x, w)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))

    def loss(x, y):
        return bare(x, y) + 0.05 * tf.reduce_sum(w**2)

    hvp.minimize(loss, w, (X, labels), method="Newton-CG", options={"xtol": 1e-12})
    s = 1 / (1 + np.exp(-X @ w.numpy()))
    H = (X * (s * (1 - s))[:, None]).T @ X / N + 0.1 * np.eye(P)
    train = (s - labels)[:, None] * X + 0.1 * w.numpy()
    s_test = 1 / (1 + np.exp(-X_TEST @ w.numpy()))
    test = (s_test - (Y_TEST > 0))[:, None] * X_TEST
    influence = hvp.InfluenceFunctions(loss, w, (X, labels), test_loss=bare)
    np.testing.assert_allclose(
        influence.scores((X_TEST, (Y_TEST > 0).astype("float64"))),
        test @ np.linalg.inv(H) @ train.T / N,
        rtol=1e-8,
        atol=1e-12,
    )


def largest_only(H, rank):
    """The inverse on the eigenvectors of the largest eigenvalues, as in the documentation."""
    eigenvalues, U = hvp.eigsh(H, rank, "LM", tol=1e-12)
    return LinearOperator(H.shape, lambda b: U @ (U.T @ b.ravel() / eigenvalues), dtype=H.dtype)


def test_a_function_may_invert_on_a_subspace_only():
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(
        loss, w, data, test_loss=bare, solver=lambda H: largest_only(H, 2)
    )
    H, train, test = closed_form(w)
    values, vectors = np.linalg.eigh(H)
    projected = vectors[:, -2:] / values[-2:] @ vectors[:, -2:].T
    np.testing.assert_allclose(influence.scores(TEST), test @ projected @ train.T / N, atol=1e-8)


@pytest.mark.parametrize("kind", ["dataset", "list", "dict", "batch_size", "memory_limit", "tape"])
@pytest.mark.few(1)
def test_scores_do_not_depend_on_batching(kind):
    w, loss, bare, data = ridge()
    train, options = data, {}
    if kind == "dataset":
        train = tf.data.Dataset.from_tensor_slices(data).batch(25)
    elif kind == "list":
        train = [(X[:11], Y[:11]), (X[11:22], Y[11:22]), (X[22:], Y[22:])]
    elif kind == "dict":
        train = {"y": data[1], "x": data[0]}
    else:
        options = {
            "batch_size": {"batch_size": 15},
            "memory_limit": {"memory_limit": "20 KB"},
            "tape": {"engine": "tape"},
        }[kind]
    influence = hvp.InfluenceFunctions(loss, w, train, test_loss=bare, **options)
    assert influence.n_train == N
    if kind == "memory_limit":  # gradients get a quarter of it: 31 examples of 160 bytes
        assert inside.scoring(influence).gradients.at_once == 5000 // (5 * 8 * 4) == 31
        assert influence.operator.stats.batches > 1
    H, train_gradients, test_gradients = closed_form(w)
    inverse = np.linalg.inv(H)
    np.testing.assert_allclose(
        influence.scores(TEST), test_gradients @ inverse @ train_gradients.T / N, rtol=1e-8
    )
    change = inverse @ train_gradients[[2, 35]].sum(axis=0) / N
    np.testing.assert_allclose(influence.parameter_change([35, 2]), change, rtol=1e-8)


def make_blocks_small(monkeypatch):
    """Limit blocks to three right-hand sides, and calls to the gradients of four examples."""
    inside.set_limit(monkeypatch, "right-hand sides of influence", 3)
    inside.set_limit(monkeypatch, "bytes of example gradients", 4 * P * 8)


def test_scores_do_not_depend_on_blocks(monkeypatch):
    w, loss, bare, data = ridge()
    _, whole = shared()
    make_blocks_small(monkeypatch)
    pieces = hvp.InfluenceFunctions(loss, w, data, test_loss=bare)
    np.testing.assert_allclose(pieces.scores(TEST), whole.scores(TEST), rtol=1e-10)
    np.testing.assert_allclose(pieces.self_influence(), whole.self_influence(), rtol=1e-10)
    np.testing.assert_allclose(pieces.group([1, 2], TEST), whole.group([1, 2], TEST), rtol=1e-10)


def test_top():
    _, influence = shared()
    scores, top = influence.scores(TEST), influence.top(TEST, k=3)
    for t in range(T):
        assert set(top.helpful[t]) == set(np.argsort(-scores[t])[:3])
        np.testing.assert_array_equal(top.helpful_scores[t], np.sort(scores[t])[::-1][:3])
        assert set(top.harmful[t]) == set(np.argsort(scores[t])[:3])
        np.testing.assert_array_equal(top.harmful_scores[t], np.sort(scores[t])[:3])
    assert influence.top(TEST, k=1000).helpful.shape == (T, N)
    with pytest.raises(hvp.HvpError, match="k is 0"):
        influence.top(TEST, k=0)


@pytest.mark.parametrize("convolutional", [long(False), True])
def test_keras_models(convolutional):
    """The regularizer is part of the training loss, but not of the test loss."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))]
    if convolutional:
        layers = [
            keras.layers.Reshape((P, 1, 1)),
            keras.layers.Conv2D(2, (2, 1), activation="tanh"),
            keras.layers.Flatten(),
            *layers,
        ]
    model = keras.Sequential([keras.Input((P,)), *layers, keras.layers.Dense(1)])
    model.compile(loss="mse")
    x, y = X.astype("float32"), Y.astype("float32")[:, None]
    test = X_TEST.astype("float32"), Y_TEST.astype("float32")[:, None]
    influence = hvp.InfluenceFunctions.from_keras(model, (x, y), damping=5.0)
    scores = influence.scores(test)
    variables = [v.value for v in model.trainable_variables]

    def gradient(x, y, penalty):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean((model(x) - y) ** 2)
            if penalty:
                value += tf.add_n(model.losses)
        return np.concatenate([g.numpy().ravel() for g in tape.gradient(value, variables)])

    train = np.stack([gradient(x[i : i + 1], y[i : i + 1], True) for i in range(N)])
    tests = np.stack([gradient(test[0][i : i + 1], test[1][i : i + 1], False) for i in range(T)])
    H = influence.operator.to_dense().astype("float64")
    expected = tests @ np.linalg.solve(H, train.T) / N
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("unrolls", [False, True])
@pytest.mark.parametrize("kind", ["GRU", long("LSTM"), long("Bidirectional")])
@pytest.mark.few(1)
@pytest.mark.long
def test_recurrent_models(kind, unrolls, monkeypatch, capfd):
    """The loops that TensorFlow cannot vectorize run, or are written out after a while."""
    inside.set_limit(monkeypatch, "seconds to trace a step", 0.0 if unrolls else 1e9)

    def model(unroll):
        keras.utils.set_random_seed(0)
        layer = getattr(keras.layers, "LSTM" if kind == "LSTM" else "GRU")(3, unroll=unroll)
        layer = keras.layers.Bidirectional(layer) if kind == "Bidirectional" else layer
        embedding = keras.layers.Embedding(7, 2, mask_zero=not unroll)
        layers = [keras.layers.Input((5,)), embedding, layer, keras.layers.Dense(2)]
        made = keras.Sequential(layers)
        made.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    rng = np.random.default_rng(0)
    x, y = rng.integers(1, 7, (20, 5)), rng.integers(0, 2, 20)
    loops, plain = model(False), model(True)
    plain.set_weights(loops.get_weights())
    scores = [
        hvp.InfluenceFunctions.from_keras(one, (x, y), damping=2.0).scores((x[:3], y[:3]))
        for one in (loops, plain)
    ]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4 * np.abs(scores[1]).max())
    written = capfd.readouterr()
    assert "pfor" not in written.out + written.err
    assert all(not getattr(layer, "unroll", False) for layer in loops.layers)


def test_scores_are_written_to_a_file(tmp_path):
    _, influence = shared()
    scores = influence.scores(TEST, out=tmp_path / "scores.npy")
    assert isinstance(scores, np.memmap)
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), influence.scores(TEST))
    with pytest.raises(hvp.HvpError, match="out is 3"):
        influence.scores(TEST, out=3)
    with pytest.raises(hvp.HvpError, match="cannot be written"):
        influence.scores(TEST, out=tmp_path / "nowhere" / "scores.npy")
    with pytest.raises(hvp.HvpError, match=r"scores.npy exists.*remove it"):
        influence.scores(TEST, out=tmp_path / "scores.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), scores)


def test_a_full_disk_raises_at_the_start(tmp_path):
    with (
        files_of_at_most(20000),
        pytest.raises(hvp.HvpError, match="room for 100 x 100 numbers"),
    ):
        mapped_array(tmp_path / "scores.npy", (100, 100), np.dtype("float64"))


# Saves a checkpoint at every opportunity, so slowly that it can be killed meanwhile.
RUN = """
    import sys
    import time
    import numpy as np
    import pytest
    import hvp
    from tests import inside
    from tests.influence.regression import TEST, ridge

    patch = pytest.MonkeyPatch()
    inside.set_limit(patch, "seconds between saves", 0.0)
    inside.set_limit(patch, "right-hand sides of influence", 2)
    inside.before_each(patch, "save of a checkpoint", lambda: time.sleep(0.1))
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(loss, w, data, test_loss=bare, solver="block_cg")
    inside.scoring(influence).gradients.at_once = 11
    scores = influence.scores(TEST, out=sys.argv[1] or None, checkpoint="scores.npz")
    np.save("result.npy", scores)
"""


@pytest.mark.parametrize("out", [long(""), "scores.npy"])
@pytest.mark.few(0)
def test_a_killed_run_resumes_with_the_same_result(tmp_path, monkeypatch, out):
    inside.set_limit(monkeypatch, "right-hand sides of influence", 2)
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(loss, w, data, test_loss=bare, solver="block_cg")
    inside.scoring(influence).gradients.at_once = 11
    whole = influence.scores(TEST, checkpoint=tmp_path / "whole.npz")
    (tmp_path / "whole.npz").unlink()
    products = influence.operator.stats.products
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), out],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "scores.npz").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.6)
    process.kill()
    process.wait()
    assert not (tmp_path / "result.npy").exists(), "the run ended before it was killed"
    # In this process it goes on, from what that one has saved.
    monkeypatch.chdir(tmp_path)
    scores = influence.scores(TEST, out=out or None, checkpoint="scores.npz")
    assert influence.operator.stats.products - products < products
    np.testing.assert_array_equal(scores, whole)
    assert {path.name for path in tmp_path.iterdir()} == {"scores.npz"} | ({out} if out else set())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the checkpoint of a complete run, and its scores."""
    path = tmp_path_factory.mktemp("saved") / "scores.npz"
    return path, shared("cg")[1].scores(TEST, checkpoint=path)


def test_the_same_run_resumes_with_the_same_result(saved):
    path, scores = saved
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(loss, w, data, test_loss=bare, solver="cg")
    np.testing.assert_array_equal(influence.scores(TEST, checkpoint=path), scores)
    assert influence.operator.stats.products == 0


# What differs from the run that saved, and the part of the fingerprint that the error names.
DIFFERING_PARTS = {
    "train": "training data",
    "test": "test data",
    "weights": "weights",
    "damping": "settings",
    "solver": "solver",
    "test loss": "test loss",
}


@pytest.mark.parametrize("part", DIFFERING_PARTS)
@pytest.mark.few(3)
def test_the_checkpoint_of_another_run_is_refused(saved, part):
    path, _ = saved
    w, loss, bare, (x, y) = ridge()
    test, options = TEST, {"test_loss": bare, "solver": "cg"}
    if part == "train":
        x = x + 1e-9 * (np.arange(N) == N - 1)[:, None]
    elif part == "test":
        test = X_TEST, Y_TEST + 1e-9
    elif part == "weights":
        w.assign_add(1e-9 * tf.ones_like(w))
    elif part == "damping":
        options["damping"] = 0.01
    elif part == "solver":
        options["solver"] = "minres"
    else:
        options["test_loss"] = lambda x, y: 2 * bare(x, y)
    influence = hvp.InfluenceFunctions(loss, w, (x, y), **options)
    with pytest.raises(
        hvp.CheckpointError, match=f"was saved with other .*{DIFFERING_PARTS[part]}"
    ):
        influence.scores(test, checkpoint=path)


def test_the_checkpoint_of_another_method_or_solver_function_is_refused(saved, tmp_path):
    with pytest.raises(hvp.CheckpointError, match=r"scores, not InfluenceFunctions\.self_inf"):
        shared("cg")[1].self_influence(checkpoint=saved[0])
    w, loss, bare, data = ridge()
    three, two = (
        hvp.InfluenceFunctions(
            loss, w, data, test_loss=bare, solver=lambda H, rank=rank: largest_only(H, rank)
        )
        for rank in (3, 2)
    )
    path = tmp_path / "scores.npz"
    scores = three.scores(TEST, checkpoint=path)
    np.testing.assert_array_equal(three.scores(TEST, checkpoint=path), scores)
    with pytest.raises(hvp.CheckpointError, match=r"was saved with other .*solver"):
        two.scores(TEST, checkpoint=path)


def test_the_recommended_memory_limit_is_enough():
    w, loss, _, data = ridge()
    with pytest.raises(hvp.TooLargeError, match=r"memory_limit is 40 bytes \(20 b") as error:
        hvp.InfluenceFunctions(loss, w, data, memory_limit=40)
    limit = error.value.expected.rpartition("at least ")[2]
    scores = hvp.InfluenceFunctions(loss, w, data, memory_limit=limit).scores(TEST)
    H, train, test = closed_form(w)
    expected = (test + RIDGE * w.numpy()) @ np.linalg.inv(H) @ train.T / N
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-12)


def test_an_interrupt_saves(tmp_path, monkeypatch):
    w, loss, bare, data = ridge()
    make_blocks_small(monkeypatch)
    influence = hvp.InfluenceFunctions(loss, w, data, test_loss=bare)
    whole, path = influence.scores(TEST), tmp_path / "scores.npz"
    gradients, count = inside.scoring(influence).gradients, []
    pieces = gradients.pieces

    def interrupted(data):
        for piece in pieces(data):
            count.append(1)
            if len(count) == 15:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(gradients, "pieces", interrupted)
    inside.set_limit(monkeypatch, "seconds between saves", 0.0)
    with pytest.raises(KeyboardInterrupt):
        influence.scores(TEST, checkpoint=path)
    monkeypatch.setattr(gradients, "pieces", pieces)
    np.testing.assert_array_equal(influence.scores(TEST, checkpoint=path), whole)


def test_self_influence_resumes(tmp_path, monkeypatch):
    w, loss, bare, data = ridge()
    make_blocks_small(monkeypatch)
    influence = hvp.InfluenceFunctions(loss, w, data, test_loss=bare, solver="cg", rtol=1e-10)
    whole, path = influence.self_influence(), tmp_path / "own.npz"
    inverse, count = inside.scoring(influence).inverse, []
    apply = inverse.apply

    def interrupted(rows, solver_checkpoint):
        count.append(len(rows))
        if len(count) == 6:
            raise KeyboardInterrupt
        return apply(rows, solver_checkpoint)

    monkeypatch.setattr(inverse, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        influence.self_influence(checkpoint=path)
    done = sum(count[:-1])
    np.testing.assert_array_equal(influence.self_influence(checkpoint=path), whole)
    assert sum(count) == N + 3  # only the sixth block is computed again
    assert done == 15
    with pytest.raises(hvp.CheckpointError):
        influence.scores(TEST, checkpoint=path)


def test_changed_weights_are_noticed():
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(loss, w, data, test_loss=bare)
    before = influence.scores(TEST)
    w.assign(w + 1.0)
    for call in (
        lambda: influence.scores(TEST),
        influence.self_influence,
        lambda: influence.group(0, TEST),
        lambda: influence.parameter_change(0),
    ):
        with pytest.raises(hvp.StaleOperatorError) as error:
            call()
        assert error.value.remedy == "call refresh()"
    influence.refresh()
    H, train, test = closed_form(w)
    expected = test @ np.linalg.inv(H) @ train.T / N
    np.testing.assert_allclose(influence.scores(TEST), expected, rtol=1e-8)
    assert not np.allclose(before, expected)


def negative_curvature():
    w = tf.Variable(np.full(P, 2.0))

    def loss(x, y):
        return tf.reduce_mean(tf.cos(tf.linalg.matvec(x, w) - y))

    return w, loss


def test_negative_curvature_is_reported():
    w, loss = negative_curvature()
    influence = hvp.InfluenceFunctions(loss, w, (X, Y))
    for method in (influence.scores, influence.top):
        influence.refresh()
        with pytest.warns(hvp.ConvergenceWarning, match="has the eigenvalue -") as caught:
            method(TEST)
        assert caught[0].filename == __file__


@pytest.mark.parametrize("solver", [long("cg"), "block_cg"])
def test_negative_curvature_is_an_error_of_conjugate_gradients(solver):
    w, loss = negative_curvature()
    influence = hvp.InfluenceFunctions(loss, w, (X, Y), solver=solver)
    with pytest.raises(hvp.HvpError, match="raise damping"):
        influence.scores(TEST)


def test_non_finite_gradients_are_reported_by_number():
    _, influence = shared()
    broken = X_TEST.copy()
    broken[4, 1] = np.nan
    with pytest.raises(hvp.NonFiniteError, match="gradient at test example 4 is not finite"):
        influence.scores((broken, Y_TEST))
    with pytest.raises(hvp.NonFiniteError, match="gradient at test example 4 is not finite"):
        influence.group(0, (broken, Y_TEST))
    assert repr(influence).startswith("InfluenceFunctions(40 training examples, 5 variables")


def test_losses_that_are_not_means_are_refused():
    w, loss, _, data = ridge()
    with pytest.raises(hvp.InvalidLossError, match="take the mean, not the sum"):
        hvp.InfluenceFunctions(
            lambda x, y: tf.reduce_sum((tf.linalg.matvec(x, w) - y) ** 2), w, data
        )
    with pytest.raises(hvp.InvalidLossError, match="mix examples"):
        hvp.InfluenceFunctions(lambda x, y: loss(x - tf.reduce_mean(x, 0), y), w, data)
    with pytest.raises(hvp.HvpError, match="draws random numbers"):
        hvp.InfluenceFunctions(lambda x, y: loss(tf.nn.dropout(x, 0.5), y), w, data)


WRONG = {
    "solver": ({"solver": "lissa"}, "'auto' or 'exact'"),
    "weight": ({"weight": lambda x, y: 1.0}, "no argument weight"),
    "reduction": ({"reduction": "sum"}, "no argument reduction"),
    "progress": ({"progress": 3}, "progress is 3"),
    "damping": ({"damping": np.nan}, "damping is nan"),
    "rtol": ({"rtol": "small"}, "rtol is 'small'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_arguments_are_refused(wrong):
    w, loss, _, data = ridge()
    options, message = WRONG[wrong]
    with pytest.raises(hvp.HvpError, match=message):
        hvp.InfluenceFunctions(loss, w, data, **options)


@pytest.mark.parametrize(
    "indices", [N, -1, [1, 1], [0.5], [], [[1, 2]], np.ones(N - 1, bool), "one"]
)
def test_bad_indices_are_refused(indices):
    with pytest.raises(hvp.HvpError):
        shared()[1].parameter_change(indices)


def test_ragged_data_are_refused():
    w = tf.Variable(1.0)
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    with pytest.raises(hvp.InvalidDataError, match="ragged or sparse"):
        hvp.InfluenceFunctions(
            lambda x: tf.reduce_mean(tf.reduce_sum(x * w, axis=1) ** 2), w, (ragged,)
        )


def test_state_of_the_model_is_unchanged():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((P,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile(loss="mse")
    before = [v.numpy() for v in model.variables]
    influence = hvp.InfluenceFunctions.from_keras(
        model, (X.astype("float32"), Y.astype("float32")[:, None]), damping=5.0
    )
    influence.self_influence()
    for now, then in zip(model.variables, before):
        np.testing.assert_array_equal(now, then)


def test_sample_weights_count():
    """Linear regression with a bias, compared with NumPy."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((P,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    x, y = X.astype("float32"), Y.astype("float32")[:, None]
    weights = np.random.default_rng(1).random(N).astype("float32")
    influence = hvp.InfluenceFunctions.from_keras(model, (x, y, weights), damping=0.1)
    scores = influence.scores((x[:4], y[:4], weights[:4]))
    kernel, bias = (v.numpy().ravel() for v in model.trainable_variables)
    rows = np.c_[X, np.ones(N)]
    gradients = 2 * (weights * (rows @ np.r_[kernel, bias] - Y))[:, None] * rows
    H = 2 * (rows * weights[:, None]).T @ rows / N + 0.1 * np.eye(P + 1)
    expected = gradients[:4] @ np.linalg.solve(H, gradients.T) / N
    np.testing.assert_allclose(scores, expected, atol=1e-5 * np.abs(expected).max())


def test_test_data_unlike_the_training_data_are_refused():
    model = keras.Sequential([keras.Input((P,)), keras.layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, labels = X.astype("float32"), np.arange(N) % 3
    influence = hvp.InfluenceFunctions.from_keras(model, (x, labels), damping=1.0)
    for wrong in ((x[:2],), (x[:2], np.eye(3)[labels[:2]])):
        for call in (influence.scores, functools.partial(influence.group, [0])):
            with pytest.raises(
                hvp.InvalidDataError, match="compared with the training data, they have"
            ):
                call(wrong)
    w, loss, bare, data = ridge()

    def typo(x, y):
        return bare(x, z)  # noqa: F821

    influence = hvp.InfluenceFunctions(loss, w, data, test_loss=typo)
    with pytest.raises(NameError):  # an error in the loss itself
        influence.scores(TEST)


def test_a_solver_of_another_shape_is_refused():
    w, loss, _, data = ridge()
    wrong = iter([np.eye(2), None])
    influence = hvp.InfluenceFunctions(loss, w, data, solver=lambda H: next(wrong))
    for kind in ("ndarray", "NoneType"):
        with pytest.raises(hvp.HvpError, match=f"solver function returned {kind}"):
            influence.scores(TEST)


@pytest.mark.parametrize("size", [30, 300])
def test_the_damping_that_is_missing_is_enough(size):
    scales = np.linspace(-0.5, 3, size)
    w, x = tf.Variable(np.zeros(size)), np.ones((4, size))

    def loss(x):
        return tf.reduce_mean(tf.linalg.matvec(x, scales * w**2)) / 2 + tf.reduce_mean(
            x @ w[:, None]
        )

    def made(damping):
        return hvp.InfluenceFunctions(loss, w, (x,), solver="cg", damping=damping).scores((x,))

    with pytest.raises(hvp.HvpError, match="not positive definite") as caught:
        made(0.25)
    found, named = re.search(r"eigenvalue (-[\d.]+).* above ([\d.]+)", str(caught.value)).groups()
    assert float(found) == pytest.approx(-0.25, rel=0.02)
    assert float(named) == 0.5
    assert np.isfinite(made(1.1 * float(named))).all()


def test_a_failed_run_leaves_no_files(tmp_path):
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(loss, w, data, test_loss=bare, solver="cg", damping=-1e3)
    with pytest.raises(hvp.HvpError, match="not positive definite"):
        influence.scores(TEST, checkpoint=tmp_path / "state")
    assert list(tmp_path.iterdir()) == []
    shared("cg")[1].scores(TEST, checkpoint=tmp_path / "state")


def test_scores_of_blocks_of_another_width_are_not_continued(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(40), keras.layers.Dense(3)])
    model.compile(loss="mse")
    data, path = (np.ones((50, 6)), np.eye(50, 3)), tmp_path / "scores.npz"
    one, other = (
        hvp.InfluenceFunctions.from_keras(
            model, data, solver="kfac", damping=0.1, memory_limit=limit
        )
        for limit in ("8MiB", "4MiB")
    )
    one.scores((data[0][:5], data[1][:5]), checkpoint=path)
    with pytest.raises(hvp.CheckpointError, match="other settings"):
        other.scores((data[0][:5], data[1][:5]), checkpoint=path)


@pytest.mark.long
def test_kept_gradients_do_not_depend_on_the_width_of_blocks(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(40), keras.layers.Dense(3)])
    model.compile(loss="mse")
    data, scores = (np.ones((50, 6)), np.eye(50, 3)), []
    for limit in ("8MiB", "4MiB"):
        options = {"memory_limit": limit, "gradients": tmp_path / "kept", "projection": 32}
        one = hvp.InfluenceFunctions.from_keras(model, data, solver="kfac", damping=0.1, **options)
        scores.append(one.scores((data[0][:5], data[1][:5])))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)
