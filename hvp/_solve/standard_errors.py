"""Standard errors of parameters: roots of the diagonal of an inverse, or of a part of it."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np

from hvp._errors import ConvergenceWarning, HvpError, TooLargeError
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._runtime.progress import check_progress, progress_bar
from hvp._solve.inverses import ExactInverse
from hvp._solve.solve import SolveResult, check_arguments, solve
from hvp._solve.sparse import sparse_inverse
from hvp._vectors.selection import entries_of

# A matrix up to this size is diagonalized.
_DENSE = 4096
# Right-hand sides of one call of `solve`.
_BLOCK = 50


@Uninterrupted()
def standard_errors(
    H: Any,
    which: Any = None,
    *,
    rtol: float = 1e-6,
    maxiter: int | None = None,
    M: Any = None,
    progress: bool | Literal["always"] = False,
) -> np.ndarray:
    """Return standard errors of parameters: square roots of the diagonal of the inverse.

    Parameters
    ----------
    H : HessianOperator, or another symmetric operator or matrix
        The Hessian of a negative log-likelihood at its minimum, or its Gauss-Newton or Fisher
        matrix, for the sum over all examples (``reduction="sum"``).
    which : array of int, optional
        The numbers of the entries of the flat vector whose errors are wanted; all by default.
    rtol : float, optional
        The relative tolerance of conjugate gradients, where these are needed.
    maxiter, M, progress : optional
        As for `solve`. The progress bar counts entries.

    Returns
    -------
    ndarray
        The errors, in float64, in the order of `which`.

    Raises
    ------
    TooLargeError
        If all errors of more than 4096 parameters are wanted, and the matrix is not sparse.
    HvpError
        If the matrix is not positive definite, or conjugate gradients do not converge.

    Notes
    -----
    Up to 4096 parameters `ExactInverse` computes the errors, which are infinite for what is not
    determined. A larger sparse matrix is factorized (`SparseInverse`). Else the columns of the
    inverse come from block conjugate gradients, 50 at a time, and take as much memory as some
    hundred vectors. Their diagonal entries converge twice as fast as the columns.

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable(np.zeros(10_000))
    >>> loss = lambda: tf.reduce_sum(w**2) / 2 + tf.reduce_sum(w) ** 2 / 20_000
    >>> hvp.standard_errors(hvp.HessianOperator(loss, w), [0, 5]).round(6)
    array([0.999975, 0.999975])
    """
    check_progress(progress)
    check_arguments("block_cg", 0.0, rtol, 0.0, maxiter, M)
    matrix = symmetric_matrix(H, "standard_errors")
    places = np.arange(matrix.size) if which is None else entries_of(which, matrix.size)
    if matrix.size <= _DENSE:
        return ExactInverse(H).standard_errors()[places]
    inverse = sparse_inverse(H)
    if inverse is not None:
        return inverse.standard_errors(places)
    if which is None:
        raise TooLargeError(
            f"the standard errors of all {matrix.size} parameters were asked for",
            f"those of some, or of at most {_DENSE}, or a sparse matrix",
            "pass which=[...]",
        )
    variances = np.empty(len(places))
    with progress_bar(progress, total=len(places), unit="entry") as bar:
        for start in range(0, len(places), _BLOCK):
            deliver_interrupt()
            taken = places[start : start + _BLOCK]
            units = np.zeros((matrix.size, len(taken)), matrix.dtype.as_numpy_dtype)
            units[taken, np.arange(len(taken))] = 1
            with warnings.catch_warnings():  # an error says the same
                warnings.simplefilter("ignore", ConvergenceWarning)
                solution = solve(H, units, method="block_cg", rtol=rtol, maxiter=maxiter, M=M)
            _check(solution, taken)
            variances[start : start + _BLOCK] = solution.x[taken, np.arange(len(taken))]
            bar.update(len(taken))
    return np.sqrt(variances)


def _check(solution: SolveResult, taken: np.ndarray) -> None:
    """Refuse columns of an inverse that are not accurate, or not those of a covariance."""
    if solution.negative_curvature is not None:
        raise HvpError(
            "the matrix has a direction of negative curvature",
            "the Hessian at a minimum of the negative log-likelihood",
            "minimize first, or pass a Gauss-Newton or Fisher matrix",
        )
    if not solution.converged.all():
        place = int(np.argmin(solution.converged))
        raise HvpError(
            f"the column {taken[place]} of the inverse did not converge "
            f"({solution.outcomes[place]} after {solution.iterations[place]} iterations)",
            "a matrix that the data determine well enough",
            "raise maxiter or rtol, or pass M='nystrom'",
        )
