"""The linear datamodeling score: its definition, on models whose answers are known."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import hvp

rng = np.random.default_rng(0)


def test_the_definition():
    scores = rng.standard_normal((5, 30))
    noise = rng.standard_normal((40, 5)) * 3
    calls = []

    def retrain(kept):
        calls.append(kept)
        return -scores[:, kept].sum(axis=1) + noise[len(calls) - 1]

    found = hvp.linear_datamodeling_score(retrain, scores, subsets=40, fraction=0.4)
    assert [len(kept) for kept in calls] == [12] * 40
    assert found.kept.sum(axis=0).min() > 0
    for test in range(5):
        predictions = [-scores[test][kept].sum() for kept in calls]
        outcomes = [p + noise[i, test] for i, p in enumerate(predictions)]
        expected = scipy.stats.spearmanr(predictions, outcomes).statistic
        assert found.by_test[test] == pytest.approx(expected)
    assert found.score == pytest.approx(found.by_test.mean())
    assert 0.5 < found.score < 0.95
    assert 0 < found.standard_error < 0.2


def test_of_a_linear_model_it_is_nearly_one():
    """Least squares: exact influence functions predict half of the data left out."""
    x, x_new = rng.standard_normal((60, 3)), rng.standard_normal((8, 3))
    y, y_new = (np.sin(3 * part[:, 0]) + part[:, 1] for part in (x, x_new))
    w = tf.Variable(np.linalg.lstsq(x, y, rcond=None)[0])

    def loss(x, y):
        return tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2)

    def retrain(kept):
        return (x_new @ np.linalg.lstsq(x[kept], y[kept], rcond=None)[0] - y_new) ** 2

    exact = hvp.InfluenceFunctions(loss, w, (x, y)).scores((x_new, y_new))
    named = {"exact": exact, "random": rng.standard_normal(exact.shape), "reversed": -exact}
    found = hvp.linear_datamodeling_score(retrain, named, subsets=60, fraction=0.8)
    assert found.score["exact"] > 0.9
    assert abs(found.score["random"]) < 4 * found.standard_error["random"]
    assert found.score["reversed"] == pytest.approx(-found.score["exact"])
    difference, error = found.difference("exact", "random")
    assert difference == found.score["exact"] - found.score["random"]
    assert 0 < error < 0.3
    again = hvp.linear_datamodeling_score(found, exact)
    assert again.score == found.score["exact"]
    assert "exact 0.9" in repr(found)


def test_it_resumes(tmp_path):
    scores, calls = rng.standard_normal((2, 10)), []

    def retrain(kept):
        calls.append(kept)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return -scores[:, kept].sum(axis=1)

    options = {"subsets": 5, "checkpoint": tmp_path / "losses"}
    with pytest.raises(KeyboardInterrupt):
        hvp.linear_datamodeling_score(retrain, scores, **options)
    found = hvp.linear_datamodeling_score(retrain, scores, **options)
    assert len(calls) == 6
    assert found.score == pytest.approx(1)
    with pytest.raises(hvp.CheckpointError, match="subsets"):
        hvp.linear_datamodeling_score(retrain, scores, seed=1, **options)


def test_arguments():
    scores = np.ones((2, 10))
    good = lambda kept: np.arange(2.0)  # noqa: E731
    for retrain, value, options, match in (
        (good, np.ones(3), {}, r"\(3,\)"),
        (good, {"a": np.ones((2, 3)), "b": np.ones((2, 4))}, {}, r"\(2, 3\).*\(2, 4\)"),
        (good, np.full((2, 3), np.nan), {}, "not all finite"),
        (good, 1j * scores, {}, "real"),
        (good, scores, {"seed": "a"}, "seed is 'a'"),
        (good, scores, {"progress": 3}, "progress is 3"),
        (3, scores, {}, "int"),
        (good, scores, {"subsets": 2}, "subsets"),
        (good, scores, {"fraction": 0.99}, "10 of 10"),
        (lambda kept: np.ones(3), scores, {}, r"\(3,\)"),
        (lambda kept: np.array([1, np.inf]), scores, {}, "1 of them not finite"),
    ):
        with pytest.raises(hvp.HvpError, match=match):
            hvp.linear_datamodeling_score(retrain, value, **options)
    found = hvp.linear_datamodeling_score(good, scores, subsets=3)
    assert found.score == 0  # constant losses
    with pytest.raises(hvp.HvpError, match="2 test and 10 training"):
        hvp.linear_datamodeling_score(found, np.ones((2, 9)))
    with pytest.raises(hvp.HvpError, match="'a'"):
        found.difference("a", "b")
