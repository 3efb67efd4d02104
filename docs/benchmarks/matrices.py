"""Time products with Gauss-Newton, Fisher and Jacobian matrices, beside other frameworks.

As in `products.py`, all variants of a workload take turns in one process, in another random order
and with another vector in every round. Before that, each answer is compared with one that is put
together from TensorFlow's forward accumulator, its tape, and closed forms of the cross-entropy's
derivatives. `--blocks` times the first products of all layers' blocks of a transformer instead, in
new processes.

    python docs/benchmarks/matrices.py [--workloads mlp,cnn] [--rounds 20] [--blocks]
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compilers  # noqa: F401 - before TensorFlow
import networks_tensorflow
import numpy as np
import report
import tensorflow as tf
import variants
from networks_tensorflow import cross_entropy, join, split
from tqdm import tqdm
from workloads import (
    CLASSES,
    WORKLOADS,
    Workload,
    from_layout,
    make_workload,
    relative_error,
    to_layout,
)

import hvp

HERE = Path(__file__).parent
JSON, CSV = HERE / "matrices.json", HERE / "matrices.csv"
SECONDS, FEWEST, MOST = 60, 7, 200  # of rounds for one workload, as in products.py
MATRICES = ("gauss-newton", "type-2", "empirical", "jacobian", "transpose", "hessian")
# Axes in which flat vectors store convolution kernels: as PyTorch sees them, and as it stores them.
TORCH, TORCH_STORED = (3, 2, 0, 1), (3, 0, 1, 2)
# What a peer that stores all gradients of examples may take.
LARGEST = 4 * 2**30
# How far an answer in float32 may be from the right one, as a part of its norm.
TOLERANCE = 1e-5
BUILDS = 5

Multiply = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Variant:
    """One way of computing products with one matrix.

    Attributes
    ----------
    matrix : str
        One of `MATRICES`, or "gradient".
    name : str
        What the table calls it.
    prepare : callable
        Takes a workload; returns the function that is timed.
    is_peer : bool
        Whether it is of another framework.
    axes : tuple of int, optional
        How flat vectors store convolution kernels, if not as TensorFlow does.
    """

    matrix: str
    name: str
    prepare: Callable[[Workload], Multiply]
    is_peer: bool = True
    axes: tuple[int, ...] | None = None


# Right answers.


class Reference:
    """Products from TensorFlow's forward accumulator and tape, and closed forms."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._logits, self._variables = networks_tensorflow.bind_logits(workload)
        self._x, y = workload.batch
        logits = self._logits(tf.constant(self._x)).numpy().astype(np.float64)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        self._p = p / p.sum(axis=1, keepdims=True)
        self._r = self._p - np.eye(CLASSES)[y]

    def product(self, matrix: str, vector: np.ndarray) -> np.ndarray:
        """Multiply by one of the matrices."""
        if matrix == "transpose":
            return self._transposed(vector.reshape(self._p.shape))
        if matrix == "hessian":
            return variants.compiled_nested_tapes(self._workload)(vector)
        t = self._tangents(vector)
        if matrix == "jacobian":
            return t.ravel()
        if matrix == "empirical":
            curved = self._r * np.sum(self._r * t, axis=1, keepdims=True)
        else:
            curved = self._p * (t - np.sum(self._p * t, axis=1, keepdims=True))
        return self._transposed(curved / len(self._p))

    def _tangents(self, vector: np.ndarray) -> np.ndarray:
        parts = split(self._workload, tf.constant(vector))

        if self._workload.network == "lstm":
            # The accumulator fails on Keras' loop. The product with the transpose is linear in the
            # cotangent, and its derivative is the product with the Jacobian.
            with tf.GradientTape() as outer:
                cotangent = tf.ones(self._p.shape)
                outer.watch(cotangent)
                with tf.GradientTape() as inner:
                    logits = self._logits(tf.constant(self._x))
                gradient = inner.gradient(logits, self._variables, cotangent)
            return outer.gradient(gradient, cotangent, parts).numpy().astype(np.float64)

        @tf.function
        def push(parts: list[tf.Tensor]) -> tf.Tensor:
            with tf.autodiff.ForwardAccumulator(self._variables, parts) as accumulator:
                logits = self._logits(tf.constant(self._x))
            return accumulator.jvp(logits)

        return push(parts).numpy().astype(np.float64)

    def _transposed(self, cotangents: np.ndarray) -> np.ndarray:
        with tf.GradientTape() as tape:
            logits = self._logits(tf.constant(self._x))
        weights = tf.constant(cotangents, tf.float32)
        return join(tape.gradient(logits, self._variables, weights)).numpy()


# This library.


