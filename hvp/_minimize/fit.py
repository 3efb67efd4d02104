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
import tensorflow as tf

from hvp._derivatives.exact import exact_functions
from hvp._errors import HvpError, InvalidDataError, NonFiniteError
from hvp._operators.hessian import HessianOperator
from hvp._operators.jacobian import JacobianOperator
from hvp._runtime.arguments import check_count, check_number
from hvp._runtime.interrupts import Uninterrupted

# Newton steps at the end, which make the minimum as exact as rounding allows.
_POLISHING = 4
# Newton steps are not taken where a scaled eigenvalue of the Hessian is smaller.
_SINGULAR = 1e-12
# A parameter is not determined if the rest of a column that others do not explain is smaller.
_UNDETERMINED = 1e-11


class FitProblem:
    """A model with parameters of which some are free, as a vector of residuals.

    The residuals are `(model(x, **parameters) - y) / sigma`. `tied` parameters are functions of the
    dict of the others.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        start: Mapping[str, Any],
        data: tuple[Any, Any],
        sigma: Any,
        fixed: Collection[str],
        tied: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.model, self.tied = model, dict(tied)
        self.x, self.y = data
        self.sigma = sigma
        self.start = {name: np.asarray(value, np.float64) for name, value in start.items()}
        self.free = [name for name in self.start if name not in fixed]
        sizes = [self.start[name].size for name in self.free]
        self._ends = np.cumsum([0, *sizes])
        self.vector = tf.Variable(self.flat(self.start), trainable=True)
        self.residuals = tf.function(self._residuals, autograph=False)
        self._jacobian: JacobianOperator | None = None

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
        values: dict[str, Any] = {n: tf.constant(value) for n, value in self.start.items()}
        for name, begin, end in zip(self.free, self._ends, self._ends[1:]):
            values[name] = tf.reshape(vector[begin:end], self.start[name].shape)
        for name, function in self.tied.items():
            values[name] = tf.convert_to_tensor(function(values), tf.float64)
        return values

    def predict(self, x: Any, vector: Any) -> tf.Tensor:
        """Return what the model says of inputs."""
        with exact_functions():
            predicted = self.model(x, **self.named(vector))
        return tf.cast(tf.convert_to_tensor(predicted), tf.float64)

    def _residuals(self) -> tf.Tensor:
        predicted = self.predict(self.x, self.vector)
        if not predicted.shape.is_compatible_with(self.y.shape):
            raise InvalidDataError(
                f"the model returns a tensor of shape {predicted.shape}, and y has {self.y.shape}",
                "predictions that are shaped like y",
            )
        return tf.reshape((predicted - self.y) / self.sigma, [-1])

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

    def polished(self, vector: np.ndarray, movable: np.ndarray) -> np.ndarray:
        """Take Newton steps with the exact Hessian, as long as they make the gradient smaller."""
        self.vector.assign(vector)
        H = HessianOperator(
            lambda: tf.reduce_sum(self._residuals() ** 2) / 2, self.vector, on_stale="ignore"
        )
        best, scale = vector, None
        with H:
            for _ in range(_POLISHING):
                matrix = H.to_dense()[np.ix_(movable, movable)]
                gradient = H.gradient[movable]
                units = np.sqrt(np.abs(matrix.diagonal()))
                if not units.all():
                    break
                size = np.linalg.norm(gradient / units)
                scaled = matrix / np.outer(units, units)
                if (scale is not None and size >= scale) or np.linalg.eigvalsh(scaled)[
                    0
                ] <= _SINGULAR:
                    break
                best, scale = self.vector.numpy(), size
                step = np.linalg.solve(scaled, gradient / units) / units
                following = best.copy()
                following[movable] -= step
                self.vector.assign(following)
                H.refresh()
        return best


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
        The sum of the squared residuals, in units of `sigma`.
    degrees_of_freedom : int
        The number of measurements less that of the entries that are free and not at a bound.
    residuals : ndarray
        The differences of the model from the data, in units of `sigma`.
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
    notes: list[str]
    success: bool
    message: str
    _problem: FitProblem
    _refit: Callable[..., FitResult]
    _variance: float
    _limits: Mapping[str, Any]

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
        """
        problem, x = self._problem, _inputs(x)
        problem.vector.assign(self.vector)
        J = JacobianOperator(lambda: problem.predict(x, problem.vector), problem.vector)
        with J:
            value, rows = J.value.numpy(), J.to_dense(max_size=2**20)
        variance = np.einsum("ij,jk,ik->i", rows, self.covariance, rows)
        return value, np.sqrt(variance).reshape(value.shape)

    @Uninterrupted()
    def profile(
        self, name: str, *, points: int = 13, width: float = 3.0
    ) -> tuple[np.ndarray, np.ndarray]:
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
        values, increase : ndarray
            The values, and by how much chi-square is larger there than at the best fit, in units of
            the variance of the measurements. A parabola with the height one at one standard error
            says that the errors are what they claim; the ends of a 68 % interval are where the
            increase is one. No value is beyond a bound of the parameter.
        """
        if name not in self._problem.free or np.ndim(self.parameters[name]):
            raise HvpError(f"there is no free parameter {name!r} that is a number", "one of them")
        points = check_count(points, "points")
        width = check_number(width, "width", positive=True)
        best, error = self.parameters[name], self.errors[name]
        if not 0 < error < np.inf:
            raise HvpError(
                f"the standard error of {name!r} is {error}",
                "a parameter that the data determine, and that is not at a bound",
            )
        values = best + error * width * (np.linspace(-1, 1, points) if points > 1 else np.zeros(1))
        values = np.clip(values, *self._limits.get(name, (-np.inf, np.inf)))
        increase = np.empty(points)
        middle = int(np.argmin(np.abs(values - best)))
        for places in (range(middle, points), range(middle - 1, -1, -1)):
            start = dict(self.parameters)
            for place in places:
                found = self._refit(start={**start, name: values[place]}, fixed=name)
                start, increase[place] = dict(found.parameters), found.chi_square
        return values, (increase - self.chi_square) / self._variance

    def plot(self, axes: Any = None) -> Any:
        """Draw the data, the model with its band of one standard error, and the residuals.

        It takes data with one input, and needs matplotlib. Returns the two axes.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise HvpError(
                "matplotlib is not installed", "matplotlib, to draw a fit", "pip install matplotlib"
            ) from error
        problem = self._problem
        x, y = np.asarray(problem.x), np.asarray(problem.y)
        if x.ndim != 1 or y.shape != x.shape:
            raise HvpError("the data have several inputs", "one input and one value for each")
        if axes is None:
            _, axes = plt.subplots(
                2, 1, sharex=True, layout="constrained", height_ratios=[3, 1], figsize=(5, 4.2)
            )
        dense = np.linspace(x.min(), x.max(), 200)
        value, band = self.predict(dense)
        sigma = np.broadcast_to(problem.sigma, y.shape) * math.sqrt(self._variance)
        axes[0].errorbar(x, y, sigma, fmt="o", ms=3, color="#64748b", lw=1)
        axes[0].plot(dense, value, color="#c2410c")
        axes[0].fill_between(dense, value - band, value + band, color="#c2410c", alpha=0.25, lw=0)
        axes[1].axhline(0, color="#c2410c", lw=1)
        axes[1].plot(x, -self.residuals / math.sqrt(self._variance), "o", ms=3, color="#64748b")
        axes[0].set(ylabel="data and model")
        axes[1].set(ylabel="residual / error")
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
        lines.insert(
            0,
            f"{head}: chi-square {self.chi_square:.6g}, "
            f"{self.degrees_of_freedom} degrees of freedom",
        )
        lines += [f"  fixed or tied: {known}"] if known else []
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _inputs(x: Any) -> Any:
    """Return inputs of a model, an array or a nest of arrays, in float64; a list is an array."""
    return _as_float64(x) if isinstance(x, list) else tf.nest.map_structure(_as_float64, x)


