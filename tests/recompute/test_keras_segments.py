"""Keras models in segments: where they are cut, and that they stay what they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._derivatives.exact import exact_functions
from hvp._recompute.partition import fewest_bytes, smallest_largest
from tests import inside
from tests.cases import crossed, long, random, relative_error
from tests.recompute.derivatives import MODES, assert_same, derivatives

layers = keras.layers
X = tf.constant(random(0, 6, 5))


def sequential(depth=6):
    return keras.Sequential(
        [keras.Input((5,)), *(layers.Dense(5, "tanh", name=f"d{i}") for i in range(depth))]
    )


def residual():
    x = h = keras.Input((5,))
    for i in range(4):
        branch = layers.Dense(5, "tanh", name=f"a{i}")(h)
        branch = layers.Dense(5, name=f"b{i}")(branch)
        h = layers.Add(name=f"add{i}")([h, branch])
    return keras.Model(x, h)


def called_twice():
    twice = layers.Dense(5, "tanh", name="twice")
    x = h = keras.Input((5,))
    for i in range(8):
        h = (twice if i in (2, 4) else layers.Dense(5, "tanh"))(h)
    return keras.Model(x, h)


def several_inputs_and_outputs():
    a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    h = layers.Dense(5, "tanh")(layers.Dense(5, "tanh")(a))
    h = layers.Dense(4, "tanh")(layers.Concatenate()([h, b]))
    h = layers.Dense(4, "tanh")(h)
    return keras.Model({"a": a, "b": b}, {"p": layers.Dense(2)(h), "q": layers.Dense(3)(h)})


def convolutional():
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="silu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Dropout(0.3, seed=1),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def transformer():
    tokens = keras.Input((6,), dtype="int32")
    h = layers.Embedding(9, 8)(tokens)
    a = layers.LayerNormalization()(h)
    # A bias of the keys changes nothing: its derivatives are rounding.
    a = layers.MultiHeadAttention(2, 4, use_bias=False)(a, a, use_causal_mask=True)
    h = layers.Add()([h, layers.Dropout(0.2, seed=0)(a)])
    f = layers.Dense(8)(layers.Dense(16, "gelu")(layers.LayerNormalization()(h)))
    h = layers.Add()([h, f])
    return keras.Model(tokens, layers.Dense(3)(h))


def masked():
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(5, 4, mask_zero=True),
            layers.SimpleRNN(4, return_sequences=True),
            layers.SimpleRNN(3),
            layers.Dense(2),
        ]
    )


class Block(layers.Layer):
    def __init__(self, seed):
        super().__init__()
        self.dense, self.dropout = layers.Dense(5, "tanh"), layers.Dropout(0.3, seed=seed)

    def call(self, x):
        return x + self.dropout(self.dense(x))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(seed) for seed in range(3)]
        self.head = layers.Dense(2)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def subclassed():
    model = Subclassed()
    model(X)
    return model


IMAGES = tf.constant(random(1, 2, 8, 8, 2))
TOKENS = tf.constant([[1, 2, 3, 4, 0, 8], [3, 0, 5, 1, 1, 2]])
CASES = {
    "sequential": (sequential, X, 3),
    "residual": (residual, X, None),
    "called twice": (called_twice, X, None),
    "several inputs and outputs": (several_inputs_and_outputs, {"a": X, "b": 2 * X}, 3),
    "convolutional": (convolutional, IMAGES, 3),
    "transformer": (transformer, TOKENS, None),
    "masked": (masked, tf.constant([[1, 2, 0], [3, 0, 0]]), 2),
    "layers by name": (sequential, X, ["d1", "d2"]),
    "subclassed": (subclassed, X, lambda model: model.blocks),
    "nested layers": (subclassed, X, lambda m: [m.blocks[0], m.blocks[0].dense, m.head]),
}


def made_twice(make):
    """Two models alike, weights and seeds too."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        models.append(make())
    models[1].set_weights(models[0].get_weights())
    return models


