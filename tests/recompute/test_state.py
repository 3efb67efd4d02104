"""What is random repeats, what has a state changes once, and what cannot be repeated is refused."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._derivatives.exact import exact_functions
from tests.cases import Problem, crossed, dense_hessian, long, random, relative_error
from tests.recompute.derivatives import MODES, assert_same, derivatives

layers = keras.layers
X = tf.constant(random(0, 6, 5, dtype="float64"))


def draws_by_ratio(f):
    """Of `x * r` with random `r`: `y / x`, and the derivatives of `sum(y * y)`, which know `r`."""

    def run(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = f(x)
                value = tf.reduce_sum(y * y)
            first = inner.gradient(value, x)
            total = tf.reduce_sum(first)
        return y / x, first, outer.gradient(total, x)

    return run


def stateful(x):
    return x * tf.random.normal(tf.shape(x), dtype=x.dtype)


def uniform(x):
    return x * (1 + tf.random.uniform(tf.shape(x), dtype=x.dtype))


def truncated(x):
    return x * tf.random.truncated_normal(x.shape, dtype=x.dtype)


def integers(x):
    return x * tf.cast(tf.random.uniform(x.shape, 1, 9, tf.int32), x.dtype)


def gamma(x):
    return x * tf.stop_gradient(tf.random.gamma(x.shape, 2.0, dtype=x.dtype))


def generator(x):
    return x * GENERATOR.normal(x.shape, dtype=x.dtype)


def dropout(x):
    return tf.nn.dropout(x, 0.5)


GENERATOR = tf.random.Generator.from_seed(1)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("f", [stateful, uniform, truncated, integers, gamma, generator, dropout])
def test_draws_repeat(f, mode):
    run = MODES[mode](draws_by_ratio(hvp.recompute(f)))
    r, first, second = run(X)
    assert_same([first, second], [2 * r * r * X, 2 * r * r], 1e-12)
    again, _, _ = run(X)
    assert not np.array_equal(r, again)  # another call draws again


def test_a_seed_decides_what_is_drawn():
    g = hvp.recompute(stateful)
    drawn = []
    for _ in range(2):
        tf.random.set_seed(5)
        drawn.append(tf.function(lambda x: hvp.recompute(stateful)(x))(X))
    assert np.array_equal(*drawn)
    assert g(X).shape == X.shape


def sequential(*parts):
    model = keras.Sequential([layers.Input((5,), dtype="float64"), *parts])
    for index, weight in enumerate(model.trainable_variables):
        weight.assign(random(index, *weight.shape, dtype="float64", scale=0.5))
    return model


def with_dropout():
    return sequential(
        layers.Dense(4, "tanh", dtype="float64"),
        layers.Dropout(0.4, seed=1, dtype="float64"),
        layers.Dropout(0.1, seed=2, dtype="float64"),
        layers.Dense(3, "softplus", dtype="float64"),
    )


def with_batch_normalization():
    return sequential(
        layers.Dense(4, "tanh", dtype="float64"),
        layers.BatchNormalization(dtype="float64"),
        layers.Dense(3, "softplus", dtype="float64"),
    )


@pytest.mark.parametrize(
    ("make", "training", "mode"),
    crossed([with_dropout, with_batch_normalization], [True, True, False], MODES),
)
@pytest.mark.few(1)
def test_keras_state_changes_once_and_draws_are_the_same(make, training, mode):
    found = []
    for wrap in (lambda f: f, hvp.recompute):
        model = make()
        f = wrap(model)
        weights = [v.value for v in model.trainable_variables]
        with exact_functions():  # without, TensorFlow's own second derivative is wrong
            made = MODES[mode](
                lambda f=f, w=weights: derivatives(lambda: f(X, training=training), w)
            )
            found.append([*made(), *(tf.cast(v, "float64") for v in model.variables)])
    assert_same(found[1], found[0], 1e-9)


def test_batch_normalization_against_differences():
    """In training, TensorFlow's own nested tapes give another, wrong Hessian."""
    model = with_batch_normalization()
    g = hvp.recompute(model)

    def loss():
        return tf.reduce_mean(g(X, training=True) ** 2)

    problem = Problem(loss, model)
    want = dense_hessian(problem)
    assert relative_error(hvp.HessianOperator(loss, model).to_dense(), want) < 1e-9
    w = problem.tensorflow_variables()[0]
    n = int(tf.size(w))
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as inner:
            value = loss()
        first = tf.reshape(inner.gradient(value, w), [-1])
    block = tf.reshape(outer.jacobian(first, w, experimental_use_pfor=False), [n, n])
    assert relative_error(block, want[:n, :n]) < 1e-9


