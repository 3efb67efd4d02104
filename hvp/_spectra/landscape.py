"""The loss along directions, such as eigenvectors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError, NonFiniteError, StaleOperatorError
from hvp._operators.symmetric import evaluation_of, symmetric_matrix
from hvp._runtime.arguments import check_count, check_number
from hvp._runtime.figures import COLOR, OTHER, axes
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._runtime.progress import check_progress, progress_bar
from hvp._vectors.arrays import check_array


@dataclass(frozen=True, repr=False)
class LossSlice:
    """The loss on a line or in a plane through the current point.

    Attributes
    ----------
    offsets : ndarray
        The distances from the current point, of shape `(points,)`, in units of the directions.
    losses : ndarray
        The loss, of shape `(points,)`, or `(points, points)` for two directions, the first one
        along the first axis. It is NaN where the loss is not finite.
    quadratic : ndarray
        The quadratic model at the same points, from the value, the gradient and the curvature at
        the current point. It has the shape of `losses`.
    """

    offsets: np.ndarray
    losses: np.ndarray
    quadratic: np.ndarray

    def __repr__(self) -> str:
        low, high = np.nanmin(self.losses), np.nanmax(self.losses)
        return (
            f"LossSlice({' x '.join(map(str, self.losses.shape))} points, offsets up to "
            f"{self.offsets.max():.3g}, losses from {low:.4g} to {high:.4g})"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the loss and its quadratic model: as curves, or as contours of a plane.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; by default a new figure.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        HvpError
            If matplotlib is not installed.
        """
        offsets, losses = self.offsets, self.losses
        ax = axes(ax, height=3.2 if losses.ndim == 1 else 4.4)
        if losses.ndim == 1:
            ax.plot(offsets, losses, color=COLOR, linewidth=1.4, label="loss")
            ax.plot(offsets, self.quadratic, "--", color=OTHER, lw=1, label="quadratic model")
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
        ax.contour(offsets, offsets, self.quadratic.T, contours.levels, colors="white",
                   linewidths=0.6, linestyles="--")  # fmt: skip
        ax.plot(0, 0, "o", color=OTHER, markersize=4, label="weights", linestyle="none")
        ax.plot([], [], "--", color="0.4", linewidth=0.8, label="quadratic model (in white)")
        ax.figure.colorbar(contours, ax=ax, label="loss")
        ax.grid(visible=False)
        ax.set(xlabel="distance along the first direction", ylabel="distance along the second")
        ax.set_title("Loss in a plane", loc="left")
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, frameon=False,
                  fontsize="small")  # fmt: skip
        return ax


@Uninterrupted()
def loss_slice(
    H: Any,
    directions: Any,
    *,
    radius: float = 1.0,
    points: int = 21,
    progress: bool | Literal["always"] = False,
) -> LossSlice:
    """Evaluate the loss along one direction, or in the plane of two.

    Parameters
    ----------
    H : HessianOperator, or another symmetric operator of this package
        The operator of the loss.
    directions : array_like
        One vector, of shape `(n,)` or `(n, 1)`, or two, of shape `(n, 2)`, such as
        ``eigsh(H, 2).eigenvectors``.
    radius : float, optional
        The largest offset, in units of the directions.
    points : int, optional
        The number of points on a line, at least 3. If it is odd, the current point is among them.
    progress : bool or "always", optional
        Whether to show a progress bar over the points, as for `trace`.

    Returns
    -------
    LossSlice
        With `offsets`, `losses`, `quadratic` and `plot`.

    Raises
    ------
    InvalidVectorError
        If `directions` has another shape or kind, or entries that are not finite.
    GraphModeError
        If the function is called while TensorFlow traces a graph.
    HvpError
        If another argument is invalid.

    Notes
    -----
    The variables are moved to each point and back. Afterwards they have the same bits as before.
    The cost is one trace, one gradient for each point, and one product for each direction.

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**2), w)
    >>> hvp.loss_slice(H, np.array([1.0, 0.0]), points=3).losses
    array([4., 5., 8.])
    """
    matrix = symmetric_matrix(H, "loss_slice")
    if matrix.snapshot is None:
        raise HvpError(f"the operator is {type(H).__name__}", "an operator of this package")
    if matrix.snapshot.changed():
        raise StaleOperatorError(
            "variables have changed since the operator was evaluated, and on_stale is 'ignore'",
            "an operator of the point that the slice goes through",
            "call refresh()",
        )
    if matrix.snapshot.facts.draws:
        raise HvpError(
            "the loss draws random numbers, which are others at each point",
            "a loss that is the same in every evaluation",
            "draw with a Keras seed generator or tf.random.stateless_*",
        )
    vectors = np.asarray(directions)
    dimensions = (2,) if vectors.ndim == 2 else (1,)
    vectors = check_array(
        vectors, matrix.size, matrix.dtype.as_numpy_dtype, ndims=dimensions, name="directions"
    )
    vectors = np.ascontiguousarray(vectors.reshape(matrix.size, -1).T)
    if len(vectors) not in (1, 2):
        raise HvpError(f"there are {len(vectors)} directions", "one or two")
    check_count(points, "points", 3)
    check_number(radius, "radius", positive=True)
    check_progress(progress)
    offsets = np.linspace(-radius, radius, points)
    grid = np.stack(np.meshgrid(*[offsets] * len(vectors), indexing="ij"), axis=-1)
    shape, steps = grid.shape[:-1], grid.reshape(-1, len(vectors))
    products = matrix.multiply(tf.constant(vectors)).numpy().astype(np.float64)
    curvature = vectors.astype(np.float64) @ products.T
    slope = vectors.astype(np.float64) @ H.gradient.astype(np.float64)
    quadratic = H.value + steps @ slope + np.einsum("ij,jk,ik->i", steps, curvature, steps) / 2
    losses = np.full(len(steps), np.nan)
    gradients = evaluation_of(H).gradients()
    if gradients is None:
        raise HvpError("the operator has no loss", "an operator of a loss")
    try:
        with progress_bar(progress, total=len(steps), unit="point") as bar:
            for place, step in enumerate(steps):
                deliver_interrupt()
                change = (step @ vectors).astype(vectors.dtype)
                with gradients.moved(change), contextlib.suppress(NonFiniteError):
                    losses[place] = gradients.again()[0]
                bar.update(1)
    finally:
        gradients.close()
    return LossSlice(offsets, losses.reshape(shape), quadratic.reshape(shape))
