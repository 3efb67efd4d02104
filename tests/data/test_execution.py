"""Many batches: the Hessian of the mean over all examples, whatever is kept."""

import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside, memory
from tests.cases import (
    FUZZ,
    Problem,
    dense_hessian,
    long,
    pairwise,
    random,
    relative_error,
    set_random_weights,
)

N, IN, OUT = 23, 4, 2
X, Y = random(0, N, IN, dtype="float64"), random(1, N, OUT, dtype="float64")


class Network(tf.Module):
    def __init__(self):
        self.w = tf.Variable(random(2, IN, OUT, dtype="float64"))
        self.b = tf.Variable(random(3, OUT, dtype="float64"))

    def __call__(self, x):
        return tf.tanh(x @ self.w + self.b)


SUMS = {
    "sum": lambda network: lambda x, y: tf.reduce_sum((network(x) - y) ** 2) / 2,
    "mean of sums": lambda network: (
        lambda x, y: tf.reduce_mean(tf.reduce_sum((network(x) - y) ** 2, axis=0))
    ),
    "sum and penalty": lambda network: (
        lambda x, y: tf.reduce_sum((network(x) - y) ** 2) + tf.reduce_sum(network.w**2)
    ),
    "tf.function": lambda network: tf.function(lambda x, y: tf.nn.l2_loss(network(x) - y)),
    "keyword": lambda network: lambda *, x, y: tf.reduce_sum((network(x) - y) ** 2),
}
MEANS = {
    "over the size": lambda network: (
        lambda x, y: tf.reduce_sum((network(x) - y) ** 2) / tf.cast(tf.size(y), y.dtype)
    ),
    "Keras": lambda network: lambda x, y: keras.losses.MeanSquaredError()(y, network(x)),
    "of rows": lambda network: (
        lambda x, y: tf.reduce_mean(tf.reduce_sum((network(x) - y) ** 2, axis=1))
    ),
    "log of a mean": lambda network: (
        lambda x, y: tf.math.log(tf.reduce_mean((network(x) - y) ** 2))
    ),
    "over N": lambda network: lambda x, y: tf.reduce_sum((network(x) - y) ** 2) / len(x),
}


@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        {"reduction": "sum"},
        {"batch_size": 5, "reduction": "sum"},
        {"batch_size": 5, "engine": "tape"},
        {"batch_size": 5, "memory_limit": "1MiB"},
        {"batch_size": 5, "devices": ["CPU:0"]},
    ],
)
@pytest.mark.few(6)
def test_a_sum_over_examples_is_refused(loss, options):
    """Sums of batches, averaged or multiplied by the batches' sizes, are the Hessian of nothing."""
    network = Network()
    data = {"x": X, "y": Y} if loss == "keyword" else (X, Y)
    with pytest.raises(hvp.InvalidLossError, match="a sum over examples"):
        hvp.HessianOperator(SUMS[loss](network), network, data, **options)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.few(1)
