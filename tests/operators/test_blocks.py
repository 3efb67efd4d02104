"""Blocks of operators, against the parts of a dense matrix assembled from the loss."""

import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.sparse.linalg import cg, eigsh, svds

import hvp
from tests import inside
from tests.cases import Problem, dense_hessian, random, relative_error
from tests.operators.test_gauss_newton import WAYS

layers = keras.layers


def make():
    """A model with one layer called twice, its data, and the dense Hessian of its loss."""
    x = keras.Input((4,), dtype="float64")
    twice = layers.Dense(4, "tanh", name="twice", dtype="float64")
    h = layers.Dense(3, "tanh", name="dense_2", dtype="float64")(twice(twice(x)))
    model = keras.Model(x, layers.Dense(2, name="dense_20", dtype="float64")(h))
    for index, weight in enumerate(model.trainable_variables):
        weight.assign(random(index, *weight.shape, dtype="float64", scale=0.6))
    data = random(7, 7, 4, dtype="float64"), random(8, 7, 2, dtype="float64")

    def loss(x, y):
        return tf.reduce_mean(tf.reduce_sum((model(x) - y) ** 4, axis=1))

    variables = [v.value for v in model.trainable_variables]
    return model, loss, data, dense_hessian(Problem(lambda: loss(*data), variables))


# The places of 16 + 4, 12 + 3 and 6 + 2 entries.
TWICE, SECOND, LAST = np.arange(20), np.arange(20, 35), np.arange(35, 43)
KERNELS = np.r_[0:16, 20:32, 35:41]


def options_of(way, build):
    options = dict(WAYS[way])
    if "memory_limit" in options:
        with build(batch_size=2) as H:
            options["memory_limit"] = int(4.6 * H.stats.residual_bytes / 4)
    if "recompute" in options:
        options["recompute"] = ["twice", "dense_2"]
    return options


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_they_are_parts_of_the_dense_matrix(way):
    model, loss, data, want = make()

    def build(**options):
        return hvp.HessianOperator(loss, model, data, **options)

    with build(**options_of(way, build)) as H:
        evaluations = H.stats.gradient_evaluations
        for chosen, places in (
            ("twice", TWICE),
            ("dense_2", SECOND),
            ("dense_*", np.r_[SECOND, LAST]),
            ("dense_2/kernel", SECOND[:12]),
            ("kernel", KERNELS),
            (model.get_layer("dense_20"), LAST),
            ([model.get_layer("dense_20").bias, "twice"], np.r_[TWICE, LAST[6:]]),
        ):
            B, exact = H.block(chosen), want[np.ix_(places, places)]
            assert relative_error(B.to_dense(), exact) < 1e-10
            v = random(3, len(places), dtype="float64")
            assert relative_error(B @ v, exact @ v) < 1e-10
            assert relative_error(B.gradient, H.gradient[places]) < 1e-14
            damped, in_graph = B.damped(0.5), tf.function(B.product)
            assert relative_error(damped @ v, exact @ v + 0.5 * v) < 1e-10
            assert relative_error(in_graph(tf.constant(v)), exact @ v) < 1e-10
            parts = B.unflatten(tf.constant(v))
            assert relative_error(B.flatten(B.product(parts)), exact @ v) < 1e-10
        C, exact = (
            H.block("dense_2", ["twice", "dense_20"]),
            want[np.ix_(SECOND, np.r_[TWICE, LAST])],
        )
        assert C.shape == (15, 28)
        assert relative_error(C.to_dense(), exact) < 1e-10
        assert relative_error(C.T.to_dense(), exact.T) < 1e-10
        u = random(4, 15, 2, dtype="float64")
        assert relative_error(C.T @ u, exact.T @ u) < 1e-10
        assert relative_error(svds(C, 1)[1][0], np.linalg.norm(exact, 2)) < 1e-8
        assert H.stats.gradient_evaluations == evaluations


