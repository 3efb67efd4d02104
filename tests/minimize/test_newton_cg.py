"""`NewtonCG`: convergence, cost, and checkpoints."""

import functools
import gc
import logging
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import crossed, long, random
from tests.minimize.problems import (
    extended_rosenbrock,
    ridge_logistic,
    rosen,
    rosen_der,
    rosenbrock,
    saddle,
    traced,
)


def newton(problem, **options):
    return hvp.NewtonCG(problem.loss, problem.variables, problem.data, **options)


@functools.cache
def _compiled_once(problem, *arguments):
    return hvp.NewtonCG(traced(problem, *arguments)[1])


def compiled(problem, *arguments):
    """Return a problem at its start, and its method, which is compiled once for all tests."""
    method = _compiled_once(problem, *arguments)
    method.reset()
    return traced(problem, *arguments)[0], method


def flat(variables):
    return np.concatenate([np.ravel(v.numpy()) for v in tf.nest.flatten(variables)])


@pytest.mark.parametrize(
    ("dtype", "preconditioner"),
    crossed(["float32", "float64", "float64"], [None, "diagonal", "nystrom"]),
)
@pytest.mark.few(1)
def test_finds_the_minimum(dtype, preconditioner):
    problem = ridge_logistic(dtype)
    gtol = 1e-5 if dtype == "float32" else 1e-11
    result = newton(problem, preconditioner=preconditioner, rank=3).minimize(gtol=gtol)
    assert result.success, result.message
    tolerance = 1e-3 if dtype == "float32" else 1e-9
    np.testing.assert_allclose(flat(problem.variables), problem.solution, atol=tolerance)
    np.testing.assert_array_equal(result.x, flat(problem.variables))
    assert np.linalg.norm(result.jac) <= gtol
    assert result.nit == len(result.history) < 15
    assert result.gradient_evaluations == sum(s.ratio == s.ratio for s in result.history)
    assert result.products >= sum(step.cg_iterations for step in result.history)


def test_rosenbrock():
    result = newton(rosenbrock(20)).minimize(gtol=1e-9)
    assert result.success
    assert np.abs(rosen_der(result.x)).max() < 1e-9
    assert result.fun == pytest.approx(rosen(result.x), abs=1e-15)
    losses = [step.loss for step in result.history]
    assert losses == sorted(losses, reverse=True)
    # The forcing term is large far from the minimum and small near it.
    forcings = [step.forcing for step in result.history]
    assert forcings[0] == 0.5
    assert min(forcings[-3:]) < 1e-2
    assert result.nit < 200


def test_a_hundred_thousand_variables():
    problem = extended_rosenbrock(100_000)
    result = newton(problem).minimize(gtol=1e-8)
    assert result.success
    np.testing.assert_allclose(result.x, 1.0, atol=1e-7)
    assert result.nit < 100


def test_one_step_solves_a_quadratic():
    """Compared with a dense solution; the ratio is one."""
    A = random(0, 6, 6, dtype="float64")
    A = A @ A.T + np.eye(6)
    b = random(1, 6, dtype="float64")
    w = tf.Variable(np.zeros(6))
    method = hvp.NewtonCG(
        lambda: tf.tensordot(w, tf.linalg.matvec(A, w), 1) / 2 - tf.tensordot(b, w, 1),
        w,
        radius=100.0,
        forcing=1e-12,
    )
    step = method.step()
    np.testing.assert_allclose(w.numpy(), np.linalg.solve(A, b), rtol=1e-9)
    assert step.accepted
    assert step.outcome == "converged"
    assert step.ratio == pytest.approx(1.0)
    assert step.cg_iterations <= 7
    assert method.products == step.cg_iterations


