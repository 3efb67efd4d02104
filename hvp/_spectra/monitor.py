"""A Keras callback that measures curvature during training."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvp._engines.options import NAMES
from hvp._errors import ConvergenceWarning, HvpError, InvalidDataError, NonFiniteError
from hvp._operators.hessian import HessianOperator
from hvp._runtime.arguments import check_count, check_number, check_seed, refuse_unknown
from hvp._spectra.density import spectral_density
from hvp._spectra.eigsh import eigsh
from hvp._spectra.landscape import loss_slice
from hvp._spectra.summaries import check_tensorboard, write_summaries
from hvp._spectra.trace import trace

_log = logging.getLogger("hvp")

_NUMBERS = ("largest", "smallest", "trace", "gradient_norm")
_QUANTITIES = (*_NUMBERS, "density")
# Eigenvalues to watch need few digits.
_TOLERANCE, _TRACE_ERROR = 1e-2, 0.1
# Products for one eigenvalue or trace, at most.
_PRODUCTS = 200
# Random vectors of a density: a figure needs fewer than an estimate.
_PROBES = 4
# Seconds that all measurements but the first may take in a short training.
_GRACE = 10.0


class CurvatureMonitor(keras.callbacks.Callback):
    """A Keras callback that logs eigenvalues and the trace of the Hessian during training.

    It changes nothing in the training: the weights after `fit` are the same without it.

    Parameters
    ----------
    data : tuple of arrays, or iterable of such
        The examples `(x, y)` or `(x, y, sample_weight)` for the Hessian of the compiled loss, as
        for `HessianOperator.from_keras`.
    quantities : sequence of str, optional
        Which of ``"largest"`` and ``"smallest"`` (eigenvalues), ``"trace"``, ``"gradient_norm"``
        and ``"density"`` to measure. A density is a `SpectralDensity` of 160 products, in `history`
        and not in the logs, which are numbers. The default is all, without the density unless
        `log_dir` is given.
    every : "epoch" or int, optional
        When to measure: at the end of each epoch, or each time after this many batches, or as soon
        as Keras returns, if it runs several in one call (`steps_per_execution`). The values of the
        last measurement are logged at the end of the epoch.
    budget : float, optional
        The fraction of the training time that measurements may take. Unless it is 0, they may take
        ten seconds in any case. A measurement is skipped, and NaN is logged, if it would exceed the
        budget, judged by the time of the last one. The first measurement, which traces the Hessian
        and takes seconds, is always made and does not count. If measurements were skipped, a line
        in the log at the end of the training says how many.
    sample : int, optional
        Upper bound on the number of examples. If there are more, this many are drawn once. Only for
        arrays.
    seed : int, optional
        The random seed of vectors and of the sample. No global state is used or changed.
    prefix : str, optional
        The prefix of the names in the logs.
    slice_radius : float, optional
        Also evaluate the loss along the eigenvector of the largest eigenvalue, up to this distance
        on both sides, as `loss_slice` does. The result is in `history` as ``"slice"``.
    log_dir : str or path, optional
        A folder for TensorBoard: numbers as scalars, densities as histograms and, with matplotlib,
        densities and slices as images. It takes the package tensorboard. Give it a folder of its
        own, such as one beside that of the callback `TensorBoard`.
    **options
        Further arguments of `HessianOperator.from_keras`, such as ``batch_size``.

    Attributes
    ----------
    history : list of dict
        All measurements: the quantities and their errors (``"largest_error"`` is a residual norm,
        ``"trace_error"`` a standard error), ``"epoch"``, ``"batch"`` (counted from the start of
        training), ``"seconds"`` and ``"products"``. If the loss is not finite, numbers are NaN, and
        a density and a slice are None.

    Raises
    ------
    InvalidDataError
        If `sample` is given and the data are not arrays, or not of one length.
    HvpError
        If another argument is invalid, or tensorboard is not installed. Errors in the model or the
        data are raised when the training begins, and so is that of a loss that is not finite then.

    Notes
    -----
    The logs contain ``curvature_largest`` and so on, so that `History`, `CSVLogger` and
    `TensorBoard` record them too, if they come after the monitor in the list of callbacks. The
    layers run in inference mode, as in `evaluate`, unless ``training=True`` is passed. Eigenvalues
    are computed to a residual of one percent of the largest one, beginning with the last
    eigenvectors, and traces to a standard error of 10 %, with new random vectors each time.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hvp.keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.eye(3, dtype="float32"), np.ones((3, 1), "float32")
    >>> monitor = hvp.keras.CurvatureMonitor((x, y), budget=1.0)
    >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=[monitor]).history
    >>> round(history["curvature_largest"][0], 3)
    2.667
    """

    def __init__(
        self,
        data: Any,
        *,
        quantities: Any = None,
        every: Literal["epoch"] | int = "epoch",
        budget: float = 0.05,
        sample: int | None = None,
        seed: int = 0,
        prefix: str = "curvature_",
        slice_radius: float | None = None,
        log_dir: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(options, "CurvatureMonitor", {*NAMES, "variables", "training", "damping"})
        if quantities is None:
            quantities = _NUMBERS if log_dir is None else _QUANTITIES
        self._quantities = list(quantities) if isinstance(quantities, Iterable) else []
        unknown = [name for name in self._quantities if name not in _QUANTITIES]
        if unknown or not self._quantities:
            raise HvpError(
                f"the argument quantities is {quantities!r}",
                f"some of {', '.join(map(repr, _QUANTITIES))}",
            )
        if not isinstance(prefix, str):
            raise HvpError(f"the argument prefix is {prefix!r}", "a string")
        if every != "epoch":
            check_count(every, "every")
        self._every = every
        self._budget, self._seed = check_number(budget, "budget"), check_seed(seed)
        self._data = data if sample is None else _subset(data, sample, seed)
        self._radius = slice_radius
        if slice_radius is not None:
            check_number(slice_radius, "slice_radius", positive=True)
        if log_dir is not None:
            check_tensorboard()
        self._folder = log_dir
        self._writer: Any = None
        self._prefix, self._options = prefix, options
        self._operator: HessianOperator | None = None
        self._vectors: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self._start = self._seconds = 0.0
        self._spent = self._preparing = 0.0  # the latter on the first measurement
        self._epoch = self._batch = self._omitted = self._inexact = 0
        self._last: dict[str, Any] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Build the Hessian, which checks the model and the data, and begin to count the time."""
        self._close()
        self._vectors, self.history = {}, []
        self._spent = self._preparing = 0.0
        self._batch = self._omitted = self._inexact = 0
        self._passes_last = False
        self._operator = HessianOperator.from_keras(self.model, self._data, **self._options)
        if self._folder is not None:
            self._writer = tf.summary.create_file_writer(str(self._folder))
        self._start = time.perf_counter()

    def on_train_end(self, logs: Any = None) -> None:
        """Release the Hessian, and say how many measurements were skipped, or are inaccurate."""
        self._close()
        if self._inexact:
            _log.warning(
                "CurvatureMonitor: number of eigenvalues whose residual is above %g of the "
                "largest: %d. Their residuals are in the history. Products of a model in 16 bits "
                "are no more accurate, and eigenvalues close together take more than %d products",
                _TOLERANCE,
                self._inexact,
                _PRODUCTS,
            )
        if self._omitted:
            _log.warning(
                "CurvatureMonitor skipped %d of %d measurements to keep to budget=%g of the "
                "training time, because the last one took %.2g s: raise budget, or measure less "
                "often or on fewer examples (every=, sample=)",
                self._omitted,
                self._omitted + len(self.history),
                self._budget,
                self._seconds,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch, self._last = epoch, None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the first batch of several that run in one call."""
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Measure after every so many batches, if asked to."""
        # Of several in one call, older versions of Keras pass the number of the first.
        self._passes_last = self._passes_last or batch > self._first
        several = getattr(self.model, "steps_per_execution", 1)
        before = self._batch
        self._batch += batch - self._first + 1 if self._passes_last else several
        if self._every != "epoch" and self._batch // self._every > before // self._every:
            self._last = self._measure()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Measure at the end of each epoch, and add the last values to the logs."""
        last = self._measure() if self._every == "epoch" else self._last
        for name in self._quantities:
            if logs is not None and name in _NUMBERS:
                logs[self._prefix + name] = np.nan if last is None else last[name]

    def _measure(self) -> dict[str, Any] | None:
        training = time.perf_counter() - self._start - self._preparing - self._spent
        allowed = max(self._budget * training, _GRACE if self._budget else 0.0)
        if self.history and self._spent + self._seconds > allowed:
            self._omitted += 1
            return None
        before = time.perf_counter()
        H = self._operator
        assert H is not None
        products = H.stats.products
        try:
            H.refresh()
            measured = self._quantities_of(H)
        except NonFiniteError:  # a training that diverges is not ended here
            numbers = [name for name in self._quantities if name in _NUMBERS]
            measured = {key: np.nan for name in numbers for key in (name, f"{name}_error")}
            others = {"density": "density" in self._quantities, "slice": self._radius is not None}
            measured |= {name: None for name, is_wanted in others.items() if is_wanted}
        if self._writer is not None:
            write_summaries(self._writer, measured, self._batch, self._prefix)
        self._seconds = time.perf_counter() - before
        if self.history:
            self._spent += self._seconds
        else:
            self._preparing = self._seconds
        measured |= {"epoch": self._epoch, "batch": self._batch, "seconds": self._seconds}
        measured["products"] = H.stats.products - products
        self.history.append(measured)
        return measured

    def _quantities_of(self, H: HessianOperator) -> dict[str, Any]:
        """Return the quantities with their errors, and the slice."""
        measured: dict[str, Any] = {}
        for name in self._quantities:
            if name == "density":
                measured[name] = spectral_density(H, probes=_PROBES, seed=self._seed)
            else:
                measured[name], measured[f"{name}_error"] = self._value(H, name)
        if self._radius is not None:
            if "largest" not in self._quantities:
                self._value(H, "largest")
            direction = self._vectors["largest"][:, 0]
            measured["slice"] = loss_slice(H, direction, radius=self._radius)
        return measured

    def _value(self, H: HessianOperator, name: str) -> tuple[float, float]:
        """Return a quantity and its error."""
        if name == "gradient_norm":
            return float(np.linalg.norm(H.gradient.astype(np.float64))), 0.0
        if name == "trace":
            # The same vectors each time would repeat their error, like a trend.
            seed = self._seed + len(self.history)
            estimate = trace(H, rtol=_TRACE_ERROR, max_products=_PRODUCTS, seed=seed)
            return estimate.estimate, estimate.standard_error
        which: Any = "LA" if name == "largest" else "SA"
        with warnings.catch_warnings():
            # The history has the residual.
            warnings.simplefilter("ignore", ConvergenceWarning)
            result = eigsh(
                H,
                1,
                which,
                tol=_TOLERANCE,
                max_products=_PRODUCTS,
                v0=self._vectors.get(name),
                seed=self._seed,
            )
        self._vectors[name] = result.eigenvectors
        self._inexact += not result.converged[0]
        return float(result.eigenvalues[0]), float(result.residual_norms[0])

    def _close(self) -> None:
        if self._operator is not None:
            self._operator.close()
            self._operator = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _subset(data: Any, sample: Any, seed: int) -> Any:
    """Return a random subset of the examples of arrays."""
    check_count(sample, "sample")
    is_arrays = isinstance(data, tuple) and all(hasattr(part, "shape") for part in data)
    if not is_arrays:
        raise InvalidDataError(
            f"sample is {sample}, but the data are {type(data).__name__}",
            "a tuple of arrays",
            "leave out sample, and pass the examples themselves",
        )
    lengths = sorted({len(part) for part in data})
    if len(lengths) != 1:
        raise InvalidDataError(
            f"the first axes of the data have the lengths {lengths}", "one length"
        )
    [count] = lengths
    if count <= sample:
        return data
    places = np.sort(np.random.default_rng(seed).choice(count, sample, replace=False))
    return tuple(np.asarray(part)[places] for part in data)
