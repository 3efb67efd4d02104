"""Time products and solutions in bfloat16 beside those in float32.

In turns, in shuffled order, in one process: a product of each operator with the same vector, and
`hvp.solve` to a true residual of 1e-5 with each of them. Where the processor has no fast products
in bfloat16, both are the same.

    python docs/benchmarks/precision.py [--workloads mlp,transformer] [--rounds 21]
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks_tensorflow
import numpy as np
import tensorflow as tf
import workloads
from report import machine, versions
from scipy.sparse.linalg import eigsh

import hvp

HERE = Path(__file__).parent
PRECISIONS = (None, "bfloat16")
WORKLOADS = ("mlp", "mlp-large", "cnn", "transformer", "resnet18")
# Of a network of four layers of 512 units: damping relative to the largest eigenvalue.
DAMPINGS = (1e-1, 1e-2)


def operators(workload: workloads.Workload) -> dict[str | None, hvp.HessianOperator]:
    """Return the Hessian in each precision, of the same loss."""
    made = {}
    for precision in PRECISIONS:
        loss, variables = networks_tensorflow.bind(workload)
        data = tuple(map(tf.constant, workload.batch))
        made[precision] = hvp.HessianOperator(loss, variables, data, precision=precision)
    return made


def in_turns(
    functions: dict[Any, Callable[[], Any]], rounds: int
) -> tuple[dict[Any, float], float]:
    """Return median seconds of each function, and the median ratio of the second to the first."""
    rng, seconds = np.random.default_rng(0), {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for i in rng.permutation(len(functions)):
            name = list(functions)[i]
            start = time.perf_counter()
            functions[name]()
            seconds[name].append(time.perf_counter() - start)
    ratios = [low / full for full, low in zip(*seconds.values())]
    return {name: statistics.median(s) for name, s in seconds.items()}, statistics.median(ratios)


def product(name: str, rounds: int) -> dict[str, Any]:
    """Compare products of one workload."""
    workload = workloads.make_workload(name)
    made = operators(workload)
    v = np.random.default_rng(1).standard_normal(workload.size).astype(np.float32)
    full, low = (made[precision] @ v for precision in PRECISIONS)
    medians, ratio = in_turns({p: functools.partial(made[p].matvec, v) for p in made}, rounds)
    nbytes = [made[p].stats.residual_bytes for p in PRECISIONS]
    return {
        "what": f"product, {name}",
        "float32_ms": 1000 * medians[None],
        "low_ms": 1000 * medians["bfloat16"],
        "ratio": ratio,
        "error": float(np.linalg.norm(low - full) / np.linalg.norm(full)),
        "residuals": nbytes[1] / nbytes[0],
        "precision": made["bfloat16"].stats.precision,
    }


def solutions(rounds: int) -> list[dict[str, Any]]:
    """Compare solutions to the same true residual."""
    network = functools.partial(workloads._mlp, layers=4, width=512, batch=2048)
    made = operators(network("mlp-2048"))
    exact, b = made[None], made[None].gradient
    start = np.random.default_rng(0).standard_normal(exact.shape[0]).astype(np.float32)
    ends = eigsh(exact, k=2, which="BE", return_eigenvectors=False, tol=1e-2, v0=start)
    rows = []
    for relative in DAMPINGS:
        damping = float(relative * ends.max() + max(0, -ends.min()))
        solve = functools.partial(hvp.solve, b=b, method="cg", damping=damping)
        medians, ratio = in_turns({p: functools.partial(solve, made[p]) for p in made}, rounds)
        results = {p: solve(made[p]) for p in made}
        residuals = [
            float(np.linalg.norm(b - exact.damped(damping) @ r.x) / np.linalg.norm(b))
            for r in results.values()
        ]
        assert max(residuals) <= 1.01e-5, residuals
        rows.append(
            {
                "what": f"solve, damping {relative:g}",
                "float32_ms": 1000 * medians[None],
                "low_ms": 1000 * medians["bfloat16"],
                "ratio": ratio,
                "products": [r.products for r in results.values()],
                "true_residuals": residuals,
            }
        )
    return rows


def main() -> None:
    """Measure, print, and write the table of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--solves", type=int, default=5, help="rounds of solutions")
    arguments = parser.parse_args()
    chosen = arguments.workloads.split(",")
    rows = []
    for name in chosen:
        rows.append(product(name, arguments.rounds))
        print(rows[-1], flush=True)
    if tuple(chosen) != WORKLOADS:
        return
    rows += solutions(arguments.solves)
    print(*rows[-len(DAMPINGS) :], sep="\n")
    everything = {"machine": machine(), "versions": versions(), "rows": rows}
    (HERE / "precision.json").write_text(json.dumps(everything, indent=1) + "\n")
    with (HERE / "precision.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["", "float32, ms", "bfloat16, ms", "ratio", "error", "residuals", "products"]
        )
        for row in rows:
            times = [f"{row[key]:.3g}" for key in ("float32_ms", "low_ms")]
            figures = [f"{row['ratio']:.2f}"]
            figures += [f"{row[key]:.2g}" if key in row else "" for key in ("error", "residuals")]
            figures += [" / ".join(map(str, row.get("products", [])))]
            writer.writerow([row["what"], *times, *figures])


if __name__ == "__main__":
    main()
