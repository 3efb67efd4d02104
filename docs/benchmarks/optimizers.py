"""Time optimizers to a small gradient: ours, and scipy's with Hessian products written by hand.

Softmax regression and a small network on scikit-learn's handwritten digits, in float64. Every
contender begins at the same point, its functions traced before, and ends where the norm of the
gradient is 1e-8 of what it was. Runs are taken in turns; medians are printed and written, if all
problems are chosen. `chain` counts steps on Rosenbrock's function, `overhead` is of `hvp.NewtonCG`.

    python docs/benchmarks/optimizers.py [--problems digits,products,chain] [--rounds 3]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import tensorflow as tf
from report import machine, versions
from sklearn.datasets import load_digits

import hvp

HERE = Path(__file__).parent
SMALL = 1e-8
SECOND_ORDER = ("trust-krylov", "trust-ncg", "Newton-CG")


@dataclass
class Problem:
    """A loss of one flat vector of variables."""

    loss: Callable[[], tf.Tensor]
    variables: list[tf.Variable]
    torch_loss: Callable[[Any], Any] | None = None

    @property
    def size(self) -> int:
        """How many numbers."""
        return sum(int(np.prod(v.shape)) for v in self.variables)


@dataclass
class Run:
    """What one run took."""

    seconds: float
    evaluations: int
    products: int
    gradient: float


def digits(features: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels of images, with all products of two of them if wanted, and labels."""
    x, y = load_digits(return_X_y=True)
    x = x / 16
    if features == "products":
        one, other = np.triu_indices(x.shape[1])
        x = np.concatenate([x, x[:, one] * x[:, other]], axis=1)
    return x, y.astype("int32")


def regression(features: str) -> Problem:
    """Softmax regression, with a little weight decay."""
    x, y = digits(features)
    inputs, labels = tf.constant(x), tf.constant(y)
    weights = tf.Variable(np.zeros((x.shape[1], 10)))

    def loss() -> tf.Tensor:
        logits = inputs @ weights
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(entropy) + 5e-4 * tf.reduce_sum(weights**2)

    def torch_loss(w: Any) -> Any:
        import torch

        w = w.reshape(x.shape[1], 10)
        entropy = torch.nn.functional.cross_entropy(torch_x @ w, torch_y)
        return entropy + 5e-4 * (w**2).sum()

    try:
        import torch

        torch_x, torch_y = torch.tensor(x), torch.tensor(y.astype("int64"))
    except ImportError:
        pass
    return Problem(loss, [weights], torch_loss)


def network() -> Problem:
    """One hidden layer of 32 tanh units on 600 digits, with weight decay."""
    x, y = (array[:600] for array in digits("pixels"))
    inputs, labels = tf.constant(x), tf.constant(y)
    rng = np.random.default_rng(0)
    shapes = [(64, 32), (32,), (32, 10), (10,)]
    variables = [tf.Variable(0.1 * rng.standard_normal(shape)) for shape in shapes]

    def loss() -> tf.Tensor:
        first, first_bias, last, last_bias = variables
        logits = tf.tanh(inputs @ first + first_bias) @ last + last_bias
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        decay = sum(tf.reduce_sum(v**2) for v in variables)
        return tf.reduce_mean(entropy) + 1e-3 * decay

    return Problem(loss, variables)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "digits": lambda: regression("pixels"),
    "products": lambda: regression("products"),
    "network": network,
}


