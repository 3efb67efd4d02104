"""The result of an estimator: an estimate and its standard error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.special

from hvp._errors import HvpError
from hvp._runtime.arguments import check_number
from hvp._runtime.figures import COLOR, axes
from hvp._spectra.pictures import plot_layers
from hvp._spectra.sampling import Stopping


@dataclass(frozen=True, repr=False)
class Estimate:
    """An estimate from random vectors, with its standard error.

    Attributes
    ----------
    estimate : float or ndarray
        The estimate.
    standard_error : float or ndarray
        The standard deviation of the estimate over draws of the vectors, itself estimated.
    products : int
        Number of products with a vector.
    converged : bool
        Whether the standard error is as small as requested.
    method : str
        The name of the method.
    degrees_of_freedom : int
        Degrees of freedom of the standard error: the number of independent samples minus one.
    layers : dict of str to Estimate
        The estimates of the diagonal blocks of the layers, from the same products. It is empty if
        the method does not provide them, or if the operator has no layers.
    """

    estimate: Any
    standard_error: Any
    products: int
    converged: bool
    method: str
    degrees_of_freedom: int
    layers: Mapping[str, Estimate] = field(default_factory=dict)

    def interval(self, level: float = 0.95) -> tuple[Any, Any]:
        """Return a confidence interval, by Student's t-distribution.

        Parameters
        ----------
        level : float, optional
            The probability that it covers the true value.

        Returns
        -------
        tuple of two floats or ndarrays
            The ends of the interval.

        Raises
        ------
        HvpError
            If `level` is not between 0 and 1.

        Notes
        -----
        Sampling ends at a tolerance, and so rather where the standard error happens to come out
        small. The interval of few samples then covers the true value a few percent less often.
        """
        check_number(level, "level", positive=True, below=1)
        if self.degrees_of_freedom < 1:
            return self.estimate, self.estimate
        width = self.standard_error * scipy.special.stdtrit(
            self.degrees_of_freedom, (1 + level) / 2
        )
        return self.estimate - width, self.estimate + width

    def __repr__(self) -> str:
        if np.ndim(self.estimate):
            error, size = np.linalg.norm(self.standard_error), np.linalg.norm(self.estimate)
            text = f"{np.size(self.estimate)} values, relative error {error / (size or 1):.2g}"
        else:
            text = f"{self.estimate:.6g} +- {self.standard_error:.2g}"
        ended = "" if self.converged else ", not converged"
        return f"Estimate({text}, {self.products} products by {self.method}{ended})"

    def __str__(self) -> str:
        if not self.layers:
            return repr(self)
        width = max(map(len, self.layers))
        lines = [
            f"  {name:<{width}}  {part.estimate:12.5g} +- {part.standard_error:.2g}"
            for name, part in self.layers.items()
        ]
        return "\n".join([repr(self), *lines])

    def plot(self, ax: Any = None) -> Any:
        """Draw the layers' estimates as bars with two standard errors, or the values themselves.

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
            If matplotlib is not installed, or there is nothing to draw.
        """
        if self.layers:
            ax = plot_layers(self.layers, ax)
            ax.set(xlabel="part of the trace, with two standard errors")
            ax.set_title("Trace of each layer", loc="left")
            return ax
        values = np.atleast_1d(self.estimate)
        if len(values) == 1:
            raise HvpError(
                "the estimate is one number, without layers",
                "an estimate with layers, or of a diagonal",
                "print it",
            )
        ax = axes(ax)
        places, errors = np.arange(len(values)), np.atleast_1d(self.standard_error)
        band = values - 2 * errors, values + 2 * errors
        ax.fill_between(places, *band, color=COLOR, alpha=0.2, lw=0, label="2 standard errors")
        ax.plot(places, values, color=COLOR, linewidth=0.8, label="estimate")
        ax.set(xlabel="number of the weight", ylabel="diagonal of the matrix")
        ax.set_title("Diagonal", loc="left")
        ax.legend(frameon=False, fontsize="small")
        return ax


def estimate_of(
    samples: np.ndarray,
    products: int,
    method: str,
    stopping: Stopping,
    *,
    correlated: bool = False,
    **more: Any,
) -> Estimate:
    """Return the mean of samples along the first axis, with its standard error.

    `correlated` samples each leave out one of the vectors, and share all others. The effect of a
    vector on the other samples then at most doubles the variance of the mean.
    """
    count = len(samples)
    error = np.std(samples, axis=0, ddof=1) / np.sqrt(count) if count > 1 else np.inf
    error = error * np.sqrt(2) if correlated else error
    mean = np.mean(samples, axis=0)
    if not np.ndim(mean):
        mean, error = float(mean), float(error)
    converged = bool(np.linalg.norm(error) <= stopping.allowed(mean))
    return Estimate(mean, error, products, converged, method, count - 1, **more)
