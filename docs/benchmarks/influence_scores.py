"""Time the influence of 1,437 training digits on 100 others, by solver.

The network has 9,930 weights, and its Gauss-Newton matrix a damping of a thousandth of its largest
eigenvalue. Times are from fresh gradients to scores, without building the matrix, which is shown by
itself; the second set of 100 digits uses gradients that were kept in a folder.

    python docs/benchmarks/influence_scores.py
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvp

TRAINING, TEST = 1437, 100


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a call takes, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def main() -> None:
    """Train, score and print."""
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32").reshape(-1, 8, 8, 1), digits.target.astype("int32")
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Conv2D(32, 3, padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    train = x[:TRAINING], y[:TRAINING]
    model.fit(*train, epochs=60, batch_size=64, verbose=0)
    first = x[TRAINING : TRAINING + TEST], y[TRAINING : TRAINING + TEST]
    second = x[TRAINING + TEST : TRAINING + 2 * TEST], y[TRAINING + TEST : TRAINING + 2 * TEST]
    G = hvp.GaussNewtonOperator.from_keras(model, train)
    damping = 1e-3 * float(hvp.eigsh(G, 1).eigenvalues[0])
    scores: dict[str, np.ndarray] = {}
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        variants: dict[str, dict[str, Any]] = {
            "block_cg": {"solver": "block_cg", "curvature": "gauss-newton"},
            "ekfac": {"solver": "ekfac"},
            "ekfac, gradients kept": {"solver": "ekfac", "gradients": Path(folder) / "gradients"},
        }
        for name, options in variants.items():
            built, influence = seconds(
                lambda o=options: hvp.InfluenceFunctions.from_keras(
                    model, train, damping=damping, rtol=1e-4, **o
                )
            )
            influence.scores(tuple(a[:2] for a in first))  # traces
            taken = [seconds(lambda i=influence, s=s: i.scores(s)) for s in (first, second) * 3]
            scores[name] = taken[0][1]
            times[name] = float(np.median([t for t, _ in taken]))
            print(f"{name:22} built in {built:6.2f} s, 100 x 1,437 scores {times[name]:7.3f} s")
    for name in ("ekfac", "ekfac, gradients kept"):
        r = np.corrcoef(scores[name].ravel(), scores["block_cg"].ravel())[0, 1]
        ratio = times["block_cg"] / times[name]
        print(f"{name:22} {ratio:6.1f} times as fast as block_cg, correlation {r:.3f}")


if __name__ == "__main__":
    main()
