"""Estimates of traces."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg

from hvp._errors import HvpError
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.progress import check_progress, progress_bar
from hvp._solve.rows import Rows
from hvp._spectra.estimate import Estimate, estimate_of
from hvp._spectra.layers import Layers
from hvp._spectra.leave_one_out import LeaveOneOut
from hvp._spectra.probes import Probes, check_seed
from hvp._spectra.sampling import Stopping, mean_and_error
from hvp._spectra.symmetric import symmetric_rows

TraceMethod = Literal["hutchinson", "hutch++", "xtrace"]

# Fewer samples do not tell the standard error: of the mean, and of methods that also approximate
# the operator by them.
_FEWEST, _FEWEST_VECTORS = 32, 24
# The least value of `max_products`, with which each method can begin.
FEWEST_PRODUCTS = 3 * _FEWEST_VECTORS


@Uninterrupted()
def trace(
    A: Any,
    *,
    method: TraceMethod = "hutchinson",
    rtol: float = 0.02,
    atol: float = 0.0,
    max_products: int = 1000,
    seed: int = 0,
    progress: bool | Literal["always"] = False,
) -> Estimate:
    """Estimate the trace of a symmetric operator, and of the blocks of its layers.

    Parameters
    ----------
    A : HessianOperator, or another operator of this package or of scipy, or a matrix
        Real and symmetric. Its damping counts.
    method : {"hutchinson", "hutch++", "xtrace"}, optional
        - ``"hutchinson"`` is the mean of `z' A z` over random signs `z` [Hut]_. Its variance is
          twice the sum of the squared entries off the diagonal, divided by the number of
          products. The traces of all layers come from the same products.
        - ``"hutch++"`` takes a third of the products to find the range of the largest eigenvalues,
          whose share of the trace is then exact, and a third for the rest [MMM]_.
        - ``"xtrace"`` makes every vector serve for both [ETW]_. The last two need fewer products
          where few eigenvalues make up most of the Frobenius norm, or for a high accuracy, and
          keep as many vectors of `n` numbers as they multiply. The samples of ``"xtrace"`` share
          their vectors; its standard error allows for that, and is conservative.
    rtol, atol : float, optional
        The estimate has converged when its standard error is at most
        `max(rtol * abs(estimate), atol)`.
    max_products : int, optional
        Upper bound on the number of products, at least 72.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, with tqdm, if the output is a terminal.
        With ``"always"`` the bar is shown in any case.

    Returns
    -------
    Estimate
        With `estimate`, `standard_error`, `products`, `converged` and, by ``"hutchinson"``, with
        the `layers` of an operator of this package.

    Raises
    ------
    NonFiniteError
        If a product is not finite.
    GraphModeError
        If the function is called while TensorFlow traces a graph.
    HvpError
        If an argument is invalid.

    References
    ----------
    .. [Hut] M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix for
       Laplacian smoothing splines", Communications in Statistics 18(3), 1989.
       https://doi.org/10.1080/03610918908812806
    .. [MMM] R. A. Meyer, C. Musco, C. Musco and D. P. Woodruff, "Hutch++: Optimal stochastic trace
       estimation", SOSA 2021. https://doi.org/10.1137/1.9781611976496.16
    .. [ETW] E. N. Epperly, J. A. Tropp and R. J. Webber, "XTrace: Making the most of every sample
       in stochastic trace estimation", SIAM Journal on Matrix Analysis and Applications 45(1),
       2024. https://doi.org/10.1137/23M1548323

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> a, b = tf.Variable([1.0, 2.0], name="a"), tf.Variable([3.0], name="b")
    >>> loss = lambda: tf.reduce_sum(a**4) / 12 + tf.reduce_sum(b**3)
    >>> result = hvp.trace(hvp.HessianOperator(loss, [a, b]))
    >>> result.estimate, result.standard_error
    (23.0, 0.0)
    >>> {name: part.estimate for name, part in result.layers.items()}
    {'a': 5.0, 'b': 18.0}
    """
    rows = symmetric_rows(A, "trace")
    if method not in get_args(TraceMethod):
        raise HvpError(f"the method is {method!r}", " or ".join(map(repr, get_args(TraceMethod))))
    stopping = Stopping.of(rtol, atol, max_products, FEWEST_PRODUCTS)
    check_progress(progress)
    seed = check_seed(seed)
    run: Any = {"hutchinson": _Hutchinson, "hutch++": _HutchPlusPlus, "xtrace": _XTrace}[method]
    total = stopping.max_products
    with (
        progress_bar(progress, total=total, unit="product") as bar,
        rows.in_full_precision() as exact,
    ):
        return run(exact, Probes(exact, seed)).run(stopping, bar)


class _Hutchinson:
    """Samples `z' A z`, and their parts of the layers."""

    def __init__(self, rows: Rows, probes: Probes) -> None:
        self._probes, self._layers = probes, Layers(rows)

    def run(self, stopping: Stopping, bar: Any) -> Estimate:
        def draw(count: int) -> np.ndarray:
            vectors = self._probes.draw(count)
            terms = vectors * self._probes.multiply(vectors)
            bar.update(count)
            if self._layers.names:
                return self._layers.sums(terms)
            return np.einsum("ij->i", terms, dtype=np.float64)[:, np.newaxis]

        def total(samples: np.ndarray) -> tuple[float, float]:
            return mean_and_error(samples.sum(axis=1))

        samples = stopping.sample(draw, fewest=_FEWEST, widest=self._probes.widest, summary=total)
        products, method = self._probes.products, "hutchinson"
        layers = {
            name: estimate_of(part, products, method, stopping)
            for name, part in zip(self._layers.names, samples.T)
        }
        return estimate_of(samples.sum(axis=1), products, method, stopping, layers=layers)


class _Doubling:
    """Runs a method with twice as many vectors until the error is small enough."""

    name = ""
    # Products for each vector.
    cost = 0
    correlated = False

    def __init__(self, rows: Rows, probes: Probes) -> None:
        self._size, self._probes = rows.size, probes

    def run(self, stopping: Stopping, bar: Any) -> Estimate:
        count = _FEWEST_VECTORS
        while True:
            before = self._probes.products
            samples = self.samples(min(count, self._size))
            bar.update(self._probes.products - before)
            estimate = estimate_of(
                samples, self._probes.products, self.name, stopping, correlated=self.correlated
            )
            count *= 2
            if estimate.converged or estimate.products + self.cost * count > stopping.max_products:
                return estimate

    def samples(self, count: int) -> np.ndarray:
        """Return the samples of a run with this number of vectors."""
        raise NotImplementedError


class _XTrace(_Doubling):
    name, cost, correlated = "xtrace", 2, True

    def samples(self, count: int) -> np.ndarray:
        return LeaveOneOut(self._probes, self._probes.draw_on_sphere(count)).traces()


class _HutchPlusPlus(_Doubling):
    name, cost = "hutch++", 3

    def samples(self, count: int) -> np.ndarray:
        probes = self._probes
        products = probes.multiply(probes.draw(count))
        Q = np.ascontiguousarray(scipy.linalg.qr(products.T, mode="economic")[0].T)
        exact = float(np.sum(Q * probes.multiply(Q), dtype=np.float64))
        rest = probes.draw(count)
        for _ in range(2):  # rounding makes a second pass necessary
            rest -= (rest @ Q.T) @ Q
        return exact + np.einsum("ij,ij->i", rest, probes.multiply(rest), dtype=np.float64)
