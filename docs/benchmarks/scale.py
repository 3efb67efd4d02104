"""Measure a Hessian-vector product against the size of the model.

Keras transformers from 10**5 to 1.6 * 10**8 parameters, the largest of the size of GPT-2 small with
a vocabulary of 50,257 and untied embeddings, and ResNet-50 at 224 x 224 pixels. Each point is a
process of its own. Its memory is the peak resident memory less what was resident before building.
Its first product is timed from the beginning of building, and its products are timed in turns with
gradients of the same loss. Writes `scale.json` and `scale.csv` beside this file, and with
`--figure` the figure of the documentation. The largest points take some minutes.

    python docs/benchmarks/scale.py [--models tiny,small] [--variants function,recompute] [--figure]
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory import in_process_of_its_own, resident, versions

HERE = Path(__file__).parent
ROUNDS = 5


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer for next tokens, and of its batch."""

    blocks: int
    width: int
    heads: int
    vocabulary: int
    examples: int = 4
    tokens: int = 128


MODELS: dict[str, Transformer | None] = {
    "tiny": Transformer(2, 64, 2, 256),
    "small": Transformer(4, 128, 4, 1024),
    "medium": Transformer(6, 256, 4, 8192),
    "large": Transformer(8, 512, 8, 16384),
    "gpt2": Transformer(12, 768, 12, 50257),
    "resnet50": None,
}
VARIANTS = {
    "function": "`tf.function` nested tapes",
    "default": "operator",
    "recompute": "operator, `recompute=True`",
}


def transformer(sizes: Transformer) -> tuple[Any, Any, Any]:
    """Return a model with its inputs and labels."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    layers = keras.layers
    tokens = keras.Input((sizes.tokens,), dtype="int32")
    h = layers.Embedding(sizes.vocabulary, sizes.width)(tokens)
    h = layers.Dropout(0.1)(h)
    for _ in range(sizes.blocks):
        a = layers.LayerNormalization()(h)
        a = layers.MultiHeadAttention(
            sizes.heads, sizes.width // sizes.heads, flash_attention=False
        )(a, a, use_causal_mask=True)
        h = layers.Add()([h, layers.Dropout(0.1)(a)])
        f = layers.LayerNormalization()(h)
        f = layers.Dense(sizes.width)(layers.Dense(4 * sizes.width, "gelu")(f))
        h = layers.Add()([h, layers.Dropout(0.1)(f)])
    logits = layers.Dense(sizes.vocabulary, use_bias=False)(layers.LayerNormalization()(h))
    rng = np.random.default_rng(0)
    x = rng.integers(0, sizes.vocabulary, (sizes.examples, sizes.tokens + 1))
    return keras.Model(tokens, logits), x[:, :-1], x[:, 1:]


def resnet50() -> tuple[Any, Any, Any]:
    """Return ResNet-50 with random weights, images and labels."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, classifier_activation=None)
    rng = np.random.default_rng(0)
    return model, rng.standard_normal((4, 224, 224, 3)).astype("float32"), rng.integers(0, 1000, 4)


def make(name: str, variant: str) -> tuple[int, Callable[[], Any], Callable[[], Any]]:
    """Return the number of parameters, what computes a gradient, and what builds a product."""
    import numpy as np
    import tensorflow as tf

    import hvp

    sizes = MODELS[name]
    model, x, y = resnet50() if sizes is None else transformer(sizes)
    variables = [v.value for v in model.trainable_variables]
    rng = np.random.default_rng(0)
    vector = [tf.constant(rng.standard_normal(v.shape, "float32") * 1e-3) for v in variables]
    data = tf.constant(x), tf.constant(y)

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        logits = model(x, training=sizes is not None)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        return tf.reduce_mean(each)

    @tf.function(autograph=False)
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            value = loss(*data)
        return [tf.convert_to_tensor(part) for part in tape.gradient(value, variables)]

    @tf.function(autograph=False)
    def nested() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                value = loss(*data)
            # Of an embedding it is sparse, and cannot be differentiated with a vector as it is.
            first = [tf.convert_to_tensor(part) for part in inner.gradient(value, variables)]
        product = outer.gradient(
            first, variables, output_gradients=vector, unconnected_gradients="zero"
        )
        return [tf.convert_to_tensor(part) for part in product]

    def build() -> Callable[[], Any]:
        if variant == "function":
            return nested
        operator = hvp.HessianOperator(loss, model, data, recompute=variant == "recompute")
        return lambda: operator.product(vector)

    return sum(int(np.prod(v.shape)) for v in variables), gradient, build


