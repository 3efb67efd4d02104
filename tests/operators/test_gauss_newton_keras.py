"""Gauss-Newton and Fisher matrices of compiled models, and what is asked of output losses."""

import keras
import numpy as np
import pytest
import scipy.special
import tensorflow as tf

import hvp
from tests import memory
from tests.cases import Problem, crossed, dense_hessian, random, relative_error
from tests.operators.test_gauss_newton import WAYS, make, softmax_curvature, softmax_loss

layers = keras.layers


@pytest.fixture(autouse=True)
def _double_precision():
    """Let the compiled losses compute in float64."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


def options_of(way, build):
    """Return the options of one of `WAYS`; a limit is such that one batch of four is kept."""
    options = dict(WAYS[way])
    if "memory_limit" in options:
        with build(batch_size=2) as G:
            options["memory_limit"] = int(4.6 * G.stats.residual_bytes / 4)
    return options


def jacobian(function, variables):
    """The Jacobian of each example, of shape `(examples, predictions, n)`."""
    with tf.GradientTape(persistent=True) as tape:
        predictions = function()
    blocks = tape.jacobian(predictions, variables, experimental_use_pfor=False)
    rows, count = predictions.shape[0], int(np.prod(predictions.shape[1:]))
    parts = []
    for block, variable in zip(blocks, variables):
        size = int(np.prod(variable.shape))
        block = np.zeros((rows, count, size)) if block is None else block.numpy()
        parts.append(block.reshape(rows, count, size))
    return np.concatenate(parts, axis=-1)


def assign(model):
    for index, weight in enumerate(model.trainable_variables):
        weight.assign(random(index, *weight.shape, dtype="float64", scale=0.7))


def two_heads():
    x = keras.Input((4,))
    h = layers.Dense(5, "tanh", kernel_regularizer=keras.regularizers.L2(0.125))(x)
    ends = {
        "classes": layers.Dense(3, "softmax", name="classes")(h),
        "coins": layers.Dense(2, "sigmoid", name="coins")(h),
    }
    model = keras.Model(x, ends)
    model.compile(
        loss={"classes": "sparse_categorical_crossentropy", "coins": "binary_crossentropy"},
        loss_weights={"classes": 0.7, "coins": 2.0},
    )
    assign(model)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_two_heads_with_sample_weights_and_regularizers(way):
    model = two_heads()
    x, s = random(9, 7, 4, dtype="float64"), np.abs(random(8, 7, dtype="float64"))
    y = {"classes": np.arange(7) % 3, "coins": (np.arange(14).reshape(7, 2) % 3 == 0) + 0.0}
    data = x, y, {"classes": s, "coins": s}

    hidden, classes, coins = model.layers[1:]

    def h():
        return tf.tanh(tf.constant(x) @ hidden.kernel + hidden.bias)

    logits = [lambda end=end: h() @ end.kernel + end.bias for end in (classes, coins)]
    variables = [v.value for v in model.trainable_variables]
    J, K = (jacobian(function, variables) for function in logits)
    p = 1 / (1 + np.exp(-logits[1]().numpy()))
    want = np.zeros((J.shape[-1],) * 2)
    for i in range(7):
        want += 0.7 * s[i] / 7 * J[i].T @ softmax_curvature(logits[0]().numpy()[i]) @ J[i]
        want += 2.0 * s[i] / 7 * K[i].T @ np.diag(p[i] * (1 - p[i]) / 2) @ K[i]
    want[:20, :20] += 2 * 0.125 * np.eye(20)  # of the kernel of the first layer

    def build(**options):
        return hvp.GaussNewtonOperator.from_keras(model, data, **options)

    with build(**options_of(way, build)) as G:
        assert relative_error(G.to_dense(), want) < 1e-10
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x), data[2])
        gradient = tape.gradient(loss, model.trainable_variables)
        want_gradient = np.concatenate([part.numpy().ravel() for part in gradient])
        assert relative_error(G.gradient, want_gradient) < 1e-10
        assert G.value == pytest.approx(float(loss), rel=1e-10)
    assert all(not tf.is_symbolic_tensor(t) for t in model.losses)


@pytest.mark.parametrize(("engine", "end"), crossed(["graph", "tape"], ["softmax", "sigmoid"]))
def test_a_loss_that_reads_the_activation_itself(engine, end):
    """Keras computes only cross-entropies from logits."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3, end)])
    model.compile(loss="mse")
    assign(model)
    x, y = random(1, 6, 4, dtype="float64"), random(2, 6, 3, dtype="float64")
    J = jacobian(lambda: model(x), [v.value for v in model.trainable_variables])
    want = sum(j.T @ j for j in J) * 2 / 3 / 6
    with hvp.GaussNewtonOperator.from_keras(model, (x, y), engine=engine) as G:
        assert relative_error(G.to_dense(), want) < 1e-10

    def both(p, y):
        return tf.reduce_mean(keras.losses.categorical_crossentropy(y, p) + p[:, 0] ** 2)

    if end == "softmax":
        with pytest.raises(hvp.InvalidLossError, match="both the probabilities and the logits"):
            hvp.GaussNewtonOperator(model, both, model, (x, y), engine=engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_saturated_probabilities(way):
    """Probabilities would be clipped, and their logarithms be others than Keras computes."""
    model = keras.Sequential([layers.Input((4,)), layers.Dense(3), layers.Softmax()])
    model.compile(loss="sparse_categorical_crossentropy")
    x, y = 10 * random(1, 6, 4, dtype="float64"), np.arange(6) % 3
    assign(model)
    # The logits are linear in the weights, so that the matrix is the Hessian.
    kernel, bias = (v.value for v in model.trainable_variables)

    def loss():
        return softmax_loss(x @ kernel + bias, y)

    want = dense_hessian(Problem(loss, [kernel, bias]))
    operators = hvp.GaussNewtonOperator, hvp.HessianOperator, hvp.FisherOperator
    for operator in operators:

        def build(operator=operator, **more):
            return operator.from_keras(model, (x, y), **more)

        with build(**options_of(way, build)) as G:
            assert G.value == pytest.approx(float(loss()), rel=1e-12)
            assert relative_error(G.to_dense(), want) < 1e-10, operator


@pytest.mark.few(0)
def test_masks():
    model = keras.Sequential(
        [layers.Input((4,), dtype="int32"), layers.Embedding(5, 3, mask_zero=True), layers.Dense(2)]
    )
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assign(model)
    x = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 1, 2, 3], [2, 2, 2, 0]])
    y = (x + 1) % 2
    J = jacobian(lambda: model(x), [v.value for v in model.trainable_variables])
    J, logits = J.reshape(16, 2, -1), model(x).numpy().reshape(16, 2)
    seen = (x != 0).ravel()
    want = sum(j.T @ softmax_curvature(p) @ j for j, p, m in zip(J, logits, seen) if m) / seen.sum()
    # Earlier versions of Keras divide by the number of entries plus epsilon.
    probabilities = scipy.special.softmax(logits, axis=1)[np.arange(16), y.ravel()]
    exactly = -np.log(probabilities)[seen].mean()
    plain = abs(model.compute_loss(x, y, model(x)) / exactly - 1) < 1e-12
    tolerance = 1e-10 if plain else keras.config.epsilon()
    with hvp.GaussNewtonOperator.from_keras(model, (x, y)) as G:
        assert relative_error(G.to_dense(), want) < tolerance

    def weight(x, y):
        return tf.math.count_nonzero(x)

    for options in ({"batch_size": 3}, {"batch_size": 2, "engine": "tape"}):
        with hvp.GaussNewtonOperator.from_keras(model, (x, y), weight=weight, **options) as G:
            assert relative_error(G.to_dense(), want) < tolerance
        with pytest.raises(hvp.InvalidLossError, match="mask"):
            hvp.GaussNewtonOperator.from_keras(model, (x, y), **options)


