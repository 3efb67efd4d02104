"""Random functions: derivatives with and without recompute, in every mode."""

import pytest
import tensorflow as tf
from hypothesis import given, note
from hypothesis import strategies as st

import hvp
from tests import inside
from tests.cases import examples, random
from tests.recompute.derivatives import MODES, assert_same, derivatives

# From a matrix of shape (rows, n) to one of the same shape, with a variable (n, n) and a seed.
STEPS = {
    "dense": lambda x, w, seed: tf.tanh(x @ w),
    "softplus": lambda x, w, seed: tf.nn.softplus(x) * w[0],
    "gated": lambda x, w, seed: tf.nn.silu(x @ w) * tf.sigmoid(x),
    "residual": lambda x, w, seed: x + tf.sin(x @ w),
    "attention": lambda x, w, seed: tf.nn.softmax((x @ w) @ tf.transpose(x)) @ x,
    "gather": lambda x, w, seed: x * tf.gather(w, tf.zeros([tf.shape(x)[0]], tf.int32)),
    # By default XLA has a generator of its own, whose draws are others.
    "dropout": lambda x, w, seed: (
        tf.nn.experimental.stateless_dropout(x, 0.3, [seed, 1], rng_alg="philox") @ w
    ),
    "norm": lambda x, w, seed: x / tf.sqrt(1 + tf.reduce_sum(tf.square(x), -1, keepdims=True)),
    "loop": lambda x, w, seed: tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x)
    )[1],
    "branch": lambda x, w, seed: tf.cond(
        tf.reduce_sum(x) > 0, lambda: tf.sin(x * w[0]), lambda: tf.cos(x @ w)
    ),
    "inner": lambda x, w, seed: hvp.recompute(lambda x: tf.tanh(x @ w) * x)(x),
}
NESTS = {
    "tensor": (lambda y: y, lambda y: y),
    "dict": (lambda y: {"y": y, "count": tf.size(y)}, lambda y: y["y"]),
    "tuple": (lambda y: (y[:, :1], [y[:, 1:]]), lambda y: tf.concat([y[0], y[1][0]], 1)),
}


@pytest.fixture(scope="module", autouse=True)
def _small_is_large():
    """Let small tensors be scheduled as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        inside.set_limit(patch, "bytes of large values", 1)
        inside.set_limit(patch, "large values computed meanwhile", 0)
        yield


@st.composite
def programs(draw):
    """A function of a nest, what it is called with, and what to differentiate by."""
    rows, n = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    seed = draw(st.integers(0, 1000))
    names = draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
    nest = draw(st.sampled_from(sorted(NESTS)))
    steps = [
        (STEPS[name], tf.Variable(random(seed + i, n, n, dtype=dtype, scale=0.7)), seed + i)
        for i, name in enumerate(names)
    ]
    shared = tf.constant(random(seed + 50, n, dtype=dtype))  # closed over
    x = tf.constant(random(seed + 51, rows, n, dtype=dtype))
    wrap, unwrap = NESTS[nest]

    def f(inputs, *, scale):
        y = inputs["x"] * shared
        for step, w, number in steps:
            y = step(y, w, number)
        return wrap(y * scale)

    note(f"{rows=} {n=} {dtype=} {seed=} {names=} {nest=}")
    sources = [x, shared, *(w for _, w, _ in steps)]
    return f, unwrap, x, sources, dtype


@examples(3)
@given(programs(), st.sampled_from(["eager", "graph", "xla", "outside"]))
@pytest.mark.few(0)
def test_three_derivatives(program, mode):
    f, unwrap, x, sources, dtype = program
    g = hvp.recompute(f)
    if mode == "outside":
        mode, g = "eager", tf.function(g, autograph=False)

    def run(f):
        return derivatives(lambda: unwrap(f({"x": x}, scale=2)), sources)

    want = run(f)
    try:
        got = MODES[mode](lambda: run(g))()
    except (LookupError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        # XLA takes no lists of a loop's or branch's intermediate values, and in its graphs a slice
        # has no third derivative, recomputed or not.
        known = ("TensorList", "tensor list", "XlaDynamicUpdateSlice")
        of_xla = any(name in str(error) for name in known)
        if mode != "xla" or not of_xla:
            raise
        return
    assert_same(got, want, 1e-2 if dtype == "float32" else 1e-8, floor=1e-3)
