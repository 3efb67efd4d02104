"""K-FAC and EK-FAC as matrices: closed forms, batches, inverses, samples, errors."""

import keras
import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf
from keras import layers
from scipy.sparse.linalg import cg

import hvp
from tests.cases import long, random
from tests.kronecker.test_layers import cross_entropy, problem


def half_squares(predictions, y):
    return tf.reduce_mean(tf.reduce_sum((predictions - y) ** 2, axis=-1)) / 2


def linear(depth, width=3, seed=0):
    random = np.random.default_rng(seed)
    weights = [
        tf.Variable(random.standard_normal((width, width)), name=f"w{i}") for i in range(depth)
    ]

    def model(x):
        for w in weights:
            x = x @ w
        return x

    return model, weights


def data_of(count, width=3, seed=1):
    random = np.random.default_rng(seed)
    return random.standard_normal((count, width)), random.standard_normal((count, width))


def test_one_layer_and_one_example():
    model, weights = linear(1)
    x, y = data_of(1)
    expected = np.kron(np.outer(x[0], x[0]), np.eye(3))
    for kind in (hvp.KFAC, hvp.EKFAC):
        np.testing.assert_allclose(
            kind(model, half_squares, weights, (x, y)).to_dense(), expected, atol=1e-12
        )


def test_the_last_layer_with_square_loss():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(3)])
    model.compile(loss="mse")
    x, y = (a.astype("float32") for a in data_of(9))
    K = hvp.KFAC.from_keras(model, (x, y))
    G = hvp.GaussNewtonOperator.from_keras(model, (x, y))
    last = model.layers[-1]
    np.testing.assert_allclose(K.block(last).to_dense(), G.block(last).to_dense(), atol=1e-6)


def test_deep_linear_networks():
    """The gradients do not depend on the data, so that each block is a Kronecker product."""
    model, weights = linear(3)
    data = data_of(11)
    K = hvp.KFAC(model, half_squares, weights, data)
    G = hvp.GaussNewtonOperator(model, half_squares, weights, data)
    for weight in weights:
        np.testing.assert_allclose(
            K.block(weight).to_dense(), G.block(weight).to_dense(), rtol=1e-10, atol=1e-10
        )


def test_factors_by_hand():
    model, (x, y) = problem("dense")
    K = hvp.KFAC(model, cross_entropy, model, (x, y), fisher="empirical")
    first, second = model.layers[0], model.layers[-1]
    one = np.ones((len(x), 1))
    hidden = np.tanh(x @ first.kernel.numpy() + first.bias.numpy())
    logits = hidden @ second.kernel.numpy() + second.bias.numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    g2 = p - np.eye(3)[y]
    g1 = (g2 @ second.kernel.numpy().T) * (1 - hidden**2)
    for layer, a, g in ((first, x, g1), (second, hidden, g2)):
        A, G = K.factors[layer.kernel.path]
        rows = np.concatenate([a, one], axis=1)
        np.testing.assert_allclose(A[0], rows.T @ rows / len(x), atol=1e-6)
        np.testing.assert_allclose(G[0], g.T @ g / len(x), atol=1e-6)


def test_reduce_by_hand():
    kernel = tf.Variable(np.random.default_rng(0).standard_normal((3, 2)), name="kernel")
    random = np.random.default_rng(1)
    x, y = random.standard_normal((5, 4, 3)), random.standard_normal((5, 2))
    K = hvp.KFAC(
        lambda x: tf.reduce_sum(x @ kernel, axis=1), half_squares, kernel, (x, y), sharing="reduce"
    )
    mean = x.mean(axis=1)
    # The gradient in each of the four positions is that of their sum.
    expected = np.kron(mean.T @ mean / 5, 16 * np.eye(2))
    np.testing.assert_allclose(K.to_dense(), expected, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dense", hvp.KFAC),
        ("groups", hvp.EKFAC),
        *(long(name, kind) for name in ("attention", "LSTM") for kind in (hvp.KFAC, hvp.EKFAC)),
    ],
)
@pytest.mark.few(1)
@pytest.mark.long
def test_averages_over_batches_and_devices_are_exact(name, kind):
    model, data = problem(name)
    options = {"likelihood": "categorical"}
    whole = kind(model, cross_entropy, model, data, **options)
    random = np.random.default_rng(0)
    X = random.standard_normal((whole.shape[0], 3)).astype("float32")
    batches = [tuple(a[i:j] for a in data) for i, j in ((0, 3), (3, 4), (4, 7))]
    for other in (
        kind(model, cross_entropy, model, batches, **options),
        kind(model, cross_entropy, model, data, batch_size=2, **options),
        kind(model, cross_entropy, model, data, devices=["CPU:0"], batch_size=3, **options),
    ):
        np.testing.assert_allclose(other @ X, whole @ X, atol=1e-4 * np.abs(whole @ X).max())
        assert other.value == pytest.approx(whole.value, rel=1e-5)


