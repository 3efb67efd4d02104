"""Time Hessian-vector products: this library, TensorFlow by hand, JAX, PyTorch and curvlinops.

All variants of a workload take turns in one process, in another random order and with another
vector in every round. Before that, each variant's answer is compared with that of nested tapes;
one that differs is not timed. Writes `products.json` and `products.csv` beside this file, and
with `--figure` the figure of the documentation.

    python docs/benchmarks/products.py [--workloads mlp,cnn] [--rounds 20] [--check] [--figure]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compilers  # noqa: F401 - before TensorFlow
import numpy as np
import report
import tensorflow as tf
import variants as ways
from tqdm import tqdm
from variants import Multiply, Variant
from workloads import (
    TOLERANCE,
    WORKLOADS,
    Workload,
    check,
    from_layout,
    installed_frameworks,
    make_workload,
    relative_error,
    to_layout,
)

SECONDS = 60  # of rounds for one workload, unless the fewest rounds take longer
FEWEST, MOST = 7, 200
COLD_MAKES = 3

Prepared = dict[Variant, Multiply]


def in_one_line(error: Exception) -> str:
    """Return the kind of an error and the line of its text that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    kind = type(error).__name__
    if lines[0] == "Graph execution error:":  # the code first, then the text and the node
        lines = [line for line in lines if not line.startswith("[[")][-1:]
    elif lines[0] == "in user code:":  # the code first, then an error with its own kind
        lines = [line.split(": ", 1)[1] for line in lines if line.startswith(f"{kind}: ")] or lines
    return f"{kind}: {lines[0][:200]}"