def test_the_layers():
    model, loss, data, want = make()
    with hvp.HessianOperator(loss, model, data) as H:
        blocks = H.blocks()
        assert list(blocks) == ["twice", "dense_2", "dense_20"]
        for block, places in zip(blocks.values(), (TWICE, SECOND, LAST)):
            assert relative_error(block.to_dense(), want[np.ix_(places, places)]) < 1e-10
        assert repr(blocks["twice"]) == (
            "BlockOperator(20 x 20, float64, engine 'graph', of twice/kernel, twice/bias)"
        )
        assert "15 x 20" in repr(H.block("dense_2", "twice"))
        # A block of a block, and one of the damped operator.
        inner = H.damped(2.0).block("dense_*").block("dense_20")
        assert relative_error(inner.to_dense(), want[np.ix_(LAST, LAST)] + 2 * np.eye(8)) < 1e-10
        # They go on with the operator.
        model.get_layer("twice").bias.assign_add(np.full(4, 0.1))
        with pytest.raises(hvp.StaleOperatorError):
            blocks["twice"] @ np.ones(20)
        H.refresh()
        moved = dense_hessian(
            Problem(lambda: loss(*data), [v.value for v in model.trainable_variables])
        )
        assert relative_error(blocks["twice"].to_dense(), moved[:20, :20]) < 1e-10
        cross = H.block("dense_2", "twice")
    with pytest.raises(hvp.ClosedOperatorError):
        blocks["twice"] @ np.ones(20)
    with pytest.raises(hvp.ClosedOperatorError):
        cross @ np.ones(20)
    a, b = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(a**2) * b[0] ** 2, [a, b]) as H:
        assert [block.shape[0] for block in H.blocks().values()] == [2, 1]


@pytest.mark.parametrize("engine", ["graph", "tape"])
@pytest.mark.few(1)
def test_solvers_eigenvalues_and_checks_of_blocks(engine):
    model, loss, data, want = make()
    with hvp.HessianOperator(loss, model, data, engine=engine, damping=5.0) as H:
        B, exact = H.block("dense_2"), want[np.ix_(SECOND, SECOND)] + 5 * np.eye(15)
        b = random(5, 15, 3, dtype="float64")
        x = hvp.solve(B, b, rtol=1e-12).x
        assert relative_error(exact @ x, b) < 1e-10
        assert relative_error(exact @ cg(B, b[:, 0], rtol=1e-12)[0], b[:, 0]) < 1e-10
        assert relative_error(eigsh(B, 1)[0][0], np.linalg.eigvalsh(exact)[-1]) < 1e-8
        assert hvp.check(B).ok
        operator = B.as_tf_operator()
        assert relative_error(operator.matvec(tf.constant(b[:, 0])), exact @ b[:, 0]) < 1e-10


def test_a_block_in_low_precision_is_refined():
    w, u = tf.Variable(random(0, 8, 8)), tf.Variable(random(1, 8, 4))
    x = random(2, 50, 8)

    def loss(x):
        return tf.reduce_mean(tf.reduce_sum((tf.tanh(x @ w) @ u) ** 2, axis=1))

    h = np.tanh(x @ w.numpy()).astype("float64")
    want = np.kron(2 * h.T @ h / 50, np.eye(4))
    with hvp.HessianOperator(loss, [w, u], (x,), precision="bfloat16") as H:
        b = random(3, 32)
        solution = hvp.solve(H.block(u), b, damping=1.0, rtol=1e-4)
        assert relative_error((want + np.eye(32)) @ solution.x, b) < 1e-4


def test_variables_of_several_types():
    a = tf.Variable(random(0, 3, dtype="float64"))
    b = tf.Variable(random(1, 3))

    def loss():
        return tf.reduce_sum(a**2 * tf.cast(b, tf.float64) ** 2)

    a2, b2 = a.numpy() ** 2, b.numpy().astype("float64") ** 2
    with hvp.HessianOperator(loss, {"a": a, "b": b}) as H:
        assert H.block(b).dtype == np.float32
        assert relative_error(H.block(b).to_dense(), np.diag(2 * a2)) < 1e-6
        assert relative_error(H.block(a).to_dense(), np.diag(2 * b2)) < 1e-12
        cross = H.block(b, a)
        assert relative_error(cross.to_dense(), np.diag(4 * a.numpy() * b.numpy())) < 1e-6
        assert cross.dtype == np.float64


