"""Compare Laplace approximations with laplace-torch, on the same weights and data, and time them.

A network of 3,700 weights for scikit-learn's digits, in float64, trained for a while with weight
decay. It has no biases, which laplace-torch puts into Kronecker blocks of their own. Evidence,
means and covariances of logits, and probabilities are compared first: the script ends if they
differ by more than 1e-5. Times are of the first fit in a process, of another one at other weights,
and of predictions for 397 images. Variants take turns in shuffled order; those that take more than
ten seconds run once.

    python docs/benchmarks/uncertainty.py [--rounds 7]
    python docs/benchmarks/uncertainty.py --many-classes

The second command times the last layer of a network with 3,100 classes and 128 features, and
measures the growth of the peak of resident memory. The peer runs if torch and laplace-torch are
installed.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compilers  # noqa: F401
import keras
import numpy as np
from sklearn.datasets import load_digits

import hvp

try:
    import laplace
    import torch
except ImportError:
    torch = None

CSV = Path(__file__).with_suffix(".csv")
TRAINED, PRIOR = 1400, 3.0
SLOW = 10.0
KINDS = {"full": "full", "kfac": "kron", "diagonal": "diag"}
CASES = [
    ("kfac", "all"),
    ("diagonal", "all"),
    ("full", "all"),
    ("kfac", "last-layer"),
    ("full", "last-layer"),
    ("diagonal", "last-layer"),
]
Variant = Callable[[], Any]


def network() -> tuple[keras.Model, list[np.ndarray]]:
    """Return a trained network, and data to train and to predict."""
    images, y = load_digits(return_X_y=True)
    x = images / 16
    keras.utils.set_random_seed(0)
    keras.config.set_floatx("float64")
    layers = keras.layers
    hidden = [layers.Dense(50, "tanh", use_bias=False)]
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, use_bias=False)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-2, weight_decay=1e-2), loss)
    model.fit(x[:TRAINED], y[:TRAINED], batch_size=100, epochs=10, verbose=0)
    return model, [x[:TRAINED], y[:TRAINED], x[TRAINED:]]


def ours(model: keras.Model, data: Any, curvature: str, subset: str) -> hvp.Laplace:
    """Return our posterior."""
    options: Any = {"curvature": curvature, "subset": subset, "prior_precision": PRIOR}
    return hvp.Laplace(model, "categorical", data, **options)


def theirs(model: Any, data: Any, curvature: str, subset: str) -> Any:
    """Return laplace-torch's posterior."""
    la = laplace.Laplace(
        model,
        "classification",
        subset_of_weights="last_layer" if subset == "last-layer" else "all",
        hessian_structure=KINDS[curvature],
        prior_precision=PRIOR,
        backend=laplace.curvature.CurvlinopsGGN,
    )
    dataset = torch.utils.data.TensorDataset(*data)
    la.fit(torch.utils.data.DataLoader(dataset, batch_size=len(dataset)))
    return la


def torch_network(model: keras.Model) -> Any:
    """Return the same network in PyTorch."""
    parts: list[Any] = []
    for layer in model.layers:
        kernel = torch.tensor(layer.get_weights()[0])
        part = torch.nn.Linear(*kernel.shape, bias=False, dtype=torch.float64)
        part.weight.data = kernel.T.contiguous()
        parts += [part, torch.nn.Tanh()]
    return torch.nn.Sequential(*parts[:-1])


def difference(a: Any, b: Any) -> float:
    """Return the largest difference, relative to the largest number."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.abs(a - b).max() / np.abs(b).max())


def measure(rounds: int) -> list[dict[str, Any]]:
    """Compare and time all cases."""
    model, (x, y, new) = network()
    rows = []
    if torch is not None:
        torch.set_default_dtype(torch.float64)
        other = torch_network(model)
        tensors = torch.tensor(x), torch.tensor(y).long()
        inputs = torch.tensor(new)
    for curvature, subset in CASES:
        start = time.perf_counter()
        la = ours(model, (x, y), curvature, subset)
        first = time.perf_counter() - start
        variants: dict[str, Variant] = {
            "fit": la.refresh,
            "predict": lambda la=la: la.predict(new),
        }
        if torch is not None:
            peer = theirs(other, tensors, curvature, subset)
            mean, variance = peer._glm_predictive_distribution(inputs)
            own = la.function(new, covariance=True)
            pairs = {
                "evidence": (la.log_marginal_likelihood(), peer.log_marginal_likelihood().item()),
                "mean": (own[0], mean.detach()),
                "variance": (own[1], variance.detach()),
                "probabilities": (la.predict(new), peer(inputs, link_approx="probit").detach()),
            }
            found = {name: difference(*pair) for name, pair in pairs.items()}
            shown = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
            print(f"{curvature:9} {subset:10} differences: {shown}", flush=True)
            if not max(found.values()) < 1e-5:
                raise SystemExit("the results differ, so that times cannot be compared")
            variants["fit by laplace-torch"] = lambda c=curvature, s=subset: theirs(
                other, tensors, c, s
            )
            variants["predict by laplace-torch"] = lambda peer=peer: peer(
                inputs, link_approx="probit"
            )
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        random = np.random.default_rng(0)
        for place in range(rounds + 1):
            for name in random.permutation(list(variants)):
                if place and seconds[name][0] > SLOW:
                    continue
                start = time.perf_counter()
                variants[name]()
                seconds[name].append(time.perf_counter() - start)
        medians = {
            name: 1000 * float(np.median(times[1:] or times)) for name, times in seconds.items()
        }
        rows.append({"curvature": curvature, "subset": subset, "first fit": round(1000 * first)})
        rows[-1].update({name: round(value, 1) for name, value in medians.items()})
        print(rows[-1], flush=True)
    return rows


def many_classes() -> None:
    """Time and measure the last layer of a network with 3,100 classes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 16)).astype("float32")
    y = rng.integers(0, 3100, 4000)
    layers = keras.layers
    model = keras.Sequential([keras.Input((16,)), layers.Dense(128, "tanh"), layers.Dense(3100)])
    model(x[:100])
    before = _peak()
    start = time.perf_counter()
    la = hvp.Laplace(model, "categorical", (x, y), subset="last-layer", batch_size=500)
    print(f"fit {time.perf_counter() - start:.1f} s, {_peak() - before:.0f} MiB", flush=True)
    la.predict(x[:100])
    times = []
    for _ in range(20):
        start = time.perf_counter()
        la.predict(x[:100])
        times.append(time.perf_counter() - start)
    print(f"predict 100 inputs {1000 * np.median(times):.0f} ms, {_peak() - before:.0f} MiB")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--many-classes", action="store_true")
    arguments = parser.parse_args()
    if arguments.many_classes:
        many_classes()
        return
    rows = measure(arguments.rounds)
    if torch is not None:
        with CSV.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