@pytest.mark.parametrize("preconditioner", [None, "diagonal"])
@pytest.mark.few(1)
def test_trust_region_bounds_the_step(preconditioner):
    problem = rosenbrock(4)
    method = newton(problem, radius=1e-3, preconditioner=preconditioner)
    before = problem.variables.numpy()
    step = method.step()
    assert step.outcome == "boundary"
    moved = problem.variables.numpy() - before
    if preconditioner is None:
        assert np.linalg.norm(moved) == pytest.approx(1e-3, rel=1e-6)
        assert method.radius == pytest.approx(2e-3)
    else:
        # The preconditioner's norm is larger than the Euclidean norm.
        assert 0 < np.linalg.norm(moved) < 5e-4


def test_preconditioners_save_iterations():
    """A few large eigenvalues, with eigenvectors along the axes."""
    scales = np.concatenate([np.geomspace(1e2, 1e6, 10), np.ones(90)])
    w = tf.Variable(np.ones(100))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(scales * w**2) / 2 + tf.reduce_sum(w), w)
    options = {"forcing": 1e-11, "rank": 15}
    plain = hvp.NewtonCG(H, radius=1e6, **options).step()
    assert plain.outcome == "converged"
    for preconditioner in ("diagonal", "nystrom"):
        w.assign(np.ones(100))
        # The radius is in the preconditioner's norm.
        method = hvp.NewtonCG(H, preconditioner=preconditioner, radius=1e9, **options)
        step = method.step()
        assert step.outcome == "converged"
        assert step.cg_iterations <= plain.cg_iterations / 2
        np.testing.assert_allclose(w.numpy(), -1 / scales, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"engine": "tape"}], ids=str)
@pytest.mark.few(1)
@pytest.mark.long
def test_steps_learn_from_the_directions_of_earlier_ones(options):
    """A few large eigenvalues in random directions, which change a little from step to step."""
    random = np.random.default_rng(0)
    axes = np.linalg.qr(random.standard_normal((60, 60)))[0]
    x = np.sqrt(np.r_[np.geomspace(1e2, 1e5, 12), np.ones(48)])[:, np.newaxis] * axes.T
    w = tf.Variable(np.zeros(60))

    def loss(x):
        z = tf.linalg.matvec(x, w)
        return tf.reduce_mean(z**2 + 1e-3 * tf.cos(z)) + 0.01 * tf.reduce_mean((w - 1) ** 2)

    taken = {}
    for preconditioner in (None, "recycled"):
        w.assign(np.zeros(60))
        method = hvp.NewtonCG(
            loss,
            w,
            (x,),
            preconditioner=preconditioner,
            rank=40,
            radius=1e6,
            damping=1e-9,
            forcing=1e-6,
            **options,
        )
        steps = [method.step() for _ in range(3)]
        assert all(step.outcome == "converged" for step in steps)
        taken[preconditioner] = [step.cg_iterations for step in steps]
        H = hvp.HessianOperator(loss, w, (x,))
        assert np.linalg.norm(H.gradient) < 1e-10
    # The first step knows nothing yet.
    assert taken["recycled"][0] == taken[None][0]
    assert taken["recycled"][1] <= taken[None][1] / 2


@pytest.mark.parametrize("slow", ["merging of directions", "solve of a subproblem"])
@pytest.mark.few(1)
@pytest.mark.long
def test_recycling_that_takes_longer_than_the_solves_is_said(monkeypatch, caplog, slow):
    w = tf.Variable(np.linspace(1, 2, 20))

    def loss():
        return tf.reduce_sum(tf.sqrt(1 + w**2)) + tf.reduce_sum((w[1:] - w[:-1]) ** 2)

    method = hvp.NewtonCG(loss, w, preconditioner="recycled", rank=5, radius=0.1)
    method.step()  # traces
    inside.before_each(monkeypatch, slow, lambda: time.sleep(0.3))
    for _ in range(8):
        method.step()
    assert not caplog.records
    method.step()
    said = [record.getMessage() for record in caplog.records]
    if slow == "solve of a subproblem":
        assert not said
    else:
        [message] = said
        assert "10 steps" in message
        assert "preconditioner=None" in message
        assert 2.7 <= float(re.search(r"directions took ([\d.]+) s", message)[1]) < 10
    method.step()
    assert len(caplog.records) == len(said)