@pytest.mark.few(0)
def test_batches_of_many_sizes_and_a_limit_on_memory():
    model, data = problem("strides")
    options = {"likelihood": "categorical"}
    whole = hvp.EKFAC(model, cross_entropy, model, data, **options)
    more = tuple(np.concatenate([a] * 3) for a in data)
    ends = np.cumsum([0, 1, 2, 3, 4, 5, 6])
    batches = [tuple(a[i:j] for a in more) for i, j in zip(ends, ends[1:])]
    for other in (
        hvp.EKFAC(model, cross_entropy, model, batches, **options),
        hvp.EKFAC(model, cross_entropy, model, more, memory_limit="400 KB", **options),
    ):
        np.testing.assert_allclose(other.trace, whole.trace, rtol=1e-5)
        X = np.eye(whole.shape[0], 5, dtype="float32")
        np.testing.assert_allclose(other @ X, whole @ X, atol=1e-4 * np.abs(whole @ X).max())


@pytest.mark.parametrize("fisher", [long("type-2")])
def test_batches_on_workers(fisher):
    model, data = problem("dense")
    options = {"likelihood": "categorical", "batch_size": 2, "fisher": fisher}
    whole = hvp.EKFAC(model, cross_entropy, model, data, **options)
    with hvp.Cluster(2) as cluster:
        other = hvp.EKFAC(model, cross_entropy, model, data, devices=cluster.devices, **options)
    np.testing.assert_allclose(other.trace, whole.trace, rtol=1e-5)


def two_outputs():
    x = keras.Input((5,))
    h = layers.Dense(4, "tanh")(x)
    model = keras.Model(x, [layers.Dense(3)(h), layers.Dense(1)(h)])
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    model.compile(loss=losses, loss_weights=[1.0, 0.5])
    random = np.random.default_rng(0)
    x, y = random.standard_normal((9, 5)), random.standard_normal((9, 1))
    return model, (x.astype("float32"), [random.integers(0, 3, 9), y.astype("float32")])


def sample_weights():
    model, (x, y) = problem("dense")
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (x, y, np.linspace(0.5, 2, len(x), dtype="float32"))


def probabilities():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])
    model.compile(loss="sparse_categorical_crossentropy")
    return model, problem("dense")[1]


def mixed_precision():
    policy = keras.mixed_precision.DTypePolicy("mixed_bfloat16")
    parts = [layers.Dense(8, "tanh", dtype=policy), layers.Dense(3, dtype="float32")]
    model = keras.Sequential([keras.Input((5,)), *parts])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, problem("dense")[1]


@pytest.mark.parametrize(
    "build", [two_outputs, sample_weights, probabilities, mixed_precision], ids=lambda f: f.__name__
)
@pytest.mark.few(1)
def test_keras_models(build):
    keras.utils.set_random_seed(0)
    model, data = build()
    E = hvp.EKFAC.from_keras(model, data)
    G = hvp.GaussNewtonOperator.from_keras(model, data)
    tolerance = 1e-2 if build is mixed_precision else 1e-5
    assert E.trace == pytest.approx(np.trace(G.to_dense()), rel=tolerance)


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.few(1)
def test_a_loss_that_divides_by_something_else(fisher, batch_size):
    random = np.random.default_rng(0)
    kernel = tf.Variable(random.standard_normal((3, 2)), name="kernel")
    x, y, counts = random.standard_normal((7, 3)), random.standard_normal((7, 2)), np.arange(1.0, 8)

    def weighted(predictions, y, counts):
        squares = tf.reduce_sum((predictions - y) ** 2, axis=1) / 2
        return tf.reduce_sum(counts * squares) / tf.reduce_sum(counts)

    def model(x):
        return tf.tanh(x @ kernel)

    options = {"weight": lambda x, y, counts: tf.reduce_sum(counts), "batch_size": batch_size}
    data = x, y, counts
    E = hvp.EKFAC(model, weighted, kernel, data, fisher=fisher, **options)
    if fisher == "type-2":
        F = hvp.GaussNewtonOperator(model, weighted, kernel, data, **options)
    else:
        F = hvp.FisherOperator(model, weighted, kernel, data, kind="empirical", **options)
    assert E.trace == pytest.approx(np.trace(F.to_dense()), rel=1e-9)


