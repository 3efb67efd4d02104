"""`hvp.linearize`: values, and both directions of the derivative."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import random, relative_error


def pieces():
    """A function with a nest of outputs of two shapes, and its Jacobian in closed form."""
    A = random(0, 3, 4, dtype="float64")
    w, b = tf.Variable(random(1, 4, dtype="float64")), tf.Variable(np.float64(0.5))

    def f():
        return {"z": tf.sin(tf.linalg.matvec(A, w)) * b, "s": [tf.reduce_sum(w**2)]}

    z, w0 = A @ w.numpy(), w.numpy()
    jacobian = {  # rows s, then z: tf.nest orders a dict by its keys
        "w": np.vstack([2 * w0, 0.5 * np.cos(z)[:, None] * A]),
        "b": np.concatenate([[0.0], np.sin(z)])[:, None],
    }
    return f, {"w": w, "b": b}, jacobian


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_value_jvp_and_vjp_are_the_closed_form(engine):
    f, variables, jacobian = pieces()
    with hvp.linearize(f, variables, engine=engine) as linear:
        assert linear.engine == engine
        np.testing.assert_array_equal(linear.value["z"], f()["z"])
        v = {"w": random(2, 4, dtype="float64"), "b": np.float64(1.5)}
        u = {"z": random(3, 3, dtype="float64"), "s": [np.float64(-2.0)]}
        product = linear.jvp(v)
        want = jacobian["w"] @ v["w"] + jacobian["b"] @ [v["b"]]
        got = np.concatenate([[product["s"][0]], product["z"]])
        assert relative_error(got, want) <= 1e-14
        transposed = linear.vjp(u)
        rows = np.concatenate([[-2.0], u["z"]])
        assert relative_error(transposed["w"], rows @ jacobian["w"]) <= 1e-14
        assert relative_error(transposed["b"][None], rows @ jacobian["b"]) <= 1e-14


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_the_linear_map_is_of_the_point_it_was_made_at(engine):
    w = tf.Variable([1.0, 2.0])
    linear = hvp.linearize(lambda: w**3, w, engine=engine)
    # Also in place, in the very buffer that what is kept of a variable shares.
    for change in (
        lambda: w.assign([5.0, 5.0]),
        lambda: w.assign_add([1.0, 1.0]),
        lambda: w.scatter_nd_update([[1]], [7.0]),
    ):
        change()
        np.testing.assert_array_equal(linear.jvp(tf.ones(2)), [3, 12])
        np.testing.assert_array_equal(linear.vjp(tf.ones(2)), [3, 12])


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize(
    "change",
    [lambda w: w.assign_add([1.0, 1.0]), lambda w: w.scatter_nd_update([[1]], [7.0])],
)
def test_a_first_change_in_place_does_not_reach_it_either(engine, change):
    w = tf.Variable([1.0, 2.0])
    linear = hvp.linearize(lambda: w * w, w, engine=engine)
    change(w)
    np.testing.assert_array_equal(linear.vjp(tf.ones(2)), [2, 4])


def test_many_applications_run_the_function_once():
    runs = []
    w = tf.Variable([1.0, 2.0])

    def f():
        # Runs when the operation is executed, not when the Python around it is.
        tick = tf.numpy_function(lambda: np.float32(runs.append(1) or 1), [], tf.float32)
        return tf.sin(w) * tf.ensure_shape(tick, [])

    with hvp.linearize(f, w) as linear:
        for _ in range(20):
            linear.vjp(tf.ones(2))
            linear.jvp(tf.ones(2))
    assert len(runs) == 1  # traced without running, then run


def test_gathered_rows_come_back_dense():
    table = tf.Variable(random(0, 5, 2))
    with hvp.linearize(lambda: tf.gather(table, [1, 1, 4]) ** 2, table) as linear:
        u = np.ones((3, 2), "float32")
        want = np.zeros((5, 2))
        want[1], want[4] = 4 * table.numpy()[1], 2 * table.numpy()[4]
        np.testing.assert_allclose(linear.vjp(u), want, rtol=1e-6)
        tangent = random(1, 5, 2)
        want = (2 * table.numpy() * tangent)[[1, 1, 4]]
        np.testing.assert_allclose(linear.jvp(tangent), want, rtol=1e-6)


def test_first_derivatives_through_moments_are_not_refused():
    x = tf.Variable(random(0, 6))
    with hvp.linearize(lambda: tf.nn.moments(x, [0])[1], x) as linear:
        want = 2 / 6 * (x.numpy() - x.numpy().mean())
        np.testing.assert_allclose(linear.vjp(np.float32(1)), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_both_directions_of_a_resize(engine):
    image = tf.Variable(random(0, 1, 4, 4, 1))
    with hvp.linearize(lambda: tf.image.resize(image, (8, 8)), image, engine=engine) as linear:
        assert linear.vjp(np.ones((1, 8, 8, 1))).shape == (1, 4, 4, 1)
        np.testing.assert_allclose(linear.jvp(image), linear.value, rtol=1e-6)


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_the_forward_direction_refuses_what_only_the_backward_one_can(engine):
    image, boxes = random(0, 1, 4, 4, 1), tf.Variable([[0.1, 0.1, 0.8, 0.9]])

    def cropped():
        return tf.image.crop_and_resize(image, boxes, [0], [3, 3])

    with hvp.linearize(cropped, boxes, engine=engine) as linear:
        assert np.abs(linear.vjp(np.ones((1, 3, 3, 1)))).max() > 0
        with pytest.raises(hvp.SecondDerivativeError, match="CropAndResizeGradBoxes"):
            linear.jvp(boxes)


def test_close_releases_and_forbids():
    w = tf.Variable([1.0])
    with hvp.linearize(lambda: w**2, w) as linear:
        engine = weakref.ref(inside.held(linear))
        assert linear.nbytes > 0
    gc.disable()
    try:
        assert engine() is None
    finally:
        gc.enable()
    linear.close()
    with pytest.raises(hvp.ClosedOperatorError):
        linear.vjp(tf.ones(1))
    assert linear.value == 1


def test_bad_input():
    w = tf.Variable([1.0, 2.0])
    with pytest.raises(hvp.InvalidLossError, match="int32"):
        hvp.linearize(lambda: tf.cast(w, tf.int32), w)
    with pytest.raises(hvp.InvalidLossError, match="cannot be called"):
        hvp.linearize(tf.constant(1.0), w)
    with pytest.raises(hvp.InvalidLossError, match="str"):
        hvp.linearize(lambda: "text", w)
    with hvp.linearize(lambda: w**2, w) as linear:
        with pytest.raises(hvp.InvalidVectorError, match="shape"):
            linear.jvp(tf.ones(3))
        with pytest.raises(hvp.InvalidVectorError, match="shape"):
            linear.vjp(tf.ones(3))
        with pytest.raises(hvp.InvalidVectorError, match="structure"):
            linear.vjp({"a": tf.ones(2)})
        with pytest.raises(hvp.InvalidVectorError, match="complex"):
            linear.vjp(tf.ones(2, tf.complex64))
        with pytest.raises(hvp.InvalidVectorError, match="structure"):
            linear.jvp([tf.ones(2)])


def test_a_function_that_cannot_be_traced_is_still_linearized(caplog):
    w = tf.Variable([1.0, 2.0])
    with hvp.linearize(lambda: w ** float(w.numpy()[1]), w) as linear:
        np.testing.assert_allclose(linear.vjp(tf.ones(2)), [2, 4])
        assert linear.nbytes is None
    assert "could not be traced" in caplog.text


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_a_linearization_that_is_dropped_is_freed_at_once(engine):
    w = tf.Variable([1.0, 2.0])
    linear = hvp.linearize(lambda: w**3, w, engine=engine)
    np.testing.assert_allclose(linear.jvp(np.ones(2)), [3.0, 12.0])
    held = weakref.ref(inside.held(linear))
    gc.collect()
    gc.disable()
    try:
        del linear
        assert held() is None
    finally:
        gc.enable()