@pytest.mark.parametrize(("case", "mode"), crossed(CASES, ["eager", "graph"]))
@pytest.mark.few(1)
def test_values_derivatives_and_state_are_the_models(case, mode):
    make, x, segments = CASES[case]
    plain, model = made_twice(make)
    if callable(segments):
        segments = segments(model)
    found = []
    for f, owner in ((plain, plain), (hvp.recompute_model(model, segments), model)):
        weights = [v.value for v in owner.trainable_variables]
        with exact_functions():
            run = MODES[mode](
                lambda f=f, w=weights: derivatives(lambda: f(x, training=True), w, order=2)
            )
            found.append([*run(), *(tf.cast(v, "float32") for v in owner.non_trainable_variables)])
    assert_same(found[1], found[0], 1e-3, floor=1e-2)
    assert not any("call" in vars(layer) for layer in model._flatten_layers())


def test_segments_are_balanced_and_branches_whole():
    names = hvp.recompute_model(sequential(12)).segments
    assert [len(part) for part in names] == [3, 3, 3, 3]
    assert [name for part in names for name in part] == [f"d{i}" for i in range(12)]
    for part in hvp.recompute_model(residual(), 4).segments:
        numbers = {name[-1] for name in part}
        assert len(numbers) == 1
        assert len(part) == 3
    assert max(len(p) for p in hvp.recompute_model(sequential(12), 5).segments) == 3


def test_sizes_decide():
    assert smallest_largest([1, 1, 1, 9], 2) == [3]
    assert smallest_largest([4, 1, 1, 1, 1], 2) == [1]
    assert smallest_largest([5, 5], 2) == [1]
    assert fewest_bytes([100] * 16, [1] * 15) == list(range(1, 16))
    assert fewest_bytes([10] * 9, [10] * 8) in ([3, 6], [4, 8], [5])
    assert fewest_bytes([1, 1], [50]) == []


def test_shares_the_weights():
    model = sequential(3)
    f = hvp.recompute_model(model, 3)
    before = f(X).numpy()
    model.set_weights([weight + 0.1 for weight in model.get_weights()])
    assert np.allclose(f(X), model(X), atol=1e-6)
    assert not np.allclose(f(X), before, atol=1e-2)
    assert f.__wrapped__ is model


def test_no_segment_ends_with_a_layer_that_is_called_again():
    names = hvp.recompute_model(called_twice()).segments
    assert "twice" not in [part[-1] for part in names]
    assert sum(part.count("twice") for part in names) == 2
    assert len(names) > 2
    x, layer = keras.Input((6,)), layers.Dense(6)
    model, data = keras.Model(x, layer(layer(x))), random(0, 5, 6)
    for segments in (None, 1):
        assert np.allclose(hvp.recompute_model(model, segments)(data), model(data), atol=1e-6)
    with pytest.raises(hvp.RecomputeError, match="called more than once"):
        hvp.recompute_model(model, 2)


def test_losses_of_activities_are_refused_not_lost():
    """They belong to the call, and a segment's are gone with its trace; one layer's are noted."""
    regularizer = keras.regularizers.L2(0.1)
    model = keras.Sequential([keras.Input((4,))])
    model.add(layers.Dense(4, "tanh", name="first", activity_regularizer=regularizer))
    model.add(layers.Dense(2))

    def loss(x):
        return tf.reduce_mean(model(x) ** 2) + sum(model.losses)

    x = random(0, 5, 4)
    for recompute in (True, 1, 2):
        with pytest.raises(hvp.RecomputeError, match="'first' adds a loss"):
            hvp.HessianOperator(loss, model, (x,), recompute=recompute)
    H = hvp.HessianOperator(loss, model, (x,), recompute=["first"])
    cached = hvp.HessianOperator(loss, model, (x,))
    assert H.value == pytest.approx(cached.value, rel=1e-6)
    v = random(1, H.shape[0])
    assert relative_error(H @ v, cached @ v) < 1e-5


