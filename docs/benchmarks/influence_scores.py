"""Time the influence of 1,437 training digits on 100 others, by solver.

The network has 9,930 weights, and its Gauss-Newton matrix a damping of a thousandth of its largest
eigenvalue. Times are from fresh gradients to scores, without building the matrix, which is shown by
itself; gradients that are kept in a folder were computed before. Variants take turns in shuffled
order.

If torch and kronfluence are installed, the scores of EK-FAC are then compared with those of
kronfluence, for the convolutional network of `kronecker.py` with the same weights; both draw their
own targets.

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
import kronecker
import numpy as np
from sklearn.datasets import load_digits

import hvp

try:
    import torch
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
except ImportError:
    Task = None

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
    objects: dict[str, hvp.InfluenceFunctions] = {}
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
            scores[name] = influence.scores(first)  # traces, and keeps the gradients
            objects[name] = influence
            print(f"{name:22} built in {built:6.2f} s")
        taken: dict[str, list[float]] = {name: [] for name in variants}
        rng = np.random.default_rng(0)
        for test in (second, first) * 3:
            for name in rng.permutation(list(variants)):
                taken[name].append(seconds(lambda n=name, s=test: objects[n].scores(s))[0])
        for name in variants:
            times[name] = float(np.median(taken[name]))
            print(f"{name:22} 100 x 1,437 scores {times[name]:7.3f} s")
    for name in ("ekfac", "ekfac, gradients kept"):
        r = np.corrcoef(scores[name].ravel(), scores["block_cg"].ravel())[0, 1]
        ratio = times["block_cg"] / times[name]
        print(f"{name:22} {ratio:6.1f} times as fast as block_cg, correlation {r:.3f}")


if Task is not None:

    class _Classification(Task):
        """What kronfluence asks for: the losses of training and of test examples."""

        def compute_train_loss(self, batch: Any, model: Any, sample: bool = False) -> Any:
            """Return the sum of losses, of drawn targets if `sample` is True."""
            x, y = batch
            logits = model(x)
            if sample:
                y = torch.multinomial(torch.softmax(logits.detach(), 1), 1).flatten()
            return torch.nn.functional.cross_entropy(logits, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: Any) -> Any:
            """Return the sum of the losses of test examples."""
            return self.compute_train_loss(batch, model)


def beside_kronfluence() -> None:
    """Compare scores and times with those of kronfluence."""
    network = kronecker.network("convolutional")
    x, y = kronecker.data_of("convolutional")
    train, test = (x[:TRAINING], y[:TRAINING]), (x[TRAINING:][:TEST], y[TRAINING:][:TEST])
    pair = network, kronecker.cross_entropy
    options: Any = {"fisher": "monte-carlo", "likelihood": "categorical"}
    built, K = seconds(lambda: hvp.EKFAC(*pair, network, train, **options))
    again, _ = seconds(K.refresh)
    influence = hvp.InfluenceFunctions(pair, network, train, curvature=K, damping=1e-3)
    influence.scores(test)  # traces
    scored, own = seconds(lambda: influence.scores(test))
    print(f"hvp: factors {built:.2f} s with tracing, {again:.2f} s again; scores {scored:.2f} s")

    def dataset(data: tuple[np.ndarray, np.ndarray]) -> Any:
        images = torch.tensor(data[0]).permute(0, 3, 1, 2).contiguous()
        return torch.utils.data.TensorDataset(images, torch.tensor(data[1]).long())

    task = _Classification()
    model = prepare_model(kronecker.torch_network(network, "convolutional"), task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("digits", model, task, cpu=True, output_dir=folder, disable_tqdm=True)
        factors = {"factor_args": FactorArguments(strategy="ekfac")}
        built, _ = seconds(
            lambda: analyzer.fit_all_factors(
                "factors", dataset(train), per_device_batch_size=TRAINING, **factors
            )
        )
        scored, _ = seconds(
            lambda: analyzer.compute_pairwise_scores(
                "scores",
                factors_name="factors",
                query_dataset=dataset(test),
                train_dataset=dataset(train),
                per_device_query_batch_size=TEST,
                per_device_train_batch_size=TRAINING,
                score_args=ScoreArguments(damping_factor=1e-3),
            )
        )
        others = analyzer.load_pairwise_scores("scores")["all_modules"].numpy()
    r = np.corrcoef(own.ravel(), others.ravel())[0, 1]
    print(f"kronfluence: factors {built:.2f} s, scores {scored:.2f} s; correlation {r:.4f}")


if __name__ == "__main__":
    main()
    if Task is not None:
        beside_kronfluence()