class Draw:
    """Vectors and blocks for one workload.

    Parameters
    ----------
    workload : Workload
        Says how long and how wide.
    seed : int
        Another one for the comparison than for the timing.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._workload = workload

    def vector(self) -> np.ndarray:
        """Draw an array of shape `(n,)`."""
        return self._rng.standard_normal(self._workload.size, np.float32)

    def block(self) -> np.ndarray:
        """Draw an array of shape `(n, k)`."""
        shape = self._workload.size, self._workload.block
        return self._rng.standard_normal(shape, np.float32)


class Reference:
    """Right answers for one workload, by compiled nested tapes."""

    def __init__(self, workload: Workload) -> None:
        draw = Draw(workload, seed=1)
        self._workload = workload
        self._multiply = ways.compiled_nested_tapes(workload)
        self._gradient = ways.gradient(workload)
        self._vector, self._block = draw.vector(), draw.block()

    def _product(self, vector: np.ndarray, kind: str) -> np.ndarray:
        if kind != "loop":
            return self._multiply(vector)
        for _ in range(ways.LOOP):
            vector = self._multiply(vector)
            vector /= np.linalg.norm(vector)
        return vector

    def error_of(self, variant: Variant, multiply: Multiply) -> float | None:
        """Call a variant once; the relative error of its answer, if it answers at all."""
        if variant.kind == "block":
            given, axes = [column.copy() for column in self._block.T], variant.kernel_axes
            if axes:
                given = [to_layout(self._workload, column, axes) for column in given]
            products = multiply(np.stack(given, 1)).T[[0, -1]]
            if axes:
                products = [from_layout(self._workload, product, axes) for product in products]
            expected = [self._multiply(self._block[:, c].copy()) for c in (0, -1)]
            return relative_error(np.stack(products), np.stack(expected))
        if variant.kernel_axes:
            answer = multiply(to_layout(self._workload, self._vector, variant.kernel_axes))
            answer = from_layout(self._workload, answer, variant.kernel_axes)
        else:
            answer = multiply(self._vector)
        if variant.kind in ("refresh", "rate"):
            return None
        is_gradient = variant.kind == "gradient"
        expected = self._gradient if is_gradient else self._product
        arguments = (self._vector,) if is_gradient else (self._vector, variant.kind)
        return relative_error(answer, expected(*arguments))


def prepare(workload: Workload) -> tuple[Prepared, dict[str, dict[str, Any]]]:
    """Prepare all variants, call each, and compare its answer.

    Returns
    -------
    prepared : dict
        The functions to time, of those that work.
    results : dict
        By variant's name its family and kind, with its relative error or why it is not timed.
    """
    reference = Reference(workload)
    prepared, results = {}, {}
    everything = ways.all_variants(workload)
    for variant in tqdm(everything, f"{workload.name}, preparing", leave=False):
        result = results[variant.name] = {"family": variant.family, "kind": variant.kind}
        try:
            multiply = variant.prepare(workload)
            error = reference.error_of(variant, multiply)
            if error is not None and not error <= TOLERANCE:
                raise ArithmeticError(f"differs from nested tapes by {error:.1e} of the norm")
        except Exception as error:  # whatever a framework raises goes into the table
            result["error"] = in_one_line(error)
            continue
        result["relative_error"] = error
        if variant.name in ways.SETTINGS:  # where it fell back to another, this tells
            result["engine"] = ways.operator(workload, variant.name).stats.engine
        prepared[variant] = multiply
    return prepared, results


def seconds_of(function: Callable[[Any], Any], argument: Any) -> float:
    """Time one call."""
    start = time.perf_counter()
    function(argument)
    return time.perf_counter() - start


def one_round(workload: Workload, prepared: Prepared, draw: Draw, order: Any) -> dict[str, float]:
    """Time every variant once; seconds per product."""
    vector, block = draw.vector(), draw.block()
    everything = list(prepared.items())
    seconds = {}
    for index in order:
        variant, multiply = everything[index]
        argument = block if variant.kind == "block" else vector
        seconds[variant.name] = seconds_of(multiply, argument) / variant.products(workload)
    return seconds


def measure(workload: Workload, prepared: Prepared, rounds: int | None) -> dict[str, np.ndarray]:
    """Time all variants by turns.

    Returns
    -------
    dict
        Seconds per product in every round, by variant's name.
    """
    draw = Draw(workload, seed=2)
    rng = np.random.default_rng(3)
    start = time.perf_counter()
    one_round(workload, prepared, draw, range(len(prepared)))
    warm_up = time.perf_counter() - start
    rounds = rounds or int(np.clip(SECONDS / warm_up, FEWEST, MOST))
    timings = [
        one_round(workload, prepared, draw, rng.permutation(len(prepared)))
        for _ in tqdm(range(rounds), f"{workload.name}, rounds", leave=False)
    ]
    return {name: np.array([timing[name] for timing in timings]) for name in timings[0]}


def first_product_by_library(workload: Workload, name: str, v: np.ndarray) -> float:
    """Time from the constructor to the end of the first product."""
    start = time.perf_counter()
    with ways.make_operator(workload, name) as H:
        H @ v
        return time.perf_counter() - start


def first_product_by_hand(workload: Workload, jit_compile: bool, v: np.ndarray) -> float:
    """Time making a `tf.function` of nested tapes, and its first call."""
    return seconds_of(lambda v: ways.compiled_nested_tapes(workload, jit_compile=jit_compile)(v), v)


def measure_first_products(workload: Workload, makes: int) -> dict[str, Any]:
    """Median milliseconds to the end of the first product, everything made afresh."""
    contenders = {
        "TF nested tapes, tf.function": lambda v: first_product_by_hand(workload, False, v),
        "TF nested tapes, XLA": lambda v: first_product_by_hand(workload, True, v),
    }
    for setting in ways.SETTINGS:
        contenders[setting] = lambda v, s=setting: first_product_by_library(workload, s, v)
    draw = Draw(workload, seed=4)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    results: dict[str, Any] = {}
    for _ in tqdm(range(makes), f"{workload.name}, first products", leave=False):
        vector = draw.vector()
        for name, run in contenders.items():
            try:
                seconds[name].append(run(vector))
            except Exception as error:
                results[name] = in_one_line(error)
    medians = {name: 1e3 * np.median(times) for name, times in seconds.items() if times}
    return {**results, **medians}


def run(workload: Workload, rounds: int | None, makes: int) -> dict[str, Any]:
    """Everything that is measured on one workload."""
    agreement = check(workload)
    prepared, results = prepare(workload)
    timings = measure(workload, prepared, rounds)
    prepared.clear()
    ways.release_operators()
    return report.summarize(
        workload, agreement, results, timings, measure_first_products(workload, makes)
    )


def print_check(names: list[str]) -> None:
    """Print how far the frameworks are apart on each workload."""
    for name in names:
        for framework, errors in check(make_workload(name)).items():
            parts = ", ".join(f"{quantity} {error:.0e}" for quantity, error in errors.items())
            print(f"{name:>12}  {framework:>6} - tensorflow: {parts}")
    print(f"relative errors in the Euclidean norm; at most {TOLERANCE:.0e} is accepted")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, with commas")
    parser.add_argument("--rounds", type=int, help="as many as fit in a minute by default")
    parser.add_argument("--makes", type=int, default=COLD_MAKES, help="of each first product")
    parser.add_argument("--check", action="store_true", help="compare frameworks, time nothing")
    parser.add_argument("--figure", action="store_true", help="draw the figure at the end")
    options = parser.parse_args()
    options.workloads = options.workloads.split(",")
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return options


def main() -> None:
    """Run what the command line asks for."""
    options = arguments()
    tf.get_logger().setLevel("ERROR")
    absent = set(report.PEERS) - set(report.versions())
    if absent:
        print(f"not installed, left out: {', '.join(sorted(absent))}")
    if options.check:
        print_check(options.workloads)
        return
    if "torch" in installed_frameworks():
        import torch

        torch.set_num_threads(os.cpu_count())
    for name in options.workloads:
        result = run(make_workload(name), options.rounds, options.makes)
        report.print_table(name, result)
        report.save(name, result)
        gc.collect()
    if options.figure:
        import figure

        figure.draw()


if __name__ == "__main__":
    main()