@pytest.mark.long
def test_several_predictions_of_an_example():
    """Random signs make the products of different predictions zero on average."""
    random = np.random.default_rng(0)
    kernel = tf.Variable(random.standard_normal((2, 3)), name="kernel")
    x, y = (random.standard_normal((20, 4, size)) for size in (2, 3))
    data = x, y

    def model(x):
        return tf.cumsum(x @ kernel, axis=1)

    options = {"likelihood": "gaussian"}
    exact = np.trace(hvp.FisherOperator(model, half_squares, kernel, data, **options).to_dense())
    few, many = (
        hvp.EKFAC(model, half_squares, kernel, data, samples=n, **options).trace for n in (1, 300)
    )
    assert few == pytest.approx(exact, rel=0.5)
    assert many == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("transposed", hvp.EKFAC),
        ("depthwise", hvp.KFAC),
        *(
            long(name, kind)
            for name in ("attention", "embedding")
            for kind in (hvp.KFAC, hvp.EKFAC)
        ),
    ],
)
@pytest.mark.few(1)
def test_inverses_square_roots_and_determinants(name, kind):
    model, data = problem(name)
    K = kind(model, cross_entropy, model, data, likelihood="categorical")
    dense = K.to_dense().astype(np.float64)
    np.testing.assert_allclose(dense, dense.T, atol=1e-5 * np.abs(dense).max())
    damping = 0.1
    damped = dense + damping * np.eye(len(dense))
    inverse = K.inverse(damping)
    np.testing.assert_allclose(inverse.to_dense() @ damped, np.eye(len(dense)), atol=1e-4)
    root = K.sqrt(damping).to_dense()
    np.testing.assert_allclose(root @ root, damped, atol=1e-4 * np.abs(damped).max())
    values = np.linalg.eigvalsh(damped)
    np.testing.assert_allclose(K.damped(damping).eigenvalues, values, atol=1e-4 * values.max())
    assert K.damped(damping).logdet == pytest.approx(np.log(values).sum(), rel=1e-3)
    assert K.trace == pytest.approx(np.trace(dense), rel=1e-5)
    assert hvp.trace(K).estimate == pytest.approx(np.trace(dense), rel=0.05)
    nest = [tf.ones(v.shape) for v in model.trainable_variables]
    flat = np.concatenate([part.numpy().reshape(-1) for part in K.product(nest)])
    np.testing.assert_allclose(flat, dense.sum(axis=1), atol=1e-4 * np.abs(dense).max())
    np.testing.assert_allclose(
        K.product(tf.ones(len(dense))), flat, atol=1e-6 + 1e-4 * np.abs(flat).max()
    )


def test_samples_have_the_covariance_of_the_inverse():
    model, data = problem("dense")
    K = hvp.KFAC(model, cross_entropy, model, data, likelihood="categorical")
    samples = K.sample(40_000, damping=0.3, examples=4, seed=1).astype(np.float64)
    expected = K.inverse(0.3).to_dense() / 4
    covariance = samples @ samples.T / samples.shape[1]
    # The standard error of an entry of a covariance is sqrt((c_ii c_jj + c_ij^2) / count).
    diagonal = np.diag(expected)
    error = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / samples.shape[1])
    assert np.abs((covariance - expected) / error).max() < 5


