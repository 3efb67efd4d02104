"""Gradients kept as factors of layers, and scores of tokens."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.kronecker.test_layers import CASES, CLASSES, cross_entropy

COUNT = 5


class Identity:
    """Stands for the inverse, so that scores are products of gradients."""

    def __init__(self, operator):
        self.shape = operator.shape

    def __matmul__(self, vectors):
        return vectors


def data_of(model, count=COUNT):
    random = np.random.default_rng(0)
    shape = (count, *model.input_shape[1:])
    is_table = any(isinstance(layer, keras.layers.Embedding) for layer in model.layers)
    x = random.integers(0, 6, shape) if is_table else random.standard_normal(shape)
    y = random.integers(0, CLASSES, count).astype("int32")
    return x.astype("int32" if is_table else "float32"), y


def gradients_of(model, x, y):
    """Return the gradients of single examples by a tape, as rows."""
    rows = []
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            loss = cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        parts = tape.gradient(loss, model.trainable_variables)
        parts = [tf.convert_to_tensor(part).numpy().reshape(-1) for part in parts]
        rows.append(np.concatenate(parts))
    return np.stack(rows)


def numbers_kept(folder):
    """Return how many numbers are kept of each example."""
    return np.load(next(folder.glob("*.npy"))).shape[1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(1)
def test_scores_from_kept_factors_are_products_of_gradients(name, tmp_path, monkeypatch):
    inside.set_limit(monkeypatch, "space of factors worth keeping", np.inf)
    inside.set_limit(monkeypatch, "bytes of a shard", 500)
    keras.utils.set_random_seed(0)
    model = CASES[name][0]()
    x, y = data_of(model)

    def loss(x, y):
        return cross_entropy(model(x), y)

    influence = hvp.InfluenceFunctions(
        loss, model, (x, y), solver=Identity, gradients=tmp_path / "store"
    )
    own = gradients_of(model, x, y)
    expected = own[:2] @ own.T / COUNT
    atol = 2e-6 * np.abs(expected).max()
    np.testing.assert_allclose(influence.scores((x[:2], y[:2])), expected, atol=atol)
    description = json.loads((tmp_path / "store" / "store.json").read_text())
    assert description["form of gradients"].startswith("factors of ")


def test_gradients_of_dense_layers_take_little_space(tmp_path):
    keras.utils.set_random_seed(0)
    sizes = [keras.layers.Dense(size, "tanh") for size in (40, 30)]
    model = keras.Sequential([keras.Input((20,)), *sizes, keras.layers.Dense(CLASSES)])
    x, y = data_of(model)
    weights = model.trainable_variables

    def loss(x, y):
        return cross_entropy(model(x), y)

    influence = hvp.InfluenceFunctions(loss, model, (x, y), solver=Identity, gradients=tmp_path)
    own = gradients_of(model, x, y)
    np.testing.assert_allclose(influence.scores((x[:2], y[:2])), own[:2] @ own.T / COUNT, atol=1e-6)
    assert numbers_kept(tmp_path) == (20 + 40) + (40 + 30) + (30 + CLASSES)
    parts = influence.scores_by_layer((x[:2], y[:2]))
    last = own[:, -30 * CLASSES - CLASSES :]
    np.testing.assert_allclose(list(parts.values())[-1], last[:2] @ last.T / COUNT, atol=1e-6)
    assert sum(int(np.prod(w.shape)) for w in weights) == own.shape[1] > 20 * COUNT


def test_penalties_and_python_functions_keep_whole_gradients(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(20, "tanh")])
    x = np.random.default_rng(0).standard_normal((COUNT, 30)).astype("float32")

    def penalized(x):
        return tf.reduce_mean(model(x) ** 2) + 0.1 * tf.reduce_sum(model.layers[-1].kernel ** 2)

    def in_python(x):
        @tf.custom_gradient
        def squared(y):
            value = tf.numpy_function(np.square, [y], tf.float32)
            return tf.ensure_shape(value, y.shape), lambda upstream: 2 * y * upstream

        return tf.reduce_mean(squared(model(x)))

    for number, loss in enumerate([penalized, in_python]):
        folder = tmp_path / str(number)
        kept = hvp.InfluenceFunctions(loss, model, (x,), solver=Identity, gradients=folder)
        without = hvp.InfluenceFunctions(loss, model, (x,), solver=Identity)
        want = without.scores((x[:2],))
        error = np.abs(kept.scores((x[:2],)) - want).max()
        assert error < 1e-6 * np.abs(want).max()
    assert numbers_kept(tmp_path / "0") >= 30 * 20


class Sentences:
    """A small model of token sequences, whose weights may differ from position to position."""

    LENGTH, TOKENS, WIDTH = 4, 6, 3

    def __init__(self, dtype="float64"):
        random = np.random.default_rng(0)
        shapes = [(self.TOKENS, self.WIDTH), (self.WIDTH, 5), (5,), (5, CLASSES), (5,)]
        self.weights = [tf.Variable(random.standard_normal(s), dtype=dtype) for s in shapes]
        self.x = random.integers(0, self.TOKENS, (COUNT, self.LENGTH)).astype("int32")
        self.y = random.integers(0, CLASSES, COUNT).astype("int32")

    def loss(self, x, y):
        table, kernel, bias, head, scale = self.weights
        h = tf.tanh(tf.gather(table, x) @ kernel + bias) * scale
        return cross_entropy(tf.reduce_mean(h, axis=1) @ head, y)

    def gradients_by_token(self, i):
        """Differentiate by a copy of the weights at each position: shape (tokens + 1, n)."""
        copies = [[tf.identity(w) for _ in range(self.LENGTH)] for w in self.weights]
        with tf.GradientTape() as tape:
            tape.watch(copies)
            h = [
                tf.tanh(tf.gather(table, [self.x[i, t]]) @ kernel + bias) * scale
                for t, (table, kernel, bias, _, scale) in enumerate(zip(*copies))
            ]
            logits = tf.add_n(h) / self.LENGTH @ copies[3][0]
            value = cross_entropy(logits, self.y[i : i + 1])
        parts = tape.gradient(value, copies, unconnected_gradients="zero")
        rows = [
            np.concatenate([tf.convert_to_tensor(p[t]).numpy().ravel() for p in parts])
            for t in range(self.LENGTH)
        ]
        head = np.concatenate(
            [np.full(w.shape, k == 3, bool).ravel() for k, w in enumerate(self.weights)]
        )
        return np.stack([*(np.where(head, 0, row) for row in rows), np.where(head, rows[0], 0)])


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.few(1)
@pytest.mark.long
def test_scores_of_tokens_are_those_of_weights_at_each_position(engine, batched):
    model = Sentences()
    x, y = model.x, model.y
    data = [(x[:2], y[:2]), (x[2:], y[2:])] if batched else (x, y)
    influence = hvp.InfluenceFunctions(
        model.loss, model.weights, data, solver="exact", damping=3.0, engine=engine
    )
    own = np.stack([model.gradients_by_token(i) for i in range(COUNT)])
    inverse = np.linalg.inv(influence.operator.to_dense())
    test = own[:2].sum(axis=1)
    expected = np.einsum("mn,ktn->mkt", test @ inverse, own) / COUNT
    found = influence.scores_by_token((x[:2], y[:2]))
    np.testing.assert_allclose(found.tokens, expected[..., :-1], rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(found.rest, expected[..., -1], rtol=1e-8, atol=1e-12)
    whole = influence.scores((x[:2], y[:2]))
    np.testing.assert_allclose(found.tokens.sum(axis=-1) + found.rest, whole, rtol=1e-8)
    chosen = influence.scores_by_token((x[:2], y[:2]), examples=[3, 1])
    np.testing.assert_allclose(chosen.tokens, found.tokens[:, [3, 1]], rtol=1e-12)
    np.testing.assert_allclose(chosen.rest, found.rest[:, [3, 1]], rtol=1e-12)


@pytest.mark.long
def test_scores_of_tokens_add_up_for_a_transformer():
    keras.utils.set_random_seed(0)
    model = CASES["attention"][0]()
    x, y = data_of(model)

    def loss(x, y):
        return cross_entropy(model(x), y)

    influence = hvp.InfluenceFunctions(loss, model, (x, y), solver=Identity)
    found = influence.scores_by_token((x[:2], y[:2]))
    own = gradients_of(model, x, y)
    expected = own[:2] @ own.T / COUNT
    np.testing.assert_allclose(
        found.tokens.sum(axis=-1) + found.rest, expected, atol=1e-6 * np.abs(expected).max()
    )
    head = own[:, -5 * CLASSES :]  # the last layer comes after pooling
    np.testing.assert_allclose(found.rest, head[:2] @ head.T / COUNT, atol=1e-6)


def test_models_without_tokens_are_refused():
    keras.utils.set_random_seed(0)
    model = CASES["dense"][0]()
    x, y = data_of(model)

    def loss(x, y):
        return cross_entropy(model(x), y)

    influence = hvp.InfluenceFunctions(loss, model, (x, y), solver=Identity)
    with pytest.raises(hvp.HvpError, match="No layer has one position for each of the 5 entries"):
        influence.scores_by_token((x[:2], y[:2]))

    w = tf.Variable(tf.ones((5, 2)))
    two_ways = hvp.InfluenceFunctions(
        lambda x: tf.reduce_mean(tf.matmul(x, w) ** 2) + tf.reduce_mean(x @ w * w[0]),
        w,
        (x,),
        solver=Identity,
    )
    with pytest.raises(hvp.HvpError, match="cannot be divided among the tokens"):
        two_ways.scores_by_token((x[:2],))


@pytest.mark.long
def test_examples_of_several_lengths_cannot_be_kept_as_factors(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(50, 20),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(CLASSES),
        ]
    )
    random = np.random.default_rng(0)
    batches = [
        (random.integers(0, 50, (3, n)).astype("int32"), random.integers(0, CLASSES, 3))
        for n in (4, 6)
    ]

    def loss(x, y):
        return cross_entropy(model(x), y)

    influence = hvp.InfluenceFunctions(loss, model, batches, solver=Identity, gradients=tmp_path)
    with pytest.raises(hvp.HvpError, match="not all of one shape"):
        influence.scores(batches[0])
    projected = hvp.InfluenceFunctions(
        loss, model, batches, solver=Identity, gradients=tmp_path / "other", projection=32
    )
    assert projected.scores(batches[0]).shape == (3, 6)
    with pytest.raises(hvp.HvpError, match="has 6 tokens"):
        influence.scores_by_token(batches[0])
