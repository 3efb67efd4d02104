"""Scores by Kronecker factors, and gradients that are kept in a folder."""

import json
import os
import subprocess
import sys
import textwrap
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.influence.regression import TEST, closed_form, ridge

CLASSES, DAMPING = 3, 0.05


def classifier(hidden=0, count=120, seed=0):
    """Return a classifier, trained with the penalty DAMPING/2 |w|^2, and data of three clusters."""
    keras.utils.set_random_seed(seed)
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, count).astype("int32")
    x = (random.standard_normal((count, 4)) + np.eye(CLASSES, 4)[y]).astype("float32")
    parts = [keras.layers.Dense(hidden, "tanh")] if hidden else []
    model = keras.Sequential([keras.Input((4,)), *parts, keras.layers.Dense(CLASSES)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, x, y


def output_loss(logits, y):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def trained(model, x, y, start):
    """Return the weights that minimize the loss with the penalty, from given ones on."""
    for variable, value in zip(model.trainable_variables, start):
        variable.assign(value)

    def loss(x, y):
        squares = tf.add_n([tf.reduce_sum(v**2) for v in model.trainable_variables])
        return output_loss(model(x), y) + DAMPING / 2 * squares

    hvp.minimize(loss, model, (x, y), method="trust-ncg", options={"gtol": 1e-6})
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.few(0)
def test_scores_of_a_convex_model_match_retraining():
    model, x, y = classifier()
    x, x_test, y, y_test = x[:80], x[80:100], y[:80], y[80:100]
    best = trained(model, x, y, model.get_weights())
    influence = hvp.InfluenceFunctions.from_keras(model, (x, y), solver="ekfac", damping=DAMPING)
    scores = influence.scores((x_test, y_test))

    def losses():
        logits = model(x_test)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y_test, logits).numpy()

    before, predicted, real = losses(), [], []
    for left_out in range(0, 80, 7):
        keep = np.arange(80) != left_out
        trained(model, x[keep], y[keep], best)
        real.append(losses() - before)
        predicted.append(scores[:, left_out])
    # The penalty counts for the remaining examples, so that leaving one out shrinks it too little.
    assert np.corrcoef(np.ravel(predicted), np.ravel(real))[0, 1] > 0.95


@pytest.mark.parametrize("solver", ["ekfac", "kfac"])
@pytest.mark.few(1)
@pytest.mark.long
def test_the_inverse_is_that_of_the_factors(solver):
    model, x, y = classifier(hidden=5)
    functions = (model, output_loss)
    kind = hvp.EKFAC if solver == "ekfac" else hvp.KFAC
    K = kind(*functions, model, (x, y))
    influence = hvp.InfluenceFunctions(functions, model, (x, y), solver=solver, damping=DAMPING)
    own = hvp.InfluenceFunctions(functions, model, (x, y), curvature=K, damping=DAMPING)
    by_hand = hvp.InfluenceFunctions(
        functions,
        model,
        (x, y),
        curvature="gauss-newton",
        damping=DAMPING,
        solver=lambda operator: K.inverse(operator.damping),
    )
    test = x[:5], y[:5]
    expected = by_hand.scores(test)
    scale = np.abs(expected).max()
    for other in (influence, own):
        np.testing.assert_allclose(other.scores(test), expected, atol=1e-4 * scale)
        np.testing.assert_allclose(
            other.self_influence(), by_hand.self_influence(), atol=1e-4 * scale * 10
        )
        np.testing.assert_allclose(
            other.group([1, 4], test), by_hand.group([1, 4], test), atol=1e-3 * scale
        )
    assert f"solver {solver!r}" in repr(influence)


@pytest.mark.long
def test_changed_weights_are_noticed_and_refreshed():
    model, x, y = classifier(hidden=4)
    influence = hvp.InfluenceFunctions.from_keras(model, (x, y), solver="ekfac", damping=DAMPING)
    for variable in model.trainable_variables:
        variable.assign(1.1 * variable)
    with pytest.raises(hvp.StaleOperatorError, match="call refresh"):
        influence.scores((x[:2], y[:2]))
    influence.refresh()
    fresh = hvp.InfluenceFunctions.from_keras(model, (x, y), solver="ekfac", damping=DAMPING)
    expected = fresh.scores((x[:2], y[:2]))
    np.testing.assert_allclose(
        influence.scores((x[:2], y[:2])), expected, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.long
def test_bad_combinations():
    model, x, y = classifier()
    pair, data = (model, output_loss), (x, y)
    K = hvp.KFAC(*pair, model, data)

    def whole(x, y):
        return output_loss(model(x), y)

    for loss, options, message in [
        (whole, {"solver": "ekfac"}, "does not tell the model from the loss"),
        (pair, {"solver": "cg", "curvature": K}, "Kronecker-factored matrix"),
        (pair, {"solver": "ekfac", "damping": -1.0}, "not negative"),
        (pair, {"solver": "ekfac", "damping": 0.0}, "singular up to rounding"),
        (pair, {"solver": "ekfac", "regularization": lambda: 0.0}, "no Kronecker factors"),
        (pair, {"projection": 8}, "gradients are not kept"),
    ]:
        with pytest.raises(hvp.HvpError, match=message):
            hvp.InfluenceFunctions(loss, model, data, **options)
    with pytest.raises(hvp.HvpError, match="other variables"):
        hvp.InfluenceFunctions(whole, [model.layers[-1].kernel], data, curvature=K, damping=1.0)


@pytest.mark.parametrize("solver", ["exact", "block_cg"])
@pytest.mark.few(1)
def test_kept_gradients_give_the_same_scores(tmp_path, monkeypatch, solver):
    inside.set_limit(monkeypatch, "bytes of a shard", 500)
    w, loss, bare, data = ridge()
    options = {"test_loss": bare, "solver": solver, "rtol": 1e-12}
    kept = hvp.InfluenceFunctions(loss, w, data, gradients=tmp_path / "store", **options)
    H, train, test = closed_form(w)
    expected = test @ np.linalg.inv(H) @ train.T / len(train)
    np.testing.assert_allclose(kept.scores(TEST), expected, rtol=1e-7, atol=1e-10)
    assert len(list((tmp_path / "store").glob("*.npy"))) > 2
    again = hvp.InfluenceFunctions(loss, w, data, gradients=tmp_path / "store", **options)
    inside.scoring(again).gradients.of_all = None  # which would compute a gradient anew
    inside.scoring(again).gradients.pieces = None
    np.testing.assert_allclose(again.scores(TEST), expected, rtol=1e-7, atol=1e-10)
    top = again.top(TEST, k=3)
    np.testing.assert_array_equal(top.helpful, np.argsort(-expected, axis=1)[:, :3])


@pytest.mark.long
def test_the_folder_of_other_weights_data_or_anything_else_is_refused(tmp_path):
    w, loss, bare, data = ridge()
    path = tmp_path / "store"
    options = {"test_loss": bare, "solver": "exact"}
    hvp.InfluenceFunctions(loss, w, data, gradients=path, **options).scores(TEST)
    other = tuple(np.roll(a, 1, axis=0) for a in data)
    influence = hvp.InfluenceFunctions(loss, w, other, gradients=path, **options)
    with pytest.raises(hvp.CheckpointError, match=r"belongs to other .*training data"):
        influence.scores(TEST)
    projected = hvp.InfluenceFunctions(loss, w, data, gradients=path, projection=4, **options)
    with pytest.raises(hvp.CheckpointError, match="form of gradients"):
        projected.scores(TEST)
    influence = hvp.InfluenceFunctions(loss, w, data, gradients=path, **options)
    w.assign(w * 2)
    influence.refresh()
    inside.scoring(influence).inverse = None  # which would solve
    with pytest.raises(hvp.CheckpointError, match="belongs to other weights"):
        influence.scores(TEST)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    influence = hvp.InfluenceFunctions(loss, w, data, gradients=tmp_path / "notes", **options)
    with pytest.raises(hvp.CheckpointError, match="not a store of gradients"):
        influence.scores(TEST)
    assert [p.name for p in (tmp_path / "notes").iterdir()] == ["mine.txt"]
    damaged = next(path.glob("*.npy"))
    description = json.loads((path / "store.json").read_text())
    assert description["examples"] == len(data[0])
    damaged.write_bytes(b"")
    w.assign(w / 2)
    influence = hvp.InfluenceFunctions(loss, w, data, gradients=path, **options)
    with pytest.raises(hvp.CheckpointError, match="remove this file"):
        influence.scores(TEST)


@pytest.mark.long
def test_projections_estimate_scores(tmp_path):
    model, x, y = classifier(hidden=40)
    size = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    options = {"solver": "ekfac", "damping": DAMPING}
    whole = hvp.InfluenceFunctions((model, output_loss), model, (x, y), **options)
    test = x[:20], y[:20]
    expected = whole.scores(test)
    kept = hvp.InfluenceFunctions(
        (model, output_loss), model, (x, y), gradients=tmp_path / "g", projection=64, **options
    )
    own = np.stack([_gradient(model, x[i : i + 1], y[i : i + 1]) for i in range(len(x))])
    root = whole.operator.inverse().sqrt()
    lengths = np.linalg.norm(root @ own.T, axis=0)
    bounds = np.outer(lengths[:20], lengths) / len(x) * np.sqrt(2 / 64)
    errors = (kept.scores(test) - expected) / bounds
    assert 0.2 < np.sqrt(np.mean(errors**2)) < 1.1
    shards = [np.load(path) for path in sorted((tmp_path / "g").glob("*.npy"))]
    assert np.concatenate(shards).shape == (len(x), 64)
    assert size > 64
    with pytest.raises(hvp.HvpError, match="projections, which have no parts"):
        kept.scores_by_layer(test)


def _gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = output_loss(model(x), y)
    parts = tape.gradient(loss, model.trainable_variables)
    return np.concatenate([part.numpy().reshape(-1) for part in parts])


@pytest.mark.long
def test_parts_of_layers_add_up():
    model, x, y = classifier(hidden=5)
    influence = hvp.InfluenceFunctions(
        (model, output_loss), model, (x, y), solver="ekfac", damping=DAMPING
    )
    test = x[:4], y[:4]
    parts = influence.scores_by_layer(test)
    names = [layer.kernel.path.rpartition("/")[0] for layer in model.layers]
    assert list(parts) == names
    whole = influence.scores(test)
    np.testing.assert_allclose(sum(parts.values()), whole, atol=1e-5 * np.abs(whole).max())
    # The inverse has a block for each layer, so that the part of the last layer is its own.
    last = hvp.EKFAC(model, output_loss, model, (x, y)).block(model.layers[-1])
    gradients = np.stack([_gradient(model, x[i : i + 1], y[i : i + 1]) for i in range(9)])
    own = gradients[:, -last.shape[0] :]
    expected = own[:4] @ (last.inverse(DAMPING) @ own.T) / len(x)
    np.testing.assert_allclose(
        parts[names[-1]][:, :9], expected, atol=1e-4 * np.abs(expected).max()
    )


RUN = """
    import pytest
    import hvp
    from tests import inside
    from tests.influence.regression import TEST, ridge
    import time

    inside.set_limit(pytest.MonkeyPatch(), "bytes of a shard", 500)
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(
        loss, w, data, test_loss=bare, solver="exact", gradients="store"
    )
    gradients = inside.scoring(influence).gradients
    of_all = gradients.of_all

    def slowly(*arguments):
        time.sleep(0.2)
        return of_all(*arguments)

    gradients.of_all = slowly
    gradients.at_once = 4
    influence.scores(TEST)
"""


@pytest.mark.few(0)
def test_a_killed_run_goes_on_from_complete_shards(tmp_path, monkeypatch):
    inside.set_limit(monkeypatch, "bytes of a shard", 500)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    store, deadline = tmp_path / "store", time.monotonic() + 60
    while not list(store.glob("*-00001.npy")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    done = {path.name: path.stat().st_mtime_ns for path in store.glob("*.npy")}
    w, loss, bare, data = ridge()
    influence = hvp.InfluenceFunctions(
        loss, w, data, test_loss=bare, solver="exact", gradients=store
    )
    H, train, test = closed_form(w)
    expected = test @ np.linalg.inv(H) @ train.T / len(train)
    np.testing.assert_allclose(influence.scores(TEST), expected, rtol=1e-7, atol=1e-10)
    after = {path.name: path.stat().st_mtime_ns for path in store.glob("*.npy")}
    assert len(after) > len(done) >= 2
    assert all(after[name] == time for name, time in done.items())
