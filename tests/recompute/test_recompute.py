"""Derivatives of every order equal those of the function itself, in every mode."""

import collections
import gc
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import crossed, random
from tests.recompute.derivatives import MODES, assert_same, derivatives

Pair = collections.namedtuple("Pair", ["one", "other"])


def variable(seed, *shape, dtype="float64"):
    return tf.Variable(random(seed, *shape, dtype=dtype, scale=0.5))


def dense():
    w, b = variable(0, 4, 4), variable(1, 4)
    x = tf.constant(random(2, 3, 4, dtype="float64"))
    return lambda x: tf.tanh(x @ w + b), [x], [w, b]


def nests():
    w = variable(0, 4)
    x, y = (tf.constant(random(s, 4, dtype="float64")) for s in (1, 2))

    def f(pair, *, scale, how):
        assert how == "sum"
        return {"a": [tf.sin(pair.one["x"] * w)], "b": (pair.other * scale, tf.range(3))}

    return (lambda x, y: f(Pair({"x": x}, y), scale=y * w, how="sum")), [x, y], [w]


def closed_over_tensors():
    c, big = (
        tf.constant(random(0, 3, dtype="float64")),
        tf.constant(random(1, 300, dtype="float64")),
    )
    x = tf.constant(random(2, 3, dtype="float64"))
    return (lambda x: tf.exp(x * c) * tf.reduce_sum(big**2) * 1e-3), [x], [c, big]


def embedding():
    table = variable(0, 5, 3)
    ids = tf.constant([[1, 2], [1, 4]])
    return (lambda ids: tf.tanh(tf.gather(table, ids)) * tf.gather(table, 0)), [ids], [table]


