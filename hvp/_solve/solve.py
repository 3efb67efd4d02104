"""Linear systems with a symmetric operator, for one or many right-hand sides.

scipy's and TensorFlow's solvers take one right-hand side at a time, and a product of a block costs
much less than as many products; scipy's know no negative curvature, TensorFlow's take positive
definite operators only. So the iterations are the package's own; dense matrices go to scipy.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from hvp._errors import ConvergenceWarning, GraphModeError, HvpError, InvalidVectorError
from hvp._operators.operator import check_damping
from hvp._runtime.arguments import check_count
from hvp._runtime.checkpoint import Checkpoint
from hvp._runtime.digest import digest
from hvp._runtime.progress import check_progress
from hvp._solve.block_conjugate_gradients import BLOCK_CONJUGATE_GRADIENTS
from hvp._solve.conjugate_gradients import CONJUGATE_GRADIENTS
from hvp._solve.equations import Equations, Solution, solve_exactly, solve_iteratively
from hvp._solve.method import Method
from hvp._solve.minres import MINRES
from hvp._solve.outcome import Outcome
from hvp._solve.preconditioners import (
    NO_PRECONDITION,
    UNKNOWN,
    DiagonalPreconditioner,
    NystromPreconditioner,
    Precondition,
    Preconditioner,
)
from hvp._solve.right_hand_sides import RightHandSides
from hvp._solve.rows import Rows, norms

_KRYLOV = {m.name: m for m in (CONJUGATE_GRADIENTS, BLOCK_CONJUGATE_GRADIENTS, MINRES)}
_NAMES = ("auto", *_KRYLOV, "exact")
_PRECONDITIONERS: dict[str, Any] = {
    "nystrom": NystromPreconditioner,
    "diagonal": DiagonalPreconditioner,
}
# With "auto", matrices up to the first size go to the dense solver, and up to the second if there
# are so many right-hand sides that it needs hardly more products.
_SMALL, _DENSE, _PER_COLUMN = 128, 2048, 5
# Iterations by default, in units of n, as in scipy.
_ITERATIONS = 10


@dataclass(frozen=True, repr=False)
class SolveResult:
    """Solutions, and how good they are.

    Where `b` was one vector or nest, arrays over columns are single numbers.

    Attributes
    ----------
    x : ndarray, tf.Tensor or nest
        In the form of `b`. A column that did not converge holds the best that was found.
    converged : ndarray of bool, or bool
        Whether the residual is as small as was asked for; for each column, of shape `(k,)`.
    iterations : ndarray of int, or int
        Of each column.
    residual_norms : ndarray, or float
        Euclidean norms of `b - (H + damping I) x`, by a product at the end.
    negative_curvature : ndarray, tf.Tensor, nest or None
        A direction for each column along which the damped operator's curvature is not positive,
        where one was met, and zeros elsewhere; in the form of `b`. None if none was met.
    outcomes : ndarray of str, or str
        ``"converged"``, ``"negative curvature"``, ``"least squares"`` (the operator is singular, or
        so badly conditioned that to its method it looks so, and no solution was found; `x` is the
        shortest of those that leave the least residual),
        ``"stalled"`` (the residual has stopped falling) or ``"maxiter"``.
    method : str
        What was used, in this order.
    products : int
        Of the operator with vectors.
    """

    x: Any
    converged: Any
    iterations: Any
    residual_norms: Any
    negative_curvature: Any
    outcomes: Any
    method: str
    products: int

    def __repr__(self) -> str:
        good, total = int(np.sum(self.converged)), int(np.size(self.converged))
        return (
            f"SolveResult({good} of {total} converged by {self.method}, {self.products} products, "
            f"residual norms up to {np.max(self.residual_norms, initial=0):.3g})"
        )


def solve(
    H: Any,
    b: Any,
    *,
    method: Literal["auto", "cg", "block_cg", "minres", "exact"] = "auto",
    damping: float = 0.0,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    x0: Any = None,
    progress: bool | Literal["always"] = False,
    checkpoint: Any = None,
) -> SolveResult:
    """Solve `(H + damping I) x = b` for one or many right-hand sides.

    Parameters
    ----------
    H : HessianOperator, or scipy LinearOperator or matrix
        Real and symmetric. Of the package's own operators products are computed in blocks, inside a
        graph that runs some tens of iterations at a time.
    b : array_like of shape `(n,)` or `(n, k)`, tf.Tensor, or nest
        One vector, or one in each column; or a nest like the variables.
    method : {"auto", "cg", "block_cg", "minres", "exact"}, optional
        ``"cg"``, conjugate gradients, for positive definite operators; columns that have converged
        drop out. ``"block_cg"``, where every column searches the Krylov space of all: the fewest
        products for many columns. ``"minres"`` for indefinite and singular operators. ``"exact"``,
        by all eigenvalues, for small `n`. ``"auto"`` takes ``"exact"`` where that is cheapest,
        else conjugate gradients, for more than one column those of the block; with columns that
        have met negative curvature it goes on by all eigenvalues up to `n` of 2048, and by MINRES
        above.
    damping : float, optional
        Added to the operator's own.
    rtol, atol : float, optional
        A column has converged when the norm of its residual is at most `rtol` times the norm of its
        right-hand side, or `atol`.
    maxiter : int, optional
        Iterations for each column; 10 `n` by default.
    M : {"nystrom", "diagonal"}, preconditioner or LinearOperator, optional
        Approximates the inverse, positive definite. By name it is made for this call. For
        conjugate gradients of single columns, and MINRES.
    x0 : like `b`, optional
        Where to begin; zero by default.
    progress : bool or "always", optional
        Shows a bar over the columns, by tqdm, on a terminal; with ``"always"`` anywhere.
    checkpoint : str or Path, optional
        A file in which columns that are finished, and the iterates of the others, are saved twice a
        minute and when interrupted. The same call, started again, goes on from there; that of
        another operator, right-hand side or setting is refused.

    Returns
    -------
    SolveResult

    Warns
    -----
    ConvergenceWarning
        If a column has not converged. Make it an error by
        ``warnings.simplefilter("error", hvp.ConvergenceWarning)``.

    Raises
    ------
    InvalidVectorError
        If `b` or `x0` has another shape or kind, or entries that are not finite.
    NonFiniteError
        If a product is not finite.
    CheckpointError
        If the checkpoint cannot be written, or is of another run.
    TooLargeError
        If `method` is ``"exact"`` and `n` larger than 4096.
    HvpError
        If another argument is not what it should be.

    Notes
    -----
    What the iterations believe of their residuals is checked by a product at the end, and they
    begin again from there where rounding has made the two differ. In exact arithmetic the solution
    of a consistent singular system, from zero, is the shortest.

    Columns of a block are at most 128 and take at most 1 GiB; more are solved one block after the
    other.

    Examples
    --------
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> result = hvp.solve(H, [1.0, 4.0, 9.0])
    >>> result.x, result.converged
    (array([1., 1., 1.], dtype=float32), True)
    """
    rows = Rows(H)
    if rows.own:
        _ = H.value  # an operator that is closed or stale says so before anything is done
    _check(method, damping, rtol, atol, maxiter, M)
    check_progress(progress)
    given = RightHandSides(rows, b, "b")
    start = None if x0 is None else RightHandSides(rows, x0, "x0").rows
    if start is not None and start.shape != given.rows.shape:
        raise InvalidVectorError(
            f"x0 has {len(start)} columns, and b has {len(given.rows)}", "as many"
        )
    equations = Equations(
        rows,
        float(rows.damping + damping),
        np.maximum(rtol * norms(given.rows), atol),
        _ITERATIONS * rows.size if maxiter is None else int(maxiter),
    )
    if method == "auto" and M is None and len(given.rows) and _is_dense(rows.size, len(given.rows)):
        method = "exact"
    precondition, made = _precondition(rows, M, damping)
    kept = None
    if checkpoint is not None:
        settings = [method, equations.damping, rtol, atol, equations.maxiter]
        fingerprint = {
            "call": "hvp.solve",
            **rows.fingerprint(),
            "right-hand sides": digest(given.rows),
            "start": "" if start is None else digest(start),
            "preconditioner": _fingerprint_of(precondition, rows),
            "settings": repr(settings),
        }
        kept = Checkpoint(checkpoint, fingerprint)
    if method == "exact":
        saved = {} if kept is None else kept.load()
        solution = Solution.of_arrays(saved) if saved else solve_exactly(equations, given.rows)
        if kept is not None and not saved:
            kept.save(solution.arrays())
        return _result(given, solution, ["exact"])
    methods = _methods(method, rows.size, len(given.rows), M)
    solution, used = solve_iteratively(
        equations, given.rows, start, methods, precondition, progress, kept
    )
    solution.products += made
    negative = np.flatnonzero(solution.outcome == Outcome.NEGATIVE_CURVATURE)
    if method == "auto" and len(methods) == 1 and len(negative):
        some = replace(equations, tolerance=equations.tolerance[negative])
        solution.replace(negative, solve_exactly(some, given.rows[negative]))
        used.append("exact")
    return _result(given, solution, used)


def _check(method: Any, damping: Any, rtol: Any, atol: Any, maxiter: Any, M: Any) -> None:
    if not tf.executing_eagerly():
        raise GraphModeError("solve is called while TensorFlow traces a graph", "eager execution")
    if method not in _NAMES:
        raise HvpError(f"the method is {method!r}", " or ".join(map(repr, _NAMES)))
    check_damping(damping)
    for name, value in (("rtol", rtol), ("atol", atol)):
        real = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if not real or not math.isfinite(value) or value < 0:
            raise HvpError(f"the argument {name} is {value!r}", "a number that is not negative")
    if maxiter is not None:
        check_count(maxiter, "maxiter")
    if M is not None and method in ("block_cg", "exact"):
        raise HvpError(f"M is given, and the method is {method!r}", "'cg' or 'minres', with M")


def _is_dense(size: int, count: int) -> bool:
    """Whether all eigenvalues cost no more than iterations would, about."""
    return size <= max(_SMALL, min(_DENSE, _PER_COLUMN * count))


def _methods(method: str, size: int, count: int, M: Any) -> list[Method]:
    """Return the iterations; "auto" goes on by all eigenvalues where those are cheap."""
    if method != "auto":
        return [_KRYLOV[method]]
    first = BLOCK_CONJUGATE_GRADIENTS if count > 1 and M is None else CONJUGATE_GRADIENTS
    return [first] if size <= _DENSE else [first, MINRES]


def _precondition(rows: Rows, M: Any, damping: float) -> tuple[Precondition, int]:
    """Return what applies the preconditioner, and the products that were needed to make it."""
    if M is None:
        return NO_PRECONDITION, 0
    made = 0
    if isinstance(M, str):
        if M not in _PRECONDITIONERS:
            raise HvpError(f"M is {M!r}", " or ".join(map(repr, _PRECONDITIONERS)))
        M = _PRECONDITIONERS[M](rows.operator, damping=damping)
        made = M.products
    known = isinstance(M, (LinearOperator, np.ndarray)) or hasattr(M, "toarray")
    if not known or tuple(M.shape) != (rows.size, rows.size):
        shown = f"of shape {tuple(M.shape)}" if known else type(M).__name__
        raise HvpError(
            f"M is {shown}",
            f"'nystrom', 'diagonal', or a preconditioner or LinearOperator of {rows.size} rows",
        )
    if isinstance(M, Preconditioner) and M.dtype == rows.dtype.as_numpy_dtype:
        return M.precondition, made
    operator = aslinearoperator(M)

    def in_numpy(block: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(operator.matmat(block.T).T, block.dtype)

    def apply(block: tf.Tensor, tensors: Any) -> tf.Tensor:
        del tensors
        return tf.ensure_shape(tf.numpy_function(in_numpy, [block], block.dtype), block.shape)

    return Precondition(UNKNOWN, [], apply), made


def _fingerprint_of(precondition: Precondition, rows: Rows) -> str:
    """Return what tells a preconditioner from others, also in another process."""
    if precondition.key is not UNKNOWN:
        return " ".join([repr(precondition.key), *map(digest, precondition.tensors)])
    applied = precondition.apply(tf.constant(rows.probe()), precondition.tensors)
    return f"{UNKNOWN} {digest(applied)}"


def _result(given: RightHandSides, solution: Solution, used: list[str]) -> SolveResult:
    converged = solution.outcome == Outcome.CONVERGED
    outcomes = np.array([str(Outcome(number)) for number in solution.outcome], dtype=object)
    met = bool(solution.directions.any())
    result = SolveResult(
        x=given.like(solution.x),
        converged=given.of_columns(converged),
        iterations=given.of_columns(solution.iterations),
        residual_norms=given.of_columns(solution.residual_norms),
        negative_curvature=given.like(solution.directions) if met else None,
        outcomes=outcomes[0] if given.single else outcomes,
        method=", ".join(used),
        products=solution.products,
    )
    if not converged.all():
        warnings.warn(_said(solution, outcomes), ConvergenceWarning, stacklevel=3)
    return result


_ADVICE = {
    Outcome.NEGATIVE_CURVATURE: "the operator is not positive definite: raise damping, or use "
    "method='minres'",
    Outcome.LEAST_SQUARES: "the operator is singular, or nearly so, and x is of least squares: "
    "raise damping",
    Outcome.STALLED: "the residual has stopped falling, for rounding or an ill-conditioned "
    "operator: raise rtol or damping, or use float64",
    Outcome.MAXITER: "more iterations are needed: raise maxiter, or use M='nystrom'",
}


def _said(solution: Solution, outcomes: np.ndarray) -> str:
    wrong = solution.outcome != Outcome.CONVERGED
    advice = [said for outcome, said in _ADVICE.items() if outcome in solution.outcome]
    worst = solution.residual_norms[wrong].max()
    return (
        f"hvp.solve: {int(wrong.sum())} of {len(wrong)} columns have not converged, with residual "
        f"norms up to {worst:.3g}; {'; '.join(advice)}"
    )