@pytest.mark.parametrize("mode", [long("eager"), "graph"])
@pytest.mark.long
def test_recurrent_layers_with_dropout_and_masks(mode):
    def make():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                layers.Embedding(7, 4, mask_zero=True),
                layers.SimpleRNN(3, dropout=0.3, recurrent_dropout=0.2, seed=4),
            ]
        )
        model(tf.constant([[1, 2, 0]]))
        return model

    tokens = tf.constant([[1, 2, 0], [3, 4, 5]])
    found = []
    for wrap in (lambda f: f, hvp.recompute):
        model = make()
        f, weights = wrap(model), [v.value for v in model.trainable_variables]
        run = MODES[mode](
            lambda f=f, w=weights: derivatives(lambda: f(tokens, training=True), w, order=2)
        )
        found.append([*run(), *(tf.cast(v, "float32") for v in model.variables)])
    assert_same(found[1], found[0], 1e-4)


def test_layers_hear_of_training_from_the_layer_around_them():
    class Outer(keras.layers.Layer):
        def __init__(self, wrap):
            super().__init__()
            self.inner = with_dropout()
            self.run = wrap(self.inner)

        def call(self, x):  # without the argument `training`
            return self.run(x)

    for training in (True, False):
        found = []
        for wrap in (lambda f: f, hvp.recompute):
            layer = Outer(wrap)
            weights = [v.value for v in layer.trainable_variables]
            found.append(
                derivatives(functools.partial(layer, X, training=training), weights, order=2)
            )
        assert_same(found[1], found[0], 1e-11)


def test_mixed_precision():
    def make():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(2)])
        outer = keras.Sequential([model], name="outer")
        return outer

    found = []
    with_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        for wrap in (lambda f: f, hvp.recompute):
            model = make()
            model(tf.cast(X, "float32"))
            f, weights = wrap(model), [v.value for v in model.trainable_variables]
            found.append(derivatives(lambda f=f: f(tf.cast(X, "float32")), weights, order=2))
    finally:
        keras.config.set_dtype_policy(with_policy)
    assert_same(found[1], found[0], 1e-2)


def test_stateless_call_of_keras():
    dense = layers.Dense(3)
    dense.build((None, 5))

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense, self.run = dense, hvp.recompute(dense)
            self.built = True

        def call(self, x):
            return self.run(x)

    layer, x = Outer(), tf.ones((1, 5))
    layer(x)
    given = [tf.ones_like(v.value) for v in layer.trainable_variables]
    result, _ = layer.stateless_call(given, [], x)
    assert result.numpy().tolist() == [[6.0, 6.0, 6.0]]


def test_an_update_in_the_function_happens_once():
    count, w = tf.Variable(0.0, trainable=False), tf.Variable([1.0, 2.0])

    @hvp.recompute
    def f(x):
        count.assign_add(1.0)
        return x * w**2 * count

    for calls, mode in enumerate(("eager", "graph"), start=1):
        found = MODES[mode](lambda: derivatives(lambda: f(tf.ones(2)), [w]))()
        assert count.numpy() == calls
        want = derivatives(lambda c=float(calls): w**2 * c, [w])
        assert_same(found, want, 1e-6)