def test_a_sum_over_examples_of_a_keras_model_is_refused(recompute):
    layers = [keras.Input((IN,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(OUT)]
    model = keras.Sequential(layers)
    with pytest.raises(hvp.InvalidLossError, match="a sum over examples"):
        hvp.HessianOperator(
            lambda x, y: tf.reduce_sum((model(x) - y) ** 2),
            model,
            (X.astype("float32"), Y.astype("float32")),
            batch_size=5,
            recompute=recompute,
        )


@pytest.mark.parametrize("loss", MEANS)
@pytest.mark.few(1)
def test_other_losses_are_not_taken_for_sums(loss):
    network = Network()
    whole = hvp.HessianOperator(MEANS[loss](network), network, (X, Y)).to_dense()
    total = hvp.HessianOperator(MEANS[loss](network), network, (X, Y), reduction="sum")
    assert relative_error(total.to_dense(), N * whole) < (1e-6 if loss == "Keras" else 1e-13)
    if loss != "log of a mean":
        batches = hvp.HessianOperator(MEANS[loss](network), network, (X, Y), batch_size=5)
        # Keras computes its losses in float32.
        assert relative_error(batches.to_dense(), whole) < (1e-6 if loss == "Keras" else 1e-13)


COUPLED = {
    "batch statistics": lambda p, y: tf.reduce_mean((p - tf.reduce_mean(p, 0) - y) ** 2),
    "overlap": lambda p, y: 1 - 2 * tf.reduce_sum(p * y) / tf.reduce_sum(p**2 + y**2),
    "correlation": lambda p, y: (
        -tf.reduce_sum((p - tf.reduce_mean(p)) * (y - tf.reduce_mean(y)))
        / tf.norm(p - tf.reduce_mean(p))
    ),
    "broadcast": lambda p, y: tf.reduce_mean((p[:, :1] - y[:, 0]) ** 2),
    "masked": lambda p, y: tf.reduce_sum(mask(y) * (p - y) ** 2) / tf.reduce_sum(mask(y)),
}


def mask(y):
    return tf.cast(y > 0, y.dtype)


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        {"batch_size": 5, "memory_limit": "1MiB"},
        {"devices": ["CPU:0", "CPU:1"]},
        {"batch_size": 5, "engine": "tape"},
    ],
)
@pytest.mark.few(1)
def test_losses_that_couple_examples_are_refused_where_data_are_divided(name, options):
    network = Network()

    def loss(x, y):
        return COUPLED[name](network(x), y)

    with pytest.raises(hvp.InvalidLossError, match="several examples at once"):
        hvp.HessianOperator(loss, network, (X, Y), **options)
    # What the message advises.
    whole = hvp.HessianOperator(loss, network, (X, Y))
    assert relative_error(whole.to_dense(), dense_hessian(Problem(loss, network, (X, Y)))) < 1e-8
    own = [(X[:10], Y[:10]), (X[10:], Y[10:])]
    halves = [hvp.HessianOperator(loss, network, half).to_dense() for half in own]
    want = (10 * halves[0] + (N - 10) * halves[1]) / N
    assert relative_error(hvp.HessianOperator(loss, network, own).to_dense(), want) < 1e-12


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_the_mean_of_what_is_not_masked_is_right_with_weights(engine):
    """What the message about losses that couple examples advises."""
    network = Network()

    def loss(x, y):
        return COUPLED["masked"](network(x), y)

    options = {"batch_size": 5, "weight": lambda x, y: tf.reduce_sum(mask(y)), "engine": engine}
    weighed = hvp.HessianOperator(loss, network, (X, Y), **options)
    assert relative_error(weighed.to_dense(), dense_hessian(Problem(loss, network, (X, Y)))) < 1e-8


def test_losses_of_random_draws_are_not_taken_for_coupled():
    network, seed = Network(), keras.random.SeedGenerator(1)

    def loss(x, y):
        noise = keras.random.normal(tf.shape(y), seed=seed, dtype="float64")
        return tf.reduce_mean((network(x) + noise - y) ** 2)

    for engine in ("graph", "tape"):
        assert hvp.HessianOperator(loss, network, (X, Y), batch_size=5, engine=engine).value > 0


def test_a_sum_is_right_where_the_batch_is_the_sum():
    """For all data at once, in batches that weigh the same, and without data."""
    network = Network()
    loss = SUMS["sum"](network)
    whole = hvp.HessianOperator(lambda: loss(X, Y), network).to_dense()
    at_once = hvp.HessianOperator(loss, network, (X, Y))
    assert relative_error(at_once.to_dense(), whole) < 1e-14
    options = {"batch_size": 5, "weight": lambda x, y: 1.0, "reduction": "sum"}
    added = hvp.HessianOperator(loss, network, (X, Y), **options)
    assert relative_error(added.to_dense(), whole) < 1e-13


def test_the_search_for_a_sum_leaves_nothing_behind():
    """A loss that updates a variable and draws from a seed is evaluated on a few examples more."""
    network, calls = Network(), tf.Variable(0.0)
    seed = keras.random.SeedGenerator(1)

    def loss(x, y):
        calls.assign_add(1.0)
        noise = keras.random.normal([], seed=seed, dtype="float64")
        return tf.reduce_sum((network(x) + 0 * noise - y) ** 2) / tf.cast(tf.size(y), y.dtype)

    before = seed.state.numpy()
    with pytest.warns(RuntimeWarning, match="Variable.*independently"):
        hvp.HessianOperator(loss, network, (X, Y), batch_size=5)
    assert calls.numpy() == 0
    np.testing.assert_array_equal(seed.state, before)


