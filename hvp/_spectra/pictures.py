"""Drawing numbers of layers with matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvp._errors import HvpError
from hvp._runtime.figures import COLOR, axes

# More bars than this are not labelled.
_MOST_LABELS = 60


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
    names = list(layers)[::-1] if isinstance(layers, Mapping) else []
    values = np.array([getattr(layers[n], "estimate", layers[n]) for n in names])
    if not names or values.dtype.kind not in "fiu":
        raise HvpError(f"the layers are {layers!r}", "a mapping from names to estimates or numbers")
    ax = axes(ax, height=max(1.6, 0.8 + 0.24 * min(len(names), _MOST_LABELS)))
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
