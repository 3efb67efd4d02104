"""`minimize`: all methods, starting points and ways to end."""

import functools
import gc
import logging

import keras
import numpy as np
import pytest
import scipy.optimize
import tensorflow as tf

import hvp
from hvp._minimize.minimize import METHODS
from tests.cases import crossed, long, pairwise
from tests.minimize.problems import (
    Minimized,
    ridge_logistic,
    rosen,
    rosen_der,
    rosen_hess_prod,
    rosenbrock,
    rosenbrock_start,
    saddle,
    traced,
)

HESSIAN = [name for name, hessian in METHODS.items() if hessian != "none"]
PRODUCTS = [name for name in HESSIAN if METHODS[name] != "dense"]
# One method for each use of derivatives, and one whose run scipy drives differently.
REPRESENTATIVES = {"L-BFGS-B", "TNC", "trust-krylov", "trust-constr", "trust-exact"}
KINDS = [name if name in REPRESENTATIVES else long(name) for name in METHODS]


def flat(variables):
    return np.concatenate([np.ravel(v.numpy()) for v in tf.nest.flatten(variables)])


def assert_minimum(result, problem, method, dtype):
    """Assert that a run ended at the minimum, and that its result is complete."""
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
    assert result.seconds > result.evaluation_seconds > 0


@pytest.mark.parametrize(
    ("method", "dtype", "from_x0"), pairwise(METHODS, ["float32", "float64"], [False, True])
)
@pytest.mark.few(3)
def test_every_method_finds_the_minimum(method, dtype, from_x0):
    problem, H = traced(ridge_logistic, dtype)
    x0 = np.array([0.3, -0.2, 0.1, 0.4]) if from_x0 else None
    products = H.stats.products
    result = hvp.minimize(H, method=method, x0=x0, tol=1e-9)
    assert_minimum(result, problem, method, dtype)
    # The operator was used before: by the other methods.
    assert result.products == H.stats.products - products
    assert (result.products > 0) == (METHODS[method] != "none")


@pytest.mark.parametrize(
    ("method", "x0"), [("trust-krylov", [0.3, -0.2, 0.1, 0.4]), ("L-BFGS-B", None)]
)
def test_a_loss_is_minimized_without_an_operator(method, x0):
    problem = ridge_logistic()
    result = hvp.minimize(
        problem.loss, problem.variables, problem.data, method=method, x0=x0, tol=1e-9
    )
    assert_minimum(result, problem, method, "float64")
    assert (result.products > 0) == (METHODS[method] != "none")


@functools.cache
def recorded_rosenbrock():
    """Return Rosenbrock's function, which records the points at which it is evaluated."""
    problem, points = rosenbrock(6), []

    def loss():
        tf.py_function(lambda w: points.append(w.numpy()), [problem.variables], [])
        return problem.loss()

    return problem.variables, hvp.HessianOperator(loss, problem.variables), points


@pytest.mark.parametrize("method", PRODUCTS)
def test_gradient_is_evaluated_once_at_each_point(method):
    w, H, points = recorded_rosenbrock()
    w.assign(rosenbrock_start(6))
    points.clear()
    products = H.stats.products
    result = hvp.minimize(H, method=method, maxiter=25)
    visited = np.unique(np.stack(points), axis=0)
    assert result.gradient_evaluations == len(visited) == len(points)
    assert H.stats.products - products > len(visited)


ITERATES = {
    "Newton-CG": {"xtol": 1e-10},
    "trust-ncg": {"gtol": 1e-9},
    "trust-krylov": {"gtol": 1e-9},
}


@pytest.mark.parametrize("method", ITERATES)
@pytest.mark.few(1)
def test_iterates_are_scipys_own(method):
    """Compared for 30 steps: rounding separates the runs by a factor of `e` in each step."""
    ours, theirs = [], []
    x0, options = rosenbrock_start(20), ITERATES[method]
    _, H = traced(rosenbrock, 20)
    result = hvp.minimize(
        H, method=method, options=options, callback=lambda x: ours.append(x.copy())
    )
    expected = scipy.optimize.minimize(
        rosen,
        x0,
        jac=rosen_der,
        hessp=rosen_hess_prod,
        method=method,
        options=options,
        callback=lambda x: theirs.append(x.copy()),
    )
    np.testing.assert_allclose(ours[:30], theirs[:30], rtol=0, atol=1e-9)
    assert result.nit == pytest.approx(expected.nit, rel=0.04)
    assert result.nit > 90
    for x in (result.x, expected.x):
        assert np.linalg.norm(rosen_der(x)) < 1e-5


