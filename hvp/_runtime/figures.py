"""Where figures are drawn: matplotlib, which is optional."""

from __future__ import annotations

from typing import Any

from hvp._errors import HvpError

# The first and the second color of a figure.
COLOR, OTHER = "#0f766e", "#c2410c"


def pyplot() -> Any:
    """Return matplotlib's functions, or raise an error that names the package."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise HvpError(
            "a figure was requested, but matplotlib is not installed",
            "matplotlib, which draws it",
            "pip install matplotlib",
        ) from error
    return plt


def axes(ax: Any, height: float = 3.2) -> Any:
    """Return the axes to draw into, by default those of a new figure."""
    plt = pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=(6.4, height), layout="constrained")
    if not hasattr(ax, "spines"):
        raise HvpError(
            f"the argument ax is {ax!r}",
            "axes of matplotlib",
            "leave it out; to save a figure, plot().figure.savefig('figure.png')",
        )
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return ax
