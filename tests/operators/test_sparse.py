"""Sparse matrices: patterns are never too small, and matrices those of dense products."""

import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from hypothesis import given

import hvp
from tests.cases import examples, long, random
from tests.fuzz.programs import Parameters, programs
from tests.fuzz.steps import FAMILIES

F = tf.float64
# What is computed in float32 on the way has the rounding errors of that.
ROUNDED = {("functions", "rgb to gray")}
STEPS = [(f, name) for f, steps in FAMILIES.items() for name in steps if (f, name) not in ROUNDED]


def variable(*shape, seed=0, dtype=F):
    return tf.Variable(np.random.default_rng(seed).standard_normal(shape), dtype=dtype)


def chain():
    w = variable(40)
    return lambda: tf.reduce_sum((w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2), w, 3


def string_of_second_differences():
    w = variable(40)

    def bends():
        return w[2:] - 2 * w[1:-1] + w[:-2]

    return lambda: tf.reduce_sum(bends() ** 4) + tf.reduce_sum(tf.cosh(w)), w, 5


def grid():
    w = variable(9, 8)

    def along():
        return tf.reduce_sum((w[1:] - w[:-1]) ** 4)

    def across():
        return tf.reduce_sum((w[:, 1:] - w[:, :-1]) ** 4)

    return lambda: along() + across() + tf.reduce_sum(tf.cos(w)), w, 10


def periodic_grid():
    w = variable(9, 10)

    def sides():
        return [tf.roll(w, shift, axis) - w for axis in (0, 1) for shift in (1,)]

    return lambda: sum(tf.reduce_sum(side**4) for side in sides()), w, 12


def tree():
    w = variable(31)
    parents = (np.arange(1, 31) - 1) // 2
    return lambda: tf.reduce_sum(tf.exp(w[1:] * tf.gather(w, parents))), w, 5


def mixed_model():
    groups, common = variable(30), variable(2)
    of = np.arange(90) // 3
    x = np.random.default_rng(1).standard_normal((90, 2))

    def loss():
        mean = tf.linalg.matvec(x, common) + tf.gather(groups, of)
        return tf.reduce_sum(tf.nn.softplus(mean)) + tf.reduce_sum(groups**4)

    return loss, [groups, common], 3


def segments():
    w = variable(30)
    return lambda: tf.reduce_sum(tf.math.unsorted_segment_sum(w, np.arange(30) // 5, 6) ** 4), w, 5


def sparse_product():
    w = variable(30)
    rows = np.arange(28)
    indices = np.stack([np.repeat(rows, 3), (rows[:, None] + [0, 1, 2]).ravel()], axis=1)
    bends = tf.sparse.SparseTensor(indices, np.tile([1.0, -2.0, 1.0], 28), [28, 30])

    def loss():
        return tf.reduce_sum(tf.sparse.sparse_dense_matmul(bends, w[:, tf.newaxis]) ** 4)

    return loss, w, 5


def convolution():
    w = variable(30)
    kernel = tf.constant([1.0, -2.0, 1.0], F)[:, tf.newaxis, tf.newaxis]

    def loss():
        return tf.reduce_sum(tf.nn.conv1d(w[tf.newaxis, :, tf.newaxis], kernel, 1, "VALID") ** 4)

    return loss, w, 5


def convolution_of_an_image():
    w = variable(1, 7, 6, 2)
    kernel = tf.constant(np.random.default_rng(0).standard_normal((3, 2, 2, 3)))
    return lambda: tf.reduce_sum(tf.nn.conv2d(w, kernel, [1, 2, 1, 1], "SAME") ** 4), w, 60


PROBLEMS = [
    *(chain, string_of_second_differences, grid, periodic_grid, tree, mixed_model, segments),
    *(sparse_product, convolution, convolution_of_an_image),
]


@pytest.mark.parametrize("make", PROBLEMS)
@pytest.mark.few(1)
def test_patterns_of_known_structure_are_exact(make):
    loss, w, most = make()
    H = hvp.HessianOperator(loss, w)
    sparsity = H.sparsity()
    dense = H.to_dense()
    np.testing.assert_array_equal(sparsity.pattern.toarray(), dense != 0)
    assert sparsity.products <= most
    before = H.stats.products
    matrix = H.to_sparse()
    assert H.stats.products - before == sparsity.products + 1  # and the random vector
    assert matrix.format == "csr"
    np.testing.assert_allclose(matrix.toarray(), dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"damping": 0.5}, {"jit_compile": True}, {"dtype": "float32"}]
)
def test_options(options):
    options = dict(options)
    w = variable(20, dtype=options.pop("dtype", "float64"))
    H = hvp.HessianOperator(lambda: tf.reduce_sum((w[1:] - w[:-1]) ** 4), w, **options)
    matrix = H.to_sparse()
    assert matrix.dtype == H.dtype
    np.testing.assert_allclose(matrix.toarray(), H.to_dense(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        (H.damped(2.0)).to_sparse().toarray(), H.damped(2.0).to_dense(), atol=1e-4
    )


def test_a_new_point_takes_the_pattern_of_the_first():
    loss, w, _ = chain()
    H = hvp.HessianOperator(loss, w)
    H.to_sparse()
    w.assign(2 * w)
    H.refresh()
    before = H.stats.products
    np.testing.assert_allclose(H.to_sparse().toarray(), H.to_dense(), rtol=1e-10, atol=1e-12)
    assert H.stats.products - before < 4 + 40 + 1


def test_a_pattern_that_changes_with_the_point():
    w = variable(12)

    def loss():
        ordered = tf.sort(w)
        return tf.reduce_sum((ordered[1:] - ordered[:-1]) ** 4)

    H = hvp.HessianOperator(loss, w)
    for seed in range(3):
        w.assign(np.random.default_rng(seed).standard_normal(12))
        H.refresh()
        np.testing.assert_allclose(H.to_sparse().toarray(), H.to_dense(), rtol=1e-9, atol=1e-9)


def test_jacobians_take_rows_or_columns():
    w = variable(30)
    tall = hvp.JacobianOperator(lambda: tf.concat([tf.sin(w), w[1:] * w[:-1]], 0), w)
    assert tall.sparsity().products == 2
    np.testing.assert_allclose(tall.to_sparse().toarray(), tall.to_dense(), rtol=1e-10)
    full_row = hvp.JacobianOperator(lambda: tf.reshape(tf.reduce_sum(w**2), [1]), w)
    assert full_row.sparsity().by_rows
    assert full_row.sparsity().products == 1
    np.testing.assert_allclose(full_row.to_sparse().toarray(), full_row.to_dense(), rtol=1e-10)
    np.testing.assert_allclose(tall.T.to_sparse().toarray(), tall.to_dense().T, rtol=1e-10)


def test_gauss_newton_matrices_and_blocks():
    w, scale = variable(20), variable(1)

    def squares(r):
        return tf.reduce_sum(r**2)

    G = hvp.GaussNewtonOperator(lambda: scale * (w[1:] - w[:-1] ** 2), squares, [w, scale])
    np.testing.assert_allclose(G.to_sparse().toarray(), G.to_dense(), rtol=1e-10, atol=1e-12)
    block = G.block([w])
    assert block.sparsity().products == 3
    np.testing.assert_allclose(
        block.to_sparse().toarray(), block.to_dense(), rtol=1e-10, atol=1e-12
    )


def example(x, w):
    return (x[:, :-1] - x[:, 1:]) * w[:-1] + w[1:] ** 2


def problem_of_batches():
    w, x = variable(15), np.random.default_rng(0).standard_normal((6, 15))

    def loss(x):
        return tf.reduce_mean(tf.reduce_sum(example(x, w) ** 2, axis=1))

    return loss, w, (x,)


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"devices": ["CPU:0"], "batch_size": 4}])
@pytest.mark.few(1)
def test_batches(options):
    loss, w, data = problem_of_batches()
    options["regularization"] = lambda: tf.reduce_sum(w[2:] * w[:-2])
    H = hvp.HessianOperator(loss, w, data, **options)
    if "devices" in options:
        with pytest.raises(hvp.HvpError, match="pattern"):
            H.sparsity()
        return
    assert H.sparsity().products <= 5
    np.testing.assert_allclose(H.to_sparse().toarray(), H.to_dense(), rtol=1e-9, atol=1e-12)
    J = hvp.JacobianOperator(lambda x: example(x, w), w, data, batch_size=2)
    assert J.sparsity().products == 2
    np.testing.assert_allclose(J.to_sparse().toarray(), J.to_dense(), rtol=1e-9, atol=1e-12)


