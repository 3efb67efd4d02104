"""What objects say of themselves, in one line each, and what completion offers."""

import numpy as np
import tensorflow as tf

import hvp


def quartic():
    w = tf.Variable([1.0, 2.0, 3.0])
    return w, lambda: tf.reduce_sum(w**4) / 12


def test_operators():
    w, loss = quartic()
    H = hvp.HessianOperator(loss, w)
    assert repr(H) == "HessianOperator(3 x 3, float32, engine 'graph')"
    damped = H.damped(0.5)
    assert repr(damped) == "HessianOperator(3 x 3, float32, engine 'graph', damping 0.5)"
    w.assign_add([1.0, 0.0, 0.0])
    assert repr(damped).endswith("damping 0.5, stale)")
    H.refresh()
    assert "stale" not in repr(damped)
    H.close()
    assert repr(H) == "HessianOperator(3 x 3, float32, engine 'graph', closed)"
    x = np.arange(6.0, dtype="float32")
    batched = hvp.HessianOperator(lambda x: tf.reduce_mean(x) * loss(), w, (x,), batch_size=2)
    assert repr(batched) == "HessianOperator(3 x 3, float32, engine 'graph', 3 batches)"
    seen = []
    tf.function(lambda v: seen.append(repr(batched)) or v)(tf.ones(3))
    assert seen == [repr(batched)]


def test_the_others():
    w, loss = quartic()
    linear = hvp.linearize(lambda: {"cubes": w**3, "sum": tf.reduce_sum(w)}, w)
    assert repr(linear) == "Linearization(4 x 3, float32, engine 'graph')"
    linear.close()
    assert repr(linear).endswith(", closed)")
    operator = hvp.HessianOperator(loss, w).as_tf_operator(is_positive_definite=True, name="mine")
    assert repr(operator).startswith("<hvp mine, a tf.linalg.LinearOperator, 3 x 3, float32")
    assert "positive definite" in repr(operator)
    objective = hvp.ScipyObjective(loss, w)
    assert repr(objective) == "ScipyObjective(3 variables, 1 gradient evaluations, 0 products)"
    newton = hvp.NewtonCG(loss, w)
    assert repr(newton) == "NewtonCG(3 variables, 0 steps, radius 1, damping 0)"
    result = newton.minimize(maxiter=20)
    assert len(result.history) == result.nit
    assert result.history[0].iteration == 1
    line = next(line for line in str(result).splitlines() if "history" in line)
    assert f"[{result.nit} steps, " in line
    assert len(str(result)) < 2000


def test_completion_offers_what_is_documented():
    w, loss = quartic()
    offered = {name for name in dir(hvp.HessianOperator(loss, w)) if not name.startswith("_")}
    assert {"product", "damped", "gradient", "stats", "refresh", "T", "shape"} <= offered
    internal = {"exclusively", "fingerprint", "gradients", "kept", "product_rows", "remarks"}
    assert not offered & {*internal, "unconnected", "variable_names"}