def loop():
    w = variable(0, 3, 3)
    x = tf.constant(random(1, 2, 3, dtype="float64"))

    def f(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[1]

    return f, [x], [w]


def branch():
    w = variable(0, 3)
    x = tf.constant(random(1, 3, dtype="float64"))

    def f(x):
        return tf.cond(tf.reduce_sum(x) > 100.0, lambda: x * w, lambda: tf.sin(x * w))

    return f, [x], [w]


def autograph():
    w = variable(0, 3)
    x = tf.constant(random(1, 3, dtype="float64"))

    def f(x):
        if tf.reduce_sum(x) > 100.0:
            return x * w
        return tf.sin(x * w)

    return f, [x], [w]


def tf_functions():
    w = variable(0, 3, 3)
    x = tf.constant(random(1, 2, 3, dtype="float64"))
    inner = tf.function(lambda x: tf.tanh(x @ w))
    return tf.function(lambda x: inner(inner(x)) * x), [x], [w]


def custom_gradients():
    w = variable(0, 3)
    x = tf.constant(random(1, 3, dtype="float64"))

    @tf.custom_gradient
    def cube(x):
        return x**3, lambda dy: dy * 3.0 * x**2

    return (lambda x: tf.nn.silu(cube(x * w))), [x], [w]


def recomputed_inside():
    w = [variable(i, 3, 3) for i in range(2)]
    x = tf.constant(random(9, 2, 3, dtype="float64"))
    inner = [hvp.recompute(lambda x, w=w: tf.tanh(x @ w)) for w in w]
    middle = hvp.recompute(lambda x: inner[1](inner[0](x)))
    return (lambda x: middle(x) * x), [x], w


def used_twice_and_partly():
    w, unused = variable(0, 3), variable(1, 3)
    x, y = (tf.constant(random(s, 3, dtype="float64")) for s in (2, 3))

    def f(x, y):
        product = x * w
        return product, product, x, tf.shape(y), tf.stop_gradient(unused * y)

    return f, [x, y], [w, unused]


def complex_numbers():
    w = tf.Variable(tf.complex(random(0, 3, dtype="float64"), random(1, 3, dtype="float64")))
    x = tf.constant(random(2, 3, dtype="float64"))
    return (lambda x: tf.exp(tf.complex(x, x) * w)), [x], [w]


CASES = {
    case.__name__: case
    for case in (dense, nests, closed_over_tensors, embedding, loop, branch, autograph)
    + (tf_functions, custom_gradients, recomputed_inside, used_twice_and_partly, complex_numbers)
}


@pytest.mark.parametrize(("case", "mode"), crossed(CASES, [*MODES, "from outside"]))
@pytest.mark.few(1)
def test_three_derivatives(case, mode):
    f, arguments, others = CASES[case]()
    # XLA has no lists of values for what a loop computed to be differentiated in this way.
    if case == "loop" and mode == "xla":
        pytest.skip("XLA takes no loop without a known number of rounds backwards")
    sources = [a for a in arguments if a.dtype.is_floating] + others
    want = derivatives(lambda: f(*arguments), sources)
    g = hvp.recompute(f)
    if mode == "from outside":  # of a `tf.function`
        mode, g = "eager", tf.function(g, autograph=False)
    assert_same(MODES[mode](lambda: derivatives(lambda: g(*arguments), sources))(), want, 1e-11)


def hessian_times(f, sources, tangents, mode):
    """Both orders of forward and reverse mode."""

    def value():
        return tf.add_n([tf.reduce_sum(y**2) for y in tf.nest.flatten(f()) if y.dtype.is_floating])

    def over():
        with tf.autodiff.ForwardAccumulator(sources, tangents) as forward:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                y = value()
            gradient = tape.gradient(y, sources)
        return [forward.jvp(y), *(forward.jvp(tf.convert_to_tensor(g)) for g in gradient)]

    def under():
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with tf.autodiff.ForwardAccumulator(sources, tangents) as forward:
                y = value()
            tangent = forward.jvp(y)
        return [tangent, *(tf.convert_to_tensor(g) for g in tape.gradient(tangent, sources))]

    return MODES[mode](over)() + MODES[mode](under)()


@pytest.mark.parametrize(
    ("case", "mode"),
    crossed(["dense", "nests", "custom_gradients", "recomputed_inside"], ["eager", "graph"]),
)
@pytest.mark.few(1)
@pytest.mark.long
def test_forward_mode_over_and_under_reverse_mode(case, mode):
    f, arguments, others = CASES[case]()
    sources = arguments + others
    tangents = [tf.cast(random(50 + i, *s.shape), s.dtype) for i, s in enumerate(sources)]
    want = hessian_times(lambda: f(*arguments), sources, tangents, "graph")
    g = hvp.recompute(f)
    assert_same(hessian_times(lambda: g(*arguments), sources, tangents, mode), want, 1e-11)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.few(1)
def test_forward_mode_through_nested_tf_functions(mode):
    """Where TensorFlow itself fails (eager), or gives another number (in a graph)."""
    f, (x,), (w,) = tf_functions()
    tangents = [tf.ones_like(x), tf.ones_like(w)]

    def plain(x):
        return tf.tanh(tf.tanh(x @ w) @ w) * x

    want = hessian_times(lambda: plain(x), [x, w], tangents, "graph")
    g = hvp.recompute(f)
    assert_same(hessian_times(lambda: g(x), [x, w], tangents, mode), want, 1e-11)


def test_inside_a_loop_and_a_branch_of_the_caller():
    f, (x,), others = dense()
    g = hvp.recompute(f)

    def looped(f):
        _, h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, f(h)), (0, x))
        return tf.cond(tf.reduce_sum(x) < 100.0, lambda: f(h), lambda: h)

    want = derivatives(lambda: looped(f), [x, *others], order=2)
    for mode in ("eager", "graph"):
        got = MODES[mode](lambda: derivatives(lambda: looped(g), [x, *others], order=2))()
        assert_same(got, want, 1e-11)


