"""Time derivatives in the inputs of a network, beside nested tapes, JAX's jets and folx.

All variants of a case take turns in one process, in another random order in every round, after
their results were compared. Memory is the growth of a process that computes one variant, once.

    python docs/benchmarks/inputs.py [--cases laplacian-256,poisson] [--rounds 15] [--memory]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import hvp

TOLERANCE = {"float32": 1e-3, "float64": 1e-9}


@dataclass(frozen=True)
class Case:
    """A network of tanh layers, and what is computed: of `kind`, a laplacian or bilaplacian."""

    inputs: int
    widths: tuple[int, ...]
    batch: int
    dtype: str = "float32"
    kind: str = "laplacian"


WIDE = (768, 768, 512, 512)
CASES = {
    "laplacian-256": Case(50, WIDE, 256),
    "laplacian-2048": Case(50, WIDE, 2048),
    "bilaplacian": Case(5, (128, 128, 128), 512, "float32", "bilaplacian"),
    "poisson": Case(2, (32, 32, 32), 2000, "float64"),
}


class Network:
    """The network of a case, in TensorFlow and, where installed, in JAX."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(0)
        sizes = [case.inputs, *case.widths, 1]
        self.case = case
        self.arrays = [
            (rng.standard_normal((a, b)) / np.sqrt(a)).astype(case.dtype)
            for a, b in zip(sizes, sizes[1:])
        ]
        self.weights = [tf.Variable(array) for array in self.arrays]
        self.x = rng.standard_normal((case.batch, case.inputs)).astype(case.dtype)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Compute the results, of shape `(n, 1)`."""
        for weight in self.weights[:-1]:
            x = tf.tanh(x @ weight)
        return x @ self.weights[-1]


def by_coordinate(f: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Compute the Laplacian by one tape more for each coordinate."""
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = f(x)
        columns = tf.unstack(inner.gradient(y, x), axis=1)
    seconds = [outer.gradient(column, x)[:, i] for i, column in enumerate(columns)]
    return tf.add_n(seconds)[:, tf.newaxis]


