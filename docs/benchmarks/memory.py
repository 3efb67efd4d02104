"""Measure the memory of a gradient and of Hessian-vector products against depth.

A chain of tanh layers of width 256 on a batch of 8192, in float32. Each point is a process of its
own: what it loads and builds comes first, then two products; the peak resident memory less what was
resident before building is its memory. A 12-block transformer is measured with and without
recomputation besides, and the times at depth 64 in one process, in turns. Writes `memory.json` and
`memory.csv` beside this file, and with `--figure` the figure of the documentation.

    python docs/benchmarks/memory.py [--depths 16,64] [--variants gradient,recompute] [--figure]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEPTHS = (16, 32, 64, 128, 256)
WIDTH, BATCH = 256, 8192
# Of the times, besides one to warm up.
ROUNDS = 5

# What each variant is called in the documentation.
VARIANTS = {
    "gradient": "gradient",
    "tapes": "product, persistent tapes",
    "function": "product, `tf.function` nested tapes",
    "cached": "product, operator, cached",
    "recompute": "product, operator, recompute",
    "recompute-nested": "product, operator, nested recompute",
    "recompute-tapes": "product, nested tapes, recompute",
    "recompute-nested-tapes": "product, nested tapes, nested recompute",
    "recompute-function": "product, `tf.function`, recompute",
    "recompute-xla": "product, `tf.function` with XLA, recompute",
    "stock": "product, `tf.recompute_grad`",
    "jax": "product, JAX",
    "jax-checkpoint": "product, JAX with `jax.checkpoint`",
}


def segment_count(depth: int, levels: int = 1) -> int:
    """About the square root of the depth; with two levels, about the cube root at each."""
    return max(2, round(depth ** (1 / (levels + 1))))


def split(items: list[Any], count: int) -> list[list[Any]]:
    """Divide a list into equal parts, nearly."""
    ends = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in zip(ends, ends[1:])]


def tensorflow_product(variant: str, depth: int) -> Callable[[], Callable[[], Any]]:
    """Return what builds a variant, and then returns what computes one product."""
    import numpy as np
    import tensorflow as tf

    import hvp

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype("float32")

    weights = [tf.Variable(normal(WIDTH, WIDTH) / 16) for _ in range(depth)]
    x = tf.constant(normal(BATCH, WIDTH))
    vector = [tf.constant(normal(WIDTH, WIDTH) / 16) for _ in weights]

    def layers(x: tf.Tensor, part: list[Any]) -> tf.Tensor:
        for w in part:
            x = tf.tanh(x @ w)
        return x

    def head(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x**2)

    wrap = tf.recompute_grad if variant == "stock" else hvp.recompute

    def segment(part: list[Any], last: bool) -> Callable[..., Any]:
        if "nested" in variant:
            inner = [
                wrap(lambda x, part=part: layers(x, part))
                for part in split(part, segment_count(depth, 2))
            ]

            def run(x: tf.Tensor) -> tf.Tensor:
                for f in inner:
                    x = f(x)
                return head(x) if last else x

            return wrap(run)
        return wrap(lambda x: head(layers(x, part)) if last else layers(x, part))

    if "recompute" in variant or variant == "stock":
        parts = split(weights, segment_count(depth, 2 if "nested" in variant else 1))
        segments = [segment(part, part is parts[-1]) for part in parts]
    else:
        segments = [lambda x: head(layers(x, weights))]

    def loss() -> tf.Tensor:
        value = x
        for f in segments:
            value = f(value)
        return value

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, weights)

    def product() -> Any:
        with tf.GradientTape(persistent=variant == "tapes") as outer:
            with tf.GradientTape() as inner:
                value = loss()
            first = inner.gradient(value, weights)
        return outer.gradient(first, weights, output_gradients=vector)

    def build() -> Callable[[], Any]:
        if variant == "gradient":
            return gradient
        if variant.endswith(("tapes", "stock")):
            return product
        if variant.endswith(("function", "xla")):
            return tf.function(product, autograph=False, jit_compile=variant.endswith("xla"))
        operator = hvp.HessianOperator(loss, weights)

        def product_of_operator() -> Any:
            return operator.product(vector)

        product_of_operator.refresh = operator.refresh
        return product_of_operator

    return build


def jax_product(variant: str, depth: int) -> Callable[[], Callable[[], Any]]:
    """Do the same in JAX: forward over reverse."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape).astype("float32"))

    weights = [normal(WIDTH, WIDTH) / 16 for _ in range(depth)]
    x = normal(BATCH, WIDTH)
    vector = [normal(WIDTH, WIDTH) / 16 for _ in weights]

    def layers(x: Any, part: list[Any]) -> Any:
        for w in part:
            x = jnp.tanh(x @ w)
        return x

    def loss(weights: list[Any]) -> Any:
        value = x
        for part in split(weights, segment_count(depth)):
            run = jax.checkpoint(layers) if variant == "jax-checkpoint" else layers
            value = run(value, part)
        return jnp.mean(value**2)

    def build() -> Callable[[], Any]:
        product = jax.jit(lambda w, v: jax.jvp(jax.grad(loss), (w,), (v,))[1])
        return lambda: jax.block_until_ready(product(weights, vector))

    return build