def mean_square(network):
    return lambda x, y: tf.reduce_mean((network(x) - y) ** 2)


class Sequence(keras.utils.PyDataset):
    def __init__(self, sizes):
        super().__init__()
        self.parts = cut(sizes)

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, index):
        return self.parts[index]


def cut(sizes):
    ends = np.cumsum([0, *sizes])
    return [(X[a:b], Y[a:b]) for a, b in zip(ends, ends[1:])]


SOURCES = {
    "arrays": lambda sizes: ((X, Y), {"batch_size": sizes[0]}),
    "Dataset": lambda sizes: (
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(sizes[0]),
        {},
    ),
    "PyDataset": lambda sizes: (Sequence(sizes), {}),
    "list": lambda sizes: (cut(sizes), {}),
}
SIZES = {"equal": [1] * N, "ragged": [10, 10, 3]}  # 23 is prime
# In units of what is kept of one batch, of which one at work needs three.
LIMITS = {"cached": None, "partly": 4.5, "streamed": 3.3}


@pytest.fixture(scope="module")
def dense():
    network = Network()
    return dense_hessian(Problem(mean_square(network), network, (X, Y)))


@functools.cache
def bytes_kept(size, engine="graph"):
    """The bytes of the residuals of one batch."""
    network, data = Network(), cut([size])
    loss = mean_square(network)
    return hvp.HessianOperator(loss, network, data, engine=engine).stats.residual_bytes


@pytest.mark.parametrize(
    ("limit", "kind", "sizes", "engine"), pairwise(LIMITS, SOURCES, SIZES, ["graph", "tape"])
)
@pytest.mark.few(1)
def test_the_hessian_of_all_examples(dense, kind, sizes, limit, engine):
    network = Network()
    source, options = SOURCES[kind](SIZES[sizes])
    if LIMITS[limit] is not None:
        each = bytes_kept(SIZES[sizes][0], engine)
        options["memory_limit"] = round(each * LIMITS[limit])
    H = hvp.HessianOperator(mean_square(network), network, source, engine=engine, **options)
    assert relative_error(H.to_dense(), dense) < 1e-10
    v = random(5, H.shape[0], dtype="float64")
    assert relative_error(H @ v, dense @ v) < 1e-10
    parts = H.product(H.unflatten(tf.constant(v)))
    assert relative_error(H.flatten(parts), dense @ v) < 1e-10
    whole = hvp.HessianOperator(mean_square(network), network, (X, Y), engine=engine)
    assert relative_error(H.gradient, whole.gradient) < 1e-12
    assert H.value == pytest.approx(whole.value, rel=1e-12)
    stats = H.stats
    assert stats.batches == len(SIZES[sizes])
    assert stats.gradient_evaluations == 1
    if limit == "cached":
        assert stats.batches_kept == stats.batches == stats.batch_evaluations
    else:
        assert stats.batches_kept < stats.batches < stats.batch_evaluations
        assert (stats.batches_kept > 0) == (limit == "partly")
        assert "for each product" in stats.note