def measure(name: str, variant: str) -> dict[str, Any]:
    """Measure one point, in this process."""
    import numpy as np

    def seconds(function: Callable[[], Any]) -> tuple[float, float]:
        began = time.perf_counter()
        norm = sum(float(np.vdot(part, part)) for part in map(np.asarray, function())) ** 0.5
        return time.perf_counter() - began, norm

    parameters, gradient, build = make(name, variant)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    start, began = resident("VmRSS"), time.perf_counter()
    product = build()
    seconds(product)
    first = time.perf_counter() - began
    _, norm = seconds(product)
    megabytes = resident("VmHWM") - start
    seconds(gradient)
    taken = [(seconds(product)[0], seconds(gradient)[0]) for _ in range(ROUNDS)]
    return {
        "parameters": parameters,
        "megabytes": megabytes,
        "first": first,
        "product": statistics.median(one for one, _ in taken),
        "gradient": statistics.median(one for _, one in taken),
        "norm": norm,
    }


def write_table(points: dict[str, Any]) -> None:
    """Write the rows of the documentation's table."""
    with (HERE / "scale.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        head = ["parameters", "", "peak memory", "product", "in gradients", "first product"]
        writer.writerow(["model", *head])
        for name in MODELS:
            for variant, label in VARIANTS.items():
                point = points.get(name, {}).get(variant, {})
                if "megabytes" in point:
                    writer.writerow(
                        [
                            name,
                            f"{point['parameters'] / 1e6:.3g} million",
                            label,
                            f"{point['megabytes'] / 1e3:.2f} GB",
                            f"{point['product']:.3g} s",
                            f"{point['product'] / point['gradient']:.1f}",
                            f"{point['first']:.1f} s",
                        ]
                    )


def draw(points: dict[str, Any]) -> None:
    """Draw peak memory, products and first products against the number of parameters."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    colours = {"function": "#64748b", "default": "#f59e0b", "recompute": "#c2410c"}
    panels = {
        "peak memory, GB": lambda point: point["megabytes"] / 1e3,
        "product, gradients": lambda point: point["product"] / point["gradient"],
        "first product, s": lambda point: point["first"],
    }
    transformers = [name for name, sizes in MODELS.items() if sizes is not None]
    with plt.rc_context({"font.size": 8, "axes.linewidth": 0.6}):
        figure, axes = plt.subplots(1, 3, figsize=(7.6, 2.7), layout="constrained")
        for ax, (title, value) in zip(axes, panels.items()):
            for variant, colour in colours.items():
                known = [points.get(name, {}).get(variant, {}) for name in transformers]
                known = [point for point in known if "megabytes" in point]
                label = VARIANTS[variant].replace("`", "")
                x, y = [p["parameters"] for p in known], [value(p) for p in known]
                ax.plot(x, y, color=colour, marker="o", ms=3, label=label)
            ax.set_xscale("log")
            if "gradients" in title:
                ax.set_ylim(bottom=0)
            else:
                ax.set_yscale("log")
                ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
                ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
                ax.yaxis.set_minor_formatter(ticker.NullFormatter())
            ax.set_xlabel("parameters")
            ax.set_title(title, loc="left")
            ax.grid(visible=True, linewidth=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, ncols=3, loc="outside lower center")
        figure.savefig(HERE.parent / "images" / "scale.png", dpi=160)


def main() -> None:
    """Measure what is asked for, and merge it into what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--figure", action="store_true")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(*options.point)))
        return
    file = HERE / "scale.json"
    results = json.loads(file.read_text()) if file.exists() else {"points": {}}
    results["versions"] = versions()
    for name in filter(None, options.models.split(",")):
        for variant in options.variants.split(","):
            point = in_process_of_its_own(__file__, name, variant)
            results["points"].setdefault(name, {})[variant] = point
            print(name, variant, point, flush=True)
            file.write_text(json.dumps(results, indent=1) + "\n")
    write_table(results["points"])
    if options.figure:
        draw(results["points"])


if __name__ == "__main__":
    main()