def test_as_a_preconditioner_and_in_a_solve():
    model, data = problem("dense")
    G = hvp.GaussNewtonOperator(model, cross_entropy, model, data, damping=1e-2)
    K = hvp.KFAC(model, cross_entropy, model, data)
    b = np.random.default_rng(0).standard_normal(G.shape[0]).astype("float32")
    expected = scipy.linalg.solve(G.to_dense().astype(np.float64), b)
    x, info = cg(G, b, M=K.inverse(1e-2), rtol=1e-5)
    assert info == 0
    np.testing.assert_allclose(x, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("kind", [hvp.KFAC, hvp.EKFAC])
@pytest.mark.few(1)
def test_refresh_and_exponential_averages(kind):
    model, data = problem("dense")
    K = kind(model, cross_entropy, model, data, fisher="empirical")
    before = K.factors
    for weight in model.trainable_variables:
        weight.assign(weight * 1.5)
    fresh = kind(model, cross_entropy, model, data, fisher="empirical")
    K.refresh(decay=0.25)
    for name, (A, G) in K.factors.items():
        for mean, old, new in zip((A, G), before[name], fresh.factors[name]):
            np.testing.assert_allclose(mean, 0.25 * old + 0.75 * new, atol=1e-5)
    K.refresh()
    np.testing.assert_allclose(K.to_dense(), fresh.to_dense(), atol=1e-5)
    with pytest.raises(hvp.HvpError, match="The argument decay is"):
        K.refresh(decay=1.5)
    np.testing.assert_allclose(K.to_dense(), fresh.to_dense(), atol=1e-5)


@pytest.mark.long
def test_the_distance_from_the_true_blocks():
    model, data = problem("strides")
    K = hvp.KFAC(model, cross_entropy, model, data, likelihood="categorical")
    F = hvp.FisherOperator(model, cross_entropy, model, data, likelihood="categorical").to_dense()
    estimated = K.distance(200, seed=3)
    dense, places = K.to_dense(), 0
    for block in K.blocks:
        own = slice(places, places + int(np.prod(block.shape)))
        places = own.stop
        exact = np.linalg.norm(dense[own, own] - F[own, own]) / np.linalg.norm(F[own, own])
        assert estimated[block.names[0]] == pytest.approx(exact, rel=0.2)


def test_large_factors_are_diagonals():
    model, data = problem("dense")
    K = hvp.KFAC(model, cross_entropy, model, data, likelihood="categorical", largest=4)
    whole = hvp.KFAC(model, cross_entropy, model, data, likelihood="categorical")
    name = model.layers[0].kernel.path
    A, G = K.factors[name]
    assert (A.shape, G.shape) == ((1, 6), (1, 4, 4))
    np.testing.assert_allclose(A[0], np.diag(whole.factors[name][0][0]), atol=1e-6)
    np.testing.assert_allclose(K.to_dense()[:4, :4], A[0, 0] * G[0], atol=1e-6)


def test_gauss_newton_of_any_convex_loss():
    model, weights = linear(1)
    data = data_of(6)

    def pseudo_huber(predictions, y):
        return tf.reduce_mean(tf.reduce_sum(tf.sqrt(1 + (predictions - y) ** 2), axis=-1))

    E = hvp.EKFAC(model, pseudo_huber, weights, data)
    G = hvp.GaussNewtonOperator(model, pseudo_huber, weights, data).to_dense()
    assert E.trace == pytest.approx(np.trace(G), rel=1e-9)

    def concave(predictions, y):
        return tf.reduce_mean(tf.reduce_sum(-((predictions - y) ** 2), axis=-1))

    with pytest.raises(hvp.InvalidLossError, match="not convex"):
        hvp.KFAC(model, concave, weights, data)


def test_singular_matrices_have_no_inverse():
    model, weights = linear(1)
    K = hvp.KFAC(model, half_squares, weights, data_of(1))
    with pytest.raises(hvp.HvpError, match="singular up to rounding") as caught:
        K.inverse()
    damping = float(caught.value.remedy.rpartition("> ")[2])
    K.inverse(2 * damping)
    with pytest.raises(hvp.HvpError, match="not negative"):
        K.inverse(-1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fisher": "exact"}, "The argument fisher is 'exact'"),
        ({"sharing": "mean"}, "The argument sharing is 'mean'"),
        ({"fisher": "monte-carlo"}, "The argument likelihood is None"),
        ({"fisher": "empirical", "likelihood": "gaussian"}, "A likelihood is passed"),
        ({"largest": -1}, "The argument largest is -1"),
        ({"damping": 1.0}, "no argument damping.*damped"),
        ({"likelihood": "categorical"}, "not a positive multiple of the Fisher matrix"),
    ],
)
def test_bad_arguments(options, message):
    model, weights = linear(1)
    with pytest.raises(hvp.HvpError, match=message):
        hvp.KFAC(model, half_squares, weights, data_of(4), **options)


