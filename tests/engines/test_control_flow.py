"""Loops, branches and what they carry, in the graph engine.

The oracle is differences of gradients: no second derivative of TensorFlow's enters.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import (
    FUZZ,
    Problem,
    dense_hessian,
    hessian_oracle,
    long,
    random,
    relative_error,
    set_random_weights,
)

N = 3
X = random(1, 2, N, dtype="float64")
SEQUENCE = random(2, 2, 4, N, dtype="float64")


def loop(body, steps=4, **options):
    """Apply `body(i, h)` to X, and take the mean of squares."""
    loop_vars = (tf.constant(0), tf.constant(X))
    _, h = tf.while_loop(
        lambda i, h: i < steps, lambda i, h: (i + 1, body(i, h)), loop_vars, **options
    )
    return tf.reduce_mean(h**2)


def read_inside(w):
    return loop(lambda i, h: tf.tanh(h @ w))


def read_outside(w):
    matrix = 1.5 * w
    return loop(lambda i, h: tf.tanh(h @ matrix))


def bounded(w):
    return loop(lambda i, h: tf.tanh(h @ w), maximum_iterations=3)


def as_long_as_the_data_say(w):
    (h,) = tf.while_loop(
        lambda h: tf.reduce_sum(h**2) < 50.0, lambda h: (tf.tanh(h @ w) + 1.3 * h,), (X,)
    )
    return tf.reduce_mean(h**2)


def no_iteration(w):
    return loop(lambda i, h: tf.tanh(h @ w), steps=0) + tf.reduce_sum(w**4)


def loop_in_loop(w):
    def inner(_, h):
        return tf.while_loop(
            lambda j, g: j < 2, lambda j, g: (j + 1, tf.sin(g @ w)), (tf.constant(0), h)
        )[1]

    return loop(inner, steps=3)


def branch_in_loop(w):
    return loop(
        lambda i, h: tf.cond(i % 2 == 0, lambda: tf.sin(h @ w), lambda: 2.0 * tf.tanh(h @ w))
    )


def branch(w):
    y = tf.tanh(X @ w)
    return tf.cond(
        tf.reduce_sum(y) > 0.0,
        lambda: tf.reduce_sum(tf.sin(y @ w) ** 2),
        lambda: tf.reduce_sum((y @ w) ** 4),
    )


def switch(w):
    y = tf.tanh(X @ w)
    branches = [lambda: tf.reduce_sum(y), lambda: tf.reduce_sum((y @ w) ** 4)]
    return tf.switch_case(tf.cast(tf.reduce_sum(y) < 100.0, tf.int32), branches)


def tensor_array(w):
    def body(i, h, array):
        h = tf.tanh(tf.constant(SEQUENCE)[:, i] @ w + h)
        return i + 1, h, array.write(i, h)

    start = tf.constant(0), tf.zeros((2, N), tf.float64), tf.TensorArray(tf.float64, 4)
    _, _, array = tf.while_loop(lambda i, *_: i < 4, body, start)
    return tf.reduce_mean(array.stack() ** 4)


def scan(w):
    steps = tf.transpose(SEQUENCE, (1, 0, 2))
    return tf.reduce_sum(
        tf.scan(lambda h, e: tf.tanh(h @ w + e), steps, tf.zeros((2, N), tf.float64)) ** 2
    )


def map_fn(w):
    return tf.reduce_sum(tf.map_fn(lambda e: tf.tanh(e @ w), tf.constant(SEQUENCE)) ** 2)


def vectorized_map(w):
    return tf.reduce_sum(tf.vectorized_map(lambda e: tf.tanh(e @ w), tf.constant(SEQUENCE)) ** 2)


def autograph(w):
    @tf.function
    def states(h):
        for _ in tf.range(3):
            h = tf.tanh(h @ w)
        if tf.reduce_sum(h) < 100.0:
            h = tf.sin(h)
        return h

    return tf.reduce_mean(states(tf.constant(X)) ** 2)


def own_gradient_in_loop(w):
    @tf.custom_gradient
    def square(a):
        return a * a, lambda upstream: 2.0 * a * upstream

    return loop(lambda i, h: square(tf.tanh(h @ w)), steps=2)


def integers_and_masks(w):
    y = X @ w
    order, mask = tf.argsort(y[:, 0]), y > 0.0
    return tf.reduce_sum(tf.boolean_mask(tf.gather(y, order) ** 3, mask))


LOSSES = [
    read_inside,
    read_outside,
    bounded,
    as_long_as_the_data_say,
    no_iteration,
    loop_in_loop,
    branch_in_loop,
    branch,
    switch,
    tensor_array,
    scan,
    map_fn,
    vectorized_map,
    autograph,
    own_gradient_in_loop,
    integers_and_masks,
]


# Much like their neighbours in the list.
ALIKE = {read_inside, read_outside, as_long_as_the_data_say, switch, scan, map_fn}
# Tapes see the operations of the steps, as of the loops and branches that are not nested.
ALIKE_ON_TAPES = {loop_in_loop, branch_in_loop}


@pytest.mark.parametrize(
    "loss",
    [long(loss) if loss in ALIKE else loss for loss in LOSSES],
    ids=lambda loss: loss.__name__,
)
@pytest.mark.few(1)
def test_loops_and_branches_are_split_too(loss):
    w = tf.Variable(random(0, N, N, dtype="float64", scale=0.7))
    problem = Problem(tf.autograph.experimental.do_not_convert(lambda: loss(w)), w)
    oracle = hessian_oracle(problem)
    H = hvp.HessianOperator(problem.loss, w)
    assert (H.stats.engine, H.stats.note) == ("graph", "")
    dense = H.to_dense()  # by blocks
    one = H @ np.ones(N * N)
    assert relative_error(one, dense @ np.ones(N * N)) < 1e-12
    assert relative_error(dense, oracle()) < 1e-8
    if FUZZ or loss not in ALIKE_ON_TAPES:
        tape = hvp.HessianOperator(problem.loss, w, engine="tape")
        assert relative_error(one, tape @ np.ones(N * N)) < 1e-12
    w.assign_add(0.1 * tf.ones((N, N), tf.float64))
    H.refresh()
    assert H.stats.traces == 1
    assert relative_error(H.to_dense(), oracle()) < 1e-8


@pytest.mark.parametrize(
    ("kind", "unroll", "masked"),
    [
        ("LSTM", True, False),
        ("GRU", False, True),
        long("LSTM", False, False),
        long("LSTM", False, True),
        long("LSTM", True, True),
        long("GRU", False, False),
        long("Bidirectional", False, False),
    ],
)
@pytest.mark.few(1)
def test_recurrent_layers(kind, unroll, masked):
    options = {"dtype": "float64", "unroll": unroll}
    if masked:
        inputs = np.array([[1, 2, 0], [2, 1, 1]])
        layers = [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(3, 2, mask_zero=True, dtype="float64"),
        ]
    else:
        inputs = SEQUENCE[:, :3, :2]
        layers = [keras.Input((3, 2))]
    if kind == "Bidirectional":
        layers.append(keras.layers.Bidirectional(keras.layers.GRU(2, **options), dtype="float64"))
    else:
        layers.append(getattr(keras.layers, kind)(2, **options))
    model = keras.Sequential([*layers, keras.layers.Dense(1, dtype="float64")])
    set_random_weights(model)
    problem = Problem(lambda: tf.reduce_mean((model(inputs) - 1.0) ** 2), model)
    H = hvp.HessianOperator(problem.loss, model)
    assert (H.stats.engine, H.stats.note) == ("graph", "")
    tape = hvp.HessianOperator(problem.loss, model, engine="tape")
    dense = H.to_dense()
    v = random(1, H.shape[0])
    assert relative_error(dense @ v, tape @ v) < 1e-12
    assert relative_error(dense, dense_hessian(problem)) < 1e-8


def test_random_numbers_in_a_loop_are_drawn_once():
    w = tf.Variable(random(0, N, N, dtype="float64"))

    def loss():
        return loop(lambda i, h: tf.nn.dropout(tf.tanh(h @ w), 0.3))

    H = hvp.HessianOperator(loss, w)
    assert H.stats.engine == "graph"
    first = H.to_dense()
    assert np.array_equal(first, H.to_dense())
    assert relative_error(first, first.T) < 1e-12
    H.refresh()
    assert relative_error(H.to_dense(), first) > 1e-3


def test_the_size_of_lists_is_counted():
    """A loop keeps its intermediate values in lists."""
    w = tf.Variable(random(0, 8, 8))
    sizes = []
    for steps in (10, 20):
        x = random(1, 16, 8)

        def loss(steps=steps, x=x):
            return tf.reduce_sum(
                tf.while_loop(lambda i, h: i < steps, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[
                    1
                ]
            )

        sizes.append(hvp.HessianOperator(loss, w).stats.residual_bytes)
    assert sizes[0] >= 10 * 16 * 8 * 4
    assert 1.8 < sizes[1] / sizes[0] < 2.2


def test_blocks_through_convolutions_with_explicit_padding():
    """`tf.vectorized_map` forgets the padding of such a convolution's gradient."""
    w = tf.Variable(random(0, 3, 3, 1, 1, dtype="float64"))
    x = random(1, 2, 5, 5, 1, dtype="float64")
    pads = [[0, 0], [1, 2], [2, 1], [0, 0]]

    def loss():
        y = tf.tanh(tf.nn.conv2d(x, w, 2, pads))
        return tf.reduce_mean(y**2)

    H = hvp.HessianOperator(loss, w)
    assert relative_error(H.to_dense(), dense_hessian(Problem(loss, w))) < 1e-8


