"""Measure products, blocks and a solve on one worker, and on two, with one processor core each.

Both run in turns, in one process, with the same two TensorFlow servers on this machine: once the
operator has the first of them, once both. Then the cost of the transport: a product that computes
next to nothing, against the number of its entries, beside the time to copy so many numbers twice.
Writes `devices.json` beside this file.

    python docs/benchmarks/devices.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from networks_tensorflow import bind
from report import machine, versions
from workloads import make_workload

import hvp

HERE = Path(__file__).parent
NAMES = ("mlp-large", "cnn")
SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)
BLOCK = 32
ITERATIONS = 20


def seconds(function: Callable[[], Any]) -> float:
    """Time one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time functions round by round, each time in a new order; the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name in random.sample(list(functions), len(functions)):
            one = seconds(functions[name])
            if turn:
                taken[name].append(one)
    return taken


def scaling(cluster: hvp.Cluster, name: str, rounds: int) -> dict[str, Any]:
    """Time products, blocks and a solve of one workload on one worker and on two."""
    workload = make_workload(name)
    loss, variables = bind(workload)
    operators = {
        "one": hvp.HessianOperator(loss, variables, workload.batch, devices=cluster.devices[:1]),
        "two": hvp.HessianOperator(loss, variables, workload.batch, devices=cluster.devices),
    }
    n = workload.size
    rng = np.random.default_rng(0)
    v, block = (rng.standard_normal(shape, "float32") for shape in ((n,), (n, BLOCK)))
    found: dict[str, Any] = {}
    here = hvp.HessianOperator(loss, variables, workload.batch)
    want = here @ v
    errors = {
        k: float(np.linalg.norm(H @ v - want) / np.linalg.norm(want)) for k, H in operators.items()
    }
    here.close()

    def solve(H: Any) -> Any:
        return hvp.solve(H.damped(10.0), v, method="cg", rtol=1e-12, maxiter=ITERATIONS)

    kinds: dict[str, Callable[[Any], Any]] = {
        "product": lambda H: H @ v,
        "block": lambda H: H @ block,
        "solve": solve,
    }
    for kind, run in kinds.items():
        turns = rounds if kind == "product" else max(3, rounds // 3)
        functions = {k: (lambda H=H, run=run: run(H)) for k, H in operators.items()}
        taken = in_turns(functions, turns)
        ratios = [two / one for one, two in zip(taken["one"], taken["two"])]
        found[kind] = {
            "one_ms": 1e3 * statistics.median(taken["one"]),
            "two_ms": 1e3 * statistics.median(taken["two"]),
            "ratio": statistics.median(ratios),
        }
        print(f"{name:10s} {kind:8s}", {k: round(x, 3) for k, x in found[kind].items()}, flush=True)
    for H in operators.values():
        H.close()
    return {"variables": n, "errors": errors, **found}


def transport(cluster: hvp.Cluster, n: int, rounds: int) -> dict[str, float]:
    """Time a product through two workers that computes next to nothing."""
    w = tf.Variable(np.ones(n, "float32"))
    data = (np.ones((2, 1), "float32"),)

    def loss(x: Any) -> Any:
        return tf.reduce_mean(x) * tf.reduce_sum(w**2)

    v = np.ones(n, "float32")
    with hvp.HessianOperator(loss, w, data, devices=cluster.devices) as H:

        def copy() -> None:
            v.copy()
            v.copy()

        taken = in_turns({"product": lambda: H @ v, "copy": copy}, rounds)
    product, copies = (1e3 * statistics.median(taken[name]) for name in ("product", "copy"))
    found = {"product_ms": product, "copies_ms": copies, "bound_ms": 3 + 2.5 * copies}
    print(f"n = {n:9d}", {name: round(x, 3) for name, x in found.items()}, flush=True)
    return found


def main() -> None:
    """Measure everything, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with hvp.Cluster(2, cores=[{0}, {1}]) as cluster:
        measured = {
            "versions": versions(),
            "machine": machine(),
            "scaling": {name: scaling(cluster, name, rounds) for name in NAMES},
            "transport": {str(n): transport(cluster, n, 2 * rounds) for n in SIZES},
        }
    (HERE / "devices.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