@pytest.mark.few(0)
def test_many_classes_are_drawn_from():
    """One target for each prediction, where a backward pass for each class would take too long."""
    x = random(0, 12, 4)
    for classes, fisher in ((65, "monte-carlo"), (64, "type-2")):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(classes)])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        y = np.arange(12) % classes
        assert hvp.EKFAC.from_keras(model, (x, y)).fisher == fisher
        assert hvp.KFAC.from_keras(model, (x, y), fisher="type-2").fisher == "type-2"


@pytest.mark.parametrize("kind", [hvp.KFAC, hvp.EKFAC])
@pytest.mark.few(1)
def test_regularizers_are_added_to_the_blocks(kind):
    """Exact where a penalty is the same for all weights of a block; its mean elsewhere."""
    both = {"kernel_regularizer": "l2", "bias_regularizer": "l2"}
    first, second = layers.Dense(4, "tanh", **both), layers.Dense(3, kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((5,)), first, second])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = problem("dense")[1]
    K = kind.from_keras(model, data)
    plain = kind(model, cross_entropy, model, data)
    added = np.diag(K.to_dense() - plain.to_dense())
    mean = 0.02 * 12 / 15  # the second bias has no penalty
    np.testing.assert_allclose(added, [0.02] * 24 + [mean] * 15, rtol=1e-2)
    # The distance is from the matrix with the penalty.
    true = hvp.GaussNewtonOperator.from_keras(model, data).to_dense()[:24, :24]
    error = np.linalg.norm(K.to_dense()[:24, :24] - true) / np.linalg.norm(true)
    assert next(iter(K.distance(200).values())) == pytest.approx(error, rel=0.2)


def test_changed_weights():
    model, data = problem("dense")
    K = hvp.KFAC(model, cross_entropy, model, data)
    parts = K.unflatten(np.arange(K.shape[0], dtype="float32"))
    np.testing.assert_array_equal(K.flatten(parts), np.arange(K.shape[0]))
    model.layers[0].kernel.assign(2 * model.layers[0].kernel)
    assert "stale" in repr(K)
    inverse = None
    for use in (K.to_dense, K.distance, K.inverse, lambda: K.product(tf.zeros(K.shape[0]))):
        with pytest.raises(hvp.StaleOperatorError, match="call refresh"):
            inverse = use()
    assert inverse is None
    K.refresh()
    K.distance(2)


@pytest.mark.parametrize("jit_compile", [None, True])
@pytest.mark.parametrize("kind", [hvp.KFAC, hvp.EKFAC])
@pytest.mark.few(1)
@pytest.mark.long
def test_what_is_made_from_a_matrix_follows_it(kind, jit_compile):
    """After a refresh, eagerly and in functions that were traced before; and stale before it."""
    model, data = problem("dense")
    K = kind(model, cross_entropy, model, data)
    first = model.layers[0]
    made = {
        "inverse": lambda K: K.inverse(0.1),
        "root of the inverse": lambda K: K.inverse(0.1).sqrt(),
        "damped": lambda K: K.damped(0.3),
        "block": lambda K: K.block(first).inverse(0.2),
    }
    operators = {name: make(K) for name, make in made.items()}
    functions = {
        name: tf.function(lambda v, A=A: A.product(v), jit_compile=jit_compile)
        for name, A in operators.items()
    }
    vectors = {name: tf.constant(random(1, A.shape[0])) for name, A in operators.items()}
    before = {name: functions[name](vectors[name]).numpy() for name in made}
    for variable in model.trainable_variables:
        variable.assign(3 * variable + 0.1)
    for name, A in operators.items():
        with pytest.raises(hvp.StaleOperatorError):
            A @ vectors[name].numpy()
        if jit_compile:
            assert np.isnan(functions[name](vectors[name])).all()
        else:
            with pytest.raises(tf.errors.OpError, match="call refresh"):
                functions[name](vectors[name])
    K.refresh()
    fresh = kind(model, cross_entropy, model, data)
    for name, make in made.items():
        want = make(fresh) @ vectors[name].numpy()
        scale = np.abs(want).max()
        np.testing.assert_allclose(operators[name] @ vectors[name].numpy(), want, atol=1e-4 * scale)
        np.testing.assert_allclose(functions[name](vectors[name]), want, atol=1e-4 * scale)
        assert np.abs(before[name] - want).max() > 1e-2 * scale


