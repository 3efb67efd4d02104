"""Fits of a model with named parameters to data, by least squares."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special
import tensorflow as tf

from hvp._derivatives.exact import exact_functions
from hvp._errors import (
    ConvergenceWarning,
    HvpError,
    InvalidDataError,
    InvalidLossError,
    NonFiniteError,
    SecondDerivativeError,
)
from hvp._minimize.newton_cg import NewtonCG
from hvp._minimize.profile import Profile
from hvp._operators.hessian import HessianOperator
from hvp._operators.jacobian import JacobianOperator
from hvp._runtime.arguments import check_count, check_number
from hvp._runtime.figures import OTHER, pyplot
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.user_warning import warn

# Newton steps at the end, which make the minimum as exact as rounding allows.
_POLISHING = 4
# Steps of Newton's method end at this gradient, in units in which the Hessian is about one.
_GTOL = 1e-7
# Newton steps are not taken where a scaled eigenvalue of the Hessian is smaller.
_SINGULAR = 1e-12
# So often a search goes on from a saddle, after a step of this length.
_SADDLES, _DOWN = 3, 0.01
# What is nearer to a bound is at the bound: this part of what changes residuals by their size.
_NEAR = 1e-6
# A parameter is not determined if the rest of a column that others do not explain is smaller.
_UNDETERMINED = 1e-11
# A measurement does not depend on a parameter if a change by the parameter's size changes it by a
# smaller part.
_IDLE = 1e-15
# How much smaller a chi-square of a profile is, in units of the variance, if a fit is not the best.
_BETTER = 0.01
# A chi-square that is less likely than this is remarked on.
_UNLIKELY = 1e-6


@dataclass(eq=False, repr=False)
class FitProblem:
    """A model with parameters of which some are free, and the loss of its predictions.

    The loss is half the sum of the squares of the residuals `(model(x, **parameters) - y) / sigma`,
    or `loss(predictions, y)`. `tied` parameters are functions of the dict of the others, and
    `bounds` are pairs by name.
    """

    model: Callable[..., Any]
    start: Mapping[str, np.ndarray]
    x: Any
    y: tf.Tensor
    sigma: tf.Tensor
    estimates: bool
    loss: Callable[..., Any] | None
    bounds: Mapping[str, Any]
    fixed: Collection[str]
    tied: Mapping[str, Callable[..., Any]]
    maxiter: int

    def __post_init__(self) -> None:
        self.free = [name for name in self.start if name not in self.fixed]
        self.held = {name: tf.Variable(self.start[name], trainable=False) for name in self.fixed}
        sizes = [self.start[name].size for name in self.free]
        self._ends = np.cumsum([0, *sizes])
        ends = dict.fromkeys(self.start, (-np.inf, np.inf)) | dict(self.bounds)
        self.lower, self.upper = (
            self.flat({n: pair[i] for n, pair in ends.items()}) for i in (0, 1)
        )
        self.vector = tf.Variable(self.flat(self.start), trainable=True)
        self.residuals = tf.function(self._residuals, autograph=False)
        self._jacobian: JacobianOperator | None = None
        self._hessian: HessianOperator | None = None
        self._newton: tuple[NewtonCG, tf.Variable, tf.Variable] | None = None

    def without(self, name: str) -> FitProblem:
        """Return the problem with one more parameter that is not free."""
        bounds = {n: pair for n, pair in self.bounds.items() if n != name}
        return dataclasses.replace(self, bounds=bounds, fixed=[*self.fixed, name])

    @property
    def names(self) -> list[str]:
        """The names of the free entries, such as ``"a"`` or ``"b[0]"``."""
        return [entry for name in self.free for entry in _entries(name, self.start[name].shape)]

    def flat(self, values: Mapping[str, Any]) -> np.ndarray:
        """Return the free entries of named values as a vector."""
        parts = [np.ravel(np.broadcast_to(values[n], self.start[n].shape)) for n in self.free]
        return np.concatenate([np.zeros(0), *parts])

    def named(self, vector: Any) -> dict[str, Any]:
        """Return all parameters, by name, as tensors."""
        values: dict[str, Any] = {name: tf.identity(v) for name, v in self.held.items()}
        for name, begin, end in zip(self.free, self._ends, self._ends[1:]):
            values[name] = tf.reshape(vector[begin:end], self.start[name].shape)
        values = {name: values[name] for name in self.start}
        for name, function in self.tied.items():
            values[name] = tf.convert_to_tensor(function(values), tf.float64)
        return values

    @property
    def what(self) -> str:
        """What `chi_square` is."""
        if self.loss is not None:
            return "twice the loss"
        return "sum of squares" if self.estimates else "chi-square"

    def predict(self, x: Any, vector: Any) -> tf.Tensor:
        """Return what the model says of inputs."""
        with exact_functions():
            predicted = _converted(self.model(x, **self.named(vector)), "the model")
        if predicted.dtype.is_complex:
            raise InvalidDataError(
                "the model returns complex numbers",
                "real predictions",
                "return real and imaginary parts as two columns: "
                "tf.stack([tf.math.real(z), tf.math.imag(z)], axis=-1)",
            )
        return tf.cast(predicted, tf.float64)

    def _residuals(self) -> tf.Tensor:
        return self._residuals_of(self.vector)

    def _residuals_of(self, vector: Any) -> tf.Tensor:
        predicted = self.predict(self.x, vector)
        if not predicted.shape.is_compatible_with(self.y.shape):
            if self.loss is not None:  # such as the logits of classes
                return tf.zeros([0], tf.float64)
            raise InvalidDataError(
                f"the model returns a tensor of shape {predicted.shape}, and y has {self.y.shape}",
                "predictions that are shaped like y",
            )
        return tf.reshape((predicted - self.y) / self.sigma, [-1])

    def value(self, vector: Any) -> tf.Tensor:
        """Return the loss at values of the free entries."""
        if self.loss is None:
            return tf.reduce_sum(self._residuals_of(vector) ** 2) / 2
        with exact_functions():
            value = self.loss(self.predict(self.x, vector), self.y)
        return tf.cast(_converted(value, "the loss"), tf.float64)

    def value_at(self, vector: np.ndarray) -> float:
        """Return the loss at values of the free entries."""
        if self.loss is None:
            residuals = self.residuals_at(vector)
            return float(residuals @ residuals) / 2
        return float(self.value(tf.constant(vector)))

    def residuals_at(self, vector: np.ndarray) -> np.ndarray:
        """Return the residuals at values of the free entries."""
        self.vector.assign(vector)
        return self.residuals().numpy()

    def jacobian_at(self, vector: np.ndarray) -> np.ndarray:
        """Return the exact Jacobian of the residuals, of shape `(m, n)`."""
        self.vector.assign(vector)
        if self._jacobian is None:
            self._jacobian = JacobianOperator(self.residuals, self.vector, on_stale="ignore")
        else:
            self._jacobian.refresh()
        return self._jacobian.to_dense(max_size=2**20)

    def curvature_at(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the gradient and the exact Hessian of the loss."""
        self.vector.assign(vector)
        if self._hessian is None:
            self._hessian = HessianOperator(
                lambda: self.value(self.vector), self.vector, on_stale="ignore"
            )
        else:
            self._hessian.refresh()
        return self._hessian.gradient, self._hessian.to_dense()

    def rows_at(
        self, vector: np.ndarray, movable: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return the gradient in some entries, and `R` such that `R.T @ R` is the matrix in them.

        The matrix is that of Gauss and Newton for least squares, and else the Hessian without its
        negative eigenvalues. Whether it has none of these is returned, too.
        """
        if self.loss is None:
            rows = self.jacobian_at(vector)[:, movable]
            return self.residuals_at(vector) @ rows, rows, True
        gradient, hessian = self.curvature_at(vector)
        matrix = hessian[np.ix_(movable, movable)]
        units = np.sqrt(np.abs(matrix.diagonal()))
        units[units == 0] = 1
        values, vectors = np.linalg.eigh(matrix / np.outer(units, units))
        known = np.where(values > _SINGULAR * values[-1], values, 0)
        rows = np.sqrt(known)[:, np.newaxis] * vectors.T * units
        return gradient[movable], rows, values[0] > -math.sqrt(_SINGULAR) * values[-1]

    def minimized(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool, str]:
        """Return the best entries, which are at a bound (-1 or 1), and whether and why it ended."""
        if not len(at):
            return at, np.zeros(0), True, "no parameter is free"
        search = self._least_squares if self.loss is None else self._likelihood
        for _ in range(_SADDLES):
            at, active, success, message = search(at)
            at = np.where(active < 0, self.lower, np.where(active > 0, self.upper, at))
            if not success or active.all():
                return at, active, success, message
            polished, down = self._polished(at, active == 0)
            if down is None:
                inside = ((self.lower <= polished) & (polished <= self.upper)).all()
                return (polished if inside else at), active, True, message
            both = [np.clip(at + step, self.lower, self.upper) for step in (down, -down)]
            at = min(both, key=self.value_at)
        return at, active, False, "the search came to saddle points: the Hessian is indefinite"

    def _least_squares(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool, str]:
        # In units in which the residuals and columns of the Jacobian are of size one at the start:
        # scipy compares gradients, and distances from bounds, with absolute numbers.
        size = np.linalg.norm(self.residuals_at(at)) or 1.0
        units = np.linalg.norm(self.jacobian_at(at), axis=0)
        units = size / np.where(units > 0, units, size)
        lower, upper = self.lower / units, self.upper / units
        options: dict[str, Any] = {"bounds": (lower, upper), "x_scale": "jac"}
        options |= {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14, "max_nfev": self.maxiter}
        search = functools.partial(
            scipy.optimize.least_squares,
            lambda z: self.residuals_at(z * units) / size,
            np.clip(at / units, lower, upper),
            lambda z: self.jacobian_at(z * units) * (units / size),
        )
        with np.errstate(over="ignore", invalid="ignore"):  # of steps that are then rejected
            found = search(**options)
            is_free = not (np.isfinite(lower) | np.isfinite(upper)).any()
            if found.status <= 0 and is_free and len(found.fun) >= len(at):
                # From some starts MINPACK, whose steps differ, comes to a minimum.
                other = search(**{**options, "method": "lm"})
                found = other if other.status > 0 and other.cost < found.cost else found
        z, slope = found.x, found.grad
        near = _NEAR * np.linalg.norm(found.fun) + 4 * np.finfo(np.float64).eps * np.abs(z)
        active = np.where((z - lower <= near) & (slope >= 0), -1, 0)
        active = np.where((upper - z <= near) & (slope <= 0), 1, active)
        at = np.clip(z * units, self.lower, self.upper)
        return at, active, found.status > 0, found.message

    def _likelihood(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool, str]:
        """Minimize by Newton's method, in units in which the Hessian has ones on its diagonal."""
        _, hessian = self.curvature_at(at)
        units = np.sqrt(np.abs(hessian.diagonal()))
        units = 1 / np.where(units > 0, units, 1)
        if self._newton is None:
            scale, vector = tf.Variable(units, trainable=False), tf.Variable(at / units)
            bounds = self.lower / units, self.upper / units
            newton = NewtonCG(lambda: self.value(vector * scale), vector, bounds=bounds)
            self._newton = newton, vector, scale
        newton, vector, scale = self._newton
        units = scale.numpy()
        vector.assign(at / units)
        result = newton.minimize(gtol=_GTOL, maxiter=self.maxiter)
        at = np.clip(vector.numpy() * units, self.lower, self.upper)
        near = 4 * np.finfo(np.float64).eps * np.abs(at)
        active = np.where(at - self.lower <= near, -1, np.where(self.upper - at <= near, 1, 0))
        return at, active, bool(result.success), result.message

    def _polished(
        self, vector: np.ndarray, movable: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Take Newton steps with the exact Hessian, as long as they make the gradient smaller.

        At a saddle, a small step along its most negative eigenvector is returned, too.
        """
        best, following, scale = vector, vector, None
        for _ in range(_POLISHING):
            try:
                gradient, matrix = self.curvature_at(following)
            except SecondDerivativeError:
                if self.loss is not None:
                    raise
                return best, None  # least squares need first derivatives alone
            gradient, matrix = gradient[movable], matrix[np.ix_(movable, movable)]
            units = np.sqrt(np.abs(matrix.diagonal()))
            if not units.all():
                break
            size = np.linalg.norm(gradient / units)
            values, vectors = np.linalg.eigh(matrix / np.outer(units, units))
            if scale is None and values[0] < -math.sqrt(_SINGULAR) * abs(values[-1]):
                down = np.zeros_like(vector)
                down[movable] = _DOWN * vectors[:, 0] / units
                return best, down
            if (scale is not None and size >= scale) or values[0] <= _SINGULAR:
                break
            best, scale, following = following, size, following.copy()
            following[movable] -= vectors @ (vectors.T @ (gradient / units) / values) / units
        return best, None


def _entries(name: str, shape: Sequence[int]) -> list[str]:
    if not shape:
        return [name]
    return [f"{name}[{', '.join(map(str, index))}]" for index in np.ndindex(*shape)]


@dataclass(frozen=True, repr=False)
class FitResult:
    """The best parameters, and how well the data determine them.

    Attributes
    ----------
    parameters : dict of str to float or ndarray
        All parameters, also those that are fixed or tied.
    errors : dict of str to float or ndarray
        Standard errors of the free parameters: infinite for what the data do not determine, and
        zero for entries at a bound.
    names : list of str
        The free entries, such as ``"b[0]"``, in the order of `covariance`.
    covariance : ndarray
        The covariance matrix of the free entries, of shape `(n, n)`.
    chi_square : float
        The sum of the squared residuals, in units of `sigma`; twice the loss, if one was passed.
    degrees_of_freedom : int
        The number of measurements less that of the entries that are free and not at a bound.
    residuals : ndarray
        The differences of the model from the data, in units of `sigma`.
    distance : float
        The estimated distance to the minimum: by how much half of `chi_square` would fall if it
        were the parabola that its derivatives say. At a minimum this is a rounding error.
    notes : list of str
        What one should know: bounds that are active, entries that are not determined.
    success : bool
        Whether the minimum was found.
    message : str
        Why the search ended.
    """

    parameters: dict[str, Any]
    errors: dict[str, Any]
    names: list[str]
    covariance: np.ndarray
    chi_square: float
    degrees_of_freedom: int
    residuals: np.ndarray
    distance: float
    notes: list[str]
    success: bool
    message: str
    _problem: FitProblem
    _variance: float

    @property
    def correlation(self) -> np.ndarray:
        """The correlation matrix of the free entries."""
        errors = np.sqrt(self.covariance.diagonal())
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.covariance / np.outer(errors, errors)

    @property
    def vector(self) -> np.ndarray:
        """The free entries, of shape `(n,)`."""
        return self._problem.flat(self.parameters)

    @Uninterrupted()
    def predict(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the model's predictions, and their standard errors, shaped alike.

        Parameters
        ----------
        x : array_like or nest
            Inputs of the model, as in the data of the fit.

        Notes
        -----
        The standard error is infinite for predictions that depend on a parameter which the data do
        not determine.
        """
        problem, x = self._problem, _inputs(x)
        if not len(self.vector):
            value = problem.predict(x, tf.constant(self.vector)).numpy()
            return value, np.zeros_like(value)
        problem.vector.assign(self.vector)
        J = JacobianOperator(lambda: problem.predict(x, problem.vector), problem.vector)
        with J:
            value, rows = J.value.numpy(), J.to_dense(max_size=2**20)
        is_known = ~np.isinf(self.covariance.diagonal())
        known = self.covariance[np.ix_(is_known, is_known)]
        variance = np.einsum("ij,jk,ik->i", rows[:, is_known], known, rows[:, is_known])
        variance[rows[:, ~is_known].any(axis=1)] = np.inf
        return value, np.sqrt(variance).reshape(value.shape)

    @Uninterrupted()
    def profile(self, name: str, *, points: int = 13, width: float = 3.0) -> Profile:
        """Minimize over all other parameters, with one of them fixed at several values.

        Parameters
        ----------
        name : str
            A free parameter that is a number.
        points : int, optional
            How many values.
        width : float, optional
            The values reach so many standard errors to both sides.

        Returns
        -------
        Profile
            The values, and by how much chi-square is larger there than at the best fit, in units of
            the variance of the measurements: ``values, increase = result.profile(name)``. A
            parabola with the height one at one standard error says that the errors are what they
            claim; `interval` returns ends that need not be symmetric, and `plot` draws both. No
            value is beyond a bound of the parameter. Where no minimum was found the increase is
            NaN.
        """
        if name not in self._problem.free or np.ndim(self.parameters[name]):
            numbers = [n for n in self._problem.free if not np.ndim(self.parameters[n])]
            raise HvpError(
                f"there is no free parameter {name!r} that is a number",
                f"one of {', '.join(map(repr, numbers))}",
            )
        points = check_count(points, "points")
        width = check_number(width, "width", positive=True)
        best, error = self.parameters[name], self.errors[name]
        if not 0 < error < np.inf:
            raise HvpError(
                f"the standard error of {name!r} is {error}",
                "a parameter that the data determine, and that is not at a bound",
            )
        values = best + error * width * (np.linspace(-1, 1, points) if points > 1 else np.zeros(1))
        low, high = self._problem.bounds.get(name, (-np.inf, np.inf))
        values = np.clip(values, low, high)
        increase = np.empty(points)
        middle = int(np.argmin(np.abs(values - best)))
        problem = self._problem.without(name)
        for places in (range(middle, points), range(middle - 1, -1, -1)):
            at = problem.flat(self.parameters)
            for place in places:
                problem.held[name].assign(values[place])
                at, _, success, _ = problem.minimized(at)
                increase[place] = 2 * problem.value_at(at) if success else np.nan
        increase = (increase - self.chi_square) / self._variance
        lowest = int(np.argmin(np.where(np.isnan(increase), np.inf, increase)))
        if increase[lowest] < -_BETTER:
            warn(
                f"hvp.fit: chi-square is smaller by {-increase[lowest]:.3g} with {name} = "
                f"{values[lowest]:.6g} than at the fit, which is not the best minimum; fit again "
                "from there",
                ConvergenceWarning,
            )
        return Profile(name, values, increase, float(best), float(error), (low, high))

    def plot(self, axes: Any = None) -> Any:
        """Draw the data, the model with its band of one standard error, and the residuals.

        It takes data with one input, and needs matplotlib. Returns the two axes.
        """
        plt, problem = pyplot(), self._problem
        x, y = np.asarray(problem.x), np.asarray(problem.y)
        if x.ndim != 1 or y.shape != x.shape:
            raise HvpError("the data have several inputs", "one input and one value for each")
        if axes is None:
            _, axes = plt.subplots(
                2, 1, sharex=True, layout="constrained", height_ratios=[3, 1], figsize=(5, 4.2)
            )
        dense = np.linspace(x.min(), x.max(), 200)
        value, band = self.predict(dense)
        sigma: Any = None
        if problem.loss is None:
            sigma = np.broadcast_to(problem.sigma, y.shape) * math.sqrt(self._variance)
        axes[0].errorbar(x, y, sigma, fmt="o", ms=3, color="#64748b", lw=1, label="data")
        axes[0].plot(dense, value, color=OTHER, label="model, with one standard error")
        axes[0].fill_between(dense, value - band, value + band, color=OTHER, alpha=0.25, lw=0)
        axes[0].legend(frameon=False, fontsize="small")
        axes[1].axhline(0, color=OTHER, lw=1)
        axes[1].plot(x, -self.residuals / math.sqrt(self._variance), "o", ms=3, color="#64748b")
        axes[0].set(ylabel="value")
        axes[0].set_title(
            f"{problem.what.capitalize()} {self.chi_square:.4g}, "
            f"{self.degrees_of_freedom} degrees of freedom",
            loc="left",
            fontsize="medium",
        )
        axes[1].set(xlabel="input", ylabel="residual / error")
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
        return axes

    def __repr__(self) -> str:
        errors = np.sqrt(self.covariance.diagonal())
        width = max([0, *map(len, self.names)])
        lines = [
            f"  {name:<{width}}  {value:14.7g} +- {error:.2g}"
            for name, value, error in zip(self.names, self.vector, errors)
        ]
        known = ", ".join(
            f"{name} = {self.parameters[name]}"
            for name in self.parameters
            if name not in self._problem.free
        )
        head = "fit" if self.success else f"fit that did not converge ({self.message})"
        degrees = f"{self.degrees_of_freedom} degrees of freedom"
        lines.insert(0, f"{head}: {self._problem.what} {self.chi_square:.6g}, {degrees}")
        lines += [f"  fixed or tied: {known}"] if known else []
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _inputs(x: Any) -> Any:
    """Return inputs of a model, an array or a nest of arrays, in float64; a list is an array."""
    return _as_float64(x) if isinstance(x, list) else tf.nest.map_structure(_as_float64, x)


def _as_float64(x: Any) -> tf.Tensor:
    masked = np.ma.count_masked(x) if np.ma.isMaskedArray(x) else 0
    if masked:
        raise InvalidDataError(
            f"{masked} of {np.size(x)} entries of the data are masked",
            "arrays without masked entries",
            "leave these measurements out: x[~y.mask], y.compressed()",
        )
    if np.asarray(x).dtype.kind not in "fiub":
        raise InvalidDataError(
            f"the data are of type {np.asarray(x).dtype}",
            "real numbers",
            "fit real and imaginary parts as two columns",
        )
    return tf.constant(np.asarray(x, np.float64))


@Uninterrupted()
def fit(
    model: Callable[..., Any],
    parameters: Mapping[str, Any],
    data: tuple[Any, Any],
    *,
    sigma: Any = None,
    loss: Callable[..., Any] | None = None,
    bounds: Mapping[str, tuple[Any, Any]] | None = None,
    fixed: Collection[str] = (),
    tied: Mapping[str, Callable[..., Any]] | None = None,
    maxiter: int = 1000,
) -> FitResult:
    """Fit a model with named parameters to data, by least squares or maximum likelihood.

    Derivatives are exact, so that no steps have to be chosen, and parameters of any size are scaled
    by what a change of them does to the loss.

    Parameters
    ----------
    model : callable
        Takes the inputs `x` and the parameters by name, as float64 tensors, and returns the
        predictions, shaped like `y`; it is made of TensorFlow operations.
    parameters : dict of str to float or array_like
        The parameters, with the values at the start.
    data : tuple
        The pair ``(x, y)``: the inputs, an array or nest of arrays, and the measurements.
    sigma : float or array_like, optional
        The standard deviations of the measurements. If they are not given, all are taken to have
        the same, which is estimated from the residuals.
    loss : callable, optional
        Takes the predictions and `y`, and returns the negative log-likelihood, summed over the
        measurements, in place of half the sum of squared residuals. A Poisson distribution has
        ``lambda mean, y: tf.reduce_sum(mean - y * tf.math.log(mean))``.
    bounds : dict of str to pair, optional
        Lower and upper bounds of parameters by name, numbers or arrays; they may be infinite.
    fixed : collection of str, optional
        Names of parameters that stay at the start.
    tied : dict of str to callable, optional
        Further parameters: functions of the dict of the others.
    maxiter : int, optional
        The largest number of points that one search evaluates the model at. Where a search of least
        squares without bounds has not ended then, another method searches as long.

    Returns
    -------
    FitResult

    Raises
    ------
    InvalidDataError
        If the data are not a pair, or the predictions do not have the shape of `y`.
    InvalidLossError
        If the loss does not return a scalar.
    NonFiniteError
        If the residuals or the loss are not finite at the start.
    HvpError
        If another argument is invalid.

    Notes
    -----
    scipy's trust-region method for least squares finds the minimum, from exact Jacobians; a few
    Newton steps with the exact Hessian then make it as accurate as rounding allows. Where that has
    a negative eigenvalue, the search goes on along its eigenvector, at most twice. The covariance
    is the inverse of the Gauss-Newton matrix, as that of `scipy.optimize.curve_fit`, from the
    singular values of the scaled Jacobian. A `loss` is minimized by `NewtonCG`, in units in which
    its Hessian has ones on the diagonal at the start, and the same Newton steps. The covariance is
    then the inverse of its Hessian, the observed information.

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> x = np.linspace(0, 4, 50)
    >>> y = 2.5 * np.exp(-1.3 * x) + 0.01 * np.cos(40 * x)
    >>> decay = lambda x, height, rate: height * tf.exp(-rate * x)
    >>> result = hvp.fit(decay, {"height": 1.0, "rate": 1.0}, (x, y), sigma=0.01)
    >>> round(result.parameters["rate"], 2), result.degrees_of_freedom
    (1.3, 48)
    """
    fixed = (fixed,) if isinstance(fixed, str) else fixed
    start, y, sigmas = _checked(model, parameters, data, sigma, loss, bounds, fixed, tied)
    problem = FitProblem(
        model,
        start,
        _inputs(data[0]),
        y,
        sigma=sigmas,
        estimates=sigma is None and loss is None,
        loss=loss,
        bounds=bounds or {},
        fixed=fixed,
        tied=dict(tied or {}),
        maxiter=check_count(maxiter, "maxiter"),
    )
    at = problem.flat(start)
    pairs = zip(problem.names, problem.lower, at, problem.upper)
    outside = [
        f"{name} = {value:g} is outside of its bounds {low:g} and {high:g}"
        for name, low, value, high in pairs
        if not low <= value <= high
    ]
    if outside:
        raise HvpError(f"at the start, {', '.join(outside)}", "a start between them")
    try:
        residuals = problem.residuals_at(at)
    except NotImplementedError as error:  # a tensor of a graph that meets a function of NumPy's
        raise InvalidLossError(
            f"the model cannot be traced: {error}",
            "a model of TensorFlow's functions",
            "if it calls NumPy, use tf.exp in place of np.exp, and so on",
        ) from error
    wrong = ~np.isfinite(residuals)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise NonFiniteError(
            f"{int(wrong.sum())} of {len(wrong)} residuals are not finite at the start, the first "
            f"that of measurement {first}",
            "a start at which all are",
            "try a start nearer to the data, or bounds",
        )
    if loss is not None:
        value = problem.value(tf.constant(at))
        if value.shape.rank:
            raise InvalidLossError(
                f"the loss returns a tensor of shape {value.shape}",
                "a scalar: the sum over the measurements",
                "use tf.reduce_sum",
            )
        if not np.isfinite(value):
            raise NonFiniteError("the loss is not finite at the start", "values at which it is")
    return _result(problem, *problem.minimized(at))


def _converted(value: Any, what: str) -> tf.Tensor:
    """Return what a function of the caller returned as a tensor of numbers."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        tensor = tf.constant("")
    if tensor.dtype == tf.string:
        raise InvalidLossError(f"{what} returns {type(value).__name__}", "a tensor of numbers")
    return tensor


def _checked(
    model: Any,
    parameters: Any,
    data: Any,
    sigma: Any,
    loss: Any,
    bounds: Any,
    fixed: Any,
    tied: Any,
) -> tuple[dict[str, np.ndarray], tf.Tensor, tf.Tensor]:
    """Check the arguments of a fit; return the start, `y` and `sigma`."""
    if not callable(model):
        raise HvpError(f"the model is {type(model).__name__}", "a function of x and the parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        raise HvpError(
            f"the parameters are {type(parameters).__name__}",
            "a dict of names and values at the start",
            "pass {'height': 1.0, 'rate': 0.5}",
        )
    if loss is not None and not callable(loss):
        raise HvpError(f"the loss is {loss!r}", "a function of the predictions and y")
    if loss is not None and sigma is not None:
        raise HvpError(
            "both sigma and a loss are given", "one of them", "let the loss contain the errors"
        )
    try:
        start = {str(name): np.array(value, np.float64) for name, value in parameters.items()}
    except (TypeError, ValueError) as error:
        raise HvpError(f"the parameters are {parameters!r} ({error})", "real numbers") from error
    if not all(np.isfinite(value).all() for value in start.values()):
        raise HvpError("a parameter is not finite at the start", "finite numbers")
    if not isinstance(bounds or {}, Mapping):
        raise HvpError(
            f"bounds is {type(bounds).__name__}", "a dict of pairs", "pass {'rate': (0.0, 9.0)}"
        )
    if not isinstance(tied or {}, Mapping):
        raise HvpError(f"tied is {type(tied).__name__}", "a dict of names and functions")
    if isinstance(fixed, Mapping) or not isinstance(fixed, Collection):
        raise HvpError(
            f"fixed is {fixed!r}",
            "a list of names of parameters, which keep their values at the start",
            f"pass fixed={list(fixed)}" if isinstance(fixed, Mapping) else "pass fixed=['rate']",
        )
    for what, names in (("bounds", bounds or {}), ("fixed", fixed)):
        unknown = [name for name in names if name not in list(start)]
        if unknown:
            raise HvpError(
                f"{what} names {', '.join(map(repr, unknown))}",
                "names of parameters: " + ", ".join(map(repr, start)),
            )
    for name, pair in (bounds or {}).items():
        try:
            low, high = (np.asarray(end, np.float64) for end in pair)
            in_order = bool((low <= high).all())
        except (TypeError, ValueError):
            in_order = False
        if not in_order:
            raise HvpError(
                f"bounds[{name!r}] is {pair!r}",
                "a pair (lower, upper) of numbers in this order, which may be infinite",
                "pass float('inf') if there is no upper bound",
            )
        if (low == high).any():
            raise HvpError(
                f"bounds[{name!r}] is {pair!r}, with room for a single value",
                "bounds that are apart",
                f"pass fixed=[{name!r}], and the value at the start",
            )
    if not all(map(callable, (tied or {}).values())):
        raise HvpError(
            "a tied parameter is not a function",
            "functions of the dict of the other parameters, such as lambda p: 2 * p['a']",
        )
    _check_names(model, [*start, *(tied or {})])
    twice = [name for name in tied or {} if name in start]
    if twice:
        raise HvpError(
            f"{', '.join(map(repr, twice))} is tied, and has a value at the start as well",
            "one of both",
        )
    if not (isinstance(data, (tuple, list)) and len(data) == 2):
        raise InvalidDataError(f"the data are {type(data).__name__}", "a pair (x, y)")
    y = _as_float64(data[1])
    sigmas = _as_float64(1.0 if sigma is None else sigma)
    for what, wrong in (
        ("entries of y are not finite", ~np.isfinite(y)),
        ("entries of sigma are not finite and positive", ~(np.isfinite(sigmas) & (sigmas > 0))),
    ):
        if np.any(wrong):
            count, first = int(np.sum(wrong)), int(np.argmax(np.ravel(wrong)))
            raise InvalidDataError(f"{count} {what}, the first at index {first}", "real numbers")
    if not sigmas.shape.rank or sigmas.shape == y.shape:
        return start, y, sigmas
    raise InvalidDataError(
        f"sigma has the shape {sigmas.shape}, and y has {y.shape}", "a number, or the shape of y"
    )


def _check_names(model: Any, names: Sequence[str]) -> None:
    """Refuse parameters that the model does not take, if its signature tells."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, **dict.fromkeys(names))
    except TypeError as error:
        raise HvpError(
            f"the model takes {signature}, and is called with x and {', '.join(names)} ({error})",
            "a model of x and of the parameters by their names",
        ) from error


def _result(
    problem: FitProblem,
    at: np.ndarray,
    active: np.ndarray,
    success: bool,
    message: str,
) -> FitResult:
    """Put a result together, with the covariance of the entries that are not at a bound."""
    residuals, names = problem.residuals_at(at), problem.names
    movable = np.flatnonzero(active == 0)
    gradient, rows, is_convex = np.zeros(0), np.zeros((len(residuals), 0)), True
    if len(movable):
        gradient, rows, is_convex = problem.rows_at(at, movable)
    covariance, free = _inverse_gram(rows)
    moved = gradient[~free]
    distance = float(moved @ covariance[np.ix_(~free, ~free)] @ moved) / 2
    degrees = math.prod(problem.y.shape) - len(movable)
    chi_square = 2 * problem.value_at(at)
    variance = chi_square / degrees if problem.estimates and degrees > 0 else 1.0
    whole = np.zeros((len(names), len(names)))
    whole[np.ix_(movable, movable)] = covariance * variance
    notes = [f"{names[i]} is at its bound" for i in np.flatnonzero(active)]
    sizes = np.linalg.norm(rows, axis=0) * np.maximum(np.abs(at[movable]), 1)
    idle = sizes <= _IDLE * np.linalg.norm(problem.y / problem.sigma)
    if success and idle.any():
        lost = ", ".join(names[i] for i in movable[idle])
        success, message = False, f"no measurement depends on {lost} at these values"
    if success:
        notes += [f"the data do not determine {names[movable[i]]}" for i in np.flatnonzero(free)]
    else:
        notes.append("errors mean little away from a minimum; try other start values, or bounds")
    if not is_convex:
        notes.append("the Hessian has negative eigenvalues: this is no minimum")
    known = problem.loss is None and not problem.estimates
    if known and scipy.special.chdtrc(max(degrees, 1), chi_square) < _UNLIKELY:
        notes.append(
            f"chi-square is {chi_square:.3g} with {degrees} degrees of freedom: this is not the "
            "best minimum, the model does not describe the data, or sigma is too small"
        )
    if problem.estimates and degrees <= 0:
        notes.append("there are no more data than parameters, so that errors cannot be estimated")
        whole = np.where(np.isinf(whole), np.inf, np.nan)
    values = {n: _number(value.numpy()) for n, value in problem.named(tf.constant(at)).items()}
    errors = np.sqrt(whole.diagonal())
    begin, by_name = 0, {}
    for name in problem.free:
        shape = problem.start[name].shape
        size = math.prod(shape)
        by_name[name] = _number(errors[begin : begin + size].reshape(shape))
        begin += size
    return FitResult(
        values, by_name, names, whole, chi_square, degrees, residuals, distance, notes,
        bool(success and is_convex), message, problem, variance,
    )  # fmt: skip


def _number(array: np.ndarray) -> Any:
    return array if array.ndim else float(array)


def _inverse_gram(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inverse of `rows.T @ rows`, and which entries it has no finite variance for."""
    units = np.linalg.norm(rows, axis=0)
    units[units == 0] = 1
    _, values, vectors = np.linalg.svd(rows / units, full_matrices=True)
    values = np.pad(values, (0, rows.shape[1] - len(values)))
    known = values > _UNDETERMINED * values.max(initial=0)
    free = (np.abs(vectors[~known]) > math.sqrt(_UNDETERMINED)).any(axis=0)
    half = vectors[known] / values[known, np.newaxis] / units
    inverse = half.T @ half
    inverse[free], inverse[:, free] = np.nan, np.nan
    inverse[free, free] = np.inf
    return inverse, free