def test_a_batch_that_does_not_fit_is_cut(dense):
    network = Network()
    limit = round(3.3 * bytes_kept(6))
    H = hvp.HessianOperator(mean_square(network), network, [(X, Y)], memory_limit=limit)
    assert relative_error(H.to_dense(), dense) < 1e-10
    assert (H.stats.batches, H.stats.batches_kept) == (1, 0)
    with pytest.raises(hvp.TooLargeError, match="a memory_limit of at least"):
        hvp.HessianOperator(mean_square(network), network, [(X, Y)], memory_limit=40)


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.few(1)
def test_arrays_are_cut_as_memory_wants_it(dense, engine):
    network = Network()
    whole = bytes_kept(N, engine)
    data = {"x": X, "y": Y}
    H = hvp.HessianOperator(
        mean_square(network), network, data, memory_limit=2 * whole, engine=engine
    )
    assert relative_error(H.to_dense(), dense) < 1e-10
    assert H.stats.batches > 1
    assert H.stats.batches_kept > 0
    H = hvp.HessianOperator(mean_square(network), network, data, memory_limit="1GiB", engine=engine)
    assert (H.stats.batches, H.stats.batches_kept) == (1, 1)
    with pytest.raises(hvp.TooLargeError, match="a memory_limit of at least"):
        hvp.HessianOperator(mean_square(network), network, data, memory_limit=40)
    one = {"x": X[:1], "y": Y[:1]}
    H = hvp.HessianOperator(mean_square(network), network, one, memory_limit=10**6)
    assert H.stats.batches == 1


def test_a_warning_where_memory_gets_short(monkeypatch):
    network = Network()
    inside.pretend_available(monkeypatch, 100)
    with pytest.warns(RuntimeWarning, match="the machine has 100 bytes left: pass memory_limit"):
        H = hvp.HessianOperator(mean_square(network), network, (X, Y), batch_size=5)
    assert H.stats.batches_kept == 5


def test_sums_weights_and_regularization(dense):
    network = Network()
    loss = mean_square(network)
    for options in ({}, {"batch_size": 5}):
        H = hvp.HessianOperator(loss, network, (X, Y), reduction="sum", **options)
        assert relative_error(H.to_dense(), N * dense) < 1e-10

    def penalty():
        return tf.reduce_sum(network.w**4) / 12

    # In tf.Module's order: b, then w, of which the penalty's Hessian is w**2.
    added = np.diag(np.concatenate([np.zeros(OUT), network.w.numpy().ravel() ** 2]))
    streamed = {"batch_size": 5, "memory_limit": 3000}
    for options in ({}, {"batch_size": 5}, streamed, {"reduction": "sum", **streamed}):
        H = hvp.HessianOperator(loss, network, (X, Y), regularization=penalty, **options)
        examples = N if options.get("reduction") == "sum" else 1
        assert relative_error(H.to_dense(), examples * dense + added) < 1e-10


def test_sample_weights():
    """A batch whose loss is a weighted mean counts as much as its weights."""
    network = Network()
    weights = np.abs(random(7, N, dtype="float64")) + 0.1

    def loss(x, y, w):
        each = tf.reduce_mean((network(x) - y) ** 2, axis=1)
        return tf.reduce_sum(w * each) / tf.reduce_sum(w)

    data = (X, Y, weights)
    whole = dense_hessian(Problem(loss, network, data))
    H = hvp.HessianOperator(
        loss, network, data, batch_size=7, weight=lambda x, y, w: tf.reduce_sum(w)
    )
    assert relative_error(H.to_dense(), whole) < 1e-10
    named = {"x": X, "y": Y, "w": weights}
    H = hvp.HessianOperator(
        loss, network, named, batch_size=7, weight=lambda x, y, w: tf.reduce_sum(w)
    )
    assert relative_error(H.to_dense(), whole) < 1e-10


def test_nested_inputs_from_a_dataset(dense):
    network = Network()
    data = tf.data.Dataset.from_tensor_slices(({"x": X, "z": X[:, :1]}, Y)).batch(9)

    def loss(inputs, y):
        return tf.reduce_mean((network(inputs["x"]) - y) ** 2)

    assert relative_error(hvp.HessianOperator(loss, network, data).to_dense(), dense) < 1e-10


