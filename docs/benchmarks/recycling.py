"""Count the products of solves that remember, beside fresh ones.

The damped Gauss-Newton matrix of an autoencoder of 7,856 weights and of a convolutional network of
9,930, both trained on scikit-learn's digits. First, four sets of 64 right-hand sides, the gradients
of single digits: block conjugate gradients, the same with Nystrom preconditioners of rank 100 and
of the rank that pays, whose products count, and one `Solver` for all sets. Then ten Newton steps,
one system each, and forty of `NewtonCG` from random weights, by preconditioner. Damping is relative
to the largest eigenvalue. Variants take turns in one process.

    python docs/benchmarks/recycling.py [--networks autoencoder] [--only-newton]
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvp

CSV = Path(__file__).with_suffix(".csv")
COLUMNS, SETS, STEPS, RTOL = 64, 4, 10, 1e-4
DAMPINGS = (1e-3, 1e-4)


class Problem:
    """A trained network, and its Gauss-Newton matrix."""

    def __init__(self, name: str, *, trained: bool = True) -> None:
        keras.utils.set_random_seed(0)
        digits = load_digits()
        x, layers = (digits.data / 16).astype("float32"), keras.layers
        if name == "autoencoder":
            widths = [layers.Dense(n, "tanh") for n in (48, 16, 48)]
            self.model = keras.Sequential([keras.Input((64,)), *widths, layers.Dense(64)])
            self.each: Callable[..., Any] = lambda p, y: tf.reduce_mean((p - y) ** 2, axis=-1)
            loss: Any = "mse"
            self.data: tuple[Any, Any] = (x, x)
        else:
            middle = [
                layers.Reshape((8, 8, 1)),
                layers.Conv2D(16, 3, padding="same", activation="tanh"),
                layers.AveragePooling2D(2),
                layers.Conv2D(32, 3, padding="same", activation="tanh"),
                layers.Flatten(),
            ]
            self.model = keras.Sequential([keras.Input((64,)), *middle, layers.Dense(10)])
            self.each = lambda p, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.data = (x, digits.target)
        self.model.compile(keras.optimizers.Adam(3e-3), loss)
        if not trained:
            return
        self.model.fit(*self.data, epochs=60, batch_size=64, verbose=0)
        self.start = [w.numpy() for w in self.model.trainable_variables]
        self.matrix = hvp.GaussNewtonOperator(
            self.model, lambda p, y: tf.reduce_mean(self.each(p, y)), self.model, self.data
        )
        self.largest = float(hvp.eigsh(self.matrix, 1).eigenvalues[0])

    def gradients(self, number: int) -> np.ndarray:
        """Return gradients of single examples as columns."""
        part = slice(COLUMNS * number, COLUMNS * (number + 1))
        data = tuple(array[part] for array in self.data)
        with hvp.JacobianOperator(lambda x, y: self.each(self.model(x), y), self.model, data) as J:
            return np.asarray(J.T @ np.eye(COLUMNS, dtype=np.float32))

    def newton(self, solver: hvp.Solver | None, damping: float) -> list[int]:
        """Take Newton steps from the same start; return the products of each."""
        counts = []
        for weight, value in zip(self.model.trainable_variables, self.start):
            weight.assign(value)
        self.matrix.refresh()
        for _ in range(STEPS):
            b, options = -self.matrix.gradient, {"damping": damping, "rtol": 1e-3}
            if solver is None:
                result = hvp.solve(self.matrix, b, **options)
            else:
                result = solver.solve(b, **options)
            counts.append(result.products)
            for weight, step in zip(
                self.model.trainable_variables, self.matrix.unflatten(result.x)
            ):
                weight.assign_add(step)
            self.matrix.refresh()
        return counts


def steps_from_the_start(name: str) -> None:
    """Print the products of `NewtonCG` from random weights, by preconditioner."""
    for preconditioner, rank in ((None, 1), ("nystrom", 100), ("recycled", 100)):
        problem = Problem(name, trained=False)
        newton = hvp.NewtonCG.from_keras(
            problem.model,
            problem.data,
            curvature="gauss-newton",
            damping=0.1,
            radius=10.0,
            preconditioner=preconditioner,
            rank=rank,
        )
        newton.step()  # traces
        products, start = newton.products, time.perf_counter()
        result = newton.minimize(gtol=1e-4, maxiter=39)
        seconds, products = time.perf_counter() - start, newton.products - products
        steps = f"{result.nit + 1} steps, {seconds:.1f} s"
        print(
            name, "NewtonCG", preconditioner, products, f"products, loss {result.fun:.2g},", steps
        )


def sets_of_systems(problem: Problem, damping: float) -> list[list[Any]]:
    """Solve for several sets; return a row for each variant: products, seconds, unconverged."""
    blocks = [problem.gradients(number) for number in range(SETS)]
    options = {"damping": damping, "rtol": RTOL, "maxiter": 4000}
    solver, H = hvp.Solver(problem.matrix), problem.matrix

    def with_nystrom(b: np.ndarray) -> hvp.SolveResult:
        M = hvp.NystromPreconditioner(H, 100, damping=damping)
        result = hvp.solve(H, b, method="block_cg", M=M, **options)
        object.__setattr__(result, "products", result.products + M.products)
        return result

    variants: dict[str, Callable[[np.ndarray], hvp.SolveResult]] = {
        "block_cg": lambda b: hvp.solve(H, b, method="block_cg", **options),
        "block_cg, Nystrom of rank 100": with_nystrom,
        "block_cg, M='auto'": lambda b: hvp.solve(H, b, method="block_cg", M="auto", **options),
        "Solver": lambda b: solver.solve(b, method="block_cg", **options),
    }
    for name in list(variants)[:-1]:
        variants[name](blocks[0])  # traces
    rows: dict[str, list[list[Any]]] = {name: [] for name in variants}
    rng = np.random.default_rng(0)
    for b in blocks:
        for name in rng.permutation(list(variants)):
            start = time.perf_counter()
            result = variants[name](b)
            seconds = time.perf_counter() - start
            rows[name].append([result.products, seconds, int(np.sum(~result.converged))])
    return [
        [
            name,
            *[row[0] for row in found],
            round(float(np.median([row[1] for row in found[1:]])), 2),
            sum(row[2] for row in found),
        ]
        for name, found in rows.items()
    ]


def main() -> None:
    """Run everything, and write the table."""
    tf.get_logger().setLevel("ERROR")
    table: list[list[Any]] = [
        ["network", "damping", "method", "set 1", "set 2", "set 3", "set 4"]
        + ["seconds, sets 2 to 4", "not converged"]
    ]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="autoencoder,cnn")
    parser.add_argument("--only-newton", action="store_true", help="only the steps of NewtonCG")
    arguments = parser.parse_args()
    for name in arguments.networks.split(","):
        steps_from_the_start(name)
        if arguments.only_newton:
            continue
        problem = Problem(name)
        for damping in DAMPINGS:
            for row in sets_of_systems(problem, damping * problem.largest):
                table.append([name, damping, *row])
                print(table[-1], flush=True)
        for damping in DAMPINGS:
            absolute = damping * problem.largest
            solver = hvp.Solver(problem.matrix)
            for method, which in (("solve", None), ("Solver", solver)):
                start = time.perf_counter()
                counts = problem.newton(which, absolute)
                seconds = time.perf_counter() - start
                print(name, damping, "Newton", method, sum(counts), round(seconds, 2), flush=True)
    if arguments.only_newton:
        return
    with CSV.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    main()