def test_patterns_that_are_given():
    loss, w, data = problem_of_batches()
    H = hvp.HessianOperator(loss, w, data, engine="tape")
    with pytest.raises(hvp.HvpError, match="pattern"):
        H.sparsity()
    band = scipy.sparse.diags_array([np.ones(14), np.ones(15), np.ones(14)], offsets=[-1, 0, 1])
    np.testing.assert_allclose(
        H.to_sparse(pattern=band).toarray(), H.to_dense(), rtol=1e-9, atol=1e-12
    )
    too_small = scipy.sparse.lil_array(band)
    too_small[7, 8] = too_small[8, 7] = 0
    with pytest.raises(hvp.FailedCheckError, match=r"[23] rows.* row [78] "):
        H.to_sparse(pattern=too_small)
    with pytest.raises(hvp.HvpError, match="15"):
        H.to_sparse(pattern=np.ones((3, 3)))
    with pytest.raises(hvp.HvpError, match="pattern is 'band'"):
        H.to_sparse(pattern="band")


def test_a_small_entry_that_is_missing_is_noticed():
    w = variable(30)

    def loss():
        return 1e6 * tf.reduce_sum(w[:20] ** 2) + 1e-6 * w[28] * w[29] + tf.reduce_sum(w**2)

    H = hvp.HessianOperator(loss, w)
    with pytest.raises(hvp.FailedCheckError):
        H.to_sparse(pattern=np.eye(30))
    np.testing.assert_allclose(H.to_sparse().toarray()[28, 29], 1e-6, rtol=1e-6)