def test_damping_is_added_and_adapted():
    w = tf.Variable([1.0, 2.0], dtype=tf.float64)
    method = hvp.NewtonCG(
        lambda: tf.reduce_sum(w**2) / 2, w, damping=3.0, forcing=1e-10, radius=10.0
    )
    step = method.step()
    np.testing.assert_allclose(w.numpy(), [0.75, 1.5])  # 1 - 1 / (1 + 3)
    assert step.ratio > 1
    assert method.damping == pytest.approx(2.0)
    concave = hvp.NewtonCG(lambda: tf.reduce_sum(tf.cos(w)), w, damping=1e-3, radius=50.0)
    for _ in range(5):
        if not concave.step().accepted:
            break
    assert concave.damping != 1e-3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.few(1)
def test_saddle_is_left(dtype):
    """Even if the gradient does not point away from it, or is zero."""
    problem, method = compiled(saddle, dtype)
    for at in [(0.5, 1e-3), (0.5, 0.0), (0.0, 0.0)]:
        problem.variables.assign(at)
        method.reset()
        result = method.minimize(gtol=1e-5)
        assert result.success
        np.testing.assert_allclose(np.abs(result.x), problem.solution, atol=1e-4)
        assert any(step.outcome == "negative curvature" for step in result.history)
    problem.variables.assign((0.0, 0.0))
    method.reset()
    result = method.minimize(leave_saddles=False)
    assert result.success
    np.testing.assert_array_equal(result.x, [0.0, 0.0])


def test_message_at_a_minimum():
    _, method = compiled(ridge_logistic)
    method.minimize(gtol=1e-10)
    before = method.products
    result = method.minimize(gtol=1e-10)
    assert "no negative curvature" in result.message
    assert result.nit == 0
    assert method.products - before <= 22


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_converges_to_its_rounding_error(dtype):
    """The loss is near 1000, so its differences are lost to rounding long before."""
    w = tf.Variable(random(0, 20, dtype=dtype))
    scales = np.geomspace(1, 100, 20).astype(dtype)
    method = hvp.NewtonCG(lambda: 1000 + tf.reduce_sum(scales * (tf.exp(w) - w)), w)
    result = method.minimize(gtol=0.0, maxiter=60)
    assert result.status in (0, 2), result.message
    eps = np.finfo(dtype).eps
    assert np.linalg.norm(result.jac) < 1000 * eps
    np.testing.assert_allclose(result.x, 0.0, atol=100 * eps)
    assert any(step.from_gradients and step.accepted for step in result.history)


def test_nan_at_a_trial_point_shrinks_the_region(caplog):
    w = tf.Variable([3.0, 1.0], dtype=tf.float64)
    method = hvp.NewtonCG(
        lambda: w[0] - tf.math.log(w[0]) + (w[1] - 2) ** 2, w, radius=100.0, forcing=1e-6
    )
    with caplog.at_level(logging.INFO, logger="hvp"):
        step = method.step()
    assert not step.accepted
    assert step.ratio == -np.inf
    assert step.radius < 100
    np.testing.assert_array_equal(w.numpy(), [3.0, 1.0])
    assert "not finite" in caplog.text
    result = method.minimize(gtol=1e-10)
    np.testing.assert_allclose(w.numpy(), [1.0, 2.0])
    w.assign([3.0, 1.0])
    method.reset()
    result = method.minimize(gtol=1e-10)
    assert result.non_finite > 0
    assert f"At {result.non_finite} trial points" in result.message


def test_non_finite_start_or_product_raises():
    w = tf.Variable([1.0, 1.0], dtype=tf.float64)
    method = hvp.NewtonCG(lambda: tf.reduce_sum(tf.sqrt(w)), w)
    w.assign([-1.0, 1.0])
    with pytest.raises(hvp.NonFiniteError, match="where the variables are"):
        method.step()
    np.testing.assert_array_equal(w.numpy(), [-1.0, 1.0])
    v = tf.Variable([0.0, 1.0], dtype=tf.float64)
    kink = hvp.NewtonCG(lambda: tf.reduce_sum(tf.abs(v) ** 1.5 + v), v)
    with pytest.raises(hvp.NonFiniteError, match="product with the Hessian"):
        kink.step()
    np.testing.assert_array_equal(v.numpy(), [0.0, 1.0])


