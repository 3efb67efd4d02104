"""Products of `HessianOperator` against independent Hessians."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import hvp
from tests import inside
from tests.cases import (
    CASES,
    WRONG_IN_TENSORFLOW,
    Problem,
    dense_hessian,
    flat_gradient,
    jacobian_of_gradient,
    long,
    mlp,
    pairwise,
    random,
    relative_error,
    rosenbrock,
)

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}

ENGINES = {
    "graph": {"engine": "graph"},
    "graph, XLA": {"engine": "graph", "jit_compile": True},
    "tape": {"engine": "tape"},
}

# Loops and branches hand on lists, which XLA does not take.
NOT_BY_XLA = {"lstm rolled", "while_loop", "cond"}


@functools.cache
def dense_case(name):
    return dense_hessian(CASES[name]("float64"))


def operator(problem, **options):
    return hvp.HessianOperator(problem.loss, problem.variables, problem.data, **options)


# Where the oracle is compared with another one.
LOOKED_AT = {"mlp", "batch normalization in training", "while_loop", "gather"}
# Few of them are compiled by XLA, which takes seconds for each.
BY_XLA = {"mlp", "gather", "while_loop"}


@pytest.mark.parametrize(
    ("name", "engine", "dtype"),
    [
        *pairwise(CASES, ["graph", "tape"], TOLERANCE),
        *((name, "graph, XLA", "float32") for name in CASES if name in BY_XLA),
        *(long(name, "graph, XLA", "float32") for name in CASES if name not in BY_XLA),
    ],
)
@pytest.mark.few(3)
def test_products_are_those_of_the_dense_hessian(name, dtype, engine):
    with operator(CASES[name](dtype), **ENGINES[engine]) as H:
        dense = dense_case(name)
        V = random(0, H.shape[0], 3, dtype=dtype)
        assert H.dtype == dtype
        assert (H @ V[:, 0]).dtype == dtype
        for column in V.T:
            assert relative_error(H @ column, dense @ column) <= TOLERANCE[dtype]
        assert relative_error(H @ V, dense @ V) <= TOLERANCE[dtype]
        problem = CASES[name]("float64")
        assert relative_error(H.value, problem.bound()) <= TOLERANCE[dtype]
        gradient = flat_gradient(problem, problem.tensorflow_variables())
        assert relative_error(H.gradient, gradient) <= 10 * TOLERANCE[dtype]
        by_xla = engine == "graph, XLA" and name not in NOT_BY_XLA
        assert H.stats.jit_compile is by_xla


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float64") for name in CASES),
        *(long(name, "float32") for name in CASES),
    ],
)
@pytest.mark.few(1)
def test_products_for_little_memory_are_those_of_the_dense_hessian(name, dtype, monkeypatch):
    inside.set_limit(monkeypatch, "bytes of large values", 1)
    inside.set_limit(monkeypatch, "bytes of many values", 0)
    inside.set_limit(monkeypatch, "large values computed meanwhile", 0)
    with operator(CASES[name](dtype)) as H:
        operations = inside.program(H).product_part.graph_def.node
        waits = [node for node in operations if node.op == "NoOp"]
        assert bool(waits) is (name != "cond")  # which runs in few operations, and one branch
        V = random(0, H.shape[0], 3, dtype=dtype)
        product = H @ V[:, 0]
        assert relative_error(product, dense_case(name) @ V[:, 0]) <= TOLERANCE[dtype]
        assert relative_error(H @ V, dense_case(name) @ V) <= TOLERANCE[dtype]
        np.testing.assert_array_equal(H @ V[:, 0], product)


@pytest.mark.parametrize("name", [name if name in LOOKED_AT else long(name) for name in CASES])
@pytest.mark.few(1)
def test_tensorflows_own_dense_hessian_is_the_one_of_differences_where_it_is_right(name):
    error = relative_error(jacobian_of_gradient(CASES[name]("float64")), dense_case(name))
    if name in WRONG_IN_TENSORFLOW:
        assert error > 1e-3  # once this fails, TensorFlow has fixed tf.nn.moments
    else:
        assert error <= 1e-10


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [2, 10, 1000])
def test_rosenbrock_is_scipys(n, dtype):
    problem = rosenbrock(dtype, n)
    w, v = problem.variables.numpy().astype("float64"), random(3, n, dtype=dtype)
    with operator(problem) as H:
        assert relative_error(H @ v, rosen_hess_prod(w, v)) <= TOLERANCE[dtype]
        assert relative_error(H.gradient, rosen_der(w)) <= TOLERANCE[dtype]
        assert relative_error(H.value, rosen(w)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logistic_regression_is_the_closed_form(dtype):
    X, y = random(0, 40, 7, dtype=dtype), (random(1, 40) > 0).astype(dtype)
    w = tf.Variable(random(2, 7, dtype=dtype))
    l2 = 0.125

    def loss(X, y):
        logits = tf.linalg.matvec(X, w)
        each = tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits)
        return tf.reduce_mean(each) + l2 / 2 * tf.reduce_sum(w**2)

    X64 = X.astype("float64")
    p = 1 / (1 + np.exp(-X64 @ w.numpy().astype("float64")))
    closed = X64.T @ ((p * (1 - p))[:, None] * X64) / len(X) + l2 * np.eye(7)
    with hvp.HessianOperator(loss, w, (X, y)) as H:
        assert relative_error(H.to_dense(), closed) <= TOLERANCE[dtype]


# Unit roundoff of float16 is 2**-11, of bfloat16 2**-8; a sum of a few dozen rounded terms, twice
# differentiated, is off by a few of them.
@pytest.mark.parametrize(("dtype", "epsilons"), [("float16", 8), ("bfloat16", 8)])
def test_half_precision_variables_make_a_float32_operator(dtype, epsilons):
    low = tf.as_dtype(dtype)
    w = tf.Variable(tf.cast(random(0, 6), low))
    wide = tf.Variable(tf.cast(w, tf.float64))

    def loss(w):
        return tf.reduce_sum(tf.sin(w) * w) + w[0] * w[1]

    with hvp.HessianOperator(lambda: loss(w), w) as H:
        assert H.dtype == np.float32
        v = tf.cast(tf.cast(random(1, 6), low), tf.float32).numpy()
        got = H @ v
        assert got.dtype == np.float32
        assert H.gradient.dtype == np.float32
        nest = H.product(tf.cast(v, low))
        assert nest.dtype == low
    dense = jacobian_of_gradient(Problem(lambda: loss(wide), wide))
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert relative_error(got, dense @ v) <= epsilons * unit


def test_dtypes_mixed_in_one_nest():
    w = {
        "half": tf.Variable(tf.ones(2, tf.bfloat16)),
        "double": tf.Variable([1.0, 2.0], tf.float64),
    }
    w["double"] = tf.Variable(np.array([1.0, 2.0]))

    def loss():
        return tf.reduce_sum(w["double"] ** 3) * tf.cast(tf.reduce_prod(w["half"]), tf.float64)

    with hvp.HessianOperator(loss, w) as H:
        assert H.dtype == np.float64
        # f = (a^3 + b^3) c d at a=1, b=2, c=d=1, in the order of the keys: a, b, c, d.
        want = np.array([[6, 0, 3, 3], [0, 12, 12, 12], [3, 12, 0, 9], [3, 12, 9, 0]], float)
        np.testing.assert_allclose(H.to_dense(), want, rtol=1e-12)
        product = H.product({"half": tf.ones(2, tf.bfloat16), "double": np.ones(2)})
        assert product["half"].dtype == tf.bfloat16
        np.testing.assert_array_equal(tf.cast(product["half"], tf.float64), want.sum(1)[2:])


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.few(1)
def test_keras_mixed_precision(policy):
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(5, "tanh", dtype=policy),
            layers.Dense(1, dtype="float32"),
        ]
    )
    x = random(0, 8, 4)
    with hvp.HessianOperator(lambda x: tf.reduce_mean(model(x) ** 2), model, (x,)) as H:
        assert H.dtype == np.float32
        dense = H.to_dense()
    twin = keras.Sequential([layers.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(1)])
    twin.set_weights(model.get_weights())
    with hvp.HessianOperator(lambda x: tf.reduce_mean(twin(x) ** 2), twin, (x,)) as H:
        unit = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}[policy]
        assert relative_error(dense, H.to_dense()) <= 4 * unit


def test_legacy_keras_model():
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(4, "tanh", input_shape=(3,)), tf_keras.layers.Dense(2)]
    )
    x = random(0, 6, 3)

    def loss(x):
        return tf.reduce_mean(model(x) ** 2)

    problem = Problem(loss, model, (x,))
    with operator(problem) as H:
        assert relative_error(H.to_dense(), jacobian_of_gradient(problem)) <= 1e-5


def test_a_module_and_a_layer_stand_for_their_trainable_variables():
    class Square(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable([1.0, 2.0])
            self.frozen = tf.Variable(3.0, trainable=False)

    module = Square()
    with hvp.HessianOperator(lambda: tf.reduce_sum(module.w**3) * module.frozen, module) as H:
        np.testing.assert_allclose(H.to_dense(), np.diag([18.0, 36.0]))

    first, second = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
    x = random(0, 5, 2)
    second(first(x))
    problem = Problem(lambda: tf.reduce_mean(second(first(x)) ** 2), [first, second])
    with operator(problem) as H:
        assert H.shape == (13, 13)
        ones = [[tf.ones((2, 3)), tf.ones(3)], [tf.ones((3, 1)), tf.ones(1)]]
        product = H.product(ones)
        assert [[t.shape for t in layer] for layer in product] == [[(2, 3), (3,)], [(3, 1), (1,)]]


def test_data_as_a_dict_and_nested():
    w = tf.Variable([1.0, 2.0])
    x, y = random(0, 5, 2), random(1, 5)

    def loss(x, y):
        return tf.reduce_mean((tf.linalg.matvec(x["features"], w) - y) ** 2)

    want = 2 * x.T @ x / 5
    for data in ({"y": y, "x": {"features": x}}, ({"features": x}, y)):
        with hvp.HessianOperator(loss, w, data) as H:
            np.testing.assert_allclose(H.to_dense(), want, rtol=1e-5)


def test_zero_blocks_are_zeros():
    used, unused = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(used**2), [used, unused]) as H:
        np.testing.assert_array_equal(H.to_dense(), np.diag([2.0, 2.0, 0.0]))
        np.testing.assert_array_equal(H.gradient, [2, 4, 0])
    with hvp.HessianOperator(lambda: 3 * used[0] - used[1], used) as H:
        np.testing.assert_array_equal(H.to_dense(), np.zeros((2, 2)))
    with hvp.HessianOperator(lambda: tf.reduce_sum(used) * unused[0], [used, unused]) as H:
        np.testing.assert_array_equal(H.to_dense(), [[0, 0, 1], [0, 0, 1], [1, 1, 0]])


def test_damping_adds_to_the_diagonal():
    problem = mlp("float64")
    with operator(problem) as H, operator(problem, damping=0.5) as damped:
        dense = H.to_dense()
        np.testing.assert_allclose(damped.to_dense(), dense + 0.5 * np.eye(len(dense)), rtol=1e-12)
        twice = damped.damped(0.25)
        assert twice.damping == 0.75
        v = random(0, len(dense), dtype="float64")
        np.testing.assert_allclose(twice @ v, dense @ v + 0.75 * v, rtol=1e-12)
        # Over the same evaluation: nothing new was evaluated, and counts are shared.
        assert twice.stats.gradient_evaluations == 1
        assert twice.stats.products == damped.stats.products
        nest = twice.product(H.unflatten(tf.constant(v)))
        np.testing.assert_allclose(H.flatten(nest), twice @ v, rtol=1e-12)
        np.testing.assert_array_equal(damped.gradient, H.gradient)


def test_one_shot_looks_at_v_before_any_work():
    w, calls = tf.Variable([1.0, 2.0, 3.0]), []

    def loss():
        calls.append(1)
        return tf.reduce_sum(w**4)

    for v in (np.ones(2), np.array([1, np.nan, 2]), tf.ones(2), [tf.ones(3)], None, "v"):
        with pytest.raises(hvp.InvalidVectorError):
            hvp.hessian_vector_product(loss, w, v)
    assert not calls


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize(
    ("parameters", "data", "said"),
    [
        (1, (np.ones(4), np.ones(4)), r"loss\(a\) is called with data of 2 elements\."),
        (2, (np.ones(4),), r"loss\(a, b\) is called with data of 1 element\."),
        (2, {"a": np.ones(4), "c": np.ones(4)}, "called with data for a, c"),
        (1, None, "called with no data"),
    ],
)
def test_data_that_the_loss_does_not_take(engine, batch_size, parameters, data, said):
    w, calls = tf.Variable(1.0), []

    def of_one(a):
        calls.append(a)
        return w**2

    def of_two(a: Any, b: Any) -> Any:
        calls.extend([a, b])
        return w**2

    loss = {1: of_one, 2: of_two}[parameters]
    loss.__name__ = "loss"
    options = {"batch_size": batch_size} if data is not None else {}
    for given in (loss, tf.function(loss)):
        with pytest.raises(hvp.InvalidDataError, match=said):
            hvp.HessianOperator(given, w, data, engine=engine, **options)
    assert not calls


def test_a_type_error_in_a_loss_stays_one():
    w = tf.Variable(1.0)
    with pytest.raises(TypeError, match="has no len"):
        hvp.HessianOperator(lambda x: w**2 * len(3), w, (np.ones(4, "float32"),))


def test_one_shot_answers_in_the_form_of_v():
    problem = rosenbrock("float64")
    w, v = problem.variables.numpy(), random(0, 10, dtype="float64")
    want = rosen_hess_prod(w, v)
    for vector, kind in ((v, np.ndarray), (tf.constant(v), tf.Tensor)):
        got = hvp.hessian_vector_product(problem.loss, problem.variables, vector)
        assert isinstance(got, kind)
        assert relative_error(got, want) <= 1e-12
    (got,) = hvp.hessian_vector_product(problem.loss, [problem.variables], [tf.constant(v)])
    assert relative_error(got, want) <= 1e-12
    X = random(1, 4, 10, dtype="float64")
    got = hvp.hessian_vector_product(
        lambda X: tf.reduce_mean(tf.linalg.matvec(X, problem.variables) ** 2),
        problem.variables,
        v,
        (X,),
    )
    assert relative_error(got, X.T @ (X @ v) / 2) <= 1e-12