def test_the_block_diagonal_preconditioner():
    model, loss, data, want = make()
    with hvp.HessianOperator(loss, model, data) as H:
        exact, _damped = np.zeros_like(want), want + 0.1 * np.eye(43)
        for places in (TWICE, SECOND, LAST):
            values, vectors = np.linalg.eigh(
                want[np.ix_(places, places)] + 0.1 * np.eye(len(places))
            )
            values = np.maximum(np.abs(values), 1e-6 * np.abs(values).max())
            exact[np.ix_(places, places)] = (vectors / values) @ vectors.T
        M = hvp.BlockDiagonalPreconditioner(H, damping=0.1)
        assert relative_error(M @ np.eye(43), exact) < 1e-8
        assert relative_error(M @ np.ones(43), exact @ np.ones(43)) < 1e-8
        assert M.products == 43
        # Blocks whose entries are not next to each other.
        M = hvp.BlockDiagonalPreconditioner(H, ["kernel", "bias"], damping=0.1)
        biases = np.setdiff1d(np.arange(43), KERNELS)
        for places in (KERNELS, biases):
            values = np.abs(
                np.linalg.eigvalsh(want[np.ix_(places, places)] + 0.1 * np.eye(len(places)))
            )
            part = (M @ np.eye(43))[np.ix_(places, places)]
            found = 1 / np.linalg.eigvalsh(part)[::-1]
            np.testing.assert_allclose(found, np.sort(values), rtol=1e-6)
        assert np.abs((M @ np.eye(43))[np.ix_(KERNELS, biases)]).max() < 1e-12

        with pytest.raises(hvp.HvpError, match="in no block"):
            hvp.BlockDiagonalPreconditioner(H, ["kernel"])
        with pytest.raises(hvp.HvpError, match="in several blocks"):
            hvp.BlockDiagonalPreconditioner(H, ["kernel", "bias", "twice"])
        with pytest.raises(hvp.TooLargeError, match=r"twice/kernel.*at most 10"):
            hvp.BlockDiagonalPreconditioner(H, max_size=10)
    with pytest.raises(hvp.HvpError, match="knows its variables"):
        hvp.BlockDiagonalPreconditioner(np.eye(3))


def test_the_preconditioner_saves_iterations():
    scales = [1.0, 1e3]
    parts = [tf.Variable(random(i, 30, dtype="float64"), name=f"part_{i}") for i in range(2)]
    mixes = [random(5 + i, 30, 30, dtype="float64") for i in range(2)]

    def loss():
        inner = [tf.linalg.matvec(mix, part) for mix, part in zip(mixes, parts)]
        own = sum(s * tf.reduce_sum(p**2 + p**4) for s, p in zip(scales, inner))
        return own + 0.01 * tf.reduce_sum(inner[0] * inner[1])

    with hvp.HessianOperator(loss, parts) as H:
        b, options = np.ones(60), {"method": "cg", "rtol": 1e-8}
        plain = hvp.solve(H, b, **options)
        M = hvp.BlockDiagonalPreconditioner(H)
        quick = hvp.solve(H, b, M=M, **options)
        assert quick.converged
        assert quick.iterations < plain.iterations / 4
        assert cg(H, b, M=M, rtol=1e-8, maxiter=10)[1] == 0


def test_what_is_none_of_the_variables_is_refused():
    model, loss, data, _ = make()
    with hvp.HessianOperator(loss, model, data) as H:
        with pytest.raises(hvp.InvalidVariablesError, match=r"'dense_3'.*twice/kernel, twice/bias"):
            H.block("dense_3")
        with pytest.raises(hvp.InvalidVariablesError, match="'dense_2/k'"):
            H.block("dense_2/k")
        with pytest.raises(hvp.InvalidVariablesError, match="none of the operator's"):
            H.block(tf.Variable(3.0, name="other"))
        with pytest.raises(hvp.InvalidVariablesError, match="No variable is chosen"):
            H.block([])
        with pytest.raises(hvp.InvalidVariablesError, match="is not a variable"):
            H.block(3)
        with pytest.raises(hvp.InvalidVectorError):
            H.block("dense_2") @ np.ones(43)


