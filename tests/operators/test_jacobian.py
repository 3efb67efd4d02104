"""Jacobians over batches that are stacked, against TensorFlow's, row by row, and closed forms."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from scipy.optimize import least_squares
from scipy.sparse.linalg import LinearOperator, lsmr, svds

import hvp
from tests import inside
from tests.cases import crossed, random, relative_error
from tests.operators.test_gauss_newton import MODELS, WAYS, make, softmax_loss


def dense_jacobian(model, x):
    """Rows of all examples in their order, one gradient for each, without batches."""
    rows = []
    for i in range(len(x)):
        with tf.GradientTape(persistent=True) as tape:
            values = tf.unstack(tf.reshape(model(x[i : i + 1]), [-1]))
        for value in values:
            parts = tape.gradient(value, model.trainable_variables)
            rows.append(np.concatenate([part.numpy().ravel() for part in parts]))
    return np.array(rows)


def build(model, x, way):
    options = dict(WAYS[way])
    if "memory_limit" in options:
        with hvp.JacobianOperator(model, model, (x,), batch_size=2) as J:
            options["memory_limit"] = int(4.6 * J.stats.residual_bytes / 4)
    return hvp.JacobianOperator(model, model, (x,), **options)


@pytest.mark.parametrize(("name", "way"), crossed([*MODELS, "dense"], WAYS))
@pytest.mark.few(1)
def test_it_is_the_dense_matrix(name, way):
    model, x, _ = make(name)
    want = dense_jacobian(model, x)
    m, n = want.shape
    u, v = random(1, m, 3, dtype="float64"), random(2, n, 3, dtype="float64")
    with build(model, x, way) as J:
        assert J.shape == (m, n)
        assert J.stats.engine == WAYS[way].get("engine", "graph")
        if "memory_limit" in WAYS[way]:
            assert J.stats.batches_kept < J.stats.batches
        for _ in range(2):
            assert relative_error(J @ v[:, 0], want @ v[:, 0]) < 1e-12
            assert relative_error(J.T @ u[:, 0], want.T @ u[:, 0]) < 1e-12
            assert relative_error(J @ v, want @ v) < 1e-12
            assert relative_error(J.T @ u, want.T @ u) < 1e-12
            assert relative_error(J.value, model(x)) < 1e-12
            J.refresh()
        assert relative_error(J.to_dense(), want) < 1e-12
        assert relative_error(J.gram(), want @ want.T) < 1e-12
        assert relative_error(J.T.T @ (J.T @ u), want @ (want.T @ u)) < 1e-12
        tangent = tf.nest.pack_sequence_as(
            model.trainable_variables,
            [random(3, *w.shape, dtype="float64") for w in model.trainable_variables],
        )
        flat = np.concatenate([np.ravel(part) for part in tangent])
        assert relative_error(np.ravel(J.jvp(tangent)), want @ flat) < 1e-12
        cotangent = u[:, 0].reshape(J.value.shape)
        for given in (cotangent, u[:, 0]):
            found = np.concatenate([np.ravel(part) for part in J.vjp(given)])
            assert relative_error(found, want.T @ u[:, 0]) < 1e-12
        products = tf.function(lambda u, v: (J.vjp(u), J.jvp(v)))(tf.constant(cotangent), tangent)
        assert relative_error(np.ravel(products[1]), want @ flat) < 1e-12
        found = np.concatenate([np.ravel(part) for part in products[0]])
        assert relative_error(found, want.T @ u[:, 0]) < 1e-12


@pytest.mark.few(0)
def test_the_longer_side_is_that_of_the_rows():
    model, x, _ = make("dense", examples=40)
    want = dense_jacobian(model, x)
    assert want.shape[0] > want.shape[1]
    with hvp.JacobianOperator(model, model, (x,), batch_size=7) as J:
        assert relative_error(J.to_dense(), want) < 1e-12
        assert np.allclose(svds(J, k=2)[1], np.linalg.svd(want)[1][:2][::-1], rtol=1e-8)
        b = random(4, 120, dtype="float64")
        solution = np.linalg.lstsq(want, b, rcond=1e-8)[0]
        found = lsmr(J, b, atol=1e-13, btol=1e-13, conlim=1e8, maxiter=2000)[0]
        assert relative_error(want @ found, want @ solution) < 1e-6
        grams = (J.T @ J) @ np.eye(want.shape[1])
        assert relative_error(grams, want.T @ want) < 1e-12
        assert isinstance(2 * J, LinearOperator)
        assert relative_error((2 * J - J) @ np.ones(len(grams)), want.sum(axis=1)) < 1e-12
        assert relative_error(J @ scipy.sparse.eye_array(len(grams)), want) < 1e-12


def test_nests_of_values_over_batches():
    """Values of two shapes: all of the first, then all of the second, each in the data's order."""
    w = tf.Variable(random(0, 3, dtype="float64"))
    x, scale = random(1, 8, 3, dtype="float64"), random(2, 8, dtype="float64")

    def f(x, scale):
        line = tf.linalg.matvec(x, w)
        return {"a": tf.sin(line) * scale, "b": x * w**2}

    first = (np.cos(x @ w.numpy()) * scale)[:, None] * x
    second = np.einsum("ij,jk->ijk", x, np.diag(2 * w.numpy())).reshape(24, 3)
    want = np.vstack([first, second])
    for options in ({}, {"batch_size": 3}, {"batch_size": 3, "engine": "tape"}):
        with hvp.linearize(f, w, (x, scale), **options) as J:
            assert relative_error(J.to_dense(), want) < 1e-12
            assert relative_error(J.value["b"], x * w.numpy() ** 2) < 1e-12
            u = random(3, 32, dtype="float64")
            assert relative_error(J.vjp({"a": u[:8], "b": u[8:].reshape(8, 3)}), want.T @ u) < 1e-12
            assert relative_error(J.vjp(u), want.T @ u) < 1e-12
            assert J.jvp(np.ones(3))["b"].shape == (8, 3)