@pytest.mark.long
def test_fisher_matrices_of_compiled_models():
    model = two_heads()
    x = random(9, 7, 4, dtype="float64")
    y = {"classes": np.arange(7) % 3, "coins": (np.arange(14).reshape(7, 2) % 3 == 0) + 0.0}
    with hvp.GaussNewtonOperator.from_keras(model, (x, y)) as G:
        want = G.to_dense()
    for options in ({}, {"batch_size": 3}, {"engine": "tape"}, {"recompute": 2}):
        with hvp.FisherOperator.from_keras(model, (x, y), **options) as F:
            assert relative_error(F.to_dense(), want) < 1e-10
    drawn = {"kind": "monte-carlo", "samples": 4000}
    with hvp.FisherOperator.from_keras(model, (x, y), **drawn) as F:
        assert 0 < relative_error(F.to_dense(), want) < 0.1

    rows = []
    for i in range(7):
        with tf.GradientTape() as tape:
            one = {key: value[i : i + 1] for key, value in y.items()}
            # The batch of one has the regularizers, too; without them:
            loss = model.compute_loss(None, one, model(x[i : i + 1])) - sum(model.losses)
        parts = tape.gradient(loss, model.trainable_variables)
        rows.append(np.concatenate([part.numpy().ravel() for part in parts]))
    empirical = np.array(rows).T @ np.array(rows) / 7
    empirical[:20, :20] += 2 * 0.125 * np.eye(20)
    with hvp.FisherOperator.from_keras(model, (x, y), kind="empirical", batch_size=2) as F:
        assert relative_error(F.to_dense(), empirical) < 1e-10
    model.compile(loss={"classes": "sparse_categorical_crossentropy", "coins": "mae"})
    with pytest.raises(hvp.HvpError, match="likelihood is None"):
        hvp.FisherOperator.from_keras(model, (x, y))