def transformer_product(variant: str, depth: int) -> Callable[[], Callable[[], Any]]:
    """Make a Keras transformer: causal attention, dropout, next-token loss."""
    import keras
    import numpy as np
    import tensorflow as tf

    import hvp

    keras.utils.set_random_seed(0)
    layers = keras.layers
    tokens = keras.Input((256,), dtype="int32")
    h = layers.Embedding(512, 256)(tokens)
    for _ in range(depth):
        a = layers.LayerNormalization()(h)
        a = layers.MultiHeadAttention(8, 32, flash_attention=False)(a, a, use_causal_mask=True)
        h = layers.Add()([h, layers.Dropout(0.1)(a)])
        f = layers.LayerNormalization()(h)
        f = layers.Dense(256)(layers.Dense(1024, "gelu")(f))
        h = layers.Add()([h, layers.Dropout(0.1)(f)])
    model = keras.Model(tokens, layers.Dense(512)(layers.LayerNormalization()(h)))
    rng = np.random.default_rng(0)
    x = rng.integers(0, 512, (8, 257))
    vector = [
        tf.constant(rng.standard_normal(v.shape), "float32") for v in model.trainable_variables
    ]

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        logits = model(x, training=True)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        return tf.reduce_mean(each)

    def build() -> Callable[[], Any]:
        operator = hvp.HessianOperator(
            loss, model, (x[:, :-1], x[:, 1:]), recompute=variant == "recompute"
        )
        return lambda: operator.product(vector)

    return build


def make(workload: str, variant: str, depth: int) -> Callable[[], Callable[[], Any]]:
    """Return what builds one point."""
    if variant.startswith("jax"):
        return jax_product(variant, depth)
    return (transformer_product if workload == "transformer" else tensorflow_product)(
        variant, depth
    )