def test_blocks_do_not_keep_residuals(monkeypatch):
    """They are freed with the last operator, without a garbage collection."""
    w = {"a": tf.Variable(random(0, 30)), "b": tf.Variable(random(1, 30))}
    H = hvp.HessianOperator(lambda: tf.reduce_sum(tf.tanh(w["a"] * w["b"])), w)
    blocks = H.blocks()
    result = hvp.eigsh(H, 2)
    for block in blocks.values():
        block @ np.ones(30)
    held = weakref.ref(inside.snapshot(H))
    gc.collect()
    gc.disable()
    try:
        del H, block
        assert held() is not None  # blocks keep what they need
        blocks.clear()
        assert held() is None
    finally:
        gc.enable()
    assert set(result.nests[0]) == {"a", "b"}  # a result keeps its structure, not the operator


def test_solvers_of_a_block_are_compiled_once_whatever_its_damping():
    w, b = tf.Variable(random(0, 4, dtype="float64"), name="w"), tf.Variable(2.0, name="b")
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) * tf.cast(b, tf.float64), [w, b])
    first = H.damped(0.5).block("w")
    hvp.solve(first, np.ones(4), method="cg")
    compiled = inside.solver_count(first)
    assert compiled > 0
    for damping in (1.0, 2.0):
        block = H.damped(damping).block("w")
        assert inside.solver_count(block) == compiled  # before it was used
        hvp.solve(block, np.ones(4), method="cg")
        assert inside.solver_count(block) == compiled


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(1)
def test_blocks_of_entries(way):
    model, loss, data, want = make()

    def build(**options):
        return hvp.HessianOperator(loss, model, data, **options)

    chosen, others = np.array([40, 3, 21, 0]), np.array([5, 3])
    with build(**options_of(way, build)) as H:
        damped = H.damped(0.5)
        want = want + 0.5 * np.eye(len(want))
        block = damped.block(chosen)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
        close(block.to_dense(), want[np.ix_(chosen, chosen)])
        v = random(9, 4, dtype="float64")
        close(
            hvp.solve(block, v, method="minres", rtol=1e-12).x,
            np.linalg.solve(block @ np.eye(4), v),
        )
        close(block.damped(1.0).to_dense(), block.to_dense() + np.eye(4))
        close(block.gradient, H.gradient[chosen])
        close(block.block(np.array([2, 0])).to_dense(), want[np.ix_([21, 40], [21, 40])])
        with pytest.raises(hvp.HvpError, match="4 entries"):
            block.block("dense_20")
        inverse, solver = hvp.ExactInverse(block), hvp.Solver(block)
        close(inverse @ v, np.linalg.solve(block.to_dense(), v))
        H.refresh()
        with pytest.raises(hvp.StaleOperatorError):
            inverse @ v
        close(solver.solve(v).x, np.linalg.solve(block.to_dense(), v))
        corner = damped.block(chosen, others)
        close(corner.to_dense(), want[np.ix_(chosen, others)])
        close(corner.T @ v, want[np.ix_(others, chosen)] @ v)
        close(damped.block("dense_20", others).to_dense(), want[np.ix_(LAST, others)])
        close(damped.block("dense_20", "dense_20").to_dense(), want[np.ix_(LAST, LAST)])
        close(corner.product([tf.constant([1.0, 0], "float64")])[0], want[chosen, 5])
        for same in ([40, 41, 42], range(40, 43), slice(40, None)):
            close(damped.block(same).to_dense(), want[40:, 40:])
        for wrong in ([0.5], [-1], [43], [], [[0]], [True, False]):
            with pytest.raises(hvp.InvalidVariablesError, match="0 to 42"):
                H.block(np.array(wrong))
