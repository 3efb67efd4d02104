"""Derivatives of minima: closed forms, differences of solutions, and tapes around tapes."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp

SHAPES = [(4, "tanh"), (1, None)]
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((40, 6)), rng.standard_normal(40)
X_NEW, Y_NEW = rng.standard_normal((15, 6)), rng.standard_normal(15)


class Ridge:
    """Weights with a strength of the penalty for each, whose minimum is known."""

    def __init__(self):
        self.w = tf.Variable(np.zeros(6), name="w")
        self.strengths = tf.Variable(np.linspace(-1.0, 1.0, 6), name="strengths")

    def loss(self, w=None):
        w = self.w if w is None else w
        residuals = tf.linalg.matvec(tf.constant(X), w) - Y
        return tf.reduce_sum(residuals**2) / 2 + tf.reduce_sum(tf.exp(self.strengths) * w**2) / 2

    def validation(self, w):
        return tf.reduce_sum((tf.linalg.matvec(tf.constant(X_NEW), w) - Y_NEW) ** 2) / 2

    def closed_form(self, strengths):
        return tf.linalg.solve(
            X.T @ X + tf.linalg.diag(tf.exp(strengths)), tf.constant(X.T @ Y)[:, tf.newaxis]
        )[:, 0]

    def expected(self):
        """Return the minimum, the gradient of the validation loss, and its Hessian."""
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as tape:
                best = self.closed_form(self.strengths)
                value = self.validation(best)
            gradient = tape.gradient(value, self.strengths)
        return best, gradient, outer.jacobian(gradient, self.strengths)


def ways(ridge):
    """Return functions that find the minimum: by operators, and by tapes on tensors."""
    w, t = ridge.w, ridge.strengths
    operator = hvp.HessianOperator(ridge.loss, [t, w])
    newton = hvp.NewtonCG(ridge.loss, w)
    return {
        "variables": lambda: hvp.argmin(ridge.loss, w, t),
        "operator": lambda: hvp.argmin(operator, w, t),
        "newton": lambda: hvp.argmin(
            ridge.loss, w, t, solver=lambda: newton.minimize(gtol=1e-12, leave_saddles=False)
        ),
        "tensors": lambda: hvp.argmin(ridge.loss, tf.zeros(6, tf.float64), t),
        "own solver": lambda: hvp.argmin(
            ridge.loss, np.zeros(6), t, solver=lambda start: ridge.closed_form(t)
        ),
    }


@pytest.mark.parametrize("way", ["variables", "operator", "newton", "tensors", "own solver"])
@pytest.mark.few(1)
def test_ridge_regression_to_second_order(way):
    ridge = Ridge()
    best, gradient, hessian = ridge.expected()
    find = ways(ridge)[way]
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as tape:
            found = find()
            value = ridge.validation(found)
        own = tape.gradient(value, ridge.strengths)
    np.testing.assert_allclose(found, best, rtol=1e-9)
    np.testing.assert_allclose(own, gradient, rtol=1e-8, atol=1e-10)
    second = outer.jacobian(own, ridge.strengths, experimental_use_pfor=False)
    np.testing.assert_allclose(second, hessian, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("way", ["variables", "operator", "tensors"])
@pytest.mark.few(1)
@pytest.mark.long
def test_again_at_other_strengths(way):
    ridge = Ridge()
    find = ways(ridge)[way]
    for _ in range(3):
        _, gradient, _ = ridge.expected()
        with tf.GradientTape() as tape:
            value = ridge.validation(find())
        own = tape.gradient(value, ridge.strengths)
        np.testing.assert_allclose(own, gradient, rtol=1e-7, atol=1e-9)
        ridge.strengths.assign_sub(own)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("variables", [False, True])
@pytest.mark.few(1)
@pytest.mark.long
def test_in_a_graph(jit_compile, variables):
    ridge = Ridge()
    _, gradient, hessian = ridge.expected()

    @tf.function(jit_compile=jit_compile)
    def derivatives():
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as tape:
                start = ridge.w if variables else tf.zeros(6, tf.float64)
                value = ridge.validation(hvp.argmin(ridge.loss, start, ridge.strengths))
            own = tape.gradient(value, ridge.strengths)
            part = own[2]
        return own, outer.gradient(part, ridge.strengths)

    own, row = derivatives()
    np.testing.assert_allclose(own, gradient, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(row, hessian[2], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.few(1)
@pytest.mark.long
def test_a_tape_around_a_function(jit_compile):
    ridge = Ridge()
    _, gradient, _ = ridge.expected()
    find = tf.function(
        lambda: hvp.argmin(ridge.loss, tf.zeros(6, tf.float64), ridge.strengths),
        jit_compile=jit_compile,
    )
    with tf.GradientTape() as tape:
        value = ridge.validation(find())
    np.testing.assert_allclose(
        tape.gradient(value, ridge.strengths), gradient, rtol=1e-8, atol=1e-10
    )


@pytest.mark.parametrize("way", ["variables", "tensors"])
@pytest.mark.few(1)
def test_forward_mode(way):
    ridge = Ridge()
    direction = tf.constant(rng.standard_normal(6))
    find = ways(ridge)[way]
    with tf.GradientTape() as tape:
        best = ridge.closed_form(ridge.strengths)
    jacobian = tape.jacobian(best, ridge.strengths)
    with tf.autodiff.ForwardAccumulator(ridge.strengths, direction) as forward:
        found = find()
    np.testing.assert_allclose(
        forward.jvp(found), tf.linalg.matvec(jacobian, direction), rtol=1e-7, atol=1e-10
    )


def test_outer_tensors():
    target = tf.constant([1.0, 2.0], tf.float64)
    w = tf.Variable(np.zeros(2))
    for start in (w, tf.zeros(2, tf.float64)):
        with tf.GradientTape() as tape:
            tape.watch(target)
            other = target**2

            def loss(v=w, other=other):
                return tf.reduce_sum((v - other) ** 4 + (v - other) ** 2)

            found = hvp.argmin(loss, start, other)
        np.testing.assert_allclose(found, [1, 4], rtol=1e-10)
        np.testing.assert_allclose(tape.gradient(found, target), [2, 4], rtol=1e-8)


class TestLogisticRegression:
    """One strength; the derivative is compared with differences of solutions."""

    labels = (rng.random(40) < 0.5).astype(float)

    def solved(self, strength):
        w = np.zeros(6)
        for _ in range(20):  # Newton's method, by hand
            p = 1 / (1 + np.exp(-X @ w))
            slope = X.T @ (p - self.labels) / 40 + np.exp(strength) * w
            hessian = X.T @ (X * (p * (1 - p))[:, None]) / 40 + np.exp(strength) * np.eye(6)
            w = w - np.linalg.solve(hessian, slope)
        return w

    @pytest.mark.parametrize("engine", ["graph", "tape"])
    @pytest.mark.parametrize("batch_size", [None, 16])
    @pytest.mark.few(1)
    def test_data_engines_and_batches(self, engine, batch_size):
        w, strength = tf.Variable(np.zeros(6)), tf.Variable(-2.0, dtype=tf.float64)

        def loss(x, y):
            z = tf.linalg.matvec(x, w)
            each = tf.nn.sigmoid_cross_entropy_with_logits(y, z)
            return tf.reduce_mean(each) + tf.exp(strength) * tf.reduce_sum(w**2) / 2

        data = (X, self.labels)
        H = hvp.HessianOperator(loss, [w, strength], data, engine=engine, batch_size=batch_size)
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(tf.sin(hvp.argmin(H, w, strength)))
            gradient = tape.gradient(value, strength)
        values = [np.sin(self.solved(-2 + step)).sum() for step in (1e-3, -1e-3)]
        assert float(gradient) == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-5)
        if batch_size is None:
            middle = np.sin(self.solved(-2.0)).sum()
            second = (values[0] - 2 * middle + values[1]) / 1e-6
            assert float(outer.gradient(gradient, strength)) == pytest.approx(second, rel=1e-4)
        else:
            with pytest.raises(hvp.SecondDerivativeError):
                float(outer.gradient(gradient, strength))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.few(1)
def test_a_keras_network_beside_differences_of_training(recompute):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(size, name, dtype="float64") for size, name in SHAPES]
    model = keras.Sequential([keras.Input((6,), dtype="float64"), *layers])
    decay = tf.Variable(-3.0, dtype=tf.float64)
    network = hvp.recompute(model) if recompute else model

    def loss(x, y):
        fit = tf.reduce_mean((network(x)[:, 0] - y) ** 2)
        return fit + tf.exp(decay) * sum(
            tf.reduce_sum(v.value**2) for v in model.trainable_variables
        )

    H = hvp.HessianOperator(loss, [model, decay], (X, Y))

    def validation(weights):
        outputs, _ = model.stateless_call(weights, [], X_NEW)
        return tf.reduce_mean((outputs[:, 0] - Y_NEW) ** 2)

    def trained(value):
        decay.assign(value)
        return float(validation(hvp.argmin(H, model, decay)))

    start = trained(-3.0)
    with tf.GradientTape() as tape:
        value = validation(hvp.argmin(H, model, decay))
    assert float(value) == pytest.approx(start, rel=1e-8)
    gradient = float(tape.gradient(value, decay))
    difference = (trained(-3.0 + 1e-4) - trained(-3.0 - 1e-4)) / 2e-4
    assert gradient == pytest.approx(difference, rel=1e-4)


class TestWhatIsRefused:
    def test_a_maximum(self):
        w, t = tf.Variable(0.0), tf.Variable(1.0)
        for start in (w, tf.constant(0.0)):

            def loss(v=w):
                return -t * v**2

            with tf.GradientTape() as tape:
                found = hvp.argmin(loss, start, t, solver=lambda start=None: start)
            with pytest.raises(hvp.HvpError, match=r"not positive definite.* in [13] products"):
                tape.gradient(found, t)

    def test_a_maximum_in_a_graph_is_nan(self):
        t = tf.Variable(1.0)

        @tf.function
        def derivative():
            with tf.GradientTape() as tape:
                found = hvp.argmin(
                    lambda v: t * v - v**2, tf.constant(0.5), t, solver=lambda start: start
                )
            return tape.gradient(found, t)

        assert np.isnan(derivative())

    def test_damping_makes_up_for_flat_directions(self):
        w, t = tf.Variable([0.0, 0.0]), tf.Variable(1.0)
        with tf.GradientTape() as tape:
            found = hvp.argmin(lambda: (w[0] - t) ** 2, w, t, damping=0.5)
        # 2 / (2 + damping)
        assert float(tape.gradient(found, t)) == pytest.approx(0.8, rel=1e-5)

    @pytest.mark.parametrize("way", ["variables", "tensors"])
    @pytest.mark.few(1)
    def test_changed_variables(self, way):
        ridge = Ridge()
        with tf.GradientTape() as tape:
            value = ridge.validation(ways(ridge)[way]())
        ridge.strengths.assign_add(tf.ones(6, tf.float64))
        with pytest.raises(hvp.StaleOperatorError, match="strengths"):
            tape.gradient(value, ridge.strengths)

    def test_what_the_loss_does_not_read(self):
        w, t = tf.Variable(0.0), tf.Variable(1.0, name="t")
        twice = 2 * t
        with pytest.raises(hvp.HvpError, match=r"'t(:0)?'.*outer"):
            hvp.argmin(lambda: w**2, w, t)
        with pytest.raises(hvp.HvpError, match=r"'t:0'.*outer.*list that tensor"):
            hvp.argmin(lambda v: (v - twice) ** 2, tf.constant(0.0), t)
        with tf.GradientTape() as tape:
            twice = 2 * t
            found = hvp.argmin(lambda v: (v - twice) ** 2, tf.constant(0.0), twice)
        assert float(tape.gradient(found, t)) == pytest.approx(2)

    @pytest.mark.long
    def test_a_search_that_fails_warns(self):
        w, t = tf.Variable(0.0), tf.Variable(1.0)
        with pytest.warns(hvp.ConvergenceWarning, match="minimum"):
            hvp.argmin(lambda: -t * w, w, t)
        with pytest.warns(hvp.ConvergenceWarning, match="converged"):
            hvp.argmin(lambda v: t * tf.exp(-v), tf.constant(0.0), t)

    def test_arguments(self):
        w, t = tf.Variable([0.0]), tf.Variable(1.0)
        loss = lambda: tf.reduce_sum((w - t) ** 2)  # noqa: E731
        with pytest.raises(hvp.HvpError, match="no outer variables"):
            hvp.argmin(loss, w, [])
        with pytest.raises(hvp.HvpError, match="rtol"):
            hvp.argmin(loss, w, t, rtol=0.0)
        with pytest.raises(hvp.HvpError, match="loss is int"):
            hvp.argmin(3, w, t)
        with pytest.raises(hvp.HvpError, match="HessianOperator"):
            hvp.argmin(hvp.HessianOperator(loss, w), w, t)
        with pytest.raises(hvp.HvpError, match="preconditioner"):
            hvp.argmin(lambda v: v**2 * t, tf.constant(1.0), t, M="nystrom")
        with pytest.raises(hvp.HvpError, match="shapes"):
            hvp.argmin(lambda v: v**2 * t, tf.constant(1.0), t, solver=lambda v: tf.zeros(3))
        with pytest.raises(hvp.HvpError, match="float32, float64"):
            hvp.argmin(loss, [tf.zeros(1), tf.zeros(1, tf.float64)], t)


def test_no_warning_where_the_start_is_the_minimum():
    ridge = Ridge()
    hvp.argmin(ridge.loss, ridge.w, ridge.strengths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = hvp.argmin(ridge.loss, ridge.w, ridge.strengths)
    np.testing.assert_allclose(again, ridge.closed_form(ridge.strengths), rtol=1e-9)


@pytest.mark.parametrize("way", ["variables", "tensors", "root"])
def test_other_variables_that_have_changed_are_noticed(way):
    w, t, factor = (tf.Variable(value, dtype=tf.float64) for value in (0.0, 3.0, 1.0))

    def loss(x=w):
        return factor * (x - t) ** 2 + x**2

    with tf.GradientTape() as tape:
        if way == "root":
            best = hvp.root(lambda: factor * (w - t) + w, w, t)
        else:
            best = hvp.argmin(loss, w if way == "variables" else tf.constant(0.0, tf.float64), t)
    factor.assign(5.0)
    with pytest.raises(hvp.StaleOperatorError, match="changed"):
        tape.gradient(best, t)


def test_what_is_named_twice_is_refused():
    w, t = tf.Variable(1.0, name="w"), tf.Variable(3.0, name="t")
    start = tf.constant(0.0)
    H = hvp.HessianOperator(lambda: (w - t) ** 2, [w, t])
    for call, said in (
        (lambda: hvp.argmin(lambda: (w - t) ** 2, w, [t, t]), "'t:0'"),
        (lambda: hvp.argmin(H, w, [t, w]), "'w:0'"),
        (lambda: hvp.root(lambda: w**2 - t, w, [t, w]), "'w:0'"),
        (lambda: hvp.argmin(lambda x: (x - start) ** 2, start, [start, start]), "tensor 1"),
    ):
        with pytest.raises(hvp.HvpError, match=f"(?i){said} is twice"):
            call()
    # A search may begin at an outer tensor.
    assert float(hvp.argmin(lambda x: (x - start) ** 2, start, start)) == 0


def test_what_has_no_influence_is_refused():
    start, t = tf.constant([1.3]), tf.Variable(2.0, name="t")
    for call, said in (
        (lambda: hvp.argmin(lambda x: t + tf.reduce_sum(tf.round(x)), start, t), "inner tensor 0"),
        (lambda: hvp.argmin(lambda x: tf.reduce_sum(x**2), start, t), "'t:0'"),
        (lambda: hvp.argmin(lambda x: None, start, t), "NoneType"),
        (lambda: hvp.argmin(lambda x: x * t, start, t), r"shape \(1,\)"),
        (lambda: hvp.root(lambda x: None, start, t), "returns None"),
        (lambda: hvp.root(lambda x: x - t, start, t, solver=lambda x: None), "None"),
        (lambda: hvp.root(lambda x: x - t, start, t, solver=3), "solver is 3"),
    ):
        with pytest.raises(hvp.HvpError, match=said):
            call()


def test_damping_is_for_derivatives_alone():
    t = tf.Variable(3.0, dtype=tf.float64)
    with tf.GradientTape() as tape:
        best = hvp.argmin(
            lambda x: 1e-4 * (x - 3 * t) ** 2, tf.constant(10.0, tf.float64), t, damping=1.0
        )
    assert float(best) == pytest.approx(9.0)
    assert float(tape.gradient(best, t)) == pytest.approx(6e-4 / (2e-4 + 1.0))


@pytest.mark.parametrize("are_variables", [True, False])
def test_forward_accumulators_within_and_around_tapes(are_variables):
    """`w = exp(-t)`. What an accumulator around a tape asks for is not known, and no number."""
    t, w = tf.Variable(0.3, dtype=tf.float64), tf.Variable(0.0, dtype=tf.float64)
    one = tf.constant(1.0, tf.float64)

    def square():
        if are_variables:
            return hvp.argmin(lambda: tf.exp(t) * w**2 / 2 - w, w, t) ** 2
        start = tf.constant(0.0, tf.float64)
        return hvp.argmin(lambda w: tf.exp(t) * w**2 / 2 - w, start, t) ** 2

    with tf.GradientTape() as tape:
        with tf.autodiff.ForwardAccumulator(t, one) as accumulator:
            value = square()
        slope = accumulator.jvp(value)
    assert float(slope) == pytest.approx(-2 * np.exp(-0.6))
    assert float(tape.gradient(slope, t)) == pytest.approx(4 * np.exp(-0.6))
    with tf.autodiff.ForwardAccumulator(t, one) as accumulator:
        with tf.GradientTape() as tape:
            value = square()
        slope = tape.gradient(value, t)
    assert float(slope) == pytest.approx(-2 * np.exp(-0.6))
    assert np.isnan(accumulator.jvp(slope))


def test_jacobians_by_vectorization_or_not():
    """`w**3 = t` has the derivative `1 / (3 w**2)`."""
    t, v = tf.Variable(2.0), tf.Variable([1.0, 1.0])
    for shape in ((), (2,), (1, 1)):
        with tf.GradientTape() as tape:
            found = hvp.root(lambda w: w**3 - t, tf.ones(shape), t)
        expected = np.full(shape, 2 ** (-2 / 3) / 3)
        np.testing.assert_allclose(tape.jacobian(found, t), expected, rtol=1e-4)
    scale = tf.Variable(1.0)  # is read, and is no outer variable
    with tf.GradientTape() as tape:
        found = hvp.root(lambda w: w**3 - t * scale, tf.ones(2), t)
    scale.assign(4.0)
    with pytest.raises(hvp.StaleOperatorError, match="have changed"):
        tape.jacobian(found, t)
    with tf.GradientTape(persistent=True) as tape:
        found = hvp.argmin(lambda: tf.reduce_sum((v - t) ** 2), v, t)
    with pytest.raises(hvp.GraphModeError, match="experimental_use_pfor"):
        tape.jacobian(found, t)
    np.testing.assert_allclose(tape.jacobian(found, t, experimental_use_pfor=False), [1, 1])


@pytest.mark.filterwarnings("ignore::hvp.ConvergenceWarning")
@pytest.mark.parametrize("loss", [lambda w, t: -w * t, lambda w, t: (w - t) ** 2 * [1.0, 0.0]])
def test_a_derivative_without_curvature_is_refused(loss):
    t, w = tf.Variable([3.0, 1.0]), tf.Variable([1.0, 1.0])
    with tf.GradientTape() as tape:
        found = hvp.argmin(lambda: tf.reduce_sum(loss(w, t)), w, t)
    with pytest.raises(hvp.HvpError, match="negative curvature or none"):
        tape.gradient(found, t)
