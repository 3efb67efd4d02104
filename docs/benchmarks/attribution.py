"""Measure how much attributions are worth, by training again: the linear datamodeling score.

Two networks learn 1,000 of scikit-learn's digits: a convolutional one, and a transformer that reads
an image as eight rows. Attributions for 100 other digits are compared by what they predict of the
losses after training on random halves, in the mean over three runs each. Then one label in twenty
is made wrong, and the share of wrong labels among the twentieth of highest self-influence, or
highest loss, is counted.

    python docs/benchmarks/attribution.py [--networks cnn,transformer] [--subsets 60]
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
TRAINING, TEST, RUNS, WRONG = 1000, 100, 3, 50
layers = keras.layers


def cnn() -> keras.Model:
    """Return a convolutional network with 5,130 weights."""
    return keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Conv2D(32, 3, padding="same", activation="tanh"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def transformer() -> keras.Model:
    """Return a transformer with one block, of width 32, that reads the rows of an image."""
    rows = keras.Input((8, 8))
    x = layers.Dense(32)(rows)
    x = layers.Add()([x, layers.Embedding(8, 32)(np.arange(8)[np.newaxis])])
    normal = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(4, 8)(normal, normal)])
    normal = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.Dense(32)(layers.Dense(64, "tanh")(normal))])
    return keras.Model(rows, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


NETWORKS = {"cnn": cnn, "transformer": transformer}


class Trainer:
    """Trains one network again and again, without tracing it again."""

    def __init__(self, make: Callable[[], keras.Model], x: Any, y: Any) -> None:
        self.model, self.x, self.y = make(), x, y
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.AdamW(5e-3, weight_decay=1e-2)
        self.model.compile(self.optimizer, self.loss)
        self.optimizer.build(self.model.trainable_variables)
        self.zeros = [v.numpy() for v in self.optimizer.variables]

    def train(self, kept: np.ndarray, seed: int) -> keras.Model:
        """Train from random weights on some of the examples."""
        rng = np.random.default_rng(seed)
        for variable in self.model.trainable_variables:
            shape = variable.shape
            is_matrix = len(shape) > 1
            scale = np.prod(shape[:-1]) ** -0.5 if is_matrix else 0.0
            mean = 1.0 if "gamma" in variable.path else 0.0
            variable.assign(mean + scale * rng.standard_normal(shape))
        for variable, zero in zip(self.optimizer.variables, self.zeros):
            variable.assign(zero)
        keras.utils.set_random_seed(seed)
        self.model.fit(self.x[kept], self.y[kept], batch_size=50, epochs=40, verbose=0)
        return self.model

    def losses(self, x: Any, y: Any) -> np.ndarray:
        """Return the losses of examples."""
        logits = self.model.predict(x, batch_size=len(x), verbose=0).astype(np.float64)
        return np.log(np.exp(logits - logits[np.arange(len(y)), y][:, np.newaxis]).sum(axis=1))


def attributions(model: keras.Model, train: Any, test: Any) -> dict[str, np.ndarray]:
    """Return scores by several methods."""
    G = hvp.GaussNewtonOperator.from_keras(model, train)
    largest = float(hvp.eigsh(G, 1).eigenvalues[0])
    found: dict[str, np.ndarray] = {}
    for part in (1e-2, 1e-3, 1e-4):
        options: dict[str, Any] = {"damping": part * largest}
        for name, more in (
            ("exact", {"curvature": "gauss-newton", "solver": "block_cg"}),
            ("EK-FAC", {"solver": "ekfac"}),
        ):
            start = time.perf_counter()
            influence = hvp.InfluenceFunctions.from_keras(model, train, **options, **more)
            found[f"{name}, damping {part:g}"] = influence.scores(test)
            seconds = time.perf_counter() - start
            print(f"{name} with damping {part:g} of the largest: {seconds:.1f} s", flush=True)
    rows = []
    for x, y in (test, train):

        def losses(x: Any, y: Any) -> Any:
            return keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)

        with hvp.JacobianOperator(losses, model, (x, y)) as J:
            rows.append(J.to_dense(max_size=model.count_params()))
    products = rows[0] @ rows[1].T
    found["products of gradients"] = products
    found["cosines of gradients"] = products / np.linalg.norm(rows[1], axis=1)
    found["random"] = np.random.default_rng(0).standard_normal(products.shape)
    return found


def mislabelled(trainer: Trainer) -> dict[str, float]:
    """Return the share of wrong labels among those that rank first."""
    rng, right = np.random.default_rng(1), trainer.y
    wrong = rng.choice(TRAINING, WRONG, replace=False)
    trainer.y = right.copy()
    trainer.y[wrong] = (right[wrong] + rng.integers(1, 10, WRONG)) % 10
    model = trainer.train(np.arange(TRAINING), 0)
    data = trainer.x, trainer.y
    largest = float(hvp.eigsh(hvp.GaussNewtonOperator.from_keras(model, data), 1).eigenvalues[0])
    ranked = {"loss": trainer.losses(*data)}
    for name, options in (
        ("exact", {"curvature": "gauss-newton", "solver": "block_cg"}),
        ("EK-FAC", {"solver": "ekfac"}),
    ):
        influence = hvp.InfluenceFunctions.from_keras(
            model, data, damping=1e-2 * largest, **options
        )
        ranked[f"self-influence, {name}"] = influence.self_influence()
    trainer.y = right
    found = {name: np.argsort(-values)[:WRONG] for name, values in ranked.items()}
    return {name: float(np.isin(first, wrong).mean()) for name, first in found.items()}


def main() -> None:
    """Train, score and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", default="cnn,transformer")
    parser.add_argument("--subsets", type=int, default=60)
    arguments = parser.parse_args()
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 16).astype("float32").reshape(-1, 8, 8)
    digits = digits[order].astype("int32")
    test = images[TRAINING : TRAINING + TEST], digits[TRAINING : TRAINING + TEST]
    table = []
    for name in arguments.networks.split(","):
        trainer = Trainer(NETWORKS[name], images[:TRAINING], digits[:TRAINING])
        model = trainer.train(np.arange(TRAINING), 0)
        guesses = model.predict(test[0], verbose=0).argmax(axis=1)
        accuracy = float(np.mean(guesses == test[1]))
        print(f"{name}: {model.count_params()} weights, accuracy {accuracy:.2f}", flush=True)
        scores = attributions(model, (trainer.x, trainer.y), test)

        def retrain(kept: np.ndarray, trainer: Trainer = trainer) -> np.ndarray:
            losses = []
            for seed in range(1, RUNS + 1):
                trainer.train(kept, seed)
                losses.append(trainer.losses(*test))
            return np.mean(losses, axis=0)

        found = hvp.linear_datamodeling_score(
            retrain, scores, subsets=arguments.subsets, progress=True
        )
        for method, score in found.score.items():
            more = found.difference(method, "products of gradients")
            row = [name, method, score, found.standard_error[method], *more]
            table.append([value if isinstance(value, str) else round(value, 3) for value in row])
            print(table[-1], flush=True)
        for method, share in mislabelled(trainer).items():
            table.append([name, f"wrong labels found by {method}", round(share, 3), "", "", ""])
            print(table[-1], flush=True)
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["network", "attribution", "score", "standard error"]
        writer.writerow([*columns, "more than products of gradients", "standard error of that"])
        writer.writerows(table)


if __name__ == "__main__":
    main()
