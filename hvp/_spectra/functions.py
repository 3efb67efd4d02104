"""Quadratic forms and log-determinants by Lanczos quadrature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from hvp._errors import HvpError
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.arguments import check_choice, check_count, check_seed
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.progress import check_progress
from hvp._solve.sparse import SparseInverse, sparse_inverse
from hvp._spectra.estimate import Estimate, estimate_of
from hvp._spectra.lanczos import NOTHING, Quadrature, quadratures
from hvp._spectra.probes import probing
from hvp._spectra.sampling import Stopping
from hvp._vectors.arrays import check_array

_FEWEST = 8


@Uninterrupted()
def quadratic_forms(
    A: Any,
    V: Any,
    function: Callable[[np.ndarray], np.ndarray],
    *,
    steps: int = 30,
    progress: bool | Literal["always"] = False,
) -> Any:
    """Compute `v' f(A) v` for a function of a symmetric operator.

    Parameters
    ----------
    A : HessianOperator, or another operator of this package or of scipy, or a matrix
        Real and symmetric. Its damping is included.
    V : array_like of shape `(n,)` or `(n, k)`
        A vector `v`, or one in each column.
    function : callable
        The function `f` of eigenvalues: takes and returns arrays. With ``np.reciprocal`` the result
        is `v' inv(A) v`, and with ``np.exp`` that of the matrix exponential.
    steps : int, optional
        Steps of the Lanczos method, each one product with each vector.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, as for `trace`.

    Returns
    -------
    float, or ndarray of shape `(k,)`
        The quadratic forms, in float64.

    Raises
    ------
    InvalidVectorError
        If `V` has another shape or kind, or entries that are not finite.
    NonFiniteError
        If a product is not finite.
    GraphModeError
        If the function is called while TensorFlow traces a graph.
    HvpError
        If an argument is invalid, or the function is not finite at the Ritz values.

    Notes
    -----
    The Lanczos method gives the nodes and weights of a Gauss quadrature that is exact for
    polynomials of degree less than ``2 * steps`` [GM]_. It converges fast if the function is smooth
    over the spectrum, and needs more steps near a singularity, such as that of the reciprocal at
    zero.

    References
    ----------
    .. [GM] G. H. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications",
       Princeton University Press, 2010. https://doi.org/10.1515/9781400833888

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> round(hvp.quadratic_forms(H, np.ones(3), np.sqrt), 5)
    6.0
    """
    matrix = symmetric_matrix(A, "quadratic_forms")
    if not callable(function):
        raise HvpError(f"the function is {type(function).__name__}", "a function of eigenvalues")
    dimensions = (2,) if np.ndim(V) == 2 else (1,)
    V = check_array(V, matrix.size, matrix.dtype.as_numpy_dtype, ndims=dimensions, name="V")
    check_count(steps, "steps")
    columns = np.ascontiguousarray(V.reshape(matrix.size, -1).T)
    squares = np.sum(columns.astype(np.float64) ** 2, axis=1)
    values = np.zeros(len(columns))
    nonzero = np.flatnonzero(squares)
    steps = min(steps, matrix.size)
    with probing(matrix, progress, 0, len(nonzero) * steps) as probes:
        for start in range(0, len(nonzero), probes.widest):
            part = nonzero[start : start + probes.widest]
            quadrature = quadratures(probes, columns[part], steps)
            values[part] = squares[part] * _integrals(quadrature, function)
    return values if V.ndim == 2 else float(values[0])


def _integrals(quadrature: Quadrature, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Integrate a function over each measure."""
    counts = quadrature.weights > NOTHING
    with np.errstate(all="ignore"):
        values = np.asarray(function(np.where(counts, quadrature.nodes, 1.0)), np.float64)
    if values.shape != quadrature.nodes.shape or not np.isfinite(values[counts]).all():
        raise HvpError(
            "the function is not finite at the Ritz values, which range from "
            f"{quadrature.nodes[counts].min():.3g} to {quadrature.nodes[counts].max():.3g}",
            "a function of arrays that is finite on the spectrum",
            "damp the operator, as in A.damped(1e-3), if it has to be positive definite",
        )
    return np.sum(np.where(counts, values, 0) * quadrature.weights, axis=1)