@pytest.mark.filterwarnings("ignore:(.|\n)*input with a mask attached")
def test_attention_takes_masks_off_its_inputs():
    """As Keras' attention does, so that what reads the same tensor later sees none."""
    x = keras.Input((7,), dtype="int32")
    e = layers.Embedding(11, 8, mask_zero=True)(x)
    e = layers.Add()([e, layers.MultiHeadAttention(2, 4, name="a0")(e, e)])
    model = keras.Model(x, layers.MultiHeadAttention(2, 4, name="a1")(e, e))
    ids = np.random.default_rng(0).integers(0, 4, (6, 7))
    f = hvp.recompute_model(model, ["a0"])
    for _ in range(2):
        assert np.allclose(f(ids), model(ids), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "segments", "said"),
    [
        (lambda: 3, None, "is int"),
        (subclassed, None, "segments="),
        (subclassed, ["nothing"], "no layer 'nothing'"),
        (subclassed, [], "is empty"),
        (lambda: keras.Sequential([layers.Dense(2)]), None, "not built"),
        (residual, 9, "between 1 and 6"),
        (residual, 0, "between 1 and 6"),
        (residual, "d1", "pass \\['d1'\\]"),
        (residual, 2.5, "is 2.5"),
    ],
)
def test_refused(make, segments, said):
    with pytest.raises(hvp.RecomputeError, match=said):
        hvp.recompute_model(make(), segments)


class TestOperator:
    """`HessianOperator(..., recompute=...)`, and losses that recompute by themselves."""

    Y = np.array([0, 1, 2, 2, 1, 0])

    def loss(self, model):
        def loss(x, y):
            logits = model(x, training=True)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            return tf.reduce_mean(each)

        return loss

    @pytest.mark.parametrize(
        ("recompute", "engine", "jit_compile"),
        [
            (True, "graph", False),
            long(True, "graph", True),
            long(True, "tape", False),
            long(3, "graph", False),
            long(["d1", "d4", "d5"], "graph", False),
            (["d1", "d4", "d5"], "tape", False),
        ],
    )
    @pytest.mark.few(1)
    def test_the_same_hessian_from_less(self, recompute, engine, jit_compile):
        model = sequential()
        data = (X, self.Y)
        options = {"engine": engine, "jit_compile": jit_compile}
        H = hvp.HessianOperator(self.loss(model), model, data, recompute=recompute, **options)
        cached = hvp.HessianOperator(self.loss(model), model, data, engine=engine)
        V = random(1, H.shape[0], 3)
        want = np.stack([cached @ v for v in V.T], axis=1)
        assert relative_error(H @ V[:, 0], want[:, 0]) < 1e-5
        assert relative_error(H @ V, want) < 1e-5
        assert relative_error(H.gradient, cached.gradient) < 1e-5
        assert H.stats.residual_bytes < cached.stats.residual_bytes
        assert H.stats.note == ""
        assert not any("call" in vars(x) for x in model._flatten_layers())
        model.set_weights([weight * 1.1 for weight in model.get_weights()])
        H.refresh(), cached.refresh()
        assert relative_error(H @ V[:, 0], cached @ V[:, 0]) < 1e-5
        assert H.stats.traces == 1

    def test_only_boundaries_are_kept(self):
        """Inputs and cotangents of segments: nothing that is inside of one."""
        w = [tf.Variable(random(i, 5, 5)) for i in range(6)]
        x = tf.constant(random(20, 2**15, 5))

        def layer(x, w):
            return tf.tanh(x @ w)

        def chain(x, part):
            for matrix in part:
                x = layer(x, matrix)
            return x

        def loss(count):
            parts = [w[i : i + 6 // count] for i in range(0, 6, 6 // count)]
            segments = [hvp.recompute(lambda x, p=p: chain(x, p)) for p in parts[:-1]]
            last = hvp.recompute(lambda x: tf.reduce_mean(chain(x, parts[-1]) ** 2))

            def run():
                value = x
                for f in segments:
                    value = f(value)
                return last(value)

            return run

        tensor = 2**15 * 5 * 4
        v = np.ones(150, "float32")
        plain = hvp.HessianOperator(lambda: tf.reduce_mean(chain(x, w) ** 2), w)
        for count in (2, 3):
            H = hvp.HessianOperator(loss(count), w)
            assert H.stats.residual_bytes <= 2 * (count - 1) * tensor + 6 * 100 + 1000
            assert relative_error(H @ v, plain @ v) < 1e-5
            # What is computed again depends on the vector, so that it is in the product's part.
            calls = [n for n in inside.program(H).product_part.graph_def.node if "Call" in n.op]
            # The last segment has no way back: the loss's own cotangent is always one.
            assert len(calls) == 2 * count - 1

    def test_dropout_stays_as_it_was_drawn(self):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((5,)), *(layer for _ in range(2) for layer in self.with_dropout())]
        )
        H = hvp.HessianOperator(self.loss(model), model, (X, self.Y), recompute=2)
        D = H.to_dense()
        assert relative_error(D, D.T) < 1e-5
        seeds = [v.numpy() for v in model.non_trainable_variables]
        H.refresh()
        assert all(np.array_equal(a, v) for a, v in zip(seeds, model.non_trainable_variables))

    def with_dropout(self):
        return [layers.Dense(5, "tanh"), layers.Dropout(0.5)]

    def test_in_a_graph_and_by_solvers(self):
        model = sequential(4)
        H = hvp.HessianOperator(self.loss(model), model, (X, self.Y), recompute=2)
        v = tf.constant(random(3, H.shape[0]))
        twice = tf.function(lambda v: H.product(H.product(v)))
        assert relative_error(twice(v), H @ (H @ v.numpy())) < 1e-5

    def test_linearize_both_ways(self):
        w = tf.Variable(random(0, 5, 5, dtype="float64"))
        x = tf.constant(random(1, 3, 5, dtype="float64"))
        f = hvp.recompute(lambda x: tf.tanh(x @ w))
        t, u = random(2, 5, 5, dtype="float64"), random(3, 3, 5, dtype="float64")
        results = []
        for run in (f, f.__wrapped__):
            with hvp.linearize(lambda run=run: run(run(x)), w) as map_:
                results.append([map_.value, map_.jvp(tf.constant(t)), map_.vjp(tf.constant(u))])
        assert_same(*results, 1e-12)

    def test_a_model_the_loss_does_not_call(self):
        model = sequential(4)
        traced = tf.function(lambda x: model(x))
        traced(X)
        with pytest.raises(hvp.RecomputeError, match="does not call the model"):
            hvp.HessianOperator(lambda: tf.reduce_mean(traced(X) ** 2), model, recompute=True)

    def test_variables_that_are_no_model(self):
        model = sequential(4)
        with pytest.raises(hvp.RecomputeError, match="a Keras model in place"):
            hvp.HessianOperator(
                lambda: tf.reduce_mean(model(X) ** 2), model.trainable_variables, recompute=True
            )