def test_compiled_models_that_are_refused():
    x, y = np.ones((4, 3)), np.ones((4, 2))
    model = keras.Sequential([layers.Input((3,)), layers.Dense(2, activity_regularizer="l2")])
    with pytest.raises(hvp.InvalidLossError, match="no compiled loss"):
        hvp.GaussNewtonOperator.from_keras(model, (x, y))
    model.compile(loss="mse")
    for engine in ("graph", "tape"):
        with pytest.raises(hvp.InvalidLossError, match=r"'dense\w*' adds a loss that depends"):
            hvp.GaussNewtonOperator.from_keras(model, (x, y), engine=engine)
    with pytest.raises(hvp.HvpError, match=r"model\.fit's arguments"):
        hvp.GaussNewtonOperator.from_keras(model, (x, y), class_weight={0: 1.0})


ENGINES = pytest.mark.parametrize("engine", ["graph", "tape"])


@ENGINES
@pytest.mark.few(1)
def test_a_loss_that_is_no_mean_is_refused(engine):
    model, x, y = make("dense")

    def each(logits, labels):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)

    options = {"engine": engine}
    for more in ({}, {"batch_size": 3}):
        said = "is not a mean" if more else "is a sum over examples.*reduction='sum'"
        with pytest.raises(hvp.InvalidLossError, match=said):
            hvp.GaussNewtonOperator(
                model, lambda p, y: tf.reduce_sum(each(p, y)), model, (x, y), **options, **more
            )
    with hvp.GaussNewtonOperator(model, softmax_loss, model, (x, y), reduction="sum") as G:
        assert G.value == pytest.approx(float(tf.reduce_sum(each(model(x), y))))

    def spread(p, y):  # depends on all examples at once
        return tf.math.reduce_std(each(p, y))

    hvp.GaussNewtonOperator(model, spread, model, (x, y), **options).close()
    with pytest.raises(hvp.InvalidLossError, match="depends on no other example"):
        hvp.GaussNewtonOperator(model, spread, model, (x, y), batch_size=3, **options)
    # For all of them only.
    fixed = np.linspace(0, 1, 7)

    def whole(p, y):
        return tf.tensordot(each(p, y), tf.ensure_shape(fixed, [7]), 1)

    hvp.GaussNewtonOperator(model, whole, model, (x, y), **options).close()


