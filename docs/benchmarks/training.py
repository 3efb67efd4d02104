"""Train an autoencoder by `model.fit` with K-FAC, SOAP and Adam, for the same time.

The network compresses scikit-learn's digits to eight numbers, and back. Of each optimizer, learning
rates are tried for a third of the time, and the best one trains from other random weights, several
times. The clock begins after the first batch, when everything is traced. Times of a step come from
the same runs; with seven steps in an epoch, a part of them is what Keras does between epochs. Rows
of optimizers that are not asked for stay.

    python docs/benchmarks/training.py [--seconds 60] [--seeds 5] [--optimizers adam,soap,kfac]
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
from sklearn.datasets import load_digits

import hvp

CSV = Path(__file__).with_suffix(".csv")
WIDTHS = (256, 128, 64, 8, 64, 128, 256)
BATCH = 256
optimizers = hvp.keras.optimizers

VARIANTS: dict[str, list[Callable[[], Any]]] = {
    "adam": [lambda r=rate: keras.optimizers.Adam(r) for rate in (3e-4, 1e-3, 3e-3, 1e-2)],
    "soap": [lambda r=rate: optimizers.SOAP(r) for rate in (1e-3, 3e-3, 1e-2, 3e-2)],
    "kfac": [
        lambda r=rate, d=damping: optimizers.KFAC(r, damping=d, statistics_interval=10)
        for rate in (0.03, 0.1, 0.3)
        for damping in (5e-4, 1e-3, 2e-3, 5e-3)
    ],
}


class Clock(keras.callbacks.Callback):
    """Stops after some seconds, and counts steps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.start, self.steps = seconds, 0.0, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Begin after the first batch; stop when the time is over."""
        if not self.start:
            self.start = time.perf_counter()
        else:
            self.steps += 1
        self.passed = time.perf_counter() - self.start
        if self.passed > self.seconds:
            self.model.stop_training = True


def network(seed: int) -> keras.Model:
    """Return an autoencoder with random weights."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((64,))
    x = inputs
    for width in WIDTHS:
        x = keras.layers.Dense(width, "tanh" if width > 8 else None)(x)
    return hvp.keras.Model(inputs, keras.layers.Dense(64)(x))


def trained(make: Callable[[], Any], seed: int, seconds: float, x: Any) -> tuple[float, float]:
    """Return the loss after some seconds, and the time of a step in milliseconds."""
    model, clock = network(seed), Clock(seconds)
    model.compile(make(), "mse", jit_compile=False)
    options: dict[str, Any] = {"batch_size": BATCH, "epochs": 10**6, "verbose": 0}
    model.fit(x, x, callbacks=[clock, keras.callbacks.TerminateOnNaN()], **options)
    loss = float(model.evaluate(x, x, batch_size=len(x), verbose=0))
    return (loss if np.isfinite(loss) else np.inf), 1000 * clock.passed / max(1, clock.steps)


def main() -> None:
    """Tune, train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--optimizers", default=",".join(VARIANTS))
    arguments = parser.parse_args()
    x = (load_digits().data / 16).astype("float32")
    x = x[: len(x) // BATCH * BATCH]
    with CSV.open(newline="") as file:
        head, *rows = csv.reader(file)
    table = {row[0]: row for row in rows}
    for name in arguments.optimizers.split(","):
        tried = [trained(make, 100, arguments.seconds / 3, x)[0] for make in VARIANTS[name]]
        print(name, "after a third of the time:", [f"{loss:.5f}" for loss in tried], flush=True)
        best = VARIANTS[name][int(np.argmin(tried))]
        found = [trained(best, seed, arguments.seconds, x) for seed in range(arguments.seeds)]
        losses, steps = zip(*found)
        rate = float(best().learning_rate)
        row = [name, rate, np.median(losses), min(losses), max(losses), np.median(steps)]
        table[name] = [name, *(f"{float(f'{value:.3g}'):g}" for value in row[1:])]
        print(table[name], flush=True)
    with CSV.open("w", newline="") as file:
        csv.writer(file).writerows([head, *table.values()])


if __name__ == "__main__":
    main()