def test_trust_constr_reaches_the_same_gradient():
    result = hvp.minimize(traced(rosenbrock, 10)[1], method="trust-constr", gtol=1e-8)
    assert np.abs(rosen_der(result.x)).max() < 1e-7


def test_bounds_and_constraints_pass_through():
    half = scipy.optimize.Bounds([-2.0, -2.0], [0.5, 2.0])
    for method in ("trust-constr", "L-BFGS-B", "TNC", "SLSQP"):
        result = hvp.minimize(traced(rosenbrock, 2)[1], method=method, bounds=half, tol=1e-10)
        np.testing.assert_allclose(result.x, [0.5, 0.25], atol=1e-3)
    line = scipy.optimize.LinearConstraint([[1.0, 1.0]], 1.0, 1.0)
    _, H = traced(rosenbrock, 2)
    result = hvp.minimize(H, method="trust-constr", constraints=line, gtol=1e-8)
    assert result.x.sum() == pytest.approx(1.0)
    slope = rosen_der(result.x)
    assert slope[0] == pytest.approx(slope[1], abs=1e-5)  # parallel to the constraint


@pytest.mark.parametrize("method", ["TNC", "SLSQP", "L-BFGS-B", "trust-constr"])
def test_a_bound_that_fixes_an_entry(method, capsys):
    w, seen = tf.Variable([1.0, 2.0], dtype=tf.float64), []
    bounds = scipy.optimize.Bounds([0.0, 2.0], [5.0, 2.0])
    result = hvp.minimize(
        lambda: tf.reduce_sum((w - [3.0, 4.0]) ** 2),
        w,
        method=method,
        bounds=bounds,
        callback=lambda x, *state: seen.append(x),
    )
    np.testing.assert_allclose(result.x, [3.0, 2.0], atol=1e-4)
    assert seen[-1].shape == (2,)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("method", ["Newton-CG", "SLSQP", "TNC", "BFGS"])
def test_the_gradient_of_a_result_is_that_at_the_result(method):
    result = hvp.minimize(traced(rosenbrock, 2)[1], method=method)
    np.testing.assert_allclose(result.jac, rosen_der(result.x), rtol=1e-8, atol=1e-12)


def test_a_result_is_what_variables_of_several_types_hold():
    a, b = tf.Variable([1.0]), tf.Variable([1.0], dtype=tf.float64)
    loss = lambda: (tf.cast(a[0], b.dtype) - 1 / 3) ** 2 + (b[0] - 1 / 3) ** 2  # noqa: E731
    result = hvp.minimize(loss, [a, b], method="L-BFGS-B", tol=1e-12)
    np.testing.assert_array_equal(result.x, [float(a[0]), float(b[0])])


def test_keras_model_and_batches():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(loss="mse")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((26, 3)), rng.standard_normal((26, 1))
    before = model.evaluate(x, y, batch_size=26, verbose=0)
    H = hvp.HessianOperator.from_keras(model, (x, y), batch_size=16)
    weights = [v.numpy() for v in model.trainable_variables]
    result = hvp.minimize(H, maxiter=5)
    assert result.fun < 0.8 * before
    assert model.evaluate(x, y, batch_size=26, verbose=0) == pytest.approx(result.fun, rel=1e-5)
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
        maxiter=5,
    )
    assert again.fun == pytest.approx(result.fun, rel=0.02)


@pytest.mark.parametrize(
    ("method", "dtype"),
    crossed(
        ["trust-krylov", "trust-ncg", "Newton-CG", "trust-constr", "trust-exact"],
        ["float32", "float64"],
    ),
)
def test_saddle_is_left(method, dtype):
    problem, H = traced(saddle, dtype, (0.5, 1e-2))
    H.refresh()
    assert np.linalg.eigvalsh(H.to_dense())[0] < 0
    result = hvp.minimize(H, method=method)
    np.testing.assert_allclose(np.abs(result.x), problem.solution, atol=5e-3)


# The loss is finite for positive `w[0]` only, and a Newton step from 3 leaves that domain.
def logarithm(dtype="float64"):
    w = tf.Variable(np.array([3.0, 1.0], dtype))

    def loss():
        return w[0] - tf.math.log(w[0]) + (w[1] - 2) ** 2

    return Minimized(loss, w, None, np.array([1.0, 2.0]))