def _as_float64(x: Any) -> tf.Tensor:
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
    bounds: Mapping[str, tuple[Any, Any]] | None = None,
    fixed: Collection[str] = (),
    tied: Mapping[str, Callable[..., Any]] | None = None,
    maxiter: int = 1000,
) -> FitResult:
    """Fit a model with named parameters to data, by least squares.

    Derivatives are exact, so that no steps have to be chosen, and parameters of any size are scaled
    by what a change of them does to the residuals.

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
    bounds : dict of str to pair, optional
        Lower and upper bounds of parameters by name, numbers or arrays; they may be infinite.
    fixed : collection of str, optional
        Names of parameters that stay at the start.
    tied : dict of str to callable, optional
        Further parameters: functions of the dict of the others.
    maxiter : int, optional
        The largest number of points at which the model is evaluated.

    Returns
    -------
    FitResult

    Raises
    ------
    InvalidDataError
        If the data are not a pair, or the predictions do not have the shape of `y`.
    NonFiniteError
        If the residuals are not finite at the start.
    HvpError
        If another argument is invalid.

    Notes
    -----
    scipy's trust-region method for least squares finds the minimum, from exact Jacobians; a few
    Newton steps with the exact Hessian then make it as accurate as rounding allows. The covariance
    is the inverse of the Gauss-Newton matrix, as that of `scipy.optimize.curve_fit`, from the
    singular values of the scaled Jacobian.

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
    start, y, sigmas = _checked(model, parameters, data, sigma, bounds, fixed, tied)
    x = _inputs(data[0])
    problem = FitProblem(model, start, (x, y), sigmas, fixed, tied or {})
    maxiter = check_count(maxiter, "maxiter")
    ends = dict.fromkeys(start, (-np.inf, np.inf)) | dict(bounds or {})
    lower, upper = (problem.flat({n: pair[i] for n, pair in ends.items()}) for i in (0, 1))
    at = problem.flat(start)
    outside = [n for n, a, v, b in zip(problem.names, lower, at, upper) if not a <= v <= b]
    if outside:
        raise HvpError(
            f"the start of {', '.join(outside)} is outside of the bounds", "a start between them"
        )
    if not np.isfinite(problem.residuals_at(at)).all():
        raise NonFiniteError("a residual is not finite at the start", "values at which all are")
    success, message, active = True, "no parameter is free", np.zeros(0)
    if problem.names:
        found = scipy.optimize.least_squares(
            problem.residuals_at,
            at,
            problem.jacobian_at,
            bounds=(lower, upper),
            x_scale="jac",
            xtol=1e-14,
            ftol=1e-14,
            gtol=1e-14,
            max_nfev=maxiter,
        )
        at, success, message = found.x, found.status > 0, found.message
        active = found.active_mask
        at = np.where(active < 0, lower, np.where(active > 0, upper, at))
        movable = active == 0
        polished = problem.polished(at, movable) if success and movable.any() else at
        at = polished if ((lower <= polished) & (polished <= upper)).all() else at
    refit = functools.partial(_refit, model, data, sigma, bounds, fixed, tied, maxiter)
    result = _result(problem, at, active, sigma is None, success, message, refit)
    return dataclasses.replace(result, _limits=dict(bounds or {}))


def _refit(
    model: Any,
    data: Any,
    sigma: Any,
    bounds: Any,
    others: Collection[str],
    tied: Any,
    maxiter: int,
    *,
    start: Mapping[str, Any],
    fixed: str,
) -> FitResult:
    """Fit again with one more parameter fixed."""
    own = {name: value for name, value in start.items() if name not in (tied or {})}
    options = {"sigma": sigma, "tied": tied, "maxiter": maxiter}
    kept = {name: pair for name, pair in (bounds or {}).items() if name != fixed}
    return fit(model, own, data, bounds=kept, fixed=[*others, fixed], **options)


def _checked(
    model: Any, parameters: Any, data: Any, sigma: Any, bounds: Any, fixed: Any, tied: Any
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
    start = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    if not all(np.isfinite(value).all() for value in start.values()):
        raise HvpError("a parameter is not finite at the start", "finite numbers")
    for what, names in (("bounds", bounds or {}), ("fixed", fixed)):
        unknown = [name for name in names if name not in start]
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
                "a pair (lower, upper) of numbers, which may be infinite",
                "pass float('inf') where there is no bound",
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
            raise InvalidDataError(f"{count} {what}, the first of them {first}", "real numbers")
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
    estimates: bool,
    success: bool,
    message: str,
    refit: Callable[..., FitResult],
) -> FitResult:
    """Put a result together, with the covariance of the entries that are not at a bound."""
    residuals, names = problem.residuals_at(at), problem.names
    rows = problem.jacobian_at(at) if names else np.zeros((len(residuals), 0))
    movable = np.flatnonzero(active == 0)
    covariance, free = _inverse_gram(rows[:, movable])
    degrees = len(residuals) - len(movable)
    chi_square = float(residuals @ residuals)
    variance = chi_square / degrees if estimates and degrees > 0 else 1.0
    whole = np.zeros((len(names), len(names)))
    whole[np.ix_(movable, movable)] = covariance * variance
    notes = [f"{names[i]} is at its bound" for i in np.flatnonzero(active)]
    notes += [f"the data do not determine {names[movable[i]]}" for i in np.flatnonzero(free)]
    if estimates and degrees <= 0:
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
        values, by_name, names, whole, chi_square, degrees, residuals, notes,
        bool(success), message, problem, refit, variance, {},
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