def test_losses_without_a_minimum_end():
    w = tf.Variable([1.0, -2.0], dtype=tf.float64)
    result = hvp.NewtonCG(lambda: 2 * w[0] - w[1], w).minimize(maxiter=10)
    assert result.status == 1
    assert result.fun < -1000  # each step is twice as long as the one before
    w.assign([1.0, -2.0])
    result = hvp.NewtonCG(lambda: tf.reduce_sum(tf.abs(w)), w).minimize(maxiter=60)
    assert np.isfinite(result.x).all()
    assert result.fun < 3
    w.assign([0.0, 0.0])
    method = hvp.NewtonCG(lambda: tf.reduce_sum(w**2), w)
    step = method.step()
    assert (step.accepted, step.cg_iterations, step.radius) == (False, 0, 1.0)
    result = method.minimize()
    assert (result.nit, result.success) == (0, True)
    w.assign([1.0, 1.0])
    result = method.minimize(maxiter=0)
    assert (result.nit, result.status) == (0, 1)
    np.testing.assert_array_equal(w.numpy(), [1.0, 1.0])


def test_a_frozen_variable_that_changes():
    """Between two steps it raises an error once; a new run minimizes the new loss."""
    w, scale = tf.Variable([3.0, 1.0]), tf.Variable(1.0, trainable=False)

    def method(**options):
        return hvp.NewtonCG(lambda: tf.reduce_sum((scale * w - 1) ** 2), w, **options)

    raising = method()
    raising.step()
    scale.assign(2.0)
    products = raising.products
    with pytest.raises(hvp.StaleOperatorError, match="minimized over"):
        raising.step()
    assert raising.products == products
    raising.step()
    for value, reset in ((4.0, False), (8.0, True)):
        scale.assign(value)
        if reset:
            raising.reset()
        assert raising.minimize(gtol=1e-6).success
        np.testing.assert_allclose(w.numpy(), 1 / value, rtol=1e-4)
    refreshing = method(on_stale="refresh")
    refreshing.step()
    scale.assign(1.0)
    refreshing.step()
    assert refreshing.minimize(gtol=1e-6).success
    np.testing.assert_allclose(w.numpy(), 1.0, rtol=1e-4)
    with pytest.raises(hvp.HvpError, match="on_stale is 'ignore'"):
        method(on_stale="ignore")


@pytest.mark.parametrize("preconditioner", [None, "diagonal"])
@pytest.mark.few(1)
@pytest.mark.long
def test_a_minimum_at_infinity_is_told(preconditioner):
    """Of classes that are separate, and not of others, nor of a degenerate minimum."""
    x = random(0, 60, 3, dtype="float64")
    noise = random(1, 60, dtype="float64")
    for y, separate in ((x[:, 0] > 0, True), (x[:, 0] + noise > 0, False)):
        w = tf.Variable(np.zeros(3))

        def loss(x, y, w=w):
            logits = tf.linalg.matvec(x, w)
            return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))

        method = hvp.NewtonCG(loss, w, (x, y.astype(float)), preconditioner=preconditioner)
        result = method.minimize()
        assert result.success != separate
        assert ("infinity" in result.message) == separate
    v = tf.Variable(np.array([1.0, 0.5]))
    result = hvp.NewtonCG(lambda: tf.reduce_sum(v**4), v).minimize()
    assert result.success, result.message