class ByHand:
    """The functions that scipy wants, as one writes them with TensorFlow: two, compiled."""

    def __init__(self, problem: Problem) -> None:
        self._variables = problem.variables
        self._sizes = np.cumsum([int(np.prod(v.shape)) for v in problem.variables])[:-1]
        self.evaluations = self.products = 0

        @tf.function
        def value_and_gradient() -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                value = problem.loss()
            return value, _flat(tape.gradient(value, problem.variables))

        @tf.function
        def product(vector: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    value = problem.loss()
                gradient = _flat(inner.gradient(value, problem.variables))
            return _flat(outer.gradient(gradient, problem.variables, vector))

        self._value_and_gradient, self._product = value_and_gradient, product

    def assign(self, x: np.ndarray) -> None:
        """Write a vector to the variables."""
        for variable, part in zip(self._variables, np.split(x, self._sizes)):
            variable.assign(part.reshape(variable.shape))

    def fun_and_jac(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Evaluate loss and gradient."""
        self.evaluations += 1
        self.assign(x)
        value, gradient = self._value_and_gradient()
        return float(value), gradient.numpy()

    def hessp(self, x: np.ndarray, p: np.ndarray) -> np.ndarray:
        """Multiply the Hessian by a vector."""
        self.products += 1
        self.assign(x)
        return self._product(tf.constant(p)).numpy()

    def begin(self) -> None:
        """Count from here."""
        self.evaluations = self.products = 0


class Ours:
    """The same by `hvp.ScipyObjective`."""

    def __init__(self, problem: Problem) -> None:
        self._objective = hvp.ScipyObjective(problem.loss, problem.variables)
        self.fun_and_jac, self.hessp = self._objective.fun_and_jac, self._objective.hessp

    def begin(self) -> None:
        """Count from here, with no point kept."""
        self._objective.close()
        self._before = self._objective.gradient_evaluations, self._objective.products

    @property
    def evaluations(self) -> int:
        """How often loss and gradient were evaluated."""
        return self._objective.gradient_evaluations - self._before[0]

    @property
    def products(self) -> int:
        """How many products there were."""
        return self._objective.products - self._before[1]


def by_scipy(functions: Any, x0: np.ndarray, method: str, wanted: float) -> Run:
    """Run one of scipy's methods until the gradient is small."""
    gradients = [np.inf]

    def fun_and_jac(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = functions.fun_and_jac(x)
        gradients.append(float(np.linalg.norm(gradient)))
        return value, gradient

    def callback(x: np.ndarray) -> None:
        if min(gradients) <= wanted:
            raise StopIteration

    options: dict[str, Any] = {"maxiter": 5000}
    if method.startswith("trust"):
        options["gtol"] = wanted
    elif method == "Newton-CG":
        options["xtol"] = 0.0
    else:
        options.update(gtol=0.0, ftol=0.0, maxfun=20000)
    more = {} if method == "L-BFGS-B" else {"hessp": functions.hessp}
    functions.begin()
    start = time.perf_counter()
    with contextlib.suppress(hvp.InvalidVectorError):  # trust-krylov at rounding: a NaN direction
        scipy.optimize.minimize(
            fun_and_jac, x0, jac=True, method=method, options=options, callback=callback, **more
        )
    seconds = time.perf_counter() - start
    return Run(seconds, functions.evaluations, functions.products, min(gradients))


def by_newton_cg(newton: hvp.NewtonCG, problem: Problem, x0: np.ndarray, wanted: float) -> Run:
    """Run `hvp.NewtonCG` until the gradient is small."""
    for variable, part in zip(problem.variables, _parts(problem, x0)):
        variable.assign(part)
    newton.reset()
    start = time.perf_counter()
    result = newton.minimize(gtol=wanted, leave_saddles=False)
    seconds = time.perf_counter() - start
    gradient = float(np.linalg.norm(result.jac))
    return Run(seconds, result.gradient_evaluations, result.products, gradient)


def by_torch(problem: Problem, x0: np.ndarray, wanted: float) -> Run | None:
    """Run pytorch-minimize's Newton-CG, if it is installed."""
    try:
        import torch
        import torchmin
    except ImportError:
        return None
    if problem.torch_loss is None:
        return None
    gradients, aside = [np.inf], [0.0]

    def callback(x: Any) -> bool:  # whose time does not count
        start = time.perf_counter()
        with torch.enable_grad():
            at = x.detach().clone().requires_grad_()
            gradients.append(float(torch.autograd.grad(problem.torch_loss(at), at)[0].norm()))
        aside[0] += time.perf_counter() - start
        return gradients[-1] <= wanted

    start = time.perf_counter()
    result = torchmin.minimize(
        problem.torch_loss,
        torch.tensor(x0),
        method="newton-cg",
        options={"xtol": 0.0, "max_iter": 100},
        callback=callback,
    )
    seconds = time.perf_counter() - start - aside[0]
    return Run(seconds, int(result.nfev), int(result.ncg), min(gradients))


def contenders(problem: Problem, x0: np.ndarray, wanted: float) -> dict[str, Callable[[], Any]]:
    """Everything to be timed, by name."""
    by_hand, ours = ByHand(problem), Ours(problem)
    newton = hvp.NewtonCG(problem.loss, problem.variables)
    found: dict[str, Callable[[], Any]] = {}
    for method in SECOND_ORDER:
        found[f"{method}, hvp"] = lambda m=method: by_scipy(ours, x0, m, wanted)
        found[f"{method}, by hand"] = lambda m=method: by_scipy(by_hand, x0, m, wanted)
    found["hvp.NewtonCG"] = lambda: by_newton_cg(newton, problem, x0, wanted)
    found["L-BFGS-B, by hand"] = lambda: by_scipy(by_hand, x0, "L-BFGS-B", wanted)
    found["newton-cg, pytorch-minimize"] = lambda: by_torch(problem, x0, wanted)
    return found


def _flat(parts: Any) -> tf.Tensor:
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def _parts(problem: Problem, x: np.ndarray) -> list[np.ndarray]:
    sizes = np.cumsum([int(np.prod(v.shape)) for v in problem.variables])[:-1]
    return [p.reshape(v.shape) for p, v in zip(np.split(x, sizes), problem.variables)]


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Time every contender on one problem."""
    problem = PROBLEMS[name]()
    functions = ByHand(problem)
    x0 = _flat(problem.variables).numpy()
    first = float(np.linalg.norm(functions.fun_and_jac(x0)[1]))
    todo = contenders(problem, x0, SMALL * first)
    runs: dict[str, list[Run]] = {key: [] for key in todo}
    for turn in range(rounds + 1):  # one to warm up
        for key, function in todo.items():
            run = function()
            if turn > 0 and run is not None:
                runs[key].append(run)
    rows = []
    for key, taken in runs.items():
        if not taken:
            continue
        last = asdict(taken[-1])
        last["seconds"] = statistics.median(run.seconds for run in taken)
        rival = runs.get(key.replace(", hvp", ", by hand"), []) if ", hvp" in key else []
        if rival:
            ratios = [b.seconds / a.seconds for a, b in zip(taken, rival)]
            last["faster_than_by_hand"] = statistics.median(ratios)
        last["gradient"] /= first
        rows.append({"problem": name, "variables": problem.size, "method": key, **last})
        shown = last.get("faster_than_by_hand")
        print(
            f"{name:9} {key:28} {last['seconds']:8.3f} s  {last['evaluations']:5} evaluations "
            f"{last['products']:6} products  |g|/|g0| {last['gradient']:.1e}"
            + (f"  {shown:.2f} times as fast" if shown else ""),
            flush=True,
        )
    return rows


def overhead(rounds: int) -> dict[str, float]:
    """Measure what `hvp.NewtonCG` does besides evaluations and products.

    In each round some steps are taken, and then as many products in one loop of a graph, and as
    many evaluations, at the same point.
    """
    x, y = digits("pixels")
    inputs, labels = tf.constant(x, tf.float32), tf.constant(y)
    rng = np.random.default_rng(0)
    widths = (64, 256, 256, 128, 10)
    weights = [
        tf.Variable(rng.standard_normal(shape) / np.sqrt(shape[0]), dtype=tf.float32)
        for shape in zip(widths, widths[1:])
    ]

    def loss() -> tf.Tensor:
        hidden = inputs
        for weight in weights[:-1]:
            hidden = tf.tanh(hidden @ weight)
        logits = hidden @ weights[-1]
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(entropy) + 1e-4 * sum(tf.reduce_sum(w**2) for w in weights)

    newton = hvp.NewtonCG(loss, weights, forcing=0.01)
    operator = hvp.HessianOperator(loss, weights, on_stale="ignore")

    @tf.function(autograph=False)
    def multiply(vector: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        def body(k: tf.Tensor, v: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return k + 1, 0.01 * operator.product(v)

        return tf.while_loop(lambda k, v: k < count, body, (0, vector), parallel_iterations=1)[1]

    vector = tf.ones(operator.shape[:1])
    shares = []
    for turn in range(rounds + 1):
        result = newton.minimize(gtol=0.0, maxiter=4, leave_saddles=False)
        start = time.perf_counter()
        multiply(vector, tf.constant(result.products)).numpy()
        for _ in range(result.gradient_evaluations):
            operator.refresh()
            _ = operator.value, operator.gradient
        if turn > 0:
            shares.append(1 - (time.perf_counter() - start) / result.seconds)
    found = {"variables": operator.shape[0], "share": statistics.median(shares)}
    print(
        f"hvp.NewtonCG, {found['variables']} variables: {found['share']:.1%} besides (each: "
        + ", ".join(f"{share:.1%}" for share in shares)
        + ")"
    )
    return found


def chain(rounds: int) -> list[dict[str, Any]]:
    """Count steps on Rosenbrock's function of many variables, to a gradient of 1e-8.

    The first run is from the usual start, the others from starts that differ from it by rounding.
    """
    rows = []
    for size in (50, 100, 200, 400):
        usual = np.where(np.arange(size) % 2 == 0, -1.2, 1.0)
        w = tf.Variable(usual)

        def loss(w: tf.Variable = w) -> tf.Tensor:
            return tf.reduce_sum(100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2)

        newton = hvp.NewtonCG(loss, w)
        rng = np.random.default_rng(0)
        steps: dict[str, list[int]] = {"Newton-CG, scipy": [], "hvp.NewtonCG": []}
        for turn in range(rounds + 1):
            x0 = usual * (1 + 2e-16 * rng.standard_normal(size)) if turn > 0 else usual
            steps["Newton-CG, scipy"].append(_scipy_steps(x0))
            w.assign(x0)
            newton.reset()
            result = newton.minimize(gtol=SMALL, maxiter=20000, leave_saddles=False)
            _check_small(result.x)
            steps["hvp.NewtonCG"].append(result.nit)
        for method, (first, *others) in steps.items():
            rows.append({"variables": size, "method": method, "steps": first, "others": others})
            print(
                f"chain     {size:4} variables  {method:17} {first:5} steps, {first / size:.2f} a "
                f"variable (from starts that differ by rounding: {', '.join(map(str, others))})",
                flush=True,
            )
    return rows


def _scipy_steps(x0: np.ndarray) -> int:
    """Count the steps of scipy's Newton-CG with scipy's own derivatives."""

    def callback(x: np.ndarray) -> None:
        iterates.append(x.copy())
        if np.linalg.norm(scipy.optimize.rosen_der(x)) <= SMALL:
            raise StopIteration

    iterates: list[np.ndarray] = []
    scipy.optimize.minimize(
        scipy.optimize.rosen,
        x0,
        jac=scipy.optimize.rosen_der,
        hessp=scipy.optimize.rosen_hess_prod,
        method="Newton-CG",
        options={"xtol": 0.0, "maxiter": 20000},
        callback=callback,
    )
    _check_small(iterates[-1])
    return len(iterates)


def _check_small(x: np.ndarray) -> None:
    norm = np.linalg.norm(scipy.optimize.rosen_der(x))
    if norm > 2 * SMALL:  # scipy's gradient and TensorFlow's are rounded differently
        raise RuntimeError(f"a run on the chain ended where the gradient is {norm:.1e}")


def main() -> None:
    """Measure, print, and write tables for the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", default=",".join((*PROBLEMS, "chain", "overhead")))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    chosen = arguments.problems.split(",")
    rows = [row for name in chosen if name in PROBLEMS for row in measure(name, arguments.rounds)]
    steps = chain(arguments.rounds) if "chain" in chosen else []
    share = overhead(2 * arguments.rounds) if "overhead" in chosen else {}
    if {*PROBLEMS, "chain", "overhead"} <= set(chosen):
        write(rows, steps, share)


def write(rows: list[dict[str, Any]], steps: list[dict[str, Any]], share: dict[str, float]) -> None:
    """Write everything as JSON, and what the documentation shows as CSV."""
    everything = {
        "machine": machine(),
        "versions": versions(),
        "overhead": share,
        "chain": steps,
        "rows": rows,
    }
    (HERE / "optimizers.json").write_text(json.dumps(everything, indent=1) + "\n")
    with (HERE / "optimizers.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "problem",
                "method",
                "seconds",
                "evaluations",
                "products",
                "gradient",
                "times as fast as by hand",
            ]
        )
        for row in rows:
            faster = row.get("faster_than_by_hand")
            writer.writerow(
                [
                    row["problem"],
                    row["method"],
                    f"{row['seconds']:.3g}",
                    row["evaluations"],
                    row["products"] or "",
                    f"{row['gradient']:.0e}",
                    f"{faster:.2f}" if faster else "",
                ]
            )


if __name__ == "__main__":
    main()
