"""Time a product over batches that are not kept, against that of one batch from scratch.

Eight batches of 2048 examples, of which a memory limit lets none be kept, in turns with one
evaluation of the gradient and one product of a single batch. The ratio is what going through the
batches adds.

    python docs/benchmarks/streaming.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import hvp

BATCH, COUNT, WIDTH, DEPTH = 2048, 8, 256, 6
# Of each, besides one to warm up.
ROUNDS = 9


def main() -> None:
    """Measure, and print medians and their ratio."""
    rng = np.random.default_rng(0)
    weights = [
        tf.Variable(rng.standard_normal((WIDTH, WIDTH)) / 16, dtype=tf.float32)
        for _ in range(DEPTH)
    ]
    x = rng.standard_normal((COUNT * BATCH, WIDTH)).astype("float32")

    def loss(x: tf.Tensor) -> tf.Tensor:
        for w in weights:
            x = tf.tanh(x @ w)
        return tf.reduce_mean(x**2)

    single = hvp.HessianOperator(loss, weights, (x[:BATCH],))
    limit = 3 * (single.stats.residual_bytes or 0) + 4 * x[:BATCH].nbytes
    streamed = hvp.HessianOperator(loss, weights, (x,), batch_size=BATCH, memory_limit=limit)
    assert streamed.stats.batches_kept == 0
    v = np.ones(streamed.shape[0], "float32")

    def from_scratch() -> None:
        single.refresh()
        single @ v

    seconds: dict[str, list[float]] = {"streamed": [], "single": []}
    functions: dict[str, Callable[[], object]] = {
        "streamed": lambda: streamed @ v,
        "single": from_scratch,
    }
    for turn in range(ROUNDS + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    ratio = medians["streamed"] / (COUNT * medians["single"])
    print(f"{COUNT} batches streamed: {1e3 * medians['streamed']:.0f} ms")
    print(f"one batch, gradient and product: {1e3 * medians['single']:.0f} ms; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
