"""Calibration of probabilities, against counts by hand."""

import numpy as np
import pytest

import hvp


def test_bins_and_scores():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), 500)
    y = np.array([rng.choice(4, p=row) for row in p])
    found = hvp.calibration(p, y, bins=10)
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
    error = 0.0
    for low in np.arange(10) / 10:
        inside = (confidence >= low) & (confidence < low + 0.1)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert found.error == pytest.approx(error, rel=1e-10)
    assert found.accuracy == right.mean()
    assert found.log_loss == pytest.approx(-np.log(p[np.arange(500), y]).mean(), rel=1e-12)
    assert found.count.sum() == 500
    np.testing.assert_allclose((found.count * found.frequency).sum(), right.sum())
    one_hot = hvp.calibration(p, np.eye(4)[y], bins=10)
    assert one_hot.error == found.error
    assert one_hot.log_loss == found.log_loss


def test_two_classes_by_one_probability():
    p, y = np.array([0.9, 0.2, 0.6, 0.4]), np.array([1, 0, 0, 1])
    both = hvp.calibration(np.stack([1 - p, p], axis=1), y)
    for one in (p, p[:, np.newaxis]):
        found = hvp.calibration(one, y[:, np.newaxis])
        assert (found.error, found.log_loss) == (both.error, both.log_loss)
    assert both.accuracy == 0.5
    expected = -np.log([0.9, 0.8, 0.4, 0.4]).mean()
    assert both.log_loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("p", "y", "said"),
    [
        ([[0.5, 0.6]], [0], "add up to one"),
        ([[1.5, -0.5]], [0], "probabilities"),
        ([[0.5, 0.5]], [2], "class 2"),
        ([[0.5, 0.5]], [0.5], "class 0.5"),
        ([[0.5, 0.5]], [np.nan], "class nan"),
        ([[0.5, 0.5]], [[1, 1]], "unit vectors"),
        ([[0.5, 0.5]], [0, 1], r"\(2,\)"),
        ([], [], "shape"),
    ],
)
def test_what_is_refused(p, y, said):
    with pytest.raises(hvp.InvalidDataError, match=said):
        hvp.calibration(p, y)


def test_the_figure():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    point = hvp.calibration([[0.99, 0.01]] * 4, [0, 0, 1, 1])
    found = hvp.calibration([[0.6, 0.4]] * 4, [0, 0, 1, 1], point=point)
    labels = [text.get_text() for text in found.plot().get_legend().get_texts()]
    assert [f"{one.error:.3f}" in text for one, text in zip((point, found), labels)] == [True] * 2
