"""What the benchmark of products prints and writes."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from workloads import WORKLOADS, Workload

HERE = Path(__file__).parent
JSON, CSV = HERE / "products.json", HERE / "products.csv"

PEERS = ("jax", "torch", "curvlinops-for-pytorch", "hessian-eigenthings")
PACKAGES = ("tensorflow", "keras", "numpy", "scipy", *PEERS, "pytorch-minimize")
RATE_SIZE = 2048

# Columns of the table for the documentation: heading, variant, and which of its figures.
COLUMNS = [
    ("gradient", "gradient", "median_ms"),
    ("hvp", "hvp, graph", "median_ms"),
    ("hvp, auto", "hvp, auto", "median_ms"),
    ("hvp, block, per column", "hvp, graph, block", "median_ms"),
    ("TF eager, cached", "TF persistent tapes, eager", "median_ms"),
    ("TF tf.function", "TF nested tapes, tf.function", "median_ms"),
    ("TF XLA", "TF nested tapes, XLA", "median_ms"),
    ("JAX linearize", "JAX linearize", "median_ms"),
    ("PyTorch linearize", "PyTorch linearize, compiled", "median_ms"),
    ("curvlinops", "curvlinops", "median_ms"),
    ("hvp / gradient", "hvp, graph", "per_gradient"),
    ("hvp / fastest other", "hvp, graph", "per_fastest_peer"),
]


def versions() -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Cores and processor."""
    processor = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    return {"cores": os.cpu_count(), "processor": processor, "system": platform.system()}


def product_flops(workload: Workload) -> int | None:
    """Operations in the matrix products of one product from residuals, for dense networks.

    A layer's matrix product is `2 * batch * inputs * outputs` operations. The first layer, which
    needs no derivative with respect to its input, takes two of them, every other layer six.
    """
    if workload.network != "mlp":
        return None
    kernels = [shape for shape in workload.shapes if len(shape) == 2]
    batch = len(workload.batch[0])
    counts = [2] + [6] * (len(kernels) - 1)
    return sum(
        count * 2 * batch * inputs * outputs for count, (inputs, outputs) in zip(counts, kernels)
    )


def _ratios(
    timings: dict[str, np.ndarray], results: dict[str, dict[str, Any]]
) -> dict[str, np.ndarray]:
    """Return the times that others are divided by."""
    peers = [
        name
        for name in timings
        if results[name]["family"] != "hvp" and results[name]["kind"] == "product"
    ]
    units = {"per_gradient": timings["gradient"]} if "gradient" in timings else {}
    if peers:
        units["per_fastest_peer"] = timings[min(peers, key=lambda name: np.median(timings[name]))]
    return units


def _add_limit(workload: Workload, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tell each product its share of the limit: its matrix products, at the large one's rate."""
    if "median_ms" not in variants["matrix product"]:
        return {}
    rate = 2 * RATE_SIZE**3 / variants["matrix product"]["median_ms"] / 1e6
    limits: dict[str, Any] = {"matrix_product_gflops": rate}
    flops = product_flops(workload)
    if flops:
        limits["limit_ms"] = flops / rate / 1e6
        for variant in variants.values():
            if variant["kind"] in ("product", "block", "loop") and "median_ms" in variant:
                variant["share_of_limit"] = limits["limit_ms"] / variant["median_ms"]
    return limits


def summarize(
    workload: Workload,
    agreement: dict[str, dict[str, float]],
    results: dict[str, dict[str, Any]],
    timings: dict[str, np.ndarray],
    first_products: dict[str, Any],
) -> dict[str, Any]:
    """Put together what is known about one workload, for JSON."""
    units = _ratios(timings, results)
    variants = {}
    for name, result in results.items():
        variants[name] = dict(result)
        if name not in timings:
            continue
        low, median, high = 1e3 * np.percentile(timings[name], [25, 50, 75])
        variants[name].update(median_ms=median, quartiles_ms=[low, high])
        if result["kind"] != "rate":
            for unit, seconds in units.items():
                variants[name][unit] = float(np.median(timings[name] / seconds))
    return {
        "architecture": workload.architecture,
        "parameters": workload.size,
        "block": workload.block,
        "date": datetime.date.today().isoformat(),
        "rounds": len(next(iter(timings.values()))),
        **_add_limit(workload, variants),
        "agreement": agreement,
        "variants": variants,
        "first_product_ms": first_products,
    }


def _cells(variant: dict[str, Any]) -> str:
    def number(key: str, form: str) -> str:
        value = variant.get(key)
        return "" if value is None else form.format(value)

    low, high = variant["quartiles_ms"]
    return (
        f"{variant['median_ms']:10.3f} {low:10.3f} {high:10.3f}"
        f"{number('per_gradient', '{:.2f}'):>10}{number('per_fastest_peer', '{:.2f}'):>10}"
        f"{number('share_of_limit', '{:.0%}'):>10}{number('relative_error', '{:.0e}'):>10}"
    )


def print_table(name: str, result: dict[str, Any]) -> None:
    """Print one workload."""
    print(f"\n{name}: {result['architecture']}")
    print(
        f"{result['parameters']} parameters, blocks of {result['block']}, {result['rounds']} rounds"
    )
    if "matrix_product_gflops" in result:
        print(f"large matrix product: {result['matrix_product_gflops']:.0f} GFLOP/s")
    if "limit_ms" in result:
        print(f"limit, a product's matrix products alone at that rate: {result['limit_ms']:.3f} ms")
    heads = f"{'ms':>10} {'quartiles':>21}{'/gradient':>10}{'/peer':>10}{'of limit':>10}"
    print(f"{'':38}{heads}{'error':>10}")
    for label, variant in result["variants"].items():
        print(f"{label:<38}" + (variant.get("error", "")[:100] or _cells(variant)))
    print("first product, made afresh, ms:")
    for label, value in result["first_product_ms"].items():
        print(f"{label:<38}" + (value[:100] if isinstance(value, str) else f"{value:10.1f}"))


def load() -> dict[str, Any]:
    """Read what was measured so far."""
    return json.loads(JSON.read_text()) if JSON.exists() else {"workloads": {}}


def rounded(value: Any) -> Any:
    """Four significant digits of every float in nested lists and dicts."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def save(name: str, result: dict[str, Any]) -> None:
    """Write one workload's result to JSON, keeping the others', and all of them to CSV."""
    everything = load()
    everything.update(versions=versions(), machine=machine())
    found = {**everything["workloads"], name: rounded(result)}
    everything["workloads"] = {name: found[name] for name in WORKLOADS if name in found}
    JSON.write_text(json.dumps(everything, indent=1) + "\n")
    write_csv(everything["workloads"])


def _short(figure: float) -> str:
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def write_csv(workloads: dict[str, dict[str, Any]]) -> None:
    """Write the table that the documentation shows."""
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["workload", "n", *(heading for heading, _, _ in COLUMNS)])
        for name, result in workloads.items():
            figures = [result["variants"].get(variant, {}).get(key) for _, variant, key in COLUMNS]
            cells = ["" if figure is None else _short(figure) for figure in figures]
            writer.writerow([name, f"{result['parameters']:,}", *cells])
