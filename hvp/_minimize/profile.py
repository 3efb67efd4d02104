"""How the sum of squares, or the likelihood, of a fit grows along one parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.interpolate
import scipy.special

from hvp._errors import HvpError
from hvp._runtime.arguments import check_number
from hvp._runtime.figures import COLOR, OTHER, axes


@dataclass(frozen=True)
class Profile:
    """How much larger chi-square is where one parameter is fixed, and all others follow.

    It unpacks into `values` and `increase`.

    Attributes
    ----------
    name : str
        The parameter.
    values, increase : ndarray
        Its values, ascending, and the increases, in units of the variance of the measurements;
        NaN where no minimum was found.
    best, error : float
        The value of the fit, and its standard error.
    bounds : tuple of two floats
        Between which the parameter may lie.
    """

    name: str
    values: np.ndarray
    increase: np.ndarray
    best: float
    error: float
    bounds: tuple[float, float]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Unpack into values and increases."""
        yield self.values
        yield self.increase

    def interval(self, level: float = 0.6827) -> tuple[float, float]:
        """Return the ends of a confidence interval, which need not be symmetric.

        They are where the increase is the quantile of the chi-square distribution with one degree
        of freedom: one for the default. A bound that comes before is an end. A variance of the
        measurements that was estimated is taken as known.

        Parameters
        ----------
        level : float, optional
            The probability that the interval covers the true value, for many measurements.

        Returns
        -------
        tuple of two floats

        Raises
        ------
        HvpError
            If the profile does not reach so far, or does not rise to both sides of the fit.
        """
        level = check_number(level, "level", positive=True)
        if level >= 1:
            raise HvpError(f"the argument level is {level}", "a probability below one")
        far = float(scipy.special.ndtri((1 + level) / 2))
        # It is a line where the increase is a parabola.
        values, places = np.unique(self.values, return_index=True)
        if len(values) < 2:
            raise HvpError(
                f"the profile of {self.name!r} has one value",
                "values on both sides of the fit",
                f"profile({self.name!r}), which has 13",
            )
        root = np.sign(values - self.best) * np.sqrt(np.maximum(self.increase[places], 0))
        rising = np.diff(root) > 0
        if not rising.all():  # nor is it where there are NaN
            place = int(np.argmin(rising))
            raise HvpError(
                f"the profile of {self.name!r} has no increase, or a smaller one further from the "
                f"fit, between {values[place]:.6g} and {values[place + 1]:.6g}",
                "one minimum, which was found everywhere",
                "see plot(), and fit again from where chi-square is smallest",
            )
        inverse = scipy.interpolate.PchipInterpolator(root, values)
        low, high = (self._end(side * far, root, values, inverse) for side in (-1, 1))
        return low, high

    def _end(self, at: float, root: np.ndarray, values: np.ndarray, inverse: Any) -> float:
        """Return the value at which the root of the increase is `at`."""
        last, bound = (0, self.bounds[0]) if at < 0 else (-1, self.bounds[1])
        if abs(root[last]) >= abs(at):
            return float(inverse(at))
        if values[last] == bound:
            return float(bound)
        width = math.ceil(1.5 * abs(values[last] - self.best) / self.error * abs(at / root[last]))
        raise HvpError(
            f"the profile of {self.name!r} reaches an increase of {root[last] ** 2:.3g} at "
            f"{values[last]:.6g}, and the interval ends where it is {at**2:.3g}",
            "a profile that is wide enough",
            f"profile({self.name!r}, width={width})",
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the increase, and the parabola that the standard error stands for.

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
        ax = axes(ax)
        dense = np.linspace(self.values[0], self.values[-1], 200)
        parabola = ((dense - self.best) / self.error) ** 2
        ax.plot(self.values, self.increase, "o-", ms=3, lw=1.4, color=COLOR, label="profile")
        ax.plot(dense, parabola, "--", lw=1, color=OTHER, label="parabola of the standard error")
        ax.axhline(1, color="0.6", lw=0.8, ls=":", label="68 %")
        top = 1.2 * max(1, np.nanmax(self.increase))  # the parabola may rise far above
        ax.set_ylim(min(0, np.nanmin(self.increase)) - 0.05 * top, top)
        ax.set(xlabel=self.name, ylabel="increase of chi-square")
        ax.set_title(f"Profile of {self.name}", loc="left")
        ax.legend(frameon=False, fontsize="small")
        return ax
