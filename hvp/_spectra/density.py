"""Spectral densities by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.arguments import check_choice, check_count, check_number
from hvp._runtime.figures import COLOR, OTHER, axes
from hvp._runtime.interrupts import Uninterrupted
from hvp._spectra.lanczos import NOTHING, Quadrature, quadratures
from hvp._spectra.probes import probing

# A Ritz value is an eigenvalue by itself if its residual is this part of the distance to the next.
_SEPARATE = 0.05
# A node of this weight, in units of one eigenvalue, stands for many. The weight of one is the
# square of a normal number, on average one.
_HEAVY = 16
# The fewest points of the grid, and how many bandwidths it goes beyond the outermost nodes.
_POINTS, _MARGIN = 1024, 6.0
# Nodes that are this many rounding units of the largest apart are one eigenvalue.
_ROUNDING = 32
# The logarithmic axis of a density begins at this part of one eigenvalue at its peak.
_LOWEST = 1e-2


@dataclass(frozen=True, repr=False)
class SpectralDensity:
    """The density of the eigenvalues of an operator, estimated from random vectors.

    Attributes
    ----------
    nodes, weights : ndarray
        The Gauss quadrature of each vector, of shape `(probes, steps)`. The mean over the vectors
        of the sums of ``weights * f(nodes)`` estimates the mean of `f` over all eigenvalues.
    bandwidth : float
        The standard deviation of the Gaussians that replace the nodes: the distance of successive
        nodes where the density has most of its weight. This is what the steps resolve.
    size : int
        The number of eigenvalues.
    below, above : int
        The number of single eigenvalues below and above the bulk: counted from the end of the
        spectrum, those whose Ritz values have converged and are separate from the next one. It is
        the median over the vectors. Equal eigenvalues count once.
    products : int
        Number of products with a vector.
    """

    nodes: np.ndarray
    weights: np.ndarray
    bandwidth: float
    size: int
    below: int
    above: int
    products: int

    @property
    def bulk(self) -> tuple[float, float]:
        """The interval of the eigenvalues that are not separate, ends included.

        Both ends are NaN if there are none.
        """
        ends = [
            (nodes[self.below], nodes[len(nodes) - 1 - self.above])
            for nodes, has_weight in zip(self.nodes, self.weights > NOTHING)
            for nodes in [nodes[has_weight]]
            if len(nodes) > self.below + self.above
        ]
        if not ends:
            return np.nan, np.nan
        lowest, highest = zip(*ends)
        return float(np.min(lowest)), float(np.max(highest))

    def grid(self, points: int | None = None) -> np.ndarray:
        """Return points that cover the density, evenly spaced.

        By default there are so many that the trapezoidal rule integrates the density to one: at
        least one for each `bandwidth`.
        """
        margin = _MARGIN * self.bandwidth
        low, high = self.nodes.min() - margin, self.nodes.max() + margin
        if points is not None:
            check_count(points, "points")
        else:
            points = max(_POINTS, math.ceil((high - low) / self.bandwidth) + 1)
        return np.linspace(low, high, points)

    def density(self, x: Any, *, bandwidth: float | None = None) -> np.ndarray:
        """Return the density, whose integral is one.

        Parameters
        ----------
        x : array_like
            Where to evaluate it.
        bandwidth : float, optional
            Another standard deviation of the Gaussians.

        Returns
        -------
        ndarray
            Shaped like `x`.
        """
        return self._of_each(x, bandwidth).mean(axis=0)

    def standard_error(self, x: Any, *, bandwidth: float | None = None) -> np.ndarray:
        """Return the standard error of `density`, over the random vectors."""
        each = self._of_each(x, bandwidth)
        return each.std(axis=0, ddof=1) / np.sqrt(len(each)) if len(each) > 1 else each[0] * np.nan

    def distribution(self, x: Any) -> np.ndarray:
        """Return the fraction of the eigenvalues that are at most `x`, without smoothing.

        Within `bandwidth` of a spike, such as that of most networks at zero, it is not resolved.
        """
        x = np.asarray(x, np.float64)
        order = np.argsort(self.nodes, axis=None)
        cumulative = np.append(0, np.cumsum(self.weights.ravel()[order]) / len(self.nodes))
        fraction = cumulative[np.searchsorted(self.nodes.ravel()[order], x, side="right")]
        return np.where(np.isnan(x), np.nan, fraction)[()]

    def moment(self, power: int) -> float:
        """Return the mean of a power of all eigenvalues."""
        return float(np.mean(np.sum(self.weights * self.nodes**power, axis=1)))

    def _of_each(self, x: Any, bandwidth: float | None) -> np.ndarray:
        sigma = self.bandwidth
        if bandwidth is not None:
            sigma = check_number(bandwidth, "bandwidth", positive=True)
        x = np.asarray(x, np.float64)
        result = np.zeros((len(self.nodes), *x.shape))
        for total, nodes, weights in zip(result, self.nodes, self.weights):
            for node, weight in zip(nodes, weights):
                total += weight * np.exp(-(((x - node) / sigma) ** 2) / 2)
        return result / (sigma * np.sqrt(2 * np.pi))

    def __repr__(self) -> str:
        low, high = self.bulk
        bulk = "no bulk, all are separate or equal"
        if low <= high:
            bulk = f"{self.below} below and {self.above} above the bulk of {low:.4g} to {high:.4g}"
        return (
            f"SpectralDensity({self.size} eigenvalues from {self.nodes.min():.4g} to "
            f"{self.nodes.max():.4g}; {bulk}; {self.products} products)"
        )

    def plot(self, ax: Any = None, *, scale: Literal["linear", "log", "symlog"] = "log") -> Any:
        """Draw the density with a band of two standard errors.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; by default a new figure.
        scale : {"linear", "log", "symlog"}, optional
            The axis of the density: linear, or logarithmic, which shows single eigenvalues beside
            the bulk. With ``"symlog"`` the axis of the eigenvalues is logarithmic on both sides of
            the bulk as well.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        HvpError
            If matplotlib is not installed, or `scale` is none of these.
        """
        check_choice(scale, "scale", ("linear", "log", "symlog"))
        ax = axes(ax)
        # Points where something is: evenly over the whole, and around each node.
        around = self.bandwidth * np.linspace(-4, 4, 17)
        points = (self.nodes[..., np.newaxis] + around).ravel()
        x = np.unique(np.concatenate([self.grid(), points]))
        y = self.density(x)
        error = np.nan_to_num(self.standard_error(x))
        one = 1 / (self.size * self.bandwidth * np.sqrt(2 * np.pi))
        floor = _LOWEST * one
        low = np.maximum(y - 2 * error, 0 if scale == "linear" else floor)
        ax.fill_between(
            x, low, y + 2 * error, color=COLOR, alpha=0.2, lw=0, label="2 standard errors"
        )
        ax.plot(x, y, color=COLOR, linewidth=1.2, label="density")
        ax.axvline(0, color="0.6", linewidth=0.8, linestyle=":")
        if scale != "linear":
            ax.set_yscale("log")
            ax.set_ylim(floor, 2 * (y + 2 * error).max())
            name = "height of a single eigenvalue"
            ax.axhline(one, color=OTHER, linewidth=0.8, linestyle="--", label=name)
        if scale == "symlog":
            ax.set_xscale("symlog", linthresh=4 * self.bandwidth)
        ax.set(xlabel="eigenvalue", ylabel="density")
        ax.set_title("Spectral density", loc="left")
        ax.legend(frameon=False, fontsize="small")
        return ax


@Uninterrupted()
def spectral_density(
    A: Any,
    *,
    probes: int = 8,
    steps: int = 40,
    seed: int = 0,
    progress: bool | Literal["always"] = False,
) -> SpectralDensity:
    """Estimate the density of all eigenvalues of a symmetric operator.

    Parameters
    ----------
    A : HessianOperator, or another operator of this package or of scipy, or a matrix
        Real and symmetric. Its damping is included.
    probes : int, optional
        Number of random vectors. The standard error is inversely proportional to its square root.
    steps : int, optional
        Steps of the Lanczos method for each vector. More steps resolve finer details.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, as for `trace`.

    Returns
    -------
    SpectralDensity
        With `density`, `standard_error`, `distribution` and `plot`.

    Raises
    ------
    NonFiniteError
        If a product is not finite.
    GraphModeError
        If the function is called while TensorFlow traces a graph.
    HvpError
        If an argument is invalid.

    Notes
    -----
    The method is stochastic Lanczos quadrature ([LSY]_, [GKX]_) with full reorthogonalization. It
    costs ``probes * steps`` products, and at most the memory of as many vectors of `n` numbers.

    References
    ----------
    .. [LSY] L. Lin, Y. Saad and C. Yang, "Approximating spectral densities of large matrices", SIAM
       Review 58(1), 2016. https://doi.org/10.1137/130934283
    .. [GKX] B. Ghorbani, S. Krishnan and Y. Xiao, "An investigation into neural net optimization
       via Hessian eigenvalue density", ICML 2019. https://proceedings.mlr.press/v97/ghorbani19b

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable(np.linspace(0, 1, 200).astype("float32"))
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**3) / 6, w)
    >>> density = hvp.spectral_density(H)
    >>> bool(0.4 < density.distribution(0.5) < 0.6)  # the eigenvalues are those of w itself
    True
    """
    matrix = symmetric_matrix(A, "spectral_density")
    check_count(probes, "probes")
    check_count(steps, "steps")
    steps = min(steps, matrix.size)
    # The basis of each vector is kept until the vector is done.
    most = max(1, 2**31 // (steps * matrix.size * matrix.dtype.size))
    parts = []
    total = probes * steps
    with probing(matrix, progress, seed, total) as random:
        width = min(random.widest, most)
        for start in range(0, probes, width):
            vectors = random.draw(min(width, probes - start))
            parts.append(quadratures(random, vectors, steps))
    quadrature = Quadrature(
        *(np.concatenate([getattr(q, name) for q in parts]) for name in _FIELDS)
    )
    below, above = _separate(quadrature, matrix.size)
    return SpectralDensity(
        quadrature.nodes,
        quadrature.weights,
        _bandwidth(quadrature, np.finfo(matrix.dtype.as_numpy_dtype).eps),
        matrix.size,
        below,
        above,
        total,
    )


_FIELDS = ("nodes", "weights", "residuals")


def _bandwidth(quadrature: Quadrature, eps: float) -> float:
    """Return the distance of successive nodes, as the median over the weight of the measure."""
    gaps, weights = [], []
    scale = np.abs(quadrature.nodes).max()
    for nodes, weight in zip(quadrature.nodes, quadrature.weights):
        nodes, weight = nodes[weight > NOTHING], weight[weight > NOTHING]
        begins = np.flatnonzero(np.diff(nodes, prepend=-np.inf) > _ROUNDING * eps * scale)
        nodes, weight = nodes[begins], np.add.reduceat(weight, begins)
        if len(nodes) > 1:
            gap = np.diff(nodes)
            # Of a node in between, the smaller one of the distances on both sides.
            gaps.append(np.minimum(np.append(gap, np.inf), np.append(np.inf, gap)))
            weights.append(weight)
    if not gaps:
        return float(1e-3 * scale or 1e-3)
    gap, weight = np.concatenate(gaps), np.concatenate(weights)
    order = np.argsort(gap)
    middle = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    return float(max(gap[order][min(middle, len(gap) - 1)], 1e-4 * scale))


def _separate(quadrature: Quadrature, size: int) -> tuple[int, int]:
    """Count the separate eigenvalues at both ends, as the medians over the vectors."""
    counts = []
    for nodes, weights, residuals in zip(
        quadrature.nodes, quadrature.weights, quadrature.residuals
    ):
        has_weight = weights > NOTHING
        nodes, residuals = nodes[has_weight], residuals[has_weight]
        heavy = weights[has_weight] * size > _HEAVY
        ends = []
        for step in (1, -1):
            values, errors, many = (part[::step] for part in (step * nodes, residuals, heavy))
            single = (errors[:-1] <= _SEPARATE * np.diff(values)) & ~many[:-1]
            ends.append(len(single) if single.all() else int(np.argmin(single)))
        counts.append(ends)
    below, above = np.median(counts, axis=0).astype(int)
    return int(below), int(above)
