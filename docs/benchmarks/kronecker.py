"""Time K-FAC and EK-FAC beside curvlinops, on the same weights and data.

A dense network of 85,002 weights and a convolutional one of 19,658, on scikit-learn's digits, in
batches of 256. Times are in units of the gradient of all data, of the same package, which is timed
in the same rounds. What a package is timed for has first to agree: the Kronecker factors with those
of the other package, to 1e-5 in the Frobenius norm. Building counts neither tracing nor the
eigenvalues of factors, which are measured by themselves. Variants take turns in shuffled order.

    python docs/benchmarks/kronecker.py [--rounds 7]
    python docs/benchmarks/kronecker.py --memory

The second command measures the growth of the peak of resident memory while a matrix of a larger
convolutional network is built, with one process for each. The peers run if torch and curvlinops
are installed.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import scipy.linalg
import tensorflow as tf
from sklearn.datasets import load_digits

import hvp

try:
    import torch
    from curvlinops import EKFACLinearOperator, FisherType, KFACLinearOperator
except ImportError:
    torch = None

CSV = Path(__file__).with_suffix(".csv")
BATCH, DAMPING, VECTORS = 1797, 1e-3, 64
Variant = Callable[[], Any]


def cross_entropy(logits: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the mean cross-entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def network(name: str) -> keras.Model:
    """Return a network with initial weights."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    if name == "dense":
        hidden = [layers.Dense(256, "tanh"), layers.Dense(240, "tanh")]
        return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])
    middle = [
        layers.Conv2D(16, 3, padding="same", activation="tanh"),
        layers.Conv2D(32, 3, strides=2, padding="same", activation="tanh"),
        layers.Conv2D(32, 3, padding="same", activation="tanh"),
        layers.Flatten(),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *middle, layers.Dense(10)])


