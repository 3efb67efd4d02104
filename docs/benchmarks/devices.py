"""Measure products, blocks and a solve on one worker, and on two, with one processor core each.

Both run in turns, in one process, with the same two TensorFlow servers on this machine: once the
operator has the first of them, once both. Beside them runs plain TensorFlow, matrix products whose
data never leave the workers: what two cores of this machine gain at best. Then the cost of the
transport: a product that computes next to nothing, against the number of its entries, beside the
time to copy so many numbers twice, and a function of plain TensorFlow that sends and fetches as
many; through two workers, and between two processes that a strategy connects. Writes
`devices.json` beside this file, and with `--figure` draws what follows from it.

    python docs/benchmarks/devices.py [--rounds 15] [--figure] [--only-figure]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def ceiling(cluster: hvp.Cluster, rounds: int) -> dict[str, float]:
    """Time matrix products in plain TensorFlow, all on one worker and half on each of two."""
    width, batch, layers = 1024, 2048, 12

    @tf.function
    def run(x: Any, w: Any) -> Any:
        for _ in range(layers):
            x = tf.tanh(x @ w)
        return tf.reduce_sum(x)

    def placed(device: str, rows: int) -> Any:
        with tf.device(device):
            return tf.ones((rows, width)), tf.ones((width, width)) / width

    whole = [(cluster.devices[0], placed(cluster.devices[0], batch))]
    halves = [(device, placed(device, batch // 2)) for device in cluster.devices]

    def call(share: Any) -> Any:
        with tf.device(share[0]):
            return run(*share[1]).numpy()

    with ThreadPoolExecutor(2) as pool:
        functions = {
            "one": lambda: list(pool.map(call, whole)),
            "two": lambda: list(pool.map(call, halves)),
        }
        taken = in_turns(functions, rounds)
    one, two = (1e3 * statistics.median(taken[name]) for name in ("one", "two"))
    ratio = statistics.median([b / a for a, b in zip(taken["one"], taken["two"])])
    found = {"one_ms": one, "two_ms": two, "ratio": ratio}
    print("plain TensorFlow", {name: round(x, 3) for name, x in found.items()}, flush=True)
    return found


def nearly_free(n: int) -> tuple[Any, Any, Any]:
    """Return a loss whose products compute next to nothing, its variable and its data."""
    w = tf.Variable(np.ones(n, "float32"))
    data = (np.ones((2, 1), "float32"),)
    return lambda x: tf.reduce_mean(x) * tf.reduce_sum(w**2), w, data


def between_processes(rounds: int) -> dict[str, float]:
    """Start two processes that a strategy connects; return what the first measured."""
    sockets = [socket.socket() for _ in range(2)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    command = [sys.executable, __file__, "--rounds", str(rounds), "--process"]
    started = [
        subprocess.Popen([*command, str(index), *addresses], stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    output = [process.communicate()[0] for process in started]
    found = json.loads(output[0].splitlines()[-1])
    print("between processes, ms", {n: round(ms, 3) for n, ms in found.items()}, flush=True)
    return found


def in_a_process(index: int, addresses: list[str], rounds: int) -> None:
    """Time products that are summed over processes; print the milliseconds."""
    os.sched_setaffinity(0, {index})
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    found = {}
    for n in SIZES:
        with strategy.scope():
            loss, w, data = nearly_free(n)
        v = np.ones(n, "float32")
        with hvp.HessianOperator(loss, w, data) as H:
            taken = [seconds(lambda H=H, v=v: H @ v) for _ in range(rounds + 2)]
        found[str(n)] = 1e3 * statistics.median(taken[2:])
    print(json.dumps(found), flush=True)


def draw(measured: dict[str, Any]) -> None:
    """Draw bytes and seconds of a product against variables, for 1 to 1,000 workers.

    The seconds are those of a model with the constants that were measured: so many for each worker
    and each number that it gets, or for each step of an all-reduce, and the computation, divided.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    def line(milliseconds: dict[str, float]) -> tuple[float, float]:
        """Return seconds of a product, and of each number in it, for two workers."""
        small, large = (1e-3 * milliseconds[str(n)] for n in (SIZES[0], SIZES[-1]))
        return small, (large - small) / SIZES[-1]

    fixed, each = line({n: t["product_ms"] for n, t in measured["transport"].items()})
    step, number = line(measured["processes"])
    network = measured["scaling"]["mlp-large"]
    batch = len(make_workload("mlp-large").batch[0])
    compute = 1e-3 * network["product"]["one_ms"] / network["variables"] / batch

    n = np.logspace(4, 9, 60)
    examples = 10**5
    colours = {1: "#94a3b8", 10: "#f59e0b", 100: "#c2410c", 1000: "#7f1d1d"}
    with plt.rc_context({"font.size": 8, "axes.linewidth": 0.6}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.1), layout="constrained")
        for workers, colour in colours.items():
            share = compute * n * examples / workers
            name = f"{workers:,} worker{'s' if workers > 1 else ''}"
            left.plot(n, 8 * n * workers, color=colour, label=name)
            right.plot(n, share + workers / 2 * (fixed + each * n), color=colour, label=name)
            if workers > 1:
                # A ring sends each number twice, whatever the number of processes.
                left.plot(n, 16 * n * (workers - 1) / workers, color=colour, ls=":")
                ring = (workers - 1) * step + 2 * number * n * (workers - 1) / workers
                right.plot(n, share + ring, color=colour, ls=":")
        left.set_title("bytes through one client, or one process", loc="left")
        right.set_title(f"seconds of a product with {examples:,} examples", loc="left")
        for ax in (left, right):
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.set_xlabel("variables")
            ax.grid(visible=True, linewidth=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        handles, labels = left.get_legend_handles_labels()
        handles.append(mpl.lines.Line2D([], [], color="#334155", ls=":"))
        labels.append("processes of a strategy")
        figure.legend(handles, labels, frameon=False, ncols=5, loc="outside lower center")
        figure.savefig(HERE.parent / "images" / "devices.png", dpi=160)


def transport(cluster: hvp.Cluster, n: int, rounds: int) -> dict[str, float]:
    """Time a product through two workers that computes next to nothing."""
    loss, w, data = nearly_free(n)
    v = np.ones(n, "float32")

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([n])])
    def doubled(x: Any) -> Any:
        products = []
        for device in cluster.devices:
            with tf.device(device):
                products.append(2 * x)
        return tf.add_n(products)

    with hvp.HessianOperator(loss, w, data, devices=cluster.devices) as H:

        def copy() -> None:
            v.copy()
            v.copy()

        functions: dict[str, Callable[[], Any]] = {
            "product": lambda: H @ v,
            "copy": copy,
            "plain": lambda: doubled(tf.constant(v)).numpy(),
        }
        taken = in_turns(functions, rounds)
    product, copies, plain = (1e3 * statistics.median(taken[name]) for name in functions)
    found = {"product_ms": product, "copies_ms": copies, "plain_ms": plain}
    print(f"n = {n:9d}", {name: round(x, 3) for name, x in found.items()}, flush=True)
    return found


def main() -> None:
    """Measure everything, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--figure", action="store_true")
    parser.add_argument("--only-figure", action="store_true")
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds, file = options.rounds, HERE / "devices.json"
    if options.process:
        index, *addresses = options.process
        in_a_process(int(index), addresses, rounds)
        return
    if not options.only_figure:
        between = between_processes(rounds)
        with hvp.Cluster(2, cores=[{0}, {1}]) as cluster:
            measured = {
                "versions": versions(),
                "machine": machine(),
                "plain": ceiling(cluster, rounds),
                "transport": {str(n): transport(cluster, n, 2 * rounds) for n in SIZES},
                "processes": between,
                "scaling": {name: scaling(cluster, name, rounds) for name in NAMES},
            }
        file.write_text(json.dumps(measured, indent=1) + "\n")
    if options.figure or options.only_figure:
        draw(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