@pytest.mark.parametrize("recompute", [False, True])
def test_a_derivative_that_is_stopped_in_a_gradient_is_refused(recompute):
    @tf.custom_gradient
    def squares(w):
        return w**2, lambda upstream: upstream * tf.stop_gradient(2 * w)

    model = sequential(4)

    def loss(x):
        return tf.reduce_mean(model(x) ** 2) + tf.reduce_sum(squares(model.weights[0].value))

    with pytest.raises(hvp.SecondDerivativeError, match="stop_gradient"):
        hvp.HessianOperator(loss, model, (X,), recompute=recompute)


def test_layers_whose_class_begins_with_an_underscore():
    class _Scale(keras.layers.Layer):  # which Keras calls "__scale"
        def call(self, x):
            return 2.0 * x

    class _Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2, "tanh")

        def call(self, x):
            return self.dense(x)

    x = random(0, 2, 3)
    inputs = keras.Input((3,))
    hidden = _Scale()(keras.layers.Dense(3, "tanh")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))

    def loss(x):
        return tf.reduce_mean(model(x) ** 2)

    with hvp.HessianOperator(loss, model, (x,)) as H:
        want = H.to_dense()
    with hvp.HessianOperator(loss, model, (x,), recompute=True) as H:
        np.testing.assert_allclose(H.to_dense(), want, atol=1e-5)
    net = _Net()
    net(x)
    with hvp.HessianOperator(lambda x: tf.reduce_sum(net(x) ** 2), net, (x,)) as H:
        assert H.stats.engine == "graph"
        assert not H.stats.note