@pytest.mark.long
def test_the_factors_of_the_old_values_if_asked_for():
    model, data = problem("dense")
    K = hvp.KFAC(model, cross_entropy, model, data, on_stale="ignore")
    follows = hvp.KFAC(model, cross_entropy, model, data, on_stale="refresh").inverse(0.1)
    inverse, v = K.inverse(0.1), random(2, K.shape[0])
    old = inverse @ v
    model.layers[0].kernel.assign(2 * model.layers[0].kernel)
    np.testing.assert_array_equal(inverse @ v, old)
    new = hvp.KFAC(model, cross_entropy, model, data).inverse(0.1) @ v
    np.testing.assert_allclose(follows @ v, new, atol=1e-4 * np.abs(new).max())
    with pytest.raises(hvp.HvpError, match="on_stale is 'never'"):
        hvp.KFAC(model, cross_entropy, model, data, on_stale="never")


def test_no_examples():
    model, weights = linear(1)
    with pytest.raises(hvp.InvalidDataError, match="no examples"):
        hvp.KFAC(model, half_squares, weights, data_of(0))
    with pytest.raises(hvp.InvalidDataError, match="no data"):
        hvp.KFAC(model, half_squares, weights, None)


def test_models_that_cannot_be_traced():
    w = tf.Variable(np.eye(3))

    def model(x):
        return tf.constant(x.numpy()) @ w

    with pytest.raises(hvp.HvpError, match="cannot be traced"):
        hvp.KFAC(model, half_squares, w, data_of(4))


def test_blocks_of_variables():
    model, data = problem("dense")
    K = hvp.KFAC(model, cross_entropy, model, data)
    size = 5 * 4 + 4
    np.testing.assert_allclose(K.block("dense*").to_dense(), K.to_dense(), atol=1e-7)
    first = K.block(model.layers[0])
    np.testing.assert_allclose(first.to_dense(), K.to_dense()[:size, :size], atol=1e-7)
    with pytest.raises(hvp.HvpError, match="share a block"):
        K.block(model.layers[0].kernel)


def test_what_was_computed_from_other_factors_is_refused_or_updated():
    model, weights = linear(1)
    K = hvp.KFAC(model, half_squares, weights, data_of(9))
    inverse, solver = hvp.ExactInverse(K, damping=0.5), hvp.Solver(K)
    b = random(2, K.shape[0], 4, dtype="float64")
    solver.solve(b, method="block_cg", damping=0.5)
    np.testing.assert_allclose(inverse @ b, np.linalg.solve(K.damped(0.5).to_dense(), b))
    K.refresh()
    with pytest.raises(hvp.StaleOperatorError, match="evaluated again"):
        inverse @ b
    x = solver.solve(b, method="block_cg", damping=0.5, rtol=1e-10).x
    np.testing.assert_allclose(x, np.linalg.solve(K.damped(0.5).to_dense(), b))


def test_blocks_of_variables_without_names_of_their_own():
    first, second = (tf.Variable(random(i, 3, 3, dtype="float64")) for i in range(2))
    K = hvp.KFAC(lambda x: tf.tanh(x @ first) @ second, half_squares, [first, second], data_of(5))
    assert len(K.factors) == 2
    for place, variable in enumerate((first, second)):
        own = slice(9 * place, 9 * place + 9)
        block = K.block(variable)
        np.testing.assert_allclose(block.to_dense(), K.to_dense()[own, own], atol=1e-7)


