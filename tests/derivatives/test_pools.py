"""Max pooling, which TensorFlow differentiates wrong a second time where it works in place."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests import inside
from tests.cases import Problem, dense_hessian, long, random

# The images' axes of space, windows and strides: what is pooled has the size of the image in all
# of these but the last two.
POOLS = {
    "moved by one": ((3, 4), 2, 1),
    "along one axis": ((1, 5), (1, 2), 1),
    "uneven": ((4, 3), (3, 2), 1),
    "of one entry": ((3, 4), 1, 1),
    "one entry": ((1, 1), 3, 2),
    "one entry wide": ((1, 4), (2, 3), (2, 1)),
    "moved by two": ((5, 4), 3, 2),
    "of one entry, moved by two": ((3, 4), 1, 2),
}
# Much like "moved by one".
ALIKE = ["along one axis", "uneven"]


def pool(x, name, padding="SAME"):
    _, size, stride = POOLS[name]
    return tf.nn.max_pool2d(x, size, stride, padding)


def problem(name, function):
    w = tf.Variable(random(0, 2).astype(np.float64))
    x = tf.Variable(random(1, 2, *POOLS[name][0], 2).astype(np.float64))

    def loss():
        return tf.reduce_mean(tf.sin(function(tf.sin(x) * w)) ** 2)

    return Problem(loss, [w, x])


@functools.cache
def hessian_of(name):
    plain = problem(name, functools.partial(pool, name=name))
    return dense_hessian(plain, step=1e-4)  # no two entries are so near each other


def assert_right(pooled, want, **options):
    with hvp.HessianOperator(pooled.loss, pooled.variables, **options) as H:
        assert H.stats.engine == options.get("engine", "graph")
        np.testing.assert_allclose(H.to_dense(), want, atol=1e-9)
        columns = [H @ e for e in np.eye(H.shape[0])]
        np.testing.assert_allclose(np.stack(columns, axis=1), want, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "graph") for name in POOLS if name not in ALIKE),
        ("moved by one", "tape"),
        *(long(name, "graph") for name in ALIKE),
    ],
)
@pytest.mark.few(1)
def test_second_derivatives_are_right(name, engine):
    pooled = problem(name, functools.partial(pool, name=name))
    assert_right(pooled, hessian_of(name), engine=engine)


@pytest.mark.parametrize(
    "within", ["function", "loop", long("branch"), "recompute", long("loop in recompute")]
)
@pytest.mark.few(1)
def test_also_inside_functions(within):
    once = functools.partial(pool, name="moved by one")

    def loop(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, once(x) * 0.9), (0, x))[1]

    placed = {
        "function": tf.function(once),
        "loop": loop,
        "loop in recompute": hvp.recompute(loop),
        "branch": lambda x: tf.cond(tf.reduce_sum(x) < 99, lambda: once(x), lambda: x),
        "recompute": hvp.recompute(once),
    }[within]
    pooled = problem("moved by one", placed)
    twice = problem("moved by one", lambda x: once(once(x) * 0.9) * 0.9)
    want = dense_hessian(twice, step=1e-4) if "loop" in within else hessian_of("moved by one")
    assert_right(pooled, want)
    if "recompute" not in within:
        with pytest.raises(hvp.SecondDerivativeError, match="engine='graph'"):
            hvp.HessianOperator(pooled.loss, pooled.variables, engine="tape")


def test_forward_derivatives_are_right():
    w, x = problem("moved by one", functools.partial(pool, name="moved by one")).variables

    def features():
        return tf.reshape(pool(tf.sin(x) * w, "moved by one"), [-1])

    tangents = [tf.constant(random(i, *v.shape).astype(np.float64)) for i, v in enumerate((w, x))]
    step, at = 1e-6, [w.numpy(), x.numpy()]
    moved = []
    for sign in (1, -1):
        for v, a, t in zip((w, x), at, tangents):
            v.assign(a + sign * step * t)
        moved.append(features().numpy())
    for v, a in zip((w, x), at):
        v.assign(a)
    with hvp.linearize(features, [w, x]) as linear:
        got = linear.jvp(tangents).numpy()
    np.testing.assert_allclose(got, (moved[0] - moved[1]) / (2 * step), atol=1e-7)


def test_in_space():
    """TensorFlow's pools with three axes of space know no float64 on the CPU."""
    x = tf.Variable(random(1, 1, 2, 3, 3, 1))

    def by_hand(x):
        wide = tf.pad(x, [[0, 0], [0, 1], [0, 1], [0, 1], [0, 0]], constant_values=-99.0)
        corners = [
            wide[:, i : i + 2, j : j + 3, k : k + 3] for i in (0, 1) for j in (0, 1) for k in (0, 1)
        ]
        return tf.reduce_max(tf.stack(corners), axis=0)

    dense = []
    for function in (lambda x: tf.nn.max_pool3d(x, 2, 1, "SAME"), by_hand):
        with hvp.HessianOperator(lambda f=function: tf.reduce_sum(f(tf.sin(x)) ** 3), x) as H:
            dense.append(H.to_dense())
    np.testing.assert_allclose(*dense, atol=1e-5)


def test_tensorflow_still_has_it_wrong(monkeypatch):
    """When it has not, the module `pools` can go."""
    inside.use_tensorflow_operations(monkeypatch)
    pooled = problem("moved by one", functools.partial(pool, name="moved by one"))
    with pytest.raises(AssertionError, match="Not equal"):
        assert_right(pooled, hessian_of("moved by one"))
