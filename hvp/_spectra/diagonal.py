"""Estimates of diagonals."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from hvp._errors import HvpError
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.progress import check_progress, progress_bar
from hvp._spectra.estimate import Estimate, estimate_of
from hvp._spectra.leave_one_out import LeaveOneOut
from hvp._spectra.probes import Probes, check_seed
from hvp._spectra.sampling import Stopping
from hvp._spectra.symmetric import symmetric_rows

DiagonalMethod = Literal["bekas", "xdiag"]

_FEWEST = 16


@Uninterrupted()
def diagonal(
    A: Any,
    *,
    method: DiagonalMethod = "bekas",
    absolute: bool = False,
    rtol: float = 0.1,
    atol: float = 0.0,
    max_products: int = 1000,
    seed: int = 0,
    progress: bool | Literal["always"] = False,
) -> Estimate:
    """Estimate the diagonal of a symmetric operator.

    Parameters
    ----------
    A : HessianOperator, or another operator of this package or of scipy, or a matrix
        Real and symmetric. Its damping is included.
    method : {"bekas", "xdiag"}, optional
        - ``"bekas"`` is the mean of `z * (A z)` over random signs `z`, entry by entry [BeK]_. The
          variance of an entry is the sum of the squares of the other entries of its row, divided
          by the number of products.
        - ``"xdiag"`` adds a low-rank approximation from the same products, with each vector left
          out in turn [EpT]_. It needs fewer products where few eigenvalues dominate, and keeps as
          many vectors of `n` numbers as it multiplies.
    absolute : bool, optional
        Whether to return the root of the mean of `(z * (A z))**2` instead, as the optimizer
        AdaHessian does. It estimates the Euclidean norms of the rows, which are never less than the
        absolute values on the diagonal. With ``"bekas"`` only.
    rtol, atol : float, optional
        The estimate has converged when the Euclidean norm of all standard errors is at most
        `max(rtol * norm(estimate), atol)`.
    max_products : int, optional
        Upper bound on the number of products, at least 32.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, as for `trace`.

    Returns
    -------
    Estimate
        With `estimate` and `standard_error` of shape `(n,)`, in float64. The ``unflatten`` of an
        operator makes a nest of them.

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
    .. [BeK] C. Bekas, E. Kokiopoulou and Y. Saad, "An estimator for the diagonal of a matrix",
       Applied Numerical Mathematics 57, 2007. https://doi.org/10.1016/j.apnum.2007.01.003
    .. [EpT] E. N. Epperly, J. A. Tropp and R. J. Webber, "XTrace: Making the most of every sample
       in stochastic trace estimation", SIAM Journal on Matrix Analysis and Applications 45(1),
       2024. https://doi.org/10.1137/23M1548323

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> hvp.diagonal(H).estimate
    array([1., 4., 9.])
    """
    rows = symmetric_rows(A, "diagonal")
    names = get_args(DiagonalMethod)
    if method not in names:
        raise HvpError(f"the method is {method!r}", " or ".join(map(repr, names)))
    if absolute and method != "bekas":
        raise HvpError("absolute is True with the method 'xdiag'", "the method 'bekas'")
    stopping = Stopping.of(rtol, atol, max_products, 2 * _FEWEST)
    check_progress(progress)
    seed = check_seed(seed)
    total = stopping.max_products
    with (
        progress_bar(progress, total=total, unit="product") as bar,
        rows.in_full_precision() as exact,
    ):
        probes = Probes(exact, seed)
        if method == "xdiag":
            return _xdiag(probes, rows.size, stopping, bar)
        return _bekas(probes, absolute, stopping, bar)


def _bekas(probes: Probes, absolute: bool, stopping: Stopping, bar: Any) -> Estimate:
    count, target = 0, _FEWEST
    mean = squares = 0.0
    while True:
        vectors = probes.draw(min(probes.widest, target - count))
        for sample in (vectors * probes.multiply(vectors)).astype(np.float64):
            sample = sample**2 if absolute else sample
            count += 1
            change = sample - mean  # the method of Welford, which does not cancel
            mean = mean + change / count
            squares = squares + change * (sample - mean)
        bar.update(len(vectors))
        if count < target:
            continue
        error = np.sqrt(np.asarray(squares) / (count - 1) / count)
        value = np.asarray(mean)
        if absolute:  # the error of a root, to first order
            value = np.sqrt(value)
            error = np.divide(error, 2 * value, out=np.zeros_like(error), where=value > 0)
        size = float(np.linalg.norm(error))
        target = min(stopping.sufficient(count, size, value), stopping.max_products)
        if target <= count:
            converged = size <= stopping.allowed(value)
            return Estimate(value, error, count, converged, "bekas", count - 1)


def _xdiag(probes: Probes, size: int, stopping: Stopping, bar: Any) -> Estimate:
    count = _FEWEST
    while True:
        before = probes.products
        samples = LeaveOneOut(probes, probes.draw(min(count, size))).diagonals()
        bar.update(probes.products - before)
        estimate = estimate_of(samples, probes.products, "xdiag", stopping, correlated=True)
        count *= 2
        if estimate.converged or estimate.products + 2 * count > stopping.max_products:
            return estimate