def test_data_of_many_shapes():
    w = tf.Variable(random(0, 2, dtype="float64"))
    batches = [(random(i, rows, 2, dtype="float64"),) for i, rows in enumerate([3, 1, 4, 2, 5, 6])]
    want = np.vstack([2 * w.numpy() * x for (x,) in batches])
    with hvp.JacobianOperator(lambda x: tf.linalg.matvec(x, w**2), w, batches) as J:
        assert J.shape == (21, 2)
        assert relative_error(J.to_dense(), want) < 1e-12
        u = random(9, 21, 2, dtype="float64")
        assert relative_error(J.T @ u, want.T @ u) < 1e-12
        assert relative_error(J @ np.ones(2), want.sum(axis=1)) < 1e-12


@pytest.mark.parametrize("jit_compile", [True, "auto"])
@pytest.mark.few(1)
def test_a_loop_that_is_differentiated_a_second_time(jit_compile):
    """The product with XLA, which takes no loops of unknown length, and then without."""
    model, x, _ = make("lstm")
    want = dense_jacobian(model, x)
    with hvp.JacobianOperator(model, model, (x,), jit_compile=jit_compile) as J:
        v = random(1, want.shape[1], 2, dtype="float64")
        u = random(2, want.shape[0], dtype="float64")
        assert relative_error(J @ v[:, 0], want @ v[:, 0]) < 1e-12
        assert relative_error(J @ v, want @ v) < 1e-12
        assert relative_error(J.T @ u, want.T @ u) < 1e-12


