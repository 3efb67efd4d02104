"""Time systems with 64 right-hand sides, and the influences of 1,500 digits on 100 others.

The systems are what influence functions solve: Hessians of networks and of softmax regression on
1,500 digits, right-hand sides the gradients of single examples, float32. In turns: `hvp.solve` by
its methods, and scipy's `cg`, column after column, with products by nested tapes in a
`tf.function`. Damping makes the networks' Hessians positive definite; the regression's is small, so
that the matrix is badly conditioned. Each must come to the same residuals, which a product checks.

    python docs/benchmarks/solving.py [--problems mlp-9k,mlp-85k,regression,scores]
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse.linalg
import tensorflow as tf
from report import machine, versions
from sklearn.datasets import load_digits

import hvp

HERE = Path(__file__).parent
COLUMNS, EXAMPLES, TESTS = 64, 1500, 100
PROBLEMS = {
    "mlp-9k": {"widths": [64, 64], "damping": 1e-2, "rtol": 1e-4},
    "mlp-85k": {"widths": [256, 256], "damping": 1e-2, "rtol": 1e-4},
    "regression": {"widths": [], "damping": 1e-4, "rtol": 1e-3},
}
# Of the last, by hand only some columns in each round.
BY_HAND = {"mlp-9k": COLUMNS, "mlp-85k": 16, "regression": 4}


class Network(tf.Module):
    """Digits read by a network of tanh layers, trained for a while; without layers, regression."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        images, digits = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(images))
        self.x, self.y = images[order] / 16, digits[order]
        if not widths:  # products of pixels too
            first, second = np.triu_indices(64)
            self.x = np.concatenate([self.x, self.x[:, first] * self.x[:, second]], axis=1)
        self.x = self.x.astype("float32")
        sizes = [self.x.shape[1], *widths, 10]
        rng = np.random.default_rng(1)
        self.weights = [
            tf.Variable((rng.standard_normal(s) / np.sqrt(s[0])).astype("float32"))
            for s in zip(sizes, sizes[1:])
        ]
        self.biases = [tf.Variable(tf.zeros(s)) for s in sizes[1:]]
        train = (self.x[:EXAMPLES], self.y[:EXAMPLES])
        hvp.minimize(self.loss, self, train, method="L-BFGS-B", options={"maxiter": 200})
        self.train = tuple(map(tf.constant, train))

    def loss(self, x: Any, y: Any) -> tf.Tensor:
        """Return the mean cross-entropy, with a small penalty."""
        penalty = 1e-4 * sum(tf.reduce_sum(v**2) for v in self.trainable_variables)
        for number, (W, b) in enumerate(zip(self.weights, self.biases)):
            x = (x if number == 0 else tf.tanh(x)) @ W + b
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x)) + penalty


def gradient(network: Network, number: int) -> np.ndarray:
    """Return the gradient at one example."""
    variables = network.trainable_variables
    with tf.GradientTape() as tape:
        loss = network.loss(network.x[number : number + 1], network.y[number : number + 1])
    return np.concatenate([part.numpy().ravel() for part in tape.gradient(loss, variables)])


