"""Time eigenvalues, traces and spectral densities, beside libraries for PyTorch.

A dense network of 85,002 parameters and a convolutional one, both trained for a while on
scikit-learn's digits, all 1797 of them as one batch; PyTorch gets the same weights. Variants take
turns in one process, in another random order in every round. Eigenvalues are compared with those of
scipy's `eigsh` on the operator in float64, to full accuracy.

    python docs/benchmarks/spectra.py [--networks mlp,cnn] [--rounds 3] [--tasks eigenvalues,trace]
    python docs/benchmarks/spectra.py --tasks '' --monitor
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compilers  # noqa: F401 - before TensorFlow
import keras
import numpy as np
import report
import tensorflow as tf
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from tqdm import tqdm

import hvp

JSON = Path(__file__).with_suffix(".json")
EIGENVALUES, PROBES, STEPS = 5, 8, 40
TRACE_ERROR = 0.01
# The training that is monitored: noisy copies of the digits, and epochs.
COPIES, EPOCHS, BUDGET = 20, 30, 0.05

Variant = Callable[[int], Any]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, scaled to one, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels


def make(name: str, dtype: str = "float32") -> keras.Model:
    """Make a network, before it is trained."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    if name == "mlp":
        middle = [layers.Dense(256, "tanh", dtype=dtype), layers.Dense(256, "tanh", dtype=dtype)]
    else:
        middle = [
            layers.Reshape((8, 8, 1), dtype=dtype),
            layers.Conv2D(16, 3, padding="same", activation="tanh", dtype=dtype),
            layers.AveragePooling2D(2, dtype=dtype),
            layers.Conv2D(32, 3, padding="same", activation="tanh", dtype=dtype),
            layers.Flatten(dtype=dtype),
        ]
    start = layers.Input((64,), dtype=dtype)
    return keras.Sequential([start, *middle, layers.Dense(10, dtype=dtype)])


def loss_of(model: keras.Model) -> Callable[..., tf.Tensor]:
    """Return the mean cross-entropy as a function of images and labels."""

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x))
        return tf.reduce_mean(each)

    return loss


def trained(name: str) -> keras.Model:
    """Make a network and train it for 20 epochs."""
    model = make(name)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*digits(), epochs=20, batch_size=128, verbose=0)
    return model


def in_torch(model: keras.Model) -> tuple[Any, Any]:
    """Return the same network in PyTorch, and its data."""
    import torch
    from torch import nn

    weights = [w.numpy() for w in model.trainable_variables]
    if len(weights[0].shape) == 2:
        layers = [nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()]
        network = nn.Sequential(*layers, nn.Linear(256, 10))
    else:
        pieces = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.Tanh()]
        pieces += [nn.AvgPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.Flatten()]
        network = nn.Sequential(*pieces, nn.Linear(512, 10))
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), weights):
            if value.ndim == 4:
                value = value.transpose(3, 2, 0, 1)
            elif value.shape == (512, 10):  # PyTorch flattens channels first
                value = value.reshape(4, 4, 32, 10).transpose(3, 2, 0, 1).reshape(10, 512)
            elif value.ndim == 2:
                value = value.T
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    x, y = digits()
    return network, (torch.from_numpy(x), torch.from_numpy(y))


def variants(task: str, model: keras.Model, products: int) -> dict[str, Variant]:
    """Return what is timed, each as a function of a seed that returns numbers to compare."""
    H = hvp.HessianOperator(loss_of(model), model, digits())
    ours: dict[str, Variant] = {
        "eigenvalues": lambda seed: hvp.eigsh(H, EIGENVALUES, seed=seed).eigenvalues,
        "trace": lambda seed: [hvp.trace(H, method="xtrace", rtol=TRACE_ERROR, seed=seed).estimate],
        "density": lambda seed: [
            hvp.spectral_density(H, probes=PROBES, steps=STEPS, seed=seed).moment(1)
        ],
    }
    found = {"hvp": ours[task]}
    if task == "trace":
        options = {"rtol": TRACE_ERROR, "max_products": 20_000}
        found["hvp, hutchinson"] = lambda seed: [hvp.trace(H, seed=seed, **options).estimate]
    if task == "eigenvalues":
        found["scipy on hvp"] = lambda seed: eigsh(H, EIGENVALUES, which="LA")[0][::-1]
    if importlib.util.find_spec("torch"):
        found |= torch_variants(task, model, products)
    return found


