"""Estimation of diagonals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from hvp._errors import HvpError
from hvp._operators.operator import known_diagonal
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.arguments import check_choice, check_flag, check_seed
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.progress import check_progress
from hvp._spectra.estimate import Estimate, estimate_of
from hvp._spectra.leave_one_out import ROUNDING, LeaveOneOut
from hvp._spectra.probes import Probes, probing, refuse_non_finite
from hvp._spectra.sampling import Stopping

DiagonalMethod = Literal["auto", "exact", "bekas", "xdiag"]

_FEWEST = 16
# Products of an estimate, and of an exact diagonal, unless `max_products` is passed.
_MOST, _MOST_EXACT = 1000, 4096


@Uninterrupted()
def diagonal(
    A: Any,
    *,
    method: DiagonalMethod = "auto",
    absolute: bool = False,
    rtol: float = 0.1,
    atol: float = 0.0,
    max_products: int | None = None,
    seed: int = 0,
    progress: bool | Literal["always"] = False,
) -> Estimate:
    """Compute or estimate the diagonal of a symmetric operator.

    Parameters
    ----------
    A : HessianOperator, or another operator of this package or of scipy, or a matrix
        Real and symmetric. Its damping is included.
    method : {"auto", "exact", "bekas", "xdiag"}, optional
        - ``"auto"`` is ``"exact"`` if that takes no more than 4096 products, or `max_products` if
          given, and otherwise ``"bekas"``.
        - ``"exact"`` takes what an operator's ``diagonal`` does: the factors of a `KFAC`, the
          predictions of each example for Gauss-Newton and Fisher matrices, a few products with a
          sparse matrix, or else those with all unit vectors.
        - ``"bekas"`` is the mean of `z * (A z)` over random signs `z`, entry by entry [BeK]_. The
          variance of an entry is the sum of the squares of the other entries of its row, divided
          by the number of products.
        - ``"xdiag"`` adds a low-rank approximation from the same products, with each vector left
          out in turn [EpT]_. It needs fewer products if few eigenvalues dominate, and keeps as many
          vectors of `n` numbers as it multiplies.
    absolute : bool, optional
        Whether to return the root of the mean of `(z * (A z))**2` instead, as the optimizer
        AdaHessian does. It estimates the Euclidean norms of the rows, which are never less than the
        absolute values on the diagonal. Not with ``"xdiag"``.
    rtol, atol : float, optional
        The estimate has converged when the Euclidean norm of all standard errors is at most
        `max(rtol * norm(estimate), atol)`.
    max_products : int, optional
        Upper bound on the number of products, at least 32; or `n` if that is less, unless a method
        that samples is asked for. By default it is 1000 for an estimate.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, as for `trace`.

    Returns
    -------
    Estimate
        With `estimate` and `standard_error` of shape `(n,)`, in float64. The error of an exact
        diagonal is zero. An operator's ``unflatten`` turns them into nests. No estimate is negative
        if the matrix is known to be positive semi-definite.

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
    matrix = symmetric_matrix(A, "diagonal")
    check_choice(method, "method", get_args(DiagonalMethod))
    if check_flag(absolute, "absolute") and method == "xdiag":
        raise HvpError("absolute is True with the method 'xdiag'", "another method")
    size = matrix.size
    fewest = size if method in ("auto", "exact") else 2 * _FEWEST
    allowed = _MOST if max_products is None else max_products
    stopping = Stopping.of(rtol, atol, allowed, min(2 * _FEWEST, fewest))
    most = _MOST_EXACT if max_products is None else stopping.max_products
    check_progress(progress)
    check_seed(seed)
    if method in ("auto", "exact") and not absolute and size > 2 * _FEWEST:
        known, products = known_diagonal(A, most)
        if known is not None:
            refuse_non_finite(known)
            return Estimate(known.astype(np.float64), np.zeros(size), products, True, "exact", 0)
    if method == "exact" and size > most:
        raise HvpError(
            f"the exact diagonal of a {size} x {size} matrix takes {size} products",
            f"at most max_products = {most}",
            "raise max_products, or leave out method",
        )
    exact = method == "exact" or (method == "auto" and size <= most)
    with probing(matrix, progress, seed, size if exact else stopping.max_products) as probes:
        if exact:
            return _exact(probes, size, absolute)
        if method == "xdiag":
            estimate = _xdiag(probes, size, stopping)
        else:
            estimate = _bekas(probes, stopping, absolute)
    if matrix.is_positive_semidefinite:
        estimate = replace(estimate, estimate=np.maximum(estimate.estimate, 0))
    return estimate


def _exact(probes: Probes, size: int, absolute: bool) -> Estimate:
    parts = []
    for start in range(0, size, probes.widest):
        count = min(probes.widest, size - start)
        products = probes.multiply(probes.units(start, count)).astype(np.float64)
        entries = np.arange(count)
        of_rows = (
            np.linalg.norm(products, axis=1) if absolute else products[entries, start + entries]
        )
        parts.append(of_rows)
    value = np.concatenate(parts)
    return Estimate(value, np.zeros(size), probes.products, True, "exact", 0)


def _bekas(probes: Probes, stopping: Stopping, absolute: bool) -> Estimate:
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
        if count < target:
            continue
        error = np.sqrt(np.asarray(squares) / (count - 1) / count)
        value = np.asarray(mean)
        if absolute:  # the error of a root, to first order
            value = np.sqrt(value)
            error = np.divide(error, 2 * value, out=np.zeros_like(error), where=value > 0)
        norm = float(np.linalg.norm(error))
        target = min(stopping.sufficient(count, norm, value), stopping.max_products)
        if target <= count:
            converged = norm <= stopping.allowed(value)
            return Estimate(value, error, count, converged, "bekas", count - 1)


def _xdiag(probes: Probes, size: int, stopping: Stopping) -> Estimate:
    count = _FEWEST
    while count < size:
        left_out = LeaveOneOut(probes, probes.draw(count))
        samples, basis = left_out.diagonals(), left_out.basis
        is_whole = len(basis) == count or _is_range(basis, probes)
        estimate = estimate_of(samples, probes.products, "xdiag", stopping, correlated=True)
        if not is_whole:
            estimate = replace(estimate, standard_error=np.full(size, np.inf), converged=False)
        count *= 2
        if estimate.converged or estimate.products + 2 * count > stopping.max_products:
            return estimate
    return _exact(probes, size, absolute=False)


def _is_range(basis: np.ndarray, probes: Probes) -> bool:
    """Return whether all products with the operator are in the span of the basis, up to rounding.

    Where few rows of the matrix count, vectors of random signs may depend on each other there, and
    so may their products. The product with a vector of another kind then shows what is missing.
    """
    image = probes.multiply(probes.draw_on_sphere(1)).astype(np.float64)
    rest = image - image @ basis.T @ basis
    eps = np.finfo(probes.matrix.dtype.as_numpy_dtype).eps
    allowed = ROUNDING * eps * np.sqrt(image.size) * np.linalg.norm(image)
    return bool(np.linalg.norm(rest) <= allowed)