@pytest.mark.few(0)
def test_xla_compiles_the_iterations_of_a_model_with_biases(capfd):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    x = random(0, 20, 3)

    def loss(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    method = hvp.NewtonCG(loss, model, (x, x[:, :1]), jit_compile=True)
    before = float(loss(x, x[:, :1]))
    assert method.minimize(maxiter=3).fun < before
    assert "compile-time constant" not in capfd.readouterr().err


def test_divergence_returns_the_last_finite_point():
    w = tf.Variable([0.1, 0.2], dtype=tf.float32)
    result = hvp.NewtonCG(lambda: -tf.reduce_sum(w**2), w).minimize(maxiter=500)
    assert not result.success
    assert len(result.history) > 10
    assert np.isfinite(result.fun)


@pytest.mark.long
def test_falls_back_if_xla_cannot_compile_the_iterations():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    x = random(0, 20, 3)
    method = hvp.NewtonCG(lambda: tf.reduce_mean((model(x) - 1) ** 2), model, jit_compile=True)
    assert method.minimize(maxiter=3).fun < 0.5


def test_callback_and_interrupt():
    problem, method = compiled(rosenbrock, 4)
    seen = []

    def stop(step):
        assert isinstance(step, hvp.NewtonStep)
        assert step.loss == pytest.approx(rosen(problem.variables.numpy()))
        seen.append(step)
        if len(seen) == 3:
            raise StopIteration

    result = method.minimize(callback=stop)
    assert (result.status, result.nit) == (99, 3)
    np.testing.assert_array_equal(result.x, problem.variables.numpy())

    def interrupt(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.minimize(callback=interrupt)
    assert rosen(problem.variables.numpy()) <= result.fun
    assert method.minimize(gtol=1e-8).success


def test_variables_changed_between_steps_are_noticed():
    problem, method = compiled(rosenbrock, 4)
    method.step()
    problem.variables.assign([0.5, 0.5, 0.5, 0.5])
    steps = [method.step() for _ in range(5)]
    assert steps[0].loss <= rosen([0.5] * 4)
    assert steps[-1].loss < rosen([0.5] * 4)


@pytest.mark.parametrize(
    ("preconditioner", "sampled"),
    crossed(["diagonal", "nystrom", "recycled"], [True, False])
    + [long(None, sampled) for sampled in (True, False)],
)
@pytest.mark.few(1)
def test_a_restored_run_continues_with_the_same_iterates(tmp_path, preconditioner, sampled):
    options = {"preconditioner": preconditioner, "rank": 2, "damping": 0.1, "seed": 3}
    if sampled:
        options.update(hessian_batch_size=10, gradient_batch_size=20)

    def build():
        problem = ridge_logistic()
        return problem, newton(problem, radius=0.1, **options)

    problem, method = build()
    iterates = []
    for k in range(8):
        method.step()
        iterates.append(flat(problem.variables))
        if k == 3:
            path = tf.train.Checkpoint(optimizer=method).save(str(tmp_path / "run"))
    problem, method = build()
    tf.train.Checkpoint(optimizer=method).restore(path).assert_consumed()
    assert method.iterations == 4
    np.testing.assert_array_equal(flat(problem.variables), iterates[3])
    for k in range(4, 8):
        method.step()
        np.testing.assert_array_equal(flat(problem.variables), iterates[k])


@pytest.mark.parametrize("gradient_batch_size", [None, 400])
@pytest.mark.few(1)
def test_samples(gradient_batch_size):
    problem = ridge_logistic(examples=500)
    method = newton(
        problem, hessian_batch_size=50, gradient_batch_size=gradient_batch_size, batch_size=100
    )
    result = method.minimize(gtol=1e-6 if gradient_batch_size is None else 1e-2, maxiter=60)
    if gradient_batch_size is None:
        # The minimum is the same, although each Hessian is over another sample.
        assert result.success
        np.testing.assert_allclose(flat(problem.variables), problem.solution, atol=1e-4)
    else:
        np.testing.assert_allclose(flat(problem.variables), problem.solution, atol=0.1)
    assert result.products > 0


def test_hessian_is_over_the_sample_and_gradient_over_all_examples():
    """Each example has its own coordinate, so that the step reveals which ones were drawn."""
    count, size = 12, 5
    scales = np.linspace(0.5, 1.5, count)  # smaller than the damping, so that steps are accepted
    x = np.diag(scales)
    w = tf.Variable(np.ones(count))
    method = hvp.NewtonCG(
        lambda x: tf.reduce_mean(tf.linalg.matvec(x, w) ** 2) / 2,
        w,
        (x,),
        hessian_batch_size=size,
        damping=1.0,
        radius=1e6,
        forcing=1e-12,
    )
    drawn = []
    for _ in range(2):
        start, damping = w.numpy(), method.damping
        gradient = scales**2 * start / count
        assert method.step().accepted
        curvature = -gradient / (w.numpy() - start) - damping
        in_sample = np.isclose(curvature, scales**2 / size, rtol=1e-6)
        np.testing.assert_allclose(curvature[~in_sample], 0.0, atol=1e-6)
        assert in_sample.sum() == size
        drawn.append(tuple(in_sample))
    assert drawn[0] != drawn[1]


def test_gradient_sample_is_the_same_at_both_ends_of_a_step():
    """The next step has another sample. Compared with losses that NumPy computes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(30)
    w = tf.Variable(2.0, dtype=tf.float64)
    method = hvp.NewtonCG(
        lambda x: tf.reduce_mean((w - x) ** 2), w, (x,), hessian_batch_size=4, gradient_batch_size=8
    )
    means = []
    for _ in range(3):
        start = float(w)
        step = method.step()
        # The gradient after the step reveals the mean of the sample on which the loss decreased.
        mean = float(w) - np.copysign(step.gradient_norm / 2, float(w) - x.mean())
        decrease = step.ratio * ((start - mean) ** 2 - (float(w) - mean) ** 2)
        assert step.accepted
        assert decrease > 0
        # The loss is quadratic, with the same curvature for every sample.
        assert step.ratio == pytest.approx(1.0)
        assert abs(mean - x.mean()) > 1e-3
        means.append(round(mean, 9))
    assert len(set(means)) == 3


def test_a_sample_of_all_examples_is_no_sample():
    whole, one = compiled(ridge_logistic)
    sampled = ridge_logistic()
    other = newton(sampled, hessian_batch_size=1000)
    for _ in range(5):
        assert one.step().loss == pytest.approx(other.step().loss, rel=1e-12)
    np.testing.assert_allclose(flat(sampled.variables), flat(whole.variables), rtol=1e-8)


@pytest.mark.parametrize(
    ("engine", "jit_compile", "batch_size"),
    crossed(["graph", "tape", "graph"], [True, False, False], [None, None, 16]),
)
@pytest.mark.few(1)
def test_engines_and_batches_find_the_minimum(engine, jit_compile, batch_size):
    problem = ridge_logistic()
    options = {"engine": engine, "jit_compile": jit_compile, "batch_size": batch_size}
    result = newton(problem, forcing=0.1, **options).minimize(gtol=1e-9)
    assert result.success
    np.testing.assert_allclose(flat(problem.variables), problem.solution, atol=1e-8)


def test_keras_model_with_an_operator():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(loss="mse")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 3)), rng.standard_normal((50, 1))
    H = hvp.HessianOperator.from_keras(model, (x, y))
    method = hvp.NewtonCG(H)
    before = model.evaluate(x, y, batch_size=50, verbose=0)
    result = method.minimize(maxiter=10)
    assert model.evaluate(x, y, batch_size=50, verbose=0) == pytest.approx(result.fun, rel=1e-5)
    assert result.fun < 0.8 * before


def test_memory_stays_flat_over_the_steps():
    method = newton(rosenbrock(100))

    def live_objects():
        gc.collect()
        objects = gc.get_objects()
        return sum(isinstance(x, tf.__internal__.EagerTensor) for x in objects), len(objects)

    for _ in range(20):
        method.step()
    tensors, objects = live_objects()
    for _ in range(220):
        method.step()
    tensors_then, objects_then = live_objects()
    assert tensors_then <= tensors
    assert objects_then <= objects + 50
    assert method.iterations == 240


def test_bad_arguments_are_refused():
    problem, H = traced(ridge_logistic)
    for options, message in (
        ({"radius": 0.0}, "radius is 0.0"),
        ({"radius": np.inf}, "radius is inf"),
        ({"damping": -1.0}, "damping is -1.0"),
        ({"forcing": 1.5}, "forcing is 1.5"),
        ({"forcing": "newton"}, "forcing is 'newton'"),
        ({"max_cg_iterations": 0}, "max_cg_iterations is 0"),
        ({"rank": 1.5}, "rank is 1.5"),
        ({"preconditioner": "jacobi"}, "preconditioner is 'jacobi'"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"maxiter": 5}, "maxiter.* pass it to the method minimize"),
        ({"hessian_batch_size": 9, "gradient_batch_size": 5}, "no fewer examples"),
        ({"gradient_batch_size": 5}, "without hessian_batch_size"),
        ({"hessian_batch_size": 0}, "hessian_batch_size is 0"),
        ({"hessian_batch_size": 5, "reduction": "sum"}, "[Rr]eduction is given"),
    ):
        with pytest.raises(hvp.HvpError, match=message):
            newton(problem, **options)
    with pytest.raises(TypeError, match="lerning_rate"):
        newton(problem, lerning_rate=1)
    dataset = tf.data.Dataset.from_tensors(problem.data)
    with pytest.raises(hvp.InvalidDataError, match="together with data of type"):
        hvp.NewtonCG(problem.loss, problem.variables, dataset, hessian_batch_size=5)
    with pytest.raises(hvp.HvpError, match="together with an operator"):
        hvp.NewtonCG(H, hessian_batch_size=5)
    _, method = compiled(ridge_logistic)
    invalid = ({"gtol": -1}, {"rtol": np.nan}, {"maxiter": -1}, {"progress": 3}, {"callback": 3})
    for options in invalid:
        with pytest.raises(hvp.HvpError, match=next(iter(options))):
            method.minimize(**options)
    with pytest.raises(hvp.GraphModeError):
        tf.function(method.step)()
    assert method.iterations == 0


def test_progress_is_shown(capfd):
    pytest.importorskip("tqdm")
    compiled(rosenbrock, 4)[1].minimize(progress="always", maxiter=5)
    assert "steps" in capfd.readouterr().err


def test_a_gradient_that_is_zero_at_the_start_is_told():
    w = tf.Variable([1.0, 2.0])
    newton = hvp.NewtonCG(lambda: tf.reduce_sum(tf.nn.relu(-w)), w)
    result = newton.minimize()
    assert result.nit == 0
    assert "exactly zero" in result.message


@pytest.mark.parametrize("power", [4, 8, 12])
def test_a_flat_minimum_is_not_taken_for_one_at_infinity(power):
    w = tf.Variable([2.0, 2.0], dtype=tf.float64)
    result = hvp.NewtonCG(lambda: tf.reduce_sum((w - 1) ** power), w).minimize()
    assert result.success
    assert np.abs(result.jac).max() <= 1e-5


def test_a_block_is_refused():
    a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable([3.0, 4.0], name="b")
    H = hvp.HessianOperator(lambda: tf.reduce_sum(a**2) + tf.reduce_sum((b - a) ** 2), [a, b])
    for minimize in (hvp.minimize, hvp.NewtonCG, lambda H: hvp.minimize(H, method="L-BFGS-B")):
        with pytest.raises(hvp.HvpError, match="block of another"):
            minimize(H.block("b"))
    np.testing.assert_array_equal(a, [1, 2])


@pytest.mark.parametrize(("dtype", "radius"), [("float32", 1e3), ("float64", 1e8)])
def test_a_radius_that_is_far_too_large_is_reduced(dtype, radius):
    """Next to the loss at the end of such a step, any decrease is below rounding."""
    w = tf.Variable([-1.2, 1.0], dtype=dtype)

    def loss():
        return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2

    assert hvp.NewtonCG(loss, w, radius=radius).minimize().success
    np.testing.assert_allclose(w, [1, 1], atol=1e-3)
