"""When the loss is evaluated, what is kept, when it is out of date, what is left as it was."""

import gc
import logging
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import cnn, mlp, random, relative_error


def counted(loss, runs):
    """A loss that notes each *execution* of its operations, traced or not."""

    def counting(*data):
        tick = tf.numpy_function(lambda: np.float64(runs.append(1) or 0), [], tf.float64)
        value = loss(*data)
        return value + tf.cast(tf.ensure_shape(tick, []), value.dtype)

    return counting


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
@pytest.mark.few(1)
def test_fifty_products_evaluate_the_gradient_once(wrap, engine):
    runs = []
    problem = mlp("float64")
    loss = wrap(counted(problem.loss, runs))
    with hvp.HessianOperator(loss, problem.variables, problem.data, engine=engine) as H:
        assert H.stats.engine == engine
        for seed in range(45):
            H @ random(seed, H.shape[0], dtype="float64")
        H @ random(0, H.shape[0], 5, dtype="float64")
        H.gradient, H.value  # noqa: B018
        H.damped(1.0) @ np.ones(H.shape[0])
        assert H.stats.gradient_evaluations == 1
        assert H.stats.products == 51
        assert H.stats.traces == 1
        assert len(runs) == 1
        H.refresh()
        assert H.stats.gradient_evaluations == 2
        assert H.stats.traces == 1
        assert len(runs) == 2


def test_the_graph_engine_runs_the_losss_python_once():
    calls = []
    problem = mlp("float32")

    def loss(x, y):
        calls.append(1)
        return problem.loss(x, y)

    with hvp.HessianOperator(loss, problem.variables, problem.data) as H:
        v = np.ones(H.shape[0])
        for scale in range(50):
            problem.variables.trainable_variables[0].assign_add(tf.fill((6, 5), 0.01 * scale))
            H.refresh()
            H @ v
            H @ np.stack([v, -v], axis=1)
            H @ np.stack([v] * 3, axis=1)
        assert H.stats.engine == "graph"
        assert H.stats.traces == 1
        assert H.stats.gradient_evaluations == 51
    assert len(calls) == 1


def test_a_loss_that_cannot_be_split_falls_to_the_tape_and_says_why(caplog):
    w = tf.Variable([1.0, 2.0])

    @tf.custom_gradient
    def slope(a, upstream):
        def gradient(v):
            v = tf.numpy_function(lambda v: v, [v], v.dtype)  # Python that runs for each product
            return 6.0 * a * upstream * v, 3.0 * a**2 * v

        return 3.0 * a**2 * upstream, gradient

    @tf.custom_gradient
    def cubed(a):
        return a**3, lambda upstream: slope(a, upstream)

    def loss():
        return tf.reduce_sum(cubed(w))

    with caplog.at_level(logging.WARNING, "hvp"), hvp.HessianOperator(loss, w) as H:
        np.testing.assert_allclose(H @ np.ones(2), [6, 12])
        assert H.stats.engine == "tape"
        assert "effects" in H.stats.note
        assert H.stats.note in caplog.text


def test_engines_are_named():
    w = tf.Variable([1.0])
    with pytest.raises(hvp.HvpError, match="engine is 'magic'"):
        hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w, engine="magic")


def test_one_dropout_mask_for_one_linearization():
    model = keras.Sequential(
        [
            keras.layers.Input((6,), dtype="float64"),
            keras.layers.Dense(20, "tanh", dtype="float64"),
            keras.layers.Dropout(0.5, dtype="float64"),
            keras.layers.Dense(1, dtype="float64"),
        ]
    )
    x = random(0, 9, 6, dtype="float64")

    def loss(x):
        return tf.reduce_mean(tf.nn.dropout(model(x, training=True), 0.3) ** 2)

    with hvp.HessianOperator(loss, model, (x,)) as H:
        v = random(1, H.shape[0], dtype="float64")
        np.testing.assert_array_equal(H @ v, H @ v)
        assert relative_error(H.to_dense() @ v, H @ v) <= 1e-12