def data_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and their digits."""
    digits = load_digits()
    x = (digits.data / 16).astype("float32")
    return (x if name == "dense" else x.reshape(-1, 8, 8, 1)), digits.target.astype("int32")


class Ours:
    """What this package computes."""

    def __init__(self, name: str) -> None:
        self.model, self.data = network(name), data_of(name)
        options: Any = {"likelihood": "categorical", "batch_size": BATCH}
        pair = self.model, cross_entropy
        self.kinds: dict[str, hvp.KFAC] = {}
        for fisher in ("type-2", "monte-carlo"):
            for kind in (hvp.KFAC, hvp.EKFAC):
                key = f"{kind.__name__} {fisher}"
                self.kinds[key] = kind(*pair, self.model, self.data, fisher=fisher, **options)
        size = self.kinds["KFAC type-2"].shape[0]
        self.columns = np.random.default_rng(1).standard_normal((size, VECTORS), np.float32)
        self.inverse = self.kinds["EKFAC type-2"].inverse(DAMPING)
        x, y = self.data
        self.batches = [
            (tf.constant(x[i : i + BATCH]), tf.constant(y[i : i + BATCH]))
            for i in range(0, len(x), BATCH)
        ]

        @tf.function(reduce_retracing=True)
        def gradient(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = cross_entropy(self.model(x), y)
            return tape.gradient(loss, self.model.trainable_variables)

        self.gradient = gradient

    def variants(self) -> dict[str, Variant]:
        """Return what is timed, by name."""

        def gradients() -> float:
            return [float(tf.reduce_sum(self.gradient(*batch)[0])) for batch in self.batches][-1]

        own: dict[str, Variant] = {"gradient": gradients}
        for key, matrix in self.kinds.items():
            own[key] = matrix.refresh
        own["eigenvalues of factors"] = self.eigenvalues
        own["64 inverse products"] = lambda: self.inverse @ self.columns
        return {f"hvp: {name}": variant for name, variant in own.items()}

    def eigenvalues(self) -> None:
        """Compute eigenvalues of all factors, which a refresh does once."""
        for factors in self.kinds["KFAC type-2"].factors.values():
            for factor in factors:
                scipy.linalg.eigh(factor[0], driver="evd")


class Curvlinops:
    """What curvlinops computes, with the weights of a Keras network."""

    def __init__(self, ours: Ours, name: str) -> None:
        self.model = torch_network(ours.model, name)
        x, y = (torch.tensor(array) for array in ours.data)
        x = x if name == "dense" else x.permute(0, 3, 1, 2).contiguous()
        self.batches = list(zip(x.split(BATCH), y.long().split(BATCH)))
        self.loss = torch.nn.CrossEntropyLoss()
        self.count = len(x)

    def kind(self, kind: Any, fisher: Any) -> Any:
        """Return an operator, whose factors are computed at its first use."""
        return kind(
            self.model,
            self.loss,
            list(self.model.parameters()),
            self.batches,
            fisher_type=fisher,
            check_deterministic=False,
            separate_weight_and_bias=False,
            num_data=self.count,
            num_per_example_loss_terms=1,
        )

    def variants(self) -> dict[str, Variant]:
        """Return what is timed, by name."""

        def gradients() -> None:
            for x, y in self.batches:
                torch.autograd.grad(self.loss(self.model(x), y), list(self.model.parameters()))

        own: dict[str, Variant] = {"gradient": gradients}
        kinds = {"type-2": FisherType.TYPE2, "monte-carlo": FisherType.MC}
        for fisher, kind in kinds.items():
            own[f"KFAC {fisher}"] = lambda k=kind: self.build(KFACLinearOperator, k)
            own[f"EKFAC {fisher}"] = lambda k=kind: self.build(EKFACLinearOperator, k)
        return {f"curvlinops: {name}": variant for name, variant in own.items()}

    def build(self, kind: Any, fisher: Any) -> Any:
        """Compute the factors, and for EK-FAC the scales."""
        matrix = self.kind(kind, fisher)
        zeros = torch.zeros(matrix.shape[1])
        _ = matrix @ zeros
        return matrix


def torch_network(model: keras.Model, name: str) -> Any:
    """Return the same network in PyTorch."""
    parts: list[Any] = []
    flat = 0
    for layer in model.layers:
        if isinstance(layer, keras.layers.Flatten):
            parts.append(_ChannelsLast())
            continue
        kernel, bias = (torch.tensor(w) for w in layer.get_weights())
        if kernel.ndim == 2:
            part = torch.nn.Linear(*kernel.shape)
            part.weight.data = kernel.T.contiguous()
        else:
            part = torch.nn.Conv2d(*kernel.shape[2:], 3, stride=layer.strides[0], padding=1)
            part.weight.data = kernel.permute(3, 2, 0, 1).contiguous()
            if layer.strides[0] == 2:  # Keras pads the other side
                part.padding = (0, 0)
                parts.append(torch.nn.ZeroPad2d((0, 1, 0, 1)))
        part.bias.data = bias
        parts.append(part)
        flat += 1
        if layer is not model.layers[-1]:
            parts.append(torch.nn.Tanh())
    return torch.nn.Sequential(*parts)


if torch is not None:

    class _ChannelsLast(torch.nn.Module):
        """Flatten as Keras does, with the channels last."""

        def forward(self, x: Any) -> Any:
            return x.permute(0, 2, 3, 1).flatten(1)


def largest_difference(ours: Ours, peer: Curvlinops) -> float:
    """Return the largest relative difference between factors of the same layer."""
    matrix = peer.build(KFACLinearOperator, FisherType.TYPE2)
    inputs = list(vars(matrix)["_input_covariances"].values())
    gradients = list(vars(matrix)["_gradient_covariances"].values())
    own = list(ours.kinds["KFAC type-2"].factors.values())
    differences = []
    # Peers list layers as their gradients arrive; the sizes tell which is which.
    for (A, G), layer in zip(own, [la for la in ours.model.layers if la.get_weights()]):
        kernel = layer.get_weights()[0]
        order = np.arange(kernel[..., 0].size).reshape(kernel.shape[:-1])
        if kernel.ndim == 4:
            order = order.transpose(2, 0, 1)
        rows = np.append(order.reshape(-1), kernel[..., 0].size)
        A = A[0][np.ix_(rows, rows)]
        differences.append(min(_difference(A, other.numpy()) for other in inputs))
        differences.append(min(_difference(G[0], other.numpy()) for other in gradients))
    return max(differences)


def _difference(own: np.ndarray, other: np.ndarray) -> float:
    if own.shape != other.shape:
        return np.inf
    return float(np.linalg.norm(own - other) / np.linalg.norm(other))


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Time all variants of a network; return a row for each."""
    ours = Ours(name)
    variants = ours.variants()
    if torch is not None:
        peer = Curvlinops(ours, name)
        difference = largest_difference(ours, peer)
        print(f"{name}: factors agree to {difference:.1e}", flush=True)
        if not difference < 1e-5:
            raise SystemExit("the factors differ, so that times cannot be compared")
        variants.update(peer.variants())
    for variant in variants.values():
        variant()
    seconds: dict[str, list[float]] = {key: [] for key in variants}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for key in rng.permutation(list(variants)):
            start = time.perf_counter()
            variants[key]()
            seconds[key].append(time.perf_counter() - start)
    rows = []
    for key, times in seconds.items():
        package = key.partition(":")[0]
        unit = float(np.median(seconds[f"{package}: gradient"]))
        median = float(np.median(times))
        rows.append(
            {
                "network": name,
                "variant": key,
                "milliseconds": round(1000 * median, 2),
                "gradients": round(median / unit, 2),
            }
        )
        print(f"{name:14} {key:36} {1000 * median:9.1f} ms {median / unit:7.2f} gradients")
    return rows


