"""Slices of losses against direct evaluations, and closed forms."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import relative_error
from tests.operators.test_gauss_newton import WAYS
from tests.spectra.matrices import network
from tests.spectra.test_estimates import options_of


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_losses_are_those_of_moved_variables(way):
    model, loss, data, want = network()

    def build(**options):
        return hvp.HessianOperator(loss, model, data, **options)

    before = [w.numpy() for w in model.trainable_variables]
    with build(damping=0.25, **options_of(way, build)) as H:
        vectors = np.random.default_rng(0).standard_normal((len(want), 2)) / 8
        line = hvp.loss_slice(H, vectors[:, 0], radius=0.5, points=5)
        plane = hvp.loss_slice(H, vectors, radius=0.5, points=3)
        for one, other in zip(before, model.trainable_variables):
            np.testing.assert_array_equal(one, other.numpy())
        # Nothing is stale afterwards.
        gradient, value = H.gradient, H.value
        assert relative_error(H @ vectors[:, 0], (want + 0.25 * np.eye(94)) @ vectors[:, 0]) < 1e-6

        def directly(change):
            for w, old, part in zip(model.trainable_variables, before, H.unflatten(change)):
                w.assign(old + part)
            return float(loss(*data))

        right = [directly(t * vectors[:, 0]) for t in line.offsets]
        assert relative_error(line.losses, right) < 1e-12
        right = [[directly(vectors @ (s, t)) for t in plane.offsets] for s in plane.offsets]
        assert relative_error(plane.losses, right) < 1e-12
    step = vectors @ (0.5, -0.5)
    model_value = value + step @ gradient + step @ want @ step / 2
    assert plane.quadratic[2, 0] == pytest.approx(model_value, rel=1e-8)


def test_closed_forms_and_losses_that_are_not_finite():
    w = tf.Variable([1.0, 2.0], dtype="float64")
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.math.log(w)), w) as H:
        found = hvp.loss_slice(H, [1.0, 0.0], radius=2.0, points=5)
        assert np.isnan(found.losses).tolist() == [True, True, False, False, False]
        assert found.losses[2:] == pytest.approx(np.log(2.0 * np.array([1, 2, 3])))
        offsets = found.offsets
        assert found.quadratic == pytest.approx(np.log(2) + offsets - offsets**2 / 2)
        assert "5 points, offsets up to 2" in repr(found)
        assert H @ np.array([1.0, 0.0]) == pytest.approx([-1, 0])
        for call, said in (
            (lambda: hvp.loss_slice(H, np.ones(3)), "irections has shape"),
            (lambda: hvp.loss_slice(H, np.ones((2, 3))), "3 directions"),
            (lambda: hvp.loss_slice(H, np.ones(2), points=2), "points is 2"),
            (lambda: hvp.loss_slice(H, np.ones(2), radius=0), "radius is 0"),
            (lambda: hvp.loss_slice(H, np.ones(2), radius=np.nan), "radius is nan"),
            (lambda: hvp.loss_slice(H, np.ones(2), radius=np.inf), "radius is inf"),
            (lambda: hvp.loss_slice(np.eye(2), np.ones(2)), "operator of this package"),
        ):
            with pytest.raises(hvp.HvpError, match=said):
                call()


def test_an_operator_of_another_point_has_no_slice():
    w = tf.Variable([1.0, 2.0])
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w, on_stale="ignore")
    w.assign_add([1.0, 0.0])
    with pytest.raises(hvp.StaleOperatorError, match="refresh"):
        hvp.loss_slice(H, np.ones(2))
    H.refresh()
    found = hvp.loss_slice(H, np.ones(2), points=3)
    assert found.losses[1] == found.quadratic[1] == 32


@pytest.mark.parametrize("count", [1, 2])
def test_pictures(count):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    w = tf.Variable([1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w) as H:
        ax = hvp.loss_slice(H, np.eye(2)[:, :count], points=5).plot()
    assert ax.has_data()
    ax.figure.canvas.draw()
    plt.close(ax.figure)


def test_a_loss_that_draws_is_refused():
    w = tf.Variable([1.0, 2.0])
    H = hvp.HessianOperator(lambda: tf.reduce_sum(tf.nn.dropout(w**2, 0.5)), w)
    with pytest.raises(hvp.HvpError, match="draws random numbers"):
        hvp.loss_slice(H, np.ones(2))