def test_tensors_of_a_graph_around_it():
    w = variable(0, 3)

    @tf.function(autograph=False)
    def gradients(x, wrap):
        scale = tf.exp(x)
        f = wrap(lambda y: tf.sin(y * scale * w))
        return derivatives(lambda: f(x * 2.0), [x, w])

    x = tf.constant(random(1, 3, dtype="float64"))
    assert_same(gradients(x, hvp.recompute), gradients(x, lambda f: f), 1e-11)


def test_ragged_and_sparse_tensors():
    ragged = tf.ragged.constant([[1.0, 2.0], [], [3.0]])
    sparse = tf.sparse.from_dense([[0.0, 2.0], [3.0, 0.0]])
    g = hvp.recompute(lambda r, s: (r * 2.0, tf.sparse.map_values(tf.multiply, s, 3.0)))
    doubled, tripled = g(ragged, sparse)
    assert doubled.to_list() == [[2.0, 4.0], [], [6.0]]
    assert tf.sparse.to_dense(tripled).numpy().tolist() == [[0.0, 6.0], [9.0, 0.0]]
    with tf.GradientTape() as tape:
        tape.watch(ragged.values)
        y = tf.reduce_sum(g(ragged, sparse)[0].values ** 2)
    assert tape.gradient(y, ragged.values).numpy().tolist() == [8.0, 16.0, 24.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_low_precision(dtype):
    w = tf.Variable(tf.cast(random(0, 3), dtype))
    x = tf.cast(random(1, 3), dtype)
    f = lambda x: tf.tanh(x * w)  # noqa: E731
    want = derivatives(lambda: f(x), [x, w], order=2)
    got = derivatives(lambda: hvp.recompute(f)(x), [x, w], order=2)
    assert_same([tf.cast(t, "float32") for t in got], [tf.cast(t, "float32") for t in want], 1e-2)


def test_unknown_shapes_and_other_shapes():
    w = variable(0, 3, 3)
    traces = []

    def f(x):
        traces.append(x.shape)
        return tf.tanh(x @ w)

    g = hvp.recompute(f)
    spec = tf.TensorSpec([None, 3], tf.float64)
    whole = tf.function(
        lambda x: derivatives(lambda: g(x), [w, x], order=2),
        input_signature=[spec],
        autograph=False,
    )
    for rows in (2, 5, 0):
        x = tf.constant(random(rows, rows, 3, dtype="float64"))
        assert_same(whole(x), derivatives(lambda x=x: tf.tanh(x @ w), [w, x], order=2), 1e-11)
        assert_same(derivatives(lambda x=x: g(x), [w, x], order=2), whole(x), 1e-11)
    # An order is traced once for each shape, and not again.
    assert len(traces) == 3 * 4
    for _ in range(3):
        derivatives(lambda: g(tf.ones((2, 3), tf.float64)), [w], order=2)
    assert len(traces) == 3 * 4


def test_python_arguments_are_fixed_and_arrays_are_tensors():
    traces = []

    def f(x, power, flag=False):
        traces.append((power, flag))
        return x**power if flag else x

    g = hvp.recompute(f)
    x = np.array([2.0, 3.0])
    assert g(x, 2, flag=True).numpy().tolist() == [4.0, 9.0]
    assert g(x + 1, 2, flag=True).numpy().tolist() == [9.0, 16.0]
    assert g(x, 3, flag=True).numpy().tolist() == [8.0, 27.0]
    assert g(x, 3, flag=1).numpy().tolist() == [8.0, 27.0]  # 1 is not True
    assert traces == [(2, True), (3, True), (3, 1)]


def test_the_wrapped_function_is_kept():
    def cube(x):
        """Cube."""
        return x**3

    g = hvp.recompute(cube)
    assert (g.__wrapped__, g.__name__, g.__doc__) == (cube, "cube", "Cube.")
    layer = keras.layers.Dense(2, name="head")
    g = hvp.recompute(layer)
    assert g(tf.ones((1, 3))).shape == (1, 2)
    assert g.__wrapped__ is layer
    assert g.__name__ == "head"
    assert len(layer.trainable_variables) == 2


def test_values_of_the_call_not_of_now():
    """A variable that changes between a call and its derivative."""
    w = tf.Variable([2.0, 3.0])
    g = hvp.recompute(lambda x: w**3 * x)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = g(tf.ones(2))
        w.assign([10.0, 10.0])
        gradient = inner.gradient(y, w)
    assert gradient.numpy().tolist() == [12.0, 27.0]
    assert outer.gradient(gradient, w).numpy().tolist() == [12.0, 18.0]


def test_a_persistent_tape_and_jacobians():
    f, (x,), others = dense()
    g = hvp.recompute(f)

    def jacobian(f, **options):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, [x, *others], **options) + tape.gradient(y, [x, *others])

    want = jacobian(f)
    assert_same(jacobian(g, experimental_use_pfor=False), want, 1e-11)
    assert_same(jacobian(g), want, 1e-11)