def by_batch_jacobian(f: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Compute the Laplacian as the trace of the Jacobian of the gradient."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = f(x)
        gradient = inner.gradient(y, x)
    return tf.linalg.trace(outer.batch_jacobian(gradient, x))[:, tf.newaxis]


def by_hvp(f: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Compute the Laplacian by this library."""
    return hvp.laplacian(f, x).laplacian


LAPLACIANS = {"hvp": by_hvp, "tapes": by_coordinate, "batch_jacobian": by_batch_jacobian}


def tensorflow_variants(network: Network, gradient: bool) -> dict[str, Callable[[], Any]]:
    """Return what computes the case by TensorFlow, by name."""
    x = tf.constant(network.x)

    def variant(laplacian: Callable[..., tf.Tensor]) -> Callable[[], Any]:
        def compute() -> tf.Tensor:
            if network.case.kind == "laplacian":
                return laplacian(network, x)
            if laplacian is by_hvp:
                return hvp.bilaplacian(network, x)
            return laplacian(lambda x: laplacian(network, x), x)

        @tf.function
        def run() -> Any:
            if not gradient:
                return [compute()]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(compute() ** 2)
            return tape.gradient(loss, network.weights)

        return lambda: [part.numpy() for part in run()]

    return {name: variant(laplacian) for name, laplacian in LAPLACIANS.items()}


def jax_variants(network: Network, gradient: bool) -> dict[str, Callable[[], Any]]:
    """Return what computes the case by JAX, by name."""
    if network.case.kind != "laplacian" or importlib.util.find_spec("jax") is None:
        return {}
    import jax
    from jax.experimental.jet import jet

    jax.config.update("jax_enable_x64", True)
    jnp = jax.numpy
    arrays, x = [jnp.asarray(a) for a in network.arrays], jnp.asarray(network.x)

    def f(arrays: Any, x: Any) -> Any:
        for array in arrays[:-1]:
            x = jnp.tanh(x @ array)
        return (x @ arrays[-1])[..., 0]

    def by_jets(arrays: Any, x: Any) -> Any:
        def second(direction: Any) -> Any:
            one = lambda x: f(arrays, x)  # noqa: E731
            return jet(one, (x,), ((direction, jnp.zeros_like(x)),))[1][1]

        directions = jnp.eye(x.shape[1], dtype=x.dtype)[:, None] * jnp.ones_like(x)
        return jax.vmap(second)(directions).sum(0)

    ways = {"jax jet": by_jets}
    if importlib.util.find_spec("folx") is not None:
        import folx

        def by_folx(arrays: Any, x: Any) -> Any:
            one = folx.forward_laplacian(lambda x: f(arrays, x))
            return jax.vmap(lambda x: one(x).laplacian)(x)

        ways["folx"] = by_folx

    def variant(way: Callable[..., Any]) -> Callable[[], Any]:
        if gradient:
            run = jax.jit(jax.grad(lambda arrays, x: (way(arrays, x) ** 2).mean()))
        else:
            run = jax.jit(lambda arrays, x: [way(arrays, x)[:, None]])
        return lambda: [np.asarray(part) for part in run(arrays, x)]

    return {name: variant(way) for name, way in ways.items()}


def product_variants(network: Network) -> dict[str, Callable[[], Any]]:
    """Return Hessian-vector products of a loss with a Laplacian in it, by name."""
    x = tf.constant(network.x)
    v = np.random.default_rng(1).standard_normal(sum(a.size for a in network.arrays))
    v = v.astype(network.case.dtype)

    def variant(laplacian: Callable[..., tf.Tensor]) -> Callable[[], Any]:
        loss = lambda: tf.reduce_mean(laplacian(network, x) ** 2)  # noqa: E731
        H = hvp.HessianOperator(loss, network.weights)
        return lambda: [H @ v]

    return {f"product, {name}": variant(way) for name, way in LAPLACIANS.items()}


def compared(variants: dict[str, Callable[[], Any]], dtype: str) -> None:
    """Raise an error unless the variants agree; this also traces them."""
    results = {name: np.concatenate([np.ravel(p) for p in run()]) for name, run in variants.items()}
    want = next(iter(results.values()))
    for name, result in results.items():
        error = np.linalg.norm(result - want) / np.linalg.norm(want)
        if error > TOLERANCE[dtype]:
            raise SystemExit(f"{name} differs by {error:.1e}")


def timed(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of all variants in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for name in rng.permutation(list(variants)):
            start = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(times) for name, times in seconds.items()}


def print_times(title: str, seconds: dict[str, np.ndarray]) -> None:
    """Print medians in milliseconds, and ratios of this library to each other variant."""
    own = next(name for name in seconds if name.endswith("hvp"))
    print(title)
    for name, times in seconds.items():
        ratio = np.median(seconds[own] / times)
        print(f"    {name:>24}  {1e3 * np.median(times):9.2f} ms   hvp / this {ratio:.2f}")


def peak(case: str, gradient: bool, name: str) -> None:
    """Compute one variant once, and print by how much the process grew in MiB."""
    network = Network(CASES[case])
    variants = {**tensorflow_variants(network, gradient), **jax_variants(network, gradient)}
    network(tf.constant(network.x[:2]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    variants[name]()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)


def print_memory(case: str) -> None:
    """Print the growth of one process for each variant."""
    for gradient in (False, True):
        print(f"{case}, {'gradient in the weights' if gradient else 'forward'}: growth in MiB")
        for name in [*LAPLACIANS, *jax_variants(Network(CASES[case]), gradient)]:
            command = [sys.executable, __file__, "--peak", case, str(int(gradient)), name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"    {name:>24}  {done.stdout.split()[-1]:>6}")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        case, gradient, name = options.peak
        peak(case, gradient == "1", name)
        return
    for name in options.cases.split(","):
        if options.memory:
            print_memory(name)
            continue
        network = Network(CASES[name])
        for gradient in (False, True):
            variants = {**tensorflow_variants(network, gradient), **jax_variants(network, gradient)}
            compared(variants, network.case.dtype)
            title = f"{name}, {'gradient in the weights' if gradient else 'forward'}"
            print_times(title, timed(variants, options.rounds))
        if name == "poisson":
            variants = product_variants(network)
            compared(variants, network.case.dtype)
            print_times(f"{name}, Hessian-vector product", timed(variants, 5 * options.rounds))


if __name__ == "__main__":
    main()
