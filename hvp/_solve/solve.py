"""Linear systems with a symmetric operator, for one or many right-hand sides.

The solvers of scipy and TensorFlow take one right-hand side at a time, although the product of a
block costs much less than the separate products. Those of scipy do not detect negative curvature,
and those of TensorFlow require a positive definite operator. The iterations are therefore
implemented here; dense matrices are solved by scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from hvp._derivatives.belonging import may_be_recorded, recorded_solution
from hvp._engines.array_map import ArrayMap
from hvp._engines.linear_map import TensorFunction
from hvp._errors import ConvergenceWarning, GraphModeError, HvpError, InvalidVectorError
from hvp._operators.damping import check_damping
from hvp._operators.matrix import Matrix
from hvp._operators.operator import Operator, gradient_of_products
from hvp._operators.symmetric import matrix_of
from hvp._runtime.arguments import check_choice, check_count, check_number
from hvp._runtime.checkpoint import Checkpoint
from hvp._runtime.digest import digest
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.progress import check_progress
from hvp._runtime.strategies import in_another_thread
from hvp._runtime.user_warning import warn
from hvp._solve.block_conjugate_gradients import BLOCK_CONJUGATE_GRADIENTS
from hvp._solve.block_progress import Solution
from hvp._solve.conjugate_gradients import CONJUGATE_GRADIENTS
from hvp._solve.equations import (
    Equations,
    solve_directly,
    solve_iteratively,
)
from hvp._solve.in_graph import RowSolution, solve_in_graph
from hvp._solve.inverses import ExactInverse
from hvp._solve.method import Method
from hvp._solve.minres import MINRES
from hvp._solve.nystrom import NystromSketch, nystrom_factors
from hvp._solve.outcome import SolveOutcome
from hvp._solve.preconditioners import (
    NO_PRECONDITION,
    UNKNOWN,
    DiagonalPreconditioner,
    NystromPreconditioner,
    nystrom_precondition,
)
from hvp._solve.rank import sketch_that_pays
from hvp._solve.recycled import RecycledSpace
from hvp._solve.right_hand_sides import RightHandSides
from hvp._solve.rows import norms
from hvp._solve.sparse import SparseInverse
from hvp._vectors.nests import flattened, unflattened

_KRYLOV = {m.name: m for m in (CONJUGATE_GRADIENTS, BLOCK_CONJUGATE_GRADIENTS, MINRES)}
_NAMES = ("auto", *_KRYLOV, "exact", "sparse")
_PRECONDITIONERS: dict[str, Any] = {
    "nystrom": NystromPreconditioner,
    "diagonal": DiagonalPreconditioner,
}
# With "auto", the dense solver is used up to the size _SMALL. Up to the size _DENSE it is used if
# there are so many right-hand sides that iterations, at least _PER_COLUMN for each, would need
# about as many products.
_SMALL, _DENSE, _PER_COLUMN = 128, 2048, 5
# The default of maxiter, in units of n, as in scipy.
_ITERATIONS = 10


@dataclass(frozen=True, repr=False)
class SolveResult:
    """The result of `solve`: the solutions and their accuracy.

    If `b` was a single vector or a nest, the attributes with one entry per column are numbers.

    Attributes
    ----------
    x : ndarray, tf.Tensor or nest
        The solutions, in the form of `b`. A column that did not converge holds the best solution
        of the iteration.
    converged : ndarray of bool, or bool
        Whether each column has converged, of shape `(k,)`.
    iterations : ndarray of int, or int
        Number of iterations of each column.
    residual_norms : ndarray, or float
        Euclidean norms of `b - (H + damping I) x`, computed by a product at the end.
    negative_curvature : ndarray, tf.Tensor, nest or None
        For each column, a direction along which the curvature of the damped operator is not
        positive, if the method met one, and zeros otherwise; in the form of `b`. None if no column
        met one, or if the operator is known to be positive semi-definite, so that negative
        curvature is a rounding error.
    outcomes : ndarray of str, or str
        For each column, ``"converged"``, ``"negative curvature"``, ``"least squares"`` (the
        operator is singular, or so ill-conditioned that it appears to be, and no solution exists;
        `x` is the least-squares solution of smallest norm), ``"stalled"`` (the residual has stopped
        falling) or ``"maxiter"``.
    method : str
        The methods that were used, in order.
    products : int
        Number of products of the operator with vectors.
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
        if self.outcomes is None:
            return f"SolveResult(in a graph, by {self.method})"
        count, total = int(np.sum(self.converged)), int(np.size(self.converged))
        indefinite = (
            "" if self.negative_curvature is None else "; the operator is not positive definite"
        )
        methods = self.method.replace(", ", ", then ")
        return (
            f"SolveResult({count} of {total} converged by {methods}, {self.products} products, "
            f"residual norms up to {np.max(self.residual_norms, initial=0):.3g}{indefinite})"
        )


