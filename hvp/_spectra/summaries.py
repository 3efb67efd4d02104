"""Measurements of curvature where TensorBoard shows them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError
from hvp._spectra.density import SpectralDensity

# Points that stand for a density in a histogram, and the bins of it.
_POINTS, _BUCKETS = 2000, 60


def check_tensorboard() -> None:
    """Refuse to write summaries without the package that they need."""
    if find_spec("tensorboard") is None:
        raise HvpError(
            "log_dir is given, but tensorboard is not installed",
            "tensorboard, which writes and shows summaries",
            "pip install tensorboard",
        )


def write_summaries(writer: Any, measured: Mapping[str, Any], step: int, prefix: str) -> None:
    """Write numbers as scalars, densities as histograms, and what can be drawn as images.

    TensorBoard shows what is before a slash as the name of a group.
    """
    group = prefix.rstrip("_/") + "/"
    with writer.as_default(step=step):
        for name, value in measured.items():
            if isinstance(value, SpectralDensity):
                tf.summary.histogram(group + name, _spread(value), buckets=_BUCKETS)
            elif isinstance(value, float):
                tf.summary.scalar(group + name, value)
            if hasattr(value, "plot") and find_spec("matplotlib") is not None:
                tf.summary.image(f"{group}{name}_figure", _drawn(value)[np.newaxis])
    writer.flush()


def _spread(density: SpectralDensity) -> np.ndarray:
    """Return numbers that are distributed like the eigenvalues."""
    order = np.argsort(density.nodes, axis=None)
    parts = np.cumsum(density.weights.ravel()[order])
    quantiles = (np.arange(_POINTS) + 0.5) / _POINTS * parts[-1]
    return density.nodes.ravel()[order][np.searchsorted(parts, quantiles)]


def _drawn(result: Any) -> np.ndarray:
    """Return the pixels of a result's figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.8), dpi=150, layout="constrained")  # cards are small
    canvas = FigureCanvasAgg(figure)
    result.plot(figure.add_subplot())
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
