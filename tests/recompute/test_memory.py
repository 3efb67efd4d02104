"""Memory is bounded for real: peak growth of a process, against the plain version of the same."""

import sys

import pytest

from tests import memory
from tests.cases import long

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Tensors of 8 MiB: 12 layers take 96 MiB, and what is built (graphs, functions) far less.
PROGRAM = """
depth, width, count = 12, 32, 4
weights = [tf.Variable(np.eye(width, dtype="float32") * 0.9) for _ in range(depth)]
vector = [tf.ones((width, width)) for _ in weights]
x = tf.ones((2**16, width))

def layers(x, part):
    for w in part:
        x = tf.tanh(x @ w)
    return x

def chain(wrap, part, count):
    starts = [round(i * len(part) / count) for i in range(count + 1)]
    parts = [part[a:b] for a, b in zip(starts, starts[1:])]
    return [wrap(lambda x, p=p: layers(x, p)) for p in parts]

def applied(functions, x):
    for f in functions:
        x = f(x)
    return x

def nested(f_of):
    groups = [weights[i : i + 4] for i in range(0, depth, 4)]
    inner = [chain(hvp.recompute, group, 2) for group in groups]
    return [hvp.recompute(lambda x, fs=fs: applied(fs, x)) for fs in inner]

def loss():
    return tf.reduce_mean(applied(functions, x) ** 2)

def product():
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            value = loss()
        gradient = inner.gradient(value, weights)
    return outer.gradient(gradient, weights, output_gradients=vector)

def gradient():
    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, weights)

def operator():
    return hvp.HessianOperator(loss, weights).product(vector)

# The plain version comes last: what the other leaves behind can only make it seem smaller.
for name, functions, run in {RUNS}:
    start = begin_peak()
    results = run()
    print(name + "_norm", sum(float(tf.reduce_sum(r**2)) for r in results) ** 0.5)
    print(name + "_grown", megabytes("VmHWM") - start)
    del results
"""
PLAIN = "[lambda x: layers(x, weights)]"
SEGMENTS = "chain(hvp.recompute, weights, count)"
NESTED = "nested(hvp.recompute)"
IN_A_GRAPH = "tf.function(product, autograph=False)"


def assert_takes_less(functions, run, plain_run, most):
    """Compare with the plain functions, in one process."""
    runs = f"[('recomputed', {functions}, {run}), ('plain', {PLAIN}, {plain_run})]"
    # oneDNN's allocator keeps what is freed, and so does malloc unless told.
    measured = memory.run(
        PROGRAM.replace("{RUNS}", runs),
        TF_ENABLE_ONEDNN_OPTS="0",
        MALLOC_MMAP_THRESHOLD_="1048576",
    )
    assert measured["recomputed_norm"] == pytest.approx(measured["plain_norm"], rel=1e-4)
    assert measured["recomputed_grown"] < most * measured["plain_grown"]
    return measured["plain_grown"]


@pytest.mark.parametrize(
    ("functions", "run", "most"),
    [
        long(SEGMENTS, "product", 0.5),
        long(NESTED, "product", 0.45),
        long(SEGMENTS, IN_A_GRAPH, 0.55),
        (SEGMENTS, "operator", 0.6),
    ],
    ids=["eager", "nested", "tf.function", "operator"],
)
@pytest.mark.few(0)
def test_a_product_takes_less_than_the_plain_one(functions, run, most):
    assert assert_takes_less(functions, run, IN_A_GRAPH, most) > 300


@pytest.mark.parametrize("by", [long("gradient")])
def test_a_gradient_takes_less_than_the_plain_one(by):
    assert_takes_less(SEGMENTS, by, by, 0.75)