@pytest.mark.parametrize(("method", "dtype"), crossed(METHODS, ["float32", "float64"]))
def test_nan_at_a_trial_point_shortens_the_step(method, dtype, caplog):
    problem, H = traced(logarithm, dtype)
    options = {"initial_trust_radius": 50.0} if method.startswith("trust-") else {}
    if method == "trust-constr":
        options = {"initial_tr_radius": 50.0}
    with caplog.at_level(logging.INFO, logger="hvp"):
        result = hvp.minimize(H, method=method, tol=1e-8, **options)
    np.testing.assert_allclose(problem.variables, problem.solution, atol=5e-3)
    assert np.isfinite(result.fun)
    if method.startswith("trust-"):
        assert result.non_finite > 0
    if result.non_finite:
        assert "not finite" in result.message
        assert "not finite" in caplog.text


def squares():
    w = tf.Variable([0.0, 0.0], dtype=tf.float64)
    return Minimized(lambda: tf.reduce_sum(w**2), w, None, np.zeros(2))


@pytest.mark.parametrize("method", KINDS)
def test_zero_gradient_or_no_iterations(method):
    result = hvp.minimize(traced(squares)[1], method=method)
    assert result.success
    assert result.nit == 0
    np.testing.assert_array_equal(result.x, [0.0, 0.0])
    problem, H = traced(ridge_logistic)
    before = flat(problem.variables)
    result = hvp.minimize(H, method=method, maxiter=0)
    assert not result.success
    np.testing.assert_array_equal(flat(problem.variables), before)
    np.testing.assert_array_equal(result.x, before)
    assert result.gradient_evaluations == 1


def linear():
    w = tf.Variable([1.0, -2.0], dtype=tf.float64)
    return Minimized(lambda: 2 * w[0] - w[1], w, None, None)


def nonsmooth():
    w = tf.Variable([1.0, -2.0], dtype=tf.float64)
    return Minimized(lambda: tf.reduce_sum(tf.abs(w) + 0.1 * w**2), w, None, np.zeros(2))