def deep(first, count=4):
    tensor = first
    for _ in range(count):
        tensor = keras.layers.Dense(4, "tanh")(tensor)
    return tensor


class Residual(keras.Sequential):
    """A model whose outputs are not those of its last layer."""

    def call(self, x, training=None, mask=None):
        return x + super().call(x, training=training, mask=mask)


def test_a_call_of_the_callers_own_is_not_cut():
    model = Residual([keras.Input((4,)), *[keras.layers.Dense(4, "tanh") for _ in range(4)]])
    with pytest.raises(hvp.RecomputeError, match="segments="):
        hvp.recompute_model(model)
    x = random(0, 6, 4)
    listed = hvp.recompute_model(model, segments=model.layers[:2])  # the remedy
    np.testing.assert_allclose(listed(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("structure", [list, dict])
def test_models_of_several_inputs_are_recomputed(structure):
    """Keras calls them with a mask for each input, which is None."""
    keras.utils.set_random_seed(0)
    first, second = keras.Input((3,), name="first"), keras.Input((2,), name="second")
    joined = layers.Concatenate()([layers.Dense(4, "tanh")(first), layers.Dense(4, "tanh")(second)])
    inputs = [first, second] if structure is list else {"first": first, "second": second}
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(5, "tanh")(joined)))
    data = random(0, 6, 3).astype("float32"), random(1, 6, 2).astype("float32")

    def loss(a, b):
        return tf.reduce_mean(
            model([a, b] if structure is list else {"second": b, "first": a}) ** 2
        )

    plain = hvp.HessianOperator(loss, model, data)
    H = hvp.HessianOperator(loss, model, data, recompute=True)
    assert H.stats.residual_bytes < plain.stats.residual_bytes
    v = random(2, H.shape[0]).astype("float32")
    assert relative_error(H @ v, plain @ v) < 1e-5


@pytest.mark.filterwarnings("ignore:.*with a mask attached")
def test_masks_that_are_passed_are_refused():
    model = keras.Sequential(
        [keras.Input((5, 3)), keras.layers.Dense(4), keras.layers.LSTM(4), keras.layers.Dense(1)]
    )
    lengths = np.array([[1], [2], [3], [4], [5], [2]])
    x, mask = random(0, 6, 5, 3), tf.constant(np.arange(5) < lengths)

    def loss():
        return tf.reduce_mean(model(x, mask=mask) ** 2)

    with pytest.raises(hvp.RecomputeError, match="mask"):
        hvp.HessianOperator(loss, model, recompute=True)
    H = hvp.HessianOperator(loss, model, recompute=[model.layers[0]])  # the remedy
    assert H.value == pytest.approx(float(loss()), rel=1e-6)


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_forms_of_inputs_and_outputs():
    x, other = random(0, 6, 3), random(1, 6, 3)
    # Named like each other's keys.
    p, q = keras.Input((3,), name="q"), keras.Input((3,), name="p")
    last = deep(keras.layers.Dense(4)(p) + 2 * keras.layers.Dense(4)(q))
    for inputs, given in (
        ({"p": p, "q": q}, {"p": x, "q": other}),
        ({"z": [q], "a": p}, {"z": [other], "a": x}),
        ([q, p], [x, other]),
        ([q, p], {"p": x, "q": other}),
    ):
        try:
            model = keras.Model(inputs, last)
        except ValueError:  # the first versions of Keras 3 have no nests of inputs
            assert isinstance(inputs, dict)
            assert isinstance(inputs.get("z"), list)
            continue
        np.testing.assert_allclose(
            hvp.recompute_model(model)(given), model(given), rtol=1e-5, atol=1e-6
        )
    first = keras.Input((3,))
    for outputs in ([deep(first)], {"a": deep(first)}, [deep(first), deep(first)]):
        model = keras.Model(first, outputs)
        found, expected = hvp.recompute_model(model)(x), model(x)
        tf.nest.assert_same_structure(found, expected)
        for one, another in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
            np.testing.assert_allclose(one, another, rtol=1e-5, atol=1e-6)
