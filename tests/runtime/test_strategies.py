"""Everything works inside the scope of a distribution strategy with two replicas."""

import keras
import numpy as np
import tensorflow as tf

import hvp
from tests.cases import FUZZ


def test_inside_the_scope_of_a_strategy():
    keras.utils.set_random_seed(0)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 3), "f4"), rng.standard_normal((20, 1), "f4")
    with strategy.scope():
        layers = [keras.Input((3,)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(loss="mse")

    def loss(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    weights = [w.numpy().astype("f8") for w in model.trainable_variables]

    def gradient(flat):
        # By hand, in float64.
        W, b, V, c = (p.reshape(w.shape) for p, w in zip(np.split(flat, [6, 8, 10]), weights))
        h = np.tanh(x @ W + b)
        residual = 2 * (h @ V + c - y) / len(x)
        inner = (residual @ V.T) * (1 - h**2)
        parts = [x.T @ inner, inner.sum(0), h.T @ residual, residual.sum(0)]
        return np.concatenate([part.ravel() for part in parts])

    at, step = np.concatenate([w.ravel() for w in weights]), 1e-5
    dense = np.array(
        [(gradient(at + step * e) - gradient(at - step * e)) / (2 * step) for e in np.eye(11)]
    )

    def close(found, want=dense):
        np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())

    with strategy.scope():
        always = [{"recompute": True}, {"batch_size": 7, "memory_limit": 3000, "engine": "tape"}]
        further = [{}, {"engine": "tape"}, {"batch_size": 7}, {"jit_compile": True}]
        for options in always + (further if FUZZ else []):
            with hvp.HessianOperator(loss, model, (x, y), **options) as H:
                close(H.to_dense())
                close(H @ np.ones(11), dense.sum(axis=1))
                H.refresh()
                close(H @ np.ones(11), dense.sum(axis=1))
        with hvp.HessianOperator.from_keras(model, (x, y), on_stale="refresh") as H:
            close(H.to_dense())
            close(tf.function(H.product)(tf.ones(11)), dense.sum(axis=1))
            assert hvp.check(H).ok
            for variable in model.trainable_variables:
                variable.assign(variable * 1.0 + 0.0)
            close(H @ np.ones(11), dense.sum(axis=1))
            solution = hvp.solve(H.damped(9.0), np.ones(11), method="cg", rtol=1e-6).x
            close(solution, np.linalg.solve(dense + 9 * np.eye(11), np.ones(11)))
        one = hvp.hessian_vector_product(loss, model, np.ones(11, "f4"), (x, y))
        close(one, dense.sum(axis=1))
        with hvp.linearize(lambda: loss(x, y), model) as linear:
            np.testing.assert_allclose(
                float(linear.jvp(np.ones(11))), gradient(at).sum(), rtol=1e-4
            )
        influence = hvp.InfluenceFunctions(loss, model, (x, y), damping=9.0)
        assert influence.scores((x[:2], y[:2])).shape == (2, 20)
        objective = hvp.ScipyObjective(loss, model, (x, y))
        close(objective.hessp(objective.x0, np.ones(11)), dense.sum(axis=1))
        close(objective.jac(at), gradient(at))
        before = float(loss(x, y))
        hvp.minimize(loss, model, (x, y), maxiter=2)
        hvp.NewtonCG(loss, model, (x, y)).minimize(maxiter=2)
        assert float(loss(x, y)) < before
        # Both copies of each variable went along.
        for variable in model.trainable_variables:
            values = [v.numpy() for v in variable.value.values]
            assert len(values) == 2
            assert np.array_equal(*values)