def test_value_and_gradient_are_those_of_the_loss():
    problem = mlp("float64")
    with tf.GradientTape() as tape:
        value = problem.bound()
    gradient = tape.gradient(value, problem.tensorflow_variables())
    with hvp.HessianOperator(problem.loss, problem.variables, problem.data) as H:
        assert isinstance(H.value, float)
        assert H.value == float(value)
        assert isinstance(H.gradient, np.ndarray)
        np.testing.assert_array_equal(H.gradient, H.flatten(gradient))
        H.gradient[:] = 0  # a copy
        assert H.gradient.any()


def test_refresh_moves_to_the_new_point():
    w = tf.Variable([1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w) as H:
        twice = H.damped(1.0)
        w.assign([3.0, 1.0])
        H.refresh()
        np.testing.assert_allclose(H @ np.ones(2), [9, 1], rtol=1e-6)
        np.testing.assert_allclose(twice @ np.ones(2), [10, 2], rtol=1e-6)
        np.testing.assert_allclose(H.value, 82 / 12, rtol=1e-6)


CHANGES = {
    "assign": lambda w: w.assign([[1.0, 2.0], [3.0, 5.0]]),
    "assign_add": lambda w: w.assign_add(tf.fill((2, 2), 1e-6)),
    "one bit of one entry": lambda w: w[1, 1].assign(np.nextafter(np.float32(4), np.float32(5))),
    "sign of zero": lambda w: w[0, 0].assign(np.float32(-0.0)),
    "swapped": lambda w: w.assign(tf.reverse(w, [0])),
    "negated": lambda w: w.assign(-w),
    "scatter": lambda w: w.scatter_nd_update([[1, 0]], [7.0]),
    "scattered rows": lambda w: w.scatter_update(
        tf.IndexedSlices(tf.fill((1, 2), 9.0), tf.constant([1]))
    ),
    "compiled": lambda w: tf.function(lambda: w.assign(w * 3), jit_compile=True)(),
    "sparse optimizer": lambda w: keras.optimizers.Adagrad(0.1).apply(
        [tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([2, 2]))], [w]
    ),
    "in a graph": lambda w: tf.function(lambda: w.assign_sub(tf.ones((2, 2))))(),
    "optimizer": lambda w: keras.optimizers.SGD(0.1).apply([tf.ones((2, 2))], [w]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.few(8)
def test_a_changed_variable_is_noticed_and_named(name, trainable):
    """Also of a frozen variable, which no tape watches."""
    if "optimizer" in name and not trainable:
        pytest.skip("optimizers update trainable variables")
    w = tf.Variable(random(0, 2, 2), name="ours")
    other = tf.Variable([[0.0, 2.0], [3.0, 4.0]], name="changed", trainable=trainable)

    with hvp.HessianOperator(lambda: tf.reduce_sum(w**2 * other), [w]) as H:
        v = np.ones(4)
        before = H @ v
        CHANGES[name](other)
        for use in (lambda: H @ v, lambda: H.value, lambda: H.gradient, H.to_dense):
            with pytest.raises(hvp.StaleOperatorError, match=r"'changed'.*refresh\(\)"):
                use()
        H.refresh()
        after = H @ v
        assert (name == "sign of zero") == np.array_equal(before, after)
        np.testing.assert_allclose(after, 2 * other.numpy().reshape(-1), rtol=1e-6)
        # Not for ever: a variable that was scattered into copies on every read from then on.
        H @ v


SHAPES = {
    "more rows": ([None, 2], [[1.0, 1.0]], np.ones((5, 2))),
    "fewer entries": ([None], [2.0, 2.0], [2.0]),
    "no axis": (None, [2.0, 2.0], 2.0),
    "another axis": (None, [[3.0, 2.0]], [[[3.0], [2.0]]]),
}


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.few(3)
def test_a_changed_shape_is_a_change_although_the_values_are_the_same(name, engine):
    shape, old, new = SHAPES[name]
    w = tf.Variable([1.0, 2.0])
    other = tf.Variable(np.float32(old), shape=tf.TensorShape(shape), name="changed")

    def loss():
        return tf.reduce_sum(other) * tf.reduce_sum(w**2)

    with hvp.HessianOperator(loss, w, engine=engine) as H:
        multiply = tf.function(H.product)
        np.testing.assert_allclose(multiply(tf.ones(2)), H @ np.ones(2))
        other.assign(np.float32(new))
        for use in (lambda: H @ np.ones(2), lambda: H.value):
            with pytest.raises(hvp.StaleOperatorError, match="'changed'"):
                use()
        with pytest.raises(tf.errors.OpError, match="'changed'"):
            multiply(tf.ones(2))
        H.refresh()
        for product in (H @ np.ones(2), multiply(tf.ones(2))):
            np.testing.assert_allclose(product, 2 * np.sum(new) * np.ones(2))


def test_load_weights_is_noticed(tmp_path):
    problem = cnn("float32")
    model = problem.variables
    model.save_weights(tmp_path / "old.weights.h5")
    statistics = next(v for v in model.variables if "moving_mean" in v.path)
    statistics.assign(statistics + 1.0)
    with hvp.HessianOperator(problem.loss, model, problem.data) as H:
        before = H @ np.ones(H.shape[0])
        model.load_weights(tmp_path / "old.weights.h5")
        with pytest.raises(hvp.StaleOperatorError, match="moving_mean"):
            H @ np.ones(H.shape[0])
        H.refresh()
        assert relative_error(H @ np.ones(H.shape[0]), before) > 1e-3


def test_unchanged_values_are_not_stale():
    w, unread = tf.Variable([1.0, np.float32(2)]), tf.Variable(1.0)
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**3), w) as H:
        w.assign(tf.identity(w))
        unread.assign(2.0)
        H @ np.ones(2)