def test_a_pattern_without_zeros_is_refused_where_it_is_large():
    w = variable(20_000)
    H = hvp.HessianOperator(lambda: tf.reduce_sum((w - tf.reduce_mean(w)) ** 4), w)
    with pytest.raises(hvp.TooLargeError, match="products"):
        H.sparsity()


@pytest.mark.few(3)
@pytest.mark.parametrize(("family", "name"), STEPS, ids=str)
def test_patterns_of_steps_of_programs_are_never_too_small(family, name):
    w = tf.Variable(random(0, 3, 3, dtype="float64", scale=0.7))
    parameters = Parameters(2, "float64")

    def step():
        parameters.again()
        return FAMILIES[family][name](w + 0.0, parameters)

    value = step()  # makes the parameters
    parameters.complete = True
    J = hvp.JacobianOperator(step, w)
    dense = J.to_dense()
    missing = (dense != 0) & ~J.sparsity().pattern.toarray()
    assert not missing.any(), np.argwhere(missing)
    np.testing.assert_allclose(J.to_sparse().toarray(), dense, rtol=1e-8, atol=1e-10)
    weights = random(1, *value.shape, dtype="float64")
    H = hvp.HessianOperator(lambda: tf.reduce_sum(weights * step() ** 2), w)
    dense = H.to_dense()
    assert not ((dense != 0) & ~H.sparsity().pattern.toarray()).any()
    np.testing.assert_allclose(H.to_sparse().toarray(), dense, rtol=1e-8, atol=1e-8)


@pytest.mark.random
@pytest.mark.parametrize("family", [long(family) for family in FAMILIES])
def test_patterns_of_random_programs_are_never_too_small(family):
    """Against dense matrices, of which no entry that is not zero may be missing."""

    @examples(1)
    @given(programs(family))
    def run(program):
        if ROUNDED & set(program.names):
            return
        made = program.made("float64")
        try:
            H = hvp.HessianOperator(made.loss, made.variables)
        except (hvp.HvpError, tf.errors.OpError):
            return  # what is refused, and why, is the subject of other tests
        with H:
            if H.stats.engine != "graph":
                return
            dense = H.to_dense()
            missing = (np.abs(dense) > 0) & ~H.sparsity().pattern.toarray()
            assert not missing.any(), (program, np.argwhere(missing))
            # Where all is a rounding error, no two ways agree.
            scale = np.abs(dense).max(initial=0)
            if np.isfinite(dense).all() and np.abs(dense - dense.T).max() <= 1e-8 * scale:
                np.testing.assert_allclose(H.to_sparse().toarray(), dense, atol=1e-7 * scale)

    run()


@pytest.mark.long
def test_batches_of_many_lengths():
    w, x = variable(15), np.random.default_rng(0).standard_normal((27, 15))
    ends = np.cumsum([2, 3, 4, 5, 6, 7])  # more shapes than have traces of their own
    batches = [(part,) for part in np.split(x, ends[:-1])]
    J = hvp.JacobianOperator(lambda x: example(x, w), w, batches)
    np.testing.assert_allclose(J.to_sparse().toarray(), J.to_dense(), rtol=1e-9, atol=1e-12)
    H = hvp.HessianOperator(lambda x: tf.reduce_mean(example(x, w) ** 2), w, batches)
    np.testing.assert_allclose(H.to_sparse().toarray(), H.to_dense(), rtol=1e-9, atol=1e-12)


def test_parts_of_different_precision():
    """Products are as accurate as the variables that are in single precision."""
    a, b = tf.Variable(random(0, 400)), tf.Variable(random(1, 3, dtype="float64"))
    H = hvp.HessianOperator(
        lambda: tf.cast(tf.reduce_sum(tf.sin(a)), tf.float64) + tf.reduce_sum(b**3), [a, b]
    )
    expected = np.r_[-np.sin(a.numpy()), 6 * b.numpy()]
    np.testing.assert_allclose(H.to_sparse().diagonal(), expected, rtol=1e-5, atol=1e-6)