@pytest.mark.parametrize("options", [{}, {"engine": "tape"}, {"batch_size": 2}])
def test_jacobians_of_loops_whose_bodies_call_functions(options):
    """TensorFlow's runtime has no derivative of a sum of several terms inside such a call."""
    w = tf.Variable([0.3, 0.5], dtype=tf.float64)

    @tf.function
    def step(s):
        return tf.add_n([s, s * s, tf.sin(s)]) / 2

    def values(x):
        start = [0, x * w]
        return tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, step(s)), start)[1]

    def of_numpy(weights, x):
        y = x * weights
        for _ in range(3):
            y = (y + y * y + np.sin(y)) / 2
        return y

    x = random(0, 4, 2, dtype="float64")
    rise = [of_numpy(w.numpy() + sign * 1e-6, x) for sign in (1, -1)]
    slopes = (rise[0] - rise[1]) / 2e-6
    J = hvp.JacobianOperator(values, w, (x,), **options)
    v, u = np.array([1.0, -2.0]), random(1, 8, dtype="float64")
    np.testing.assert_allclose(J @ v, (slopes * v).ravel(), atol=1e-8)
    np.testing.assert_allclose(J.T @ u, (slopes * u.reshape(4, 2)).sum(0), atol=1e-8)
    np.testing.assert_allclose(J @ np.eye(2), J.to_dense(), atol=1e-12)
