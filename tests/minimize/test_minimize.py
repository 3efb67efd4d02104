"""`minimize`: all methods, starting points and ways to end."""

import gc
import logging

import keras
import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import hvp
from hvp._minimize.minimize import METHODS
from tests.cases import long
from tests.minimize.problems import (
    ridge_logistic,
    rosen,
    rosen_der,
    rosen_hess_prod,
    rosenbrock,
    rosenbrock_start,
    saddle,
)

HESSIAN = [name for name, method in METHODS.items() if method.hessian != "none"]
PRODUCTS = [name for name in HESSIAN if METHODS[name].hessian != "dense"]


def flat(variables):
    return np.concatenate([np.ravel(v.numpy()) for v in tf.nest.flatten(variables)])


@pytest.mark.parametrize("from_x0", [False, True], ids=["current values", "x0"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_minimum(method, dtype, from_x0):
    problem = ridge_logistic(dtype)
    x0 = np.array([0.3, -0.2, 0.1, 0.4]) if from_x0 else None
    result = hvp.minimize(
        problem.loss, problem.variables, problem.data, method=method, x0=x0, tol=1e-9
    )
    # These two methods have a stopping test of their own, on the decrease of the loss.
    own_test = method in ("trust-krylov", "SLSQP")
    atol = 2e-3 if dtype == "float32" else 1e-4 if own_test else 1e-5
    np.testing.assert_allclose(result.x, problem.solution, atol=atol)
    np.testing.assert_array_equal(flat(problem.variables), result.x.astype(dtype))
    assert result.x.dtype == np.float64
    gradient = result.grad if method == "trust-constr" else result.jac
    assert gradient.shape == (4,)
    assert np.abs(gradient).max() < 1e-3
    # Not equal, since float32 rounds some points to the same one.
    assert 2 < result.gradient_evaluations <= result.nfev
    assert (result.products > 0) == (METHODS[method].hessian != "none")
    assert result.seconds > result.evaluation_seconds > 0


@pytest.mark.parametrize("method", PRODUCTS)
def test_gradient_is_evaluated_once_at_each_point(method):
    problem = rosenbrock(6)
    seen = []

    def loss():
        tf.py_function(lambda w: seen.append(w.numpy()), [problem.variables], [])
        return problem.loss()

    result = hvp.minimize(loss, problem.variables, method=method, maxiter=25)
    visited = np.unique(np.stack(seen), axis=0)
    assert result.gradient_evaluations == len(visited)
    assert len(seen) <= len(visited) + 1  # tracing may call it once more
    assert result.products > len(visited)


ITERATES = {
    "Newton-CG": {"xtol": 1e-10},
    "trust-ncg": {"gtol": 1e-9},
    "trust-krylov": {"gtol": 1e-9},
}


@pytest.mark.parametrize("method", ITERATES)
def test_iterates_are_scipys_own(method):
    """Compared for 30 steps: rounding separates the runs by a factor of `e` in each step."""
    ours, theirs = [], []
    x0, options = rosenbrock_start(100), {**ITERATES[method], "maxiter": 40}
    problem = rosenbrock(100)
    hvp.minimize(
        problem.loss,
        problem.variables,
        method=method,
        options=options,
        callback=lambda x: ours.append(x.copy()),
    )
    scipy.optimize.minimize(
        rosen,
        x0,
        jac=rosen_der,
        hessp=rosen_hess_prod,
        method=method,
        options=options,
        callback=lambda x: theirs.append(x.copy()),
    )
    assert len(ours) == len(theirs) == 40
    np.testing.assert_allclose(ours[:30], theirs[:30], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "method", [name if name == "Newton-CG" else long(name) for name in ITERATES]
)
def test_number_of_iterations_is_scipys_own(method):
    """Medians over starting points that differ by rounding: one run takes 314 or 970 steps."""
    rng = np.random.default_rng(0)
    problem = rosenbrock(100)
    objective = hvp.ScipyObjective(problem.loss, problem.variables)
    ours, theirs = [], []
    for _ in range(5):
        x0 = rosenbrock_start(100) * (1 + 2e-16 * rng.standard_normal(100))
        for counts, functions in (
            (ours, (objective.fun, objective.jac, objective.hessp)),
            (theirs, (rosen, rosen_der, rosen_hess_prod)),
        ):
            fun, jac, hessp = functions
            result = scipy.optimize.minimize(
                fun, x0, jac=jac, hessp=hessp, method=method, options=ITERATES[method]
            )
            assert np.linalg.norm(rosen_der(result.x)) < 1e-5
            counts.append(result.nit)
    assert np.median(ours) == pytest.approx(np.median(theirs), rel=0.04)


def test_trust_constr_reaches_the_same_gradient():
    problem = rosenbrock(100)
    result = hvp.minimize(problem.loss, problem.variables, method="trust-constr", gtol=1e-8)
    assert np.abs(rosen_der(result.x)).max() < 1e-7


def test_bounds_and_constraints_pass_through():
    problem = rosenbrock(2)
    half = scipy.optimize.Bounds([-2.0, -2.0], [0.5, 2.0])
    for method in ("trust-constr", "L-BFGS-B", "TNC", "SLSQP"):
        problem.variables.assign([-1.2, 1.0])
        result = hvp.minimize(
            problem.loss, problem.variables, method=method, bounds=half, tol=1e-10
        )
        np.testing.assert_allclose(result.x, [0.5, 0.25], atol=1e-3)
    problem.variables.assign([-1.2, 1.0])
    line = scipy.optimize.LinearConstraint([[1.0, 1.0]], 1.0, 1.0)
    result = hvp.minimize(
        problem.loss, problem.variables, method="trust-constr", constraints=line, gtol=1e-8
    )
    assert result.x.sum() == pytest.approx(1.0)
    slope = rosen_der(result.x)
    assert slope[0] == pytest.approx(slope[1], abs=1e-5)  # parallel to the constraint


def test_keras_model_and_batches():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(loss="mse")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 3)), rng.standard_normal((50, 1))
    before = model.evaluate(x, y, batch_size=50, verbose=0)
    H = hvp.HessianOperator.from_keras(model, (x, y), batch_size=16)
    weights = [v.numpy() for v in model.trainable_variables]
    result = hvp.minimize(H, maxiter=20)
    assert result.fun < 0.8 * before
    assert model.evaluate(x, y, batch_size=50, verbose=0) == pytest.approx(result.fun, rel=1e-5)
    with pytest.raises(hvp.StaleOperatorError):
        _ = H.value
    # The same loss with a memory limit, under which all batches are streamed.
    for variable, value in zip(model.trainable_variables, weights):
        variable.assign(value)

    def loss(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    again = hvp.minimize(
        loss,
        model,
        (x.astype("float32"), y.astype("float32")),
        batch_size=16,
        memory_limit=2000,
        maxiter=20,
    )
    assert again.fun == pytest.approx(result.fun, rel=0.02)


@pytest.mark.parametrize(
    "method", ["trust-krylov", "trust-ncg", "Newton-CG", "trust-constr", "trust-exact"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_saddle_is_left(method, dtype):
    problem = saddle(dtype, at=(0.5, 1e-2))
    assert (
        np.linalg.eigvalsh(hvp.HessianOperator(problem.loss, problem.variables).to_dense())[0] < 0
    )
    result = hvp.minimize(problem.loss, problem.variables, method=method)
    np.testing.assert_allclose(np.abs(result.x), problem.solution, atol=5e-3)


# The loss is finite for positive `w[0]` only, and a Newton step from 3 leaves that domain.
def logarithm(dtype="float64"):
    w = tf.Variable(np.array([3.0, 1.0], dtype))
    return (lambda: w[0] - tf.math.log(w[0]) + (w[1] - 2) ** 2), w


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_nan_at_a_trial_point_shortens_the_step(method, dtype, caplog):
    loss, w = logarithm(dtype)
    options = {"initial_trust_radius": 50.0} if method.startswith("trust-") else {}
    if method == "trust-constr":
        options = {"initial_tr_radius": 50.0}
    with caplog.at_level(logging.INFO, logger="hvp"):
        result = hvp.minimize(loss, w, method=method, tol=1e-8, **options)
    np.testing.assert_allclose(w.numpy(), [1.0, 2.0], atol=5e-3)
    assert np.isfinite(result.fun)
    if method.startswith("trust-"):
        assert result.non_finite > 0
    if result.non_finite:
        assert "not finite" in result.message
        assert "not finite" in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_zero_gradient_or_no_iterations(method):
    w = tf.Variable([0.0, 0.0], dtype=tf.float64)
    result = hvp.minimize(lambda: tf.reduce_sum(w**2), w, method=method)
    assert result.success
    assert result.nit == 0
    np.testing.assert_array_equal(result.x, [0.0, 0.0])
    problem = ridge_logistic()
    before = flat(problem.variables)
    result = hvp.minimize(problem.loss, problem.variables, problem.data, method=method, maxiter=0)
    assert not result.success
    np.testing.assert_array_equal(flat(problem.variables), before)
    np.testing.assert_array_equal(result.x, before)
    assert result.gradient_evaluations == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:scipy")
@pytest.mark.filterwarnings("ignore::scipy.optimize.OptimizeWarning")
def test_linear_and_nonsmooth_losses_end_with_finite_variables(method):
    w = tf.Variable([1.0, -2.0], dtype=tf.float64)
    result = hvp.minimize(lambda: 2 * w[0] - w[1], w, method=method, maxiter=15)
    assert np.isfinite(result.x).all()
    np.testing.assert_array_equal(w.numpy(), result.x)
    assert result.fun <= 4.0
    w.assign([1.0, -2.0])
    result = hvp.minimize(
        lambda: tf.reduce_sum(tf.abs(w) + 0.1 * w**2), w, method=method, maxiter=40
    )
    assert np.isfinite(result.x).all()
    np.testing.assert_array_equal(w.numpy(), result.x)
    assert result.fun < 3.5


@pytest.mark.parametrize("method", METHODS)
def test_callback_ends_the_run(method):
    problem = rosenbrock(4)
    seen = []

    def callback(x, *rest):
        # The variables are at the iterate.
        np.testing.assert_array_equal(problem.variables.numpy(), x)
        seen.append(x)
        if len(seen) == 2:
            raise StopIteration

    result = hvp.minimize(problem.loss, problem.variables, method=method, callback=callback)
    assert len(seen) == 2
    assert not result.success
    np.testing.assert_array_equal(problem.variables.numpy(), result.x)
    if method != "SLSQP":  # the first iterates of SLSQP may be anywhere
        assert result.fun < rosen(rosenbrock_start(4))


@pytest.mark.parametrize("method", METHODS)
def test_callback_takes_the_intermediate_result(method):
    problem = rosenbrock(4)
    values = []

    def callback(intermediate_result):
        values.append(intermediate_result.fun)
        assert intermediate_result.fun == pytest.approx(rosen(intermediate_result.x))

    options = {"maxfun": 30} if method == "TNC" else {"maxiter": 5}

    hvp.minimize(problem.loss, problem.variables, method=method, callback=callback, options=options)
    assert values


@pytest.mark.parametrize("method", METHODS)
def test_interrupt_leaves_the_best_point_and_an_error_the_start(method):
    problem = rosenbrock(4)
    losses = []

    def interrupt(x, *rest):
        losses.append(rosen(x))
        if len(losses) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hvp.minimize(problem.loss, problem.variables, method=method, callback=interrupt)
    assert rosen(problem.variables.numpy()) <= min(losses)

    def fail(x, *rest):
        raise RuntimeError("mine")

    before = problem.variables.numpy()
    with pytest.raises(RuntimeError, match="mine"):
        hvp.minimize(problem.loss, problem.variables, method=method, callback=fail, x0=[2.0] * 4)
    np.testing.assert_array_equal(problem.variables.numpy(), before)


def test_error_in_the_loss_restores_the_variables():
    w = tf.Variable([3.0, 1.0])
    calls = []

    def loss():
        def fail(x):
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("lost")
            return x

        return tf.reduce_sum(w**4) + 0 * tf.py_function(fail, [tf.constant(0.0)], tf.float32)

    with pytest.raises(Exception, match="lost"):
        hvp.minimize(loss, w, method="trust-ncg")
    np.testing.assert_array_equal(w.numpy(), [3.0, 1.0])


def test_frozen_variable_that_changes_during_the_run_raises():
    w, scale = tf.Variable([3.0, 1.0]), tf.Variable(1.0, trainable=False)
    with pytest.raises(hvp.StaleOperatorError, match="minimized over"):
        hvp.minimize(
            lambda: scale * tf.reduce_sum(w**4), w, callback=lambda x: scale.assign_add(1.0)
        )
    np.testing.assert_array_equal(w.numpy(), [3.0, 1.0])


def test_start_that_is_not_finite_is_refused():
    loss, w = logarithm()
    with pytest.raises(hvp.NonFiniteError):
        hvp.minimize(loss, w, x0=[-1.0, 0.0])
    np.testing.assert_array_equal(w.numpy(), [3.0, 1.0])
    with pytest.raises(hvp.NonFiniteError):
        hvp.minimize(hvp.HessianOperator(loss, w), x0=[-1.0, 0.0])
    np.testing.assert_array_equal(w.numpy(), [3.0, 1.0])


def test_a_diverging_method_returns_a_finite_value():
    w = tf.Variable([0.1, 0.2], dtype=tf.float64)
    with np.errstate(all="ignore"):
        result = hvp.minimize(lambda: -tf.reduce_sum(w**2), w, method="L-BFGS-B")
    assert np.isfinite(result.fun)
    np.testing.assert_array_equal(result.x, w.numpy())


def test_first_order_methods_need_no_second_derivative():
    w = tf.Variable(np.array([0.5, 2.0]))

    def loss():
        return tf.reduce_sum((tf.math.igamma(tf.exp(w), tf.ones_like(w)) - 0.5) ** 2)

    with pytest.raises(hvp.SecondDerivativeError, match="IgammaGradA"):
        hvp.minimize(loss, w)
    result = hvp.minimize(loss, w, method="L-BFGS-B")
    assert result.fun < 1e-6


def test_bad_arguments_are_refused_before_any_work():
    problem = rosenbrock(4)
    calls = []

    def loss():
        calls.append(1)
        return problem.loss()

    w = problem.variables
    operator = hvp.HessianOperator(problem.loss, w)
    many = tf.Variable(tf.zeros(5000))
    for arguments, error, message in (
        ({"method": "Nelder-Mead"}, hvp.HvpError, "a gradient: trust-krylov"),
        ({"method": None}, hvp.HvpError, "argument method is None"),
        ({"options": {"gtol": 1}, "gtol": 1}, hvp.HvpError, "Given twice"),
        ({"progress": "yes"}, hvp.HvpError, "progress is 'yes'"),
        ({"options": [1]}, hvp.HvpError, "options is list"),
        ({"hessp": rosen_hess_prod}, hvp.HvpError, "derivatives are computed"),
        ({"maxiter": -1}, hvp.HvpError, "maxiter is -1"),
        ({"x0": [1.0, 2.0]}, hvp.InvalidVectorError, "x0 has shape"),
        ({"x0": [1.0, np.nan, 0, 0]}, hvp.InvalidVectorError, "x0 has 1 entries"),
    ):
        with pytest.raises(error, match=message):
            hvp.minimize(loss, w, **arguments)
    with pytest.raises(hvp.HvpError, match="No variables"):
        hvp.minimize(loss)
    with pytest.raises(hvp.TooLargeError, match="ogleg needs the Hessian of 5000"):
        hvp.minimize(lambda: tf.reduce_sum(many**2), many, method="dogleg")
    with pytest.raises(hvp.HvpError, match="n operator is given, and variables beside"):
        hvp.minimize(operator, w)
    with pytest.raises(hvp.HvpError, match="damping"):
        hvp.minimize(operator.damped(1.0))
    assert not calls
    np.testing.assert_array_equal(w.numpy(), rosenbrock_start(4))


def test_progress_is_shown(capfd):
    pytest.importorskip("tqdm")
    problem = rosenbrock(4)
    hvp.minimize(problem.loss, problem.variables, progress="always", maxiter=5)
    assert "iterations" in capfd.readouterr().err
    hvp.minimize(problem.loss, problem.variables, progress=True, maxiter=5)
    assert "iterations" not in capfd.readouterr().err  # not a terminal


def live_objects():
    """Return the numbers of live tensors, and of live objects of any kind."""
    gc.collect()
    objects = gc.get_objects()
    return sum(isinstance(x, tf.__internal__.EagerTensor) for x in objects), len(objects)


def test_memory_stays_flat_over_five_hundred_iterations():
    problem = rosenbrock(200)
    counts = []

    def callback(x):
        if len(counts) in (50, 499):
            counts.append(live_objects())
        else:
            counts.append(None)

    hvp.minimize(
        problem.loss, problem.variables, method="trust-ncg", maxiter=500, callback=callback
    )
    assert len(counts) == 500
    (tensors, objects), (tensors_then, objects_then) = counts[50], counts[499]
    assert tensors_then <= tensors
    assert objects_then <= objects + 100


def test_a_run_leaves_no_tensors():
    problem = rosenbrock(50)
    hvp.minimize(problem.loss, problem.variables, maxiter=3)
    problem.variables.assign(rosenbrock_start(50))
    hvp.minimize(problem.loss, problem.variables, maxiter=3)
    before = live_objects()[0]
    hvp.minimize(problem.loss, problem.variables, maxiter=30)
    assert live_objects()[0] <= before