def library(matrix: str, auto: bool) -> Callable[[Workload], Multiply]:
    """Products with one of its operators; with XLA where that is faster, if `auto`."""

    def prepare(workload: Workload) -> Multiply:
        model, variables = networks_tensorflow.bind_logits(workload)
        options = {"jit_compile": "auto"} if auto else {}
        problem = model, cross_entropy, variables, workload.batch
        if matrix == "gauss-newton":
            return hvp.GaussNewtonOperator(*problem, **options).__matmul__
        if matrix == "type-2":
            options["likelihood"] = "categorical"
            return hvp.FisherOperator(*problem, **options).__matmul__
        if matrix == "empirical":
            return hvp.FisherOperator(*problem, kind="empirical", **options).__matmul__
        J = hvp.JacobianOperator(model, variables, workload.batch[:1], **options)
        return (J if matrix == "jacobian" else J.T).__matmul__

    return prepare


# Peers.


def jax_products(matrix: str) -> Callable[[Workload], Multiply]:
    """`jax.linearize` and `jax.vjp` of the model, once; their products jitted."""

    def prepare(workload: Workload) -> Multiply:
        import jax
        import jax.numpy as jnp
        import networks_jax as networks

        parameters, (x, y) = networks.arrays(workload)
        model = functools.partial(networks.logits, workload, x=x)
        logits, push = jax.linearize(model, parameters)
        _, pull = jax.vjp(model, parameters)
        gradient = jax.grad(lambda logits: networks.cross_entropy(logits, y))
        r, curve = jax.linearize(gradient, logits)
        shape = logits.shape

        @jax.jit
        def apply(push: Any, curve: Any, pull: Any, r: jax.Array, v: jax.Array) -> jax.Array:
            if matrix == "transpose":
                return networks.join(pull(v.reshape(shape))[0])
            t = push(networks.split(workload, v))
            if matrix == "jacobian":
                return t.reshape(-1)
            if matrix == "empirical":
                u = len(r) * r * jnp.sum(r * t, axis=1, keepdims=True)
            else:
                u = curve(t)
            return networks.join(pull(u)[0])

        return lambda v: np.asarray(apply(push, curve, pull, r, v))

    return prepare


def torch_products(matrix: str) -> Callable[[Workload], Multiply]:
    """`torch.func.linearize` and `torch.func.vjp` of the model, once; their products compiled."""

    def prepare(workload: Workload) -> Multiply:
        import networks_torch as networks
        import torch

        model, parameters = variants.torch_model(workload)
        logits, push = torch.func.linearize(model, parameters)
        _, pull = torch.func.vjp(model, parameters)
        _, y = networks.batch(workload)
        p = torch.softmax(logits, 1)
        r = p - torch.nn.functional.one_hot(y, CLASSES)

        def multiply(v: Any) -> Any:
            if matrix == "transpose":
                return networks.join(pull(v.reshape(p.shape))[0])
            t = push(tuple(networks.split(workload, v)))
            if matrix == "jacobian":
                return t.reshape(-1)
            if matrix == "empirical":
                u = r * torch.sum(r * t, 1, keepdim=True)
            else:
                u = p * (t - torch.sum(p * t, 1, keepdim=True))
            return networks.join(pull(u / len(p))[0])

        size = p.numel() if matrix == "transpose" else workload.size
        return variants.compiled_by_torch(multiply, size)

    return prepare


def curvlinops_products(matrix: str) -> Callable[[Workload], Multiply]:
    """Operators of curvlinops, for scipy."""

    def prepare(workload: Workload) -> Multiply:
        import curvlinops
        import networks_torch as networks
        import torch

        network, batch = networks.Network(workload), networks.batch(workload)
        parameters = list(network.parameters())
        kinds = {
            "gauss-newton": curvlinops.GGNLinearOperator,
            "empirical": curvlinops.EFLinearOperator,
            "jacobian": curvlinops.JacobianLinearOperator,
            "transpose": curvlinops.TransposedJacobianLinearOperator,
        }
        loss = [] if matrix in ("jacobian", "transpose") else [torch.nn.CrossEntropyLoss()]
        made = kinds[matrix](network, *loss, parameters, [batch], check_deterministic=False)
        return made.to_scipy(np.float32).__matmul__

    return prepare


