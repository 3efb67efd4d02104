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

TraceMethod = Literal["auto", "exact", "hutchinson", "hutch++", "xtrace"]

# Fewer samples do not tell the standard error: of the mean, and of methods that also approximate
# the operator by them.
_FEWEST, _FEWEST_VECTORS = 32, 24
# The least value of `max_products`, with which each method can begin.
FEWEST_PRODUCTS = 3 * _FEWEST_VECTORS


@Uninterrupted()
def trace(
    A: Any,
    *,
    method: TraceMethod = "auto",
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
        Real and symmetric. Its damping is included.
    method : {"auto", "exact", "hutchinson", "hutch++", "xtrace"}, optional
        - ``"auto"`` is ``"hutchinson"``, or ``"exact"`` if that needs fewer products. It switches
          as soon as more than `n` random vectors are likely to be needed, if `2 n` products are
          allowed.
        - ``"exact"`` computes the diagonal by `n` products. There is no error but rounding.
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
        Upper bound on the number of products, at least 72, or `n` if that is less.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, with tqdm, if the output is a terminal.
        With ``"always"`` the bar is shown in any case.

    Returns
    -------
    Estimate
        With `estimate`, `standard_error`, `products`, `converged` and, by ``"hutchinson"`` and
        ``"exact"``, with the `layers` of an operator of this package. Its `method` is the one that
        was used.

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
    stopping = Stopping.of(rtol, atol, max_products, min(FEWEST_PRODUCTS, rows.size))
    check_progress(progress)
    seed = check_seed(seed)
    if method == "exact" and rows.size > max_products:
        raise HvpError(
            f"the exact trace of a {rows.size} x {rows.size} matrix takes {rows.size} products",
            f"at most max_products = {max_products}",
            "raise max_products, or leave out method",
        )
    run: Any = {
        "auto": _Auto,
        "exact": _Exact,
        "hutchinson": _Hutchinson,
        "hutch++": _HutchPlusPlus,
        "xtrace": _XTrace,
    }[method]
    total = stopping.max_products
    with (
        progress_bar(progress, total=total, unit="product") as bar,
        rows.in_full_precision() as exact,
    ):
        return run(exact, Probes(exact, seed)).run(stopping, bar)


class _Hutchinson:
    """Samples `z' A z`, and their parts of the layers."""

    # The method is given up when more random vectors than this are likely to be needed.
    most = np.inf

    def __init__(self, rows: Rows, probes: Probes) -> None:
        self._size, self._probes, self._layers = rows.size, probes, Layers(rows)

    def run(self, stopping: Stopping, bar: Any) -> Estimate:
        def draw(count: int) -> np.ndarray:
            terms = self.terms(self._probes.draw(count))
            bar.update(count)
            return terms

        def total(samples: np.ndarray) -> tuple[float, float]:
            return mean_and_error(samples.sum(axis=1))

        samples = stopping.sample(
            draw, fewest=_FEWEST, widest=self._probes.widest, summary=total, most=self.most
        )
        products, method = self._probes.products, "hutchinson"
        layers = {
            name: estimate_of(part, products, method, stopping)
            for name, part in zip(self._layers.names, samples.T)
        }
        return estimate_of(samples.sum(axis=1), products, method, stopping, layers=layers)

    def terms(self, vectors: np.ndarray) -> np.ndarray:
        """Return `z' A z` for each row `z`, in parts for each layer, of shape `(k, parts)`."""
        terms = vectors * self._probes.multiply(vectors)
        if self._layers.names:
            return self._layers.sums(terms)
        return np.einsum("ij->i", terms, dtype=np.float64)[:, np.newaxis]


class _Exact(_Hutchinson):
    """Sums the diagonal."""

    def run(self, stopping: Stopping, bar: Any) -> Estimate:
        parts: Any = 0.0
        for start in range(0, self._size, self._probes.widest):
            count = min(self._probes.widest, self._size - start)
            parts += self.terms(self._probes.units(start, count)).sum(axis=0)
            bar.update(count)
        layers = {name: self._exactly(part) for name, part in zip(self._layers.names, parts)}
        return self._exactly(np.sum(parts), layers)

    def _exactly(self, value: Any, layers: Any = None) -> Estimate:
        products = self._probes.products
        return Estimate(float(value), 0.0, products, True, "exact", 0, layers or {})


class _Auto(_Exact):
    """Samples, unless the diagonal needs fewer products."""

    def run(self, stopping: Stopping, bar: Any) -> Estimate:
        if self._size <= min(FEWEST_PRODUCTS, stopping.max_products):
            return super().run(stopping, bar)
        if 2 * self._size <= stopping.max_products:
            self.most = self._size
        estimate = _Hutchinson.run(self, stopping, bar)
        if estimate.converged or self._probes.products + self._size > stopping.max_products:
            return estimate
        return super().run(stopping, bar)


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