def by_hand(network: Network, damping: float) -> scipy.sparse.linalg.LinearOperator:
    """Return what one writes without hvp."""
    variables = network.trainable_variables
    sizes = [int(np.prod(v.shape)) for v in variables]

    @tf.function(input_signature=[tf.TensorSpec([sum(sizes)])])
    def product(v: tf.Tensor) -> tf.Tensor:
        parts = [tf.reshape(p, w.shape) for p, w in zip(tf.split(v, sizes), variables)]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = network.loss(*network.train)
            gradient = inner.gradient(loss, variables)
        made = outer.gradient(gradient, variables, output_gradients=parts)
        return tf.concat([tf.reshape(p, [-1]) for p in made], 0) + damping * v

    return scipy.sparse.linalg.LinearOperator(
        (sum(sizes), sum(sizes)), lambda v: product(tf.constant(v)).numpy(), dtype=np.float32
    )


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Solve one problem in every way, in turns."""
    problem = PROBLEMS[name]
    damping, rtol = float(problem["damping"]), float(problem["rtol"])
    network = Network(problem["widths"])
    H = hvp.HessianOperator(network.loss, network, network.train)
    B = np.stack([gradient(network, i) for i in range(EXAMPLES, EXAMPLES + COLUMNS)], axis=1)
    A, count = by_hand(network, damping), BY_HAND[name]
    limits = 1.05 * rtol * np.linalg.norm(B, axis=0)

    def scipy_cg() -> tuple[np.ndarray, int]:
        iterations: list[Any] = []
        columns = [
            scipy.sparse.linalg.cg(A, b, rtol=rtol, maxiter=5000, callback=iterations.append)[0]
            for b in B.T[:count]
        ]
        return np.stack(columns, 1), len(iterations) * COLUMNS // count

    def ours(**options: Any) -> Callable[[], tuple[np.ndarray, int]]:
        def run() -> tuple[np.ndarray, int]:
            result = hvp.solve(H, B, damping=damping, rtol=rtol, **options)
            return result.x, result.products

        return run

    ways = {
        "scipy cg, by hand": scipy_cg,
        "cg": ours(method="cg"),
        "cg, Nystrom": ours(method="cg", M="nystrom"),
        "block_cg": ours(method="block_cg"),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    products: dict[str, int] = {}
    for turn in range(rounds + 1):
        for way, run in ways.items():
            start = time.perf_counter()
            x, products[way] = run()
            taken = (time.perf_counter() - start) * COLUMNS / x.shape[1]
            if turn:  # the first traces
                seconds[way].append(taken)
            residual = np.linalg.norm(H.damped(damping) @ x - B[:, : x.shape[1]], axis=0)
            if not (residual <= 1.5 * limits[: x.shape[1]]).all():
                raise RuntimeError(
                    f"{way} left residuals {(residual / limits).max()} times as large"
                )
    results = []
    for way in ways:
        ratios = [a / b for a, b in zip(seconds["scipy cg, by hand"], seconds[way])]
        row = {
            "problem": name,
            "variables": H.shape[0],
            "method": way,
            "seconds": statistics.median(seconds[way]),
            "products": products[way],
            "times as fast": statistics.median(ratios),
        }
        results.append(row)
        print(
            f"{name:11}{H.shape[0]:6} variables  {way:18}{row['seconds']:8.2f} s"
            f"{row['products']:7} products  {row['times as fast']:5.1f} times as fast",
            flush=True,
        )
    return results


def scores() -> dict[str, Any]:
    """Influences of all training digits on 100 others, in a network of 50,000 weights."""
    network = Network([192, 192])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    influence = hvp.InfluenceFunctions(network.loss, network, network.train, damping=1e-2)
    test = network.x[EXAMPLES:][:TESTS], network.y[EXAMPLES:][:TESTS]
    found = influence.scores(test)
    taken = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {
        "variables": influence.operator.shape[0],
        "scores": found.shape,
        "seconds": taken,
        "peak MiB": peak / 1024,
        "growth MiB": (peak - before) / 1024,
    }
    print(f"scores: {row}")
    return row


def main() -> None:
    """Measure, print, and write tables for the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", default=",".join(("scores", *PROBLEMS)))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    chosen = arguments.problems.split(",")
    influences = scores() if "scores" in chosen else {}  # first: memory is of the process
    rows = [row for name in chosen if name in PROBLEMS for row in measure(name, arguments.rounds)]
    if not {"scores", *PROBLEMS} <= set(chosen):
        return
    everything = {
        "machine": machine(),
        "versions": versions(),
        "scores": influences,
        "rows": rows,
    }
    (HERE / "solving.json").write_text(json.dumps(everything, indent=1) + "\n")
    with (HERE / "solving.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["problem", "variables", "method", "seconds", "products", "times as fast"])
        for row in rows:
            shown = [f"{row['seconds']:.3g}", row["products"], f"{row['times as fast']:.1f}"]
            writer.writerow([row["problem"], row["variables"], row["method"], *shown])


if __name__ == "__main__":
    main()