@pytest.mark.parametrize("likelihood", [None, "categorical"])
def test_data_that_cannot_be_used_are_refused(likelihood):
    """Also where the classes are counted first, to choose the matrix."""
    w = tf.Variable(np.ones((3, 3)))
    x, y = np.ones((4, 3)), np.zeros(4, int)

    def output_loss(p, y):
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=p))

    for data in ([], 5, [x], x, (x[:0], y[:0]), (x.tolist(), y.tolist()), ("a", y), iter([(x, y)])):
        with pytest.raises(hvp.InvalidDataError):
            hvp.KFAC(lambda x: x @ w, output_loss, w, data, likelihood=likelihood)
    with pytest.raises(hvp.HvpError, match="2"):
        hvp.KFAC(lambda x: x @ w, output_loss, w, (x[:, :2], y), likelihood=likelihood)


@pytest.mark.long
def test_factors_precondition_inside_the_graph_of_a_solver(monkeypatch):
    """Without a product of arrays for each iteration."""
    model, data = problem("dense")
    G = hvp.GaussNewtonOperator(model, cross_entropy, model, data)
    inverse = hvp.KFAC(model, cross_entropy, model, data).inverse(0.1)
    b = random(1, G.shape[0])
    want = np.linalg.solve(G.to_dense() + 0.1 * np.eye(len(b)), b)

    def refuse(*_):
        raise AssertionError("a product of arrays")

    monkeypatch.setattr(hvp.FactoredOperator, "matvec", refuse)
    monkeypatch.setattr(hvp.FactoredOperator, "matmat", refuse)
    result = hvp.solve(G, b, damping=0.1, M=inverse, method="cg", rtol=1e-6)
    assert result.converged
    np.testing.assert_allclose(result.x, want, atol=1e-4 * np.abs(want).max())
    plain = hvp.solve(G, b, damping=0.1, M=None, method="cg", rtol=1e-6)
    assert result.iterations != plain.iterations  # it is used


def test_noise_behind_the_weights_does_not_count():
    """The curvature of a mean square does not depend on it, and neither do the factors."""
    (w,), (x, y) = linear(1)[1], data_of(6)
    numbers = tf.random.Generator.from_seed(0)

    def noisy(x):
        return x @ w + numbers.normal([x.shape[0], 3], dtype=tf.float64)

    plain, found = (
        hvp.KFAC(model, half_squares, w, (x, y)).to_dense() for model in (lambda x: x @ w, noisy)
    )
    np.testing.assert_allclose(found, plain, atol=1e-12)


@pytest.mark.parametrize("last", [False, True])
def test_normalization_over_a_batch_is_refused_and_leaves_the_model_as_it_was(last):
    keras.utils.set_random_seed(0)
    normalization = layers.BatchNormalization()
    behind = [] if last else [layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "tanh"), normalization, *behind])
    model.compile(loss="mse")
    data = random(0, 6, 3).astype("float32"), random(1, 6, 2).astype("float32")
    before = [np.array(weight) for weight in model.get_weights()]
    what = "predictions do not belong" if last else "kernel' does not belong"
    for fisher in (None, "empirical"):
        with pytest.raises(hvp.HvpError, match=what):
            hvp.KFAC.from_keras(model, data, training=True, fisher=fisher)
    for weight, earlier in zip(model.get_weights(), before):
        np.testing.assert_array_equal(weight, earlier)


def test_the_number_of_predictions_may_be_unknown_for_a_single_example():
    w = tf.Variable(random(2, 4, 3, dtype="float64"))
    x, y = random(0, 8, 4, dtype="float64"), random(1, 8, 3, dtype="float64")

    def model(x):
        rows = tf.boolean_mask(x @ w, tf.reduce_all(x == x, axis=1))
        return rows + tf.zeros_like(x[:, :1])  # of shape (2, 3), but (None, 3) for one example

    plain, found = (
        hvp.KFAC(f, half_squares, w, (x, y)).to_dense() for f in (lambda x: x @ w, model)
    )
    np.testing.assert_allclose(found, plain, atol=1e-12)