@pytest.mark.parametrize("on_stale", ["refresh", "ignore"])
def test_other_answers_to_staleness(on_stale):
    w = tf.Variable([1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w, on_stale=on_stale) as H:
        w.assign([3.0, 1.0])
        want = {"refresh": [9, 1], "ignore": [1, 4]}[on_stale]
        np.testing.assert_allclose(H @ np.ones(2), want, rtol=1e-6)
        assert H.stats.gradient_evaluations == {"refresh": 2, "ignore": 1}[on_stale]


def test_on_stale_is_checked():
    w = tf.Variable([1.0])
    with pytest.raises(hvp.HvpError, match="on_stale is 'explode'"):
        hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w, on_stale="explode")


def test_no_state_of_the_model_changes():
    """Moving averages and dropout seeds are as before; so is a random generator's state."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(6, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=1),
            layers.Dense(2),
        ]
    )
    generator = tf.random.Generator.from_seed(3)
    x = random(0, 8, 4)

    def loss(x):
        noise = generator.normal([8, 2])
        return tf.reduce_mean((model(x, training=True) + noise) ** 2)

    before = [v.numpy() for v in (*model.variables, generator.state)]
    with hvp.HessianOperator(loss, model, (x,)) as H:
        first = H @ np.ones(H.shape[0])
        H.refresh()
        # The same seeds, so the same mask and the same numbers.
        np.testing.assert_array_equal(H @ np.ones(H.shape[0]), first)
        np.testing.assert_allclose(H.to_dense(), H.to_dense().T, atol=1e-5)
    for old, variable in zip(before, (*model.variables, generator.state)):
        np.testing.assert_array_equal(old, variable.numpy())


@pytest.mark.parametrize("activation", ["tanh", "igamma"])
@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_the_losses_a_model_holds_are_as_before(activation, engine):
    """Also when the operator is refused."""

    def igamma(x):
        return tf.math.igamma(tf.exp(x), 0.7)

    function = igamma if activation == "igamma" else activation
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(3, function, activity_regularizer="l2")]
    )
    x = random(0, 8, 4)
    model(x[:2])
    before = [float(value) for value in model.losses]

    def loss(x):
        return tf.reduce_mean(model(x) ** 2) + tf.add_n(model.losses)

    try:
        with hvp.HessianOperator(loss, model, (x,), engine=engine) as H:
            H @ np.ones(H.shape[0])
            H.refresh()
    except hvp.SecondDerivativeError:
        assert activation == "igamma"
    assert len(before) == 1
    assert [float(value) for value in model.losses] == before


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_weights_that_are_lost_are_named(options):
    w, lost = tf.Variable([1.0, 2.0]), tf.Variable([3.0, np.nan], name="lost")

    def loss(x):
        return tf.reduce_mean(x * tf.reduce_sum(w**2 * lost))

    with pytest.raises(hvp.NonFiniteError, match=r"not finite: 'lost:0'"):
        hvp.HessianOperator(loss, [w, lost], (np.ones(4, np.float32),), **options)


def test_state_is_restored_when_the_loss_raises():
    w, counter = tf.Variable([1.0]), tf.Variable(0)

    def loss():
        counter.assign_add(1)
        return tf.reduce_sum(tf.sqrt(w - 2))

    with pytest.raises(hvp.NonFiniteError, match="loss is nan"):
        hvp.HessianOperator(loss, w)
    assert counter == 0
    assert w == 1


def test_a_counter_in_the_loss_does_not_make_it_stale():
    w, counter = tf.Variable([1.0]), tf.Variable(0)

    def loss():
        return tf.reduce_sum(w**2) * (1 + 0 * tf.cast(counter.assign_add(1), tf.float32))

    with hvp.HessianOperator(loss, w) as H:
        loss()
        np.testing.assert_array_equal(H @ np.ones(1), [2])


def test_variables_that_the_loss_updates_are_watched_all_the_same():
    w, scale = tf.Variable([1.0, 2.0]), tf.Variable(1.0)

    def loss():
        w.assign(tf.clip_by_value(w, -9, 9))
        scale.assign(0.9 * scale + 0.1)
        return tf.reduce_sum(w**3) * scale

    with hvp.HessianOperator(loss, w) as H:
        np.testing.assert_allclose(H @ np.ones(2), [6, 12], rtol=1e-6)
        scale.assign(3.0)
        with pytest.raises(hvp.StaleOperatorError):
            H @ np.ones(2)
        H.refresh()
        w.assign([3.0, 4.0])
        with pytest.raises(hvp.StaleOperatorError):
            H @ np.ones(2)


DECIDING = {
    "cond": lambda w, u: tf.cond(u > 0, lambda: tf.reduce_sum(w**3), lambda: tf.reduce_sum(w**2)),
    "while_loop": lambda w, u: tf.while_loop(
        lambda i, a: i < u, lambda i, a: (i + 1, a + tf.reduce_sum(w**2)), (0.0, 0.0)
    )[1],
    "switch_case": lambda w, u: tf.switch_case(
        tf.cast(u > 0, tf.int32), [lambda: tf.reduce_sum(w**3), lambda: tf.reduce_sum(w**2)]
    ),
    "in a function": lambda w, u: tf.function(lambda: DECIDING["cond"](w, u))(),
}


@pytest.mark.parametrize("name", DECIDING)
@pytest.mark.few(1)
def test_a_variable_that_only_decides_is_watched(name):
    w, u = tf.Variable([1.0, 2.0]), tf.Variable(2.0, name="decides")
    with hvp.HessianOperator(lambda: DECIDING[name](w, u), [w]) as H:
        before = H @ np.ones(2)
        u.assign(-1.0)
        with pytest.raises(hvp.StaleOperatorError, match="decides"):
            H @ np.ones(2)
        if name != "while_loop":  # which then does not depend on w
            H.refresh()
            assert not np.allclose(H @ np.ones(2), before)


def test_a_loss_whose_shape_is_known_only_when_it_runs():
    w = tf.Variable([1.0, 2.0])
    factor = lambda: tf.numpy_function(lambda: np.float32(2), [], tf.float32)  # noqa: E731
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**3) * factor(), w) as H:
        np.testing.assert_allclose(H @ np.ones(2), [12, 24], rtol=1e-6)


def test_close_and_use_after_it():
    w = tf.Variable([1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w) as H:
        damped = H.damped(1.0)
        assert H.stats.residual_bytes > 0
    assert H.stats.residual_bytes == 0
    assert H.shape == (2, 2)
    uses = (
        lambda: H @ np.ones(2),
        lambda: damped @ np.ones(2),
        lambda: H.product(tf.ones(2)),
        lambda: H.value,
        lambda: H.gradient,
    )
    for use in uses:
        with pytest.raises(hvp.ClosedOperatorError, match="closed"):
            use()
    H.close()
    H.refresh()
    np.testing.assert_array_equal(H @ np.ones(2), [2, 2])


def test_a_failed_refresh_leaves_nothing_half_made():
    w = tf.Variable([4.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(tf.sqrt(w)), w) as H:
        w.assign([-1.0])
        with pytest.raises(hvp.NonFiniteError):
            H.refresh()
        with pytest.raises(hvp.ClosedOperatorError, match="last refresh failed"):
            H @ np.ones(1)
        w.assign([4.0])
        H.refresh()
        np.testing.assert_allclose(H @ np.ones(1), [-1 / 32])


def test_dropping_the_operator_frees_it_without_the_garbage_collector():
    w = tf.Variable([1.0])
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w)
    H @ np.ones(1)
    engine = weakref.ref(inside.held(H))
    gc.collect()
    gc.disable()
    try:
        del H
        assert engine() is None
    finally:
        gc.enable()


def scalar_of(w):
    return tf.reduce_sum(w**2)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda w: w**2, hvp.InvalidLossError, r"shape \(2,\).*reduce_mean"),
        (lambda w: tf.cast(scalar_of(w), tf.int32), hvp.InvalidLossError, "int32"),
        (lambda w: tf.cast(scalar_of(w), tf.complex64), hvp.InvalidLossError, "complex64"),
        (lambda w: 1.0, hvp.InvalidLossError, "float"),
        (lambda w: None, hvp.InvalidLossError, "NoneType"),
        (lambda w: scalar_of(w).numpy(), hvp.InvalidLossError, "float"),
        (lambda w: scalar_of(w) / 0, hvp.NonFiniteError, "loss is inf"),
        (lambda w: scalar_of(w) * np.nan, hvp.NonFiniteError, "loss is nan"),
        (lambda w: tf.norm(w - w), hvp.NonFiniteError, "gradient is not finite"),
        (lambda w: tf.constant(1.0), hvp.InvalidVariablesError, "none of the variables"),
        (lambda w: tf.reduce_sum(w.read_value()) * 0 + 1, None, None),
    ],
)
def test_losses_that_are_refused(loss, error, message):
    w = tf.Variable([1.0, 2.0])
    if error is None:
        hvp.HessianOperator(lambda: loss(w), w).close()
        return
    with pytest.raises(error, match=message):
        hvp.HessianOperator(lambda: loss(w), w)


def test_the_losss_own_errors_come_through():
    w = tf.Variable([1.0])

    def loss():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hvp.HessianOperator(loss, w)
    with pytest.raises(hvp.InvalidLossError, match="cannot be called"):
        hvp.HessianOperator(tf.constant(1.0), w)


def test_an_operator_is_not_built_in_a_graph():
    w = tf.Variable([1.0])

    def build():
        hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w)

    with pytest.raises(hvp.GraphModeError, match=r"outside the tf\.function"):
        tf.function(build, autograph=False)()
    with pytest.raises(Exception, match=r"outside the tf\.function"):
        tf.function(build)()  # AutoGraph makes an error of its own out of it


def test_an_untraceable_loss_is_served_and_said(caplog):
    w = tf.Variable([1.0, 2.0])
    with caplog.at_level(logging.WARNING, "hvp"):
        H = hvp.HessianOperator(lambda: tf.reduce_sum(w**3) * float(w.numpy()[0]), w)
    np.testing.assert_allclose(H @ np.ones(2), [6, 12])
    assert "could not be traced" in H.stats.note
    assert H.stats.note in caplog.text
    assert len(caplog.records) == 1
    assert H.stats.residual_bytes is None
    w.assign([2.0, 2.0])
    with pytest.raises(hvp.StaleOperatorError):
        H @ np.ones(2)


def test_control_flow_in_python_on_tensors():
    w = tf.Variable([1.0, 2.0])

    def loss():
        total = tf.reduce_sum(w**3)
        if total > 3:
            total = total * 2
        return total

    with hvp.HessianOperator(loss, w) as H:
        np.testing.assert_allclose(H @ np.ones(2), [12, 24])
        assert "traced" not in H.stats.note


def test_models_and_keras_losses_are_not_losses():
    problem = mlp("float32")
    for loss, message in (
        (problem.variables, "model Sequential itself"),
        (keras.losses.MeanSquaredError(), "never calls the model"),
        ("mse", "the name 'mse'"),
        (0.5, "cannot be called"),
    ):
        with pytest.raises(hvp.InvalidLossError, match=message):
            hvp.HessianOperator(loss, problem.variables, problem.data)


def test_data_of_another_precision_are_named_when_the_loss_fails():
    problem = mlp("float32")
    x, y = problem.data

    def loss(x, y):
        return tf.reduce_mean((problem.variables(x) - y) ** 2)

    target = np.ones((7, 3))
    with pytest.raises(hvp.InvalidDataError, match=r"data\[1\] is float64.*astype\('float32'\)"):
        hvp.HessianOperator(loss, problem.variables, (x, target))
    hvp.HessianOperator(loss, problem.variables, (x.astype("float64"), target.astype("f4"))).close()
    with pytest.raises(hvp.InvalidDataError, match="called with data of 2 elements"):
        hvp.HessianOperator(lambda: loss(x, y), problem.variables, (x, y))


def test_random_draws_are_noted():
    w = tf.Variable([1.0, 2.0])
    noisy = hvp.HessianOperator(lambda: tf.reduce_sum(tf.nn.dropout(w, 0.5) ** 2), w)
    assert "random" in noisy.stats.note
    assert hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w).stats.note == ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones((3, 2)), r"ndarray.*\(x,\)"),
        ([np.ones((3, 2))], r"list of ndarray.*\(x, y\)"),
        (tf.data.Dataset.from_tensors(1.0), "scalar"),
        ((), "no elements"),
        ({}, "no elements"),
        ((np.ones((3, 2)), np.ones(4)), r"data\[0\] has 3, data\[1\] has 4"),
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, r"data\['y'\] has 4"),
        ((np.ones((0, 2)),), "no examples"),
        ((np.float32(3),), "scalar"),
        ((tf.Variable([1.0]),), r"data\[0\] is a variable"),
        ((object(),), r"data\[0\] is object"),
        ((np.ones(3), [0, 1, 2]), r"data\[1\] is a list of int.*np\.asarray"),
        ((np.ones(2), [[0, 1], [2]]), r"data\[1\] is a list of list"),
        (3, "int"),
    ],
)
def test_data_that_are_refused(data, message):
    w = tf.Variable([1.0, 2.0])
    with pytest.raises(hvp.InvalidDataError, match=message):
        hvp.HessianOperator(lambda *x: tf.reduce_sum(w**2), w, data)


class TestALossThatAssignsWhatItIsDifferentiatedBy:
    """The Hessian would be that at other weights than the user's."""

    @pytest.mark.parametrize("engine", ["graph", "tape"])
    @pytest.mark.parametrize("traceable", [True, False])
    def test_it_is_refused(self, engine, traceable):
        w, other = tf.Variable([1.0, 2.0]), tf.Variable(3.0)

        def loss():
            w.assign(w / tf.norm(w))
            scale = 1.0 if traceable else float(w.numpy()[0] * 0 + 1)
            return scale * other * tf.reduce_sum(w**4)

        with pytest.raises(hvp.InvalidLossError, match=r"assigns variables .*'Variable"):
            hvp.HessianOperator(loss, w, engine=engine)
        np.testing.assert_array_equal(w, [1, 2])
        if not traceable:
            return
        # The remedy: differentiated by others, it is put back as any state.
        with hvp.HessianOperator(lambda: loss() * other, other, engine=engine) as H:
            np.testing.assert_allclose(H @ np.ones(1), 2 * (1 + 16) / 25, rtol=1e-6)
        np.testing.assert_array_equal(w, [1, 2])

    def test_spectral_normalization(self):
        dense = keras.layers.SpectralNormalization(keras.layers.Dense(2))
        model = keras.Sequential([keras.Input((3,)), dense])
        x = random(0, 4, 3)

        def loss(x, training):
            return tf.reduce_mean(model(x, training=training) ** 2)

        try:
            model(x, training=True)
        except ValueError as error:
            pytest.skip(f"Keras {keras.__version__} cannot call this layer: {error}")
        for recompute in (False, True):
            with pytest.raises(hvp.HvpError, match="kernel"):
                hvp.HessianOperator(
                    lambda x: loss(x, True), model, (x,), batch_size=2, recompute=recompute
                )
        with hvp.HessianOperator(lambda x: loss(x, False), model, (x,)) as H:
            np.testing.assert_allclose(H.to_dense(), H.to_dense().T, atol=1e-6)