def test_a_keras_layer_alone_is_a_block_of_the_whole():
    model = keras.Sequential(
        [keras.Input((IN,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(OUT)]
    )
    model = keras.models.clone_model(model)
    set_random_weights(model)
    loss = mean_square(model)
    data = (X.astype("float32"), Y.astype("float32"))
    whole = hvp.HessianOperator(loss, model, data, batch_size=8).to_dense()
    head = model.layers[-1]
    size = sum(int(np.prod(v.shape)) for v in head.trainable_variables)
    block = hvp.HessianOperator(loss, head, data, batch_size=8).to_dense()
    np.testing.assert_allclose(block, whole[-size:, -size:], rtol=1e-5, atol=1e-6)


def test_a_block_of_columns_passes_over_the_data_once():
    network = Network()

    class Counted:
        passes = 0

        def __iter__(self):
            Counted.passes += 1
            return iter(cut([10, 10, 3]))

    H = hvp.HessianOperator(mean_square(network), network, Counted(), memory_limit=2500)
    assert H.stats.batches_kept < 3
    before = Counted.passes
    H @ random(0, H.shape[0], 7, dtype="float64")
    assert Counted.passes == before + 1


def test_refresh_goes_through_the_data_again():
    network = Network()
    H = hvp.HessianOperator(mean_square(network), network, (X, Y), batch_size=5)
    network.w.assign_add(tf.ones_like(network.w) * 0.1)
    with pytest.raises(hvp.StaleOperatorError):
        H @ np.ones(H.shape[0])
    H.refresh()
    whole = dense_hessian(Problem(mean_square(network), network, (X, Y)))
    assert relative_error(H.to_dense(), whole) < 1e-10
    assert H.stats.gradient_evaluations == 2
    assert H.stats.traces == 2  # one for each shape


class TestRefused:
    def make(self, data, **options):
        network = Network()
        return hvp.HessianOperator(mean_square(network), network, data, **options)

    def test_a_generator(self):
        with pytest.raises(hvp.InvalidDataError, match="iterated over only once"):
            self.make(batch for batch in cut([10, 13]))

    @pytest.mark.parametrize("then", [[10, 10], [10, 10, 2, 1], [10, 9, 4]])
    def test_other_batches_the_second_time(self, then):
        class Source:
            sizes = (10, 10, 3)

            def __iter__(self):
                return iter(cut(Source.sizes))

        H = self.make(Source(), memory_limit=2500)
        Source.sizes = then
        with pytest.raises(hvp.InvalidDataError, match="data changed between two passes"):
            H @ np.ones(H.shape[0])

    def test_shuffling_each_pass(self):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N).batch(10)

        def use():
            H = self.make(data, memory_limit=2500)
            return H @ np.ones(H.shape[0])

        with pytest.raises(hvp.InvalidDataError, match="reshuffle_each_iteration=False"):
            use()

    def test_batches_of_differing_structure(self):
        with pytest.raises(hvp.InvalidDataError, match="Batch 1 differs from batch 0"):
            self.make([(X, Y), (X, Y, Y)])
        with pytest.raises(hvp.InvalidDataError, match="the dtype float32 instead of float64"):
            self.make([(X, Y), (X.astype("float32"), Y)])

    def test_nothing(self):
        with pytest.raises(hvp.InvalidDataError, match="Data has no batches"):
            self.make([])
        with pytest.raises(hvp.InvalidDataError, match="Batch 1 has no examples"):
            self.make([(X, Y), (X[:0], Y[:0])])

    def test_a_nan_in_one_batch(self):
        bad = X.copy()
        bad[12] = np.nan
        with pytest.raises(hvp.NonFiniteError, match="The loss of batch 2 is not finite"):
            self.make((bad, Y), batch_size=5)

    @pytest.mark.parametrize("size", [0, -1, 2.5, True])
    def test_batch_sizes(self, size):
        with pytest.raises(hvp.HvpError, match="batch_size"):
            self.make((X, Y), batch_size=size)

    @pytest.mark.parametrize("limit", [0, -5, "much", "12 apples", float("nan")])
    def test_limits(self, limit):
        with pytest.raises(hvp.HvpError, match="memory_limit"):
            self.make((X, Y), memory_limit=limit)

    def test_draws_that_cannot_be_repeated(self):
        network = Network()

        def loss(x, y):
            return tf.reduce_mean((network(x) * tf.random.normal([OUT], dtype="float64") - y) ** 2)

        with pytest.raises(hvp.HvpError, match="draws random numbers"):
            hvp.HessianOperator(loss, network, cut([10, 13]), memory_limit=2500)


def test_an_exception_of_the_source_leaves_the_operator_usable(dense):
    class Source:
        broken = False

        def __iter__(self):
            for i, batch in enumerate(cut([10, 10, 3])):
                if Source.broken and i == 2:
                    raise ZeroDivisionError("the disk is gone")
                yield batch

    network = Network()
    H = hvp.HessianOperator(mean_square(network), network, Source(), memory_limit=2500)
    v = np.ones(H.shape[0])
    Source.broken = True
    with pytest.raises(ZeroDivisionError, match="the disk is gone"):
        H @ v
    Source.broken = False
    assert relative_error(H @ v, dense @ v) < 1e-10


def test_limits_in_words():
    network = Network()
    for limit in ("1GiB", "1 GB", "500MB", "0.5 TiB", 2**30):
        H = hvp.HessianOperator(mean_square(network), network, (X, Y), memory_limit=limit)
        assert H.stats.batches_kept == 1


def test_progress_is_shown(capfd):
    network = Network()
    pytest.importorskip("tqdm")
    H = hvp.HessianOperator(mean_square(network), network, cut([10, 13]), progress="always")
    assert "batch" in capfd.readouterr().err
    hvp.HessianOperator(mean_square(network), network, cut([10, 13]), progress=True)
    assert "batch" not in capfd.readouterr().err  # not a terminal
    assert H.shape == (10, 10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regularization": 0.1}, "regularization is float"),
        ({"weight": 3}, "weight is int"),
        ({"weight": lambda x, y: x[:, 0]}, "weight of batch 0 has shape"),
        ({"weight": lambda x, y: -1.0}, "weight of batch 0 is -1"),
        ({"weight": lambda x, y: 0.0}, "weights of all batches are zero"),
        ({"progress": "alway"}, "progress is 'alway'"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"data": None}, "without data"),
    ],
)
def test_arguments_that_are_refused(options, said):
    network = Network()
    options = {"data": (X, Y), "batch_size": 5, **options}
    with pytest.raises(hvp.HvpError, match=said):
        hvp.HessianOperator(mean_square(network), network, **options)