def peak() -> float:
    """Return the peak of resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def build_alone(package: str, kind: str) -> None:
    """Build a matrix of a larger network, and print by how much the peak grew."""
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 32, 32, 3)).astype("float32")
    y = random.integers(0, 10, 64).astype("int32")
    layers = keras.layers
    convolutions = [
        layers.Conv2D(width, 3, padding="same", activation="tanh") for width in (64, 64, 128)
    ]
    middle = [keras.Input(x.shape[1:]), *convolutions, layers.GlobalAveragePooling2D()]
    model = keras.Sequential([*middle, layers.Dense(10)])
    if package == "hvp":
        tf.function(model)(x)
        before = peak()
        options: Any = {"fisher": "monte-carlo", "likelihood": "categorical"}
        getattr(hvp, kind)(model, cross_entropy, model, (x, y), **options)
    else:
        parts: list[Any] = []
        for layer in convolutions:
            parts += [torch.nn.Conv2d(*layer.kernel.shape[2:], 3, padding=1), torch.nn.Tanh()]
        pool = torch.nn.AdaptiveAvgPool2d(1)
        net = torch.nn.Sequential(*parts, pool, torch.nn.Flatten(), torch.nn.Linear(128, 10))
        data = [(torch.tensor(x.transpose(0, 3, 1, 2).copy()), torch.tensor(y).long())]
        net(data[0][0])
        before = peak()
        linear = {"KFAC": KFACLinearOperator, "EKFAC": EKFACLinearOperator}[kind]
        matrix = linear(
            net,
            torch.nn.CrossEntropyLoss(),
            list(net.parameters()),
            data,
            fisher_type=FisherType.MC,
            check_deterministic=False,
            separate_weight_and_bias=False,
        )
        _ = matrix @ torch.zeros(matrix.shape[1])
    print(f"{package:11} {kind:6} {peak() - before:8.0f} MiB", flush=True)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", nargs="*")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if arguments.memory:
        build_alone(*arguments.memory)
        return
    if arguments.memory is not None:
        for package in ("hvp", *(["curvlinops"] if torch is not None else [])):
            for kind in ("KFAC", "EKFAC"):
                subprocess.run([sys.executable, __file__, "--memory", package, kind], check=True)
        return
    rows = [row for name in ("dense", "convolutional") for row in measure(name, rounds)]
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
