"""Sparse Hessians, Newton's method with them, and fits of thousands of parameters.

Each part is a process of its own, and prints what it measures; times of products alternate with
what they are compared with.

    python docs/benchmarks/sparse.py [--parts chain,grid,string,template,errors]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import hvp

ROUNDS = 15


def matrices(name: str, loss: Callable[[], Any], w: tf.Variable) -> None:
    """Print what the sparse Hessian takes, first and at a new point, in units of a product."""
    H = hvp.HessianOperator(loss, w)
    v = np.ones(H.shape[0])
    H @ v
    began = time.perf_counter()
    H.to_sparse()
    first, pattern = time.perf_counter() - began, H.sparsity()
    times = np.empty((ROUNDS, 2))
    for row in times:
        for i, call in enumerate((lambda: H @ v, H.to_sparse)):
            began = time.perf_counter()
            call()
            row[i] = time.perf_counter() - began
    again = np.median(times[:, 1] / times[:, 0])
    print(f"{name}: {pattern!r}, {first:.2f} s; again as long as {again:.1f} products", flush=True)


def chain() -> None:
    """Measure a chain of 100,000 variables."""
    w = tf.Variable(np.linspace(0, 1, 100_000))
    matrices("chain", lambda: tf.reduce_sum(tf.sqrt(1 + (w[1:] - w[:-1]) ** 2)), w)


def grid() -> None:
    """Measure a grid of 300 x 300 variables."""
    w = tf.Variable(np.random.default_rng(0).standard_normal((300, 300)))

    def loss() -> tf.Tensor:
        down, right = w[1:] - w[:-1], w[:, 1:] - w[:, :-1]
        area = tf.reduce_sum(tf.sqrt(1 + down**2)) + tf.reduce_sum(tf.sqrt(1 + right**2))
        return area + tf.reduce_sum(w**4)

    matrices("grid", loss, w)


def string() -> None:
    """Minimize a string of 20,000 variables to a gradient of 1e-10."""
    rng = np.random.default_rng(0)
    start, stiff = rng.standard_normal(20_000), tf.constant(rng.uniform(0.01, 0.02, 20_000))
    w = tf.Variable(start)

    def loss() -> tf.Tensor:
        length = tf.reduce_sum(tf.sqrt(1 + (w[1:] - w[:-1]) ** 2))
        return length + tf.reduce_sum(stiff * (w - 1) ** 2) / 2 + 1e-3 * tf.reduce_sum(w**4)

    newton = hvp.NewtonCG(loss, w, preconditioner="sparse")
    newton.minimize(gtol=1e-10)  # traces
    newton.reset()
    w.assign(start)
    began = time.perf_counter()
    result = newton.minimize(gtol=1e-10)
    seconds = time.perf_counter() - began
    print(
        f"string: {result.nit} steps, {seconds:.2f} s, gradient {np.linalg.norm(result.jac):.1e}",
        flush=True,
    )


def template() -> None:
    """Fit a binned likelihood of 12 processes and 2,100 correlated systematic effects."""
    rng, bins, processes, effects = np.random.default_rng(0), 3000, 12, 2100
    place = np.linspace(0, 1, bins)
    shapes = [
        1000 * np.exp(-(((place - c) / 0.15) ** 2)) + 30 for c in np.linspace(0, 1, processes)
    ]
    waves = [
        0.03
        * np.sin(2 * np.pi * (1 + k % 40) * place + rng.uniform(0, 2 * np.pi))
        * np.exp(-k / 900)
        for k in range(effects)
    ]
    of_bins = tf.constant(np.stack(shapes, 1)), tf.constant(np.stack(waves, 1))
    start = np.concatenate([np.ones(processes), np.zeros(effects)])
    w = tf.Variable(start)

    def mean(shapes: tf.Tensor, waves: tf.Tensor) -> tf.Tensor:
        rates = tf.linalg.matvec(shapes, w[:processes])
        return rates * tf.exp(tf.linalg.matvec(waves, w[processes:]))

    w.assign(np.concatenate([rng.uniform(0.8, 1.2, processes), rng.standard_normal(effects)]))
    counts = tf.constant(rng.poisson(mean(*of_bins)).astype(float))

    def poisson(rate: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(rate - counts * tf.math.log(rate))

    def whole() -> tf.Tensor:
        return bins * poisson(mean(*of_bins), counts) + tf.reduce_sum(w[processes:] ** 2) / 2

    terms = {
        "bins": (mean, poisson),
        "prior": (lambda k: tf.gather(w, processes + k), lambda p: tf.reduce_mean(p**2) / 2),
    }
    data = {"bins": (of_bins, counts), "prior": (np.arange(effects),)}
    weights = {"bins": float(bins), "prior": float(effects)}

    def report(name: str, run: Callable[[], Any]) -> None:
        w.assign(start)
        began = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
        print(
            f"template, {name}: success {result.success}, {result.nit} steps, {result.products} "
            f"products, loss {result.fun:.6f}, gradient {np.linalg.norm(result.jac):.1e}, "
            f"{seconds:.0f} s with tracing",
            flush=True,
        )

    options: dict[str, Any] = {"curvature": "gauss-newton", "space": "residuals", "radius": 100.0}
    fast = hvp.NewtonCG(terms, w, data, weight=weights, **options)
    report("space of residuals", lambda: fast.minimize(gtol=1e-6))
    solution = w.numpy()
    report("trust-krylov", lambda: hvp.minimize(whole, w, gtol=1e-6, maxiter=500))
    w.assign(solution)
    began = time.perf_counter()
    H = hvp.HessianOperator(whole, w)
    errors = hvp.standard_errors(H)
    seconds = time.perf_counter() - began
    print(f"template, {len(errors)} errors: {errors[0]:.3g} ..., {seconds:.1f} s", flush=True)


def errors() -> None:
    """Compare a hundred errors of 100,000 parameters with the identity of Woodbury."""
    rng, bins, size = np.random.default_rng(0), 1000, 100_000
    place = np.linspace(0, 1, bins)
    base = tf.constant(1000 * np.exp(-(((place - 0.5) / 0.2) ** 2)) + 50)
    effects = tf.constant(
        0.02 * rng.standard_normal((bins, size)) * np.exp(-np.arange(size) / 30_000)
    )
    counts, w = tf.constant(rng.poisson(base).astype(float)), tf.Variable(np.zeros(size))

    def mean() -> tf.Tensor:
        return base * tf.exp(tf.linalg.matvec(effects, w))

    def loss() -> tf.Tensor:
        return tf.reduce_sum(mean() - counts * tf.math.log(mean())) + tf.reduce_sum(w**2) / 2

    result = hvp.NewtonCG(loss, w).minimize(gtol=1e-6)
    assert result.success, result.message
    chosen = rng.choice(size, 100, replace=False)
    H = hvp.HessianOperator(loss, w)
    began = time.perf_counter()
    found = hvp.standard_errors(H, chosen)
    seconds, products = time.perf_counter() - began, H.stats.products
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows = effects.numpy() * np.sqrt(mean().numpy())[:, np.newaxis]
    columns = rows[:, chosen]
    inner = np.linalg.solve(np.eye(bins) + rows @ rows.T, columns)
    exact = np.sqrt(1 - np.sum(columns * inner, axis=0))
    apart = np.abs(found / exact - 1).max()
    print(
        f"errors: {products} products, {seconds:.0f} s, peak of the process {peak:.1f} GiB, of "
        f"which the data are {effects.numpy().nbytes / 2**30:.2f}; relative error {apart:.0e}",
        flush=True,
    )


PARTS = {part.__name__: part for part in (chain, grid, string, template, errors)}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parts = parser.parse_args().parts.split(",")
    if len(parts) == 1:
        PARTS[parts[0]]()
        return
    for part in parts:
        subprocess.run([sys.executable, __file__, "--parts", part], check=True)


if __name__ == "__main__":
    main()