class TestFromKeras:
    """The compiled loss, with all that Keras adds to it."""

    @pytest.fixture
    def model(self):
        x = keras.Input((IN,))
        regularizer = keras.regularizers.L2(0.1)
        h = keras.layers.Dense(3, "tanh", name="hidden", kernel_regularizer=regularizer)(x)
        outputs = {
            "a": keras.layers.Dense(OUT, name="a")(h),
            "b": keras.layers.Dense(3, name="b")(keras.layers.Dropout(0.5)(h)),
        }
        model = keras.Model(x, outputs)
        set_random_weights(model)
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(loss={"a": "mse", "b": cross_entropy}, loss_weights={"a": 0.5, "b": 2.0})
        return model

    def data(self, weighted):
        y = {"a": Y.astype("float32"), "b": np.arange(N) % 3}
        weights = np.linspace(0.5, 2, N, dtype="float32")
        each = {"a": weights, "b": weights[::-1].copy()}
        return (X.astype("float32"), y, each) if weighted else (X.astype("float32"), y)

    @pytest.mark.parametrize("weighted", [long(False), True])
    def test_is_what_keras_evaluates(self, model, weighted):
        data = self.data(weighted)

        def by_hand(x, y, w=None):
            outputs = model(x, training=False)
            a = tf.reduce_mean((outputs["a"] - y["a"]) ** 2, axis=1)
            b = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y["b"], logits=outputs["b"])
            a, b = (a, b) if w is None else (a * w["a"], b * w["b"])
            kernel = model.get_layer("hidden").kernel
            return tf.reduce_mean(0.5 * a + 2 * b) + 0.1 * tf.reduce_sum(kernel.value**2)

        want = hvp.HessianOperator(by_hand, model, data).to_dense()
        x, y, *weights = data
        evaluated = model.evaluate(x, y, sample_weight=(weights or [None])[0], verbose=0)
        evaluated = np.ravel(evaluated)[0]  # with other metrics, or alone, by Keras' version
        seen = [float(metric.result()) for metric in model.metrics if metric.name == "loss"]
        for options in ({}, {"batch_size": 7}, {"batch_size": 7, "memory_limit": 20000}):
            H = hvp.HessianOperator.from_keras(model, data, **options)
            assert relative_error(H.to_dense(), want) < 1e-5
        assert [float(m.result()) for m in model.metrics if m.name == "loss"] == seen
        assert H.value == pytest.approx(evaluated, rel=1e-5)

    def test_masks_ask_for_a_weight(self):
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(5, 3, mask_zero=True),
                layers.SimpleRNN(2, return_sequences=True, unroll=True),
                layers.Dense(1),
            ]
        )
        set_random_weights(model)
        model.compile(loss="mse")
        tokens = np.random.default_rng(0).integers(1, 5, (9, 6))
        tokens[np.arange(6) >= np.arange(9)[:, None] % 6 + 1] = 0
        data = (tokens, random(0, 9, 6, 1))
        with pytest.raises(hvp.InvalidLossError, match="has a mask"):
            hvp.HessianOperator.from_keras(model, data, batch_size=4)
        whole = hvp.HessianOperator.from_keras(model, data)
        H = hvp.HessianOperator.from_keras(
            model, data, batch_size=4, weight=lambda x, y: tf.math.count_nonzero(x)
        )
        v = random(1, H.shape[0])
        assert relative_error(H @ v, whole @ v) < 1e-4

    def test_training_and_a_part(self, model):
        data = self.data(False)
        H = hvp.HessianOperator.from_keras(model, data, training=True)
        assert H.value != pytest.approx(hvp.HessianOperator.from_keras(model, data).value, rel=1e-6)
        head = model.get_layer("a")
        block = hvp.HessianOperator.from_keras(model, data, variables=head)
        assert block.shape == (4 * OUT, 4 * OUT)

    def test_refused(self, model):
        plain = keras.Sequential([keras.Input((IN,)), keras.layers.Dense(OUT)])
        with pytest.raises(hvp.InvalidLossError, match="no compiled loss"):
            hvp.HessianOperator.from_keras(plain, (X, Y))
        with pytest.raises(hvp.InvalidLossError, match="regularizers, too"):
            hvp.HessianOperator.from_keras(model, self.data(False), reduction="sum")
        plain.compile(loss=keras.losses.MeanSquaredError(reduction="sum"))
        with pytest.raises(hvp.InvalidLossError, match="reduction 'sum'"):
            hvp.HessianOperator.from_keras(plain, (X, Y))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