@ENGINES
@pytest.mark.few(1)
@pytest.mark.long
def test_convexity_is_made_sure_of(engine):
    model, x, y = make("dense")
    huber = keras.losses.Huber(delta=np.float64(1))  # a plain number is float32 in Keras 3.0
    targets = random(3, 7, 3, dtype="float64")

    def build(loss, labels=y, **options):
        options = {"engine": engine, "convex": True, **options}
        return hvp.GaussNewtonOperator(model, loss, model, (x, labels), **options)

    cases = ((softmax_loss, y), (lambda p, y: huber(y, p), targets))
    for loss, labels in cases:
        for options in ({}, {"batch_size": 3}, {"recompute": 2}, {"jit_compile": True}):
            if options.get("jit_compile") and engine == "tape":
                continue
            with build(loss, labels, **options) as G:
                assert np.linalg.eigvalsh(G.to_dense())[0] > -1e-12

    # One example of seven has one direction in which the loss is not convex.
    def bent(p, y):
        share = tf.where(tf.equal(y, 2), tf.constant(1.2, p.dtype), tf.constant(0.8, p.dtype))
        return tf.reduce_mean(tf.reduce_sum(p**2, axis=1) - share * p[:, 0] ** 2)

    for options in ({}, {"batch_size": 4}):
        with pytest.raises(hvp.InvalidLossError, match="negative eigenvalue"):
            build(bent, **options)
    build(bent, convex=False).close()
    with pytest.raises(hvp.HvpError, match="convex is 'yes'"):
        build(softmax_loss, convex="yes")
    for weight in model.trainable_variables:  # all predictions become certain
        weight.assign(weight * 1e4)
    build(softmax_loss).close()


@ENGINES
@pytest.mark.few(1)
def test_convexity_of_many_predictions(engine):
    w = tf.Variable(random(0, 30, dtype="float64"))
    q = np.linalg.qr(random(1, 30, 30, dtype="float64"))[0]
    for lowest in (0.0, -0.01):
        B = q @ np.diag(np.r_[np.linspace(0.1, 1, 29), lowest]) @ q.T

        def loss(p, B=B):
            return tf.tensordot(p, tf.linalg.matvec(B, p), 1) / 2

        def build():
            return hvp.GaussNewtonOperator(lambda: w * 1, loss, w, convex=True, engine=engine)

        if lowest:
            with pytest.raises(hvp.InvalidLossError, match="negative eigenvalue"):
                build()
        else:
            build().close()


# What the gradient alone needs at its peak is the model's own.
VOCABULARY = """
import keras
words, tokens, width = 50_000, 300, 8
model = keras.Sequential([keras.layers.Input((width,)), keras.layers.Dense(words)])
x, y = tf.random.normal((tokens, width)), tf.random.uniform((tokens,), 0, words, tf.int32)

def loss(logits, y):
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    return tf.reduce_mean(each)

@tf.function
def gradient(x, y):
    with tf.GradientTape() as tape:
        value = loss(model(x), y)
    return tape.gradient(value, model.trainable_variables)

def matrix():
    G = hvp.GaussNewtonOperator(model, loss, model, (x, y))
    G @ np.ones(G.shape[0], "float32")
    G @ np.ones(G.shape[0], "float32")

which = {"gradient": lambda: gradient(x, y), "matrix": matrix}[%r]
before = begin_peak()
which()
print("logits", (megabytes("VmHWM") - before) * 2**20 / (4 * words * tokens))
"""


@pytest.mark.few(0)
def test_a_large_vocabulary():
    own, matrix = (
        memory.run(VOCABULARY % name, TF_NUM_INTEROP_THREADS="1")["logits"]
        for name in ("gradient", "matrix")
    )
    assert matrix < own + 4