def eigenthings_products(matrix: str) -> Callable[[Workload], Multiply]:
    """Operators of hessian-eigenthings."""

    def prepare(workload: Workload) -> Multiply:
        import hessian_eigenthings as peer
        import networks_torch as networks
        import torch

        network, batch = networks.Network(workload), networks.batch(workload)
        criterion = torch.nn.CrossEntropyLoss()
        if matrix == "gauss-newton":
            made = peer.GGNOperator(
                network, [batch], peer.supervised_forward, peer.supervised_loss_of_output(criterion)
            )
        else:
            nbytes = 4 * workload.size * len(workload.batch[0])
            if nbytes > LARGEST:
                raise MemoryError(f"would store {nbytes / 2**30:.0f} GiB of gradients")
            made = peer.EmpiricalFisherOperator(
                network, [batch], peer.supervised_per_sample_loss(criterion)
            )
        return lambda v: made.matvec(torch.from_numpy(v)).detach().numpy()

    return prepare


def all_variants() -> list[Variant]:
    """Everything that is timed with what is installed."""
    found = [
        Variant("gradient", "gradient", variants.gradient, is_peer=False),
        Variant(
            "hessian", "hvp", lambda w: variants.make_operator(w, "hvp, graph").__matmul__, False
        ),
    ]
    for matrix in MATRICES[:-1]:
        found += [
            Variant(matrix, "hvp", library(matrix, auto=False), is_peer=False),
            Variant(matrix, "hvp, auto", library(matrix, auto=True), is_peer=False),
        ]
        if importlib.util.find_spec("jax"):
            found.append(Variant(matrix, "JAX", jax_products(matrix)))
        if importlib.util.find_spec("torch"):
            prepare = torch_products(matrix)
            found.append(Variant(matrix, "PyTorch, compiled", prepare, axes=TORCH_STORED))
        if importlib.util.find_spec("curvlinops") and matrix != "type-2":
            prepare = curvlinops_products(matrix)
            found.append(Variant(matrix, "curvlinops", prepare, axes=TORCH))
        if importlib.util.find_spec("hessian_eigenthings") and matrix in MATRICES[::2][:2]:
            prepare = eigenthings_products(matrix)
            found.append(Variant(matrix, "hessian-eigenthings", prepare, axes=TORCH))
    return found


# Timing.


def argument_of(workload: Workload, variant: Variant, rng: np.random.Generator) -> np.ndarray:
    """Draw what a variant multiplies."""
    rows = CLASSES * len(workload.batch[0])
    size = rows if variant.matrix == "transpose" else workload.size
    return rng.standard_normal(size, np.float32)


def error_of(variant: Variant, workload: Workload, multiply: Multiply, right: Reference) -> float:
    """Call a variant once; return the relative error of its answer."""
    v = given = argument_of(workload, variant, np.random.default_rng(1))
    if variant.matrix == "gradient":
        multiply(v)
        return 0.0
    if variant.axes and variant.matrix != "transpose":
        v = to_layout(workload, v, variant.axes)
    answer = np.asarray(multiply(v)).reshape(-1)
    if variant.axes and variant.matrix != "jacobian":
        answer = from_layout(workload, answer, variant.axes)
    return relative_error(answer, right.product(variant.matrix, given))


def run(workload: Workload, rounds: int | None) -> list[dict[str, Any]]:
    """Prepare, compare and time everything on one workload; return the rows of the table."""
    right, prepared, rows = Reference(workload), {}, {}
    for variant in tqdm(all_variants(), f"{workload.name}, preparing", leave=False):
        row = rows[variant] = {"matrix": variant.matrix, "variant": variant.name}
        try:
            multiply = variant.prepare(workload)
            error = error_of(variant, workload, multiply, right)
            if not error <= TOLERANCE:
                raise ArithmeticError(f"differs by {error:.1e} of the norm")
        except Exception as error:  # whatever a framework raises goes into the table
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            continue
        row["relative_error"] = float(error)
        prepared[variant] = multiply
    timings = measure(workload, prepared, rounds)
    unit = timings[next(v for v in prepared if v.matrix == "gradient")]
    for variant, seconds in timings.items():
        low, median, high = 1e3 * np.percentile(seconds, [25, 50, 75])
        rows[variant] |= {"median_ms": median, "quartiles_ms": [low, high]}
        rows[variant]["per_gradient"] = float(np.median(seconds / unit))
        peers = [v for v in timings if v.matrix == variant.matrix and v.is_peer]
        if peers and not variant.is_peer:
            fastest = min(peers, key=lambda v: np.median(timings[v]))
            rows[variant]["per_fastest_peer"] = float(np.median(seconds / timings[fastest]))
    return list(rows.values())


