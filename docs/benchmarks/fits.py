"""Seconds until a physics-informed network has a given error, in the space of residuals or not.

Each run is a process of its own, so that tracing counts, and starts from the same weights. The
equation is Poisson's on the unit square, with a hundred times the mean square on the edges. The
error is that of the solution on a grid, relative to its norm; looking at it does not count.

    python docs/benchmarks/fits.py [--error 1e-5] [--limit 900] [--seeds 2]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import hvp

RESIDUALS: dict[str, Any] = {"curvature": "gauss-newton", "space": "residuals"}
METHODS = {"residuals": RESIDUALS, "geodesic": {**RESIDUALS, "geodesic": True}, "L-BFGS-B": {}}


def exact(points: np.ndarray) -> np.ndarray:
    """Return the solution at points of shape (n, 2)."""
    return np.prod(np.sin(np.pi * points), axis=-1, keepdims=True)


def run(method: str, seed: int, wanted: float, limit: float) -> None:
    """Minimize until the error is small enough, and print the seconds and the error."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(32, "tanh", dtype="float64") for _ in range(3)]
    last = keras.layers.Dense(1, dtype="float64")
    u = keras.Sequential([keras.Input((2,), dtype="float64"), *hidden, last])
    rng = np.random.default_rng(seed)
    inside, along = rng.uniform(size=(900, 2)), rng.uniform(size=(50, 1))
    sides = [(along, 0 * along), (0 * along, along), (along, 0 * along + 1), (0 * along + 1, along)]
    edge = np.concatenate([np.hstack(side) for side in sides])
    data = {
        "inside": (inside, -2 * np.pi**2 * exact(inside)),
        "edge": (edge, np.zeros((len(edge), 1))),
    }
    lines = np.linspace(0, 1, 41)
    grid = np.stack(np.meshgrid(lines, lines), axis=-1).reshape(-1, 2)
    start, paused, steps, seen = time.perf_counter(), 0.0, 0, np.inf

    def note(*_: Any, **__: Any) -> None:
        nonlocal paused, steps, seen
        now = time.perf_counter()
        steps += 1
        if method != "L-BFGS-B" or steps % 100 == 0:
            difference = u(tf.constant(grid)).numpy() - exact(grid)
            seen = float(np.linalg.norm(difference) / np.linalg.norm(exact(grid)))
        seconds = now - start - paused
        paused += time.perf_counter() - now
        if seen <= wanted or seconds > limit:
            print(f"{seconds:.1f} s, {steps} steps, error {seen:.1e}")
            raise StopIteration

    def laplacian(x: tf.Tensor) -> tf.Tensor:
        return hvp.laplacian(u, x).laplacian

    def mean_square(predicted: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((predicted - wanted) ** 2)

    if method == "L-BFGS-B":
        losses = {
            "inside": lambda x, wanted: mean_square(laplacian(x), wanted),
            "edge": lambda x, wanted: mean_square(u(x), wanted),
        }
        endless = {"ftol": 0, "gtol": 0, "maxcor": 50, "maxiter": 10**7, "maxfun": 10**7}
        hvp.minimize(
            losses,
            u,
            data,
            weight={"edge": 100.0},
            method=method,
            callback=lambda intermediate_result: note(),
            **endless,
        )
        return
    pairs = {"inside": (laplacian, mean_square), "edge": (u, mean_square)}
    newton = hvp.NewtonCG(pairs, u, data, weight={"edge": 100.0}, **METHODS[method])
    newton.minimize(gtol=0, maxiter=10**6, callback=note)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--error", type=float, default=1e-5)
    parser.add_argument("--limit", type=float, default=900, help="seconds of one run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run(options.one[0], int(options.one[1]), options.error, options.limit)
        return
    for seed in range(options.seeds):
        for method in np.random.default_rng(seed).permutation(list(METHODS)):
            command = [sys.executable, __file__, "--one", method, str(seed)]
            command += ["--error", str(options.error), "--limit", str(options.limit)]
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=environment
            )
            print(f"seed {seed}, {method:>10}: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