def torch_variants(task: str, model: keras.Model, products: int) -> dict[str, Variant]:
    """Return the variants of the libraries for PyTorch that are installed."""
    import torch

    torch.set_num_threads(os.cpu_count())
    network, batch = in_torch(model)
    criterion = torch.nn.CrossEntropyLoss()
    found: dict[str, Variant] = {}
    if importlib.util.find_spec("hessian_eigenthings"):
        import hessian_eigenthings as peer

        A = peer.HessianOperator(network, [batch], peer.supervised_loss(criterion))
        theirs: dict[str, Variant] = {
            "eigenvalues": lambda seed: np.sort(
                peer.lanczos(A, k=EIGENVALUES, which="LA", seed=seed).eigenvalues.numpy()
            )[::-1],
            "trace": lambda seed: [peer.hutchinson(A, num_samples=products, seed=seed).estimate],
            "density": lambda seed: [
                peer.spectral_density(A, num_runs=PROBES, lanczos_steps=STEPS, seed=seed) and 0.0
            ],
        }
        found["hessian-eigenthings"] = theirs[task]
    if importlib.util.find_spec("pyhessian"):
        from pyhessian import hessian

        B = hessian(network, criterion, data=batch, cuda=False)
        theirs = {
            "eigenvalues": lambda seed: B.eigenvalues(top_n=EIGENVALUES, maxIter=1000)[0],
            "trace": lambda seed: [
                mean_of_parts(lambda n: float(np.mean(B.trace(maxIter=n, tol=0))), products)
            ],
            "density": lambda seed: [B.density(iter=STEPS, n_v=PROBES) and 0.0],
        }
        found["PyHessian"] = theirs[task]
    if importlib.util.find_spec("curvlinops"):
        import curvlinops

        parameters = list(network.parameters())
        C = curvlinops.HessianLinearOperator(
            network, criterion, parameters, [batch], check_deterministic=False
        )
        S = C.to_scipy(np.float32)
        theirs = {
            "eigenvalues": lambda seed: eigsh(S, EIGENVALUES, which="LA")[0][::-1],
            "trace": lambda seed: [
                mean_of_parts(lambda n: float(curvlinops.hutchinson_trace(C, n)), products)
            ],
        }
        if task in theirs:
            found["curvlinops"] = theirs[task]
    return found


def mean_of_parts(estimate: Callable[[int], float], products: int) -> float:
    """Return a mean of so many samples, some at a time: all at once would exhaust the memory."""
    parts = []
    for start in range(0, products, 50):
        count = min(50, products - start)
        parts.append(count * estimate(count))
        gc.collect()
    return sum(parts) / products


def right_eigenvalues(name: str, model: keras.Model) -> np.ndarray:
    """Return the eigenvalues in float64, to full accuracy."""
    twin = make(name, "float64")
    twin.set_weights(model.get_weights())
    x, y = digits()
    with hvp.HessianOperator(loss_of(twin), twin, (x.astype("float64"), y)) as H:
        return eigsh(H, EIGENVALUES + 3, which="LA", tol=1e-12)[0][::-1][:EIGENVALUES]


def run(name: str, task: str, rounds: int) -> dict[str, Any]:
    """Time a task on a network."""
    model = trained(name)
    H = hvp.HessianOperator(loss_of(model), model, digits())
    accurate = {"method": "xtrace", "rtol": TRACE_ERROR / 10, "max_products": 5000}
    reference = hvp.trace(H, seed=10_000, **accurate)
    products = hvp.trace(H, rtol=TRACE_ERROR, max_products=20_000).products
    everything = variants(task, model, products)
    seconds: dict[str, list[float]] = {variant: [] for variant in everything}
    answers: dict[str, list[Any]] = {variant: [] for variant in everything}
    rng = np.random.default_rng(0)
    everything["hvp"](0)  # traces
    failed = {}
    for number in tqdm(range(rounds), f"{name}, {task}", leave=False):
        for variant in rng.permutation([v for v in everything if v not in failed]):
            gc.collect()  # PyHessian leaves cycles with whole graphs
            start = time.perf_counter()
            try:
                answer = everything[variant](number)
            except Exception as error:  # whatever a library raises goes into the table
                failed[variant] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                continue
            seconds[variant].append(time.perf_counter() - start)
            answers[variant].append(np.asarray(answer, np.float64))
    right = right_eigenvalues(name, model) if task == "eigenvalues" else [reference.estimate]
    rows = {}
    for variant, times in seconds.items():
        if variant in failed:
            rows[variant] = {"error": failed[variant]}
            continue
        errors = [float(np.max(np.abs(answer / right - 1))) for answer in answers[variant]]
        row = {"seconds": float(np.median(times)), "relative_error": max(errors)}
        if variant != "hvp":
            ratios = np.array(times) / np.array(seconds["hvp"])
            row["times_ours"] = float(np.median(ratios))
        if task == "density":
            del row["relative_error"]
        rows[variant] = row
    missed = (
        sum(bool((np.abs(answer / right - 1) > 1e-3).any()) for answer in answers["hvp"])
        if task == "eigenvalues"
        else None
    )
    return {"parameters": H.shape[0], "products": products, "rows": rows, "missed": missed}