class TestRefused:
    """Each with an error that names what is wrong."""

    def gradient(self, f, x=X):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvp.recompute(f)(x)
        return tape.gradient(y, x)

    @pytest.mark.parametrize(
        ("returned", "name"),
        [(None, "NoneType"), (1.0, "float"), ({"a": np.ones(2)}, "ndarray"), ([X, "b"], "str")],
    )
    def test_what_is_no_tensor(self, returned, name):
        with pytest.raises(hvp.RecomputeError, match=f"returned {name}"):
            hvp.recompute(lambda: returned)()

    def test_in_a_tf_function_the_error_is_the_same(self):
        with pytest.raises(hvp.RecomputeError, match="returned NoneType"):
            tf.function(lambda x: hvp.recompute(lambda y: None)(x))(X)

    def test_no_function(self):
        with pytest.raises(hvp.RecomputeError, match="is int, which cannot be called"):
            hvp.recompute(3)

    def test_a_trainable_variable_that_is_changed(self):
        w = tf.Variable(1.0, name="weight")

        def f(x):
            w.assign_add(1.0)
            return tf.cast(w, x.dtype) * x

        with pytest.raises(hvp.RecomputeError, match="'weight'"):
            self.gradient(f)

    def test_a_loop_with_draws(self):
        with pytest.raises(hvp.RecomputeError, match="loop or branch with a state"):
            self.gradient(
                lambda x: tf.map_fn(lambda r: r * tf.random.normal([5], dtype=r.dtype), x)
            )

    def test_python_that_changes(self):
        rng = np.random.default_rng(0)
        with pytest.raises(hvp.RecomputeError, match="did something else"):
            self.gradient(lambda x: x * rng.standard_normal(5))

    def test_a_flag_that_changes(self):
        flags = iter([True, False])
        with pytest.raises(hvp.RecomputeError, match=r"Sin .* is now Cos"):
            self.gradient(lambda x: tf.sin(x) if next(flags) else tf.cos(x))

    def test_wiring_that_changes(self):
        flags = iter([True, False])

        def f(x):
            a, b = tf.sin(x), tf.cos(x)
            return a * x if next(flags) else b * x

        with pytest.raises(hvp.RecomputeError, match="did something else"):
            self.gradient(f)

    def test_a_loop_whose_body_changes(self):
        factors = iter([2.0, 5.0])

        def f(x):
            k = next(factors)
            return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * k), [0, x])[1]

        with pytest.raises(hvp.RecomputeError, match="did something else"):
            self.gradient(f)

    def test_a_variable_of_the_loop_that_made_the_function(self):
        weights, y = [tf.Variable(1.0), tf.Variable(2.0)], tf.constant(0.5)
        with tf.GradientTape() as tape:
            for w in weights:
                y = hvp.recompute(lambda z: tf.sin(z * w))(y)  # noqa: B023 - that is the mistake
        with pytest.raises(hvp.RecomputeError, match="lambda x, w=w"):
            tape.gradient(y, weights)

    def test_python_code_inside(self):
        with pytest.raises(hvp.RecomputeError, match="EagerPyFunc"):
            self.gradient(lambda x: tf.py_function(lambda a: a**2, [x], x.dtype))

    def test_a_tensor_array(self):
        array = tf.TensorArray(tf.float32, 2).unstack(tf.ones(2))
        with pytest.raises(hvp.RecomputeError, match="TensorArray"):
            hvp.recompute(lambda a: a.stack())(array)

    def test_an_argument_without_a_hash(self):
        with pytest.raises(hvp.RecomputeError, match="is set"):
            hvp.recompute(lambda s, x: x * len(s))({1, 2}, X)

    def test_a_layer_that_adds_a_loss(self):
        layer = layers.Dense(2, activity_regularizer="l2", name="regularized")
        with pytest.raises(hvp.RecomputeError, match="'regularized' adds a loss"):
            hvp.recompute(layer)(tf.ones((1, 3)))

    def test_building_a_functional_model(self):
        with pytest.raises(hvp.RecomputeError, match="recompute_model"):
            hvp.recompute(layers.Dense(2))(keras.Input((3,)))

    def test_a_missing_second_derivative(self):
        x = tf.constant([0.5, 0.7])
        g = hvp.recompute(lambda x: tf.math.igamma(x, 0.7) ** 2)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = g(x)
            gradient = inner.gradient(y, x)
        with pytest.raises(hvp.SecondDerivativeError, match="IgammaGradA"):
            outer.gradient(gradient, x)

    def test_what_is_not_differentiated_is_no_obstacle(self):
        image, w = tf.constant(random(0, 1, 4, 4, 3) ** 2 / 10), tf.Variable(2.0)

        def f(x):
            return tf.sin(tf.reduce_sum(tf.image.hsv_to_rgb(x) * w**3))

        want = derivatives(lambda: f(image), [w], order=2)
        g = hvp.recompute(f)
        assert_same(derivatives(lambda: g(image), [w], order=2), want, 1e-5)