def test_types():
    x = random(0, 5, 2)
    half = tf.Variable(np.ones(2, "float16"))
    with hvp.JacobianOperator(lambda x: tf.cast(x, tf.float16) * half, half, (x,)) as J:
        assert J.dtype == np.float32
        assert (J @ np.ones(2)).dtype == np.float32
        np.testing.assert_allclose(J @ np.ones(2), x.ravel(), rtol=1e-3)
    single = tf.Variable(np.ones(2, "float32"))
    with hvp.JacobianOperator(lambda x: tf.cast(x * single, tf.float64), single, (x,)) as J:
        assert J.dtype == np.float64
        np.testing.assert_allclose(J.T @ np.ones(10), x.sum(axis=0), rtol=1e-6)
    assert (J.T @ J).dtype == np.float64


@pytest.mark.parametrize("on_stale", ["raise", "refresh", "ignore"])
def test_changes_of_variables(on_stale):
    w = tf.Variable([1.0, 2.0])
    J = hvp.JacobianOperator(lambda: w**3, w, on_stale=on_stale)
    w.assign([2.0, 3.0])
    if on_stale == "raise":
        for use in (lambda: J @ np.ones(2), lambda: J.T @ np.ones(2), lambda: J.vjp(np.ones(2))):
            with pytest.raises(hvp.StaleOperatorError):
                use()
        J.refresh()
    want = [3, 12] if on_stale == "ignore" else [12, 27]
    np.testing.assert_allclose(J @ np.ones(2), want)
    np.testing.assert_allclose(J.T @ np.ones(2), want)
    np.testing.assert_allclose(J.value, [1, 8] if on_stale == "ignore" else [8, 27])
    J.close()
    assert repr(J) == "JacobianOperator(2 x 2, float32, engine 'graph', closed)"
    with pytest.raises(hvp.ClosedOperatorError):
        J @ np.ones(2)