def test_threads():
    f, (x,), others = dense()
    want = derivatives(lambda: f(x), [x, *others], order=2)
    g = hvp.recompute(f)
    results = {}

    def work(index):
        results[index] = derivatives(lambda: g(x), [x, *others], order=2)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        assert_same(results[index], want, 1e-11)


def test_a_graph_around_it_is_let_go():
    w = variable(0, 3)
    g = hvp.recompute(lambda x: tf.sin(x * w))
    function = tf.function(lambda x: derivatives(lambda: g(x), [w], order=2), autograph=False)
    function(tf.ones(3, tf.float64))
    graph = weakref.ref(function.get_concrete_function(tf.ones(3, tf.float64)).graph)
    del function
    gc.collect()
    assert graph() is None


def test_a_keras_block_in_training():
    """A subclassed model whose blocks are recomputed, through `fit`."""

    class Model(keras.Model):
        def __init__(self, wrap):
            super().__init__()
            init = keras.initializers.GlorotUniform(seed=1)
            self.blocks = [keras.layers.Dense(4, "tanh", kernel_initializer=init) for _ in "ab"]
            self.head = keras.layers.Dense(1, kernel_initializer=init)
            self.calls = [wrap(block) for block in self.blocks]

        def call(self, x):
            for call in self.calls:
                x = call(x)
            return self.head(x)

    x, y = random(0, 16, 3), random(1, 16, 1)
    weights = []
    for wrap in (lambda f: f, hvp.recompute):
        model = Model(wrap)
        model(x)
        model.compile("sgd", "mse")
        model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights, 1e-5)


def test_variables_as_arguments():
    x, w = random(0, 3, 4, dtype="float64"), variable(1, 4, 2)
    f = hvp.recompute(lambda x, *, w: tf.tanh(x @ w))
    want = derivatives(lambda: tf.tanh(x @ w), [w], order=2)
    assert_same(derivatives(lambda: f(x, w=w), [w], order=2), want, 1e-11)
    layer = keras.layers.Dense(2, dtype="float64")
    layer.build((3, 4))
    kernel = layer.kernel.value
    want = derivatives(lambda: tf.tanh(x @ kernel), [kernel], order=2)
    assert_same(derivatives(lambda: f(x, w=layer.kernel), [kernel], order=2), want, 1e-11)


def test_nothing_among_results():
    made, nothing = hvp.recompute(lambda x: (2 * x, None))(tf.ones(2))
    assert nothing is None
    assert list(made) == [2, 2]


def test_python_inside_runs_once():
    runs = []

    def count(a):
        runs.append(1)
        return a * 0 + 3

    def f(x):
        factor = tf.numpy_function(count, [tf.stop_gradient(x)], x.dtype)
        return x * x * tf.reshape(factor, x.shape)

    x = tf.ones(2)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(hvp.recompute(f)(x))
    assert list(tape.gradient(y, x)) == [6, 6]
    assert len(runs) == 1
