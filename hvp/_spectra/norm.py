"""Norms of operators."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from hvp._errors import HvpError
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.interrupts import Uninterrupted
from hvp._spectra.eigsh import eigsh
from hvp._spectra.estimate import Estimate
from hvp._spectra.probes import probing
from hvp._spectra.sampling import Stopping, mean_and_error

_FEWEST = 16


@Uninterrupted()
def norm(
    A: Any,
    ord: Literal["fro", 2] = "fro",  # noqa: A002
    *,
    rtol: float = 0.02,
    atol: float = 0.0,
    max_products: int = 1000,
    seed: int = 0,
    progress: bool | Literal["always"] = False,
) -> Estimate:
    """Estimate the Frobenius norm of a symmetric operator, or compute its spectral norm.

    Parameters
    ----------
    A : HessianOperator, or another operator of this package or of scipy, or a matrix
        Real and symmetric. Its damping is included.
    ord : {"fro", 2}, optional
        - ``"fro"`` is the root of the sum of all squared entries, which equals that of all squared
          eigenvalues. It is estimated by the root of the mean of `norm(A z)**2` over random signs
          `z`.
        - ``2`` is the largest absolute eigenvalue, by `eigsh`.
    rtol, atol : float, optional
        The estimate has converged when its standard error, or the residual norm of `eigsh`, is at
        most `max(rtol * estimate, atol)`.
    max_products : int, optional
        Upper bound on the number of products, at least 16.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, as for `trace`.

    Returns
    -------
    Estimate
        For the spectral norm, `standard_error` is the norm of the residual.

    Raises
    ------
    NonFiniteError
        If a product is not finite.
    GraphModeError
        If the function is called while TensorFlow traces a graph.
    HvpError
        If an argument is invalid.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> round(hvp.norm(H).estimate**2, 3)  # 1 + 16 + 81
    98.0
    >>> round(hvp.norm(H, 2).estimate, 4)
    9.0
    """
    matrix = symmetric_matrix(A, "norm")
    stopping = Stopping.of(rtol, atol, max_products, _FEWEST)
    if ord not in ("fro", 2) or isinstance(ord, bool):
        raise HvpError(f"the argument ord is {ord!r}", "'fro' or 2")
    if ord == 2:
        tol = stopping.rtol or None
        result = eigsh(A, 1, "LM", tol=tol, max_products=max_products, seed=seed, progress=progress)
        value, error = float(np.abs(result.eigenvalues[0])), float(result.residual_norms[0])
        converged = error <= stopping.allowed(value)
        return Estimate(value, error, result.products, converged, "eigsh", 0)
    with probing(matrix, progress, seed, stopping.max_products) as probes:

        def draw(count: int) -> np.ndarray:
            products = probes.multiply(probes.draw(count)).astype(np.float64)
            return np.sum(products**2, axis=1)

        samples = stopping.sample(draw, fewest=_FEWEST, widest=probes.widest, summary=_root)
    value, error = _root(samples)
    count, converged = len(samples), error <= stopping.allowed(value)
    return Estimate(value, error, count, converged, "squared products", count - 1)


def _root(squares: np.ndarray) -> tuple[float, float]:
    """Return the root of the mean of squares, and its standard error to first order."""
    mean, error = mean_and_error(squares)
    value = float(np.sqrt(mean))
    return value, error / (2 * value) if value else 0.0
