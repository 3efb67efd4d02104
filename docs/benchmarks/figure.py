"""Draw the figure of the documentation from `products.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import report
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

IMAGE = Path(__file__).parents[1] / "images" / "products.png"

# Label, variant and colour family, from the top.
ROWS = [
    ("hvp", "hvp, graph", "hvp"),
    ('hvp, jit_compile="auto"', "hvp, auto", "hvp"),
    ("hvp, per column of a block", "hvp, graph, block", "hvp"),
    ("tf.function, XLA", "TF nested tapes, XLA", "tensorflow"),
    ("tf.function", "TF nested tapes, tf.function", "tensorflow"),
    ("tf.function, forward mode", "TF forward-over-reverse, tf.function", "tensorflow"),
    ("eager tapes, cached", "TF persistent tapes, eager", "tensorflow"),
    ("eager tapes", "TF nested tapes, eager", "tensorflow"),
    ("JAX linearize", "JAX linearize", "peer"),
    ("JAX, per column of a block", "JAX linearize, block", "peer"),
    ("JAX forward mode", "JAX forward-over-reverse", "peer"),
    ("PyTorch linearize", "PyTorch linearize, compiled", "peer"),
    ("PyTorch, per column of a block", "PyTorch linearize, compiled, block", "peer"),
    ("PyTorch forward mode", "PyTorch forward-over-reverse, compiled", "peer"),
    ("PyTorch, retained graph", "PyTorch retained graph", "peer"),
    ("curvlinops", "curvlinops", "peer"),
]
COLOURS = {"hvp": "#c2410c", "tensorflow": "#64748b", "peer": "#0f766e"}
FAMILIES = {
    "hvp": "this library",
    "tensorflow": "TensorFlow, written by hand",
    "peer": "other frameworks",
}
STYLE = {"font.size": 8, "axes.titlesize": 9, "axes.linewidth": 0.6, "font.family": "DejaVu Sans"}
TICKS = [0.25, 1, 4, 16, 64]


def _limits(workloads: dict[str, dict[str, Any]]) -> tuple[float, float]:
    costs = [
        result["variants"].get(variant, {}).get("per_gradient", 1)
        for result in workloads.values()
        for _, variant, _ in ROWS
    ]
    return min(costs) / 1.4, max(costs) * 2.2  # room for the numbers


def _draw_row(axes: Axes, row: int, variant: dict[str, Any], colour: str) -> None:
    if "per_gradient" not in variant:
        axes.text(1.1, row, "fails" if "error" in variant else "not run", color="0.6", va="center")
        return
    cost = variant["per_gradient"]
    axes.plot([1, cost], [row, row], color=colour, linewidth=1.6, alpha=0.45, zorder=2)
    axes.plot(cost, row, "o", color=colour, markersize=4.5, zorder=3)
    axes.annotate(
        f"{cost:.0f}" if cost >= 10 else f"{cost:.1f}" if cost >= 1 else f"{cost:.2f}",
        (max(cost, 1), row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=colour,
    )


def _draw_panel(axes: Axes, name: str, result: dict[str, Any]) -> None:
    axes.axvline(1, color="0.75", linewidth=0.8, zorder=1)
    for row, (_, variant, family) in enumerate(ROWS):
        _draw_row(axes, row, result["variants"].get(variant, {}), COLOURS[family])
    gradient = result["variants"]["gradient"]["median_ms"]
    axes.set_title(name, loc="left", weight="bold")
    axes.set_title(f"n = {result['parameters']:,}", loc="right", size=8, color="0.35")
    axes.set_xlabel(f"1 gradient = {gradient:.3g} ms", color="0.35", labelpad=2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params("y", length=0)
    axes.tick_params("x", length=2, colors="0.35")


def _draw_key(axes: Axes, everything: dict[str, Any]) -> None:
    axes.axis("off")
    for line, (family, text) in enumerate(FAMILIES.items()):
        height = 0.92 - 0.09 * line
        axes.plot(0.04, height, "o", color=COLOURS[family], markersize=5, clip_on=False)
        axes.text(0.11, height, text, color=COLOURS[family], va="center")
    versions = everything["versions"]
    names = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
    found = [
        f"{text} {versions[name].split('+')[0]}" for name, text in names.items() if name in versions
    ]
    notes = [
        "Cost of one product, in gradients",
        "(compiled); medians. Log scale.",
        "",
        *found,
        f"{everything['machine']['cores']} cores",
    ]
    axes.text(0.02, 0.55, "\n".join(notes), color="0.35", va="top", linespacing=1.4)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def draw() -> Path:
    """Write the figure; returns where."""
    everything = report.load()
    workloads = everything["workloads"]
    columns = min(4, len(workloads) + 1)
    rows = -(-(len(workloads) + 1) // columns)
    size = 2.1 * columns + 1.2, 2.55 * rows
    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(
            rows, columns, figsize=size, sharey=True, layout="constrained", squeeze=False
        )
        panels = list(grid.flat)
        for axes, (name, result) in zip(panels, workloads.items()):
            _draw_panel(axes, name, result)
            axes.set(xscale="log", xlim=_limits(workloads))
            axes.xaxis.set_major_locator(FixedLocator(TICKS))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
        panels[0].set_yticks(range(len(ROWS)), [label for label, _, _ in ROWS])
        panels[0].invert_yaxis()
        for first in grid[:, 0]:
            for label, (_, _, family) in zip(first.get_yticklabels(), ROWS):
                label.set_color(COLOURS[family])
        for axes in panels[len(workloads) :]:
            axes.axis("off")
        # An inset, because the panels share their vertical axis.
        _draw_key(panels[len(workloads)].inset_axes([0, 0, 1, 1]), everything)
        figure.savefig(IMAGE, dpi=180)
        plt.close(figure)
    return IMAGE


if __name__ == "__main__":
    print(draw())