@pytest.mark.few(0)
def test_least_squares_of_a_keras_model():
    """The `jac` of scipy's solver: the same fit as with its own differences."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((1,), dtype="float64")]
    layers += [keras.layers.Dense(3, "tanh", dtype="float64")]
    layers += [keras.layers.Dense(1, dtype="float64")]
    model = keras.Sequential(layers)
    x = np.linspace(-1, 1, 30)[:, None]
    y = np.sin(2 * x)
    J = hvp.JacobianOperator(model, model, (x,), batch_size=8, on_stale="ignore")
    H = hvp.HessianOperator(lambda x: tf.reduce_mean(model(x)), model, (x,))

    def assign(at):
        for variable, part in zip(model.trainable_variables, H.unflatten(at)):
            variable.assign(part)

    def errors(at):
        assign(at)
        return (model(x).numpy() - y).ravel()

    def jacobian(at):
        assign(at)
        J.refresh()
        return J

    start = np.concatenate([np.ravel(w) for w in model.trainable_variables])
    limits = {"xtol": None, "gtol": 1e-8, "ftol": None, "max_nfev": 150}
    fit = least_squares(errors, start, jacobian, tr_solver="lsmr", x_scale=1.0, **limits)
    by_differences = least_squares(errors, start, **limits)
    found = fit.optimality, np.abs(jacobian(fit.x).T @ errors(fit.x)).max()
    assert found[0] == pytest.approx(found[1], rel=1e-10)
    assert fit.cost <= 1.5 * by_differences.cost + 1e-6


def test_columns_of_some_variables():
    model, x, _ = make("dense")
    with hvp.JacobianOperator(model, model, (x,)) as J:
        dense, (m, n) = J.to_dense(), J.shape
        start = 0
        for variable in model.trainable_variables:
            size = int(np.prod(variable.shape))
            block = J.block([variable.value])
            assert block.shape == (m, size)
            np.testing.assert_allclose(block.to_dense(), dense[:, start : start + size], atol=1e-6)
            u = random(3, m)
            want = dense[:, start : start + size].T @ u
            np.testing.assert_allclose(block.T @ u, want, atol=1e-5 * np.abs(want).max())
            start += size
        v = np.arange(n, dtype="float32")
        np.testing.assert_array_equal(J.flatten(J.unflatten(v)), v)
        # It may have as many entries as a square one of this size.
        assert J.to_dense(max_size=int(np.ceil(np.sqrt(m * n)))).shape == (m, n)


@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_the_gram_matrix_of_a_large_jacobian_goes_by_blocks(monkeypatch, engine):
    w = tf.Variable(random(0, 50, dtype="float64"))
    a = random(1, 40, 50, dtype="float64")
    inside.set_limit(monkeypatch, "entries of a Jacobian that is kept", 100)
    with hvp.JacobianOperator(lambda: tf.sin(tf.linalg.matvec(a, w)), w, engine=engine) as J:
        gram = J.gram()
    rows = np.cos(a @ w.numpy())[:, None] * a
    np.testing.assert_allclose(gram, rows @ rows.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(gram, gram.T)
    with pytest.raises(hvp.TooLargeError, match=r"40 x 40.*max_size=40"):
        hvp.JacobianOperator(lambda: tf.sin(tf.linalg.matvec(a, w)), w).gram(max_size=39)


def test_what_is_refused():
    model, x, y = make("dense")
    with pytest.raises(hvp.InvalidLossError, match="scalar for a batch"):
        hvp.JacobianOperator(lambda x, y: softmax_loss(model(x), y), model, (x, y), batch_size=2)
    with pytest.raises(hvp.InvalidLossError, match="returned a int64"):
        hvp.JacobianOperator(lambda x: tf.argmax(model(x), -1), model, (x,))
    with pytest.raises(hvp.InvalidLossError, match="is str"):
        hvp.JacobianOperator("model", model, (x,))
    with pytest.raises(hvp.InvalidDataError, match="is called with data of 2 elements"):
        hvp.JacobianOperator(lambda x: model(x), model, (x, y))
    with pytest.raises(hvp.InvalidDataError, match="without data"):
        hvp.JacobianOperator(lambda: model(x), model, batch_size=3)
    with pytest.raises(TypeError, match="regularization"):
        hvp.JacobianOperator(model, model, (x,), regularization=lambda: 0.0)
    with hvp.JacobianOperator(model, model, (x,)) as J:
        m, n = J.shape
        for wrong in (np.ones(n + 1), np.ones((n, 2, 2)), np.full(n, np.nan), np.ones(n) * 1j):
            with pytest.raises(hvp.InvalidVectorError):
                J @ wrong if wrong.ndim < 3 else J.matvec(wrong)
        with pytest.raises(hvp.InvalidVectorError):
            J.T @ np.ones(n)
        with pytest.raises(hvp.InvalidVectorError):
            J.T.matmat(np.ones((n, 2)))
        with pytest.raises(hvp.InvalidVectorError, match="structure"):
            J.vjp([np.ones(m), np.ones(m)])
        with pytest.raises(hvp.TooLargeError, match="max_size=31"):
            J.to_dense(max_size=10)
        assert (J @ np.ones((n, 0))).shape == (m, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_many_examples_take_one_pass(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 3)).astype(dtype)
    w = tf.Variable(rng.standard_normal((3, 2)), dtype=dtype)
    b = tf.Variable(rng.standard_normal(2), dtype=dtype)

    def function(x):
        return {"sum": tf.tanh(x @ w + b), "product": tf.reduce_prod(x @ w, axis=1)}

    J = hvp.JacobianOperator(function, [w, b], (x,))
    before = J.stats.products
    dense = J.to_dense()
    assert J.stats.products - before == 1  # which the rows are compared with
    z = x @ w.numpy()
    slope = 1 / np.cosh(z + b.numpy()) ** 2
    units = np.eye(2)
    by_w = np.einsum("nj,ni,jk->nkij", slope, x, units)
    by_b = np.einsum("nj,jk->nkj", slope, units)
    tanh = np.concatenate([by_w.reshape(200, 6), by_b.reshape(200, 2)], axis=1)
    product = np.concatenate(
        [(x[:, :, np.newaxis] * z[:, np.newaxis, ::-1]).reshape(100, 6), np.zeros((100, 2))], axis=1
    )
    expected = np.concatenate([product, tanh])  # the order of keys
    rtol = 1e-4 if dtype == "float32" else 1e-10
    np.testing.assert_allclose(dense, expected, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(J.gram(), expected @ expected.T, rtol=rtol, atol=100 * rtol)


@pytest.mark.parametrize("strength", [1.0, 1e-3])
def test_rows_of_examples_that_are_mixed_are_those_of_products(strength):
    x = np.random.default_rng(0).standard_normal((100, 3))
    w = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64)

    def function(x):
        values = tf.linalg.matvec(x, w)
        return values - strength * tf.reduce_mean(values)

    dense = hvp.JacobianOperator(function, w, (x,)).to_dense()
    np.testing.assert_allclose(dense, x - strength * x.mean(axis=0), rtol=1e-12)


def test_rows_after_a_change_are_those_of_the_evaluation():
    x = np.random.default_rng(0).standard_normal((100, 1))
    w = tf.Variable([3.0], dtype=tf.float64)
    J = hvp.JacobianOperator(lambda x: tf.sin(x * w), w, (x,), on_stale="ignore")
    w.assign([5.0])
    np.testing.assert_allclose(J.to_dense(), x * np.cos(3 * x), rtol=1e-10)
    J.refresh()
    np.testing.assert_allclose(J.to_dense(), x * np.cos(5 * x), rtol=1e-10)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("engine", ["graph", "tape"])
def test_sums_of_segments(count, engine):
    ids = np.array([1, 0, 1])
    w = tf.Variable(np.random.default_rng(0).standard_normal((3, 2)))
    J = hvp.JacobianOperator(lambda: tf.math.unsorted_segment_sum(w, ids, count), w, engine=engine)
    expected = np.kron(np.eye(count)[:, ids], np.eye(2))
    np.testing.assert_array_equal(J.to_dense(), expected)
    v = np.arange(6.0)
    np.testing.assert_array_equal(J @ v, expected @ v)
    np.testing.assert_array_equal(J.T @ np.arange(2.0 * count), expected.T @ np.arange(2.0 * count))


def test_small_values_that_depend_on_other_examples():
    """Beside large ones, in whose rounding errors the dependence is lost."""
    w, x = tf.Variable([0.1, 0.2, 0.3]), random(0, 100, 3)

    def values(x):
        p = tf.tanh(tf.linalg.matvec(x, w))
        return tf.stack([1e5 * p, p - tf.reduce_mean(p)], axis=1)

    J = hvp.JacobianOperator(values, w, (x,))
    np.testing.assert_allclose(J.to_dense()[1::2], (J @ np.eye(3, dtype="f"))[1::2], rtol=1e-5)


@pytest.mark.parametrize("batch_size", [2, 4])
def test_the_pattern_of_several_outputs_in_batches(batch_size):
    w, x = tf.Variable(np.arange(1.0, 7)), np.arange(6)
    J = hvp.JacobianOperator(
        lambda i: {"a": tf.gather(w, i) ** 2, "b": tf.gather(w, (i + 1) % 6) ** 3},
        w,
        (x,),
        batch_size=batch_size,
    )
    np.testing.assert_array_equal(J.sparsity().pattern.toarray(), J.to_dense() != 0)
    np.testing.assert_allclose(J.to_sparse().toarray(), J.to_dense())


def test_values_of_a_wider_type_in_tensorflow():
    w = tf.Variable([1.0, 2.0])
    operator = hvp.JacobianOperator(lambda: tf.cast(w, tf.float64) ** 2, w).as_tf_operator()
    np.testing.assert_allclose(operator.to_dense(), np.diag([2.0, 4.0]))
    ones = tf.ones(2, tf.float64)
    np.testing.assert_allclose(operator.matvec(ones, adjoint=True), [2.0, 4.0])
