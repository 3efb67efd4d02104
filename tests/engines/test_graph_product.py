"""Block products: each column is what it would be alone, whatever `tf.vectorized_map` does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import Problem, dense_hessian, long, random, relative_error
from tests.fuzz.programs import Parameters
from tests.fuzz.steps import FLOAT32_ONLY

# Images, filters and options of tf.nn.conv2d; images have several times the filters' channels.
GROUPED = {
    "two groups": ((2, 5, 5, 4), (3, 3, 2, 4), {"strides": 1, "padding": "SAME"}),
    "strided": ((1, 6, 5, 4), (2, 2, 2, 2), {"strides": 2, "padding": "VALID"}),
    "depthwise": ((2, 4, 4, 3), (3, 2, 1, 6), {"strides": 1, "padding": "SAME"}),
    "dilated": ((1, 6, 6, 4), (2, 2, 2, 2), {"strides": 1, "padding": "SAME", "dilations": 2}),
}


def in_groups(x, w, dilations=1, **options):
    """A convolution in groups as one for each group; dilated filters are written with zeros."""
    groups = x.shape[-1] // w.shape[2]
    if dilations > 1:
        rows = [part for row in tf.unstack(w, axis=0) for part in (row, tf.zeros_like(row))][:-1]
        w = tf.stack(rows, axis=0)
        columns = [part for c in tf.unstack(w, axis=1) for part in (c, tf.zeros_like(c))][:-1]
        w = tf.stack(columns, axis=1)
    pairs = zip(tf.split(x, groups, -1), tf.split(w, groups, -1))
    return tf.concat([tf.nn.conv2d(image, kernel, **options) for image, kernel in pairs], -1)


def grouped_problem(name, dtype, convolution):
    shape, kernel, options = GROUPED[name]
    x = tf.constant(random(0, *shape, dtype=dtype))
    w = tf.Variable(random(1, *kernel, dtype=dtype, scale=0.3))
    return Problem(lambda: tf.reduce_sum(tf.tanh(convolution(x, w, **options)) ** 2), w)


@pytest.mark.parametrize("name", GROUPED)
def test_convolutions_in_groups_are_right_in_blocks(name):
    want = dense_hessian(grouped_problem(name, "float64", in_groups))
    problem = grouped_problem(name, "float32", tf.nn.conv2d)
    with hvp.HessianOperator(problem.loss, problem.variables) as H:
        assert relative_error(H.to_dense(), want) < 1e-5
        solved = hvp.solve(H, want[:, :3], method="exact")
        assert relative_error(want @ solved.x, want[:, :3]) < 1e-2
        assert "vectorized_map" not in H.stats.note  # known before, not found by comparing


# Those above, against float64, are much like these.
ALIKE = {"grouped conv2d", "strided grouped conv2d", "dilated grouped conv2d"}


@pytest.mark.parametrize("name", [long(name) if name in ALIKE else name for name in FLOAT32_ONLY])
@pytest.mark.few(2)
def test_blocks_are_their_columns_where_there_are_no_differences(name):
    # The other steps of random programs are compared in float64, in tests/fuzz.
    parameters = Parameters(0, "float32")
    x = tf.Variable(random(1, 3, 3))

    def loss():
        parameters.again()
        return tf.reduce_mean(tf.square(FLOAT32_ONLY[name](x, parameters) - 0.3))

    loss()
    variables = [x, *parameters.variables]
    with hvp.HessianOperator(loss, variables, engine="tape") as H:
        want = H @ (columns := random(2, H.shape[0], 3))
    with hvp.HessianOperator(loss, variables) as H:
        assert relative_error(H @ columns, want) < 1e-5
        dense = H.to_dense()
        assert relative_error(dense, dense.T) < 1e-5
        assert "vectorized_map" not in H.stats.note


@pytest.mark.long
def test_convolutions_in_groups_are_right_in_blocks_of_batches_and_graphs():
    layers = [
        keras.layers.Input((5, 5, 4)),
        keras.layers.Conv2D(4, 3, groups=2, padding="same", activation="tanh"),
        keras.layers.DepthwiseConv2D(2),
        keras.layers.GlobalAveragePooling2D(),
    ]
    model = keras.Sequential(layers)
    x = random(2, 6, 5, 5, 4)

    def loss(x):
        return tf.reduce_mean(model(x) ** 2)

    columns = random(3, model.count_params(), 3)
    with hvp.HessianOperator(loss, model, (x,)) as H:
        want = np.stack([H @ column for column in columns.T], axis=1)
        assert relative_error(H @ columns, want) < 1e-5
        inside = tf.function(H.as_tf_operator().matmul)(tf.constant(columns))
        assert relative_error(inside, want) < 1e-5
    for options in ({"batch_size": 4}, {"recompute": True}, {"engine": "tape"}):
        with hvp.HessianOperator(loss, model, (x,), **options) as H:
            assert relative_error(H @ columns, want) < 1e-5, options


@pytest.mark.long
def test_influence_of_convolutions_in_groups_is_that_of_gradients():
    keras.utils.set_random_seed(0)  # initializers draw their seeds when layers are made
    layers = [
        keras.layers.Input((4, 4, 4)),
        keras.layers.Conv2D(2, 3, groups=2, activation="tanh"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    data = random(4, 6, 4, 4, 4), random(5, 6, 1)

    def loss(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    rows = []
    for x, y in zip(*data):
        with tf.GradientTape() as tape:
            value = loss(x[np.newaxis], y[np.newaxis])
        parts = tape.gradient(value, model.trainable_variables)
        rows.append(np.concatenate([part.numpy().ravel() for part in parts]))
    rows = np.array(rows, np.float64)
    influence = hvp.InfluenceFunctions(loss, model, data, damping=5.0)
    columns = [influence.operator @ column for column in np.eye(model.count_params())]
    want = rows @ np.linalg.solve(np.array(columns, np.float64), rows.T) / 6
    assert relative_error(influence.scores(data), want) < 1e-4


def test_a_block_that_is_converted_wrongly_goes_column_by_column(monkeypatch):
    # As if nothing were known of it: comparing a random block with its columns finds out.
    monkeypatch.setattr("hvp._engines.graph_product.is_converted_wrongly", lambda operation: False)
    problem = grouped_problem("two groups", "float32", tf.nn.conv2d)
    want = dense_hessian(grouped_problem("two groups", "float64", in_groups))
    with hvp.HessianOperator(problem.loss, problem.variables) as H:
        assert relative_error(H.to_dense(), want) < 1e-5
        assert "one column after the other" in H.stats.note
        assert H.stats.products == H.shape[0]  # those that were compared are not counted
    with hvp.HessianOperator(problem.loss, problem.variables) as H:
        inside = tf.function(H.as_tf_operator().matmul)(tf.eye(72))
        assert relative_error(inside, want) < 1e-5


def test_tensorflow_still_converts_convolutions_in_groups_wrongly():
    # If this fails, TensorFlow has fixed it, and `is_converted_wrongly` can go.
    x, w = random(0, 2, 5, 5, 4), random(1, 3, 3, 2, 4)
    upstream = random(2, 3, 2, 5, 5, 4)

    def gradient(dy):
        with tf.GradientTape() as tape:
            kernel = tf.constant(w)
            tape.watch(kernel)
            y = tf.nn.conv2d(x, kernel, 1, "SAME")
        return tape.gradient(y, kernel, dy)

    want = np.stack([gradient(dy) for dy in upstream])
    assert relative_error(tf.vectorized_map(gradient, upstream), want) > 0.1


def test_blocks_of_a_sequence_in_a_batch_of_one_do_not_corrupt_memory():
    """A failure would not be seen here: the process of the tests would crash."""
    x = tf.constant(random(0, 1, 3, 3))
    w = [tf.Variable(tf.random.stateless_normal((3, 3), (0, i))) for i in range(3)]

    def loss(x):
        h = tf.tanh(tf.matmul(x, w[0]))
        return tf.reduce_mean(tf.matmul(tf.matmul(h, w[1]), w[2]) ** 2)

    def allocate():
        # Where memory was overwritten, malloc notices.
        return [np.ones(size) for size in range(1, 200, 7)]

    with hvp.HessianOperator(loss, w, (x,)) as H:
        dense = H.to_dense()
        columns = np.stack([H @ column for column in np.eye(27, dtype="float32")], axis=1)
        np.testing.assert_allclose(dense, columns, atol=1e-5 * np.abs(columns).max())
        for _ in range(200):
            H @ np.ones((27, 33), "float32")
            allocate()
    examples = tf.concat([x] * 40, 0)
    influence = hvp.InfluenceFunctions(loss, w, (examples,), damping=10.0)
    for _ in range(20):
        influence.scores((examples,))
        allocate()