@Uninterrupted()
def logdet(
    A: Any,
    *,
    method: Literal["auto", "sparse", "lanczos"] = "auto",
    rtol: float = 0.02,
    atol: float = 0.0,
    steps: int = 40,
    max_products: int = 4000,
    seed: int = 0,
    progress: bool | Literal["always"] = False,
) -> Estimate:
    """Compute or estimate the logarithm of the determinant of a positive definite operator.

    Parameters
    ----------
    A : HessianOperator, or another operator of this package or of scipy, or a matrix
        Real, symmetric and positive definite. Its damping is included.
    method : {"auto", "sparse", "lanczos"}, optional
        - ``"sparse"`` is exact, from the factors of `SparseInverse`.
        - ``"lanczos"`` is stochastic Lanczos quadrature [UCS]_: the logarithm of the determinant is
          the trace of the logarithm.
        - ``"auto"`` is ``"sparse"`` for a large matrix whose sparse form takes few products, and
          otherwise ``"lanczos"``.
    rtol, atol : float, optional
        The estimate has converged when its standard error is at most
        `max(rtol * abs(estimate), atol)`.
    steps : int, optional
        Steps of the Lanczos method for each random vector.
    max_products : int, optional
        Upper bound on the number of products, at least ``8 * steps``.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show a progress bar over the products, as for `trace`.

    Returns
    -------
    Estimate
        The standard error accounts for the random vectors; it is zero for ``"sparse"``. The
        quadrature adds an error that decreases exponentially with `steps`, at a rate that depends
        on the condition number.

    Raises
    ------
    NonFiniteError
        If a product is not finite.
    GraphModeError
        If the function is called while TensorFlow traces a graph.
    HvpError
        If an argument is invalid, or if the operator is not positive definite.

    References
    ----------
    .. [UCS] S. Ubaru, J. Chen and Y. Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos
       quadrature", SIAM Journal on Matrix Analysis and Applications 38(4), 2017.
       https://doi.org/10.1137/16M1104974

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> abs(hvp.logdet(H, rtol=0.1).estimate - 3.58) < 1
    True
    """
    matrix = symmetric_matrix(A, "logdet")
    check_count(steps, "steps")
    steps = min(steps, matrix.size)
    stopping = Stopping.of(rtol, atol, max_products, _FEWEST * steps)
    check_choice(method, "method", ("auto", "sparse", "lanczos"))
    if method != "lanczos":
        check_progress(progress)
        check_seed(seed)
        inverse = SparseInverse(A) if method == "sparse" else sparse_inverse(A)
        if inverse is not None and (method == "sparse" or inverse.negative is not None):
            return _of_factors(inverse)
    with probing(matrix, progress, seed, stopping.max_products) as probes:

        def draw(count: int) -> np.ndarray:
            quadrature = quadratures(probes, probes.draw(count), steps)
            _refuse_indefinite(quadrature)
            return matrix.size * _integrals(quadrature, np.log)

        samples = stopping.sample(draw, fewest=_FEWEST, widest=probes.widest, cost=steps)
    return estimate_of(samples, len(samples) * steps, "lanczos quadrature", stopping)


def _of_factors(inverse: SparseInverse) -> Estimate:
    if inverse.negative != 0:
        count = "some" if inverse.negative is None else inverse.negative
        raise HvpError(
            f"the operator is not positive definite: {count} of its eigenvalues are negative",
            "a positive definite operator, whose determinant has a logarithm",
            "damp the operator, as in A.damped(...), or use hvp.GaussNewtonOperator",
        )
    return Estimate(inverse.log_determinant, 0.0, inverse.products, True, "sparse", 0)


def _refuse_indefinite(quadrature: Quadrature) -> None:
    nodes = quadrature.nodes[quadrature.weights > NOTHING]
    lowest = nodes.min()
    rounding = len(nodes) * np.finfo(np.float64).eps * np.abs(nodes).max()
    if lowest <= rounding:
        raise HvpError(
            f"the operator is not positive definite: it has an eigenvalue of {lowest:.3g} or below",
            "a positive definite operator, whose determinant has a logarithm",
            f"damp the operator by more than {rounding - lowest:.3g}, as in A.damped(...), or use "
            "hvp.GaussNewtonOperator and some damping",
        )