@tf.autograph.experimental.do_not_convert
@Uninterrupted()
def solve(
    H: Any,
    b: Any,
    *,
    method: Literal["auto", "cg", "block_cg", "minres", "exact", "sparse"] = "auto",
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
        Real and symmetric. Products with an operator of this package are computed in blocks, in a
        graph that runs some tens of iterations at a time.
    b : array_like of shape `(n,)` or `(n, k)`, tf.Tensor, or nest
        A single right-hand side, or one in each column, or a nest with the structure of the
        variables.
    method : {"auto", "cg", "block_cg", "minres", "exact", "sparse"}, optional
        - ``"cg"`` is the method of conjugate gradients, for positive definite operators. Columns
          that have converged are removed from the block.
        - ``"block_cg"`` is the method of block conjugate gradients, in which every column searches
          the Krylov space of all columns. It needs the fewest products for many columns.
        - ``"minres"`` is for indefinite and singular operators.
        - ``"exact"`` computes all eigenvalues, for small `n`.
        - ``"sparse"`` factorizes a matrix whose entries are mostly zero; see `SparseInverse`.
        - ``"auto"``, the default, chooses ``"exact"`` if that is cheapest, otherwise ``"cg"`` for
          a single column and ``"block_cg"`` for more columns. The columns in which these meet
          negative curvature are then solved by ``"exact"`` for `n` up to 2048, and by ``"minres"``
          for larger `n`.
    damping : float, optional
        Multiple of the identity that is added to the operator's own damping.
    rtol, atol : float, optional
        A column has converged when the norm of its residual is at most
        `max(rtol * norm(b), atol)`.
    maxiter : int, optional
        Upper bound on the iterations of each column; `10 * n` by default.
    M : {"auto", "nystrom", "diagonal"}, preconditioner or LinearOperator, optional
        A positive definite approximation of the inverse. A name computes a preconditioner for this
        call. With ``"auto"``, conjugate gradients with a positive damping are preconditioned by the
        Nystrom approximation whose rank is expected to save the most products, for this number of
        columns and this tolerance; if no rank pays, this costs 8 products.
    x0 : like `b`, optional
        Initial guess; zero by default.
    progress : bool or "always", optional
        Whether to show a progress bar over the columns, with tqdm, if the output is a terminal.
        With ``"always"`` it is shown on any output.
    checkpoint : str or Path, optional
        A file in which the solutions and iterates are saved twice a minute and when the call is
        interrupted. The same call resumes from the file. A file from a call with another operator,
        right-hand side or setting is refused.

    Returns
    -------
    SolveResult

    Warns
    -----
    ConvergenceWarning
        If a column has not converged. To make it an error, call
        ``warnings.simplefilter("error", hvp.ConvergenceWarning)``.

    Raises
    ------
    InvalidVectorError
        If `b` or `x0` has another shape or type, or entries that are not finite.
    NonFiniteError
        If a product is not finite.
    CheckpointError
        If the checkpoint cannot be written, or belongs to another call.
    TooLargeError
        If `method` is ``"exact"`` and `n` is larger than 4096.
    GraphModeError
        In a graph: if an option is given that needs Python.
    HvpError
        If another argument is invalid.

    Notes
    -----
    The residuals of the solutions are computed by a product at the end, because those of the
    iterations differ by rounding. If a residual turns out to be too large, the iterations begin
    again from there, as long as that helps. In exact arithmetic, and from the initial guess zero,
    the solution of a consistent singular system is the one of smallest norm.

    If rounding prevents a float32 operator of this package from reaching the tolerance, its
    residuals are computed in float64, and the iterations refine the solution, which stays float32.
    This takes another trace and, temporarily, the memory of an evaluation in float64. It requires
    the graph engine, and is left out with `memory_limit`, `recompute` or `devices`.

    A block has at most 128 columns and takes at most 1 GiB of memory. More columns are solved block
    by block.

    If `b` is a tensor, or a nest of tensors, tapes see `x` as a function of it: a gradient costs
    another solution. If `H` is a `HessianOperator` whose data are one batch, if any, `x` is a
    function of the variables as well, as `product` is; other gradients in variables raise a
    `SecondDerivativeError`.

    In a `tf.function` the iterations become a loop of the graph, which XLA can compile if it can
    the product. Methods are ``"cg"`` and ``"minres"``; `M`, `x0`, `checkpoint` and `progress`
    cannot be given, and `converged`, `iterations`, `residual_norms` and `products` are tensors,
    `outcomes` None. Nothing can be raised or warned of there: look at `converged`. A gradient that
    is not accurate is NaN.

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
    choices: dict[str, Any] = {"damping": damping, "rtol": rtol, "atol": atol, "maxiter": maxiter}
    if not tf.executing_eagerly():
        given = {"M": M, "x0": x0, "checkpoint": checkpoint, "progress": progress or None}
        return _solve_in_graph(H, b, method, given, **choices)

    def solved(right: Any, start: Any = None, file: Any = None) -> SolveResult:
        choices.update(method=method, M=M, x0=start, progress=progress, checkpoint=file)
        return solve_with(H, right, None, **choices)

    return on_tapes(H, b, solved, x0, checkpoint)


def on_tapes(H: Any, b: Any, solved: Callable[..., SolveResult], *given: Any) -> SolveResult:
    """Solve, so that tapes see the solution as a function of tensors `b` and of variables of `H`.

    `solved` takes a right-hand side, and `given` as well if that is `b`.
    """
    if not may_be_recorded():
        return solved(b, *given)
    result = in_another_thread(solved, b, *given)
    if not any(map(tf.is_tensor, tf.nest.flatten(b))):
        return result

    def again(right: tf.Tensor) -> Any:
        if not tf.executing_eagerly():
            raise GraphModeError(
                "a gradient of a solution was asked for while TensorFlow traces a graph",
                "eager execution",
                "pass experimental_use_pfor=False to tape.jacobian",
            )
        return in_another_thread(solved, right).x

    return replace(result, x=_recorded(H, b, result.x, again))


def solve_with(
    H: Any,
    b: Any,
    recycled: RecycledSpace | None,
    *,
    preconditions: bool = True,
    method: Any,
    damping: Any,
    rtol: Any,
    atol: Any,
    maxiter: Any,
    x0: Any,
    progress: Any,
    M: Any = None,
    checkpoint: Any = None,
) -> SolveResult:
    """Solve as `solve` does, with recycled directions.

    Block conjugate gradients add their directions to `recycled`, unless it is None. With
    `preconditions`, they are also preconditioned by it if `M` is None or "auto"; if it is empty, it
    then begins with a sketch of the operator, of a rank that pays.
    """
    if not tf.executing_eagerly():
        raise GraphModeError("a solver was called while TensorFlow traces a graph", "hvp.solve")
    matrix = matrix_of(H)
    matrix.make_sure()
    check_arguments(method, damping, rtol, atol, maxiter, M)
    check_progress(progress)
    right_hand_sides = RightHandSides(matrix, b, "b")
    columns = right_hand_sides.rows
    start = None if x0 is None else RightHandSides(matrix, x0, "x0").rows
    if start is not None and start.shape != columns.shape:
        raise InvalidVectorError(
            f"x0 has {len(start)} columns, but b has {len(columns)}", "the same number of columns"
        )
    scales = _scales(columns)
    columns = columns / scales[:, np.newaxis]
    with matrix.in_full_precision() as exact:
        equations = Equations(
            exact,
            float(matrix.damping + damping),
            np.maximum(rtol * norms(columns), atol / scales.astype(float)),
            _ITERATIONS * matrix.size if maxiter is None else int(maxiter),
            None if exact is matrix else matrix,
            recycled,
        )
        is_open = M is None or (isinstance(M, str) and M == "auto")
        if method == "auto" and is_open and len(columns) and _is_dense(matrix.size, len(columns)):
            method = "exact"
        methods = _methods(method, matrix.size, 2 if recycled is not None else len(columns))
        if not is_open:
            precondition, setup_products = _precondition(matrix, M, damping)
        elif recycled is not None and preconditions:
            setup_products = _begin_recycling(equations, columns, methods, recycled)
            precondition = recycled.precondition(equations.damping)
        elif M is not None:
            precondition, setup_products = _precondition_that_pays(equations, columns, methods)
        else:
            precondition, setup_products = NO_PRECONDITION, 0
        file = None
        if checkpoint is not None:
            settings: list[Any] = [method, equations.damping, rtol, atol, equations.maxiter]
            settings += [] if equations.low is None else ["low precision"]
            fingerprint = {
                "call": "hvp.solve",
                **matrix.fingerprint(),
                "right-hand sides": digest(right_hand_sides.rows),
                "start": "" if start is None else digest(start),
                "preconditioner": _fingerprint(precondition, matrix),
                "settings": repr(settings),
            }
            file = Checkpoint(checkpoint, fingerprint)
        if start is not None:
            start = start / scales[:, np.newaxis]
        if method in ("sparse", "exact"):
            saved_state = {} if file is None else file.load()
            if saved_state:
                solution = Solution.of_arrays(saved_state)
            else:
                make = SparseInverse if method == "sparse" else ExactInverse
                inverse = make(H if method == "sparse" else exact, damping=damping)
                solution = solve_directly(equations, columns, inverse)
                if file is not None:
                    file.save(solution.arrays())
            used = [method]
        else:
            solution, used = solve_iteratively(
                equations, columns, start, methods, precondition, progress, file
            )
            solution.products += setup_products
        negative = np.flatnonzero(solution.outcome == SolveOutcome.NEGATIVE_CURVATURE)
        if method == "auto" and len(methods) == 1 and len(negative):
            remaining = replace(equations, tolerance=equations.tolerance[negative])
            inverse = ExactInverse(exact, damping=damping)
            solution.replace(negative, solve_directly(remaining, columns[negative], inverse))
            used.append("exact")
        if matrix.is_positive_semidefinite and damping >= 0:
            solution.forget_curvature()
        solution.x *= scales[:, np.newaxis]
        solution.residual_norms *= scales
        return _result(right_hand_sides, solution, used)


def _scales(rows: np.ndarray) -> np.ndarray:
    """Return powers of two by which to divide rows whose squares would not be numbers.

    They are 1 for others. Scaling by a power of two leaves every digit as it is.
    """
    limit = float(np.finfo(rows.dtype).tiny) ** 0.25
    largest = np.abs(rows).max(axis=1, initial=0)
    is_extreme = (largest > 0) & ((largest < limit) | (largest > 1 / limit))
    exponents = np.where(is_extreme, np.frexp(largest)[1] - 1, 0)
    return np.ldexp(np.ones_like(largest), exponents)


def _recorded(H: Any, b: Any, x: Any, solve_again: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return a solution as tapes should see it: a function of `b`, and of the operator's variables.

    `solve_again` solves for a flat right-hand side, or columns of these.
    """
    matrix, is_nest = matrix_of(H), not tf.is_tensor(x)
    right = flattened(matrix.space, b) if is_nest else tf.cast(tf.identity(b), matrix.dtype)
    first = [flattened(matrix.space, x) if is_nest else x]

    known = gradient_of_products(H)

    def gradient(vectors: Any, cotangents: Any, places: Sequence[int]) -> Sequence[tf.Tensor]:
        assert known is not None
        if len(vectors.shape) == 1:
            return known(vectors, cotangents, places)
        pairs = zip(tf.unstack(vectors, axis=1), tf.unstack(cotangents, axis=1))
        return [tf.add_n(slopes) for slopes in zip(*(known(u, v, places) for u, v in pairs))]

    def solved(right: tf.Tensor) -> tf.Tensor:
        return first.pop() if first else solve_again(right)

    linear_map = matrix.linear_map
    solution = recorded_solution(
        solved, right, linear_map.sources, known and gradient, linear_map.same_point()
    )
    return unflattened(matrix.space, solution) if is_nest else solution


def _solve_in_graph(
    H: Any,
    b: Any,
    method: Any,
    given: dict[str, Any],
    *,
    damping: Any,
    rtol: Any,
    atol: Any,
    maxiter: Any,
) -> SolveResult:
    """Solve inside the graph being traced."""
    check_arguments(method, damping, rtol, atol, maxiter, None)
    others = [name for name, value in given.items() if value is not None]
    iterative = {m.name: m for m in (CONJUGATE_GRADIENTS, MINRES)} | {"auto": CONJUGATE_GRADIENTS}
    if others or method not in iterative or not isinstance(H, Operator):
        problem = f"{', '.join(others)} is given" if others else f"the method is {method!r}"
        raise GraphModeError(
            "solve was called while TensorFlow traces a graph, and "
            + (problem if isinstance(H, Operator) else f"the operator is {type(H).__name__}"),
            "an operator of this package, and the method 'auto', 'cg' or 'minres' alone",
        )
    matrix = matrix_of(H)
    is_nest = tf.nest.is_nested(b) or tuple(b.shape) == matrix.space.shapes[0] != (matrix.size,)
    flat = flattened(matrix.space, b) if is_nest else tf.cast(b, matrix.dtype)
    is_single = len(flat.shape) == 1
    total = float(matrix.damping + damping)

    def solved(right: tf.Tensor) -> RowSolution:
        rows = right[tf.newaxis] if is_single else tf.transpose(right)
        # Squares of the entries might not be numbers.
        scale = tf.reduce_max(tf.abs(rows), axis=1)
        scale = tf.where((scale > 0) & tf.math.is_finite(scale), scale, tf.ones_like(scale))
        rows /= scale[:, tf.newaxis]
        tolerance = tf.maximum(rtol * tf.norm(rows, axis=1), tf.cast(atol, rows.dtype) / scale)
        found = solve_in_graph(
            iterative[method],
            lambda rows: matrix.multiply(rows) + total * rows,
            rows,
            tolerance,
            _ITERATIONS * matrix.size if maxiter is None else int(maxiter),
        )
        return found._replace(
            rows=found.rows * scale[:, tf.newaxis], residual_norms=found.residual_norms * scale
        )

    def like_right(rows: tf.Tensor) -> tf.Tensor:
        return rows[0] if is_single else tf.transpose(rows)

    def solved_or_nan(right: tf.Tensor) -> tf.Tensor:
        found = solved(right)
        is_found = tf.equal(found.outcome, int(SolveOutcome.CONVERGED))
        nan = tf.cast(np.nan, found.rows.dtype)
        return like_right(tf.where(is_found[:, tf.newaxis], found.rows, nan))

    found = solved(flat)
    x = _recorded(H, flat, like_right(found.rows), solved_or_nan)
    converged = tf.equal(found.outcome, int(SolveOutcome.CONVERGED))
    columns = [converged, found.iterations, found.residual_norms]
    numbers = [one[0] for one in columns] if is_single else columns
    return SolveResult(
        x=unflattened(matrix.space, x) if is_nest else x,
        converged=numbers[0],
        iterations=numbers[1],
        residual_norms=numbers[2],
        negative_curvature=None,
        outcomes=None,
        method=iterative[method].name,
        products=tf.reduce_max(found.iterations) * tf.shape(found.rows)[0],
    )


def check_arguments(method: Any, damping: Any, rtol: Any, atol: Any, maxiter: Any, M: Any) -> None:
    """Refuse arguments of `solve` that are invalid."""
    check_choice(method, "method", _NAMES)
    check_damping(damping)
    check_number(rtol, "rtol")
    check_number(atol, "atol")
    if maxiter is not None:
        check_count(maxiter, "maxiter")
    if M is not None and method in ("exact", "sparse"):
        raise HvpError(
            f"the method is {method!r}, which takes no preconditioner M",
            "an iterative method",
            "leave M or method out",
        )


def _is_dense(size: int, count: int) -> bool:
    """Return whether all eigenvalues cost no more than iterations, or about the same."""
    return size <= max(_SMALL, min(_DENSE, _PER_COLUMN * count))


def _methods(method: str, size: int, count: int) -> list[Method]:
    """Return the Krylov methods to try, in order.

    With "auto" and a small size, `solve` falls back on the dense solver instead of MINRES.
    """
    if method != "auto":
        return [_KRYLOV[method]] if method in _KRYLOV else []
    first = BLOCK_CONJUGATE_GRADIENTS if count > 1 else CONJUGATE_GRADIENTS
    return [first] if size <= _DENSE else [first, MINRES]


def _choose_sketch(
    equations: Equations, columns: np.ndarray, methods: list[Method]
) -> NystromSketch | None:
    """Sketch the operator with a rank that pays; return None if no rank is expected to pay."""
    lengths = norms(columns)
    is_conjugate_gradients = methods[:1] in ([CONJUGATE_GRADIENTS], [BLOCK_CONJUGATE_GRADIENTS])
    if not is_conjugate_gradients or equations.damping <= 0 or not lengths.any():
        return None
    nonzero = lengths > 0
    rtol = float(np.min(equations.tolerance[nonzero] / lengths[nonzero]))
    return sketch_that_pays(
        equations.matrix,
        equations.damping,
        int(nonzero.sum()),
        are_together=not methods[0].separable,
        rtol=rtol,
    )


def _precondition_that_pays(
    equations: Equations, columns: np.ndarray, methods: list[Method]
) -> tuple[TensorFunction, int]:
    """Return the preconditioner for `M="auto"`, and the number of products that it needed."""
    sketch = _choose_sketch(equations, columns, methods)
    if sketch is None:
        return NO_PRECONDITION, 0
    factors = nystrom_factors(sketch.eigenvalues, equations.damping)
    tensors = tf.constant(sketch.eigenvectors), tf.constant(factors, equations.matrix.dtype)
    return nystrom_precondition(*tensors), sketch.rank


def _begin_recycling(
    equations: Equations, columns: np.ndarray, methods: list[Method], recycled: RecycledSpace
) -> int:
    """Fill an empty space with a sketch that pays; return the number of products it needed."""
    sketch = None if len(recycled) else _choose_sketch(equations, columns, methods)
    if sketch is None:
        return 0
    recycled.add(sketch.basis, sketch.images)
    return sketch.rank


def _precondition(matrix: Matrix, M: Any, damping: float) -> tuple[TensorFunction, int]:
    """Return the preconditioner, and the number of products that it needed."""
    products = 0
    if isinstance(M, str):
        if M not in _PRECONDITIONERS:
            names = ("auto", *_PRECONDITIONERS)
            raise HvpError(f"M is {M!r}", " or ".join(map(repr, names)))
        M = _PRECONDITIONERS[M](matrix, damping=damping)
        products = M.products
    is_matrix = isinstance(M, (LinearOperator, np.ndarray)) or hasattr(M, "toarray")
    if not is_matrix or tuple(M.shape) != (matrix.size, matrix.size):
        description = f"of shape {tuple(M.shape)}" if is_matrix else type(M).__name__
        raise HvpError(
            f"M is {description}",
            "'nystrom', 'diagonal', or a preconditioner or LinearOperator of shape "
            f"({matrix.size}, {matrix.size})",
        )
    native = M.linear_map if isinstance(M, Operator) else None
    if native is not None and native.domain.dtype == matrix.dtype:
        function = native.as_function()
        if function is not None:
            return function, products
    operator = aslinearoperator(M)
    if np.dtype(operator.dtype).kind == "c":
        raise HvpError(f"M has the dtype {operator.dtype}", "a real preconditioner")
    foreign = ArrayMap(lambda rows: operator.matmat(rows.T).T, matrix.space)
    return TensorFunction(UNKNOWN, [], lambda block, tensors: foreign.apply(block)), products


def _fingerprint(precondition: TensorFunction, matrix: Matrix) -> str:
    """Return a fingerprint of a preconditioner that is the same in every process."""
    if precondition.key is not UNKNOWN:
        return " ".join([repr(precondition.key), *map(digest, precondition.tensors)])
    product = precondition.apply(tf.constant(matrix.probe()), precondition.tensors)
    return f"{UNKNOWN} {digest(product)}"


def _result(right_hand_sides: RightHandSides, solution: Solution, used: list[str]) -> SolveResult:
    """Return the solution in the form of the right-hand sides; warn if it is incomplete."""
    converged = solution.outcome == SolveOutcome.CONVERGED
    outcomes = np.array([str(SolveOutcome(number)) for number in solution.outcome], dtype=object)
    directions = solution.directions
    result = SolveResult(
        x=right_hand_sides.like(solution.x),
        converged=right_hand_sides.of_columns(converged),
        iterations=right_hand_sides.of_columns(solution.iterations),
        residual_norms=right_hand_sides.of_columns(solution.residual_norms),
        negative_curvature=right_hand_sides.like(directions) if directions.any() else None,
        outcomes=outcomes[0] if right_hand_sides.single else outcomes,
        method=", ".join(used),
        products=solution.products,
    )
    if not converged.all():
        warn(_warning(solution), ConvergenceWarning)
    return result


_ADVICE = {
    SolveOutcome.NEGATIVE_CURVATURE: "the operator is not positive definite: raise damping, or use "
    "method='minres'",
    SolveOutcome.LEAST_SQUARES: "the operator is singular, or nearly so, and x is a least-squares "
    "solution: raise damping",
    SolveOutcome.STALLED: "the residual has stopped falling, because of rounding or an "
    "ill-conditioned operator: raise rtol or damping, or use float64",
    SolveOutcome.MAXITER: "more iterations are needed: raise maxiter, or use M='nystrom'",
}


def _warning(solution: Solution) -> str:
    """Return the text of the `ConvergenceWarning`."""
    failed = solution.outcome != SolveOutcome.CONVERGED
    advice = [text for outcome, text in _ADVICE.items() if outcome in solution.outcome]
    largest = solution.residual_norms[failed].max()
    return (
        f"hvp.solve: {int(failed.sum())} of {len(failed)} columns have not converged, with "
        f"residual norms up to {largest:.3g}; {'; '.join(advice)}"
    )