def resident(field: str) -> float:
    """Megabytes (10**6 bytes) of this process, now (`VmRSS`) or at most so far (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def measure(workload: str, variant: str, depth: int) -> dict[str, Any]:
    """Measure one point, in this process."""
    import numpy as np

    build = make(workload, variant, depth)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    start = resident("VmRSS")
    product = build()
    built = resident("VmHWM") - start
    norms = []
    began = 0.0
    for _ in range(2):
        began = time.perf_counter()
        results = [np.asarray(part) for part in product()]
        norms.append(float(np.sqrt(sum(np.sum(r.astype("float64") ** 2) for r in results))))
        del results
    return {
        "megabytes": resident("VmHWM") - start,
        "megabytes_built": built,
        "seconds": time.perf_counter() - began,
        "norm": norms[-1],
    }


def in_process_of_its_own(script: str, *point: str) -> dict[str, Any]:
    """Let a script measure one point in a new process; an error is a result too."""
    answer = subprocess.run(
        [sys.executable, script, "--point", *point],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    if answer.returncode == 0:
        return dict(json.loads(answer.stdout.splitlines()[-1]))
    lines = [line for line in answer.stderr.splitlines() if "Error" in line]
    return {"error": (lines or ["killed"])[-1].strip()[:300]}


def interleaved_seconds(depth: int) -> dict[str, float]:
    """Time products in turns, in one process; medians.

    Of operators also what is computed once for each point.
    """
    import numpy as np

    names = ["gradient", "function", "recompute", "recompute-nested", "recompute-function"]
    products = {name: tensorflow_product(name, depth)() for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS + 1):
        for name in random.sample(names, len(names)):
            began = time.perf_counter()
            _ = [np.asarray(part) for part in products[name]()]
            if turn > 0:
                taken[name].append(time.perf_counter() - began)
            if hasattr(products[name], "refresh"):
                began = time.perf_counter()
                products[name].refresh()
                taken.setdefault(f"{name}, once", []).append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


def versions() -> dict[str, str]:
    """Return what was measured with."""
    from importlib import metadata

    found = {"python": platform.python_version(), "processors": str(os.cpu_count())}
    for name in ("tensorflow", "keras", "numpy", "jax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_table(results: dict[str, Any]) -> None:
    """Write the rows of the documentation's table: megabytes, and in units of the gradient."""
    depths = sorted({int(depth) for points in results["chain"].values() for depth in points})
    with (HERE / "memory.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["", *(f"{depth} layers" for depth in depths)])
        for variant, label in VARIANTS.items():
            points = results["chain"].get(variant)
            if points is None:
                continue
            writer.writerow(
                [label, *(_cell(points, results["chain"], d) for d in map(str, depths))]
            )


def _cell(points: dict[str, Any], chain: dict[str, Any], depth: str) -> str:
    point = points.get(depth, {})
    if "megabytes" not in point:
        return "fails" if "error" in point else ""
    unit = chain["gradient"].get(depth, {}).get("megabytes")
    ratio = f" ({point['megabytes'] / unit:.2f})" if unit else ""
    return f"{point['megabytes']:.0f} MB{ratio}"


def draw(results: dict[str, Any]) -> None:
    """Draw memory against depth."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    styles = {
        "gradient": ("gradient", "0.35", "--"),
        "tapes": ("persistent tapes", "#94a3b8", "-"),
        "function": ("tf.function, nested tapes", "#64748b", "-"),
        "cached": ("hvp, cached", "#f59e0b", "-"),
        "recompute": ("hvp, recompute", "#c2410c", "-"),
        "recompute-nested": ("hvp, nested recompute", "#7c2d12", "-"),
        "recompute-tapes": ("tapes over hvp.recompute", "#fb923c", "-"),
        "jax": ("JAX", "#5eead4", "-"),
        "jax-checkpoint": ("JAX, jax.checkpoint", "#0f766e", "-"),
    }
    shifts = {"jax": -5, "jax-checkpoint": 3, "tapes": 2, "function": -3}
    shifts |= {"recompute": 6, "recompute-nested": 2, "recompute-tapes": -6}
    with plt.rc_context({"font.size": 8, "axes.linewidth": 0.6}):
        figure, axes = plt.subplots(figsize=(6.2, 3.8), layout="constrained")
        for variant, (label, colour, line) in styles.items():
            points = results["chain"].get(variant, {})
            known = {int(d): p["megabytes"] for d, p in points.items() if "megabytes" in p}
            if not known:
                continue
            depths = sorted(known)
            axes.plot(
                depths, [known[d] / 1e3 for d in depths], line, color=colour, marker="o", ms=3
            )
            axes.annotate(
                label,
                (depths[-1], known[depths[-1]] / 1e3),
                xytext=(
                    5,
                    shifts.get(variant, 0),
                ),
                textcoords="offset points",
                va="center",
                color=colour,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
        axes.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"])
        axes.set_xlim(14, 1100)
        axes.set_xlabel("layers (width 256, batch 8192, float32)")
        axes.set_ylabel("peak memory, GB")
        axes.grid(visible=True, linewidth=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title("Memory of one Hessian-vector product", loc="left")
        figure.savefig(HERE.parent / "images" / "memory.png", dpi=160)


def main() -> None:
    """Measure what is asked for, and merge it into what was measured before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--only", choices=["chain", "transformer", "seconds", "none"])
    parser.add_argument("--figure", action="store_true")
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        workload, variant, depth = options.point
        print(json.dumps(measure(workload, variant, int(depth))))
        return
    file = HERE / "memory.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results["versions"] = versions()
    if options.only in (None, "chain"):
        for depth in options.depths.split(","):
            for variant in options.variants.split(","):
                point = in_process_of_its_own(__file__, "chain", variant, depth)
                results.setdefault("chain", {}).setdefault(variant, {})[depth] = point
                print(variant, depth, point, flush=True)
                file.write_text(json.dumps(results, indent=1) + "\n")
    if options.only in (None, "transformer"):
        for variant in ("cached", "recompute"):
            point = in_process_of_its_own(__file__, "transformer", variant, "12")
            results.setdefault("transformer", {})[variant] = point
            print("transformer", variant, point, flush=True)
    if options.only in (None, "seconds"):
        results["seconds"] = {"64": interleaved_seconds(64)}
        print(results["seconds"])
    file.write_text(json.dumps(results, indent=1) + "\n")
    write_table(results)
    if options.figure:
        draw(results)


if __name__ == "__main__":
    main()
