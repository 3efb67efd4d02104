"""Estimation of traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg

from hvp._errors import HvpError
from hvp._operators.matrix import Matrix
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.arguments import check_choice
from hvp._runtime.interrupts import Uninterrupted
from hvp._spectra.estimate import Estimate, estimate_of
from hvp._spectra.leave_one_out import LeaveOneOut
from hvp._spectra.probes import Probes, probing
from hvp._spectra.sampling import Stopping, mean_and_error
from hvp._vectors.selection import groups

TraceMethod = Literal["auto", "exact", "hutchinson", "hutch++", "xtrace"]

_Layers = dict[str, list[int]]

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
        - ``"xtrace"`` makes every vector serve for both [ETW]_. The last two need fewer products if
          few eigenvalues make up most of the Frobenius norm, or for high accuracy, and keep as many
          vectors of `n` numbers as they multiply. The samples of ``"xtrace"`` share their vectors;
          its standard error allows for that, and is conservative.
    rtol, atol : float, optional
        The estimate has converged when its standard error is at most
        `max(rtol * abs(estimate), atol)`.
    max_products : int, optional
        Upper bound on the number of products, at least 72; or `n` if that is less, unless a method
        that samples is asked for.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, with tqdm, if the output is a terminal.
        With ``"always"`` the bar is shown in any case.

    Returns
    -------
    Estimate
        With `estimate`, `standard_error`, `products` and `converged`. The methods ``"hutchinson"``
        and ``"exact"`` add the `layers` of an operator of this package. Its `method` is the one
        that was used.

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
    matrix = symmetric_matrix(A, "trace")
    check_choice(method, "method", get_args(TraceMethod))
    size = matrix.size
    fewest = size if method in ("auto", "exact") else FEWEST_PRODUCTS
    stopping = Stopping.of(rtol, atol, max_products, min(FEWEST_PRODUCTS, fewest))
    if method == "exact" and size > max_products:
        raise HvpError(
            f"the exact trace of a {size} x {size} matrix takes {size} products",
            f"at most max_products = {max_products}",
            "raise max_products, or leave out method",
        )
    with probing(matrix, progress, seed, stopping.max_products) as probes:
        if method in _SAMPLERS:
            return _doubled(method, probes, size, stopping)
        run = {"auto": _auto, "exact": _summed, "hutchinson": _sampled}[method]
        return run(probes, _layers(probes.matrix), size, stopping)


def _sampled(
    probes: Probes, layers: _Layers, size: int, stopping: Stopping, most: float = np.inf
) -> Estimate:
    """Sample `z' A z`, unless more than `most` random vectors are likely to be needed."""
    del size

    def draw(count: int) -> np.ndarray:
        return _terms(probes, layers, probes.draw(count))

    def total(samples: np.ndarray) -> tuple[float, float]:
        return mean_and_error(samples.sum(axis=1))

    samples = stopping.sample(draw, fewest=_FEWEST, widest=probes.widest, summary=total, most=most)
    of_layers = {
        name: estimate_of(part, probes.products, "hutchinson", stopping)
        for name, part in zip(layers, samples.T)
    }
    whole = samples.sum(axis=1)
    return estimate_of(whole, probes.products, "hutchinson", stopping, layers=of_layers)


def _summed(probes: Probes, layers: _Layers, size: int, stopping: Stopping) -> Estimate:
    """Sum the diagonal."""
    del stopping
    parts: Any = 0.0
    for start in range(0, size, probes.widest):
        count = min(probes.widest, size - start)
        parts += _terms(probes, layers, probes.units(start, count)).sum(axis=0)

    def exactly(value: Any, of_layers: Any = None) -> Estimate:
        return Estimate(float(value), 0.0, probes.products, True, "exact", 0, of_layers or {})

    return exactly(np.sum(parts), {n: exactly(part) for n, part in zip(layers, parts)})


def _auto(probes: Probes, layers: _Layers, size: int, stopping: Stopping) -> Estimate:
    """Sample, unless the diagonal needs fewer products."""
    arguments = probes, layers, size, stopping
    if size <= min(FEWEST_PRODUCTS, stopping.max_products):
        return _summed(*arguments)
    most = size if 2 * size <= stopping.max_products else np.inf
    estimate = _sampled(*arguments, most)
    if estimate.converged or probes.products + size > stopping.max_products:
        return estimate
    return _summed(*arguments)


def _layers(matrix: Matrix) -> dict[str, list[int]]:
    return groups(matrix.space.paths) if matrix.has_variables else {}


def _terms(probes: Probes, layers: _Layers, vectors: np.ndarray) -> np.ndarray:
    """Return `z' A z` for each row `z`, split by layer, of shape `(k, parts)`."""
    terms = vectors * probes.multiply(vectors)
    if not layers:
        return np.einsum("ij->i", terms, dtype=np.float64)[:, np.newaxis]
    pieces = np.split(terms, np.cumsum(probes.matrix.space.sizes)[:-1], axis=1)
    sums = [piece.sum(axis=1, dtype=np.float64) for piece in pieces]
    return np.stack([sum(sums[i] for i in members) for members in layers.values()], axis=1)


def _doubled(method: str, probes: Probes, size: int, stopping: Stopping) -> Estimate:
    """Double the number of vectors until the error is small enough, or they are all there are."""
    sample, cost = _SAMPLERS[method]
    count = _FEWEST_VECTORS
    while True:
        if count >= size and probes.products + size <= stopping.max_products:
            return _summed(probes, _layers(probes.matrix), size, stopping)
        samples = sample(probes, min(count, size))
        is_correlated = method == "xtrace"
        estimate = estimate_of(samples, probes.products, method, stopping, correlated=is_correlated)
        count *= 2
        if estimate.converged or estimate.products + cost * count > stopping.max_products:
            return estimate


def _hutch_plus_plus(probes: Probes, count: int) -> np.ndarray:
    products = probes.multiply(probes.draw(count))
    Q = np.ascontiguousarray(scipy.linalg.qr(products.T, mode="economic")[0].T)
    exact = float(np.sum(Q * probes.multiply(Q), dtype=np.float64))
    rest = probes.draw(count)
    for _ in range(2):  # rounding makes a second pass necessary
        rest -= (rest @ Q.T) @ Q
    return exact + np.einsum("ij,ij->i", rest, probes.multiply(rest), dtype=np.float64)


def _xtrace(probes: Probes, count: int) -> np.ndarray:
    return LeaveOneOut(probes, probes.draw_on_sphere(count)).traces()


# Functions that draw samples from so many vectors, and the products for each vector.
_SAMPLERS: dict[str, tuple[Callable[[Probes, int], np.ndarray], int]] = {
    "hutch++": (_hutch_plus_plus, 3),
    "xtrace": (_xtrace, 2),
}