def monitored(rounds: int) -> dict[str, Any]:
    """Time trainings with and without `CurvatureMonitor`, in turn."""
    x, y = digits()
    rng = np.random.default_rng(0)
    x = np.concatenate([x + 0.1 * rng.standard_normal(x.shape) for _ in range(COPIES)])
    x, y = x.astype(np.float32), np.tile(y, COPIES)

    def train(callbacks: list[Any]) -> float:
        keras.utils.set_random_seed(0)
        model = make("cnn")
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x[:64], y[:64], verbose=0)  # traces
        start = time.perf_counter()
        model.fit(x, y, batch_size=64, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        return time.perf_counter() - start

    plain, watched, counts = [], [], []
    for _ in tqdm(range(rounds), "monitor", leave=False):
        monitor = hvp.keras.CurvatureMonitor((x, y), sample=500, budget=BUDGET)
        for is_watched in rng.permutation([False, True]):
            gc.collect()
            seconds = train([monitor] if is_watched else [])
            (watched if is_watched else plain).append(seconds)
        counts.append(len(monitor.history))
    return {
        "epochs": EPOCHS,
        "seconds": float(np.median(plain)),
        "monitored": float(np.median(watched)),
        "ratio": float(np.median(np.array(watched) / np.array(plain))),
        "measurements": float(np.median(counts)),
    }


def write_table(results: dict[str, Any]) -> None:
    """Write the seconds of all libraries to a table."""
    peers = ("hvp", "PyHessian", "curvlinops", "hessian-eigenthings")
    titles = {
        "eigenvalues": "five largest eigenvalues",
        "trace": "trace to one percent",
        "density": f"density, {PROBES} x {STEPS}",
    }

    def cell(task: str, row: dict[str, Any] | None) -> str:
        if row is None:
            return "not measured"
        if "error" in row:
            return "fails"
        wrong = row.get("relative_error", 0) if task == "eigenvalues" else 0
        return f"{row['seconds']:.3g}" + (f" (wrong by {wrong:.0%})" if wrong > 1e-3 else "")

    with JSON.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["seconds", *peers])
        for task, title in titles.items():
            for name in ("mlp", "cnn"):
                rows = results.get(f"{name}, {task}", {}).get("rows", {})
                cells = [cell(task, rows.get(peer)) for peer in peers]
                writer.writerow([f"{title}, {name.upper()}", *cells])


def main() -> None:
    """Run what the command line asks for, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="mlp,cnn")
    parser.add_argument("--tasks", default="eigenvalues,trace,density")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--monitor", action="store_true", help="time the callback as well")
    options = parser.parse_args()
    tf.get_logger().setLevel("ERROR")
    results = json.loads(JSON.read_text()) if JSON.exists() else {"results": {}}
    results |= {"versions": report.versions(), "machine": report.machine()}
    for name in options.networks.split(","):
        for task in filter(None, options.tasks.split(",")):
            result = run(name, task, options.rounds)
            print(name, task, json.dumps(result, indent=1), flush=True)
            results["results"][f"{name}, {task}"] = report.rounded(result)
            JSON.write_text(json.dumps(results, indent=1) + "\n")

    if options.monitor:
        results["results"]["monitor"] = report.rounded(monitored(options.rounds))
        print(results["results"]["monitor"])
        JSON.write_text(json.dumps(results, indent=1) + "\n")
    write_table(results["results"])


if __name__ == "__main__":
    main()