def measure(
    workload: Workload, prepared: dict[Variant, Multiply], rounds: int | None
) -> dict[Variant, np.ndarray]:
    """Time all variants by turns; return the seconds of every round."""
    rng = np.random.default_rng(2)
    everything = list(prepared.items())

    def one_round(order: Any) -> dict[Variant, float]:
        seconds = {}
        for index in order:
            variant, multiply = everything[index]
            v = argument_of(workload, variant, rng)
            start = time.perf_counter()
            multiply(v)
            seconds[variant] = time.perf_counter() - start
        return seconds

    start = time.perf_counter()
    one_round(range(len(everything)))
    rounds = rounds or int(np.clip(SECONDS / (time.perf_counter() - start), FEWEST, MOST))
    turns = [
        one_round(rng.permutation(len(everything)))
        for _ in tqdm(range(rounds), f"{workload.name}, rounds", leave=False)
    ]
    return {variant: np.array([turn[variant] for turn in turns]) for variant in prepared}


# Blocks.


def first_products(blocks: bool) -> float:
    """Time from a constructor to the first product, or to those of ten blocks, in this process."""
    workload = make_workload("transformer")
    loss, variables = networks_tensorflow.bind(workload)
    start = time.perf_counter()
    H = hvp.HessianOperator(loss, variables, workload.batch)
    if not blocks:
        H @ np.ones(H.shape[0], np.float32)
        return time.perf_counter() - start
    for group in np.array_split(np.arange(len(variables)), 10):
        B = H.block([variables[place] for place in group])
        B @ np.ones(B.shape[0], np.float32)
    return time.perf_counter() - start


def measure_blocks() -> dict[str, Any]:
    """Run both by turns, each time in a process of its own."""
    seconds: dict[str, list[float]] = {"whole": [], "blocks": []}
    for _ in range(BUILDS):
        for which, times in seconds.items():
            command = [sys.executable, __file__, "--first", which]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            times.append(float(answer.stdout.split()[-1]))
    medians = {which: float(np.median(times)) for which, times in seconds.items()}
    ratios = np.array(seconds["blocks"]) / np.array(seconds["whole"])
    return {"seconds": medians, "ratio": float(np.median(ratios)), "builds": BUILDS}


# Results.


def print_rows(name: str, rows: list[dict[str, Any]]) -> None:
    """Print one workload."""
    print(f"\n{name}\n{'':34}{'ms':>10}{'quartiles':>22}{'/gradient':>10}{'/peer':>8}{'error':>9}")
    for row in rows:
        label = f"{row['matrix']:<13} {row['variant']:<20}"
        if "median_ms" not in row:
            print(f"{label}{row['error']}")
            continue
        low, high = row["quartiles_ms"]
        peer = row.get("per_fastest_peer")
        print(
            f"{label}{row['median_ms']:10.3f}{low:11.3f}{high:11.3f}{row['per_gradient']:10.2f}"
            f"{'' if peer is None else format(peer, '.2f'):>8}{row['relative_error']:9.0e}"
        )


def save(key: str, result: Any) -> None:
    """Write a result to JSON, keeping the others', and the table to CSV."""
    found = json.loads(JSON.read_text()) if JSON.exists() else {"workloads": {}}
    found |= {"versions": report.versions(), "machine": report.machine()}
    if key == "blocks":
        found["blocks"] = report.rounded(result)
    else:
        found["workloads"][key] = report.rounded(result)
    ordered = {name: found["workloads"][name] for name in WORKLOADS if name in found["workloads"]}
    found["workloads"] = ordered
    JSON.write_text(json.dumps(found, indent=1) + "\n")
    names = ["hvp", "hvp, auto", "JAX", "PyTorch, compiled", "curvlinops", "hessian-eigenthings"]
    measured = {row["variant"] for rows in ordered.values() for row in rows}
    names = [name for name in names if name in measured]
    lines = [",".join(["workload", "matrix", *(f'"{name}"' for name in names)])]
    for name, rows in ordered.items():
        for matrix in MATRICES[:-1]:
            costs = {r["variant"]: r.get("per_gradient") for r in rows if r["matrix"] == matrix}
            cells = ["" if costs.get(n) is None else f"{costs[n]:.3g}" for n in names]
            lines.append(",".join([name, matrix, *cells]))
    CSV.write_text("\n".join(lines) + "\n")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, with commas")
    parser.add_argument("--rounds", type=int, help="as many as fit in a minute by default")
    parser.add_argument("--blocks", action="store_true", help="time first products of blocks")
    parser.add_argument("--first", choices=["whole", "blocks"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    options = arguments()
    tf.get_logger().setLevel("ERROR")
    if options.first:
        print(first_products(options.first == "blocks"))
        return
    if options.blocks:
        result = measure_blocks()
        print(json.dumps(result, indent=1))
        save("blocks", result)
        return
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(os.cpu_count())
    for name in options.workloads.split(","):
        rows = run(make_workload(name), options.rounds)
        print_rows(name, rows)
        save(name, rows)
        gc.collect()


if __name__ == "__main__":
    main()
