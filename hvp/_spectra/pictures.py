"""Drawing eigenvalues, densities and layers with matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hvp._errors import HvpError
from hvp._runtime.figures import COLOR, OTHER, axes

if TYPE_CHECKING:
    from hvp._spectra.density import SpectralDensity
    from hvp._spectra.eigsh import EigenResult
    from hvp._spectra.estimate import Estimate
    from hvp._spectra.landscape import LossSlice

# More bars than this are not labelled.
_MOST_LABELS = 60
_SCALES = ("linear", "log", "symlog")
# The logarithmic axis of a density begins at this part of one eigenvalue at its peak.
_LOWEST = 1e-2


def draw_density(density: SpectralDensity, ax: Any, scale: str) -> Any:
    """Draw a density with its band."""
    if scale not in _SCALES:
        raise HvpError(f"the argument scale is {scale!r}", " or ".join(map(repr, _SCALES)))
    ax = axes(ax)
    # Points where something is: evenly over the whole, and around each node.
    around = density.bandwidth * np.linspace(-4, 4, 17)
    points = (density.nodes[..., np.newaxis] + around).ravel()
    x = np.unique(np.concatenate([density.grid(), points]))
    y = density.density(x)
    error = np.nan_to_num(density.standard_error(x))
    one = 1 / (density.size * density.bandwidth * np.sqrt(2 * np.pi))
    floor = _LOWEST * one
    low = np.maximum(y - 2 * error, 0 if scale == "linear" else floor)
    ax.fill_between(x, low, y + 2 * error, color=COLOR, alpha=0.2, lw=0, label="2 standard errors")
    ax.plot(x, y, color=COLOR, linewidth=1.2, label="density")
    ax.axvline(0, color="0.6", linewidth=0.8, linestyle=":")
    if scale != "linear":
        ax.set_yscale("log")
        ax.set_ylim(floor, 2 * (y + 2 * error).max())
        ax.axhline(
            one, color=OTHER, linewidth=0.8, linestyle="--", label="height of a single eigenvalue"
        )
    if scale == "symlog":
        ax.set_xscale("symlog", linthresh=4 * density.bandwidth)
    ax.set(xlabel="eigenvalue", ylabel="density")
    ax.set_title("Spectral density", loc="left")
    ax.legend(frameon=False, fontsize="small")
    return ax


def draw_eigenvalues(result: EigenResult, ax: Any) -> Any:
    """Draw eigenvalues in their order."""
    ax = axes(ax)
    places = np.arange(1, len(result.eigenvalues) + 1)
    ax.errorbar(
        places,
        result.eigenvalues,
        yerr=result.residual_norms,
        fmt="o",
        color=COLOR,
        markersize=4,
        capsize=2,
        label="with the norm of its residual",
    )
    ax.axhline(0, color="0.6", linewidth=0.8, linestyle=":")
    ax.set(xlabel="place in the order", ylabel="eigenvalue")
    ax.set_title("Eigenvalues", loc="left")
    ax.legend(frameon=False, fontsize="small")
    ax.xaxis.get_major_locator().set_params(integer=True)
    return ax


def draw_estimate(estimate: Estimate, ax: Any) -> Any:
    """Draw an estimate: bars of its layers, or its values with their band."""
    if estimate.layers:
        ax = plot_layers(estimate.layers, ax)
        ax.set(xlabel="part of the trace, with two standard errors")
        ax.set_title("Trace of each layer", loc="left")
        return ax
    values = np.atleast_1d(estimate.estimate)
    if len(values) == 1:
        raise HvpError(
            "the estimate is one number, without layers",
            "an estimate with layers, or of a diagonal",
            "print it",
        )
    ax = axes(ax)
    places, errors = np.arange(len(values)), np.atleast_1d(estimate.standard_error)
    band = values - 2 * errors, values + 2 * errors
    ax.fill_between(places, *band, color=COLOR, alpha=0.2, lw=0, label="2 standard errors")
    ax.plot(places, values, color=COLOR, linewidth=0.8, label="estimate")
    ax.set(xlabel="number of the weight", ylabel="diagonal of the matrix")
    ax.set_title("Diagonal", loc="left")
    ax.legend(frameon=False, fontsize="small")
    return ax


def draw_slice(loss_slice: LossSlice, ax: Any) -> Any:
    """Draw the loss along a line, or contours in a plane, with the quadratic model."""
    offsets, losses = loss_slice.offsets, loss_slice.losses
    ax = axes(ax, height=3.2 if losses.ndim == 1 else 4.4)
    if losses.ndim == 1:
        ax.plot(offsets, losses, color=COLOR, linewidth=1.4, label="loss")
        ax.plot(offsets, loss_slice.quadratic, "--", color=OTHER, lw=1, label="quadratic model")
        ax.axvline(0, color="0.6", linewidth=0.8, linestyle=":")
        finite = losses[np.isfinite(losses)]
        if len(finite):  # the model may leave the range of the loss by far
            room = 0.1 * (np.ptp(finite) or 1.0)
            ax.set_ylim(finite.min() - room, finite.max() + room)
        ax.set(xlabel="distance along the direction", ylabel="loss")
        ax.set_title("Loss along a line", loc="left")
        ax.legend(frameon=False, fontsize="small")
        return ax
    contours = ax.contourf(offsets, offsets, losses.T, 20, cmap="viridis")
    ax.contour(offsets, offsets, loss_slice.quadratic.T, contours.levels, colors="white",
               linewidths=0.6, linestyles="--")  # fmt: skip
    ax.plot(0, 0, "o", color=OTHER, markersize=4, label="weights", linestyle="none")
    ax.plot([], [], "--", color="0.4", linewidth=0.8, label="quadratic model (in white)")
    ax.figure.colorbar(contours, ax=ax, label="loss")
    ax.grid(visible=False)
    ax.set(xlabel="distance along the first direction", ylabel="distance along the second")
    ax.set_title("Loss in a plane", loc="left")
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, frameon=False, fontsize="small")
    return ax


def plot_layers(layers: Mapping[str, Any], ax: Any = None) -> Any:
    """Draw a number for each layer as bars, with two standard errors where these are known.

    Parameters
    ----------
    layers : mapping of str to Estimate or float
        The numbers by the names of the layers, such as the `layers` of a `trace`.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    HvpError
        If there are no layers, or if matplotlib is not installed.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable([3.0], name="b")
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(a**4) + tf.reduce_sum(b**3), [a, b])
    >>> hvp.plot_layers(hvp.trace(H).layers)  # doctest: +SKIP
    """
    if not isinstance(layers, Mapping) or not layers:
        raise HvpError(f"the layers are {layers!r}", "a mapping from names to estimates or numbers")
    names = list(layers)[::-1]
    ax = axes(ax, height=max(1.6, 0.8 + 0.24 * min(len(names), _MOST_LABELS)))
    values = np.array([float(getattr(layers[n], "estimate", layers[n])) for n in names])
    errors = np.array([float(getattr(layers[n], "standard_error", 0.0)) for n in names])
    ax.barh(np.arange(len(names)), values, xerr=2 * errors, color=COLOR, height=0.7, capsize=2)
    ax.axvline(0, color="0.6", linewidth=0.8)
    if len(names) <= _MOST_LABELS:
        ax.set_yticks(np.arange(len(names)), names, fontsize="small")
    else:
        ax.set(ylabel="layers, the first at the top", yticks=[])
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.grid(visible=False, axis="y")
    return ax