def test_the_limit_is_kept():
    """Peak growth of a process of its own, at most a fifth beyond the limit."""
    program = """
    weights = [tf.Variable(np.eye(256, dtype="float32") * 0.9) for _ in range(6)]
    x = np.ones((2**14, 256), "float32")

    def loss(x):
        for w in weights:
            x = tf.tanh(x @ w)
        return tf.reduce_mean(x**2)

    def measure(name, **options):
        begin_peak()
        with hvp.HessianOperator(loss, weights, (x,), **options) as H:
            for _ in range(2):
                product = H @ np.ones(H.shape[0])
            print(f"{name}_grown", megabytes("VmHWM") - start)
            print(f"{name}_kept", H.stats.batches_kept)
            print(f"{name}_norm", np.linalg.norm(product))

    # What it takes to begin at all, the graphs of cut data included.
    with hvp.HessianOperator(loss, weights, (x[:640],), memory_limit="8MiB") as first:
        first @ np.ones(first.shape[0])
    start = resident_megabytes()
    measure("limited", LIMITED)
    measure("whole", batch_size=2**11)
    """
    cut, batched = "memory_limit='160MiB'", "memory_limit='256MiB', batch_size=2**11"
    for limit, options in ((160, cut), (256, batched)) if FUZZ else ((160, cut),):
        measured = memory.run(program.replace("LIMITED", options))
        assert measured["limited_grown"] < 1.2 * limit
        assert measured["limited_kept"] > 0
        assert measured["limited_norm"] == pytest.approx(measured["whole_norm"], rel=1e-5)
        # Both are measured from the same start: memory that the first one left counts for both.
        assert measured["whole_kept"] == 8
        assert measured["whole_grown"] > 250