@pytest.mark.parametrize(("loss", "maxiter", "largest"), [(linear, 3, 4.0), (nonsmooth, 40, 3.5)])
@pytest.mark.parametrize("method", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:scipy")
@pytest.mark.filterwarnings("ignore::scipy.optimize.OptimizeWarning")
def test_linear_and_nonsmooth_losses_end_with_finite_variables(method, loss, maxiter, largest):
    problem, H = traced(loss)
    limit = {"maxfun" if method == "TNC" else "maxiter": maxiter}
    result = hvp.minimize(H, method=method, **limit)
    assert np.isfinite(result.x).all()
    np.testing.assert_array_equal(problem.variables, result.x)
    assert result.fun <= largest


@pytest.mark.parametrize("method", KINDS)
def test_callback_ends_the_run(method):
    problem, H = traced(rosenbrock, 4)
    seen = []

    def callback(x, *rest):
        # The variables are at the iterate.
        np.testing.assert_array_equal(problem.variables.numpy(), x)
        seen.append(x)
        if len(seen) == 2:
            raise StopIteration

    result = hvp.minimize(H, method=method, callback=callback)
    assert len(seen) == 2
    assert not result.success
    np.testing.assert_array_equal(problem.variables.numpy(), result.x)
    if method != "SLSQP":  # the first iterates of SLSQP may be anywhere
        assert result.fun < rosen(rosenbrock_start(4))


@pytest.mark.parametrize("method", KINDS)
def test_callback_takes_the_intermediate_result(method):
    values = []

    def callback(intermediate_result):
        values.append(intermediate_result.fun)
        assert intermediate_result.fun == pytest.approx(rosen(intermediate_result.x))

    options = {"maxfun": 30} if method == "TNC" else {"maxiter": 5}
    hvp.minimize(traced(rosenbrock, 4)[1], method=method, callback=callback, options=options)
    assert values


@pytest.mark.parametrize("method", KINDS)
def test_interrupt_leaves_the_best_point_and_an_error_the_start(method):
    problem, H = traced(rosenbrock, 4)
    losses = []

    def interrupt(x, *rest):
        losses.append(rosen(x))
        if len(losses) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hvp.minimize(H, method=method, callback=interrupt)
    assert rosen(problem.variables.numpy()) <= min(losses)
    before = problem.variables.numpy()
    with pytest.raises(RuntimeError, match="mine"):
        hvp.minimize(H, method=method, callback=fail, x0=[2.0] * 4)
    np.testing.assert_array_equal(problem.variables.numpy(), before)


def fail(x, *rest):
    raise RuntimeError("mine")


def test_an_error_restores_the_values_from_before_x0():
    problem = rosenbrock(4)
    with pytest.raises(RuntimeError, match="mine"):
        hvp.minimize(problem.loss, problem.variables, callback=fail, x0=[2.0] * 4)
    np.testing.assert_array_equal(problem.variables.numpy(), rosenbrock_start(4))


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
    problem, H = traced(logarithm, "float64")
    for arguments in ((problem.loss, problem.variables), (H,)):
        with pytest.raises(hvp.NonFiniteError):
            hvp.minimize(*arguments, x0=[-1.0, 0.0])
        np.testing.assert_array_equal(problem.variables, [3.0, 1.0])


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
    problem, operator = traced(rosenbrock, 4)
    calls = []

    def loss():
        calls.append(1)
        return problem.loss()

    w = problem.variables
    many = tf.Variable(tf.zeros(5000))
    for arguments, error, message in (
        ({"method": "Nelder-Mead"}, hvp.HvpError, "a gradient: trust-krylov"),
        ({"method": None}, hvp.HvpError, "argument method is None"),
        ({"tol": float("nan")}, hvp.HvpError, "tol is nan"),
        ({"gtol": float("nan")}, hvp.HvpError, "gtol is nan"),
        ({"options": {"gtol": 1}, "gtol": 1}, hvp.HvpError, "Given twice"),
        ({"progress": "yes"}, hvp.HvpError, "progress is 'yes'"),
        ({"callback": 3}, hvp.HvpError, "callback is 3"),
        ({"options": [1]}, hvp.HvpError, "options is list"),
        ({"hessp": rosen_hess_prod}, hvp.HvpError, "derivatives are computed"),
        ({"args": (1.0,)}, hvp.HvpError, "loss's arguments as data"),
        ({"method": "trust_ncg"}, hvp.HvpError, "pass method='trust-ncg'"),
        ({"bounds": [(0, 1)] * 4}, hvp.HvpError, "bounds is passed with the method trust-krylov"),
        ({"constraints": {"type": "eq"}, "method": "BFGS"}, hvp.HvpError, "trust-constr, SLSQP"),
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
    for method in ("trust-krylov", "L-BFGS-B", "trust-constr", "Newton-CG", "SLSQP"):
        with pytest.raises(hvp.HvpError, match=f"{method} has no option max_iter"):
            hvp.minimize(loss, w, method=method, max_iter=3)
    np.testing.assert_array_equal(w.numpy(), rosenbrock_start(4))


def test_progress_is_shown(capfd):
    pytest.importorskip("tqdm")
    _, H = traced(rosenbrock, 4)
    hvp.minimize(H, progress="always", maxiter=5)
    assert "iterations" in capfd.readouterr().err
    hvp.minimize(H, progress=True, maxiter=5)
    assert "iterations" not in capfd.readouterr().err  # not a terminal


def live_objects():
    """Return the numbers of live tensors, and of live objects of any kind."""
    gc.collect()
    objects = gc.get_objects()
    return sum(isinstance(x, tf.__internal__.EagerTensor) for x in objects), len(objects)


def test_memory_stays_flat_over_the_iterations():
    counts = []

    def callback(x):
        counts.append(live_objects() if len(counts) in (20, 249) else None)

    hvp.minimize(traced(rosenbrock, 100)[1], method="trust-ncg", maxiter=250, callback=callback)
    assert len(counts) == 250
    (tensors, objects), (tensors_then, objects_then) = counts[20], counts[249]
    assert tensors_then <= tensors
    assert objects_then <= objects + 50


def test_a_run_leaves_no_tensors():
    problem = rosenbrock(20)
    hvp.minimize(problem.loss, problem.variables, maxiter=3)
    problem.variables.assign(rosenbrock_start(20))
    hvp.minimize(problem.loss, problem.variables, maxiter=3)
    before = live_objects()[0]
    hvp.minimize(problem.loss, problem.variables, maxiter=30)
    assert live_objects()[0] <= before