def test_data_without_end_are_refused():
    dataset = tf.data.Dataset.from_tensors((tf.ones((2, 3)),)).repeat()
    w = tf.Variable(tf.ones(3))
    with pytest.raises(hvp.InvalidDataError, match="an infinite"):
        hvp.HessianOperator(lambda x: tf.reduce_mean(tf.linalg.matvec(x, w) ** 2), w, dataset)


class TestBatchesOfWhichOneIsAnotherKind:
    """What is known of an operator is what is known of all its batches."""

    def made(self, lengths=(4, 3), **options):
        self.scale, self.seed = tf.Variable(2.0), tf.Variable(0, dtype=tf.int64)
        self.w = tf.Variable([1.0, 2.0])

        def loss(x):
            value = tf.reduce_mean(tf.linalg.matvec(x, self.w) ** 2)
            if x.shape[0] == 3:  # only in the last batch
                drawn = tf.random.stateless_uniform([], [1, self.seed.assign_add(1)])
                value = value * self.scale + 0.0 * drawn
            return value

        data = [(random(i, length, 2),) for i, length in enumerate(lengths)]
        return hvp.HessianOperator(loss, self.w, data, **options)

    def test_what_it_reads_is_watched(self):
        with self.made() as H:
            H @ np.ones(2)
            self.scale.assign(3.0)
            with pytest.raises(hvp.StaleOperatorError):
                H @ np.ones(2)

    def test_what_it_writes_is_put_back(self):
        with self.made() as H:
            assert int(self.seed) == 0
            assert hvp.check(H).ok
            assert int(self.seed) == 0

    def test_its_engine_and_notes_are_told(self):
        w = tf.Variable([1.0, 2.0])

        def loss(x):
            if x.shape[0] == 3 and not tf.executing_eagerly():
                raise ValueError("not in a graph")
            return tf.reduce_mean(tf.linalg.matvec(x, w) ** 3)

        with hvp.HessianOperator(loss, w, [(random(0, 4, 2),), (random(1, 3, 2),)]) as H:
            assert H.stats.engine == "tape"
            assert "not in a graph" in H.stats.note
            np.testing.assert_allclose(H.to_dense(), H.to_dense().T, rtol=1e-5)

    def test_its_draws_are_refused_where_it_would_be_drawn_again(self):
        w = tf.Variable([1.0, 2.0])

        def loss(x):
            noise = tf.random.normal([]) if x.shape[0] == 3 else 1.0
            return noise * tf.reduce_mean(tf.linalg.matvec(x, w) ** 2)

        data = [(random(i, length, 2),) for i, length in enumerate((4, 3, 3, 3))]
        with pytest.raises(hvp.HvpError, match="draws random numbers"):
            hvp.HessianOperator(loss, w, data, memory_limit=400)


class Table:
    """What matters of a pandas DataFrame: indexed by columns, and rows by iloc."""

    def __init__(self, array):
        self._array, self.shape, self.iloc = array, array.shape, array

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype)

    def __len__(self):
        return len(self._array)

    def __getitem__(self, key):
        return self._array[key] if isinstance(key, slice) else self._array[:, key]


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"memory_limit": "1MiB"}])
def test_tables_are_arrays_of_rows(options):
    x, w = np.random.default_rng(0).standard_normal((5, 7)), tf.Variable(np.ones(7))

    def mean(x):
        return tf.reduce_mean(tf.linalg.matvec(x, w) ** 4)

    expected = hvp.HessianOperator(mean, w, (x,), **options)
    with hvp.HessianOperator(mean, w, (Table(x),), **options) as H:
        np.testing.assert_array_equal(H @ np.ones(7), expected @ np.ones(7))
    if "batch_size" in options:
        with pytest.raises(hvp.InvalidLossError, match="sum over examples"):
            hvp.HessianOperator(lambda x: 5 * mean(x) * len(x), w, (Table(x),), **options)
